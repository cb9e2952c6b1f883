"""A program drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tests.fuzz.formulas import FORMULAS, PURE, STATEFUL
from tests.fuzz.functions import MODES, SAVE_STYLES, STYLES, VMAP_RULES, FunctionSpec
from tests.fuzz.infer import Scope, infer, parameter_types, types_of, types_of_arguments
from tests.fuzz.measures import LINEAR_MEASURES, MEASURES
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import (
    Argument,
    Block,
    Call,
    Measure,
    Operation,
    Options,
    Program,
    Statement,
    Wrap,
    walk,
)
from tests.fuzz.source import POLICIES
from tests.fuzz.types import IllTypedError

_ATTEMPTS = 12
_WRAPS = {
    "jit": 4, "checkpoint": 4, "vmap": 8, "scan": 3, "map": 1, "cond": 2, "fori": 1, "while": 0.4, "shard_map": 0.8,
    "sharded jit": 0.5, "gradient": 1, "pushed": 0.7,
}  # fmt: skip
_LINEAR_WRAPS = {"jit": 4, "checkpoint": 1, "vmap": 5, "scan": 2, "map": 1, "cond": 1, "fori": 1}
_FORWARD = ("both", "generated", "forward")


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    while True:
        try:
            program = _Drawing(rng).program()
            types_of(program)
            return program
        except IllTypedError:
            continue


class _Drawing:
    """One program being drawn: the settings that all of it shares, and names that are not used yet."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._count = 0
        self._stateful = rng.random() < 0.07
        self._forward = not self._stateful and rng.random() < 0.4
        self._sizes = rng.sample([1, 2, 3, 4, 5], rng.choice([1, 2, 2])) + ([0] if rng.random() < 0.1 else [])
        self._devices = rng.choice([1, 2, 4, 8])
        self._specs: list[FunctionSpec] = []
        self._depth = rng.choice([0, 1, 1, 1, 2, 2, 3])

    def program(self) -> Program:
        """The whole, or `IllTypedError`."""
        rng = self._rng
        arguments = (self._argument("float32"),)
        if not self._stateful:
            kinds = ["float32"] * 5 + ["bfloat16", "int32"]
            arguments += tuple(self._argument(rng.choice(kinds)) for _ in range(rng.choice([0, 1, 1, 2])))
        parameters = tuple(f"x{i}" for i in range(len(arguments)))
        scope = types_of_arguments(arguments)
        statements = self._statements(scope, list(parameters), rng.randint(1, 4), self._depth)
        calls = [s for s in walk(Block((), tuple(statements), ())) if isinstance(s, Call)]
        if not calls:
            raise IllTypedError
        block = Block(parameters, tuple(statements), self._results(statements, scope, 3))
        return Program(arguments, block, self._measure(arguments, block), self._stateful)

    def _argument(self, dtype: str) -> Argument:
        rng = self._rng
        rank = rng.choice([0, 1, 2, 2, 2, 3]) if dtype != "int32" else rng.choice([1, 2])
        shape = [rng.choice(self._sizes) for _ in range(rank)]
        if shape and rng.random() < 0.15:
            shape[0] = self._devices
        return Argument(tuple(shape), dtype, rng.randrange(1000))

    def _measure(self, arguments: Sequence[Argument], block: Block) -> Measure:
        rng = self._rng
        if self._stateful:
            return Measure(rng.choice(LINEAR_MEASURES), (0,), rng.choice([False, True]))
        floats = [i for i, a in enumerate(arguments) if a.dtype != "int32"]
        argnums = tuple(sorted(rng.sample(floats, rng.randint(1, len(floats)))))
        wraps = {s.kind for s in walk(block) if isinstance(s, Wrap)}
        inner = bool(wraps & {"gradient", "pushed"})
        names = [
            name
            for name, derived in MEASURES.items()
            if (not derived.is_forward or self._forward)
            and not ("while" in wraps and derived.order and not (derived.is_forward and derived.order == 1))
            and not (inner and derived.order > 1 and rng.random() < 0.7)
        ]
        return Measure(rng.choice(names), argnums, rng.random() >= 0.08)

    def _name(self, letter: str = "v") -> str:
        self._count += 1
        return f"{letter}{self._count}"

    def _statements(self, scope: Scope, visible: list[str], count: int, depth: int) -> list[Statement]:
        """Statements that read visible names, and make further ones visible; their types are added to the scope."""
        statements = []
        for _ in range(count):
            statement = self._attempted(scope, visible, depth)
            if statement is not None:
                statements.append(statement)
                visible += statement.outputs
        return statements

    def _attempted(self, scope: Scope, visible: list[str], depth: int) -> Statement | None:
        rng = self._rng
        for _ in range(_ATTEMPTS):
            kind = rng.random()
            try:
                if depth and kind < 0.45:
                    return self._wrap(scope, visible, depth - 1)
                statement = self._call(visible) if kind < 0.8 else self._operation(visible)
                infer(statement, scope)
                return statement
            except IllTypedError:
                continue
        return None

    def _pick(self, visible: Sequence[str], count: int) -> tuple[str, ...]:
        """Names, later ones more often."""
        return tuple(visible[max(self._rng.randrange(len(visible)) for _ in range(2))] for _ in range(count))

    def _operation(self, visible: Sequence[str]) -> Operation:
        names = [n for n, p in OPERATIONS.items() if p.is_linear] if self._stateful else list(OPERATIONS)
        name = self._rng.choice(names)
        return Operation(name, self._pick(visible, OPERATIONS[name].arity), self._name())

    def _call(self, visible: Sequence[str]) -> Call:
        rng = self._rng
        spec = rng.choice(self._specs) if self._specs and rng.random() < 0.3 else self._spec()
        formula = spec.mathematics
        inputs = self._pick(visible, len(formula.parameters))
        outputs = tuple(self._name() for _ in formula.outputs)
        self._specs.append(spec)
        return Call(spec, inputs, outputs, self._pick(visible, len(formula.closed)))

    def _spec(self) -> FunctionSpec:
        rng = self._rng
        while True:
            formula = FORMULAS[rng.choice(STATEFUL if self._stateful else PURE)]
            modes = MODES if not self._forward else _FORWARD
            spec = FunctionSpec(
                formula.name,
                rng.choice(list(formula.savings)),
                rng.choice(STYLES),
                rng.choice(SAVE_STYLES),
                rng.choice(modes) if self._forward else rng.choices(modes, [6, 1, 1, 1])[0],
                guards=rng.random() < 0.3,
                saves_needed=rng.random() < 0.4,
                materialize=rng.random() < 0.8,
                vmap_rule=rng.choice(VMAP_RULES) if rng.random() < 0.5 else "",
                packed=rng.random() < 0.1,
                passes_statics=rng.random() < 0.3,
            )
            if spec.is_possible():
                return spec

    def _wrap(self, scope: Scope, visible: list[str], depth: int) -> Wrap:
        """A transformation of a block, whose types are added to the scope."""
        rng = self._rng
        weights = dict(_LINEAR_WRAPS if self._stateful else _WRAPS)
        if not self._forward:
            weights.pop("pushed", None)
        kind = rng.choices(list(weights), list(weights.values()))[0]
        label = self._name("b")
        count = 2 if kind == "scan" else 1
        inputs = self._pick(visible, rng.randint(count, 3))
        if self._stateful and kind == "scan":
            inputs = inputs[:2]
        options = self._options(kind, [scope[name].shape for name in inputs])
        types = parameter_types(kind, label, options, [scope[name] for name in inputs])
        parameters = tuple(self._name("p") for _ in inputs)
        inner = dict(scope) | dict(zip(parameters, types, strict=True))
        closes = kind not in ("shard_map", "sharded jit") and rng.random() < 0.35
        seen = [*(visible if closes else ()), *parameters]
        statements = self._statements(inner, seen, rng.randint(1, 3), depth)
        if not statements:
            raise IllTypedError
        results = self._results(statements, inner, 3)
        if kind in ("fori", "while", "scan"):
            carried = self._like(parameters[0], seen, inner)
            results = (carried, results[-1]) if kind == "scan" else (carried,)
        if kind == "vmap":
            # A Function under vmap batches each floating output (row E1c), whatever it depends on.
            may_be_batched = [label in inner[r].batches or inner[r].is_float for r in results]
            axes = [self._out_axis(inner[r].rank, b) for r, b in zip(results, may_be_batched, strict=True)]
            options = Options(in_axes=options.in_axes, out_axes=tuple(axes))
        outputs = 1 if kind == "gradient" else len(results)
        names = tuple(self._name() for _ in range(outputs))
        wrap = Wrap(kind, label, Block(parameters, tuple(statements), results), inputs, names, options)
        infer(wrap, scope)
        return wrap

    def _options(self, kind: str, shapes: Sequence[tuple[int, ...]]) -> Options:
        rng = self._rng
        if kind == "vmap":
            return Options(in_axes=self._in_axes(shapes))
        if kind in ("shard_map", "sharded jit"):
            fits = [0 if s and s[0] % self._devices == 0 and rng.random() < 0.8 else None for s in shapes]
            return Options(in_axes=tuple(fits), devices=self._devices, check_vma=rng.random() < 0.5)
        return Options(policy=rng.choice(list(POLICIES)), length=rng.choice([1, 2, 3]))

    def _in_axes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int | None, ...]:
        """An axis of one size of every input that has one, or `None`."""
        rng = self._rng
        sizes = [size for shape in shapes for size in shape]
        if not sizes:
            raise IllTypedError
        size = rng.choice(sizes)
        axes: list[int | None] = []
        for shape in shapes:
            fitting = [i for i, s in enumerate(shape) if s == size]
            axis = rng.choice(fitting) if fitting and rng.random() < 0.75 else None
            axes.append(axis - len(shape) if axis is not None and rng.random() < 0.3 else axis)
        return tuple(axes)

    def _out_axis(self, rank: int, batched: bool) -> int | None:
        rng = self._rng
        if not batched and rng.random() < 0.7:
            return None
        return 0 if rng.random() < 0.4 else rng.randint(-rank - 1, rank)

    def _results(self, statements: Sequence[Statement], scope: Scope, most: int) -> tuple[str, ...]:
        """Chooses some outputs of the statements, among them their last float."""
        assigned = [name for statement in statements for name in statement.outputs]
        floats = [name for name in assigned if scope[name].is_float]
        if not floats:
            raise IllTypedError
        others = [] if self._stateful else [name for name in assigned if name != floats[-1]]
        others = others or floats[:-1]
        return (*self._rng.sample(others, self._rng.randint(0, min(len(others), most - 1))), floats[-1])

    def _like(self, carry: str, visible: Sequence[str], scope: Scope) -> str:
        """A name of the carry's type, the last one."""
        wanted = scope[carry].shape, scope[carry].dtype
        return [name for name in visible if name in scope and (scope[name].shape, scope[name].dtype) == wanted][-1]
