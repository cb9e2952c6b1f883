"""Three things that JAX's public custom derivatives lack.

`linear_map` applies a `LinearMap` to tangents, and transposes by its other method: the derivative of a Function that
has both `jvp` and `backward`. `tie` is an identity whose results all have the batch. `guard`, a `jax.custom_jvp`, is an
identity that raises where a derivative of its results is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
from jax.custom_derivatives import SymbolicZero

from jaxfn._compat import VmapAxis, make_identity, make_primitive, new_owner, zeros_of
from jaxfn._diagnostics import hide_own_frames
from jaxfn._jaxpr import identity_primitives, shares_batch, subjaxpr_rules, traced_impl
from jaxfn._mesh_types import pcast_like
from jaxfn._observe import LOGS, log_effects
from jaxfn._traces import is_ref
from jaxfn._tree import as_array, is_inexact, replace_at


def tie(arrays: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Returns the arrays; under `jax.vmap` each of floating dtype has the batch if a source has it.

    JAX sums the cotangent of an unbatched output over the batch before it calls a rule, so that per-element gradients
    would be lost. Nothing is needed for an array that depends on every source.
    """
    return [x if not is_inexact(x.dtype) or shares_batch(x, sources) else tie_p.bind(x, *sources)[0] for x in arrays]


def repeat_like(arrays: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Returns the arrays; under `jax.vmap` each has the batch at axis 0 if a source, or the value of a Ref, has it."""
    values = [x[...] if is_ref(x) else x for x in sources]
    return [tie_p.bind(x, *values)[0] for x in arrays]


def _batch_tie(axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], list[int]]:
    return tie_p.bind(axis.to_axis_0(operands[0], dims[0]), *operands[1:]), [0]


tie_p = make_identity("tie", _batch_tie)


class LinearMap:
    """A linear function of tangents that depends on residuals, and its transpose."""

    avals: Sequence[Any]
    """The types of its results."""

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Returns tangents of the outputs for tangents of the inputs."""
        raise NotImplementedError

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns cotangents of the inputs for cotangents of the outputs; `None` is zero."""
        raise NotImplementedError


class _BatchedLinearMap(LinearMap):
    """A linear map over a vmap axis: all tangents are batched at axis 0, or none is; residuals at any axis."""

    def __init__(
        self, linear_map: LinearMap, axis: VmapAxis, residual_dims: Sequence[int | None], out_axis: int | None
    ) -> None:
        self._linear_map = linear_map
        self._axis = axis
        self._in_axes = (list(residual_dims), out_axis)
        avals = linear_map.avals
        self.avals = avals if out_axis is None else list(map(axis.batched_aval, avals))

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return self._axis.vmap(self._linear_map.apply, self._in_axes)(list(residuals), list(tangents))

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        return self._axis.vmap(self._linear_map.transpose, self._in_axes)(list(residuals), list(cotangents))


def bind_linear_map(linear_map: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Applies a linear map to tangents, as one eqn that JAX may transpose."""
    return linear_map_p.bind(*residuals, *tangents, linear_map=linear_map, num_res=len(residuals), owner=new_owner())


def _evaluate_linear_map(*operands: Any, linear_map: LinearMap, num_res: int, owner: Any = None) -> list[Any]:
    arrays = [as_array(x) for x in operands]  # scalars may have become literals
    results = linear_map.apply(arrays[:num_res], arrays[num_res:])
    return [pcast_like(t, aval) for t, aval in zip(results, linear_map.avals, strict=True)]


def _linear_map_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear_map: LinearMap, num_res: int, owner: Any
) -> tuple[list[Any], Sequence[Any]]:
    residuals = primals[:num_res]
    results = bind_linear_map(linear_map, residuals, primals[num_res:])
    perturbed = [i for i, t in enumerate(tangents) if t is not None]
    if perturbed and perturbed[0] >= num_res:  # in the tangents it is linear
        moved = [
            zeros_of(jax.typeof(x).to_tangent_aval()) if t is None else t
            for x, t in zip(primals[num_res:], tangents[num_res:], strict=True)
        ]
        return results, bind_linear_map(linear_map, residuals, moved)

    def evaluate(*values: Any) -> list[Any]:
        return _evaluate_linear_map(*replace_at(perturbed, primals, values), linear_map=linear_map, num_res=num_res)

    return results, jax.jvp(evaluate, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])[1]


def _transpose_linear_map(
    cotangents: Sequence[Any], *operands: Any, linear_map: LinearMap, num_res: int, owner: Any
) -> list[jax.Array | None]:
    residuals = [as_array(x) for x in operands[:num_res]]
    pulled = linear_map.transpose(residuals, [None if ct is None else as_array(ct) for ct in cotangents])
    return [*[None] * num_res, *pulled]


def _batch_linear_map(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, linear_map: LinearMap, num_res: int, owner: Any
) -> tuple[list[Any], list[int | None]]:
    out_axis = None if all(d is None for d in dims) else 0
    tangents = operands[num_res:]
    if out_axis == 0:
        # In reverse, so that the transposed program sums over the batch in the order of the inputs.
        tangents = [axis.to_axis_0(t, d) for t, d in reversed(list(zip(tangents, dims[num_res:], strict=True)))][::-1]
    batched = _BatchedLinearMap(linear_map, axis, dims[:num_res], out_axis)
    return bind_linear_map(batched, operands[:num_res], tangents), [out_axis] * len(batched.avals)


def _linear_map_avals(*_: Any, linear_map: LinearMap, num_res: int, owner: Any) -> Sequence[Any]:
    return linear_map.avals


def _linear_map_effects(**_: Any) -> Collection[Any]:
    return log_effects(LOGS.value)  # of the user's `jvp`


linear_map_p = make_primitive(
    "linear_map",
    evaluate=_evaluate_linear_map,
    avals=_linear_map_avals,
    effects=_linear_map_effects,
    jvp=_linear_map_jvp,
    batch=_batch_linear_map,
    transpose=_transpose_linear_map,
    on_transpose_error=hide_own_frames,
    runs_user_code=True,
)
identity_primitives.add(tie_p)
subjaxpr_rules[linear_map_p] = partial(traced_impl, param="linear_map")


@jax.tree_util.register_static
@dataclass(frozen=True)
class DeferredError:
    """An error, of a class and with a text, that is raised where a derivative is used; not where it is dropped."""

    error: type[Exception]
    message: str

    def throw(self) -> NoReturn:
        """Raises the error."""
        raise self.error(self.message)


class ErrorMap(LinearMap):
    """The derivative of arrays that raise where their derivative is used."""

    def __init__(self, avals: Sequence[Any], error: DeferredError) -> None:
        self.avals = avals
        self._error = error

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        self._error.throw()

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        self._error.throw()


def guard(arrays: Sequence[Any], sources: Sequence[Any], error: DeferredError) -> list[Any]:
    """Returns the arrays; raises where a derivative of one, with respect to any of them or to a source, is used.

    Args:
      arrays: Arrays; those of integers are returned unchanged.
      sources: Further arrays.
      error: The error.
    """
    indices = [i for i, x in enumerate(arrays) if is_inexact(x.dtype)]
    floating = [x for x in sources if is_inexact(x.dtype)]
    return replace_at(indices, arrays, _guard(error, [arrays[i] for i in indices], floating))


@jax.custom_jvp
def _guard(error: DeferredError, arrays: list[Any], sources: list[Any]) -> list[Any]:
    return arrays


def _guard_jvp(primals: Any, tangents: Any) -> tuple[list[Any], list[Any]]:
    nonzero = [t for t in jax.tree.leaves(tangents[1:]) if not isinstance(t, SymbolicZero)]
    avals = [jax.typeof(x).to_tangent_aval() for x in primals[1]]
    return _guard(*primals), bind_linear_map(ErrorMap(avals, primals[0]), (), nonzero)


_guard.defjvp(_guard_jvp, symbolic_zeros=True)
