"""Residuals of a few bits: ReLU saves one bit for each number, a linear layer eight.

    python examples/cookbook/bitwise_int8_activations.py

Why a Function: autodiff saves the intermediates in their own dtype. A rule may save less: ReLU's derivative is a bit,
and a weight's gradient is a sum over many examples, for which the layer's input may be rounded (Chen et al., 2021). The
forward pass rounds nothing.
Claim: a network of eight layers saves 9 bits for each activation, where autodiff saves 64 (counted by
`jaxfn.residuals`); the gradient of ReLU is exact, those of the weights are right to 1%.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


@jaxfn.function
def relu(ctx, x: jax.Array) -> jax.Array:
    """Computes ReLU; saves one bit for each number."""
    ctx.bits = jnp.packbits(x > 0, axis=-1)
    return jnp.maximum(x, 0)


@relu.backward
def _(ctx, grad_output: jax.Array) -> jax.Array:
    positive = jnp.unpackbits(ctx.bits, axis=-1, count=grad_output.shape[-1])
    return grad_output * positive.astype(grad_output.dtype)


class Linear(jaxfn.Function):
    """Computes x @ weight for x (examples, features); saves x as int8, with a scale for each example."""

    @staticmethod
    def forward(ctx, x: jax.Array, weight: jax.Array) -> jax.Array:
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True) / 127, jnp.finfo(x.dtype).tiny)
        if ctx.needs_input_grad.weight:
            ctx.save_for_backward(codes=jnp.round(x / scale).astype(jnp.int8), scale=scale)
        ctx.weight = weight  # an input, which needs no extra memory
        return x @ weight

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> dict[str, jax.Array]:
        gradients = {}
        if ctx.needs_input_grad.x:
            gradients["x"] = grad_output @ ctx.weight.T
        if ctx.needs_input_grad.weight:
            codes, scale = ctx.saved_variables.values()
            gradients["weight"] = codes.astype(scale.dtype).T @ (scale * grad_output)
        return gradients


def network(weights: list[jax.Array], x: jax.Array, linear=Linear.apply, relu=relu) -> jax.Array:
    for weight in weights:
        x = relu(linear(x, weight))
    return x


def plain_network(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    return network(weights, x, jnp.matmul, lambda x: jnp.maximum(x, 0))


def main(layers: int = 8, examples: int = 512, width: int = 128) -> None:
    keys = jax.random.split(jax.random.key(0), layers + 1)
    weights = [(2 / width) ** 0.5 * jax.random.normal(key, (width, width)) for key in keys[1:]]
    x = jax.random.normal(keys[0], (examples, width))
    saved = {}
    for function in (network, plain_network):
        ledger = jaxfn.residuals(function, weights, x, argnums=0)
        saved[function] = ledger.total_bytes - sum(row.nbytes for row in ledger if row.argument.startswith("args[0]"))

    ours, exact = (
        jnp.stack(jax.jit(jax.grad(lambda w: jnp.mean(function(w, x) ** 2)))(weights))
        for function in (network, plain_network)
    )
    error = jnp.linalg.norm(ours - exact) / jnp.linalg.norm(exact)
    print(f"saved for backward by {layers} layers: {saved[network]:,} bytes; by autodiff: {saved[plain_network]:,}")
    print(f"  the gradients are off by {error:.2%}")
    assert saved[network] == layers * (x.size * 9 // 8 + 4 * examples)  # 9 bits, and a scale for each example
    assert saved[plain_network] == layers * x.size * 8
    assert 0 < error < 0.01
    slopes = [jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x) for f in (relu, lambda x: jnp.maximum(x, 0))]
    assert jnp.array_equal(*slopes)


if __name__ == "__main__":
    main()
