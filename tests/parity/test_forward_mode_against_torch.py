"""Forward mode beside torch's: one source, built on both, `torch.func.jvp` and `torch.autograd.forward_ad` live.

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
from tests.support.marks import row

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]

JVP, GRAD = Callable[..., Any], Callable[..., Any]
X, Y = np.array([0.3, -1.2]), np.array([0.7, 0.4])


def different_rules(base: Any, m: Any, log: list[Any]) -> Any:
    """Twice the derivative forward, three times it in reverse."""

    class Cube(base):
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

    return lambda x, y: Cube.apply(x * y)


def several(base: Any, m: Any, log: list[Any]) -> Any:
    """Two inputs and outputs, a static argument, an output without derivative, what jvp alone keeps."""

    class Rotate(base):
        @staticmethod
        def forward(x, y, factor):
            return m.sin(x) * y * factor, x > 0, m.cos(x) + y * y

        @staticmethod
        def setup_context(ctx, inputs, output):
            x, y, ctx.factor = inputs
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(x, y)
            ctx.save_for_forward(x, y, output[1])

        @staticmethod
        def jvp(ctx, of_x, of_y, of_factor):
            x, y, positive = ctx.saved_tensors
            log.append((len(ctx.saved_tensors), of_factor))
            first = (m.cos(x) * y * of_x + m.sin(x) * of_y) * ctx.factor
            return first, None, -m.sin(x) * of_x + 2 * y * of_y + 0 * positive

        @staticmethod
        def backward(ctx, first, _, second):
            x, y = ctx.saved_tensors
            first = first * ctx.factor
            return first * m.cos(x) * y - second * m.sin(x), first * m.sin(x) + second * 2 * y, None

    def call(x, y):
        first, positive, second = Rotate.apply(x, y, 2.5)
        return first * second + positive

    return call


def not_materialized(base: Any, m: Any, log: list[Any]) -> Any:
    """None for the tangent of an input that does not move."""

    class Pair(base):
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
            log.append((of_x is None, of_y is None))
            return of_x * y, 0 * of_x  # torch asks None only of outputs without derivative

        @staticmethod
        def backward(ctx, first, second):
            _, y = ctx.saved_tensors
            return None if first is None else first * y, None

    return lambda x, y: sum(Pair.apply(x * x, m.asarray(Y) if m is jnp else torch.tensor(Y)))


def saved_output(base: Any, m: Any, log: list[Any]) -> Any:
    """The output moves by the rule of the mode that differentiates it."""

    class Exp(base):
        @staticmethod
        def forward(x):
            return m.exp(x)

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

    return lambda x, y: Exp.apply(m.sin(x) + y)


DEFINITIONS = [different_rules, several, not_materialized, saved_output]


def derivatives(define: Any, base: Any, m: Any, jvp: JVP, grad: GRAD, array: Any) -> tuple[list[Any], list[Any]]:
    log: list[Any] = []
    f = define(base, m, log)
    x, y, of_x, of_y = map(array, (X, Y, np.cos(X), np.sin(Y)))

    def loss(x, y):
        return m.sin(0.5 * f(x, y)).sum()

    def moved(x, y):
        return jvp(loss, (x, y), (of_x, of_y))[1]

    found = [
        jvp(f, (x, y), (of_x, of_y))[1],
        jvp(lambda x: f(x, y), (x,), (of_x,))[1],
        moved(x, y),
        *grad(loss, (0, 1))(x, y),
        *jvp(grad(loss, (0, 1)), (x, y), (of_x, of_y))[1],
        *grad(moved, (0, 1))(x, y),
        grad(lambda t: jvp(loss, (x, y), (t, of_y))[1])(of_x),
    ]
    return found, log


@row("D4", "D7")
@pytest.mark.parametrize("define", DEFINITIONS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_the_same_derivatives_as_torch(define, wrap):
    theirs, _ = derivatives(define, torch.autograd.Function, torch, torch.func.jvp, torch.func.grad, torch.tensor)
    ours = wrap(lambda: derivatives(define, jaxfn.Function, jnp, jax.jvp, jax.grad, jnp.asarray)[0])()
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_allclose(a, b.detach().numpy(), rtol=1e-9, atol=1e-12, err_msg=str(i))


def dual_jvp(f: Any, primals: Any, tangents: Any) -> Any:
    """Forward mode by torch's dual numbers, as a user without torch.func has it."""
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(p, t) for p, t in zip(primals, tangents, strict=True)]
        return torch.autograd.forward_ad.unpack_dual(f(*duals))


@row("D4")
@pytest.mark.parametrize("define", DEFINITIONS)
def test_what_jvp_sees_as_in_torch(define):
    logs = []
    for base, m, jvp, array in (
        (torch.autograd.Function, torch, dual_jvp, torch.tensor),
        (jaxfn.Function, jnp, jax.jvp, jnp.asarray),
    ):
        log: list[Any] = []
        f = define(base, m, log)
        value = jvp(f, (array(X), array(Y)), (array(np.cos(X)), array(np.sin(Y))))[1]
        logs.append((np.asarray(value).tolist(), log))
    np.testing.assert_allclose(logs[0][0], logs[1][0], rtol=1e-12)
    assert logs[0][1] == logs[1][1]


@row("C16")
def test_complex_tangents_as_in_torch():
    def define(base):
        class Square(base):
            @staticmethod
            def forward(z):
                return z * z

            @staticmethod
            def setup_context(ctx, inputs, output):
                ctx.save_for_forward(*inputs)

            @staticmethod
            def jvp(ctx, tangent):
                return 2 * ctx.saved_tensors[0] * tangent

        return Square.apply

    z, t = np.array([1 + 2j, 0.5 - 1j]), np.array([0.3 - 1j, 2j])
    theirs = dual_jvp(define(torch.autograd.Function), (torch.tensor(z),), (torch.tensor(t),))[1]
    ours = jax.jvp(define(jaxfn.Function), (z,), (t,))[1]
    np.testing.assert_allclose(ours, theirs.resolve_conj().numpy(), rtol=1e-12)
