"""Types of what checks and tools return, for annotations: reports, their rows, and the entries of these.

All reports have a base, `Report`: they print as text, and as HTML in notebooks, `to_dict` and `to_json` return them as
data, and they are true if nothing is wrong.

>>> import jax.numpy as jnp, jaxfn
>>> def check(x) -> jaxfn.reports.GradcheckReport:
...     return jaxfn.gradcheck(jnp.sin, x)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxfn._gradcheck.function_check import CheckReport as CheckReport
    from jaxfn._gradcheck.report.report import GradcheckReport as GradcheckReport
    from jaxfn._gradcheck.report.report import JacobianEntry as JacobianEntry
    from jaxfn._gradcheck.report.report import Mismatch as Mismatch
    from jaxfn._inspection.find_nan import NanOrigin as NanOrigin
    from jaxfn._inspection.residuals import Residual as Residual
    from jaxfn._inspection.residuals import ResidualComparison as ResidualComparison
    from jaxfn._inspection.residuals import ResidualTable as ResidualTable
    from jaxfn._kernelcheck.report import KernelcheckEntry as KernelcheckEntry
    from jaxfn._kernelcheck.report import KernelcheckReport as KernelcheckReport
    from jaxfn._kernelcheck.report import KernelcheckRow as KernelcheckRow
    from jaxfn._parity.report import Deviation as Deviation
    from jaxfn._parity.report import ParitycheckReport as ParitycheckReport
    from jaxfn._parity.report import ParitycheckRow as ParitycheckRow
    from jaxfn._port.training.job_report import TrainingcheckReport as TrainingcheckReport
    from jaxfn._port.training.job_report import TrainingcheckRow as TrainingcheckRow
    from jaxfn._reports import Entry as Entry
    from jaxfn._reports import Report as Report
    from jaxfn._reports import Row as Row
    from jaxfn._torch.convert.explain import AppliedFunction as AppliedFunction
    from jaxfn._torch.convert.explain import ExplainedMethod as ExplainedMethod
    from jaxfn._torch.convert.explain import Explanation as Explanation
    from jaxfn._torch.graph.reads import Read as Read

# Imported at their first use, as the tools themselves. The last two modules import torch.
_TYPES = {
    "jaxfn._reports": "Report Row Entry",
    "jaxfn._gradcheck.function_check": "CheckReport",
    "jaxfn._gradcheck.report.report": "GradcheckReport Mismatch JacobianEntry",
    "jaxfn._kernelcheck.report": "KernelcheckReport KernelcheckRow KernelcheckEntry",
    "jaxfn._inspection.residuals": "ResidualTable ResidualComparison Residual",
    "jaxfn._inspection.find_nan": "NanOrigin",
    "jaxfn._port.training.job_report": "TrainingcheckReport TrainingcheckRow",
    "jaxfn._parity.report": "ParitycheckReport ParitycheckRow Deviation",
    "jaxfn._torch.convert.explain": "Explanation ExplainedMethod AppliedFunction",
    "jaxfn._torch.graph.reads": "Read",
}
_MODULES = {name: module for module, names in _TYPES.items() for name in names.split()}


if not TYPE_CHECKING:  # to which every name would exist

    def __getattr__(name: str) -> Any:
        """Imports a type from its module."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted(n for n, module in _MODULES.items() if find_spec("torch") or not module.startswith("jaxfn._torch"))
