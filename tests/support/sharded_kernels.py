"""Twelve kernels with a sharding rule, each with a hand-written `shard_map`.

Both have the same code for each direction. In the hand-written one it has its collectives: `axes("d")` are the mesh
axes over which a factor is split. How arrays lie follows from the factors of inputs, outputs and residuals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import psum
from jax.sharding import PartitionSpec as P

import jaxfn


@dataclass
class Kernel:
    """A kernel.

    Attributes:
      function: The Function, with a rule.
      plain: The same function in plain JAX.
      sizes: The size of each factor.
      splits: For each mesh the axes over which factors are split: "data", "model", and "both".
      forward: `forward(axes, *inputs)` returns a tuple of outputs and a tuple of residuals.
      backward: `backward(axes, residuals, *gradients of outputs)` returns the gradients of the inputs.
      residuals: The factors of each residual.
      integers: By the position of an input, the number of classes that it has.
    """

    function: Any
    plain: Callable[..., Any]
    sizes: dict[str, int]
    splits: dict[str, dict[str, Any]]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    residuals: str
    integers: dict[int, int]

    @property
    def inputs(self) -> list[str]:
        return self.function.sharding_rule.rule.split("->")[0].split(",")

    @property
    def outputs(self) -> list[str]:
        return self.function.sharding_rule.rule.split("->")[1].split(",")

    def arguments(self) -> list[Any]:
        generator = np.random.default_rng(0)
        arrays: list[Any] = []
        for i, group in enumerate(self.inputs):
            shape = [self.sizes[f] for f in group.split()]
            values = (
                generator.integers(0, self.integers[i], shape) if i in self.integers else generator.normal(size=shape)
            )
            arrays.append(values.astype(np.int32 if i in self.integers else np.float32))
        return arrays

    def specs(self, split: dict[str, Any], groups: Sequence[str]) -> list[P]:
        return [P(*(split.get(f) for f in group.split())) for group in groups]

    def hand_written(self, mesh: Any, split: dict[str, Any]) -> Callable[..., Any]:
        """Returns the hand-written `shard_map`s, in a `jax.custom_vjp`."""

        def axes(factor: str) -> tuple[str, ...]:
            found = split.get(factor, ())
            return (found,) if isinstance(found, str) else found

        ins, outs, res = (self.specs(split, g) for g in (self.inputs, self.outputs, self.residuals.split(",")))
        mapped = partial(jax.shard_map, mesh=mesh)

        def primal(*xs: Any) -> Any:
            return self.forward(axes, *xs)[0]

        def unwrapped(outputs: Any) -> Any:
            return outputs if len(outs) > 1 else outputs[0]

        @jax.custom_vjp
        def op(*xs: Any) -> Any:
            return unwrapped(mapped(primal, in_specs=tuple(ins), out_specs=tuple(outs))(*xs))

        def fwd(*xs: Any) -> Any:
            ys, saved = mapped(partial(self.forward, axes), in_specs=tuple(ins), out_specs=(tuple(outs), tuple(res)))(
                *xs
            )
            return unwrapped(ys), (saved, xs)

        def bwd(state: Any, gradients: Any) -> Any:
            saved, xs = state
            floating = [i for i in range(len(ins)) if i not in self.integers]
            grads = mapped(
                lambda saved, gs: tuple(self.backward(axes, saved, *gs)),
                in_specs=(tuple(res), tuple(outs)),
                out_specs=tuple(ins[i] for i in floating),
            )(saved, gradients if len(outs) > 1 else (gradients,))
            every: list[Any] = [np.zeros(x.shape, jax.dtypes.float0) for x in xs]
            for i, g in zip(floating, grads, strict=True):
                every[i] = g
            return tuple(every)

        op.defvjp(fwd, bwd)
        return op


KERNELS: dict[str, Kernel] = {}


def function_of(
    name: str,
    rule: str | jaxfn.ShardingRule,
    forward_of_part: Callable[..., Any],
    backward_of_part: Callable[..., Any],
    integers: dict[int, int],
) -> type[jaxfn.Function]:
    """Returns a Function with this rule, whose code has only the collectives of its manual factors."""
    manual = rule.manual_factors if isinstance(rule, jaxfn.ShardingRule) else ()

    class FunctionOfKernel(jaxfn.Function):
        sharding_rule = rule

        @staticmethod
        def forward(ctx, *inputs):
            outputs, saved = forward_of_part(lambda f: ctx.mesh_axes(f) if f in manual else (), *inputs)
            ctx.save_for_backward(*saved)
            ctx.num_inputs = len(inputs)
            return outputs if len(outputs) > 1 else outputs[0]

        @staticmethod
        def backward(ctx, *grad_outputs):
            gradients = iter(backward_of_part(lambda f: (), ctx.saved_tensors, *grad_outputs))
            return tuple(None if i in integers else next(gradients) for i in range(ctx.num_inputs))

    FunctionOfKernel.__name__ = FunctionOfKernel.__qualname__ = name
    return FunctionOfKernel


def kernel(
    name: str,
    rule: str | jaxfn.ShardingRule,
    plain: Callable[..., Any],
    sizes: dict[str, int],
    data: str,
    model: str | None,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    residuals: str,
    integers: dict[int, int] | None = None,
) -> None:
    """Registers a Function with a rule; `data` and `model` are the factors that are split over these axes."""
    both = {data: "data", model: "model"} if model else {data: ("data", "model")}
    splits = {"data": {data: "data"}, "model": {model or data: "model"}, "both": both}
    function = function_of(name, rule, forward, backward, integers or {})
    KERNELS[name] = Kernel(function, plain, sizes, splits, forward, backward, residuals, integers or {})


# 1: a product whose inner dimension is split


def _matmul_fwd(axes, x, w):
    return (psum(x @ w, axes("d")),), (x, w)


def _matmul_bwd(axes, saved, g):
    x, w = saved
    return psum(g @ w.T, axes("h")), psum(x.T @ g, axes("b"))


kernel(
    "MatMul",
    jaxfn.ShardingRule("b d, d h -> b h", reduction_factors=("d",)),
    jnp.matmul,
    {"b": 8, "d": 16, "h": 24},
    "b",
    "d",
    _matmul_fwd,
    _matmul_bwd,
    "b d, d h",
)


# 2: a product that is split on its columns


kernel(
    "ColumnParallel",
    jaxfn.ShardingRule("b d, d h -> b h", reduction_factors=("d",)),
    jnp.matmul,
    {"b": 8, "d": 16, "h": 24},
    "b",
    "h",
    _matmul_fwd,
    _matmul_bwd,
    "b d, d h",
)


# 3: RMSNorm


def _rms(x):
    return jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)


def _rms_bwd(x, w, r, g):
    h, gw = x * r, g * w
    return r * (gw - h * jnp.mean(gw * h, -1, keepdims=True)), jnp.sum(g * h, tuple(range(x.ndim - 1)))


def _hand_rms_bwd(axes, saved, g):
    gx, gw = _rms_bwd(*saved, g)
    return gx, psum(gw, axes("b"))


def _rms_fwd(axes, x, w):
    r = _rms(x)
    return (x * r * w,), (x, w, r)


kernel(
    "RMSNorm",
    jaxfn.ShardingRule("b d, d -> b d", need_replication_factors=("d",)),
    lambda x, w: x * _rms(x) * w,
    {"b": 8, "d": 12},
    "b",
    None,
    _rms_fwd,
    _hand_rms_bwd,
    "b d, d, b one",
)


# 4: softmax


def _softmax_fwd(axes, x):
    y = jax.nn.softmax(x)
    return (y,), (y,)


kernel(
    "Softmax",
    jaxfn.ShardingRule("b t d -> b t d", need_replication_factors=("d",)),
    partial(jax.nn.softmax, axis=-1),
    {"b": 16, "t": 8, "d": 12},
    "b",
    "t",
    _softmax_fwd,
    lambda axes, saved, g: (saved[0] * (g - jnp.sum(g * saved[0], -1, keepdims=True)),),
    "b t d",
)


# 5: cross entropy over a split vocabulary, which communicates itself


def _cross_entropy(x, t, axes):
    largest = jax.lax.stop_gradient(jnp.max(x, -1))
    largest = jax.lax.pmax(largest, axes) if axes else largest
    log_sum = largest + jnp.log(psum(jnp.sum(jnp.exp(x - largest[:, None]), -1), axes))
    start = jax.lax.axis_index(axes) * x.shape[1] if axes else 0
    hot = (t[:, None] == start + jnp.arange(x.shape[1])).astype(x.dtype)
    return log_sum - psum(jnp.sum(x * hot, -1), axes), log_sum, hot


def _cross_entropy_bwd(x, log_sum, hot, g, g_log_sum):
    return (g + g_log_sum)[:, None] * jnp.exp(x - log_sum[:, None]) - g[:, None] * hot


def _hand_cross_entropy(axes, x, t):
    loss, log_sum, hot = _cross_entropy(x, t, axes("v"))
    return (loss, log_sum), (x, log_sum, hot)


def _plain_cross_entropy(x, t):
    log_sum = jax.nn.logsumexp(x, -1)
    return log_sum - jnp.take_along_axis(x, t[:, None], 1)[:, 0], log_sum


kernel(
    "CrossEntropy",
    jaxfn.ShardingRule("b v, b -> b, b", manual_factors=("v",)),
    _plain_cross_entropy,
    {"b": 8, "v": 16},
    "b",
    "v",
    _hand_cross_entropy,
    lambda axes, saved, g, g_log_sum: (_cross_entropy_bwd(*saved, g, g_log_sum),),
    "b v, b, b v",
    {1: 16},
)


# 6: a quantizer of rows, whose rounding has a gradient of 1


def _quantize(x):
    largest = jnp.max(jnp.abs(x), -1)
    return jnp.round(x / largest[:, None] * 7), largest


def _quantize_bwd(x, largest, g, g_largest):
    at = (jnp.abs(x) == largest[:, None]) * jnp.sign(x)
    return 7 * g / largest[:, None] + at * (g_largest - jnp.sum(7 * g * x, -1) / largest**2)[:, None]


def _plain_quantize(x):
    largest = jnp.max(jnp.abs(x), -1)
    scaled = x / largest[:, None] * 7
    return scaled + jax.lax.stop_gradient(jnp.round(scaled) - scaled), largest


def _quantize_fwd(axes, x):
    q, largest = _quantize(x)
    return (q, largest), (x, largest)


kernel(
    "QuantizeRows",
    jaxfn.ShardingRule("r d -> r d, r", need_replication_factors=("d",)),
    _plain_quantize,
    {"r": 8, "d": 12},
    "r",
    None,
    _quantize_fwd,
    lambda axes, saved, g, g_largest: (_quantize_bwd(*saved, g, g_largest),),
    "r d, r",
)


# 7: attention


def _attention(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k))
    return jnp.einsum("bhqk,bhke->bhqe", p, v), p


def _attention_bwd(q, k, v, p, g):
    gp = jnp.einsum("bhqe,bhke->bhqk", g, v)
    gs = p * (gp - jnp.sum(gp * p, -1, keepdims=True))
    return (
        jnp.einsum("bhqk,bhkd->bhqd", gs, k),
        jnp.einsum("bhqk,bhqd->bhkd", gs, q),
        jnp.einsum("bhqk,bhqe->bhke", p, g),
    )


def _hand_attention(axes, q, k, v):
    y, p = _attention(q, k, v)
    return (y,), (q, k, v, p)


kernel(
    "Attention",
    jaxfn.ShardingRule("b h q d, b h k d, b h k e -> b h q e", need_replication_factors=("k", "d")),
    lambda *args: _attention(*args)[0],
    {"b": 8, "h": 8, "q": 3, "k": 5, "d": 4, "e": 2},
    "b",
    "h",
    _hand_attention,
    lambda axes, saved, g: _attention_bwd(*saved, g),
    "b h q d, b h k d, b h k e, b h q k",
)


# 8: a scale and a bias


def _hand_affine_bwd(axes, saved, g):
    x, w = saved
    return g * w, psum(jnp.sum(g * x, 0), axes("b")), psum(jnp.sum(g, 0), axes("b"))


kernel(
    "Affine",
    "b d, d, d -> b d",
    lambda x, w, b: x * w + b,
    {"b": 8, "d": 16},
    "b",
    "d",
    lambda axes, x, w, b: ((x * w + b,), (x, w)),
    _hand_affine_bwd,
    "b d, d",
)


# 9: a gated activation


def _gate_bwd(x, gate, g):
    s = jax.nn.sigmoid(gate)
    return g * s, g * x * s * (1 - s)


kernel(
    "Gate",
    "b d, b d -> b d",
    lambda x, gate: x * jax.nn.sigmoid(gate),
    {"b": 8, "d": 16},
    "b",
    "d",
    lambda axes, x, gate: ((x * jax.nn.sigmoid(gate),), (x, gate)),
    lambda axes, saved, g: _gate_bwd(*saved, g),
    "b d, b d",
)


# 10: a distance for each row


def _hand_distance(axes, x, y):
    return (psum(jnp.sum((x - y) ** 2, -1), axes("d")),), (x, y)


kernel(
    "Distance",
    jaxfn.ShardingRule("b d, b d -> b", reduction_factors=("d",)),
    lambda x, y: jnp.sum((x - y) ** 2, -1),
    {"b": 8, "d": 16},
    "b",
    "d",
    _hand_distance,
    lambda axes, saved, g: (2 * g[:, None] * (saved[0] - saved[1]), 2 * g[:, None] * (saved[1] - saved[0])),
    "b d, b d",
)


# 11: a scalar


def _hand_energy(axes, x):
    return (psum(jnp.sum(jnp.sin(x)), (*axes("b"), *axes("d"))),), (x,)


kernel(
    "Energy",
    jaxfn.ShardingRule("b d -> ", reduction_factors=("b", "d")),
    lambda x: jnp.sum(jnp.sin(x)),
    {"b": 8, "d": 16},
    "b",
    "d",
    _hand_energy,
    lambda axes, saved, g: (g * jnp.cos(saved[0]),),
    "b d",
)


# 12: an outer product


def _hand_outer_bwd(axes, saved, g):
    x, y = saved
    return psum(jnp.einsum("bij,bj->bi", g, y), axes("j")), psum(jnp.einsum("bij,bi->bj", g, x), axes("i"))


kernel(
    "Outer",
    "b i, b j -> b i j",
    partial(jnp.einsum, "bi,bj->bij"),
    {"b": 8, "i": 6, "j": 16},
    "b",
    "j",
    lambda axes, x, y: ((jnp.einsum("bi,bj->bij", x, y),), (x, y)),
    _hand_outer_bwd,
    "b i, b j",
)
