"""Derivatives through eigenvectors whose eigenvalues coincide, for results that do not depend on their choice.

    python examples/cookbook/eigenvectors.py

Where eigenvalues are equal, eigenvectors are a matter of choice, and their derivative divides by zero: by `eigh` it is
nan. The space that they span together has a derivative, and whatever does not depend on the choice is a function of its
projector. The projector's rule divides by gaps between what is inside and what is outside, and by no others.
Claim: in benzene, two pairs of whose six levels coincide, gradients are the textbook numbers; where eigenvalues are
exactly equal they are right, and plain JAX's are nan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


@jaxfn.function
def projector(ctx, matrix: jax.Array, count: int) -> jax.Array:
    """Returns the projector onto the eigenvectors of the `count` smallest eigenvalues of a symmetric matrix.

    The next eigenvalue has to be larger: as that gap closes, the derivative grows beyond all bounds. The sum of these
    eigenvalues is trace(matrix @ projector).
    """
    values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
    ctx.save_for_backward(values, vectors)
    ctx.count = count
    inside = vectors[:, :count]
    return inside @ inside.T


@projector.backward
@jaxfn.once_differentiable  # a second derivative would go through eigh: it raises, and is not nan
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, None]:
    values, vectors = ctx.saved_tensors
    inside, outside = jnp.split(vectors, [ctx.count], axis=1)
    gaps = values[: ctx.count, None] - values[ctx.count :]
    mixed = inside.T @ (grad_output + grad_output.T) @ outside / gaps
    grad = inside @ mixed @ outside.T
    return (grad + grad.T) / 2, None


def plain_projector(matrix: jax.Array, count: int) -> jax.Array:
    """Returns the projector in plain JAX, for comparison."""
    inside = jnp.linalg.eigh(matrix)[1][:, :count]
    return inside @ inside.T


def ring(couplings: jax.Array, sites: jax.Array) -> jax.Array:
    """Returns Hueckel's matrix of atoms in a ring, in units of the (negative) resonance integral."""
    n = len(sites)
    neighbours = jnp.zeros((n, n)).at[jnp.arange(n), (jnp.arange(n) + 1) % n].set(couplings)
    return jnp.diag(sites) - neighbours - neighbours.T


def main() -> None:
    couplings, sites = jnp.ones(6), jnp.zeros(6)

    def charge(sites: jax.Array) -> jax.Array:
        """Returns the charge of the first atom, with two electrons in each of the three lowest orbitals."""
        return 2 * projector(ring(couplings, sites), 3)[0, 0]

    def bond(couplings: jax.Array) -> jax.Array:
        return 2 * projector(ring(couplings, sites), 3)[0, 1]

    def energy(couplings: jax.Array) -> jax.Array:
        matrix = ring(couplings, sites)
        return 2 * jnp.trace(matrix @ projector(matrix, 3))

    polarizability = -jax.jit(jax.grad(charge))(sites)
    textbook = jnp.array([43, -17, 1, -11, 1, -17]) / 108  # Coulson and Longuet-Higgins, 1947
    # Two of the three orbitals have one energy: the bonds do not depend on their choice.
    print(f"bond order {bond(couplings):.4f}, energy {energy(couplings):.4f}")
    print(f"polarizability, atom by atom, times 108: {108 * polarizability}")
    assert jnp.allclose(bond(couplings), 2 / 3, atol=1e-5) and jnp.allclose(energy(couplings), -8, atol=1e-4)
    assert jnp.allclose(jax.jit(jax.grad(energy))(couplings), -2 * 2 / 3, atol=1e-5)  # Hellmann and Feynman
    assert jnp.allclose(polarizability, textbook, atol=1e-5)

    # Plain JAX where eigenvalues are exactly equal: 0 / 0.
    matrix, weight = jnp.diag(jnp.array([1.0, 1.0, 2.0, 2.0])), jnp.arange(16.0).reshape(4, 4)
    grad, plain = (jax.grad(lambda x: jnp.vdot(weight, f(x, 2)))(matrix) for f in (projector, plain_projector))
    off_diagonal = -(weight + weight.T)[:2, 2:] / 2
    assert jnp.allclose(grad, jnp.block([[jnp.zeros((2, 2)), off_diagonal], [off_diagonal.T, jnp.zeros((2, 2))]]))
    assert not jnp.isfinite(plain).all()


if __name__ == "__main__":
    main()
