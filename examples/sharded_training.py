"""Data- and tensor-parallel training on eight devices: by jit with Auto and Explicit axes, and by shard_map.

    python examples/sharded_training.py

A residual network is trained on the outputs of another one. The mesh splits a batch into four parts and each layer into
two. In each setting the losses and parameters equal those of one device, and the compiled step has the collectives of
one with a hand-written `jax.custom_vjp`. The devices are virtual ones of the CPU.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfn

BLOCKS, BATCH, WIDTH, HIDDEN = 2, 64, 16, 32
Params = list[dict[str, jax.Array]]


def product(a: jax.Array, b: jax.Array, *spec: Any) -> jax.Array:
    """Computes a @ b, sharded by `spec` on Explicit axes, where a sum over a sharded axis does not determine it."""
    explicit = jax.sharding.get_abstract_mesh().explicit_axes
    return jnp.matmul(a, b, out_sharding=P(*spec) if explicit else None)


def spec_of(x: jax.Array) -> Any:
    return jax.typeof(x).sharding.spec


class Linear(jaxfn.Function):
    """Computes x @ w. Inside shard_map backward returns this device's part of w's gradient, and jaxfn sums."""

    @staticmethod
    def forward(ctx, x: jax.Array, w: jax.Array) -> jax.Array:
        ctx.save_for_backward(x, w)
        return product(x, w, spec_of(x)[0], spec_of(w)[1])

    @staticmethod
    def backward(ctx, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = ctx.saved_tensors
        return product(g, w.T, *spec_of(x)), product(x.T, g, *spec_of(w))


class AddBias(jaxfn.Function):
    """Computes x + b. The gradient of `b` has x's shape and sharding, and jaxfn sums it."""

    @staticmethod
    def forward(ctx, x: jax.Array, b: jax.Array) -> jax.Array:
        return x + b

    @staticmethod
    def backward(ctx, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        return g, g


class Swish(jaxfn.Function):
    """Computes x * sigmoid(x); saves its input only."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        ctx.save_for_backward(x)
        return x * jax.nn.sigmoid(x)

    @staticmethod
    def backward(ctx, g: jax.Array) -> jax.Array:
        (x,) = ctx.saved_tensors
        s = jax.nn.sigmoid(x)
        return g * (s + x * s * (1 - s))


class CopyToModel(jaxfn.Function):
    """Megatron's copy: each half of the model gets its own x, so the gradients are summed over "model"."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        return jax.lax.pcast(x, "model", to="varying")

    @staticmethod
    def backward(ctx, g: jax.Array) -> jax.Array:
        return jax.lax.psum(g, "model")


class ReduceFromModel(jaxfn.Function):
    """Megatron's reduce, as in torch: sums over "model", and passes the gradient on."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "model")

    @staticmethod
    def backward(ctx, g: jax.Array) -> jax.Array:
        return g


class Ops(NamedTuple):
    """The operations of the network."""

    linear: Callable[..., jax.Array]
    add_bias: Callable[..., jax.Array]
    swish: Callable[..., jax.Array]
    copy: Callable[..., jax.Array] = lambda x: x
    reduce: Callable[..., jax.Array] = lambda x: x


FUNCTIONS = Ops(Linear.apply, AddBias.apply, Swish.apply)
REGIONS = FUNCTIONS._replace(copy=CopyToModel.apply, reduce=ReduceFromModel.apply)


def hand_written(is_shard_map: bool) -> Ops:
    """Returns the operations by `jax.custom_vjp`, with explicit sums over devices."""

    def over_data(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "data") if is_shard_map else x

    def varying(x: jax.Array) -> jax.Array:
        return jax.lax.pcast(x, "model", to="varying")

    def psum(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "model")

    def linear(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(x, w, spec_of(x)[0], spec_of(w)[1])

    def linear_bwd(residuals: Any, g: jax.Array) -> Any:
        x, w = residuals
        return product(g, w.T, *spec_of(x)), over_data(product(x.T, g, *spec_of(w)))

    def swish_bwd(x: jax.Array, g: jax.Array) -> Any:
        s = jax.nn.sigmoid(x)
        return (g * (s + x * s * (1 - s)),)

    rules: list[tuple[Any, Any, Any]] = [
        (linear, lambda x, w: (linear(x, w), (x, w)), linear_bwd),
        (jnp.add, lambda x, b: (x + b, None), lambda _, g: (g, over_data(jnp.sum(g, 0)))),
        (jax.nn.swish, lambda x: (jax.nn.swish(x), x), swish_bwd),
    ]
    if is_shard_map:
        rules.append((varying, lambda x: (varying(x), None), lambda _, g: (psum(g),)))
        rules.append((psum, lambda x: (psum(x), None), lambda _, g: (varying(g),)))
    functions = [jax.custom_vjp(lambda *args, f=f: f(*args)) for f, _, _ in rules]
    for function, (_, fwd, bwd) in zip(functions, rules, strict=True):
        function.defvjp(fwd, bwd)
    return Ops(*functions)


def network(ops: Ops, params: Params, x: jax.Array) -> jax.Array:
    for block in params:
        hidden = ops.swish(ops.add_bias(ops.linear(ops.copy(x), block["w1"]), block["b1"]))
        x = x + ops.add_bias(ops.reduce(ops.linear(hidden, block["w2"])), block["b2"])
    return x


def loss_of(ops: Ops) -> Callable[..., jax.Array]:
    return lambda params, x, y: jnp.mean((network(ops, params, x) - y) ** 2)


def init(seed: int) -> Params:
    rng = np.random.default_rng(seed)
    sizes = {"w1": (WIDTH, HIDDEN), "b1": (HIDDEN,), "w2": (HIDDEN, WIDTH), "b2": (WIDTH,)}
    return [
        {name: jnp.asarray(rng.normal(0, 0.25, size), jnp.float32) for name, size in sizes.items()}
        for _ in range(BLOCKS)
    ]


SPECS = [{"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P(None)}] * BLOCKS
ROWS = P("data", None)


class Trained(NamedTuple):
    """The result of training in one setting.

    Attributes:
      losses: the losses before each step.
      params: the parameters after training.
      collectives: the number of each collective in the compiled step.
    """

    losses: list[float]
    params: Params
    collectives: dict[str, int]


def train(loss: Callable[..., jax.Array], mesh: jax.sharding.Mesh | None, steps: int) -> Trained:
    """Trains by gradient descent, on the devices of a mesh or on one."""

    @jax.jit
    def step(params: Params, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Params]:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        return value, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(BATCH, WIDTH)), jnp.float32)
    y, params = network(FUNCTIONS, init(1), x), init(2)
    if mesh is not None:
        params, x, y = jax.tree.map(
            lambda value, spec: jax.device_put(np.asarray(value), NamedSharding(mesh, spec)),
            (params, x, y),
            (SPECS, ROWS, ROWS),
        )
    losses: list[float] = []
    with jax.set_mesh(mesh if mesh is not None else jax.make_mesh((1,), ("one",), devices=jax.local_devices()[:1])):
        compiled = step.lower(params, x, y).compile()
        for _ in range(steps):
            value, params = compiled(params, x, y)
            losses.append(float(value))
    names = re.findall(r" (all-[\w-]+|reduce-scatter|collective-[\w-]+)\(", compiled.as_text())
    return Trained(losses, params, dict(collections.Counter(names)))


def in_shard_map(ops: Ops, mesh: jax.sharding.Mesh) -> Callable[..., jax.Array]:
    """Returns the loss inside shard_map, where each device computes its part."""

    def local(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.pmean(loss_of(ops)(params, x, y), "data")

    return jax.shard_map(local, mesh=mesh, in_specs=(SPECS, ROWS, ROWS), out_specs=P())


class Results(NamedTuple):
    """The results of the example.

    Attributes:
      losses: the losses on one device.
      differences: the largest difference of losses and parameters from those of one device, by setting.
      collectives: those of the compiled step, by setting.
      hand_written_collectives: those with a hand-written `jax.custom_vjp`, by setting.
    """

    losses: list[float]
    differences: dict[str, float]
    collectives: dict[str, dict[str, int]]
    hand_written_collectives: dict[str, dict[str, int]]


def main(steps: int = 20) -> Results:
    """Trains in all settings, and asserts the claims above."""
    alone = train(loss_of(FUNCTIONS), None, steps)
    results = Results(alone.losses, {}, {}, {})
    print(f"one device: the loss goes from {alone.losses[0]:.3f} to {alone.losses[-1]:.3f}")
    for way in ("jit, Auto axes", "jit, Explicit axes", "shard_map"):
        axis_type = AxisType.Explicit if "Explicit" in way else AxisType.Auto
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        is_shard_map = way == "shard_map"
        losses = [
            in_shard_map(ops, mesh) if is_shard_map else loss_of(ops)
            for ops in (REGIONS if is_shard_map else FUNCTIONS, hand_written(is_shard_map))
        ]
        ours, hand = (train(loss, mesh, steps) for loss in losses)
        pairs = zip(jax.tree.leaves(ours[:2]), jax.tree.leaves(alone[:2]), strict=True)
        results.differences[way] = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
        results.collectives[way], results.hand_written_collectives[way] = ours.collectives, hand.collectives
        print(f"{way}: differs by {results.differences[way]:.1e}; collectives {ours.collectives}")
        assert results.differences[way] < 1e-5, "not the numbers of one device"
        assert ours.collectives == hand.collectives != {}, "not the collectives of a hand-written custom_vjp"
    assert alone.losses[-1] < alone.losses[0] / 4
    return results


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
