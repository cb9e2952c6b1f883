"""Forward mode compared with torch's: one source in both, `torch.func.jvp` and `torch.autograd.forward_ad` live.

Of nested forward mode torch 2.13 drops a term for custom Functions, right rules included, so that is not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import in_library
from tests.support.either_library import Torch
from tests.support.libraries import Jax, make_function
from tests.support.marks import row

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

X, Y = np.array([0.3, -1.2]), np.array([0.7, 0.4])
LOG: list[Any] = []


class Cube(jaxfn.Function):
    """Twice the derivative forward, three times it in reverse."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, tangent):
        return 6 * ctx.saved_tensors[0] ** 2 * tangent

    @staticmethod
    def backward(ctx, grad_output):
        return 9 * ctx.saved_tensors[0] ** 2 * grad_output


class Exp(Cube):
    """The saved output moves by the rule of the mode that differentiates it."""

    @staticmethod
    def forward(x):
        return jnp.exp(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def jvp(ctx, tangent):
        return 2 * ctx.saved_tensors[0] * tangent

    @staticmethod
    def backward(ctx, grad_output):
        return 3 * ctx.saved_tensors[0] * grad_output


class Rotate(jaxfn.Function):
    """Two inputs and outputs, a static argument, an output without derivative, what jvp alone saves."""

    @staticmethod
    def forward(x, y, factor):
        return jnp.sin(x) * y * factor, x > 0, jnp.cos(x) + y * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, y)
        ctx.save_for_forward(x, y, output[1])

    @staticmethod
    def jvp(ctx, of_x, of_y, of_factor):
        x, y, positive = ctx.saved_tensors
        LOG.append((len(ctx.saved_tensors), of_factor))
        first = (jnp.cos(x) * y * of_x + jnp.sin(x) * of_y) * ctx.factor
        return first, None, -jnp.sin(x) * of_x + 2 * y * of_y + 0 * positive

    @staticmethod
    def backward(ctx, first, _, second):
        x, y = ctx.saved_tensors
        first = first * ctx.factor
        return first * jnp.cos(x) * y - second * jnp.sin(x), first * jnp.sin(x) + second * 2 * y, None


class NotMaterialized(jaxfn.Function):
    """None for the tangent of an input that does not move."""

    @staticmethod
    def forward(x, y):
        return x * y, y * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx, of_x, of_y):
        _, y = ctx.saved_tensors
        LOG.append((of_x is None, of_y is None))
        return of_x * y, 0 * of_x  # torch asks None only of outputs without derivative

    @staticmethod
    def backward(ctx, first, second):
        _, y = ctx.saved_tensors
        return None if first is None else first * y, None


def of_rotated(apply, lib, x, y):
    first, positive, second = apply(x, y, 2.5)
    return first * second + positive


# How each is called, of its `apply`, the library and two arrays.
CALLS = {
    Cube: lambda apply, lib, x, y: apply(x * y),
    Exp: lambda apply, lib, x, y: apply(lib.m.sin(x) + y),
    Rotate: of_rotated,
    NotMaterialized: lambda apply, lib, x, y: sum(apply(x * x, lib.array(Y))),
}
EACH = pytest.mark.parametrize("function", CALLS)


def call_in(lib, function):
    apply = in_library(function, lib).apply
    return lambda x, y: CALLS[function](apply, lib, x, y)


def derivatives(function: Any, lib: Any, jvp: Callable[..., Any], grad: Callable[..., Any]) -> list[Any]:
    f = call_in(lib, function)
    x, y, of_x, of_y = map(lib.array, (X, Y, np.cos(X), np.sin(Y)))

    def loss(x, y):
        return lib.m.sin(0.5 * f(x, y)).sum()

    def moved(x, y):
        return jvp(loss, (x, y), (of_x, of_y))[1]

    return [
        jvp(f, (x, y), (of_x, of_y))[1],
        jvp(lambda x: f(x, y), (x,), (of_x,))[1],
        moved(x, y),
        *grad(loss, (0, 1))(x, y),
        *jvp(grad(loss, (0, 1)), (x, y), (of_x, of_y))[1],
        *grad(moved, (0, 1))(x, y),
        grad(lambda t: jvp(loss, (x, y), (t, of_y))[1])(of_x),
    ]


@row("D4", "D7")
@EACH
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_derivatives_match_torch(function, wrap):
    """The last derivative is by a tangent: torch transposes `jvp`, and here the tangent is transposed by `backward`."""
    by_tangent = 3 / 2 if function in (Cube, Exp) else 1
    theirs = derivatives(function, Torch, torch.func.jvp, torch.func.grad)
    ours = wrap(lambda: derivatives(function, Jax, jax.jvp, jax.grad))()
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        expected = b.detach().numpy() * (by_tangent if i == len(ours) - 1 else 1)
        np.testing.assert_allclose(a, expected, rtol=1e-9, atol=1e-12, err_msg=str(i))


def dual_jvp(f: Any, primals: Any, tangents: Any) -> Any:
    """Forward mode by torch's dual numbers, as a user without torch.func has it."""
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        return torch.autograd.forward_ad.unpack_dual(f(*duals))


@row("D4")
@EACH
def test_what_jvp_sees_as_in_torch(function):
    values, logs = [], []
    for lib, jvp in ((Torch, dual_jvp), (Jax, jax.jvp)):
        LOG.clear()
        tangents = lib.array(np.cos(X)), lib.array(np.sin(Y))
        values.append(lib.numpy(jvp(call_in(lib, function), (lib.array(X), lib.array(Y)), tangents)[1]))
        logs.append([*LOG])
    np.testing.assert_allclose(*values, rtol=1e-12)
    assert logs[0] == logs[1]


@row("C16")
def test_complex_tangents_as_in_torch():
    z, t = np.array([1 + 2j, 0.5 - 1j]), np.array([0.3 - 1j, 2j])
    ours, theirs = (
        make_function(lib, lambda z: z * z, lambda g, z: 2 * g * z.conj(), jvp=lambda tangent, z: 2 * z * tangent).apply
        for lib in (Jax, Torch)
    )
    theirs = dual_jvp(theirs, (torch.tensor(z),), (torch.tensor(t),))[1]
    ours = jax.jvp(ours, (z,), (t,))[1]
    np.testing.assert_allclose(ours, theirs.resolve_conj().numpy(), rtol=1e-12)
