"""A Function and its rule as a hand-written `jax.custom_vjp`, which the tests of all frameworks use in equal modules.

The gradients are three times too large, so that a rule that got lost shows.
"""

import jax
import jax.numpy as jnp

import jaxfn


class Dense(jaxfn.Function):
    """x @ w, with three times the true gradients."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad_output):
        x, w = ctx.saved_tensors
        return 3 * grad_output @ w.T, 3 * x.T @ grad_output


class DenseOfDict(jaxfn.Function):
    """A `Dense` of parameters in a dict."""

    @staticmethod
    def forward(ctx, x, parameters):
        ctx.save_for_backward(x, parameters["w"])
        return x @ parameters["w"]

    @staticmethod
    def backward(ctx, grad_output):
        x, w = ctx.saved_tensors
        return 3 * grad_output @ w.T, {"w": 3 * x.T @ grad_output}


@jax.custom_vjp
def hand_written_dense(x, w):
    return x @ w


hand_written_dense.defvjp(
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, ct: (3 * ct @ residuals[1].T, 3 * residuals[0].T @ ct),
)

INPUTS = jax.random.normal(jax.random.key(1), (5, 4))


def loss_of(outputs):
    """One number."""
    return jnp.sum(jnp.sin(outputs))
