"""PyTorch's `torch.autograd.Function` protocol on JAX."""

from jaxfn._context import FunctionCtx as FunctionCtx
from jaxfn._function import Function as Function
from jaxfn._functional import autograd_function as autograd_function
from jaxfn._functional import function as function
from jaxfn._once import once_differentiable as once_differentiable
from jaxfn._torch import TranslationError as TranslationError
from jaxfn._torch import from_torch as from_torch
from jaxfn._torch._parity import paritycheck as paritycheck
from jaxfn._torch._parity import record_oracle as record_oracle

__version__ = "0.1.0"
