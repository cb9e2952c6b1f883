"""A Function and its rule as a hand-written `jax.custom_vjp`, which the tests of all frameworks use in equal modules.

The gradients are three times too large, so that a rule that got lost shows.
"""

import jax
import jax.numpy as jnp

from tests.support.cases import rule
from tests.support.libraries import Jax, make_function

Dense = make_function(Jax, lambda x, w: x @ w, lambda g, x, w: (3 * g @ w.T, 3 * x.T @ g), name="Dense")
# A `Dense` of parameters in a dict.
DenseOfDict = make_function(
    Jax,
    lambda x, parameters: x @ parameters["w"],
    lambda g, x, w: (3 * g @ w.T, {"w": 3 * x.T @ g}),
    lambda inputs, output: (inputs[0], inputs[1]["w"]),
)
hand_written_dense = rule(
    lambda x, w: x @ w,
    lambda x, w: (x @ w, (x, w)),
    lambda residuals, ct: (3 * ct @ residuals[1].T, 3 * residuals[0].T @ ct),
)

INPUTS = jax.random.normal(jax.random.key(1), (5, 4))


def loss_of(outputs):
    """One number."""
    return jnp.sum(jnp.sin(outputs))
