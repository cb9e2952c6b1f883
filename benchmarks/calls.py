"""Measurements of one call of a Function: eager, differentiated, and the bytes that it saves for backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = np.ndarray[Any, Any]


def call(f: Callable[..., Any], args: Sequence[Array]) -> Callable[[], Any]:
    """Calls eagerly, and waits for the result."""
    arrays = [jnp.asarray(x) for x in args]
    return lambda: jax.block_until_ready(f(*arrays))


def value_and_grad(f: Callable[..., Any], args: Sequence[Array]) -> Callable[[], Any]:
    """Computes the value and gradient eagerly, and waits for them."""
    arrays = [jnp.asarray(x) for x in args]
    differentiated = jax.value_and_grad(lambda *xs: jnp.sum(f(*xs)), argnums=tuple(range(len(arrays))))
    return lambda: jax.block_until_ready(differentiated(*arrays))


def saved_bytes(f: Callable[..., Any], args: Sequence[Array]) -> int:
    """Returns the bytes of the linearized call's residuals."""
    _, pullback = jax.vjp(f, *map(jnp.asarray, args))
    return sum(x.nbytes for x in jax.tree.leaves(pullback))


def torch_call(f: Callable[..., Any], args: Sequence[Array]) -> Callable[[], Any]:
    """Calls eagerly in torch, on tensors that require no gradient."""
    import torch

    tensors = [torch.tensor(x) for x in args]
    return lambda: f(*tensors)


def torch_value_and_grad(f: Callable[..., Any], args: Sequence[Array]) -> Callable[[], Any]:
    """Runs torch's forward and backward."""
    import torch

    tensors = [torch.tensor(x, requires_grad=True) for x in args]

    def run() -> Any:
        value = f(*tensors).sum()
        return value.detach(), torch.autograd.grad(value, tensors)

    return run


def torch_saved_bytes(f: Callable[..., Any], args: Sequence[Array]) -> int:
    """Returns the bytes that torch's call saved, according to its saved-tensor hooks."""
    import torch

    sizes: list[int] = []

    def pack(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        f(*(torch.tensor(x, requires_grad=True) for x in args))
    return sum(sizes)
