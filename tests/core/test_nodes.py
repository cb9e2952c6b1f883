"""Arguments that are pytree nodes of user classes: array wrappers, and nodes that flatten to new objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row


def registered(kind, children, aux=lambda node: None):
    """Makes a class a pytree node of one child."""
    jax.tree_util.register_pytree_node(kind, lambda node: (children(node), aux(node)), lambda _, leaves: kind(*leaves))
    return kind


class Positive:
    """A box whose array is a function of the one in it."""

    def __init__(self, raw):
        self.raw = raw

    def __jax_array__(self):
        return jax.nn.softplus(self.raw)

    dtype = property(lambda self: self.raw.dtype)


class Pair:
    def __init__(self, weight, scale=3.0):
        self.weight, self.scale = weight, scale


class Rescaled(Pair):
    pass


class Labelled(Pair):
    pass


registered(Positive, lambda node: (node.raw,))
registered(Pair, lambda node: (node.weight, node.scale))
registered(Rescaled, lambda node: (node.weight, node.scale * 1.0))  # a new number each time
registered(Labelled, lambda node: (node.weight, node.scale), lambda node: object())  # equal to no other
X = jnp.arange(3.0) + 1


@row("L4")
def test_a_gradient_in_a_box_is_what_the_box_holds():
    @jaxfn.function
    def times(ctx, factor, x):
        ctx.save_for_backward(factor.raw, x)
        return jnp.asarray(factor) * x

    @times.backward
    def _(ctx, grad_output):
        raw, x = ctx.saved_tensors
        return Positive(jnp.sum(grad_output * x) * jax.nn.sigmoid(raw)), grad_output * jax.nn.softplus(raw)

    def gradient(f):
        return jax.grad(lambda factor, x: jnp.sum(jnp.sin(f(factor, x))), argnums=(0, 1))(Positive(jnp.float32(0.3)), X)

    ours, plain = gradient(times), gradient(lambda factor, x: jnp.asarray(factor) * x)
    np.testing.assert_allclose(ours[0].raw, plain[0].raw, rtol=1e-6)
    np.testing.assert_allclose(ours[1], plain[1], rtol=1e-6)


class Weighted(jaxfn.Function):
    @staticmethod
    def forward(ctx, node, x):
        ctx.weight = node.weight
        return node.weight * x

    @staticmethod
    def backward(ctx, grad_output):
        return None, grad_output * ctx.weight


class Overwriting(Weighted):
    @staticmethod
    def forward(ctx, node, x):
        node.weight = node.weight + 1
        return Weighted.forward(ctx, node, x)


@row("L4")
@pytest.mark.parametrize("kind", [Pair, Rescaled, Labelled])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_change_is_distinguished_from_what_is_new_each_time(kind, wrap):
    gradient = wrap(jax.grad(lambda x, weight: jnp.sum(Weighted.apply(kind(weight), x))))
    np.testing.assert_allclose(gradient(X, jnp.float32(2.0)), [2, 2, 2])
    with pytest.raises(NotImplementedError, match=r"Overwriting\.forward changed input 0 \('node'\) at \[.*0>?\]"):
        wrap(lambda x, weight: Overwriting.apply(kind(weight), x))(X, jnp.float32(2.0))
