"""Torch Functions whose Python code reads the values of tensors, and their derivatives in torch and JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.libraries import Jax, inputs_saved, output_saved, torch_library
from tests.support.torch_code import rule

CASES: dict[str, Any] = {}


def read_case(backward: Any = lambda g, x: g * x.cos() * x.abs().max().item(), save: Any = inputs_saved) -> Any:
    """Adds a Function with this forward; a wrong backward, so that only the rule gives its gradients."""

    def add(forward: Any) -> Any:
        CASES[forward.__name__] = rule(forward, backward, save)
        return forward

    return add


# --- An `if`, both of whose results have one shape.


@read_case()
def if_sum(x):
    if x.sum() > 0:
        return x * x
    return -(x**3)


@read_case()
def if_expression(x):
    return x.sin() if (x > 0.5).all() else x.exp()


@read_case()
def if_any_nan_is_zeroed(x):
    if torch.isnan(1 / (x - x.round())).any() or not x.max() > 1:
        x = x + 1
    return x * 3


@read_case()
def elif_and_not(x):
    if x.min() > 0:
        y = x.sqrt()
    elif not bool((x < 0).all()) and x[0] > x[1]:
        y = x * x[0]
    else:
        y = x.square() * 2
    return y


def slope_by_sign(g, x):
    return g * x if (g * x).sum() > 0 else g * 5 * x.sin()


@read_case(slope_by_sign)
def if_in_backward(x):
    return x * 2


@read_case(lambda g, x: g * x if torch.equal(x, x.abs()) else g * x**2)
def equal_in_backward(x):
    return x * 2 if torch.allclose(x, x.abs(), atol=0.3) else x * 7


class MasksGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        largest = x.abs().max()
        ctx.clipped = bool(largest > 1)
        ctx.save_for_backward(x)
        return x / largest.item() if ctx.clipped else x * 1

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.cosh() * 3 if ctx.clipped else g * x.cos()


CASES["MasksGradient"] = MasksGradient


@read_case()
def match_on_an_integer(x):
    match int((x > 0).sum()):
        case 0:
            return x * 2
        case 1 | 2:
            return x.sin()
        case n:
            return x * n


# --- Loops until converged.


@read_case()
def halve_until_small(x):
    while (x.abs() > 1).any():
        x = x / 2
    return x * x


@read_case()
def newton_square_root(x):
    y = torch.ones_like(x)
    for _ in range(30):
        new = 0.5 * (y + x.abs() / y)
        if (new - y).abs().max() < 1e-3:
            break
        y = new
    return y


def fixed_point_in_backward(g, z):
    slope, u = 1 - z * z, g
    while True:
        new = g + 0.4 * slope * u
        if (new - u).abs().max().item() < 1e-3:
            return new * slope
        u = new


@read_case(fixed_point_in_backward, output_saved)
def implicit_fixed_point(x):
    z = torch.zeros_like(x)
    for _ in range(20):
        new = torch.tanh(0.4 * z + x)
        if float((new - z).norm()) < 1e-3:
            break
        z = new
    return new


@read_case()
def line_search(x):
    step, value = 1.0, (x * x).sum()
    while ((x - step * 2 * x) ** 2).sum() >= value * 0.9:
        step /= 2
    return x - step * 2 * x


@read_case()
def collatz_counts(x):
    n, count = int(x.abs().sum() * 3), 0
    while n > 1:
        n, count = (n // 2 if n % 2 == 0 else 3 * n + 1), count + 1
    return x * count


# --- Checks.


@read_case()
def asserted(x):
    assert (x < 100).all() and not x.isnan().any(), "too large"
    return x * x


@read_case()
def raises_or_not(x):
    if not torch.isfinite(x).all():
        raise ValueError("not finite")
    return x.sin()


@read_case()
def retried(x):
    for scale in (1.0, 2.0, 4.0):
        try:
            if (x.abs() > scale).any():
                raise ValueError("overflow")
            return x / scale
        except ValueError:
            pass
    return x.clamp(-4, 4)


# --- NumPy and SciPy.


@read_case()
def through_numpy(x):
    return torch.from_numpy(np.sort(x.detach().numpy())[::-1].copy()) * x


@read_case(lambda g, x: g * torch.from_numpy(np.cos(np.asarray(x.detach()))))
def numpy_in_backward(x):
    return torch.tensor(np.sin(x.detach().cpu().numpy()), dtype=x.dtype)


@read_case()
def numpy_written(x):
    values = x.clone().numpy()
    values[values < 0] = 0
    return torch.from_numpy(values) + x


@read_case()
def ranked_by_a_list(x):
    order = sorted(range(len(x)), key=lambda i: x.tolist()[i])
    return x[order] * torch.arange(len(x))


@read_case()
def listed_by_rows(x):
    rows = torch.stack([x, x * 2]).tolist()
    return torch.tensor([a if a > 0 else b for a, b in zip(*rows, strict=True)]) + 0 * x


# --- Shapes that depend on values.


@read_case(lambda g, x: torch.where(x > 0, g * x[x > 0].mean(), g))
def mean_of_selected(x):
    return x * x[x > -10].mean()


@read_case()
def written_to_nonzero(x):
    y = torch.zeros_like(x)
    (where,) = torch.nonzero(x > 0, as_tuple=True)
    y[where] = x[where] ** 2 * torch.arange(1.0, len(where) + 1)
    return y


@read_case()
def written_to_a_mask_that_may_be_empty(x):
    y = x.clone()
    y[x > 0] = x[x > 0].cumsum(0)
    return y


@read_case()
def selected_and_padded(x):
    kept = x[x.abs() > 0.4]
    return torch.cat([kept.cumsum(0), x.new_zeros(len(x) - len(kept))]) + x


@read_case()
def unique_counts(x):
    _, inverse, counts = x.round().unique(return_inverse=True, return_counts=True)
    return x / counts[inverse]


@read_case()
def repeated(x):
    counts = (x > 0).long() + 1
    return torch.repeat_interleave(x, counts)[: len(x)] * len(x.repeat_interleave(counts))


@read_case()
def histogram(x):
    bins = torch.bincount((x.abs() * 2).long())
    return x * bins[(x.abs() * 2).long()]


@read_case()
def masked_select_of_rows(x):
    rows = torch.stack([x, x.flip(0)])
    return rows.masked_select(rows > 0).sum() * x + rows[rows.sum(1) > 0].sum(0)


@read_case()
def split_at(x):
    first, second = torch.tensor_split(x, (x > 0).sum()[None])
    return torch.cat([first * 2, second * 3])


@read_case()
def sliced_by_an_argmax(x):
    n = x.argmax().item() + 1
    return torch.cat([x[:n].exp(), x[n:]])


# --- `.item()` in arithmetic.


@read_case()
def scaled_by_item(x):
    return x * x.max().item() + (x.sum() / 3).item()


@read_case()
def clamped_to_item(x):
    return x.clamp(max=x.mean().item(), min=float(x.min()) / 2)


INPUTS = [[1.5, 2.25, 0.75, 3.0], [-1.5, -2.25, -0.75, -3.0], [0.6, -0.3, 1.7, -2.2], [0.25, 0.5, 0.125, 0.75]]


def in_torch(function: Any, x: Any) -> list[Any]:
    """Returns the output and two derivatives."""
    return [value for (value,) in torch_library().derivatives(function.apply, [np.asarray(x)], 2)]


def in_jax(function: Any, x: Any) -> list[Any]:
    return [value for (value,) in Jax.derivatives(function.apply, [x], 2)]
