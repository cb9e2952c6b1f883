"""PyTorch's `torch.autograd.Function` protocol on JAX."""

from typing import TYPE_CHECKING, Any

from jaxfn._function import Function
from jaxfn._functional import autograd_function, function
from jaxfn._gradcheck import GradcheckError, Mismatch, Report, gradcheck, gradgradcheck
from jaxfn._inspection.find_nan import NotFinite, find_nan
from jaxfn._inspection.logs import logged, with_logs
from jaxfn._inspection.residuals import Ledger, Residual, residuals
from jaxfn._kernelcheck import KernelcheckError, KernelReport, kernelcheck
from jaxfn._parity.paritycheck import paritycheck, record_oracle
from jaxfn._parity.report import ParityReport
from jaxfn._protocol.context import FunctionCtx
from jaxfn._protocol.hooks import disable_saved_tensors_hooks, save_on_host, saved_tensors_hooks
from jaxfn._protocol.once_differentiable import once_differentiable
from jaxfn._run.vmap import VmapInfo
from jaxfn._torch import TranslationError, from_torch

if TYPE_CHECKING:
    from jaxfn._torch.adopt.explain import Explanation as Explanation

__all__ = [  # and Explanation, which needs torch
    "Function",
    "FunctionCtx",
    "GradcheckError",
    "KernelReport",
    "KernelcheckError",
    "Ledger",
    "Mismatch",
    "NotFinite",
    "ParityReport",
    "Report",
    "Residual",
    "TranslationError",
    "VmapInfo",
    "autograd_function",
    "disable_saved_tensors_hooks",
    "find_nan",
    "from_torch",
    "function",
    "gradcheck",
    "gradgradcheck",
    "kernelcheck",
    "logged",
    "once_differentiable",
    "paritycheck",
    "record_oracle",
    "residuals",
    "save_on_host",
    "saved_tensors_hooks",
    "with_logs",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`Explanation`, whose module imports torch."""
    if name != "Explanation":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from jaxfn._torch.adopt.explain import Explanation

    return Explanation


def __dir__() -> list[str]:
    return sorted([*__all__, "Explanation", "__version__"])
