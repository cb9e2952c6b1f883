"""Five kernels that partition themselves: each is one Function with one line that says how it is split.

    python examples/kernels/split_kernels.py

A kernel for many devices usually has three rules beside its code: for derivatives, for batches, and for devices. Here
the first is `backward`, and the last is `sharding_rule`: a name for each dimension of the inputs and the outputs. It
holds for gradients, second derivatives, `jvp` and `vmap` too. They are written in plain JAX, so that they run
everywhere; a Pallas kernel or a call of the FFI takes the place of a `forward` as it is.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import pmax, psum, stop_gradient

import jaxfn


class RMSNorm(jaxfn.Function):
    """x / sqrt(mean(x²)) * weight, over the last axis."""

    sharding_rule = jaxfn.ShardingRule("... d, d -> ... d", need_replication_factors=("d",))
    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, x: jax.Array, weight: jax.Array, eps: float = 1e-6) -> jax.Array:
        scale = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx, grad: jax.Array):
        x, weight, scale = ctx.saved_tensors
        normed, inner = x * scale, grad * weight
        grad_x = scale * (inner - normed * jnp.mean(inner * normed, -1, keepdims=True))
        return grad_x, jnp.sum(grad * normed, tuple(range(x.ndim - 1))), None


class Softmax(jaxfn.Function):
    """The softmax over the last axis, of which backward needs the output alone."""

    sharding_rule = jaxfn.ShardingRule("... d -> ... d", need_replication_factors=("d",))
    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        exp = jnp.exp(x - jnp.max(x, -1, keepdims=True))
        y = exp / jnp.sum(exp, -1, keepdims=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad: jax.Array) -> jax.Array:
        (y,) = ctx.saved_tensors
        return y * (grad - jnp.sum(grad * y, -1, keepdims=True))


class CrossEntropy(jaxfn.Function):
    """The loss of each token, and the logarithm of its sum of exp(logits), with the vocabulary on several devices.

    Each device has some columns of the logits. Devices exchange three numbers for each token, and no logits.
    """

    sharding_rule = jaxfn.ShardingRule("token vocab, token -> token, token", manual_factors=("vocab",))
    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        axes = ctx.mesh_axes("vocab")  # () on one device
        columns = logits.shape[1]
        first = jax.lax.axis_index(axes) * columns if axes else 0
        is_label = labels[:, None] == first + jnp.arange(columns)
        largest = stop_gradient(jnp.max(logits, 1))
        largest = pmax(largest, axes) if axes else largest
        log_sum = largest + jnp.log(psum(jnp.sum(jnp.exp(logits - largest[:, None]), 1), axes))
        ctx.save_for_backward(logits, log_sum, is_label)  # log_sum is an output: nothing is computed again
        return log_sum - psum(jnp.sum(jnp.where(is_label, logits, 0), 1), axes), log_sum

    @staticmethod
    def backward(ctx, grad: jax.Array, grad_log_sum: jax.Array):
        logits, log_sum, is_label = ctx.saved_tensors
        probabilities = jnp.exp(logits - log_sum[:, None])
        return (grad + grad_log_sum)[:, None] * probabilities - jnp.where(is_label, grad[:, None], 0), None


class QuantizeRows(jaxfn.Function):
    """Each row in 8 bits, and its scale, which has the derivative of the largest entry."""

    sharding_rule = jaxfn.ShardingRule("row d -> row d, row", need_replication_factors=("d",))
    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.max(jnp.abs(x), 1) / 127
        ctx.save_for_backward(x, scale)
        return jnp.round(x / scale[:, None]).astype(jnp.int8), scale

    @staticmethod
    def backward(ctx, _values: Any, grad_scale: jax.Array) -> jax.Array:
        x, scale = ctx.saved_tensors
        is_largest = jnp.abs(x) == 127 * scale[:, None]
        return jnp.where(is_largest, jnp.sign(x), 0) / 127 * grad_scale[:, None]


class Attention(jaxfn.Function):
    """softmax(q kᵀ / sqrt(d)) v, in blocks of keys: what is saved grows with the number of queries and keys."""

    sharding_rule = jaxfn.ShardingRule("b h q d, b h k d, b h k d -> b h q d", need_replication_factors=("k", "d"))

    @staticmethod
    def forward(ctx, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        def block(state, keys):
            largest, total, out = state
            scores = _scores(q, keys[0])
            now = jnp.maximum(largest, stop_gradient(jnp.max(scores, -1, keepdims=True)))
            exp, rescale = jnp.exp(scores - now), jnp.exp(largest - now)
            return (now, rescale * total + jnp.sum(exp, -1, keepdims=True), rescale * out + exp @ keys[1]), None

        start = jnp.full_like(q[..., :1], -jnp.inf), jnp.zeros_like(q[..., :1]), jnp.zeros_like(q)
        (largest, total, out), _ = jax.lax.scan(block, start, (_blocks(k), _blocks(v)))
        ctx.save_for_backward(q, k, v, out := out / total, largest + jnp.log(total))
        return out

    @staticmethod
    def backward(ctx, grad: jax.Array):
        q, k, v, out, log_sum = ctx.saved_tensors
        mean = jnp.sum(grad * out, -1, keepdims=True)

        @jax.checkpoint  # for a second derivative
        def block(grad_q, keys):
            k, v = keys
            p = jnp.exp(_scores(q, k) - log_sum)
            grad_scores = p * (grad @ v.mT - mean) / math.sqrt(q.shape[-1])
            return grad_q + grad_scores @ k, (grad_scores.mT @ q, p.mT @ grad)

        grad_q, (grad_k, grad_v) = jax.lax.scan(block, jnp.zeros_like(q), (_blocks(k), _blocks(v)))
        return grad_q, _joined(grad_k), _joined(grad_v)

    @staticmethod
    def jvp(ctx, tangent_q: jax.Array, tangent_k: jax.Array, tangent_v: jax.Array) -> jax.Array:
        q, k, v, out, log_sum = ctx.saved_tensors

        @jax.checkpoint
        def block(state, keys):
            moved, mean = state
            k, v, tangent_k, tangent_v = keys
            p = jnp.exp(_scores(q, k) - log_sum)
            tangent_p = p * (_scores(tangent_q, k) + _scores(q, tangent_k))
            return (moved + tangent_p @ v + p @ tangent_v, mean + jnp.sum(tangent_p, -1, keepdims=True)), None

        start = jnp.zeros_like(q), jnp.zeros_like(q[..., :1])
        (moved, mean), _ = jax.lax.scan(block, start, tuple(map(_blocks, (k, v, tangent_k, tangent_v))))
        return moved - mean * out


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    return q @ k.mT / math.sqrt(q.shape[-1])


def _blocks(x: jax.Array) -> jax.Array:
    """Cuts keys into blocks of 128, or of the largest divisor, along a new first axis."""
    size = math.gcd(x.shape[2], 128)
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, x.shape[3]), 2, 0)


def _joined(blocks: jax.Array) -> jax.Array:
    return jnp.moveaxis(blocks, 0, 2).reshape(*blocks.shape[1:3], -1, blocks.shape[4])


def plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Computes the attention with the matrix of scores, for comparison."""
    return jax.nn.softmax(_scores(q, k)) @ v


def loss(attention: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Returns a number that depends on all entries of the attention."""
    return jnp.sum(jnp.sin(attention(q, k, v)))


def main() -> dict[str, float]:
    """Compares the attention on all devices with plain JAX on one, and returns the largest differences."""
    mesh = jax.make_mesh((jax.device_count(),), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(key, (2, 8, n, 16)) for key, n in zip(keys, (96, 256, 256), strict=True)]
    found: dict[str, float] = {}
    ways = {
        "value": lambda f: f,
        "jvp": lambda f: lambda *args: jax.jvp(f, args, args)[1],
        "gradient": lambda f: jax.grad(partial(loss, f), (0, 1, 2)),
        "second derivative": lambda f: jax.grad(lambda *args: loss(jax.grad(partial(loss, f)), *args), (0, 1, 2)),
    }
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, jax.sharding.PartitionSpec(None, "heads")) for x in args]
        for name, way in ways.items():
            ours, theirs = jax.jit(way(Attention.apply))(*split), jax.jit(way(plain_attention))(*args)
            pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
            found[name] = max(float(jnp.max(jnp.abs(jax.device_get(a) - jax.device_get(b)))) for a, b in pairs)
    print("attention on", jax.device_count(), "devices, from plain JAX on one:", found)
    return found


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # leave this out where you have real devices
    main()
