"""A computation on parts of arrays, as one operation that has a derivative and a batching rule.

    partition(compute, layout, arrays)   `compute` on the part of each device, and sums that the layout asks for

Under Explicit axes the parts are those of the arrays' types, and the operation is a `shard_map`. Under Auto axes Shardy
decides, and it is a `custom_partitioning`. Neither is ever differentiated or batched by JAX:

    its tangents     `partition` of compute's `jvp`; a tangent is split as its primal
    its cotangents   `partition` of compute's `vjp`: a cotangent is split as its primal, and summed over the axes of the
                     factors that its primal lacks
    a batch          `partition` of the mapped computation; the batch is one more factor

So at every order the collectives are those that the layout says, in both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxfn._mesh_types import match_cotangents
from jaxfn._primitives import LinearMap, bind_linear_map
from jaxfn._sharding_rule import Factors
from jaxfn._traces import innermost, is_concrete, is_staged, manual_axes_here
from jaxfn._tree import is_inexact, is_key, is_traced, replace_at

Axes: TypeAlias = tuple[str, ...]
FactorAxes: TypeAlias = Mapping[str, Axes]
"""The mesh axes over which factors are split."""
Compute: TypeAlias = Callable[[FactorAxes, Sequence[Any]], list[Any]]


class Layout(NamedTuple):
    """The partitioning of a computation.

    Attributes:
      name: The Function, in errors.
      operands, results: The factors of each array.
      summed: The factors over whose axes the parts of results without them are added up.
      labels: What errors call the operands, if anything.
      result_labels: What checks call the results; a computation without it is not checked.
      like: Types of results whose sharding says over which axes a factor is split that no operand has.
    """

    name: str
    operands: Sequence[Factors]
    results: Sequence[Factors]
    summed: Iterable[str]
    labels: Sequence[str] = ()
    result_labels: Sequence[str] = ()
    like: Sequence[tuple[Factors, Any]] = ()

    def label(self, index: int) -> str:
        """Returns what errors call an operand."""
        return self.labels[index] if index < len(self.labels) else "an array"

    def derived(self, operands: Sequence[Factors], results: Sequence[Factors], summed: Iterable[str]) -> Layout:
        """Returns the layout of a derivative."""
        return Layout(self.name, operands, results, summed, like=self.like)


@dataclass(eq=False)
class PartitionRecord:
    """The partitioned computations of a program that runs on one device, with their whole arrays and results."""

    computations: list[tuple[Compute, Layout, Sequence[Any], Sequence[Any]]] = field(default_factory=list[Any])


RECORD: Any = jax.make_user_context(default_value=None)
"""Its `value` is the active `PartitionRecord` of a tool, if any: then a call on one device is one part."""

# Whether arrays are the parts of one device. A user context is part of the keys of JAX's caches.
_is_on_part: Any = jax.make_user_context(default_value=False)


def is_partitioned(arrays: Sequence[Any]) -> bool:
    """Whether a call of these arrays is partitioned: they may be on several devices, or a tool looks at its parts."""
    return not (manual_axes_here() or _is_on_part.value) and (RECORD.value is not None or _may_be_spread(arrays))


def _may_be_spread(arrays: Sequence[Any]) -> bool:
    """Whether some arrays are on several devices, or may be so once their program is compiled."""
    avals = list(map(jax.typeof, arrays))
    if jax.device_count() == 1 or any(map(_is_split, avals)):
        return jax.device_count() > 1
    meshes = [jax.sharding.get_abstract_mesh(), *(aval.sharding.mesh for aval in avals)]
    known = [mesh for mesh in meshes if not mesh.empty]
    if known and all(set(mesh.explicit_axes) == set(mesh.axis_names) for mesh in known):
        return False
    shardings = [getattr(innermost(x), "sharding", None) for x in arrays if is_concrete(x)]
    return len(shardings) < len(arrays) or any(s is not None and len(s.device_set) > 1 for s in shardings)


def _is_split(aval: Any) -> bool:
    explicit = aval.sharding.mesh.explicit_axes
    return any(axis in explicit for entry in aval.sharding.spec for axis in _axes_of(entry))


@contextlib.contextmanager
def on_part() -> Generator[None]:
    """Traces what is inside as inside `shard_map`: nothing is partitioned again, and types have no sharding."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = {} if mesh.manual_axes else dict.fromkeys(mesh.explicit_axes, AxisType.Manual)
    with _is_on_part(True), jax.sharding.use_abstract_mesh(mesh.update_axis_types(manual)) if manual else nullcontext():
        yield


def trace_whole(compute: Compute, arrays: Sequence[Any]) -> Any:
    """Returns the jaxpr of a computation on whole arrays."""
    with on_part():
        return jax.make_jaxpr(partial(compute, {}))([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays])


def partition(compute: Compute, layout: Layout, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates `compute(axes of factors, arrays)` on the part of each device; differentiable at every order."""

    @jax.custom_jvp
    def operation(*arrays: Any) -> list[Any]:
        return _evaluate(compute, layout, arrays)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        results = operation(*primals)
        perturbed = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero) and is_inexact(t.dtype)]
        moving = [i for i, x in enumerate(results) if is_inexact(x.dtype)]
        pushed: list[Any] = [SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in results]
        if perturbed and moving:
            avals = [jax.typeof(results[i]).to_tangent_aval() for i in moving]
            derivative = _PartitionedDerivative(compute, layout, perturbed, moving, avals)
            moved = bind_linear_map(derivative, primals, [tangents[i] for i in perturbed])
            pushed = replace_at(moving, pushed, moved)
        return results, pushed

    operation.defjvp(jvp, symbolic_zeros=True)
    return operation(*arrays)


@dataclass(eq=False)
class _PartitionedDerivative(LinearMap):
    """The derivative of a partitioned computation: itself partitioned, in both directions.

    Attributes:
      compute, layout: The computation.
      perturbed: The indices of the operands that have a tangent.
      moving: Those of the results that have one.
      avals: The types of these tangents.
    """

    compute: Compute
    layout: Layout
    perturbed: list[int]
    moving: list[int]
    avals: Sequence[Any]

    def __repr__(self) -> str:
        return self.layout.name

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        layout = self.layout

        def pushed(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
            function, values = self._function(axes, arrays, self.moving)
            return jax.jvp(function, values, list(arrays[len(residuals) :]))[1]

        operands = [*layout.operands, *(layout.operands[i] for i in self.perturbed)]
        own = layout.derived(operands, [layout.results[i] for i in self.moving], layout.summed)
        return partition(pushed, own, [*residuals, *tangents])

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        layout, present = self.layout, [i for i, ct in zip(self.moving, cotangents, strict=True) if ct is not None]
        every = {factor for factors in (*layout.operands, *layout.results) for factor in factors if factor}

        def pulled(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
            function, values = self._function(axes, arrays, present)
            # A result that is equal on all parts is one result: each part has its share in the cotangent.
            shares = [num_parts(axes, every.difference(layout.results[i], layout.summed)) for i in present]
            cts = [ct / n if n > 1 else ct for ct, n in zip(arrays[len(residuals) :], shares, strict=True)]
            return list(jax.vjp(function, *values)[1](cts))

        operands = [*layout.operands, *(layout.results[i] for i in present)]
        own = layout.derived(operands, [layout.operands[i] for i in self.perturbed], every)
        gradients = partition(pulled, own, [*residuals, *(ct for ct in cotangents if ct is not None)])
        return match_cotangents(gradients, [jax.typeof(residuals[i]) for i in self.perturbed])

    def _function(
        self, axes: FactorAxes, arrays: Sequence[Any], wanted: Sequence[int]
    ) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Returns the wanted results as a function of the perturbed operands, and these."""
        primals = list(arrays[: len(self.layout.operands)])

        def function(*values: Any) -> list[Any]:
            results = self.compute(axes, replace_at(self.perturbed, primals, values))
            return [results[i] for i in wanted]

        return function, [primals[i] for i in self.perturbed]


def num_parts(axes: FactorAxes, factors: Iterable[str]) -> int:
    """Returns into how many parts factors are split."""
    return math.prod(jax.lax.axis_size(axis) for factor in factors for axis in axes.get(factor, ()))


def _evaluate(compute: Compute, layout: Layout, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates the computation, without a derivative; a batch is one more factor."""
    if RECORD.value is not None and not _may_be_spread(arrays):
        with _is_on_part(True):
            results = compute({}, arrays)
        if layout.result_labels and not any(map(is_traced, arrays)):
            RECORD.value.computations.append((compute, layout, arrays, results))
        return results

    @custom_vmap
    def operation(*arrays: Any) -> list[Any]:
        types = [*zip(layout.operands, map(jax.typeof, arrays), strict=True), *layout.like]
        is_explicit = any(_is_split(aval) for _, aval in types)
        mechanism = partial(_by_shard_map, types) if is_explicit else _by_custom_partitioning
        return mechanism(compute, layout, arrays)

    @operation.def_vmap
    def _(_: int, batched: Sequence[bool], *arrays: Any) -> tuple[list[Any], list[bool]]:
        batch = f"batch of vmap {sum(f.startswith('batch of vmap') for f in set(chain(*layout.operands)))}"
        operands = [(batch, *fs) if b else fs for fs, b in zip(layout.operands, batched, strict=True)]
        own = layout._replace(operands=operands, results=[(batch, *fs) for fs in layout.results])

        def mapped(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
            return jax.vmap(partial(compute, axes), [[0 if b else None for b in batched]])(list(arrays))

        return _evaluate(mapped, own, arrays), [True] * len(layout.results)

    # Neither mechanism partitions an operation that is not compiled.
    return operation(*arrays) if any(map(is_staged, arrays)) else jax.jit(operation)(*arrays)


def _on_parts(compute: Compute, layout: Layout, axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates the computation on the parts of one device, and adds up what the layout says."""
    with on_part():
        results = compute(axes, arrays)
    summed = {factor: own for factor, own in axes.items() if factor in layout.summed}
    over = [tuple(a for f, own in summed.items() if f not in factors for a in own) for factors in layout.results]
    return [jax.lax.psum(x, axes) if axes else x for x, axes in zip(results, over, strict=True)]


def _spec(axes: FactorAxes, factors: Factors) -> PartitionSpec:
    return PartitionSpec(*(axes.get(factor) or None for factor in factors))


def _axes_of(entry: Any) -> Axes:
    """Returns the mesh axes of one dimension in a `PartitionSpec`."""
    return entry if isinstance(entry, tuple) else () if entry in (None, PartitionSpec.UNCONSTRAINED) else (entry,)


def _axes_of_factors(layout: Layout, arrays: Sequence[tuple[Factors, Any]], *, is_strict: bool) -> dict[str, Axes]:
    """Returns the axes over which factors are split, from arrays with a sharding: what the first says.

    Where another says something else, which would split a factor in two ways or two factors over one axis, it raises if
    `is_strict`.
    """
    found: dict[str, tuple[Axes, str]] = {}
    for index, (factors, array) in enumerate(arrays):
        label, mesh = layout.label(index), array.sharding.mesh
        for factor, size, axes in zip(factors, array.shape, map(_axes_of, array.sharding.spec), strict=False):
            if not (axes and factor):
                continue
            known = ((f, own) for f, (own, _) in found.items())
            clash = next((f for f, own in known if (own != axes if f == factor else set(own) & set(axes))), None)
            parts = math.prod(mesh.shape[axis] for axis in axes)
            if clash is None and size % parts:
                raise ValueError(
                    f"{layout.name}: {_text(axes)} of size {parts} does not divide factor {factor!r} of {label}, which "
                    f"has size {size}. Pad it, or write {factor!r} into need_replication_factors."
                )
            if clash is None:
                found[factor] = axes, label
            elif is_strict:
                others, other_label = found[clash]
                raise ValueError(
                    f"{layout.name}: {_text(axes)} splits factor {factor!r} of {label}, and {_text(others)} factor "
                    f"{clash!r} of {other_label}. A factor is split over the same axes everywhere, and an axis splits "
                    "one factor: reshard one of them with jax.sharding.reshard."
                )
    return {factor: axes for factor, (axes, _) in found.items()}


def _text(axes: Axes) -> str:
    return f"mesh ax{'i' if len(axes) == 1 else 'e'}s {', '.join(map(repr, axes))}"


def _by_shard_map(
    types: Sequence[tuple[Factors, Any]], compute: Compute, layout: Layout, arrays: Sequence[Any]
) -> list[Any]:
    """Evaluates the computation over Explicit axes, which the types name."""
    mesh = next(aval.sharding.mesh for _, aval in types if _is_split(aval))
    axes = _axes_of_factors(layout, types, is_strict=True)
    specs = [_spec(axes, factors) for factors in layout.operands]
    placed = [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    return jax.shard_map(
        partial(_on_parts, compute, layout, axes),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=[_spec(axes, factors) for factors in layout.results],
        axis_names=set(mesh.explicit_axes) if mesh.auto_axes else set(),
        check_vma=False,
    )(placed)


def _by_custom_partitioning(compute: Compute, layout: Layout, arrays: Sequence[Any]) -> list[Any]:
    """Evaluates the computation over Auto axes, which Shardy splits."""
    impls = [jax.random.key_impl(x) if is_key(x) else None for x in arrays]
    if any(impls):  # custom_partitioning takes the data of random keys, with a further dimension

        def with_keys(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
            pairs = zip(arrays, impls, strict=True)
            return compute(axes, [jax.random.wrap_key_data(x, impl=impl) if impl else x for x, impl in pairs])

        operands = [(*fs, "") if impl else fs for fs, impl in zip(layout.operands, impls, strict=True)]
        data = [jax.random.key_data(x) if impl else x for x, impl in zip(arrays, impls, strict=True)]
        return _by_custom_partitioning(with_keys, layout._replace(operands=operands), data)
    jaxpr = trace_whole(compute, arrays)
    count, consts = len(arrays), jaxpr.consts  # which custom_partitioning takes as operands alone
    operands = [*layout.operands, *(("",) * x.ndim for x in consts)]

    def whole(arrays: Sequence[Any]) -> list[Any]:
        return eval_jaxpr(jaxpr.jaxpr, list(arrays[count:]), *arrays[:count])

    def split(mesh: Any, args: Any, results: Any) -> tuple[Any, Any, list[Any], tuple[list[Any]]]:
        (args,) = args
        shardings = [x.sharding for x in (*args, *results)]
        if not all(hasattr(sharding, "spec") for sharding in shardings):  # no mesh is known
            if all(sharding.is_fully_replicated for sharding in shardings):
                return mesh, whole, [x.sharding for x in results], ([x.sharding for x in args],)
            raise NotImplementedError(
                f"{layout.name}: its arrays are split without a mesh. Call it under jax.set_mesh(mesh)."
            )
        pairs = [*zip(operands, args, strict=True), *zip(layout.results, results, strict=True)]
        axes = _axes_of_factors(layout, pairs, is_strict=False)

        def on_parts(arrays: Sequence[Any]) -> list[Any]:
            return _on_parts(compute, layout, axes, arrays[:count])

        placed, results = ([NamedSharding(mesh, _spec(axes, fs)) for fs in side] for side in (operands, layout.results))
        return mesh, on_parts, results, (placed,)

    operation = custom_partitioning(whole)
    operation.def_partition(split, sharding_rule=_rule_for_shardy(layout, operands))
    return operation([*arrays, *consts])


def _rule_for_shardy(layout: Layout, operands: Sequence[Factors]) -> SdyShardingRule:
    names: dict[str, str] = {}

    def mapping(factors: Factors) -> ArrayMapping:
        # A dimension without a factor gets a separate one.
        keys = [factor or f" {len(names)} {i}" for i, factor in enumerate(factors)]
        return ArrayMapping(*(names.setdefault(key, f"f{len(names)}") for key in keys))

    mappings = [tuple(map(mapping, side)) for side in (operands, layout.results)]
    reduced = [names[f] for f in names if f in layout.summed and f not in chain(*layout.results)]
    whole = [name for key, name in names.items() if key.startswith(" ")]
    return SdyShardingRule(*mappings, reduction_factors=tuple(reduced), need_replication_factors=tuple(whole))
