"""Contract rows D4-D7 and B11: forward mode beside reverse mode on one Function, in every mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.both_modes import CASES, FORWARD, REVERSE, Case, Modes
from tests.support.marks import row, sampled

ROWS = 8


def nonlinear(f: Callable[..., Any]) -> Callable[..., Any]:
    """Nonlinear before and after `f`, so that a second derivative goes through its tangents and its outputs."""

    def function(*args: Any) -> list[jax.Array]:
        outputs = f(*jax.tree.map(lambda x: x + 0.2 * x * x, args))
        return [jnp.sin(0.5 * y) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]

    return function


def loss_of(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: sum(jnp.sum(y * (i + 1)) for i, y in enumerate(nonlinear(f)(*args)))


def every(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(range(len(args)))


def grad(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: jax.grad(f, every(args))(*args)


def directions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jnp.cos(3 * x), args)


def jvp(f, args):
    return jax.jvp(f, args, directions(args))[1]


def pull_ones(f, args):
    outputs, pullback = jax.vjp(f, *args)
    return pullback(jax.tree.map(lambda y: jnp.ones_like(y) + y, outputs))


# What is done with a function, and in which modes its derivatives are taken, the innermost first. These are the same
# for a batch of rows as for every row alone.
Derivative = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
Derivatives = dict[str, tuple[Modes, Derivative]]
DERIVATIVES: Derivatives = {
    "jvp": ((FORWARD,), lambda f, args: jvp(nonlinear(f), args)),
    "linearize": ((FORWARD,), lambda f, args: jax.linearize(nonlinear(f), *args)[1](*directions(args))),
    "grad": ((REVERSE,), lambda f, args: grad(loss_of(f))(*args)),
    "vjp": ((REVERSE,), lambda f, args: pull_ones(nonlinear(f), args)),
    "jvp_of_grad": ((REVERSE, FORWARD), lambda f, args: jvp(grad(loss_of(f)), args)),
    "grad_of_jvp": ((FORWARD, REVERSE), lambda f, args: grad(lambda *a: jvp(loss_of(f), a))(*args)),
}
JACOBIANS: Derivatives = {
    "jacfwd": ((FORWARD,), lambda f, args: jax.jacfwd(nonlinear(f), every(args))(*args)),
    "jacrev": ((REVERSE,), lambda f, args: jax.jacrev(nonlinear(f), every(args))(*args)),
    "hessian": ((REVERSE, FORWARD), lambda f, args: jax.hessian(loss_of(f), every(args))(*args)),
    "jacrev_of_jacfwd": (
        (FORWARD, REVERSE),
        lambda f, args: jax.jacrev(jax.jacfwd(loss_of(f), every(args)), every(args))(*args),
    ),
}
FURTHER: Derivatives = {
    "jvp_of_jvp": ((FORWARD, FORWARD), lambda f, args: jvp(lambda *a: jvp(nonlinear(f), a), args)),
    "grad_of_grad": ((REVERSE, REVERSE), lambda f, args: pull_ones(grad(loss_of(f)), args)),
    "grad_of_jvp_of_grad": (
        (REVERSE, FORWARD, REVERSE),
        lambda f, args: pull_ones(lambda *a: jvp(grad(loss_of(f)), a), args),
    ),
    "jvp_of_grad_of_jvp": (
        (FORWARD, REVERSE, FORWARD),
        lambda f, args: jvp(grad(lambda *a: jvp(loss_of(f), a)), args),
    ),
}
ALL = DERIVATIVES | JACOBIANS | FURTHER


def rows_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch whose first row is `args`."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.arange(float(ROWS)).reshape(ROWS, *[1] * x.ndim), args)


def first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


@pytest.fixture(scope="module")
def expected() -> Callable[[Case], dict[str, Any]]:
    """What every derivative of a case is, for all rows."""
    found: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        if case.name not in found:

            def each(*args: Any) -> dict[str, Any]:
                return {name: d(case.reference(modes), args) for name, (modes, d) in ALL.items()}

            found[case.name] = jit(jax.vmap(each))(*rows_of(case.args))
        return found[case.name]

    return of


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in got:
        assert jax.tree.structure(got[name]) == jax.tree.structure(wanted[name]), name
        for ours, theirs in zip(jax.tree.leaves(got[name]), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=name)


def taken(f: Callable[..., Any], which: dict[str, tuple[Modes, Derivative]]) -> Callable[..., dict[str, Any]]:
    return lambda *args: {name: derivative(f, args) for name, (_, derivative) in which.items()}


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time


def sharded(f: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    mesh = jax.make_mesh((ROWS,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)


# How derivatives of one row are taken.
SINGLE = {
    "eager": lambda f: taken(f, DERIVATIVES),
    "jit": lambda f: jit(taken(f, ALL)),
    "checkpoint_of_jit": lambda f: jit(taken(jax.checkpoint(jax.jit(f)), DERIVATIVES | JACOBIANS)),
}
# How derivatives of all rows are taken: of a function of all rows, and then row by row.
MAPPED = {
    "of_vmap": lambda f: taken(jax.vmap(f), DERIVATIVES),
    "of_scan": lambda f: taken(lambda *rows: jax.lax.map(lambda row: f(*row), rows), DERIVATIVES),
    "of_shard_map_check_vma": lambda f: taken(sharded(jax.vmap(f), True), DERIVATIVES),
    "of_shard_map": lambda f: taken(sharded(jax.vmap(f), False), DERIVATIVES),
    "vmap": lambda f: jax.vmap(taken(f, DERIVATIVES | JACOBIANS)),
    "shard_map_check_vma": lambda f: sharded(jax.vmap(taken(f, DERIVATIVES | JACOBIANS)), True),
    "shard_map": lambda f: sharded(jax.vmap(taken(f, JACOBIANS)), False),
}


@row("D4", "D7")
@sampled
@pytest.mark.parametrize("how", SINGLE)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_mode_has_its_own_rule(case, how, expected):
    check(SINGLE[how](case.apply)(*case.args), first(expected(case)))


@row("D4", "D7")
@sampled
@pytest.mark.parametrize("how", MAPPED)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_mode_has_its_own_rule_when_mapped(case, how, expected):
    check(jit(MAPPED[how](case.apply))(*rows_of(case.args)), expected(case))


@row("D7")
def test_jacobians_run_eagerly_too(expected):
    check(taken(CASES[0].apply, JACOBIANS)(*CASES[0].args), first(expected(CASES[0])))
