"""The JAX names that are not part of plain `jax` and `jax.numpy`, in one place.

Every entry says which versions it was checked on. Nothing here reaches into `jax._src`.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive, get_opaque_trace_state
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.ref import AbstractRef

__all__ = [
    "Primitive",
    "SymbolicZero",
    "ad",
    "batching",
    "is_ref",
    "memory_space",
    "mlir",
    "partial_eval",
    "stages_constants",
    "varying_axes",
    "zeros_of",
]

with jax.ensure_compile_time_eval():
    # Taken here, inside ensure_compile_time_eval, so that importing jaxfn under a trace is harmless.
    _EAGER = get_opaque_trace_state()


def is_eager() -> bool:
    """Whether nothing is being traced or differentiated in this thread (0.10.0 to 0.12.0)."""
    return get_opaque_trace_state() == _EAGER


def stages_constants() -> bool:
    """Whether operations on constants are being traced: under `jit`, and not under `grad` alone."""
    return not is_eager() and isinstance(jax.lax.full((), 0), Tracer)


def is_ref(value: object) -> bool:
    """Whether `value` is a mutable reference, concrete or traced (0.10.0 to 0.12.0)."""
    return isinstance(jax.typeof(value), AbstractRef)  # quicker than isinstance(value, jax.Ref)


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes that a value varies over inside `shard_map(check_vma=True)`.

    0.10.0 to 0.12.0 keep them in `manual_axis_type`; the older `.vma` is gone at both ends.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of an abstract value, with its sharding and varying axes (0.10.0 to 0.12.0)."""
    return ad.zeros_like_aval(aval)


def memory_space(array: Any) -> Any:
    """Which `jax.memory.Space` an array, traced or not, is in (0.10.0 to 0.12.0)."""
    aval: Any = jax.typeof(array)
    return aval.memory_space
