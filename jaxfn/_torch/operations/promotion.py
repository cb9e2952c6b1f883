"""torch's type promotion: Python numbers have the lowest priority, then tensors without dimensions, then others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_NUMBERS = {"b": np.bool_, "i": np.int64, "f": np.float32, "c": np.complex64}


def is_number(operand: Any) -> bool:
    """Whether an operand is a Python number, or a traced number, which is an array of weak type."""
    return not hasattr(operand, "dtype") or getattr(operand, "weak_type", False)


def result_type(*operands: Any) -> np.dtype[Any]:
    """Returns the dtype in which torch computes an operation on these operands (arrays and numbers)."""
    dimensioned, scalars, numbers = [], [], []
    for operand in operands:
        if is_number(operand):
            kind = getattr(operand, "dtype", np.dtype(type(operand))).kind
            numbers.append(jax.dtypes.canonicalize_dtype(_NUMBERS[kind]))
        else:
            (dimensioned if jnp.ndim(operand) else scalars).append(operand.dtype)
    result = None
    for group in (dimensioned, scalars, numbers):
        if not group:
            continue
        other = functools.reduce(jnp.promote_types, group)
        if result is None:
            result = other
        elif _category(other) > _category(result):
            result = _raised_to_category(result, other, weak=group is numbers)
    assert result is not None
    return np.dtype(result)


def _category(dtype: Any) -> int:
    """Returns 0 for bool, 1 for integers, 2 for floats, 3 for complex numbers."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return 3
    if jnp.issubdtype(dtype, jnp.floating):
        return 2
    return 1 if jnp.issubdtype(dtype, jnp.integer) else 0


def _raised_to_category(result: Any, other: Any, *, weak: bool) -> Any:
    """Raises `result` to `other`'s category; a float that becomes complex does not change its precision."""
    if _category(result) == 2 and _category(other) == 3:
        return jnp.promote_types(result, np.complex64) if weak else jnp.promote_types(result, other)
    return other


def promote(function: Callable[..., Any], *, cast: Callable[[Any, Any], jax.Array] | None = None) -> Any:
    """Returns `function`, preceded by a cast of its operands to their common dtype; `None` is passed on.

    Half-precision operands, including Python numbers, are rounded to half and then cast to single precision.

    Args:
      function: A function of arrays of one dtype.
      cast: Casts an operand. Default: `as_dtype`.
    """
    cast = as_dtype if cast is None else cast

    @functools.wraps(function)
    def cast_first(*operands: Any, **options: Any) -> Any:
        if _have_one_dtype(operands):
            return function(*operands, **options)
        dtype = result_type(*(operand for operand in operands if operand is not None))
        computed = compute_dtype(dtype)
        return function(*(None if x is None else cast(x, dtype).astype(computed) for x in operands), **options)

    return cast_first


def _have_one_dtype(operands: Sequence[Any]) -> bool:
    """Whether all operands are arrays of one dtype, in which torch computes."""
    dtypes = {operand.dtype for operand in operands if isinstance(operand, jax.Array)}
    return len(dtypes) == 1 and all(isinstance(x, jax.Array) for x in operands) and not _is_half(*dtypes)


def as_dtype(x: Any, dtype: Any) -> jax.Array:
    """Casts an operand to an array of a dtype; a Python integer that does not fit wraps around, as in torch."""
    if isinstance(x, jax.Array) and x.dtype == dtype:
        return x
    dtype = np.dtype(dtype)
    if type(x) is int and jnp.issubdtype(dtype, jnp.integer):
        bits = 8 * dtype.itemsize
        x %= 1 << bits
        x -= (x >> bits - 1 << bits) if jnp.issubdtype(dtype, jnp.signedinteger) else 0
    with np.errstate(over="ignore"):  # Numbers out of range become inf.
        return jnp.asarray(x, dtype)


def compute_dtype(dtype: Any) -> np.dtype[Any]:
    """Returns the dtype in which torch computes: single precision for half precision."""
    return np.dtype(np.float32) if _is_half(dtype) else np.dtype(dtype)


def half_to_single(arguments: Any) -> Any:
    """Casts half-precision arrays in an operation's arguments to single precision."""

    def widen(x: Any) -> Any:
        return x.astype(np.float32) if is_half(x) else x

    return jax.tree_util.tree_map(widen, arguments)


def is_half(x: Any) -> bool:
    """Whether a value is an array in half precision."""
    return isinstance(x, jax.Array) and _is_half(x.dtype)


def _is_half(dtype: Any) -> bool:
    return dtype in (np.float16, jnp.bfloat16)


def promote_to_inexact(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `promote` of a function that is defined for floating-point numbers only."""
    return promote(functools.wraps(function)(lambda *operands: function(*map(to_inexact, operands))))


def to_inexact(x: Any) -> jax.Array:
    """Casts `x` to floating point, integers to torch's default dtype, float32."""
    x = jnp.asarray(x)
    return x if is_inexact(x) else x.astype(np.float32)


def is_inexact(x: Any) -> bool:
    """Whether `x` contains floating-point numbers, real or complex."""
    return jnp.issubdtype(x.dtype, jnp.inexact)
