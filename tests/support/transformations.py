"""Programs by name, around the functions of `cases`: each gives comparable numbers of (case, function)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.support.cases import Case, make_args
from tests.support.contexts import Context, program
from tests.support.derivatives import OF_JACOBIANS, STEPS, every, grad, nonlinear, total

Function = Callable[..., Any]
BATCH = 8
POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "by_name": jax.checkpoint_policies.save_only_these_names("inner"),
}


def value_and_grad(f: Function) -> Function:
    return lambda *args: jax.value_and_grad(total(f), every(args))(*args)


def carried_scan(f: Function) -> Function:
    """The outputs after three steps, each of which goes along the gradient by the first argument, in a scan's carry."""

    def stepped(*args: Any) -> Any:
        def step(first: Any, _: Any) -> Any:
            gradient = grad(total(f))(first, *args[1:])[0]
            return jax.tree.map(lambda x, d: x + 0.01 * jnp.cos(d), first, gradient), None

        return f(jax.lax.scan(step, args[0], None, length=3)[0], *args[1:])

    return stepped


def while_loop(f: Function) -> Function:
    def summed(*args: Any) -> Any:
        def body(state: Any) -> Any:
            i, sum_of = state
            return i + 1, sum_of + total(f)(*args)

        return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, jnp.float32(0)))

    return summed


def eval_shape(f: Function) -> Function:
    def shapes(*args: Any) -> Any:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, *args))

    return shapes


def export(f: Function) -> Function:
    def reloaded(*args: Any) -> Any:
        exported = jax.export.export(jax.jit(f))(*args)
        return jax.export.deserialize(exported.serialize()).call(*args)

    return reloaded


def over_batch(case: Case, f: Function) -> Function:
    return jax.vmap(f, in_axes=tuple(0 if batched else None for batched in case.batched))


def over_steps(case: Case, f: Function) -> Function:
    """The sum over the elements of a batch, by a scan; unbatched arguments are constants of it."""

    def summed(*args: Any) -> jax.Array:
        def step(sum_of: Any, batched: Any) -> Any:
            rest = iter(batched)
            full = [next(rest) if batched else x for x, batched in zip(args, case.batched, strict=True)]
            return sum_of + total(f)(*full), None

        xs = [x for x, batched in zip(args, case.batched, strict=True) if batched]
        return jax.lax.scan(step, jnp.float32(0), xs)[0]

    return summed


def _mesh(axis_type: AxisType) -> Any:
    return jax.make_mesh((BATCH,), ("d",), axis_types=(axis_type,))


def _specs(case: Case) -> tuple[P, ...]:
    return tuple(P("d") if batched else P() for batched in case.batched)


def _sharded_jit(case: Case, axis_type: AxisType, f: Function) -> Function:
    def sharded(*args: Any) -> Any:
        mesh = _mesh(axis_type)
        placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, _specs(case), strict=True)]
        with jax.set_mesh(mesh):
            return jax.device_get(jax.jit(f)(*placed))

    return sharded


def _shard_map(case: Case, check_vma: bool, f: Function) -> Function:
    """The sum over the devices, each of which has an element of the batch."""

    def local(*args: Any) -> jax.Array:
        return jax.lax.psum(total(over_batch(case, f))(*args), "d")

    mesh = _mesh(AxisType.Auto)
    return jax.shard_map(local, mesh=mesh, in_specs=_specs(case), out_specs=P(), check_vma=check_vma)


def _inside_shard_map(case: Case, f: Function) -> Function:
    # With check_vma, the gradient of a replicated weight is already summed over the axis.
    return jax.shard_map(f, mesh=_mesh(AxisType.Auto), in_specs=_specs(case), out_specs=_specs(case))


OF_ONE_ELEMENT: dict[str, Context] = {
    **STEPS,
    **OF_JACOBIANS,
    "value_and_grad": value_and_grad,
    "carried scan": carried_scan,
    "while": while_loop,
    "eval_shape": eval_shape,
    "export": export,
    **{f"checkpoint {name}": partial(jax.checkpoint, policy=policy) for name, policy in POLICIES.items()},
}
OF_A_BATCH: dict[str, Callable[..., Function]] = {
    "vmap": over_batch,
    "scan": over_steps,
    "sharded jit auto": lambda case, f: _sharded_jit(case, AxisType.Auto, f),
    "sharded jit explicit": lambda case, f: _sharded_jit(case, AxisType.Explicit, f),
    "shard_map check_vma": lambda case, f: _shard_map(case, True, f),
    "shard_map": lambda case, f: _shard_map(case, False, f),
    "inside shard_map": _inside_shard_map,
}


def transform(name: str, case: Case, f: Function) -> Any:
    """The result of a program, for one element or, where a step is of `OF_A_BATCH`, for a batch."""
    of_batch = {step: partial(derived, case) for step, derived in OF_A_BATCH.items()}
    has_batch = any(step in OF_A_BATCH for step in name.split(" of "))
    function = f if name in ("eager", "jit", "eval_shape") else nonlinear(f)
    return program(name, **OF_ONE_ELEMENT | of_batch)(function)(*make_args(case, BATCH if has_batch else None))
