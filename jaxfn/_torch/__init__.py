"""`from_torch`: existing PyTorch code on JAX.

This module does not import torch, so `import jaxfn` does not either. Most other modules of the package do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxfn._torch.values.errors import TranslationError as TranslationError

if TYPE_CHECKING:
    import torch

    from jaxfn._torch.convert.function_class import ConvertedFunction
    from jaxfn._torch.convert.module import ConvertedModule

_registered: dict[Any, Callable[..., Any]] = {}


@overload
def from_torch(
    torch_function: torch.nn.Module, *, ops: Mapping[Any, Callable[..., Any]] | None = None
) -> ConvertedModule: ...
@overload
def from_torch(
    torch_function: type[torch.autograd.Function],
    *,
    ops: Mapping[Any, Callable[..., Any]] | None = None,
    fallback: Literal["callback"] | None = None,
) -> type[ConvertedFunction]: ...
@overload
def from_torch(
    torch_function: Callable[..., Any], *, ops: Mapping[Any, Callable[..., Any]] | None = None
) -> Callable[..., Any]: ...
def from_torch(
    torch_function: Any,
    *,
    ops: Mapping[Any, Callable[..., Any]] | None = None,
    fallback: Literal["callback"] | None = None,
) -> Any:
    """Converts existing torch code to JAX, without changes to its source: a Function, a module, or a Python function.

    torch traces the Python code (of a Function, its `forward` and `backward`) once for each set of shapes, dtypes and
    Python values, and jaxfn translates the traced operations to `jax.numpy`. So Python control flow may depend on
    shapes, on Python values and on `ctx.needs_input_grad`; that of a Function, outside `jax.jit`, also on the values of
    tensors. JAX differentiates the translation of a module or a Python function; Functions that they apply are
    differentiated by their own `backward`.

    Args:
      torch_function: A subclass of `torch.autograd.Function`; a `torch.nn.Module` (an instance); or a Python function
        of tensors, including a `functools.partial` of one.
      ops: JAX functions for operations that have no translation, or whose translation is to be replaced, by torch
        operation (an overload or packet of `torch.ops`, or the result of `torch.library.custom_op`) or by Python
        function (around a Triton kernel, for example). Each takes arrays in place of tensors; other arguments are
        unchanged. The backward that is registered with torch for a custom operation is used, unless its replacement
        is a jaxfn Function.
      fallback: "callback" for a Function class that cannot be traced, because its Python code reads the values of
        tensors or because it calls compiled code: `forward` and `backward` run in torch on the host, each by one
        `jax.pure_callback`, at every order of reverse mode and in `jit`, `vmap`, `scan` and `shard_map`. That is slow.
        A Function that can be traced is traced. `jax.vmap` calls it for one element at a time; its own `vmap` is not
        used.

    Returns:
      For a module, a `ConvertedModule`, with `parameters`, `buffers` and `apply(parameters, buffers, *args, key=None)`.
      For a Python function, a function that takes arrays in place of tensors and an extra parameter, `key`; other
      tensors that it uses are constants. For a Function, a subclass of `jaxfn.Function` with the name, docstring and
      parameters of the torch class. It takes JAX and NumPy arrays in place of tensors; `torch.Tensor` and
      `torch.nn.Module` arguments are constants; Python values, including torch dtypes and devices, are passed on
      unchanged. Its `apply` has an extra parameter, `key`: a JAX random key, for Functions that draw random numbers.
      Its method `explain(*args)` shows the translation.

    Raises:
      ImportError: torch is not installed.
      TypeError: `torch_function` is none of these, or `fallback` is passed for something that is not a Function class.
      ValueError: `fallback` is neither `None` nor "callback".
      TranslationError: (from `apply`, never from `explain`) The code cannot run on JAX unchanged. The message names the
        operation or the line.

    Examples:
      >>> import torch, jax, jax.numpy as jnp, jaxfn
      >>> class TorchRound(torch.autograd.Function):  # in a package that you use
      ...     @staticmethod
      ...     def forward(ctx, x, levels=1):
      ...         return torch.round(x * levels) / levels
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         return grad_output, None
      >>> Round = jaxfn.from_torch(TorchRound)
      >>> print(Round.apply(jnp.array([0.2, 0.9]), 4), jax.grad(lambda x: Round.apply(x) ** 2)(2.3))
      [0.25 1.  ] 4.0
      >>> net = jaxfn.from_torch(torch.nn.Linear(3, 2))
      >>> output, buffers = net.apply(net.parameters, net.buffers, jnp.ones((4, 3)))
      >>> print(output.shape, jaxfn.from_torch(torch.nn.functional.mse_loss)(jnp.ones(3), jnp.zeros(3)))
      (4, 2) 1.0
      >>> class TorchRoot(torch.autograd.Function):
      ...     @staticmethod
      ...     def forward(ctx, x):
      ...         y = x + 1
      ...         while bool((y * y - x > 1e-6 * x).any()):  # reads values, which a trace does not have
      ...             y = (y + x / y) / 2
      ...         ctx.save_for_backward(y)
      ...         return y
      ...     @staticmethod
      ...     def backward(ctx, grad_output):
      ...         return grad_output / (2 * ctx.saved_tensors[0])
      >>> root = jaxfn.from_torch(TorchRoot, fallback="callback").apply
      >>> print(jax.jit(jax.grad(lambda x: root(x).sum()))(jnp.array([4.0, 1.0])))
      [0.25 0.5 ]

    Torch counterpart: none; it takes a `torch.autograd.Function` or a `torch.nn.Module`.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "jaxfn.from_torch uses PyTorch to trace the code, and PyTorch is not installed. Run: pip install torch "
            "(the CPU build is sufficient)"
        ) from error
    is_function_class = isinstance(torch_function, type) and issubclass(torch_function, torch.autograd.Function)
    is_instance = isinstance(torch_function, torch.autograd.Function)
    if is_instance or (not is_function_class and (isinstance(torch_function, type) or not callable(torch_function))):
        raise TypeError(
            "from_torch takes a subclass of torch.autograd.Function, a torch.nn.Module (an instance) or a Python "
            f"function of tensors, not {torch_function!r}"
            + is_instance
            * ". Pass its class, and pass the arguments of __init__ to apply"
        )
    if fallback not in (None, "callback"):
        raise ValueError(f"from_torch: fallback is None or 'callback', got {fallback!r}")
    if fallback is not None and not is_function_class:
        raise TypeError(
            "from_torch: fallback='callback' is for subclasses of torch.autograd.Function, whose backward defines the "
            f"derivative. Move the code that cannot be traced into one; got {torch_function!r}"
        )
    from jaxfn._torch.convert.function_class import FunctionAdapter, convert_function_class
    from jaxfn._torch.convert.host_callback import HostAdapter
    from jaxfn._torch.convert.module import ConvertedModule
    from jaxfn._torch.convert.nested import NESTED_APPLY
    from jaxfn._torch.convert.self_test import check_torch
    from jaxfn._torch.convert.torch_callable import convert_callable
    from jaxfn._torch.trace.state import Replacements, TraceConfig

    check_torch()
    config = TraceConfig(Replacements.of(_registered | dict(ops or {})), NESTED_APPLY)
    if isinstance(torch_function, torch.nn.Module):
        return ConvertedModule(torch_function, config)
    if not is_function_class:
        return convert_callable(torch_function, config)
    caller = sys._getframe(1).f_globals.get("__name__", __name__)  # pyright: ignore[reportPrivateUsage]
    return convert_function_class(torch_function, caller, config, HostAdapter if fallback else FunctionAdapter)


def register_translation(operation: Any, function: Callable[..., Any]) -> None:
    """Registers a JAX function as the translation of a torch operation, for every later call of `from_torch`.

    Passing `ops={operation: function}` to each call is equivalent. An equal key of `ops` takes precedence.

    Args:
      operation: A torch operation or a Python function; see `ops` of `from_torch`.
      function: The JAX function, which takes arrays in place of tensors.

    Raises:
      TypeError: `operation` is not an operation or a function, or `function` is not callable.

    Examples:
      >>> import jax, torch, jax.numpy as jnp, jaxfn
      >>> jaxfn.register_translation(torch.special.zeta, jax.scipy.special.zeta)
      >>> print(jaxfn.from_torch(lambda x: torch.special.zeta(x, torch.ones_like(x)))(jnp.array([2.0])))
      [1.644934]

    Torch counterpart: none.
    """
    if isinstance(operation, type) or not (callable(operation) or isinstance(operation, str)):
        raise TypeError(f"register_translation takes a torch operation or a Python function, got {operation!r}")
    if not callable(function):
        raise TypeError(f"register_translation takes a JAX function, got {function!r}")
    _registered[operation] = function
