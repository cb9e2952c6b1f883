"""Derivatives of a function of any arguments, by name: in forward mode, in reverse mode, and in mixes of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.both_modes import FORWARD, REVERSE, Modes
from tests.support.contexts import Context, program

Function = Callable[..., Any]


def floating(tree: Any) -> list[jax.Array]:
    return [y for y in jax.tree.leaves(tree) if jnp.issubdtype(y.dtype, jnp.inexact)]


def nonlinear(f: Function) -> Function:
    """Nonlinear before and after `f`, so that a second derivative goes through its tangents and its outputs."""
    return lambda *args: [jnp.sin(0.5 * y) for y in floating(f(*jax.tree.map(lambda x: x + 0.2 * x * x, args)))]


def total(f: Function) -> Callable[..., jax.Array]:
    return lambda *args: sum(jnp.sum(y * (i + 1)) for i, y in enumerate(floating(f(*args))))


def every(args: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(range(len(args)))


def grad(f: Function) -> Function:
    """The gradients of a number by all arguments."""
    return lambda *args: jax.grad(f, every(args))(*args)


def directions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return jax.tree.map(lambda x: jnp.cos(3 * x), args)


def _pull_ones(f: Function) -> Function:
    def pulled(*args: Any) -> Any:
        outputs, pullback = jax.vjp(f, *args)
        return pullback(jax.tree.map(lambda y: jnp.ones_like(y) + y, outputs))

    return pulled


# Each takes a function of all arguments, the derivatives by all of them. These are equal for a batch of rows as for
# every row alone.
STEPS: dict[str, Context] = {
    "jvp": lambda f: lambda *args: jax.jvp(f, args, directions(args))[1],
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*directions(args)),
    "grad": lambda f: grad(total(f)),
    "vjp": _pull_ones,
}
OF_JACOBIANS: dict[str, Context] = {
    "jacfwd": lambda f: lambda *args: jax.jacfwd(f, every(args))(*args),
    "jacrev": lambda f: lambda *args: jax.jacrev(f, every(args))(*args),
    "hessian": lambda f: lambda *args: jax.hessian(total(f), every(args))(*args),
}
# In which modes a step differentiates, the innermost first.
_MODES: dict[str, Modes] = {
    **dict.fromkeys(["jvp", "linearize", "jacfwd"], (FORWARD,)),
    **dict.fromkeys(["grad", "vjp", "jacrev"], (REVERSE,)),
    "hessian": (REVERSE, FORWARD),
}
DERIVATIVES = ("jvp", "linearize", "grad", "vjp", "jvp of grad", "grad of jvp")
JACOBIANS = ("jacfwd", "jacrev", "hessian", "jacrev of jacfwd")
FURTHER = ("jvp of jvp", "vjp of grad", "vjp of jvp of grad", "jvp of grad of jvp")
ALL = (*DERIVATIVES, *JACOBIANS, *FURTHER)


def modes_of(name: str) -> Modes:
    return tuple(mode for step in reversed(name.split(" of ")) for mode in _MODES[step])


def derivative(name: str, f: Function, **steps: Context) -> Function:
    """A program of `STEPS`, and those that are passed, of a function made nonlinear."""
    return program(name, **STEPS, **OF_JACOBIANS, **steps)(nonlinear(f))


def taken(f: Function, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    return lambda *args: {name: derivative(name, f)(*args) for name in names}


def check(got: Any, wanted: Any, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    """Asserts equal structures, shapes and values."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, ours), theirs in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        assert np.shape(ours) == np.shape(theirs)
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def jit(f: Function) -> Function:
    return jax.jit(f, compiler_options={"xla_backend_optimization_level": 0})  # compiles in half the time
