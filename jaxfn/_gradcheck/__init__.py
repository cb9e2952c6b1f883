"""`gradcheck` and `gradgradcheck`: derivatives compared with finite differences and with autodiff."""

from jaxfn._gradcheck.function_check import CheckReport as CheckReport
from jaxfn._gradcheck.function_check import check as check
from jaxfn._gradcheck.public import gradcheck as gradcheck
from jaxfn._gradcheck.public import gradgradcheck as gradgradcheck
from jaxfn._gradcheck.report.report import GradcheckError as GradcheckError
from jaxfn._gradcheck.report.report import GradcheckReport as GradcheckReport
from jaxfn._gradcheck.report.report import Mismatch as Mismatch
