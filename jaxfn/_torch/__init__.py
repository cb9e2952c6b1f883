"""`from_torch` and `explain`: existing PyTorch code on JAX.

This module does not import torch, so `import jaxfn` does not either. Most other modules of the package do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import jax

from jaxfn._functional import function
from jaxfn._torch.values.errors import TranslationError as TranslationError

if TYPE_CHECKING:
    import torch

    from jaxfn._function import Function
    from jaxfn._torch.convert.explain import Conversion, Explanation
    from jaxfn._torch.convert.module import ConvertedModule


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
) -> type[Function]: ...
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
        `jax.pure_callback`, in `jit`, `vmap`, `scan` and `shard_map`; a second derivative raises. That is slow.
        A Function that can be traced is traced. `jax.vmap` calls it for one element at a time; its own `vmap` is not
        used.

    Returns:
      For a module, a `ConvertedModule`, with `parameters`, `buffers` and `apply(parameters, buffers, *args, key=None)`.
      For a Python function, a function that takes arrays in place of tensors and an extra parameter, `key`; other
      tensors that it uses are constants. For a Function, a subclass of `jaxfn.Function` with the name, docstring and
      parameters of the torch class. It takes JAX and NumPy arrays in place of tensors; `torch.Tensor` and
      `torch.nn.Module` arguments are constants; Python values, including torch dtypes and devices, are passed on
      unchanged. Its `apply` has an extra parameter, `key`: a JAX random key, for Functions that draw random numbers.
      `jaxfn.explain` shows the translation, and `jaxfn.port` writes JAX code to keep.

    Raises:
      ImportError: torch is not installed.
      TypeError: `torch_function` is none of these, or already runs on JAX; `fallback` is passed for something that is
        not a Function class; or an entry of `ops` is not an operation or function, and a JAX function for it.
      ValueError: `fallback` is neither `None` nor "callback", or `ops` names an operation that torch does not have, or
        that it decomposes before jaxfn sees it.
      TranslationError: (from a call, never from `explain`) The code cannot run on JAX unchanged. The message names the
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
      >>> net = jaxfn.from_torch(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)))
      >>> output, buffers = net.apply(net.parameters, net.buffers, jnp.ones((4, 3)))
      >>> print(output.shape, sorted(buffers))
      (4, 2) ['1.num_batches_tracked', '1.running_mean', '1.running_var']
      >>> print(jaxfn.from_torch(torch.nn.functional.mse_loss)(jnp.ones(3), jnp.zeros(3)))
      1.0

    Torch counterpart: none.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            "jaxfn.from_torch uses PyTorch to trace the code, and PyTorch is not installed. Run: pip install torch "
            "(the CPU build is sufficient)"
        ) from error
    if runs_on_jax(torch_function):
        raise TypeError(f"expected torch code, and {torch_function!r} already runs on JAX: use it as it is")
    is_function_class = isinstance(torch_function, type) and issubclass(torch_function, torch.autograd.Function)
    is_instance = isinstance(torch_function, torch.autograd.Function)
    if is_instance or (not is_function_class and (isinstance(torch_function, type) or not callable(torch_function))):
        raise TypeError(
            "expected torch code: a subclass of torch.autograd.Function, a torch.nn.Module (an instance) or a Python "
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
    config = TraceConfig(Replacements.of(dict(ops or {})), NESTED_APPLY)
    if isinstance(torch_function, torch.nn.Module):
        return ConvertedModule(torch_function, config)
    if not is_function_class:
        return convert_callable(torch_function, config)
    adapter = HostAdapter if fallback else FunctionAdapter
    return convert_function_class(torch_function, _calling_module(), config, adapter)


def explain(code: Any, /, *args: Any, **kwargs: Any) -> Explanation:
    """Explains how torch code is translated when it is called with these arguments, without running it on JAX.

    Args:
      code: What `from_torch` takes, or what it returned (to explain it with `ops=`, for example).
      *args: Arguments of the code, of `apply` if it is a Function. Of arrays, only shapes and dtypes matter, unless a
        Function reads values. Inside `jax.jit` or `jax.eval_shape` there are none, and a call there is explained.
      **kwargs: Keyword arguments of the code.

    Returns:
      An object that prints the graphs that torch traced, of a Function also that of `backward`, their operations, and
      the operations without a translation. It is true if everything has one.

    Raises:
      TypeError: `code` is not torch code, or does not take these arguments.

    Examples:
      >>> import torch, jax.numpy as jnp, jaxfn
      >>> explanation = jaxfn.explain(lambda x: torch.special.zeta(2 * x, x), jnp.ones(3))
      >>> print(explanation.is_supported, explanation.parts[0].operations)
      False ['aten.mul.Tensor', 'aten.special_zeta.default']

    Torch counterpart: none.
    """
    return conversion_of(code).explain(args, kwargs)


def conversion_of(code: Any) -> Conversion:
    """Returns the conversion of torch code, or of what `from_torch` returned."""
    return (code if hasattr(code, "_jaxfn_conversion") else from_torch(code))._jaxfn_conversion


_JAX_TYPES = (function, jax.custom_jvp, jax.custom_vjp, jax.numpy.ufunc, jax.stages.Wrapped)


def runs_on_jax(code: Any) -> bool:
    """Whether a callable is known to take JAX arrays. Of a plain Python function that is not known."""
    if isinstance(code, functools.partial):
        return runs_on_jax(cast(Any, code).func)
    is_converted = hasattr(getattr(code, "__self__", code), "_jaxfn_conversion")  # `__self__`: that of net.apply
    return is_converted or hasattr(code, "_jaxfn_dispatcher") or isinstance(code, _JAX_TYPES)


def _calling_module() -> str:
    """Returns the name of the module that called this one."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_globals is globals() and frame.f_back:
        frame = frame.f_back
    return frame.f_globals.get("__name__", __name__)
