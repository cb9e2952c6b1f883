"""`linear`: a linear function of tangents that does not say how it is computed.

Evaluated or differentiated it calls `push`, transposed it calls `pull`. In reverse mode it is transposed away and
nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._compat import Primitive, ad, batched_aval, batching, in_front, mlir, zeros_of
from jaxfn._frames import hide_own_frames
from jaxfn._values.arrays import as_array
from jaxfn._values.varying import widened

Cotangents = Sequence[jax.Array | None]


class Linear:
    """A linear function of tangents that depends on residuals, and its transpose.

    Attributes:
      avals: the types of its results.
    """

    avals: list[Any]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Tangents of the outputs from tangents of the inputs."""
        raise NotImplementedError

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        """Cotangents of the inputs from cotangents of the outputs; `None` is zero."""
        raise NotImplementedError

class _Batched(Linear):
    """A linear function over a batch: every tangent has the batch at axis 0, each residual at its own axis or none."""

    def __init__(self, linear: Linear, axis: Any, residual_dims: list[int | None], avals: list[Any]) -> None:
        self._linear = linear
        self._axis = axis
        self._residual_dims = residual_dims
        self.avals = avals

    def __repr__(self) -> str:
        return repr(self._linear)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return self._mapped(self._linear.push)(list(residuals), list(tangents))

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        return self._mapped(self._linear.pull)(list(residuals), list(cotangents))

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _vmap(function, self._axis, (self._residual_dims, 0))


def _vmap(function: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=in_axes, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)


linear_p = Primitive("linear")
linear_p.multiple_results = True


def applied(linear: Linear, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """What the function gives for these tangents, in one equation."""
    return linear_p.bind(*residuals, *tangents, linear=linear, num_residuals=len(residuals))


def _linear_impl(*operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    arrays = [as_array(x) for x in operands]  # scalars may have become literals
    tangents = linear.push(arrays[:num_residuals], arrays[num_residuals:])
    return [widened(t, aval) for t, aval in zip(tangents, linear.avals, strict=True)]


def _linear_abstract(*operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    return linear.avals


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear, num_residuals: int) -> Any:
    outputs = linear_p.bind(*primals, linear=linear, num_residuals=num_residuals)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def function(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return _linear_impl(*operands, linear=linear, num_residuals=num_residuals)

    return outputs, jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _linear_transpose(cotangents: Sequence[Any], *operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    residuals, tangents = [as_array(x) for x in operands[:num_residuals]], operands[num_residuals:]
    given = [None if isinstance(ct, ad.Zero) else as_array(ct) for ct in cotangents]
    zeros = [ad.Zero(t.aval) for t in tangents]
    if all(ct is None for ct in given):
        return [None] * num_residuals + zeros
    try:
        pulled = linear.pull(residuals, given)
    except Exception as error:
        hide_own_frames(error)
        raise
    return [None] * num_residuals + [zero if ct is None else ct for zero, ct in zip(zeros, pulled, strict=True)]


def _linear_batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, linear: Linear, num_residuals: int
) -> Any:
    """Where any operand has the batch, every result has it, as what was made has; see `attach`."""
    residuals, tangents = list(operands[:num_residuals]), list(operands[num_residuals:])
    if all(d is None for d in dims):  # JAX asks even so
        return applied(linear, residuals, tangents), [None] * len(linear.avals)
    moved = [in_front(t, d, axis) for t, d in zip(tangents, dims[num_residuals:], strict=True)]
    batched = _Batched(linear, axis, list(dims[:num_residuals]), _batched_avals(axis, linear.avals))
    return applied(batched, residuals, moved), [0] * len(linear.avals)


def _batched_avals(axis: Any, avals: Sequence[Any]) -> list[Any]:
    """The types with the batch at axis 0."""
    return [batched_aval(aval, axis) for aval in avals]


linear_p.def_impl(_linear_impl)
linear_p.def_abstract_eval(_linear_abstract)
mlir.register_lowering(linear_p, mlir.lower_fun(_linear_impl, multiple_results=True), cacheable=False)
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.fancy_primitive_batchers[linear_p] = _linear_batch
