"""The torch names that torch does not promise, in one place, with the versions that each was seen on.

`_canary` tries what they do on the version that is installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)

__all__ = [
    "APPLYING_CLASS",
    "CLAMP_SPLITS_TIES",
    "HAS_COMPILED_APPLY",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionMeta",
    "FunctionalTensor",
    "FunctionalTensorMode",
    "TorchDispatchMode",
    "UnsupportedOperatorException",
    "apply_below",
    "takes_boxed_gradients",
    "without_modes",
]

without_modes = _disable_current_modes  # 2.8 to 2.15

_SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction  # pyright: ignore[reportPrivateUsage]

FunctionMeta: Any = torch.autograd.function.FunctionMeta  # 2.8 to 2.15

# Whether `Function.apply` is compiled code: from 2.15 on. Before, it is Python code that looks up the `apply` of the
# class below, which then is where `apply = SomeFunction.apply`, taken beforehand, comes by too.
HAS_COMPILED_APPLY = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)

APPLYING_CLASS: Any = torch.autograd.Function if HAS_COMPILED_APPLY else _SingleLevelFunction


with torch.enable_grad():
    _at_bound = torch.ones((), requires_grad=True)
    (_of_clamp,) = torch.autograd.grad(_at_bound.clamp(min=1.0), _at_bound)

# Whether `clamp` divides the derivative at a bound among all that is equal there: from 2.15 on.
CLAMP_SPLITS_TIES = _of_clamp.item() == 0


def apply_below(function: Any) -> Any:
    """`apply` of a Function as torch has it, past stand-ins (2.8 to 2.15)."""
    return super(_SingleLevelFunction, function).apply


def takes_boxed_gradients(function: Any) -> bool:
    """Whether `backward` gets its gradients as one list: from 2.10 on, where the Function says so."""
    return getattr(function, "boxed_grads_call", False)
