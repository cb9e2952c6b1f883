"""Transformations around a call: each takes a function of arrays and returns one of equal values.

Where there is a batch or a loop, it has two elements and the second one is returned, so that a derivative of the first
element, or of the sum, shows.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

Context = Callable[[Callable[..., Any]], Callable[..., Any]]


def eager(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: f(*args)


def jit(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda *args: f(*args))


def checkpoint(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.checkpoint(lambda *args: f(*args))


def vmap(f: Callable[..., Any]) -> Callable[..., Any]:
    """Batches the first argument alone, along its last axis."""

    def mapped(x: Any, *others: Any) -> Any:
        x = jnp.stack([0.5 * jnp.asarray(x), jnp.asarray(x)], -1)
        outputs = jax.vmap(f, in_axes=(-1, *(None for _ in others)))(x, *others)
        return jax.tree.map(lambda y: y[1], outputs)

    return mapped


def scan(f: Callable[..., Any]) -> Callable[..., Any]:
    def scanned(*args: Any) -> Any:
        steps = tuple(jnp.stack([0.5 * jnp.asarray(a), jnp.asarray(a)]) for a in args)
        return jax.tree.map(lambda y: y[1], jax.lax.scan(lambda _, a: (None, f(*a)), None, steps)[1])

    return scanned


def cond(f: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(*args: Any) -> Any:
        def other(*args: Any) -> Any:
            return jax.tree.map(jnp.zeros_like, f(*args))

        return jax.lax.cond(jnp.sum(args[0]) > -1e9, lambda *args: f(*args), other, *args)

    return chosen


CONTEXTS: dict[str, Context] = {
    "eager": eager,
    "jit": jit,
    "checkpoint": checkpoint,
    "vmap": vmap,
    "scan": scan,
    "cond": cond,
}


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient, by the first argument, of the sum of the outputs."""
    return jax.grad(lambda *args: jnp.sum(f(*args)))


def tangent(f: Callable[..., Any]) -> Callable[..., Any]:
    """The tangent along ones, by the first argument."""
    return lambda x, *others: jax.jvp(lambda x: f(x, *others), (x,), (jnp.ones_like(x),))[1]


STEPS: dict[str, Context] = {**CONTEXTS, "grad": gradient, "jvp": tangent}


def program(name: str, **steps: Context) -> Context:
    """Returns what a name such as "jit of grad of vmap" says: its last step is put around the function first.

    Args:
      name: the steps, each of `STEPS`.
      **steps: further ones, or others of these names.
    """
    known = STEPS | steps
    return lambda f: functools.reduce(lambda f, step: known[step](f), reversed(name.split(" of ")), f)


# Gradients that JAX stages together with the call, or does not stage,
GRADIENTS = ["grad", "jit of grad", "vmap of grad", "scan of grad", "jit of vmap of grad"]
# gradients of a call that JAX staged before,
GRADIENTS_OF_PROGRAMS = [
    *(f"grad of {step}" for step in ("jit", "checkpoint", "vmap", "scan", "cond")),
    "jit of grad of jit",
]
# and second derivatives.
SECOND_DERIVATIVES = [
    "grad of grad",
    "jit of grad of grad",
    "vmap of grad of grad",
    *(f"grad of {step} of grad" for step in ("jit", "checkpoint", "vmap", "scan")),
    *(f"grad of grad of {step}" for step in ("jit", "checkpoint", "vmap", "scan", "cond")),
]

# What is raised, by jaxfn or by JAX, for a tracer that is used in another program than its own.
_ESCAPED_TRACER = {
    "NotImplementedError": r"{name}[\s\S]*closes over a value",
    "UnexpectedTracerError": "unexpected tracer",
    "CustomVJPException": "closed-over value",
    "TypeError": "No constant handler for type",
}


def _assert_escaped_tracer(error: BaseException, name: str) -> None:
    pattern = _ESCAPED_TRACER.get(type(error).__name__, "no other class")
    assert re.search(pattern.format(name=name), str(error)), repr(error)


@contextlib.contextmanager
def raises_escaped_tracer(name: str = "") -> Iterator[None]:
    """Asserts that a tracer of another program is found: by jaxfn, which names the Function, or by JAX."""
    with pytest.raises(Exception, match=".") as caught:
        yield
    _assert_escaped_tracer(caught.value, name)


def assert_right_or_escaped(compute: Callable[[], Any], expected: Any, name: str = "") -> None:
    """Asserts that a result is right, or that a tracer of another program is found."""
    try:
        result = compute()
    except Exception as error:
        _assert_escaped_tracer(error, name)
    else:
        np.testing.assert_allclose(result, expected, rtol=1e-5)
