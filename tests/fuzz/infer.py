"""The types of everything in a program, or that it means nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import Block, Call, Operation, Options, Program, Statement, Wrap
from tests.fuzz.types import LARGEST, IllTypedError, Type, all_batches, demand

Scope = dict[str, Type]


def types_of(program: Program) -> Scope:
    """The type of every name in a program; `IllTypedError` where it means nothing."""
    scope = {f"x{i}": Type(a.shape, a.dtype) for i, a in enumerate(program.arguments)}
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
    """What the block of a transformation is given."""
    if kind == "vmap":
        sizes = {t.shape[axis] for t, axis in zip(types, options.in_axes, strict=True) if _has_axis(t, axis)}
        demand(len(sizes) == 1)
        return [t if a is None else t.without_axis(a).on(label) for t, a in zip(types, options.in_axes, strict=True)]
    if kind == "shard_map":
        return [_shard(t, axis, label, options.devices) for t, axis in zip(types, options.in_axes, strict=True)]
    if kind == "sharded jit":
        for t, axis in zip(types, options.in_axes, strict=True):
            _shard(t, axis, label, options.devices)
    if kind == "scan":
        demand(len(types) >= 2 and types[1].rank > 0 and types[0].is_float)
        return [types[0], types[1].without_axis(0), *types[2:]]
    if kind == "map":
        demand(len({t.shape[0] if t.rank else None for t in types}) == 1)
        return [t.without_axis(0) for t in types]
    if kind in ("fori", "while", "gradient", "pushed", "cond"):
        demand(types[0].is_float)
    return list(types)


def _has_axis(t: Type, axis: int | None) -> bool:
    demand(axis is None or -t.rank <= axis < t.rank)
    return axis is not None


def _shard(t: Type, axis: int | None, label: str, devices: int) -> Type:
    if axis is None:
        return t
    demand(t.rank > 0 and t.shape[0] % devices == 0 and axis == 0)
    return t.shaped((t.shape[0] // devices, *t.shape[1:])).on(label)


def _wrapped(wrap: Wrap, types: list[Type], scope: Scope) -> list[Type]:
    given = parameter_types(wrap.kind, wrap.label, wrap.options, types)
    results = infer_block(wrap.block, given, scope)
    return _RESULTS.get(wrap.kind, _unchanged)(wrap, types, results)


def _unchanged(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    return results


def _of_vmap(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    axes = wrap.options.out_axes
    demand(len(axes) == len(results))
    size = next(t.shape[a] for t, a in zip(types, wrap.options.in_axes, strict=True) if a is not None)
    outputs = []
    for result, axis in zip(results, axes, strict=True):
        demand(axis is not None or wrap.label not in result.batches)
        outputs.append((result if axis is None else result.with_axis(axis, size)).off(wrap.label))
    return outputs


def _of_shard_map(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    outputs = []
    for result in results:
        if result.rank and wrap.label in result.batches:
            result = result.shaped((result.shape[0] * wrap.options.devices, *result.shape[1:]))
        outputs.append(result.off(wrap.label))
    return outputs


def _of_loop(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    demand(len(results) == 1)
    return [_carried(types, results)]


def _carried(types: list[Type], results: list[Type]) -> Type:
    demand(results[0].shape == types[0].shape and results[0].dtype == types[0].dtype)
    return Type(types[0].shape, types[0].dtype, all_batches(*types, *results))


def _of_scan(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    demand(len(results) == 2)
    carry = _carried(types, results)
    return [carry, results[1].with_axis(0, types[1].shape[0]).on(*carry.batches)]


def _of_map(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    return [t.with_axis(0, types[0].shape[0]).on(*all_batches(*types)) for t in results]


def _of_cond(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    everything = all_batches(*types, *results)
    return [t.on(*everything) for t in results]


def _of_gradient(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    demand(any(t.is_float for t in results))
    return [types[0].on(*all_batches(*types, *results))]


def _of_pushed(wrap: Wrap, types: list[Type], results: list[Type]) -> list[Type]:
    demand(all(t.is_float for t in results))
    return [t.on(*all_batches(*types)) for t in results]


_RESULTS: dict[str, Callable[[Wrap, list[Type], list[Type]], list[Type]]] = {
    "vmap": _of_vmap,
    "shard_map": _of_shard_map,
    "fori": _of_loop,
    "while": _of_loop,
    "scan": _of_scan,
    "map": _of_map,
    "cond": _of_cond,
    "gradient": _of_gradient,
    "pushed": _of_pushed,
}

__all__ = ["IllTypedError", "Scope", "infer", "infer_block", "parameter_types", "types_of"]
