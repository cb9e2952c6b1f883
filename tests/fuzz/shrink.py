"""Makes a program smaller, as long as it goes wrong in one way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.check import Outcome, check
from tests.fuzz.formulas import FORMULAS
from tests.fuzz.functions import FunctionSpec
from tests.fuzz.infer import Scope, types_of
from tests.fuzz.program import Block, Call, Options, Program, Statement, Wrap, names_read
from tests.fuzz.types import IllTypedError

_SIMPLE_FORMULAS = ("round", "square", "exp", "mul", "split")
_SIMPLE_MEASURES = ("value", "grad", "jvp", "grad of grad", "value_and_grad")


def shrink(
    program: Program, outcome: Outcome, seconds: float, checked: Callable[[Program], Outcome] = check
) -> Program:
    """The smallest program found in this time for which `checked` returns what it does for `program`."""
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


def _has_types(program: Program) -> bool:
    try:
        types_of(program)
    except IllTypedError:
        return False
    return bool(program.functions)


def simpler(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one respect, those first that are much simpler. Some mean nothing."""
    for result in program.block.results if len(program.block.results) > 1 else ():
        yield replace(program, block=replace(program.block, results=(result,)))
    for block in _with_simpler_block(program.block, types_of(program)):
        yield _without_unused_arguments(replace(program, block=block))
    yield _without_unused_arguments(program)
    yield from _with_simpler_measure(program)
    for spec in program.functions:
        for simple in filter(FunctionSpec.is_possible, _simpler_specs(spec)):
            yield replace(program, block=_with_function(program.block, spec, simple))
    yield from _with_smaller_arguments(program)


def _set(items: tuple[Any, ...], i: int, *values: Any) -> tuple[Any, ...]:
    """The items with these instead of one of them."""
    return (*items[:i], *values, *items[i + 1 :])


def _with_simpler_block(block: Block, scope: Scope) -> Iterator[Block]:
    """A statement less, a transformation less, or one that is set more plainly."""
    for i, statement in enumerate(block.statements):
        yield from _without(block, i, scope)
        if isinstance(statement, Wrap):
            yield _inlined(block, statement, i)
            for simple in _simpler_wraps(statement):
                yield replace(block, statements=_set(block.statements, i, simple))
    for i, statement in enumerate(block.statements):
        if isinstance(statement, Wrap):
            for inner in _with_simpler_block(statement.block, scope):
                yield replace(block, statements=_set(block.statements, i, replace(statement, block=inner)))


def _without(block: Block, i: int, scope: Scope) -> Iterator[Block]:
    """The block without a statement: its results are dropped or replaced.

    A result is replaced by a value of its type, if there is one, and otherwise by an input of the statement.
    """
    removed = block.statements[i]
    rest = replace(block, statements=_set(block.statements, i))
    remaining = tuple(name for name in rest.results if name not in removed.outputs)
    if remaining and len(remaining) < len(rest.results):
        yield replace(rest, results=remaining)
    earlier = [*removed.inputs, *block.parameters, *(n for s in block.statements[:i] for n in s.outputs)]
    names: dict[str, str] = {}
    for output in removed.outputs:
        wanted = scope[output].shape, scope[output].dtype
        fitting = [name for name in earlier if (scope[name].shape, scope[name].dtype) == wanted]
        names[output] = [*fitting, *removed.inputs][0]
    yield _renamed(rest, names)


def _inlined(block: Block, wrap: Wrap, i: int) -> Block:
    """The block with a transformation's block instead of its call."""
    inner = _renamed(wrap.block, dict(zip(wrap.block.parameters, wrap.inputs, strict=True)))
    spliced = replace(block, statements=_set(block.statements, i, *inner.statements))
    return _renamed(spliced, dict(zip(wrap.outputs, inner.results, strict=False)))


def _simpler_wraps(wrap: Wrap) -> Iterator[Wrap]:
    """The transformation with fewer inputs or results, or with simpler options."""
    options, block = wrap.options, wrap.block
    used = names_read(*block.statements).union(block.results)
    for i, parameter in enumerate(block.parameters):
        if len(wrap.inputs) > 1 and parameter not in used:
            fewer = replace(block, parameters=_set(block.parameters, i))
            axes = replace(options, in_axes=_set(options.in_axes, i))
            yield replace(wrap, inputs=_set(wrap.inputs, i), block=fewer, options=axes)
    for i in range(len(wrap.outputs) if len(wrap.outputs) > 1 and wrap.kind != "scan" else 0):
        fewer = replace(block, results=_set(block.results, i))
        axes = replace(options, out_axes=_set(options.out_axes, i))
        yield replace(wrap, outputs=_set(wrap.outputs, i), block=fewer, options=axes)
    for simple in _simpler_options(wrap.kind, options):
        yield replace(wrap, options=simple)


def _simpler_options(kind: str, options: Options) -> Iterator[Options]:
    for i, axis in enumerate(options.in_axes):
        for simple in _simpler_axes(axis):
            yield replace(options, in_axes=_set(options.in_axes, i, simple))
    for i, axis in enumerate(options.out_axes):
        for simple in _simpler_axes(axis):
            yield replace(options, out_axes=_set(options.out_axes, i, simple))
    if options.policy != "none":
        yield replace(options, policy="none")
    if options.length > 1 and kind in ("fori", "while"):
        yield replace(options, length=1)
    if options.devices > 2:
        yield replace(options, devices=2)


def _simpler_axes(axis: int | None) -> range:
    return range(3 if axis is not None and axis < 0 else axis or 0)


def _with_simpler_measure(program: Program) -> Iterator[Program]:
    measure = program.measure
    simple = [replace(measure, is_jitted=False)]
    if not program.stateful:
        rank = [*_SIMPLE_MEASURES, measure.name].index(measure.name)
        has_forward_mode = all(spec.has_forward_mode for spec in program.functions)
        names = [name for name in _SIMPLE_MEASURES[:rank] if name != "jvp" or has_forward_mode]
        simple += [replace(measure, name=name) for name in names]
    simple += [replace(measure, argnums=(i,)) for i in measure.argnums]
    for other in simple:
        yield replace(program, measure=other)


def _simpler_specs(spec: FunctionSpec) -> Iterator[FunctionSpec]:
    plain = FunctionSpec(spec.formula, spec.saving)
    yield plain
    for field in fields(spec):
        yield replace(spec, **{field.name: getattr(plain, field.name)})
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
            yield replace(program, arguments=_set(arguments, i, replace(argument, dtype="float32")))


def _without_unused_arguments(program: Program) -> Program:
    """The program without the arguments that it neither reads nor differentiates, unless these would be none."""
    read = names_read(*program.block.statements).union(program.block.results)
    remaining = [i for i in range(len(program.arguments)) if f"x{i}" in read]
    argnums = tuple(remaining.index(i) for i in program.measure.argnums if i in remaining)
    if not argnums or len(remaining) == len(program.arguments):
        return program
    block = _renamed(program.block, {f"x{old}": f"x{new}" for new, old in enumerate(remaining)})
    block = replace(block, parameters=tuple(f"x{i}" for i in range(len(remaining))))
    measure = replace(program.measure, argnums=argnums)
    return replace(program, arguments=tuple(program.arguments[i] for i in remaining), block=block, measure=measure)


def _renamed(block: Block, names: dict[str, str]) -> Block:
    """The block with other names for what it reads."""

    def renamed(read: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in read)

    statements: list[Statement] = []
    for statement in block.statements:
        statement = replace(statement, inputs=renamed(statement.inputs))
        if isinstance(statement, Wrap):
            statement = replace(statement, block=_renamed(statement.block, names))
        elif isinstance(statement, Call):
            statement = replace(statement, closed=renamed(statement.closed))
        statements.append(statement)
    return replace(block, statements=tuple(statements), results=renamed(block.results))


def _with_function(block: Block, old: FunctionSpec, new: FunctionSpec) -> Block:
    statements: list[Statement] = []
    for statement in block.statements:
        if isinstance(statement, Call) and statement.function == old:
            statement = replace(statement, function=new)
        elif isinstance(statement, Wrap):
            statement = replace(statement, block=_with_function(statement.block, old, new))
        statements.append(statement)
    return replace(block, statements=tuple(statements))
