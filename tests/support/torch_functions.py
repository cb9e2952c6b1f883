"""Functions as people write them for PyTorch, each with arguments, to which `from_torch` is applied.

Arrays among the arguments are inputs, in float64 where they are floating; anything else goes to `apply` as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.autograd import Function, Variable
from torch.autograd.function import once_differentiable
from torch.nn import functional

from tests.support.catalogue import FUNCTIONS
from tests.support.libraries import torch_library


class Case(NamedTuple):
    """A Function and what to call it with.

    Attributes:
      function: the class.
      args: its arguments.
      order: up to which derivative torch has it right.
    """

    function: Any
    args: tuple[Any, ...]
    order: int


# Those that are written as in JAX. Of a saved intermediate, torch drops the second derivative.
SHARED = """
    exp straight_through relu mul mul_constant quantize normalize cross_entropy log_sum_exp cube returned_input
    complex_product real_times_complex undefined_gradients lookup
"""
CASES = {
    name: Case(shared.define(torch_library()), shared.args, 2)
    for name in SHARED.split()
    for shared in [FUNCTIONS.get(name) or FUNCTIONS[f"{name} of gradcheck"]]
}


def case(*args: Any, order: int = 2, tag: str = "") -> Callable[[Any], Any]:
    """Enters a Function in the table."""

    def enter(function: Any) -> Any:
        CASES[function.__name__ + tag] = Case(function, args, order)
        return function

    return enter


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


# ------------------------------------------------------------------------------------------- the documents' own


@case(normal(3, 4), normal(5, 4, seed=1), normal(5, seed=2))
@case(normal(3, 4), normal(5, 4, seed=1), None, tag="NoBias")
@case(normal(3, 4), normal(5, 4, seed=1), tag="DefaultBias")
class LinearFunction(Function):
    """The linear layer of PyTorch's notes on extending autograd."""

    @staticmethod
    def forward(ctx, input, weight, bias=None):
        ctx.save_for_backward(input, weight, bias)
        output = input.mm(weight.t())
        if bias is not None:
            output += bias.unsqueeze(0).expand_as(output)
        return output

    @staticmethod
    def backward(ctx, grad_output):
        input, weight, bias = ctx.saved_tensors
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = grad_output.mm(weight)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_output.t().mm(input)
        if bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad_output.sum(0).squeeze(0)
        return grad_input, grad_weight, grad_bias


# ------------------------------------------------------------------------------------------- activations, masks


@case(normal(4, 3))
class MaskedReLU(Function):
    """Writes zeros where a mask says so."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.clamp(min=0)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[input < 0] = 0
        return grad_input


@case(normal(4, 3))
class Triangle(Function):
    """Selects by a mask, computes, and puts back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        out = torch.zeros_like(x)
        out[x > 0] = torch.sqrt(x[x > 0])
        out[x <= 0] = -(x[x <= 0] ** 2)
        return out

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        mask = x > 0
        grad = -2 * x * grad_output
        grad[mask] = grad_output[mask] * 0.5 / torch.sqrt(x[mask])
        return grad


@case(normal(3, 5), -1)
class Softmax(Function):
    @staticmethod
    def forward(ctx, x, dim):
        shifted = x - x.max(dim=dim, keepdim=True)[0]
        out = shifted.exp() / shifted.exp().sum(dim, keepdim=True)
        ctx.save_for_backward(out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_variables
        return y * (grad_output - (y * grad_output).sum(ctx.dim, keepdim=True)), None


# ------------------------------------------------------------------------------------------- what ctx is used for


@case(normal(3), order=1)
class OnceDifferentiable(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad_output


@case(normal(4, 3), {"power": 3})
class Attributes(Function):
    """Sets a shape, a container, a callable and an intermediate on ctx."""

    @staticmethod
    def forward(ctx, x, options):
        ctx.shape = x.shape
        ctx.options = options
        ctx.pair = (x, [x.size(0), "unused"])
        ctx.derivative = lambda v: options["power"] * v ** (options["power"] - 1)
        return x.reshape(-1) ** options["power"]

    @staticmethod
    def backward(ctx, grad_output):
        x, (rows, _) = ctx.pair
        assert rows == ctx.shape[0] and ctx.options["power"] == 3
        return grad_output.view(ctx.shape) * ctx.derivative(x), None


@case(normal(4, 3))
class SeparateStyle(Function):
    @staticmethod
    def forward(x, scale=2.0):
        return (x * scale).tanh()

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.scale = inputs
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y) * ctx.scale, None


@case(normal(4, 3))
class ClassMethods(Function):
    @classmethod
    def power(cls):
        return 2

    @classmethod
    def forward(cls, ctx, x):
        ctx.save_for_backward(x)
        return x ** cls.power()

    @classmethod
    def backward(cls, ctx, grad_output):
        (x,) = ctx.saved_tensors
        return cls.power() * x * grad_output


@case(normal(4, 3), normal(3, seed=1), normal(4, 1, seed=2))
class Variadic(Function):
    """Leaves it to autograd to sum a gradient to its input's shape."""

    @staticmethod
    def forward(ctx, first, *others):
        ctx.save_for_backward(first, *others)
        ctx.count = len(others)
        return first * sum(others)

    @staticmethod
    def backward(ctx, grad_output):
        first, *others = ctx.saved_tensors
        return grad_output * sum(others), *[grad_output * first for _ in range(ctx.count)]


# ------------------------------------------------------------------------------------------- in place, views


@case(normal(4, 3))
class InPlace(Function):
    """Updates a copy of its input by views of it."""

    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        y[0].mul_(2)
        y[:, 1] += 1
        y.t()[2].zero_()
        y[1:3, ::2] = x[1:3, ::2] ** 2
        ctx.save_for_backward(x)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        factor = torch.ones_like(x)
        factor[0] = 2
        factor[:, 2].fill_(0)
        factor[1:3, ::2] = 2 * x[1:3, ::2]
        return grad_output * factor


@case(normal(4, 3), np.array([2, 0, 1, 2]), order=1)
class PickLogits(Function):
    """A loss with targets; writes one entry at a time with integers that are tensors.

    torch drops the second derivative, that of the saved intermediate.
    """

    @staticmethod
    def forward(ctx, logits, target):
        probabilities = torch.softmax(logits, dim=1)
        ctx.save_for_backward(probabilities, target)
        rows = torch.arange(logits.size(0), device=logits.device)
        return -torch.log(probabilities[rows, target]).mean()

    @staticmethod
    def backward(ctx, grad_output):
        probabilities, target = ctx.saved_tensors
        one_hot = torch.zeros_like(probabilities)
        for i in range(target.size(0)):
            one_hot[i, target[i]] = 1.0
        return grad_output * (probabilities - one_hot) / target.size(0), None


@case(normal(3, 3), 4)
class ConstantMatrix(Function):
    """Makes constants that Python code looks into."""

    @staticmethod
    def forward(ctx, x, n):
        mask = torch.ones(3, 3).triu(1)
        indices = mask.view(-1).nonzero().squeeze(1)
        weights = torch.tensor([1.0 / (i + 1) for i in range(len(indices))], dtype=x.dtype)
        if weights.sum().item() > 0:
            weights = weights * n
        ctx.save_for_backward(indices, weights)
        ctx.shape = x.shape
        return x.reshape(-1)[indices] * weights

    @staticmethod
    def backward(ctx, grad_output):
        indices, weights = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=grad_output.dtype).view(-1)
        grad[indices] = grad_output * weights
        return grad.view(ctx.shape), None


# ------------------------------------------------------------------------------------------- autograd inside


@case(normal(4, 3), order=1)
class BackwardInside(Function):
    @staticmethod
    def forward(ctx, x, slope=0.1):
        ctx.slope = slope
        with torch.enable_grad():
            leaf = Variable(x.data, requires_grad=True)
            y = functional.leaky_relu(leaf, slope) ** 2
        ctx.leaf, ctx.inside = leaf, None
        ctx.save_for_backward(x)
        return y.detach()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = x.detach()
            leaf.requires_grad = True
            torch.autograd.backward(functional.leaky_relu(leaf, ctx.slope) ** 2, grad_output)
        return leaf.grad, None


@case(normal(4, 3), np.sign(normal(4, 3, seed=1)), order=1)
class OldIdioms(Function):
    """Idioms of old code: resizes, `new`, an in-place update of the gradient."""

    @staticmethod
    def forward(ctx, predictions, targets):
        ctx.save_for_backward(predictions, targets)
        output = torch.empty_like(predictions).copy_(predictions.new(predictions.size()).fill_(1))
        output -= predictions.data.mul(targets).type_as(output)
        output[output.le(0.0)] = 0.0
        return torch.mean(output.mul(output))

    @staticmethod
    def backward(ctx, grad_output):
        predictions, targets = ctx.saved_tensors
        output = 1.0 - predictions.mul(targets)
        output[output.le(0.0)] = 0.0
        grad_input = predictions.new().resize_as_(predictions).copy_(targets).mul_(-2.0).mul_(output)
        grad_input.mul_(output.ne(0).type_as(output)).div_(predictions.numel())
        return grad_input * grad_output, None


# ------------------------------------------------------------------------------------------- Functions inside


RoundThrough = CASES["straight_through"].function
round_through = RoundThrough.apply


@case(normal(4, 3) * 3)
class AppliesAnother(Function):
    """Applies another Function in forward and in backward, by a name bound beforehand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return round_through(x) * x

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (round_through(x) + x)


@case(normal(4, 3), order=1)
class DifferentiatesAnother(Function):
    """Lets autograd differentiate a Function whose rule is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return RoundThrough.apply(x) ** 2

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(RoundThrough.apply(x) ** 2, x, grad_output)[0]


# ------------------------------------------------------------------------------------------- library functions


def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, as one kind of warning or another, and everywhere
        return torch.jit.script(function)


@case(normal(4, 3), "cpu", torch.complex128, order=1)
class DevicesAndDtypes(Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")
    def forward(ctx, x, device, dtype):
        ctx.save_for_backward(x)
        offset = torch.zeros(x.shape, dtype=dtype, device=torch.device(device))
        return (x.to(device).to(dtype) * 2 + offset).real.cpu()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return (grad_output * 2).to(x.dtype), None, None


@case([normal(2), normal(2, seed=1)], order=0)
class ListOfTensors(Function):
    @staticmethod
    def forward(ctx, tensors):
        return torch.stack(tensors).prod(0)


@case(normal(4, 3))
class WritesItsGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return functional.hardtanh(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad_input = grad_output.clone()
        grad_input[x.gt(1)] = 0
        grad_input.masked_fill_(x.lt(-1), 0.0)
        return grad_input
