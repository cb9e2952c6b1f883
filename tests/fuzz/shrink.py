"""Makes a program smaller, as long as the same goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.check import Outcome, check
from tests.fuzz.formulas import FORMULAS
from tests.fuzz.functions import FunctionSpec
from tests.fuzz.infer import Scope, types_of
from tests.fuzz.program import EAGER, Block, Call, Measure, Options, Program, Statement, Wrap, names_read
from tests.fuzz.types import IllTypedError

_SIMPLE_FORMULAS = ("round", "square", "exp", "mul", "split")
_SIMPLE_MEASURES = ("value", "grad", "jvp", "grad of grad", "value_and_grad")


def shrink(
    program: Program, outcome: Outcome, seconds: float, checked: Callable[[Program], Outcome] = check
) -> Program:
    """The smallest program found in this time of which `checked` says the same as of the program given."""
    deadline = time.monotonic() + seconds
    tried = {program}
    progress = True
    while progress:
        progress = False
        for smaller in simpler(program):
            if time.monotonic() > deadline:
                return program
            if smaller in tried or not _has_types(smaller):
                continue
            tried.add(smaller)
            if checked(smaller).sort == outcome.sort:
                program, progress = smaller, True
                break
    return program


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one respect, those first that are much simpler."""
    scope = types_of(program)
    for result in program.block.results if len(program.block.results) > 1 else ():
        yield replace(program, block=replace(program.block, results=(result,)))
    for block in _with_simpler_block(program.block, scope):
        yield _without_unused_arguments(replace(program, block=block))
    yield _without_unused_arguments(program)
    yield from _with_simpler_measure(program)
    yield from _with_simpler_functions(program)
    yield from _with_smaller_arguments(program)


def _has_types(program: Program) -> bool:
    try:
        types_of(program)
    except IllTypedError:
        return False
    return bool(program.functions)


def _with_simpler_block(block: Block, scope: Scope) -> Iterator[Block]:
    """A statement less, a transformation less, or one that is set more plainly."""
    for i, statement in enumerate(block.statements):
        yield from _without(block, i, scope)
        if isinstance(statement, Wrap):
            yield _inlined(block, i)
            for simple in _simpler_wraps(statement, scope):
                yield _replaced(block, i, simple)
    for i, statement in enumerate(block.statements):
        if isinstance(statement, Wrap):
            for inner in _with_simpler_block(statement.block, scope):
                yield _replaced(block, i, replace(statement, block=inner))


def _replaced(block: Block, i: int, *statements: Statement) -> Block:
    return replace(block, statements=(*block.statements[:i], *statements, *block.statements[i + 1 :]))


def _without(block: Block, i: int, scope: Scope) -> Iterator[Block]:
    """The block without a statement: results that it made are dropped, or something else stands for them.

    That is something of the same type, if there is, and otherwise what the statement read.
    """
    removed = block.statements[i]
    rest = _replaced(block, i)
    kept = tuple(name for name in rest.results if name not in removed.outputs)
    if kept and len(kept) < len(rest.results):
        yield replace(rest, results=kept)
    earlier = [*removed.inputs, *block.parameters, *(n for s in block.statements[:i] for n in s.outputs)]
    names: dict[str, str] = {}
    for output in removed.outputs:
        wanted = scope[output].shape, scope[output].dtype
        fitting = [name for name in earlier if (scope[name].shape, scope[name].dtype) == wanted]
        names[output] = [*fitting, *removed.inputs][0]
    yield _renamed(rest, names)


def _inlined(block: Block, i: int) -> Block:
    """The block with a transformation's block in place of the call of it."""
    wrap = block.statements[i]
    assert isinstance(wrap, Wrap)
    inner = _renamed(wrap.block, dict(zip(wrap.block.parameters, wrap.inputs, strict=True)))
    made = dict(zip(wrap.outputs, inner.results, strict=False))
    spliced = _replaced(block, i, *inner.statements)
    return _renamed(spliced, made)


def _simpler_wraps(wrap: Wrap, scope: Scope) -> Iterator[Wrap]:
    """The transformation with fewer inputs or results, or with simpler options."""
    options, block = wrap.options, wrap.block
    used = {name for s in block.statements for name in names_read(s)}.union(block.results)
    for i, parameter in enumerate(block.parameters):
        if len(wrap.inputs) > 1 and parameter not in used:
            axes = options.in_axes[:i] + options.in_axes[i + 1 :]
            fewer = replace(block, parameters=block.parameters[:i] + block.parameters[i + 1 :])
            inputs = wrap.inputs[:i] + wrap.inputs[i + 1 :]
            yield replace(wrap, inputs=inputs, block=fewer, options=replace(options, in_axes=axes))
    for i in range(len(wrap.outputs) if len(wrap.outputs) > 1 and wrap.kind != "scan" else 0):
        axes = options.out_axes[:i] + options.out_axes[i + 1 :]
        fewer = replace(block, results=block.results[:i] + block.results[i + 1 :])
        outputs = wrap.outputs[:i] + wrap.outputs[i + 1 :]
        yield replace(wrap, outputs=outputs, block=fewer, options=replace(options, out_axes=axes))
    for simple in _simpler_options(wrap.kind, options, scope, wrap.inputs):
        yield replace(wrap, options=simple)


def _simpler_options(kind: str, options: Options, scope: Scope, inputs: tuple[str, ...]) -> Iterator[Options]:
    for i, axis in enumerate(options.in_axes):
        for other in (0, None if axis is None else axis % max(1, scope[inputs[i]].rank)):
            if axis not in (0, other):
                yield replace(options, in_axes=(*options.in_axes[:i], other, *options.in_axes[i + 1 :]))
    for i, axis in enumerate(options.out_axes):
        for other in (0, 1):
            if axis not in (None, 0, other):
                yield replace(options, out_axes=(*options.out_axes[:i], other, *options.out_axes[i + 1 :]))
    if options.policy != "none":
        yield replace(options, policy="none")
    if options.length > 1 and kind in ("fori", "while"):
        yield replace(options, length=1)
    if options.devices > 2:
        yield replace(options, devices=2)


def _with_simpler_measure(program: Program) -> Iterator[Program]:
    measure = program.measure
    if measure.is_jitted:
        yield replace(program, measure=replace(measure, how=EAGER))
    if not program.stateful:
        before = _SIMPLE_MEASURES
        rank = before.index(measure.name) if measure.name in before else len(before)
        for name in before[:rank]:
            forward = all(spec.has_forward_mode for spec in program.functions)
            if name != "jvp" or forward:
                yield replace(program, measure=replace(measure, name=name))
    if len(measure.argnums) > 1:
        for i in measure.argnums:
            yield replace(program, measure=replace(measure, argnums=(i,)))


def _with_simpler_functions(program: Program) -> Iterator[Program]:
    for spec in program.functions:
        for simple in _simpler_specs(spec):
            if simple.is_possible():
                yield replace(program, block=_with_function(program.block, spec, simple))


def _simpler_specs(spec: FunctionSpec) -> Iterator[FunctionSpec]:
    plain = FunctionSpec(spec.formula, spec.saving)
    yield plain
    for name in ("style", "keeping", "modes", "guards", "materialize", "vmap_rule", "packed", "passes_statics"):
        yield replace(spec, **{name: getattr(plain, name)})
    formula = spec.mathematics
    if not formula.stateful and spec.formula not in _SIMPLE_FORMULAS:
        for name in _SIMPLE_FORMULAS:
            other = FORMULAS[name]
            if len(other.parameters) == len(formula.parameters) and len(other.outputs) == len(formula.outputs):
                for saving in other.savings:
                    yield replace(spec, formula=name, saving=saving)


def _with_smaller_arguments(program: Program) -> Iterator[Program]:
    arguments = program.arguments
    sizes = sorted({size for argument in arguments for size in argument.shape}, reverse=True)
    for size in sizes:
        for smaller in (2, 1, 3):
            if smaller not in sizes and (smaller < size or size == 0):
                shapes = [tuple(smaller if s == size else s for s in a.shape) for a in arguments]
                shrunk = tuple(replace(a, shape=shape) for a, shape in zip(arguments, shapes, strict=True))
                yield replace(program, arguments=shrunk)
    for i, argument in enumerate(arguments):
        if argument.dtype == "bfloat16":
            simple = replace(argument, dtype="float32")
            yield replace(program, arguments=(*arguments[:i], simple, *arguments[i + 1 :]))


def _without_unused_arguments(program: Program) -> Program:
    """The program without the arguments that it neither reads nor differentiates, unless these would be none."""
    read = {name for s in program.block.statements for name in names_read(s)}.union(program.block.results)
    kept = [i for i in range(len(program.arguments)) if f"x{i}" in read]
    argnums = tuple(kept.index(i) for i in program.measure.argnums if i in kept)
    if not argnums or len(kept) == len(program.arguments):
        return program
    names = {f"x{old}": f"x{new}" for new, old in enumerate(kept)}
    block = replace(program.block, parameters=tuple(f"x{i}" for i in kept))
    measure = Measure(program.measure.name, argnums, program.measure.how)
    arguments = tuple(program.arguments[i] for i in kept)
    return replace(program, arguments=arguments, block=_renamed(block, names, parameters=True), measure=measure)


def _renamed(block: Block, names: dict[str, str], parameters: bool = False) -> Block:
    """The block with other names for what it reads."""
    statements = tuple(_renamed_statement(s, names) for s in block.statements)
    own = _all(block.parameters, names) if parameters else block.parameters
    return Block(own, statements, _all(block.results, names))


def _renamed_statement(statement: Statement, names: dict[str, str]) -> Statement:
    inputs = _all(statement.inputs, names)
    if isinstance(statement, Wrap):
        return replace(statement, inputs=inputs, block=_renamed(statement.block, names))
    if isinstance(statement, Call):
        return replace(statement, inputs=inputs, closed=_all(statement.closed, names))
    return replace(statement, inputs=inputs)


def _all(read: tuple[str, ...], names: dict[str, str]) -> tuple[str, ...]:
    return tuple(names.get(name, name) for name in read)


def _with_function(block: Block, old: FunctionSpec, new: FunctionSpec) -> Block:
    statements: list[Statement] = []
    for statement in block.statements:
        if isinstance(statement, Call) and statement.function == old:
            statement = replace(statement, function=new)
        elif isinstance(statement, Wrap):
            statement = replace(statement, block=_with_function(statement.block, old, new))
        statements.append(statement)
    return replace(block, statements=tuple(statements))
