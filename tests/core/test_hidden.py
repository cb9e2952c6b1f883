"""Arrays that `forward` hides on ctx in closures and objects: right at first order in one program, or refused."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Holder
from tests.support.marks import row


class Slotted:
    __slots__ = ("me", "value")

    def __init__(self, value):
        self.value = {"deep": [value]}
        self.me = self  # a cycle


HIDING = {
    "slots": Slotted,
    "closure": lambda x: lambda g: 2 * x * g,
    "partial": lambda x: functools.partial(jnp.multiply, 2 * x),
    "object": lambda x: Holder([x]),
    "deque": lambda x: collections.deque([x]),
}


def backward_of(kind, hidden, g):
    if kind in ("closure", "partial"):
        return hidden(g)
    if kind == "slots":
        return 2 * g * hidden.value["deep"][0]
    return 2 * g * (hidden.value[0] if kind == "object" else hidden[0])


REFUSED = "keeps a JAX array inside a closure or an object on ctx"


@row("B6")
@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_arrays_hidden_in_closures_and_objects_have_no_second_derivative(kind, wrap):
    def forward(ctx, x):
        ctx.hidden = HIDING[kind](x)
        return x * x

    f = jaxfn.autograd_function(forward, lambda ctx, g: backward_of(kind, ctx.hidden, g))
    assert wrap(jax.grad(f))(3.0) == 6.0
    assert wrap(jax.vmap(jax.grad(f)))(jnp.full(2, 3.0)).tolist() == [6.0, 6.0]
    with pytest.raises(NotImplementedError, match=f"forward.forward {REFUSED}"):
        wrap(jax.grad(jax.grad(f)))(3.0)
    # The derivative is refused, and not the program.
    assert wrap(jax.grad(lambda x: jax.lax.stop_gradient(jax.grad(f)(x)) * x))(3.0) == 6.0


@row("B6")
@pytest.mark.parametrize("kind", HIDING)
@pytest.mark.parametrize(
    "inner",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.map(f, x[None])[0],
        lambda f: lambda x: jax.vmap(f)(x[None])[0],
    ],
    ids=["jit", "checkpoint", "map", "vmap"],
)
def test_arrays_hidden_from_another_trace_are_refused(kind, inner):
    """JAX loses them on the way to backward, and a second derivative through them was zero in silence."""

    def forward(ctx, x):
        ctx.hidden = HIDING[kind](x * 1)
        return x * x

    f = jaxfn.autograd_function(forward, lambda ctx, g: backward_of(kind, ctx.hidden, g))
    twice = jax.jit(jax.grad(jax.jit(jax.grad(inner(f)))))
    with pytest.raises(NotImplementedError, match=REFUSED):
        jax.grad(inner(f))(jnp.float32(3.0))
    with pytest.raises(NotImplementedError, match=REFUSED):
        twice(jnp.float32(3.0))


@row("B6")
def test_an_object_from_outside_may_hold_traced_arrays():
    """As a module that is handed to the Function, with parameters of an outer trace."""

    def forward(ctx, x, module):
        ctx.module = module
        return x * module.value

    f = jaxfn.autograd_function(forward, lambda ctx, g: (g * ctx.module.value, None))

    @jax.jit
    def gradient(x, w):
        module = Holder(w)
        return jax.grad(lambda x: jax.vmap(lambda c: f(c, module))(x).sum())(x)

    np.testing.assert_allclose(gradient(jnp.ones(2), 3.0), [3.0, 3.0])


class _WritesAndHides(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, ref):
        slope = jnp.cos(x)
        ref[...] = slope
        ctx.pull = lambda g: g * slope
        return jnp.sin(x)

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.pull(grad_output), None


@row("D3")
def test_an_array_hidden_beside_a_ref_is_refused_where_it_could_be_differentiated_again():
    ref = jax.new_ref(jnp.zeros(()))
    np.testing.assert_allclose(jax.grad(_WritesAndHides.apply)(0.5, ref), np.cos(0.5), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="_WritesAndHides takes a jax.Ref and keeps a JAX array inside"):
        jax.grad(jax.grad(_WritesAndHides.apply))(0.5, ref)
