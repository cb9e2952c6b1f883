"""Sums, means, extrema and norms over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch import ties
from jaxfn._torch.operations.dims import axes
from jaxfn._torch.operations.platforms import lower_by_platform
from jaxfn._torch.operations.promotion import is_inexact, to_inexact
from jaxfn._torch.operations.table import composite, operation, register_all

Dim = int | Sequence[int] | None


def cast_for_accumulation(x: Array, dtype: Any) -> Array:
    """Casts `x` to the dtype in which sums and products are computed: int64 for integers, unless `dtype` is passed."""
    if dtype is None:
        dtype = x.dtype if is_inexact(x) else jax.dtypes.canonicalize_dtype(np.int64)
    return x.astype(dtype)


def reduce(
    function: Callable[..., Array], x: Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    """Applies a function such as `jnp.sum` over some axes."""
    return function(x if dtype is None else x.astype(dtype), axes(x, dim), keepdims=keepdim)


def reduce_with_accumulation(
    function: Callable[..., Array], x: Array, dim: Dim = None, keepdim: bool = False, *, dtype: Any = None
) -> Array:
    """Applies a sum or product over some axes, with integers accumulated as torch does."""
    return reduce(function, cast_for_accumulation(x, dtype), dim, keepdim)


def extreme_index(function: Callable[..., Array], x: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """Returns the index of the extreme element, the first of equals; `function` is `jnp.argmax` or `jnp.argmin`."""
    shape = [1] * x.ndim if keepdim else ()
    flat, axis = (x.reshape(-1), 0) if dim is None or x.ndim == 0 else (x, dim % x.ndim)

    def on_cpu(x: Array) -> Array:
        # Two reductions, which use vector instructions. One that computes values and indices does not.
        best = (jnp.max if function is jnp.argmax else jnp.min)(x, axis, keepdims=True)
        indices = lax.broadcasted_iota(jax.dtypes.canonicalize_dtype(np.int64), x.shape, axis)
        return jnp.min(jnp.where((x == best) | (x != x), indices, x.shape[axis] - 1), axis, keepdims=keepdim)

    def elsewhere(x: Array) -> Array:
        return function(x, axis, keepdims=keepdim)

    found = lax.platform_dependent(lax.stop_gradient(flat), cpu=on_cpu, default=elsewhere)
    return found.reshape(shape) if flat is not x else found


def extreme(function: Callable[..., Array], x: Array, dim: int, keepdim: bool) -> tuple[Array, Array]:
    """Returns the extreme element and its index. The derivative goes to that element."""
    if x.ndim == 0:
        return x, extreme_index(function, x)
    fixed, index = lax.stop_gradient(x), extreme_index(function, x, dim, keepdim=True)
    # A CPU finds the element without its index, which may be unused.
    reduction = jnp.max if function is jnp.argmax else jnp.min
    elsewhere = partial(jnp.take_along_axis, axis=dim)

    def on_cpu(x: Array, index: Array) -> Array:
        return reduction(x, dim, keepdims=True)

    value = lower_by_platform(on_cpu, elsewhere, fixed, index)
    value = _element_at(dim, x, value, index) if is_inexact(x) else value
    return (value, index) if keepdim else (value.squeeze(dim), index.squeeze(dim))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _element_at(dim: int, x: Array, value: Array, index: Array) -> Array:
    """Returns `value`, the elements of `x` at `index`, which determines its derivative."""
    return value


@_element_at.defjvp
def _element_at_jvp(dim: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _element_at(dim, *primals), jnp.take_along_axis(tangents[0], primals[2], dim)


register_all(
    {
        "aten.sum": partial(reduce_with_accumulation, jnp.sum),
        "aten.prod": partial(reduce_with_accumulation, jnp.prod),
        "aten.mean": partial(reduce, jnp.mean),
        "aten.any": partial(reduce, jnp.any),
        "aten.all": partial(reduce, jnp.all),
        "aten.amax": partial(reduce, jnp.max),
        "aten.amin": partial(reduce, jnp.min),
        "aten.max.default": jnp.max,
        "aten.min.default": jnp.min,
        "aten.argmax": partial(extreme_index, jnp.argmax),
        "aten.argmin": partial(extreme_index, jnp.argmin),
        "aten.max.dim": partial(extreme, jnp.argmax),
        "aten.min.dim": partial(extreme, jnp.argmin),
    }
)


@composite("aten.var.correction")
def var(x: Array, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> Array:
    return var_mean(x, dim, correction, keepdim)[0]


@composite("aten.var_mean.correction")
def var_mean(x: Array, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> tuple[Array, Array]:
    over = axes(x, dim)
    mean = jnp.mean(x, over, keepdims=True)
    squares = jnp.sum(jnp.square(jnp.abs(x - mean)), over, keepdims=keepdim)
    count = np.prod([x.shape[axis] for axis in over], dtype=int) - (1 if correction is None else correction)
    return squares / np.maximum(count, 0).astype(squares.dtype), mean if keepdim else jnp.squeeze(mean, over)


@composite("aten.std.correction")
def std(x: Array, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> Array:
    return std_mean(x, dim, correction, keepdim)[0]


@composite("aten.std_mean.correction")
def std_mean(x: Array, dim: Dim = None, correction: float | None = 1, keepdim: bool = False) -> tuple[Array, Array]:
    variance, mean = var_mean(x, dim, correction, keepdim)
    return ties.root(variance), mean


@composite("aten.aminmax")
def aminmax(x: Array, dim: int | None = None, keepdim: bool = False) -> tuple[Array, Array]:
    return reduce(jnp.min, x, dim, keepdim), reduce(jnp.max, x, dim, keepdim)


@composite("aten.logsumexp")
def logsumexp(x: Array, dim: Dim, keepdim: bool) -> Array:
    return jax.nn.logsumexp(to_inexact(x), axes(x, dim), keepdims=keepdim)


@composite("aten.linalg_vector_norm", "aten.norm.ScalarOpt_dim")
def vector_norm(x: Array, ord: float = 2, dim: Dim = None, keepdim: bool = False, dtype: Any = None) -> Array:
    return ties.vector_norm(x if dtype is None else x.astype(dtype), ord, axes(x, dim), keepdim)


@composite("aten.dist")
def dist(x: Array, y: Array, p: float) -> Array:
    return vector_norm(x - y, p)


@operation("aten.count_nonzero")
def count_nonzero(x: Array, dim: Dim = None) -> Array:
    return jnp.sum(x != 0, axes(x, dim), dtype=jax.dtypes.canonicalize_dtype(np.int64))
