"""The Functions with `torch.autograd.Function`: the code of those with jaxfn, on torch's operations."""

from __future__ import annotations

from benchmarks.functions import in_jaxfn
from tests.support.cases import in_library
from tests.support.libraries import torch_library

Relu = in_library(in_jaxfn.Relu, torch_library())
Swish = in_library(in_jaxfn.Swish, torch_library())
StraightThrough = in_library(in_jaxfn.StraightThrough, torch_library())
Linear = in_library(in_jaxfn.Linear, torch_library())

relu = Relu.apply
swish = Swish.apply
straight_through = StraightThrough.apply
linear = Linear.apply
