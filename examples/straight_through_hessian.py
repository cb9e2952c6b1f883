"""Why every order of derivative matters: Newton's method through a straight-through estimator.

    python examples/straight_through_hessian.py

Rounding has derivative zero, so quantized models treat it as the identity. A `jax.custom_vjp` does so in the first
derivative; the second one differentiates `jnp.round` itself. A Function has its own rule at every order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

import jaxfn

Round = Callable[[jax.Array], jax.Array]


class StraightThrough(jaxfn.Function):
    """Rounding whose backward is that of the identity."""

    @staticmethod
    def forward(ctx, x: jax.Array) -> jax.Array:
        return jnp.round(x)

    @staticmethod
    def backward(ctx, grad_output: jax.Array) -> jax.Array:
        return grad_output


@jax.custom_vjp
def custom_vjp_round(x: jax.Array) -> jax.Array:
    """Rounds, with a straight-through rule in plain JAX."""
    return jnp.round(x)


def _fwd(x: jax.Array) -> tuple[jax.Array, None]:
    return jnp.round(x), None  # an enclosing differentiation differentiates this line, and gets zero


def _bwd(_: None, grad_output: jax.Array) -> tuple[jax.Array]:
    return (grad_output,)


custom_vjp_round.defvjp(_fwd, _bwd)


def second_derivative(round: Round, x: float) -> float:
    """Returns the second derivative of (round(x) - 1)^2."""
    return float(jax.grad(jax.grad(lambda x: (round(x) - 1) ** 2))(x))


def second_derivative_in_torch(x: float) -> float | None:
    """Returns torch's second derivative; None if torch is not installed."""
    try:
        import torch
    except ImportError:
        return None

    class TorchStraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

    leaf = torch.tensor(x, requires_grad=True)
    (first,) = torch.autograd.grad((TorchStraightThrough.apply(leaf) - 1) ** 2, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first, leaf)
    return second.item()


class Newton(NamedTuple):
    hessian: jax.Array  # at the start
    losses: list[float]  # before each step, and after the last


def least_squares() -> tuple[jax.Array, jax.Array]:
    """Returns A and b of a problem with an integer solution."""
    A = jax.random.normal(jax.random.key(0), (8, 3))
    return A, A @ jnp.array([3.0, -2.0, 5.0])


def newton(round: Round, num_steps: int = 4) -> Newton:
    """Minimizes ||A round(w) - b||^2 / 2 by Newton's method, from w = 0.3.

    The Hessian is A.T @ A, and a single step ends so near to the solution that rounding yields it. With a Hessian of
    zeros a step is the gradient divided by the damping, however steep the loss is.
    """
    A, b = least_squares()

    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum((A @ round(w) - b) ** 2) / 2

    # jax.hessian uses forward mode, which neither a Function with only a backward nor a custom_vjp has.
    hessian = jax.jacrev(jax.jacrev(loss))
    # The usual damping makes a step possible where the Hessian is singular.
    damping = 1e-3 * jnp.eye(3)
    w = jnp.full(3, 0.3)
    first_hessian = hessian(w)
    losses = [float(loss(w))]
    for _ in range(num_steps):
        w = w - jnp.linalg.solve(hessian(w) + damping, jax.grad(loss)(w))
        losses.append(float(loss(w)))
    return Newton(first_hessian, losses)


class Results(NamedTuple):
    jaxfn: float  # second derivatives
    custom_vjp: float
    torch: float | None
    newton: Newton
    custom_vjp_newton: Newton


def main() -> Results:
    x = 2.3
    results = Results(
        jaxfn=second_derivative(StraightThrough.apply, x),
        custom_vjp=second_derivative(custom_vjp_round, x),
        torch=second_derivative_in_torch(x),
        newton=newton(StraightThrough.apply),
        custom_vjp_newton=newton(custom_vjp_round),
    )
    print(f"second derivative of (round(x) - 1)^2 at {x}")
    print(f"  jaxfn       {results.jaxfn}")
    print(f"  custom_vjp  {results.custom_vjp}")
    if results.torch is not None:
        print(f"  torch       {results.torch}")
    print("loss of quantized least squares, Newton step by Newton step")
    for name, run in (("jaxfn", results.newton), ("custom_vjp", results.custom_vjp_newton)):
        losses = "  ".join(f"{loss:.3g}" for loss in run.losses)
        print(f"  {name:10}  {losses}  (diagonal of the Hessian: {jnp.diag(run.hessian)})")
    return results


if __name__ == "__main__":
    main()
