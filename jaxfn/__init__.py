"""PyTorch's `torch.autograd.Function` protocol on JAX.

A Function has a `forward` and a `backward`, and becomes a function of arrays with that derivative, under every
transformation of JAX:

>>> import jax, jax.numpy as jnp, jaxfn
>>> class Round(jaxfn.Function):  # a straight-through estimator
...     @staticmethod
...     def forward(ctx, x):
...         return jnp.round(x)
...     @staticmethod
...     def backward(ctx, grad_output):
...         return grad_output
>>> print(jax.grad(jax.jit(Round.apply))(2.3))
1.0

`help(jaxfn.gradcheck)` describes one of these:

Write a Function
  Function, FunctionCtx    the base class, and the `ctx` of its methods
  function                 a decorator, or a call, in place of a class; autograd_function is R torch's name
  from_custom_vjp          a Function with the rule of a jax.custom_vjp
  once_differentiable      a decorator of `backward`: a second derivative raises
  ShardingRule             how a Function is partitioned over devices
  saved_tensors_hooks      pack what Functions save; also save_on_host, disable_saved_tensors_hooks

Check it
  check                    use this first: all checks that need no reference
  gradcheck                first derivatives, against finite differences and autodiff
  gradgradcheck            second derivatives
  kernelcheck              a kernel's rounding errors, against a reference

Look into a program
  residuals                what reverse mode saves, and which Function saved it
  find_nan                 where a NaN or an infinity first appears
  logged                   values from inside `forward` and `backward` (`ctx.log`)

Bring torch code over
  from_torch               convert a torch Function, function or module, unchanged
  explain                  show how torch code is translated
  port                     rewrite the source of torch code for JAX
  paritycheck              compare a port with the original
  trainingcheck            compare a ported training job with the original
  record_reference         store the original's results, to compare without torch

Types: reports (a module: what the checks and tools return), CheckError and its subclass GradcheckError,
TranslationError, ConvertedModule, and VmapInfo.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jaxfn import reports as reports
from jaxfn._context import FunctionCtx
from jaxfn._function import Function
from jaxfn._functional import autograd_function, from_custom_vjp, function
from jaxfn._hooks import disable_saved_tensors_hooks, save_on_host, saved_tensors_hooks
from jaxfn._once_differentiable import once_differentiable
from jaxfn._sharding_rule import ShardingRule
from jaxfn._version import __version__ as __version__
from jaxfn._vmap_method import VmapInfo as VmapInfo

if TYPE_CHECKING:
    from jaxfn._gradcheck import GradcheckError, check, gradcheck, gradgradcheck
    from jaxfn._inspection.find_nan import find_nan
    from jaxfn._inspection.logs import logged
    from jaxfn._inspection.residuals import residuals
    from jaxfn._kernelcheck import kernelcheck
    from jaxfn._parity.paritycheck import paritycheck, record_reference
    from jaxfn._port.public import port
    from jaxfn._port.training.trainingcheck import trainingcheck
    from jaxfn._reports import CheckError
    from jaxfn._torch import TranslationError, explain, from_torch
    from jaxfn._torch.convert.module import ConvertedModule as ConvertedModule

__all__ = ["Function", "FunctionCtx", "ShardingRule"]
__all__ += ["autograd_function", "from_custom_vjp", "function", "once_differentiable"]
__all__ += ["disable_saved_tensors_hooks", "save_on_host", "saved_tensors_hooks"]
__all__ += ["CheckError", "GradcheckError", "check", "gradcheck", "gradgradcheck", "kernelcheck"]
__all__ += ["find_nan", "logged", "residuals"]
__all__ += ["TranslationError", "explain", "from_torch", "paritycheck", "port", "record_reference", "trainingcheck"]

# Tools are imported at their first use, so that `import jaxfn` takes milliseconds. The last two, for annotations, are
# not in `__all__`; `ConvertedModule` imports torch.
_TOOLS = {
    "jaxfn._gradcheck": "GradcheckError check gradcheck gradgradcheck",
    "jaxfn._reports": "CheckError",
    "jaxfn._inspection.find_nan": "find_nan",
    "jaxfn._inspection.logs": "logged",
    "jaxfn._inspection.residuals": "residuals",
    "jaxfn._kernelcheck": "kernelcheck",
    "jaxfn._parity.paritycheck": "paritycheck record_reference",
    "jaxfn._port.public": "port",
    "jaxfn._port.training.trainingcheck": "trainingcheck",
    "jaxfn._torch": "TranslationError explain from_torch",
    "jaxfn._vmap_method": "VmapInfo",
    "jaxfn._torch.convert.module": "ConvertedModule",
}
_MODULES = {name: module for module, names in _TOOLS.items() for name in names.split()}

# Names that users of torch and JAX try first.
_HINTS = {
    "autograd graph": "Their names are in jaxfn itself: jaxfn.Function, jaxfn.gradcheck, jaxfn.saved_tensors_hooks",
    "check_grads": "Use jaxfn.gradcheck(f, inputs), and jaxfn.gradgradcheck for second derivatives",
    "custom_vjp custom_jvp": "Use @jaxfn.function; @f.backward replaces f.defvjp, and @f.jvp replaces f.defjvp",
    "log logs with_logs": "Call ctx.log(name=value) in a Function, and it in a block `with jaxfn.logged() as logs:`",
    "detect_anomaly debug_nans": "Use jaxfn.find_nan(f, *args)",
    "grad jit vmap jvp vjp checkpoint": "Use JAX's own transformations, as jax.grad(F.apply)",
    "no_grad": "Use jax.lax.stop_gradient(x)",
    "save_on_cpu": "Use jaxfn.save_on_host()",
    "saved_residuals": "Use jaxfn.residuals(f, *args)",
    "surrogate straight_through": "Write it as a backward; jaxfn.gradcheck(f, inputs, surrogate=g) checks it",
    "convert": "Use jaxfn.from_torch(code)",
    "source": "Use jaxfn.port(code, *args)",
    "testing": "Use jaxfn.check(f, inputs), jaxfn.gradcheck, jaxfn.kernelcheck or jaxfn.paritycheck",
    "version": "Use jaxfn.__version__",
}

# `from torch.autograd.function import once_differentiable` may become `from jaxfn.function import once_differentiable`.
sys.modules[f"{__name__}.function"] = sys.modules[__name__]


def _set_modules() -> None:
    """Names jaxfn as the module of every public name that is loaded, in tracebacks, pickles and on pages."""
    for name in {*__all__, *_MODULES}:
        value = getattr(sys.modules.get(_MODULES.get(name, __name__)), name, None)
        if value is not None:
            value.__module__ = __name__


_set_modules()


if not TYPE_CHECKING:  # to which every name would exist

    def __getattr__(name: str) -> Any:
        """Imports a tool from its module."""
        if name not in _MODULES:
            hint = "".join(f". {hint}." for names, hint in _HINTS.items() if name in names.split())
            # `from jaxfn import name` asks here first, and would replace the text of an AttributeError.
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            error = ImportError if hint and is_import else AttributeError
            raise error(f"module {__name__!r} has no attribute {name!r}{hint}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        _set_modules()
        return value


def __dir__() -> list[str]:
    without_torch = set[str]() if find_spec("torch") else {"ConvertedModule"}  # help() reads the value of each
    return sorted([*{*__all__, *_MODULES} - without_torch, "reports", "__version__"])
