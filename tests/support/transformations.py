"""Transformations of a function, each a map from (case, function) to comparable numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.cases import Case, loss_of, make_args
from tests.support.contexts import cond
from tests.support.derivatives import every, grad

Function = Callable[..., Any]
Transformation = Callable[[Case, Function], Any]
BATCH = 8


def value_and_grad(f: Function) -> Function:
    return lambda *args: jax.value_and_grad(f, every(args))(*args)


def grad_of_loss(f: Function) -> Function:
    return grad(loss_of(f))


def jacrev(f: Function) -> Function:
    def real(*args: Any) -> list[jax.Array]:
        return [x for x in jax.tree.leaves(f(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]

    return lambda *args: jax.jacrev(real, every(args))(*args)


def carried_scan(f: Function) -> Function:
    """The loss after three steps, each of which goes along the gradient by the first argument, in a scan's carry."""

    def loss(*args: Any) -> Any:
        def step(first: Any, _: Any) -> Any:
            gradient = grad_of_loss(f)(first, *args[1:])[0]
            return jax.tree.map(lambda x, d: x + 0.01 * jnp.cos(d), first, gradient), None

        return loss_of(f)(jax.lax.scan(step, args[0], None, length=3)[0], *args[1:])

    return loss


def while_loop(f: Function) -> Function:
    def summed(*args: Any) -> Any:
        def body(state: Any) -> Any:
            i, total = state
            return i + 1, total + loss_of(f)(*args)

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.float32(0)))

    return summed


def eval_shape(f: Function) -> Function:
    def shapes(*args: Any) -> Any:
        found = jax.eval_shape(lambda *a: (f(*a), grad_of_loss(f)(*a)), *args)
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), found)

    return shapes


def export_and_reload(f: Function) -> Function:
    def reloaded(*args: Any) -> Any:
        exported = jax.export.export(jax.jit(value_and_grad(loss_of(f))))(*args)
        return jax.export.deserialize(exported.serialize()).call(*args)

    return reloaded


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "by_name": jax.checkpoint_policies.save_only_these_names("inner"),
}


def _checkpoint(policy: Any, f: Function) -> Function:
    loss = jax.checkpoint(loss_of(f), policy=policy)
    return jax.jit(lambda *args: (grad(loss)(*args), grad_of_loss(grad(loss))(*args)))


# Of the function of one element.
_SINGLE: dict[str, Callable[[Function], Function]] = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "grad_eager": grad_of_loss,
    "jit_of_grad": lambda f: jax.jit(grad_of_loss(f)),
    "grad_of_jit": lambda f: grad_of_loss(jax.jit(f)),
    "value_and_grad": lambda f: value_and_grad(loss_of(f)),
    "carried_scan": carried_scan,
    "while_loop": while_loop,
    "cond": lambda f: jax.jit(grad_of_loss(cond(f))),
    **{f"checkpoint_{name}": partial(_checkpoint, policy) for name, policy in POLICIES.items()},
    "second_order": lambda f: grad_of_loss(grad_of_loss(f)),
    "second_order_of_jit": lambda f: jax.jit(grad_of_loss(jax.jit(grad_of_loss(jax.jit(f))))),
    "third_order": lambda f: jax.jit(grad_of_loss(grad_of_loss(grad_of_loss(f)))),
    "third_order_of_checkpoint": lambda f: jax.jit(grad_of_loss(grad_of_loss(grad(jax.checkpoint(loss_of(f)))))),
    "jacrev": jacrev,
    "eval_shape": eval_shape,
    "export_and_reload": export_and_reload,
}


def over_batch(case: Case, f: Function) -> Function:
    return jax.vmap(f, in_axes=tuple(0 if batched else None for batched in case.batched))


def over_steps(case: Case, f: Function) -> Function:
    """The sum of the losses of all elements of a batch, by a scan; unbatched arguments are constants of it."""

    def total(*args: Any) -> jax.Array:
        def step(total: Any, batched: Any) -> Any:
            rest = iter(batched)
            full = [next(rest) if batched else x for x, batched in zip(args, case.batched, strict=True)]
            return total + loss_of(f)(*full), None

        xs = [x for x, batched in zip(args, case.batched, strict=True) if batched]
        return jax.lax.scan(step, jnp.float32(0), xs)[0]

    return total


# Of the function of one element too, for a batch of arguments.
_BATCHED: dict[str, Callable[[Case, Function], Function]] = {
    "vmap_of_grad": lambda case, f: over_batch(case, grad_of_loss(f)),
    "grad_of_vmap": lambda case, f: grad_of_loss(over_batch(case, f)),
    "vmap_of_second_order": lambda case, f: jax.jit(over_batch(case, grad_of_loss(grad_of_loss(f)))),
    "second_order_of_vmap": lambda case, f: jax.jit(grad_of_loss(grad_of_loss(over_batch(case, f)))),
    "grad_of_vmap_of_grad": lambda case, f: jax.jit(grad_of_loss(over_batch(case, grad_of_loss(f)))),
    "scan": lambda case, f: jax.jit(grad(over_steps(case, f))),
    "second_order_of_scan": lambda case, f: jax.jit(grad_of_loss(grad(over_steps(case, f)))),
}


def _single(derived: Callable[[Function], Function], case: Case, f: Function) -> Any:
    return derived(f)(*make_args(case))


def _batched(derived: Callable[[Case, Function], Function], case: Case, f: Function) -> Any:
    return derived(case, f)(*make_args(case, BATCH))


TRANSFORMATIONS: dict[str, Transformation] = {
    **{name: partial(_single, derived) for name, derived in _SINGLE.items()},
    **{name: partial(_batched, derived) for name, derived in _BATCHED.items()},
}


def _sharded_args(case, axis_type):
    mesh = jax.make_mesh((BATCH,), ("d",), axis_types=(axis_type,))
    args = make_args(case, BATCH)
    specs = tuple(P("d") if batched else P() for batched in case.batched)
    return mesh, specs, tuple(jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, specs, strict=True))


def _sharded_jit(axis_type, case, f):
    mesh, _, args = _sharded_args(case, axis_type)
    with jax.set_mesh(mesh):
        loss = loss_of(over_batch(case, f))
        return jax.device_get(jax.jit(value_and_grad(loss))(*args))


TRANSFORMATIONS["sharded_jit_auto"] = partial(_sharded_jit, AxisType.Auto)
TRANSFORMATIONS["sharded_jit_explicit"] = partial(_sharded_jit, AxisType.Explicit)


def _shard_map(check_vma, second, case, f):
    mesh, specs, args = _sharded_args(case, AxisType.Auto)

    def local(*args):
        return jax.lax.psum(loss_of(over_batch(case, f))(*args), "d")

    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    if second:
        return jax.device_get(jax.jit(grad_of_loss(grad(loss)))(*args))
    return jax.device_get(jax.jit(value_and_grad(loss))(*args))


def _grad_inside_shard_map(case, f):
    mesh, specs, args = _sharded_args(case, AxisType.Auto)

    def local(*args):
        # With check_vma, the gradient of a replicated weight is already summed over the axis.
        return grad_of_loss(over_batch(case, f))(*args)

    return jax.device_get(jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=specs))(*args))


TRANSFORMATIONS["shard_map_check_vma"] = partial(_shard_map, True, False)
TRANSFORMATIONS["shard_map_no_check_vma"] = partial(_shard_map, False, False)
TRANSFORMATIONS["second_order_of_shard_map_check_vma"] = partial(_shard_map, True, True)
TRANSFORMATIONS["second_order_of_shard_map_no_check_vma"] = partial(_shard_map, False, True)
TRANSFORMATIONS["grad_inside_shard_map"] = _grad_inside_shard_map
