"""Comparison of a function of JAX arrays with one of tensors, on equal numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn


def assert_same_as_torch(
    ours: Callable[..., jax.Array], theirs: Callable[..., Any], args: Sequence[np.ndarray], rtol: float = 1e-5
) -> None:
    """Asserts that the outputs agree, and the gradients of all arguments.

    Args:
      ours: is called under `jax.jit`.
      theirs: of tensors that require gradients, where they are floating.
      args: of both.
      rtol: largest difference, relative to the largest entry.
    """
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x, requires_grad=x.dtype.kind == "f") for x in args]
    output = theirs(*tensors)
    cotangent = np.cos(np.arange(output.numel()) + 0.3).reshape(output.shape).astype(args[0].dtype)
    output.backward(torch.tensor(cotangent))
    expected = [t.numpy() for t in (output.detach(), *(t.grad for t in tensors if t.requires_grad))]

    @jax.jit
    def value_and_gradients(*args: jax.Array) -> list[jax.Array]:
        value, pullback = jax.vjp(ours, *args)
        gradients = zip(args, pullback(jnp.asarray(cotangent)), strict=True)
        return [value, *(g for x, g in gradients if jnp.issubdtype(x.dtype, jnp.floating))]

    for got, want in zip(value_and_gradients(*args), expected, strict=True):
        assert got.shape == want.shape and np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=rtol * float(np.abs(want).max()))


def as_numpy(value: Any) -> np.ndarray:
    """A tensor's numbers, or an array's."""
    return value.detach().numpy() if hasattr(value, "detach") else np.asarray(value)


def assert_as_torch(run: Any, *arrays: Any, convert: Any = jaxfn.from_torch, rtol: float = 1e-5) -> None:
    """Compares outputs, and gradients by the first argument of a weighted sum of them, eagerly and compiled.

    Args:
      run: A function of tensors.
      *arrays: Its arguments.
      convert: Returns the function of arrays, of `run`.
      rtol: The relative tolerance.
    """
    torch = pytest.importorskip("torch")
    tensors = [torch.tensor(x) for x in arrays]
    expected = run(tensors[0].requires_grad_(), *tensors[1:])
    weights = np.cos(np.arange(expected.numel(), dtype=np.float32)).reshape(expected.shape)
    (gradient,) = torch.autograd.grad((expected * torch.tensor(weights)).sum(), tensors[0])
    converted = convert(run)
    for transform in (lambda f: f, jax.jit):
        value = transform(converted)(*map(jnp.asarray, arrays))
        np.testing.assert_allclose(value, as_numpy(expected), rtol=rtol)
        found = transform(jax.grad(lambda *x: (converted(*x) * weights).sum()))(*map(jnp.asarray, arrays))
        np.testing.assert_allclose(found, as_numpy(gradient), rtol=rtol, atol=1e-6)
