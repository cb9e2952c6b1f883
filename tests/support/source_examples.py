"""torch code, with arguments, that is rewritten for JAX; and code that is not, with the message."""

from __future__ import annotations

import enum
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import where
from torch.autograd import Function
from torch.autograd.function import once_differentiable

SCALE = 0.25  # of a loss

WRITTEN: dict[str, tuple[Any, tuple[Any, ...]]] = {}
READS_VALUES: dict[str, tuple[Any, tuple[Any, ...]]] = {}
NOT_SUPPORTED: dict[str, tuple[Any, tuple[Any, ...], str]] = {}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def written(*args: Any) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        WRITTEN[function.__name__] = function, args
        return function

    return enter


def reads_values(*args: Any) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        READS_VALUES[function.__name__] = function, args
        return function

    return enter


def not_supported(message: str, *args: Any) -> Callable[[Any], Any]:
    def enter(function: Any) -> Any:
        NOT_SUPPORTED[function.__name__] = function, args, message
        return function

    return enter


@written(normal(4, 6), normal(4, 6, seed=1))
class SeveralOutputs(Function):
    """Three outputs, one of them integers, and gradients that are None."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        values, index = torch.max(x * y, dim=1, keepdim=True)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(x, y, index)
        return values, index, x.sin() * y

    @staticmethod
    def backward(ctx, grad_values, _, grad_sin):
        x, y, index = ctx.saved_tensors
        grad_x = grad_y = None
        if grad_values is not None:
            grad = torch.zeros_like(x).scatter(1, index, grad_values)
            grad_x, grad_y = grad * y, grad * x
        if grad_sin is not None:
            grad_x = grad_sin * x.cos() * y + (0 if grad_x is None else grad_x)
            grad_y = grad_sin * x.sin() + (0 if grad_y is None else grad_y)
        return grad_x, grad_y


@written(normal(3, 5))
class InPlace(Function):
    """Updates of an argument, of parts, by masks, and of temporary values."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        y = x.clone().mul_(2).add_(1)
        y[:, 1] += 3
        y[:, 2:] *= x[:, 2:]
        y[1] = x[1].exp()
        y[y > 2] = y[y > 2] * 0.5
        with torch.no_grad():
            y.sub_(torch.ones_like(y))
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        grad = grad_output.clone()
        grad[x < 0] = 0
        return grad.mul_(x)


@written(normal(3, 5))
class MarksDirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.clamp_(min=0)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * (y > 0)


@written((normal(4) + 1j * normal(4, seed=1)).astype(np.complex64))
class ComplexSquare(Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z * z.conj(), z.abs()

    @staticmethod
    def backward(ctx, grad_square, grad_abs):
        (z,) = ctx.saved_tensors
        return 2 * grad_square.real * z + grad_abs * z / z.abs()


@written(normal(5, 3), normal(4, 3, seed=1), normal(4, seed=2))
class SeparateStyle(Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        return grad_output.mm(weight), grad_output.t() @ x, grad_output.sum(0)


def scaled(x, *, slope=2.0):
    return slope * torch.tanh(x)


class Clipped(Function):
    bound = 0.5

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.clamp(x, -Clipped.bound, Clipped.bound)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x.abs() <= Clipped.bound).type_as(x)


clipped = Clipped.apply


def loss(x, y, slope=2.0):
    """A function of tensors, with a helper, a Function under two names, and a constant."""
    difference = scaled(x, slope=slope) - scaled(y)
    return SCALE * (clipped(difference) + Clipped.apply(x) ** 2).mean(dim=0).sum()


@written(normal(3, 4), scaled)
class TakesFunction(Function):
    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (2 - 2 * torch.tanh(x) ** 2), None


@written(normal(2, 3, 4), normal(2, 4, 5, seed=1))
class Loops(Function):
    """Nested functions, lambdas, comprehensions, loops over shapes, names that are bound twice."""

    @staticmethod
    def forward(ctx, a, b):
        def product(x, y, transpose=False):
            return torch.bmm(x, y.transpose(1, 2) if transpose else y)

        ctx.save_for_backward(a, b)
        total = product(a, b)
        for i in range(a.size(0)):
            total = total + where(total[i] > 0, total[i], torch.zeros_like(total[i]))
        square = lambda x: x * x  # noqa: E731
        return torch.stack([square(row) for row in total]).sum(-1), len(total) * a.norm()

    @staticmethod
    def backward(ctx, grad_output, grad_norm):
        a, b = ctx.saved_tensors
        grad = grad_output.unsqueeze(-1).expand(-1, -1, b.shape[-1]) * torch.bmm(a, b)
        norm = torch.sqrt((a**2).sum())
        return grad @ b.mT + 2 * grad_norm * a / norm, torch.einsum("bij,bik->bjk", a, grad)


@written(normal(2, 3, 7, 6), normal(4, 3, 3, 2, seed=1))
class Convolution(Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, stride=2, padding=(1, 0))

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.nn.grad.conv2d_input(x.shape, weight, grad_output, stride=2, padding=(1, 0))
        if ctx.needs_input_grad[1]:
            grad_weight = torch.nn.grad.conv2d_weight(x, weight.shape, grad_output, stride=2, padding=(1, 0))
        return grad_x, grad_weight


@written(normal(3, 4), 2.0)
class AllRules(Function):
    """A forward mode and a batching rule."""

    @staticmethod
    def forward(x, slope):
        return torch.exp(slope * x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.slope = inputs
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * ctx.slope * y, None

    @staticmethod
    def jvp(ctx, tangent, _):
        (y,) = ctx.saved_tensors
        return ctx.slope * y.mul(tangent)

    @staticmethod
    def vmap(info, in_dims, x, slope):
        return torch.exp(slope * x), in_dims[0]


class Promotes(Function):
    """Integers, floats and Python numbers, whose results have other dtypes in JAX with x64."""

    @staticmethod
    def forward(ctx, n, x):
        quotient = n / 4 + torch.ones(3)
        return quotient, n // 2 * x, torch.where(n > 2, 1.0, 0.5), n.sum(), torch.arange(3) * 0.5, n.float().mean()

    @staticmethod
    def backward(ctx, *grads):
        return None, grads[1]


class AbsoluteTwice(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.size = torch.abs(x)
        return x * x.abs() / 2

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * torch.abs(x)


@written(normal(3, 4))
class Layout(Function):
    """Expressions that span lines, in parentheses and with comments."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        total = (
            torch.exp(x)  # of {x}
            * (x > 0)
            / 2
        ).sum(
            dim=1,
        )
        # fmt: off
        return -(x
                 .abs()
                 .sum(1)) * (total + torch.tensor(1)
                             - 2), total ** 2
        # fmt: on

    @staticmethod
    def backward(ctx, grad_output, grad_square):
        (x,) = ctx.saved_tensors
        grad = (
            grad_output[:, None]
            # twice
            + grad_square.unsqueeze(1)
        ) * torch.where(
            x > 0,
            x.exp(),
            0.5,
        )
        return (grad - (grad - x)).clone().mul_(2)


@written(normal(3, 4), 0.5)
class SinglePrecisionMasks(Function):
    """Code that computes in single precision, also for inputs in double precision; NumPy's numbers."""

    @staticmethod
    def forward(ctx, x, level):
        mask = (x > level).float()
        scale = (x * mask).sum() / np.sqrt(x.size(0))
        ctx.save_for_backward(mask, torch.cos(torch.arange(x.size(1)).float()))
        return scale * mask

    @staticmethod
    def backward(ctx, grad_output):
        mask, weight = ctx.saved_tensors
        return grad_output * mask * weight, None


@written(normal(2, 5))
class Chunks(Function):
    """Chunks of unequal length; a sum in single precision."""

    @staticmethod
    def forward(ctx, x):
        total = torch.zeros(2, 2)
        for chunk in x.chunk(3, dim=1):
            total += chunk.sum(dim=1, keepdim=True)
        return total

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.sum(dim=1, keepdim=True).expand(-1, 5)


@written(normal(3, 4), "tanh")
class FunctionsByName(Function):
    @staticmethod
    def forward(ctx, x, name):
        function = {"relu": torch.relu, "tanh": torch.tanh, "softmax": lambda x: torch.softmax(x, -1)}[name]
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * x, None


class Bounds(NamedTuple):
    low: float
    high: float = 1.0


class Clips:
    unit = 2

    @staticmethod
    def clip(x, bounds):
        return x.clamp(bounds.low, bounds.high)

    @classmethod
    def scale(cls):
        return 2 * cls.unit


@written(normal(3, 4))
class UsesClasses(Function, Clips):
    """A base class that is not a Function, and a class without methods."""

    unit = 3

    @staticmethod
    def forward(ctx, x):
        ctx.bounds = Bounds(-0.5)
        ctx.save_for_backward(x)
        return UsesClasses.clip(x, ctx.bounds) * UsesClasses.scale()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x > ctx.bounds.low) * UsesClasses.scale()


@written(normal(4, 5), np.array([1, -100, 4, 0]))
def masked_loss(logits, labels):
    """Labels of -100 are ignored."""
    return F.cross_entropy(logits, labels) + F.huber_loss(logits, logits.flip(0), reduction="sum", delta=0.3)


@written(np.tril(normal(3, 3)) + 3 * np.eye(3, dtype=np.float32))
def of_lower_triangles(x):
    return torch.linalg.cholesky(x).sum(0), torch.linalg.eigh(x)[0]


def equation(z, x, weight):
    return torch.tanh(z @ weight + x)


@written(0.5 * normal(4, 3), 0.3 * normal(3, 3, seed=1))
class FixedPoint(Function):
    """Differentiates inside, by some inputs repeatedly; a value that is computed with the output is used later."""

    @staticmethod
    def forward(ctx, x, weight):
        z = torch.zeros_like(x)
        for _ in range(20):
            z = equation(z, x, weight)
        ctx.save_for_backward(z, x, weight)
        return z

    @staticmethod
    def backward(ctx, grad_output):
        z, x, weight = ctx.saved_tensors
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
            # One step of the iteration.
            scale = 1.0
            y = equation(z, x, weight)
        vector = grad_output
        for _ in range(20):
            vector = grad_output + torch.autograd.grad(y, z, vector, retain_graph=True)[0]
        return torch.autograd.grad(y, (x, weight), scale * vector)


@written(normal(3, 4))
class InsideWithTies(Function):
    """Differentiates inside by detached inputs, with a function that has another spelling at ties."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x / (1 + x.abs())

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = x / (1 + x.abs())
        return torch.autograd.grad(y, x, grad_output)[0]


@not_supported(r"it is not clear what autograd differentiates(.|\n)*torch.autograd.grad\(y, \[\*inputs", normal(3))
class UnclearGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad_output):
        inputs = [ctx.saved_tensors[0].detach().requires_grad_()]
        with torch.enable_grad():
            y = inputs[0].sin()
        return torch.autograd.grad(y, [*inputs], grad_output)[0]


@written(normal(3, 4), normal(4, 2))
class GradientsOfExpressions(Function):
    """Expressions as outputs, inputs without `detach`, and a variable that the differentiated code changes."""

    @staticmethod
    def forward(ctx, x, w):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(x.pow(3).sum(), x)
        ctx.save_for_backward(x, w)
        return (x @ w).sin() + slope.sum()

    @staticmethod
    def backward(ctx, grad_output):
        scale = 2.0
        with torch.enable_grad():
            x, w = ctx.saved_tensors
            z = (x @ w).sin()
            scale = scale + 1.0
            dx, dw = torch.autograd.grad((z * grad_output).sum() * (scale - 2.0), (x, w))
        return dx + 6 * x.detach() * grad_output.sum(), dw


def parts(x):
    return x[:1, 1:] * 2, (x[1:] * 3, 0.5)


def doubled(x):
    y = x * 2
    return y


@written(normal(3, 4))
class Accumulates(Function):
    """Variables of `forward` that a function in it updates, results of a call, and parts that get several results."""

    @staticmethod
    def forward(ctx, x):
        total, rows = torch.zeros_like(x[0]), []

        def add(row):
            total.add_(row)
            total[0] += 1
            rows.append(row * 2)

        for row in x:
            add(row)
        y = doubled(x.t()).mul_(3).t()
        top, bottom = torch.zeros_like(x[:1]), torch.zeros_like(x)
        top[:, 1:], (bottom[1:], scale) = parts(x)
        ctx.save_for_backward(x)
        return total + torch.stack(rows).sum(0) * scale, y + top + bottom

    @staticmethod
    def backward(ctx, grad_total, grad_y):
        (x,) = ctx.saved_tensors
        outer = grad_y.t() @ x
        diagonal = torch.diagonal(outer, dim1=-1, dim2=-2)
        diagonal += grad_total
        return grad_y * 6 + grad_total + (x @ outer)


def without_autocast():
    return torch.autocast("cpu", enabled=False)


@written(normal(4, 4), np.sort(normal(5)))
class MoreRules(Function):
    """Functions of the table, contexts, and a check of whether autograd records."""

    @staticmethod
    def forward(ctx, x, knots):
        with without_autocast(), torch.autograd.profiler.record_function("forward"):
            bins = torch.searchsorted(knots, x.flatten().sort().values, side="right").view_as(x)
        ctx.save_for_backward(x, knots)
        weight = torch.nn.Parameter(x)
        filled = (weight * 2).fill_diagonal_(3.0).masked_scatter(x > 0, bins.to(x.dtype).flatten())
        pairs = torch.cartesian_prod(x[0], x[1]).sum() + torch.diagflat(x[0]).sum() + x.element_size()
        row, column = torch.unravel_index(torch.arange(4), (2, 2))
        loss = torch.nn.functional.kl_div(x, filled, reduction="batchmean", log_target=True) * 1e-3
        normal = torch.nn.functional.batch_norm(x, x[0], x[1].square() + 1, x[2], x[3])
        return filled + pairs + loss + normal + row * column

    @staticmethod
    def backward(ctx, grad_output):
        if torch.is_grad_enabled():
            raise RuntimeError("has no second derivative")
        with warnings.catch_warnings():
            x, _ = ctx.saved_tensors
            lu, pivots = torch.linalg.lu_factor(torch.eye(4) * 4 + torch.func.vmap(torch.tanh)(x))
            slope = torch.func.grad(lambda z: z.pow(3).sum())(x)
            return torch.linalg.lu_solve(lu, pivots, grad_output) * slope, torch.vmap(torch.sum)(x)[0] * torch.ones(5)


@written(normal(3))
class SavedForForward(Function):
    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output * ctx.saved_tensors[0]

    @staticmethod
    def jvp(ctx, tangent):
        (x,) = ctx.saved_for_forward
        return 2 * tangent * x


@reads_values(normal(4), np.array([3, 1, 3, 2]))
class DistinctElements(Function):
    @staticmethod
    def forward(ctx, x, labels):
        ctx.save_for_backward(labels)
        scale = 2.0 if torch.equal(labels, labels.sort().values) else 1.0
        return x.sum() * scale * torch.unique(labels).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_output):
        (labels,) = ctx.saved_tensors
        _, inverse, counts = torch.unique(labels, return_inverse=True, return_counts=True)
        positions = (labels > 1).argwhere()
        return (grad_output * counts).sum() + inverse.to(grad_output.dtype) * len(positions), None


@written(normal(3), 2.0)
class ReassignedInput(Function):
    """The gradient is by the variable's last value before the output, not by the one that got `requires_grad`."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x)
        ctx.k = k
        return (x * k).sin()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        count = 0
        with torch.enable_grad():
            x = x.detach()
            x.requires_grad_()
            x = x * ctx.k
            y = x.sin()
            count += 1
            (gradient,) = torch.autograd.grad(y, x, grad_output)
        return gradient * ctx.k * count, None


@not_supported(r"it is not clear what autograd differentiates", normal(3), 1.0)
class ChangedBesideItsGradient(Function):
    """The output changes in the statement that contains the derivative."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sin() if scale is None else x.sin() * scale

    @staticmethod
    def backward(ctx, grad_output):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = x.sin()
            if ctx.scale is not None:
                y = y * ctx.scale
                (gradient,) = torch.autograd.grad(y, x, grad_output)
        return gradient, None


@not_supported(r"`except` would catch the error(.|\n)*y = y \* 2", normal(3), False)
class CatchesWhatIsNotReached(Function):
    @staticmethod
    def forward(ctx, x, double):
        y = x * 1
        try:
            if double:
                y = y * 2
            y = y + 1
        except Exception:
            pass
        return y

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


@not_supported(r"`with torch.autocast\(.*enabled=on\)` has no rule", normal(3, 3), False)
class AutocastByArgument(Function):
    @staticmethod
    def forward(ctx, x, on):
        with torch.autocast("cpu", enabled=on):
            return x @ x

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


def noise_like(x, scale=1.0):
    return torch.randn_like(x) * scale


class DrawsRepeatedly(Function):
    """Draws in a loop, in a part of an expression, and in a helper; `setup_context`."""

    @staticmethod
    def forward(x, steps):
        total = noise_like(x, 0.5)
        for i in range(steps):
            total = total + (torch.rand_like(x) if i % 2 else noise_like(x))
        return x * total, total

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, steps = inputs
        ctx.steps = steps
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx, grad_output, _):
        (total,) = ctx.saved_tensors
        for _ in range(ctx.steps):
            grad_output = grad_output * torch.rand_like(total)
        return grad_output * total, None


class NoisyGradient(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(torch.bernoulli(torch.full_like(x, 0.5)))
        return x + torch.randn_like(x) + torch.distributions.Bernoulli(probs=x.sigmoid()).sample()

    @staticmethod
    def backward(ctx, grad_output):
        (mask,) = ctx.saved_tensors
        noise = torch.rand_like(grad_output) + torch.empty_like(mask).uniform_(1, 2)
        return grad_output * mask * noise


class Branches(Function):
    @staticmethod
    def forward(ctx, x, kind):
        ctx.save_for_backward(x)
        if kind == "sin":
            return torch.sin(x)
        elif kind == "exp":
            return torch.exp(x)
        elif kind == "cos":
            return torch.cos(x)
        else:
            raise ValueError(f"no kind {kind}")

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (torch.cos(x) if x.ndim else math.nan), None


class Shadows(Function):
    """Variables with the names of modules and of functions that written modules define."""

    @staticmethod
    def forward(ctx, jnp, absolute):
        lax = torch.abs(jnp) * absolute
        ctx.save_for_backward(jnp, absolute)
        return lax.sum(0, keepdim=True)

    @staticmethod
    def backward(ctx, np):
        jax, absolute = ctx.saved_tensors
        return np * absolute * torch.sign(jax), np * torch.abs(jax)


class Tanh(Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * (1 - y * y)


class OneSize(Function):
    @staticmethod
    def forward(ctx, x):
        assert x.shape == (3, 4)
        return 2 * x

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output


class TanhBackward(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.log1p()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * torch.tanh(x)


@not_supported(r"row is read after an in-place update", normal(3, 4))
class AliasOfRow(Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clone()
        row = y[0]
        y[0] = 5.0
        return y + row.sum()

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


@not_supported(r"renorm has no rule(.|\n)*return torch.renorm\(x, 2, 0, 1.0\)", normal(3, 2))
class NoRule(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.renorm(x, 2, 0, 1.0)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class ByTheScaleAlone(Function):
    @staticmethod
    def forward(ctx, x, scale):
        if x.requires_grad:
            raise RuntimeError("there is no gradient of x")
        ctx.save_for_backward(x)
        return x * scale

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return None, (grad_output * x).sum()


@functools.lru_cache
def registry():
    return {}


registry()["scale"] = 3.0


@not_supported("the cache of registry has objects that may change", normal(3))
class ReadsRegistry(Function):
    @staticmethod
    def forward(ctx, x):
        return x * registry().get("scale", 1.0)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


@functools.singledispatch
def factor_of(kind):
    return 1.0


@not_supported("the decorator singledispatch has no rule", normal(3), 2.5)
class Dispatches(Function):
    @staticmethod
    def forward(ctx, x, kind):
        return x * factor_of(kind)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


@not_supported("whether this tensor requires a gradient depends on the call", normal(5) + 2, normal(5))
class SavesTheLargerFirst(Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.is_first = bool(x.max() > y.max())
        ctx.save_for_backward(*((x, y) if ctx.is_first else (y, x)))
        return x * y

    @staticmethod
    def backward(ctx, grad_output):
        large, small = ctx.saved_tensors
        of_large = grad_output * small if large.requires_grad else None
        of_small = grad_output * large if small.requires_grad else None
        return (of_large, of_small) if ctx.is_first else (of_small, of_large)


@reads_values(normal(3))
class ByItsSum(Function):
    """Other samples than the example take the other branches."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x if x.sum() > 0 else x.sin()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        if x.sum() > 0:
            return grad_output * 3 * x
        return grad_output * x.cos() * float(x.max())


@reads_values(normal(4, 3), 20)
class SortsWhatIsPositive(Function):
    """A loop until values converge, a number of elements that depends on them, and a check."""

    @staticmethod
    def forward(ctx, x, steps):
        count = 0
        while (x.abs() * 0.5**count).max() > 0.1 and count < steps:
            count += 1
        mask = x > 0
        y = torch.zeros_like(x)
        y[mask] = x[mask].sort().values * count
        if torch.isnan(y).any():
            raise ValueError("not a number")
        ctx.count = count
        ctx.save_for_backward(x, mask)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        x, mask = ctx.saved_tensors
        return grad_output * mask * ctx.count * x.masked_select(mask).sum(), None


class Rounding(enum.Enum):
    NEAREST = 0
    DOWN = 1


FACTORS = {Rounding.NEAREST: 1.0, Rounding.DOWN: 3.0}


@functools.lru_cache
def powers(n):
    return tuple(2**i for i in range(n))


fused = torch.compiler.disable


@fused
def largest(x, factor):
    return (x * factor).abs().amax(dim=-1, keepdim=True).clamp_(min=0.1)


@written(normal(3, 4), Rounding.DOWN)
class RoundsBy(Function):
    """An enumeration, decorators, a temporary updated in place, numbers of a shape."""

    @staticmethod
    def forward(ctx, x, rounding):
        size = x.shape[1:].numel()
        top = x.abs().max(dim=-1, keepdim=True).values.clamp_(min=1e-3) + largest(x, 0.5)
        y = x * powers(3)[2] * FACTORS[rounding]
        return (y.floor() if rounding == Rounding.DOWN else y.round()) * size / top

    @staticmethod
    def backward(ctx, grad_output):
        return torch.autograd.Variable(torch.flip(grad_output, dims=[-1])) * 2, None


@reads_values(normal(3, 4))
class ScalesByItem(Function):
    """A number of a tensor, which has other bits than the tensor."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale = x.abs().max().item()
        return x / ctx.scale

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output / ctx.scale


WEIGHT = torch.ones(3)


@not_supported("dropout has no rule for these arguments", normal(3), False)
class Dropout(Function):
    """An option in a variable, which may have another value in another call."""

    @staticmethod
    def forward(ctx, x, training):
        return F.dropout(x, 0.5, training=training)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


@not_supported("it uses the module torch", normal(3), "tanh")
class ByAttribute(Function):
    """A function whose name is in a variable."""

    @staticmethod
    def forward(ctx, x, name):
        return getattr(torch, name)(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output, None


@written(normal(3))
class ReadsGlobalTensor(Function):
    @staticmethod
    def forward(ctx, x):
        return x * WEIGHT

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * WEIGHT


@written(normal(3, 4), normal(3, 4, seed=1))
class SavesWhereNeeded(Function):
    """`backward` fails if the first argument alone needs no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        if x.requires_grad:
            ctx.save_for_backward(x, y)
        return x.detach() * y if not (x * y).requires_grad else x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x if ctx.needs_input_grad[1] else None


@written(normal(3, 4), normal(3, 4, seed=1))
class AsksForWhatIsNeeded(Function):
    """The inputs are read in another method, and in `backward` as an attribute of ctx."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return AsksForWhatIsNeeded.scaled(ctx, x, scale)

    @staticmethod
    def scaled(ctx, values, factor):
        ctx.save_for_backward(values if factor.requires_grad else None)
        return values * factor

    @staticmethod
    def backward(ctx, gradient):
        (values,) = ctx.saved_tensors
        scale = ctx.scale
        return gradient * scale, gradient * values if scale.requires_grad else None


@written(normal(3, 4) * 3)
def types_by_name(x):
    sign = (x > 0).type(x.type()) - (x < 0).type("torch.FloatTensor")
    return x.new(x) + (sign * (sign * x).to(torch.int32)).to(x.dtype)


@written(normal(3, 4))
def selected_elements(x):
    """Elements that masks select, in variables: what is computed of them is stored by the mask, or added up."""
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    large, keep = x.abs() > 0.3, x.sum(-1) > 0
    small = ~large & (x > -0.2)
    first[large], second[small] = 1.0, 0.5
    values, others = x[large], x[small]
    ratio = values.cos() / values
    first[large] = (ratio + 1).float() * values
    second[small] += others.exp()
    first[keep] -= x[keep] * torch.arange(x.shape[-1])
    second[keep] = x[0]
    return first, second + x[large].sum() + (2 * ratio).sum()


@written(normal(3, 4))
def constant_masks(x):
    """Masks that depend on no values select the same elements in each call."""
    rows = torch.ones(x.shape[0], dtype=torch.bool)
    columns, y = x.argmax(-1), x.clone()
    y[rows, columns] -= 1
    diagonal = torch.eye(x.shape[0], x.shape[1]) > 0
    y[diagonal] = y[diagonal] * 2
    return y + x[rows, columns][:, None], x[diagonal].flip(0)


@written(normal(2, 3, 3))
def rotation_of(x):
    """LAPACK's singular values of matrices with infinities may take forever."""
    u, _, v = torch.svd(x)
    return u @ v.mT


@not_supported(r"`flip` of elements selected by a mask(.|\n)*y\[x > 0\] = x\[x > 0\].flip", normal(3, 4))
def reversed_elements(x):
    y = x.clone()
    y[x > 0] = x[x > 0].flip(0)
    return y


@not_supported(r"assignment to several targets has no rule(.|\n)*x\[0\], y = y, x\[1\]", normal(3, 4))
def exchanges(x):
    x, y = x.clone(), x[2] * 2
    x[0], y = y, x[1]
    return x + y


@written(normal(4, 3), normal(4, 3, seed=1))
class OldFunctions(Function):
    @staticmethod
    def forward(ctx, x, y):
        u, s, v = torch.svd(x)
        ctx.save_for_backward(torch.softmax(y, 1), torch.log_softmax(y, 1))
        return (u * s) @ v.t(), torch.softmax(y, 1)

    @staticmethod
    def backward(ctx, first, second):
        p, log_p = ctx.saved_tensors
        gradient = torch._softmax_backward_data(second, p, 1, p.dtype)
        return first, gradient + torch._log_softmax_backward_data(second, log_p, 1, p.dtype)


@written(normal(3, 2))
class FailingForwardMode(Function):
    """A `jvp` that fails."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[1]


@written(normal(3, 4), 0.5)
class WritesThroughViews(Function):
    """Updates of a tensor through other variables, and through expressions, that share its memory."""

    @staticmethod
    def forward(ctx, x, rate):
        output = x.clone()
        _, order = x.flatten().abs().sort()
        number = int(rate * x.numel())
        flat = output.flatten()
        flat[order[:number]] = 0
        flat[order[number:]] += 1
        return output

    @staticmethod
    def backward(ctx, *gradients):
        first = gradients[0]
        first.clamp_(-100, 100)
        gradient = first.clone()
        columns = gradient.t()
        columns[0] = 5
        column = columns[1]
        column *= 2
        gradient.view(-1)[1] = 7
        gradient.narrow(1, 2, 1).mul_(3)
        gradient.permute(1, 0).select(0, 1).add_(1)
        gradient[:, 1:].diagonal().fill_(0.5)
        scale = (gradient * 0 + 2).exp_().mul_(gradient.detach().neg_())
        return gradient + scale, None


@written(normal(3, 4), normal(4, seed=1))
class StoredGradients(Function):
    """`backward` inside, and the gradients that it stores."""

    @staticmethod
    def forward(ctx, x, bias):
        ctx.save_for_backward(x, bias)
        y = x * bias
        with torch.no_grad():
            x = x.detach()
            with torch.enable_grad():
                x.requires_grad = True
                loss = x.cos().sum()
                torch.autograd.backward(loss)
                return y.sin() + x.grad

    @staticmethod
    def backward(ctx, gradient):
        x, bias = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach()
            x.requires_grad = True
            bias = bias.detach()
            bias.requires_grad = True
            y = (x * bias).sin()
            y.backward(gradient=gradient)
        return x.grad - gradient * x.cos(), bias.grad.flatten()


DTYPES = {torch.float32: torch.complex64, torch.float64: torch.complex128}


@written(normal(3, 3), normal(3, seed=1))
def copies_and_constants(x, y):
    index = torch.ones(3, 3).triu().reshape(9).nonzero(as_tuple=False)
    return x.to(DTYPES[x.dtype]), x.reshape(9)[index] * torch.tensor(y)[0]
