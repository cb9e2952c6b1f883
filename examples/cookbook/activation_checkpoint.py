"""Activation checkpointing written as a Function: backward computes again what forward did not keep.

    python examples/cookbook/activation_checkpoint.py

`jax.checkpoint` does this, and so does `torch.utils.checkpoint`, which is an autograd Function. One's own is a dozen
lines, and a place to change it: to keep the inputs in bfloat16, on the host, or sharded over devices.
Claim: gradients are those of plain autodiff, and the same bytes are kept as under `jax.checkpoint`, for arguments of
any structure and with random keys among them; compiled, it needs no more memory than that.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn


class Checkpoint(jaxfn.Function):
    """function(*args), of which only the arguments are kept: pytrees of arrays. Outputs are floating."""

    @staticmethod
    def forward(ctx, function: Callable[..., Any], *args: Any) -> Any:
        ctx.function, ctx.args = function, args
        return function(*args)

    @staticmethod
    def backward(ctx, *grad_outputs: Any) -> tuple[Any, ...]:
        # Behind the barrier, XLA does not see that forward has computed the same, and so does not keep it after all.
        args, grad_outputs = jax.lax.optimization_barrier((ctx.args, grad_outputs))
        leaves, structure = jax.tree.flatten(args)
        places = [i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

        def of_floats(floats: list[jax.Array]) -> Any:
            given = dict(zip(places, floats, strict=True))
            return ctx.function(*jax.tree.unflatten(structure, [given.get(i, x) for i, x in enumerate(leaves)]))

        output, pullback = jax.vjp(of_floats, [leaves[i] for i in places])
        (grads,) = pullback(grad_outputs if isinstance(output, tuple) else grad_outputs[0])
        given = dict(zip(places, grads, strict=True))
        return None, *jax.tree.unflatten(structure, [given.get(i) for i in range(len(leaves))])


def block(weights: dict[str, jax.Array], x: jax.Array, key: jax.Array) -> jax.Array:
    """One block of a network, with dropout: it draws the same numbers again, as the key is among the arguments."""
    hidden = jax.nn.gelu(x @ weights["up"])
    kept = jax.random.bernoulli(key, 0.9, hidden.shape)
    return x + jnp.where(kept, hidden / 0.9, 0) @ weights["down"]


def network(call: Callable[..., jax.Array], layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
    for i, weights in enumerate(layers):
        x = call(block, weights, x, jax.random.key(i))
    return jnp.mean(x**2)


CALLS: dict[str, Callable[..., jax.Array]] = {
    "plain": lambda function, *args: function(*args),
    "jax.checkpoint": lambda function, *args: jax.checkpoint(function)(*args),
    "Checkpoint": Checkpoint.apply,
}


def main(depth: int = 8, batch: int = 512, width: int = 32) -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (depth, width, 4 * width)) / width**0.5
    down = jax.random.normal(keys[1], (depth, 4 * width, width)) / (4 * width) ** 0.5
    layers = [{"up": up[i], "down": down[i]} for i in range(depth)]
    x = jax.random.normal(keys[2], (batch, width))
    grads, kept, needed = {}, {}, {}
    for name, call in CALLS.items():
        function = partial(network, call)
        compiled = jax.jit(jax.grad(function)).lower(layers, x).compile()
        grads[name] = compiled(layers, x)
        kept[name] = jaxfn.residuals(function, layers, x).total_bytes
        needed[name] = compiled.memory_analysis().temp_size_in_bytes
        print(f"{name:15} keeps {kept[name] / 1024:8,.0f} KiB; compiled, needs {needed[name] / 1024:8,.0f} KiB")
    for ours, plain in zip(jax.tree.leaves(grads["Checkpoint"]), jax.tree.leaves(grads["plain"]), strict=True):
        assert jnp.max(jnp.abs(ours - plain)) < 1e-5 * jnp.max(jnp.abs(plain))
    assert kept["Checkpoint"] == kept["jax.checkpoint"] < kept["plain"] / 5
    assert needed["Checkpoint"] < 1.01 * needed["jax.checkpoint"]  # how much that is, is XLA's choice


if __name__ == "__main__":
    main()
