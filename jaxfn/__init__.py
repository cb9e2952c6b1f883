"""PyTorch's `torch.autograd.Function` protocol on JAX."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxfn._context import FunctionCtx
from jaxfn._function import Function
from jaxfn._functional import autograd_function, function
from jaxfn._hooks import disable_saved_tensors_hooks, save_on_host, saved_tensors_hooks
from jaxfn._once_differentiable import once_differentiable
from jaxfn._vmap_method import VmapInfo

if TYPE_CHECKING:
    from jaxfn._gradcheck import GradcheckError, Mismatch, Report, gradcheck, gradgradcheck
    from jaxfn._inspection.find_nan import NotFinite, find_nan
    from jaxfn._inspection.logs import logged, with_logs
    from jaxfn._inspection.residuals import Ledger, Residual, residuals
    from jaxfn._kernelcheck import KernelcheckError, KernelReport, kernelcheck
    from jaxfn._parity.paritycheck import paritycheck, record_oracle
    from jaxfn._parity.report import ParityReport
    from jaxfn._torch import TranslationError, from_torch
    from jaxfn._torch.convert.explain import Explanation as Explanation

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

# What training does not need is imported when it is first asked for, so that `import jaxfn` stays a matter of
# milliseconds; and `Explanation` lies beside what imports torch.
_TOOLS = {
    "jaxfn._gradcheck": ("GradcheckError", "Mismatch", "Report", "gradcheck", "gradgradcheck"),
    "jaxfn._inspection.find_nan": ("NotFinite", "find_nan"),
    "jaxfn._inspection.logs": ("logged", "with_logs"),
    "jaxfn._inspection.residuals": ("Ledger", "Residual", "residuals"),
    "jaxfn._kernelcheck": ("KernelReport", "KernelcheckError", "kernelcheck"),
    "jaxfn._parity.paritycheck": ("paritycheck", "record_oracle"),
    "jaxfn._parity.report": ("ParityReport",),
    "jaxfn._torch": ("TranslationError", "from_torch"),
    "jaxfn._torch.convert.explain": ("Explanation",),
}
_MODULES = {name: module for module, names in _TOOLS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A tool, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])  # all that can be asked for without torch
