"""Row H2: derivatives where a function has a kink or its largest element is not the only one, next to torch's.

JAX's own choices differ there (abs, clip, relu6, median), and a backward that is differentiated shows them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")

F = torch.nn.functional
X = torch.tensor([0.0, 1.0, -1.0, 1.0, 0.0, 2.0, -0.0, 3.0, -3.0])

CASES: dict[str, Callable[..., Any]] = {
    "abs": torch.abs,
    "amax": lambda x: torch.amax(x.abs(), 0),
    "aminmax": lambda x: torch.aminmax(x.clamp(-1, 1))[1] - 2 * torch.aminmax(x.clamp(-1, 1))[0],
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None]),
    "celu": lambda x: F.celu(100 * x),
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp by tensors": lambda x: torch.clamp(x, x.flip(0) - 1, x.flip(0)),
    "clamp by one tensor": lambda x: torch.clamp(x, min=x.flip(0)) + 2 * torch.clamp(x, max=x.flip(0)),
    "clamp without room": lambda x: torch.clamp(x, x.flip(0), x.flip(0)) + 2 * torch.clamp(x, 1, 1),
    "clamp to one side": lambda x: torch.clamp_min(x, -1) + 2 * torch.clamp_max(x, 1),
    "complex abs": lambda x: torch.complex(x, x).abs(),
    "cummax": lambda x: torch.cummax(x, 0)[0],
    "cumprod": lambda x: torch.cumprod(x, 0),
    "elu": F.elu,
    "floor division": lambda x: torch.div(x, 0.5, rounding_mode="floor"),
    "fmax": lambda x: torch.fmax(x, x.flip(0)),
    "hardshrink": lambda x: F.hardshrink(x, 1.0),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "hardtanh": F.hardtanh,
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "max": lambda x: x.clamp(-1, 1).max(),
    "max of a dimension": lambda x: torch.max(x.clamp(-1, 1), 0)[0],
    "max_pool1d": lambda x: F.max_pool1d(x.clamp(0, 1)[None, None], 3),
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "median": lambda x: torch.median(x),
    "median of a dimension": lambda x: torch.median(x, 0)[0],
    "nanmedian": lambda x: torch.nanmedian(torch.where(x > 2.5, float("nan"), x)),
    "norm at 0": lambda x: (x * 0).norm(),
    "norm 1": lambda x: x.norm(1),
    "norm 3 at 0": lambda x: (x * 0).norm(3),
    "norm inf": lambda x: x.norm(float("inf")),
    "power 0": lambda x: x**0,
    "prod": torch.prod,
    "relu": torch.relu,
    "relu6": F.relu6,
    "remainder": lambda x: torch.remainder(x, 0.5),
    "smooth_l1 without squares": lambda x: torch.ops.aten.smooth_l1_loss(x, torch.zeros_like(x), 2, 0.0),
    "softshrink": lambda x: F.softshrink(x, 1.0),
    "sort": lambda x: torch.sort(x)[0],
    "std of equals": lambda x: (x * 0).std(),
    "threshold": lambda x: F.threshold(x, 1.0, 5.0),
    "where": lambda x: torch.where(x > 0, torch.log(x), x),
}


@row("H2")
@pytest.mark.parametrize("name", CASES)
def test_derivative_at_ties(name: str) -> None:
    def weighted(x: Any) -> Any:
        y = CASES[name](x)
        return (y * torch.arange(1.0, 1.0 + y.numel()).reshape(y.shape)).sum()

    tensor = X.clone().requires_grad_()
    try:
        (wanted,) = torch.autograd.grad(weighted(tensor), tensor)
    except RuntimeError as error:  # torch 2.8 has none of aminmax
        assert name == "aminmax" and "is not implemented" in str(error)
        pytest.skip(str(error))
    got = jax.jit(jax.grad(jaxfn.from_torch(weighted)))(jnp.asarray(X.numpy()))
    np.testing.assert_allclose(got, wanted.numpy(force=True), rtol=1e-5, atol=1e-6)


POOLS = {
    "stride": {"kernel_size": (3, 2), "stride": (2, 1)},
    "padding": {"kernel_size": (3, 2), "stride": 2, "padding": 1},
    "dilation": {"kernel_size": (2, 3), "stride": 1, "padding": 1, "dilation": 2},
    "large windows": {"kernel_size": (9, 18), "stride": (1, 2), "padding": (2, 9)},
    "ceil_mode": {"kernel_size": (3, 4), "stride": (2, 3), "padding": (1, 2), "ceil_mode": True},
}


SECOND: dict[str, Callable[..., Any]] = {
    "huber": lambda x: F.huber_loss(x, torch.zeros_like(x)),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, torch.zeros_like(x)),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
    "elu": lambda x: F.elu(x, 1.3).sum(),
    "celu": lambda x: F.celu(x, 1.3).sum(),
    "selu": lambda x: F.selu(x).sum(),
    "complex abs": lambda x: torch.complex(x, 2 * x).abs().sum(),
}


@row("H2")
@pytest.mark.parametrize("name", SECOND)
def test_second_derivative_at_0(name: str) -> None:
    x, weights = X.clone().requires_grad_(), torch.arange(1.0, 10)
    (slope,) = torch.autograd.grad(SECOND[name](x), x, create_graph=True)
    (expected,) = torch.autograd.grad(slope, x, weights)
    gradient = jax.grad(jaxfn.from_torch(SECOND[name]))
    found = jax.vjp(gradient, jnp.asarray(X.numpy()))[1](jnp.asarray(weights.numpy()))[0]
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


@row("H2", "H11")
@pytest.mark.parametrize("pool", [*POOLS, "adaptive"])
def test_the_first_of_equals_is_the_largest_of_a_window(pool):
    """Among equal numbers, and in windows of nothing but minus infinity."""

    def pooled(x):
        if pool == "adaptive":
            return torch.nn.functional.adaptive_max_pool2d(x, (4, 3), return_indices=True)
        return torch.nn.functional.max_pool2d(x, **POOLS[pool], return_indices=True)

    x = np.random.default_rng(0).integers(0, 3, (2, 3, 9, 20)).astype(np.float32)
    x[0, 1, 2:, :], x[0, 2] = -np.inf, 0
    x[1, 0, 1:, :], x[1, 2] = 0, -np.inf
    tensor = torch.tensor(x, requires_grad=True)
    values, indices = pooled(tensor)
    weights = np.random.default_rng(1).standard_normal(values.shape).astype(np.float32)
    (gradient,) = torch.autograd.grad((values * torch.tensor(weights)).sum(), tensor)
    ours = jaxfn.from_torch(pooled)
    np.testing.assert_array_equal(ours(x)[0], values.detach().numpy())
    np.testing.assert_array_equal(ours(x)[1], indices.numpy())
    slope = jax.jit(jax.grad(lambda x: (ours(x)[0] * weights).sum()))(jnp.asarray(x))
    np.testing.assert_allclose(slope, gradient.numpy(), rtol=1e-6, atol=1e-6)
    mapped = jax.vmap(lambda x: ours(x[None])[0][0])(jnp.asarray(x))
    np.testing.assert_array_equal(mapped, values.detach().numpy())
