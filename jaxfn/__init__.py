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
  function                 a decorator, in place of a class
  autograd_function        R torch's form: two functions, with saves and gradients by name
  once_differentiable      a decorator of `backward`: a second derivative raises
  saved_tensors_hooks      pack what Functions save; also save_on_host, disable_saved_tensors_hooks

Check it
  check                    all checks that need no reference
  gradcheck                first derivatives, against finite differences and autodiff
  gradgradcheck            second derivatives
  kernelcheck              a kernel's rounding errors, against a reference

Look into a program
  residuals                what reverse mode saves, and which Function saved it
  find_nan                 where a NaN or an infinity first appears
  logged, with_logs        values from inside `forward` and `backward` (`ctx.log`)

Bring torch code over
  from_torch               convert a torch Function, function or module, unchanged
  explain                  show how torch code is translated
  port                     rewrite the source of torch code for JAX
  paritycheck              compare a port with the original
  record_oracle            store the original's results, to compare without torch

Types of results and errors: CallableFunction, VmapInfo; CheckReport and CheckError, the bases of FunctionReport,
GradcheckReport, GradcheckError, Mismatch, KernelReport, KernelcheckError, ParityReport and ParitycheckError; Residual,
ResidualTable, ResidualComparison; NanOrigin; ConvertedModule, Explanation and TranslationError.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxfn._context import FunctionCtx
from jaxfn._function import Function
from jaxfn._functional import CallableFunction, autograd_function, function
from jaxfn._hooks import disable_saved_tensors_hooks, save_on_host, saved_tensors_hooks
from jaxfn._once_differentiable import once_differentiable
from jaxfn._vmap_method import VmapInfo

if TYPE_CHECKING:
    from jaxfn._check.reports import CheckError, CheckReport
    from jaxfn._gradcheck import (
        FunctionReport,
        GradcheckError,
        GradcheckReport,
        Mismatch,
        check,
        gradcheck,
        gradgradcheck,
    )
    from jaxfn._inspection.find_nan import NanOrigin, find_nan
    from jaxfn._inspection.logs import logged, with_logs
    from jaxfn._inspection.residuals import Residual, ResidualComparison, ResidualTable, residuals
    from jaxfn._kernelcheck import KernelcheckError, KernelReport, kernelcheck
    from jaxfn._parity.paritycheck import paritycheck, record_oracle
    from jaxfn._parity.report import ParitycheckError, ParityReport
    from jaxfn._torch import TranslationError, explain, from_torch, port
    from jaxfn._torch.convert.explain import Explanation as Explanation
    from jaxfn._torch.convert.module import ConvertedModule as ConvertedModule

__all__ = [  # and ConvertedModule and Explanation, which need torch
    "CallableFunction",
    "CheckError",
    "CheckReport",
    "Function",
    "FunctionCtx",
    "FunctionReport",
    "GradcheckError",
    "GradcheckReport",
    "KernelReport",
    "KernelcheckError",
    "Mismatch",
    "NanOrigin",
    "ParityReport",
    "ParitycheckError",
    "Residual",
    "ResidualComparison",
    "ResidualTable",
    "TranslationError",
    "VmapInfo",
    "autograd_function",
    "check",
    "disable_saved_tensors_hooks",
    "explain",
    "find_nan",
    "from_torch",
    "function",
    "gradcheck",
    "gradgradcheck",
    "kernelcheck",
    "logged",
    "once_differentiable",
    "paritycheck",
    "port",
    "record_oracle",
    "residuals",
    "save_on_host",
    "saved_tensors_hooks",
    "with_logs",
]

__version__ = "0.1.0"

# Tools are imported at their first use, so that `import jaxfn` takes milliseconds; the module of `Explanation` imports
# torch.
_TOOLS = {
    "jaxfn._gradcheck": (
        "FunctionReport",
        "GradcheckError",
        "Mismatch",
        "GradcheckReport",
        "check",
        "gradcheck",
        "gradgradcheck",
    ),
    "jaxfn._inspection.find_nan": ("NanOrigin", "find_nan"),
    "jaxfn._check.reports": ("CheckError", "CheckReport"),
    "jaxfn._inspection.logs": ("logged", "with_logs"),
    "jaxfn._inspection.residuals": ("ResidualComparison", "ResidualTable", "Residual", "residuals"),
    "jaxfn._kernelcheck": ("KernelReport", "KernelcheckError", "kernelcheck"),
    "jaxfn._parity.paritycheck": ("paritycheck", "record_oracle"),
    "jaxfn._parity.report": ("ParitycheckError", "ParityReport"),
    "jaxfn._torch": ("TranslationError", "explain", "from_torch", "port"),
    "jaxfn._torch.convert.explain": ("Explanation",),
    "jaxfn._torch.convert.module": ("ConvertedModule",),
}
_MODULES = {name: module for module, names in _TOOLS.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a tool from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])  # the public names that need no torch
