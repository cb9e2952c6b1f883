"""PyTorch's `torch.autograd.Function` protocol on JAX."""

from jaxfn._function import Function as Function
from jaxfn._functional import autograd_function as autograd_function
from jaxfn._functional import function as function
from jaxfn._gradcheck import GradcheckError as GradcheckError
from jaxfn._gradcheck import gradcheck as gradcheck
from jaxfn._gradcheck import gradgradcheck as gradgradcheck
from jaxfn._parity.paritycheck import paritycheck as paritycheck
from jaxfn._parity.paritycheck import record_oracle as record_oracle
from jaxfn._protocol.context import FunctionCtx as FunctionCtx
from jaxfn._protocol.hooks import disable_saved_tensors_hooks as disable_saved_tensors_hooks
from jaxfn._protocol.hooks import save_on_host as save_on_host
from jaxfn._protocol.hooks import saved_tensors_hooks as saved_tensors_hooks
from jaxfn._protocol.once_differentiable import once_differentiable as once_differentiable
from jaxfn._torch import TranslationError as TranslationError
from jaxfn._torch import from_torch as from_torch

__version__ = "0.1.0"
