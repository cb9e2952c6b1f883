"""Arrays among Python values.

An array leaf is a `jax.Array` (traced or not), a NumPy array or scalar, a `jax.Ref`, or anything with
`__jax_array__`. Every other leaf is static and travels as the Python object that it is.

A *box* is a pytree node that JAX takes for an array: an `nnx.Param`. As an argument it arrives as the node that it is,
anywhere in a pytree, and may hold a pytree itself; a *boxed array*, which holds one array, will do for one where an
array is wanted, of a gradient say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxfn._compat import partial_eval

# NumPy arrays of these kinds (objects, text, dates) cannot be JAX arrays, so they stay static.
_STATIC_KINDS = frozenset("OSUMm")


@lru_cache(maxsize=4096)
def _is_array_type(kind: type) -> bool:
    # JAX hands Python numbers on as subclasses of int, float and complex, its own ones, that have a dtype.
    is_typed_scalar = issubclass(kind, (int, float, complex)) and kind.__module__.partition(".")[0] == "jax"
    return is_jax_type(kind) or is_typed_scalar or hasattr(kind, "__jax_array__")


@lru_cache(maxsize=4096)
def is_jax_type(kind: type) -> bool:
    """Whether objects of a type are JAX arrays, traced ones and references too."""
    return issubclass(kind, (jax.Array, jax.Ref, Tracer))


@lru_cache(maxsize=4096)
def is_inexact(dtype: Any) -> bool:
    """Whether arrays of this dtype can be differentiated."""
    return jnp.issubdtype(dtype, jnp.inexact)


def double(dtype: Any) -> np.dtype[Any]:
    """The double-precision dtype of this kind."""
    return np.dtype(np.complex128 if np.dtype(dtype).kind == "c" else np.float64)


def is_key(array: Any) -> bool:
    """Whether an array holds random keys, which are no numbers."""
    return jnp.issubdtype(array.dtype, jax.dtypes.extended)


def is_array_leaf(leaf: object) -> bool:
    """Whether a leaf is data for JAX rather than a Python value."""
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.dtype.kind not in _STATIC_KINDS
    return _is_array_type(type(leaf))


@lru_cache(maxsize=4096)
def _may_be_box(kind: type) -> bool:
    return not is_jax_type(kind) and hasattr(kind, "__jax_array__")


def is_box(value: object) -> bool:
    """Whether a value is a pytree node that JAX takes for an array."""
    return _may_be_box(type(value)) and not jax.tree_util.all_leaves([value])


def is_boxed_array(value: object) -> bool:
    """Whether a value is a box with one array in it."""
    return is_box(value) and len(jax.tree_util.tree_leaves(value)) == 1


def is_traced(leaf: object) -> bool:
    """Whether an array leaf is a JAX tracer."""
    return isinstance(leaf, Tracer)


def as_array(leaf: Any) -> jax.Array:
    """An array leaf as something that JAX takes as an operand."""
    return leaf if is_jax_type(type(leaf)) else jnp.asarray(leaf)


def conjugate(gradient: jax.Array) -> jax.Array:
    """Between torch's and JAX's convention for complex gradients; each is the other's conjugate."""
    return jnp.conj(gradient) if gradient.dtype.kind == "c" else gradient


def is_staged(array: object) -> bool:
    """Whether an array stands for a value in a program that JAX is writing down."""
    return isinstance(array, partial_eval.DynamicJaxprTracer)


def is_none(value: object) -> bool:
    """For `is_leaf`: pytrees would otherwise drop `None`."""
    return value is None


def is_written_down(arrays: Sequence[Any]) -> bool:
    """Whether each of the arrays is a value of the program that JAX is writing down, or a constant."""
    return all(is_staged(x) or not is_traced(x) for x in arrays)


def agree(a: Any, b: Any) -> bool:
    """Whether two arrays, whose values are known, are the same but for rounding."""
    if jax.typeof(a) != jax.typeof(b):
        return False
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not is_inexact(a.dtype):
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    # Under differentiation JAX compiles the same operations into other programs, which round differently.
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = (np.asarray(x).astype(double(a.dtype)) for x in (a, b))
    finite = a[np.isfinite(a)]
    largest = float(np.abs(finite).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True))
