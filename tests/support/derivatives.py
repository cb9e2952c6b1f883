"""Every way of taking derivatives of a function, in forward mode, in reverse mode, and in mixes of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.both_modes import FORWARD, REVERSE, Modes


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


# What is done with a function, and in which modes its derivatives are taken, the innermost first. These are equal
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


def check(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in got:
        assert jax.tree.structure(got[name]) == jax.tree.structure(wanted[name]), name
        for ours, theirs in zip(jax.tree.leaves(got[name]), jax.tree.leaves(wanted[name]), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5, err_msg=name)


def taken(f: Callable[..., Any], which: dict[str, tuple[Modes, Derivative]]) -> Callable[..., dict[str, Any]]:
    return lambda *args: {name: derivative(f, args) for name, (_, derivative) in which.items()}


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
