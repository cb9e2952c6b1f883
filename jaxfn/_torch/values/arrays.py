"""Conversion of tensors and their dtypes to JAX, and back. torch is only imported when a function needs it."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._torch.values.errors import TranslationError
from jaxfn._tree import is_torch_tensor_type

if TYPE_CHECKING:
    import torch

_NAMES = """
bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128
float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz
"""
_DTYPES = frozenset(_NAMES.split())


def jax_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the JAX dtype of a torch dtype. With x64 off, 64-bit dtypes become 32-bit ones, as everywhere in JAX.

    Args:
      dtype: The torch dtype.

    Returns:
      The dtype that JAX arrays get under the current x64 setting.

    Raises:
      TranslationError: JAX has no such dtype (quantized and packed ones).
    """
    return jax.dtypes.canonicalize_dtype(_numpy_dtype(dtype))


@functools.cache
def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    """Returns the NumPy dtype of a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    if name == "complex32":
        raise TranslationError("JAX has no half-precision complex numbers (torch.complex32); use complex64")
    if name not in _DTYPES:
        raise TranslationError(f"JAX has no counterpart of the dtype {dtype}")
    return jnp.dtype(name)


def torch_dtype(dtype: Any) -> torch.dtype:
    """Returns the torch dtype of a JAX or NumPy dtype.

    Raises:
      TranslationError: torch has no such dtype (random keys, 4-bit integers).
    """
    import torch

    name = str(dtype)
    if name not in _DTYPES or not hasattr(torch, name):
        raise TranslationError(f"torch has no counterpart of the dtype {name}")
    return getattr(torch, name)


def is_differentiable(dtype: torch.dtype) -> bool:
    """Whether tensors of a dtype have derivatives."""
    return dtype.is_floating_point or dtype.is_complex


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Returns a tensor's values as a new JAX array, with 64-bit dtypes under the x64 setting.

    Raises:
      TranslationError: The tensor is sparse or quantized, or has no values (a fake tensor).
    """
    dtype = jax_dtype(tensor.dtype)
    return jnp.asarray(to_numpy(tensor).astype(dtype, copy=False))


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Returns a tensor's values as a new NumPy array; JAX does not run.

    Raises:
      TranslationError: The tensor is sparse or quantized, or has no values (a fake tensor).
    """
    import torch

    if tensor.layout is not torch.strided:
        raise TranslationError(f"a tensor of layout {tensor.layout} has no counterpart on JAX; use `.to_dense()`")
    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if dense.dtype in (torch.bfloat16, *_eight_bit_floats()):
        bits = torch.int16 if dense.dtype == torch.bfloat16 else torch.uint8
        values = dense.view(bits).numpy(force=True).view(jnp.dtype(str(dense.dtype).removeprefix("torch.")))
    else:
        values = dense.numpy(force=True)  # Forced, since autograd's zero tensors have no storage.
    return np.array(values)  # A copy, since the tensor may be mutated later.


def with_arrays(tree: Any) -> Any:
    """Returns a pytree with NumPy arrays in place of its torch tensors."""

    def convert(leaf: Any) -> Any:
        return to_numpy(leaf) if is_torch_tensor_type(type(leaf)) else leaf

    has_tensors = "torch" in sys.modules and any(is_torch_tensor_type(type(x)) for x in jax.tree.leaves(tree))
    return jax.tree.map(convert, tree) if has_tensors else tree


def to_torch(array: Any) -> torch.Tensor:
    """Returns the values of a JAX or NumPy array as a new CPU tensor.

    Raises:
      TranslationError: torch has no such dtype.
    """
    import torch

    dtype = torch_dtype(array.dtype)
    values = np.array(array)
    if dtype is torch.bfloat16:
        return torch.from_numpy(values.view(np.int16)).view(dtype)
    if dtype in _eight_bit_floats():
        return torch.from_numpy(values.view(np.uint8)).view(dtype)
    return torch.from_numpy(values)


def _eight_bit_floats() -> tuple[torch.dtype, ...]:
    import torch

    return torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz
