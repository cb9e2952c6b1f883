"""`from_torch`: existing PyTorch Functions on JAX.

This module does not import torch, so `import jaxfn` does not; nearly everything beside it does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jaxfn._torch.values.errors import TranslationError as TranslationError

if TYPE_CHECKING:
    from jaxfn._torch.adopt.adopted import Adopted


def from_torch(torch_function: Any, *, ops: Mapping[Any, Callable[..., Any]] | None = None) -> type[Adopted]:
    """An existing torch Function as a jaxfn Function, without a change to its source.

    torch itself traces the Python code of its `forward` and `backward`, once for each set of shapes, dtypes and Python
    values, and jaxfn translates the operations to `jax.numpy`. So Python control flow may depend on shapes, on Python
    values and on `ctx.needs_input_grad`, and not on the values of tensors.

    Args:
      torch_function: a subclass of `torch.autograd.Function`.
      ops: JAX functions to use where the code calls an operation that has no translation, or one to be replaced: a
        torch operation (an overload or packet of `torch.ops`, or what `torch.library.custom_op` returns), or a Python
        function (around a Triton kernel, say). Each takes arrays in place of tensors, and the other arguments as they
        are.

    Returns:
      A subclass of `jaxfn.Function` with the name, docstring and parameters of the torch one, which takes JAX and NumPy
      arrays in place of tensors; `torch.Tensor` and `torch.nn.Module` arguments are constants. Python values, torch's
      dtypes and devices among them, are passed on as they are. `apply` has one parameter more, `key`: a JAX random key,
      for Functions that draw random numbers. Its method `explain(*args)` shows what becomes of the code.

    Raises:
      ImportError: torch is not installed.
      TypeError: not a torch Function.
      TranslationError: (from `apply`, `explain` never) the code cannot run on JAX as it is; the message says why.

    Example:
      >>> import torch, jax, jax.numpy as jnp, jaxfn
      >>> class TorchRound(torch.autograd.Function):  # somebody's, in some package
      ...     @staticmethod
      ...     def forward(ctx, x, levels=1):
      ...         return torch.round(x * levels) / levels
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         return grad_output, None
      >>> Round = jaxfn.from_torch(TorchRound)
      >>> print(Round.apply(jnp.array([0.2, 0.9]), 4), jax.grad(lambda x: Round.apply(x) ** 2)(2.3))
      [0.25 1.  ] 4.0

    Torch counterpart: none; `torch.autograd.Function` is what it takes.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "jaxfn.from_torch lets PyTorch trace the Function, and PyTorch is not installed: pip install torch "
            "(the CPU build will do)"
        ) from error
    if not (isinstance(torch_function, type) and issubclass(torch_function, torch.autograd.Function)):
        raise TypeError(f"from_torch takes a subclass of torch.autograd.Function, not {torch_function!r}")
    from jaxfn._torch.adopt.adopted import adopt
    from jaxfn._torch.adopt.canary import check_torch

    check_torch()
    caller = sys._getframe(1).f_globals.get("__name__", __name__)  # pyright: ignore[reportPrivateUsage]
    return adopt(torch_function, ops or {}, caller)
