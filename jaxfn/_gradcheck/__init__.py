"""`gradcheck` and `gradgradcheck`: derivatives compared with finite differences and with autodiff."""

from jaxfn._gradcheck._gradcheck import gradcheck as gradcheck
from jaxfn._gradcheck._gradcheck import gradgradcheck as gradgradcheck
from jaxfn._gradcheck._report import GradcheckError as GradcheckError
