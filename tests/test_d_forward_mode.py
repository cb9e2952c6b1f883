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

from tests.both_modes import CASES, FORWARD, REVERSE, Case, Modes

ROWS = 8


def nonlinear(f: Callable[..., Any]) -> Callable[..., Any]:
    """Nonlinear before and after `f`, so that a second derivative goes through its tangents and its outputs."""

    def function(*args: Any) -> list[jax.Array]:
        outputs = f(*jax.tree.map(lambda x: x + 0.2 * x * x, args))
        return [jnp.sin(0.5 * y) for y in jax.tree.leaves(outputs) if jnp.issubdtype(y.dtype, jnp.inexact)]

    return function


def loss_of(f: Callable[..., Any]) -> Callable[..., jax.Array]:
    return lambda *args: sum(jnp.sum(y * (i + 1)) for i, y in enumerate(nonlinear(f)(*args)))


def every(args: tuple[Any, ...]) -> dict[str, Any]:
    return {"argnums": tuple(range(len(args)))}


def directions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jnp.cos(3 * x), args)


def jvp(f, args):
    return jax.jvp(f, args, directions(args))[1]


def pull_ones(f, args):
    outputs, pullback = jax.vjp(f, *args)
    return pullback(jax.tree.map(lambda y: jnp.ones_like(y) + y, outputs))


# What is done with a function, and in which modes its derivatives are taken, the innermost first. Each returns
# something that is the same for a batch of rows as for every row alone.
Derivative = Callable[[Callable[..., Any], tuple[Any, ...]], Any]
DERIVATIVES: dict[str, tuple[Modes, Derivative]] = {
    "jvp": ((FORWARD,), lambda f, args: jvp(nonlinear(f), args)),
    "linearize": ((FORWARD,), lambda f, args: jax.linearize(nonlinear(f), *args)[1](*directions(args))),
    "grad": ((REVERSE,), lambda f, args: jax.grad(loss_of(f), **every(args))(*args)),
    "vjp": ((REVERSE,), lambda f, args: pull_ones(nonlinear(f), args)),
    "jvp_of_grad": (
        (REVERSE, FORWARD),
        lambda f, args: jvp(jax.grad(loss_of(f), **every(args)), args),
    ),
    "grad_of_jvp": (
        (FORWARD, REVERSE),
        lambda f, args: jax.grad(lambda *a: jvp(loss_of(f), a), **every(args))(*args),
    ),
    "jvp_of_jvp": ((FORWARD, FORWARD), lambda f, args: jvp(lambda *a: jvp(nonlinear(f), a), args)),
    "grad_of_grad": (
        (REVERSE, REVERSE),
        lambda f, args: pull_ones(jax.grad(loss_of(f), **every(args)), args),
    ),
}
JACOBIANS: dict[str, tuple[Modes, Derivative]] = {
    "jacfwd": ((FORWARD,), lambda f, args: jax.jacfwd(nonlinear(f), **every(args))(*args)),
    "jacrev": ((REVERSE,), lambda f, args: jax.jacrev(nonlinear(f), **every(args))(*args)),
    "hessian": ((REVERSE, FORWARD), lambda f, args: jax.hessian(loss_of(f), **every(args))(*args)),
    "jacrev_of_jacfwd": (
        (FORWARD, REVERSE),
        lambda f, args: jax.jacrev(jax.jacfwd(loss_of(f), **every(args)), **every(args))(*args),
    ),
    "grad_of_jvp_of_grad": (
        (REVERSE, FORWARD, REVERSE),
        lambda f, args: jax.grad(
            lambda *a: sum(map(jnp.sum, jax.tree.leaves(jvp(jax.grad(loss_of(f), **every(args)), a)))), **every(args)
        )(*args),
    ),
    "jvp_of_grad_of_jvp": (
        (FORWARD, REVERSE, FORWARD),
        lambda f, args: jvp(jax.grad(lambda *a: jvp(loss_of(f), a), **every(args)), args),
    ),
}
ALL = DERIVATIVES | JACOBIANS


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

            found[case.name] = jax.jit(jax.vmap(each))(*rows_of(case.args))
        return found[case.name]

    return of


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in got:
        assert jax.tree.structure(got[name]) == jax.tree.structure(wanted[name]), name
        for ours, theirs in zip(jax.tree.leaves(got[name]), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=name)


def taken(f: Callable[..., Any], which: dict[str, tuple[Modes, Derivative]]) -> Callable[..., dict[str, Any]]:
    return lambda *args: {name: derivative(f, args) for name, (_, derivative) in which.items()}


# Ways of calling f for one row, under which everything is differentiated.
WRAPS = {
    "eager": (lambda f: f, lambda g: g),
    "jit": (lambda f: f, jax.jit),
    "of_jit": (jax.jit, jax.jit),
    "checkpoint": (jax.checkpoint, jax.jit),
}


def mesh():
    return jax.make_mesh((ROWS,), ("d",), axis_types=(AxisType.Auto,))


def sharded(f: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    return jax.shard_map(f, mesh=mesh(), in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)


# Ways of calling f for all rows, which are differentiated.
MAPS = {
    "of_vmap": jax.vmap,
    "of_scan": lambda f: lambda *rows: jax.lax.map(lambda row: f(*row), rows),
    "of_shard_map_check_vma": lambda f: sharded(jax.vmap(f), True),
    "of_shard_map": lambda f: sharded(jax.vmap(f), False),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_D4_D7_each_mode_has_its_own_rule(case, wrap, expected):
    of_function, of_derivatives = WRAPS[wrap]
    got = of_derivatives(taken(of_function(case.apply), ALL))(*case.args)
    check(got, first(expected(case)))


@pytest.mark.parametrize("wrap", MAPS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_D4_D7_derivatives_of_mapped_calls(case, wrap, expected):
    got = jax.jit(taken(MAPS[wrap](case.apply), DERIVATIVES))(*rows_of(case.args))
    check(got, expected(case))


@pytest.mark.parametrize("wrap", ["vmap_of", "shard_map_of_check_vma", "shard_map_of"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_D4_D7_mapped_derivatives(case, wrap, expected):
    got = jax.vmap(taken(case.apply, ALL))
    if wrap != "vmap_of":
        got = sharded(got, wrap.endswith("check_vma"))
    check(jax.jit(got)(*rows_of(case.args)), expected(case))
