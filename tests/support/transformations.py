"""What a function may be put through, each as a way from (function, arguments) to comparable numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.cases import Case, loss_of, make_args

Transformation = Callable[[Case, Callable[..., Any]], Any]
BATCH = 8
TRANSFORMATIONS: dict[str, Transformation] = {}


def transformation(run: Transformation) -> Transformation:
    TRANSFORMATIONS[run.__name__] = run
    return run


def grad(f: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    return jax.grad(f, argnums=tuple(range(len(args))))


def over_batch(case: Case, f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.vmap(f, in_axes=tuple(0 if batched else None for batched in case.batched))


@transformation
def eager(case, f):
    return f(*make_args(case))


@transformation
def jit(case, f):
    return jax.jit(f)(*make_args(case))


@transformation
def grad_eager(case, f):
    args = make_args(case)
    return grad(loss_of(f), args)(*args)


@transformation
def jit_of_grad(case, f):
    args = make_args(case)
    return jax.jit(grad(loss_of(f), args))(*args)


@transformation
def grad_of_jit(case, f):
    args = make_args(case)
    return grad(loss_of(jax.jit(f)), args)(*args)


@transformation
def value_and_grad(case, f):
    args = make_args(case)
    return jax.value_and_grad(loss_of(f), argnums=tuple(range(len(args))))(*args)


@transformation
def vmap_of_grad(case, f):
    args = make_args(case, BATCH)
    return over_batch(case, grad(loss_of(f), args))(*args)


@transformation
def grad_of_vmap(case, f):
    args = make_args(case, BATCH)
    return grad(loss_of(over_batch(case, f)), args)(*args)


def _scanned(case, f, args):
    xs = [x for x, batched in zip(args, case.batched, strict=True) if batched]

    def step(total, rows):
        rows = iter(rows)
        full = [next(rows) if batched else x for x, batched in zip(args, case.batched, strict=True)]
        return total + loss_of(f)(*full), None

    return jax.lax.scan(step, jnp.float32(0), xs)[0]


@transformation
def scan(case, f):
    args = make_args(case, BATCH)
    return jax.jit(grad(lambda *a: _scanned(case, f, a), args))(*args)


@transformation
def second_order_of_scan(case, f):
    args = make_args(case, 2)
    first = grad(lambda *a: _scanned(case, f, a), args)
    return jax.jit(grad(loss_of(first), args))(*args)


@transformation
def carried_scan(case, f):
    args = make_args(case)

    def loss(*args):
        def step(first, _):
            return jax.tree.map(
                lambda x, d: x + 0.01 * jnp.cos(d), first, grad(loss_of(f), args)(first, *args[1:])[0]
            ), None

        return loss_of(f)(jax.lax.scan(step, args[0], None, length=3)[0], *args[1:])

    return loss(*args)


@transformation
def while_loop(case, f):
    args = make_args(case)

    def body(state):
        i, total = state
        return i + 1, total + loss_of(f)(*args)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.float32(0)))


@transformation
def cond(case, f):
    args = make_args(case)

    def loss(*args):
        first = jax.tree.leaves(args)[0]
        return jax.lax.cond(first.sum() > -1e9, loss_of(f), lambda *a: jnp.float32(0), *args)

    return jax.jit(grad(loss, args))(*args)


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "by_name": jax.checkpoint_policies.save_only_these_names("inner"),
}


def _checkpoint(policy, case, f):
    args = make_args(case)
    loss = jax.checkpoint(loss_of(f), policy=policy)
    return jax.jit(grad(loss, args))(*args), jax.jit(grad(loss_of(grad(loss, args)), args))(*args)


for _name, _policy in POLICIES.items():
    TRANSFORMATIONS[f"checkpoint_{_name}"] = partial(_checkpoint, _policy)


@transformation
def second_order(case, f):
    args = make_args(case)
    return grad(loss_of(grad(loss_of(f), args)), args)(*args)


@transformation
def second_order_of_jit(case, f):
    args = make_args(case)
    return jax.jit(grad(loss_of(jax.jit(grad(loss_of(jax.jit(f)), args))), args))(*args)


@transformation
def third_order(case, f):
    args = make_args(case)
    return jax.jit(grad(loss_of(grad(loss_of(grad(loss_of(f), args)), args)), args))(*args)


@transformation
def vmap_of_second_order(case, f):
    args = make_args(case, BATCH)
    return jax.jit(over_batch(case, grad(loss_of(grad(loss_of(f), args)), args)))(*args)


@transformation
def second_order_of_vmap(case, f):
    args = make_args(case, BATCH)
    return jax.jit(grad(loss_of(grad(loss_of(over_batch(case, f)), args)), args))(*args)


@transformation
def grad_of_vmap_of_grad(case, f):
    args = make_args(case, BATCH)
    return jax.jit(grad(loss_of(over_batch(case, grad(loss_of(f), args))), args))(*args)


@transformation
def jacrev(case, f):
    args = make_args(case)
    real = lambda *a: [x for x in jax.tree.leaves(f(*a)) if jnp.issubdtype(x.dtype, jnp.inexact)]  # noqa: E731
    return jax.jacrev(real, argnums=tuple(range(len(args))))(*args)


@transformation
def eval_shape(case, f):
    args = make_args(case)
    shapes = jax.eval_shape(lambda *a: (f(*a), grad(loss_of(f), args)(*a)), *args)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


@transformation
def export_and_reload(case, f):
    args = make_args(case)
    loss = loss_of(f)
    exported = jax.export.export(jax.jit(lambda *a: (loss(*a), grad(loss, args)(*a))))(*args)
    reloaded = jax.export.deserialize(exported.serialize())
    return reloaded.call(*args)


def _sharded_args(case, axis_type):
    mesh = jax.make_mesh((BATCH,), ("d",), axis_types=(axis_type,))
    args = make_args(case, BATCH)
    specs = tuple(P("d") if batched else P() for batched in case.batched)
    return mesh, specs, tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True))


def _sharded_jit(axis_type, case, f):
    mesh, _, args = _sharded_args(case, axis_type)
    with jax.set_mesh(mesh):
        loss = loss_of(over_batch(case, f))
        return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))(*args))


TRANSFORMATIONS["sharded_jit_auto"] = partial(_sharded_jit, AxisType.Auto)
TRANSFORMATIONS["sharded_jit_explicit"] = partial(_sharded_jit, AxisType.Explicit)


def _shard_map(check_vma, second, case, f):
    mesh, specs, args = _sharded_args(case, AxisType.Auto)

    def local(*args):
        return jax.lax.psum(loss_of(over_batch(case, f))(*args), "d")

    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    if second:
        return jax.device_get(jax.jit(grad(loss_of(grad(loss, args)), args))(*args))
    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args)))))(*args))


def _grad_inside_shard_map(case, f):
    mesh, specs, args = _sharded_args(case, AxisType.Auto)

    def local(*args):
        # With check_vma, the gradient of a replicated weight is already summed over the axis.
        return grad(loss_of(over_batch(case, f)), args)(*args)

    return jax.device_get(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))(*args))


TRANSFORMATIONS["shard_map_check_vma"] = partial(_shard_map, True, False)
TRANSFORMATIONS["shard_map_no_check_vma"] = partial(_shard_map, False, False)
TRANSFORMATIONS["second_order_of_shard_map_check_vma"] = partial(_shard_map, True, True)
TRANSFORMATIONS["second_order_of_shard_map_no_check_vma"] = partial(_shard_map, False, True)
TRANSFORMATIONS["grad_inside_shard_map"] = _grad_inside_shard_map
