"""The types of everything in a program, or that it means nothing."""

from __future__ import annotations

from collections.abc import Sequence

from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import Argument, Block, Call, Operation, Options, Program, Statement, Wrap
from tests.fuzz.types import LARGEST, Type, all_batches, demand

Scope = dict[str, Type]


def types_of_arguments(arguments: Sequence[Argument]) -> Scope:
    """The types of the parameters of a program."""
    return {f"x{i}": Type(a.shape, a.dtype) for i, a in enumerate(arguments)}


def types_of(program: Program) -> Scope:
    """The type of every name in a program; `IllTypedError` where it means nothing."""
    scope = types_of_arguments(program.arguments)
    infer_block(program.block, [scope[name] for name in scope], scope)
    floats = [i for i in program.measure.argnums if scope[f"x{i}"].is_float]
    demand(len(floats) == len(program.measure.argnums) > 0)
    demand(any(scope[name].is_float for name in program.block.results))
    return scope


def infer_block(block: Block, types: Sequence[Type], scope: Scope) -> list[Type]:
    """The types of a block's results; adds those of all its names to the scope."""
    demand(len(types) == len(block.parameters))
    scope.update(zip(block.parameters, types, strict=True))
    for statement in block.statements:
        infer(statement, scope)
    return [_look_up(name, scope) for name in block.results]


def infer(statement: Statement, scope: Scope) -> None:
    """Adds the types of a statement's outputs, and of what is inside it, to the scope."""
    types = [_look_up(name, scope) for name in statement.inputs]
    if isinstance(statement, Operation):
        primitive = OPERATIONS[statement.name]
        demand(len(types) == primitive.arity)
        outputs = [primitive.type_of(*types)]
    elif isinstance(statement, Call):
        outputs = _called(statement, types, [_look_up(name, scope) for name in statement.closed])
    else:
        outputs = _wrapped(statement, types, scope)
    demand(all(t.size <= LARGEST for t in outputs) and len(outputs) == len(statement.outputs))
    scope.update(zip(statement.outputs, outputs, strict=True))


def _look_up(name: str, scope: Scope) -> Type:
    demand(name in scope)
    return scope[name]


def _called(call: Call, types: list[Type], closed: list[Type]) -> list[Type]:
    spec = call.function
    formula = spec.mathematics
    demand(len(types) == len(formula.parameters) and len(closed) == len(formula.closed))
    outputs = formula.types(*types, *closed)
    everything = all_batches(*types, *closed)
    if spec.vmap_rule or not formula.depends:
        return [Type(t.shape, t.dtype, everything) for t in outputs]
    return [
        Type(t.shape, t.dtype, all_batches(*(types[i] for i in positions)))
        for t, positions in zip(outputs, formula.depends, strict=True)
    ]


def parameter_types(kind: str, label: str, options: Options, types: Sequence[Type]) -> list[Type]:
    """The types of the parameters of a transformation's block."""
    if kind == "vmap":
        pairs = list(zip(types, options.in_axes, strict=True))
        demand(all(axis is None or -t.rank <= axis < t.rank for t, axis in pairs))
        demand(len({t.shape[axis] for t, axis in pairs if axis is not None}) == 1)
        return [t if axis is None else t.without_axis(axis).on(label) for t, axis in pairs]
    if kind in ("shard_map", "sharded jit"):
        shards = [_shard(t, axis, label, options.devices) for t, axis in zip(types, options.in_axes, strict=True)]
        return shards if kind == "shard_map" else list(types)
    if kind == "scan":
        demand(len(types) >= 2 and types[1].rank > 0 and types[0].is_float)
        return [types[0], types[1].without_axis(0), *types[2:]]
    if kind == "map":
        demand(len({t.shape[0] if t.rank else None for t in types}) == 1)
        return [t.without_axis(0) for t in types]
    if kind in ("fori", "while", "gradient", "pushed", "cond"):
        demand(types[0].is_float)
    return list(types)


def _shard(t: Type, axis: int | None, label: str, devices: int) -> Type:
    if axis is None:
        return t
    demand(t.rank > 0 and t.shape[0] % devices == 0 and axis == 0)
    return t.shaped((t.shape[0] // devices, *t.shape[1:])).on(label)


def _wrapped(wrap: Wrap, types: list[Type], scope: Scope) -> list[Type]:
    """The types of what a transformed block returns."""
    kind, options = wrap.kind, wrap.options
    results = infer_block(wrap.block, parameter_types(kind, wrap.label, options, types), scope)
    of_inputs, everything = all_batches(*types), all_batches(*types, *results)
    if kind == "vmap":
        demand(len(options.out_axes) == len(results))
        size = next(t.shape[a] for t, a in zip(types, options.in_axes, strict=True) if a is not None)
        pairs = list(zip(results, options.out_axes, strict=True))
        demand(all(axis is not None or wrap.label not in t.batches for t, axis in pairs))
        return [(t if axis is None else t.with_axis(axis, size)).off(wrap.label) for t, axis in pairs]
    if kind == "shard_map":
        return [_gathered(t, wrap.label, options.devices) for t in results]
    if kind in ("fori", "while", "scan"):
        demand(len(results) == (2 if kind == "scan" else 1))
        demand(results[0].shape == types[0].shape and results[0].dtype == types[0].dtype)
        stacked = [t.with_axis(0, types[1].shape[0]) for t in results[1:]]
        return [t.on(*everything) for t in (types[0], *stacked)]
    if kind == "map":
        return [t.with_axis(0, types[0].shape[0]).on(*of_inputs) for t in results]
    if kind == "cond":
        return [t.on(*everything) for t in results]
    if kind == "gradient":
        demand(any(t.is_float for t in results))
        return [types[0].on(*everything)]
    if kind == "pushed":
        demand(all(t.is_float for t in results))
        return [t.on(*of_inputs) for t in results]
    return results


def _gathered(t: Type, label: str, devices: int) -> Type:
    if t.rank and label in t.batches:
        t = t.shaped((t.shape[0] * devices, *t.shape[1:]))
    return t.off(label)
