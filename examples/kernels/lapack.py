"""A tridiagonal solve by LAPACK, called through XLA's FFI, with a derivative.

    python examples/kernels/lapack.py

Why a Function: JAX cannot differentiate `jax.ffi.ffi_call`. The derivative of a solve is a solve with the transposed
matrix, which has the outer two diagonals exchanged: `backward` calls the Function itself, so there is a derivative of
every order. Saved for backward are the diagonals and the solution, and neither a matrix nor its factors.
"""

from __future__ import annotations

from typing import NamedTuple

import comparison
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxlib import lapack

import jaxfn


class TridiagonalSolve(jaxfn.Function):
    """The solution x of T @ x = b, where T has these diagonals.

    Args:
      lower: (n,), of which the first entry is outside the matrix.
      diagonal: (n,).
      upper: (n,), of which the last entry is outside the matrix.
      b: (n, k), k right sides.
    """

    @staticmethod
    def forward(ctx, lower: jax.Array, diagonal: jax.Array, upper: jax.Array, b: jax.Array) -> jax.Array:
        if jax.default_backend() != "cpu":
            raise NotImplementedError(f"LAPACK runs on the CPU, and JAX is on a {jax.default_backend()} here.")
        operands = _varying_alike(lower, diagonal, upper, b)
        by_columns = (1, 0)  # major to minor: Fortran's order
        solve = jax.ffi.ffi_call(
            lapack.prepare_lapack_call("gtsv_ffi", b.dtype),  # JAX's own target
            [jax.typeof(x) for x in operands] + [jax.ShapeDtypeStruct((), jnp.int32)],
            vmap_method="broadcast_all",  # the target takes leading axes
            input_layouts=(None, None, None, by_columns),
            output_layouts=(None, None, None, by_columns, None),
        )
        _, _, _, x, info = solve(*operands)
        x = jnp.where(info == 0, x, jnp.nan)  # singular
        ctx.save_for_backward(lower=lower, diagonal=diagonal, upper=upper, x=x)
        return x

    @staticmethod
    def backward(ctx, grad_x: jax.Array):
        lower, diagonal, upper, x = ctx.saved_tensors
        grad_b = TridiagonalSolve.apply(_shifted(upper, 1), diagonal, _shifted(lower, -1), grad_x)
        before, after = _shifted(x, 1), _shifted(x, -1)
        return *(-jnp.sum(grad_b * other, axis=1) for other in (before, x, after)), grad_b


def _varying_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Casts arrays to vary over the mesh axes over which any of them varies.

    Inside `shard_map` a result of the FFI is typed as it is declared, here by `jax.typeof` of an operand. The gradient
    of a value that is typed as replicated is the sum over the devices.
    """
    own = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    missing = [frozenset().union(*own) - axes for axes in own]
    return [
        jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
        for x, axes in zip(arrays, missing, strict=True)
    ]


def _shifted(rows: jax.Array, by: int) -> jax.Array:
    """Returns the previous or the next row of each row, with zeros at the end."""
    ends = [(max(by, 0), max(-by, 0)), *[(0, 0)] * (rows.ndim - 1)]
    return jnp.pad(rows, ends)[max(-by, 0) :][: len(rows)]


def plain(lower: jax.Array, diagonal: jax.Array, upper: jax.Array, b: jax.Array) -> jax.Array:
    """Solves with the whole matrix, for comparison."""
    return jnp.linalg.solve(jnp.diag(diagonal) + jnp.diag(lower[1:], -1) + jnp.diag(upper[:-1], 1), b)


class Results(NamedTuple):
    differences: dict[str, float]  # of the solution and the gradients from those by the whole matrix
    hessian_difference: float
    saved: int  # bytes
    saved_by_plain: int


def main(n: int = 40, k: int = 8) -> Results | None:
    if jax.default_backend() != "cpu":
        print(f"LAPACK runs on the CPU, and JAX is on a {jax.default_backend()} here: nothing to show.")
        return None
    keys = jax.random.split(jax.random.key(0))
    lower, diagonal, upper = jax.random.normal(keys[0], (3, n)) + jnp.array([[0.0], [4.0], [0.0]])
    args = lower, diagonal, upper, jax.random.normal(keys[1], (n, k))
    solve = TridiagonalSolve.apply

    def curvature(function: comparison.Call) -> jax.Array:
        """Returns the second derivative of a sum of squares by the diagonal."""
        return jax.jacrev(jax.grad(lambda x: jnp.sum(function(lower, x, upper, args[3]) ** 2)))(diagonal)

    shared, by_column = PartitionSpec(), PartitionSpec(None, "devices")
    results = Results(
        comparison.differences(solve, plain, args, (None, 0, None, 1), (shared, shared, shared, by_column), by_column),
        float(jnp.max(jnp.abs(curvature(solve) - curvature(plain)))),
        *(comparison.residual_bytes(f, args) for f in (solve, plain)),
    )
    assert max(results.differences.values()) < 1e-4
    assert results.hessian_difference < 1e-4
    assert results.saved == (3 * n + n * k) * 4

    print(f"a tridiagonal system of {n} equations with {k} right sides, by LAPACK")
    comparison.show(results.differences)
    print(f"  a Hessian: {results.hessian_difference:.0e} from plain JAX")
    print(f"  saved for backward: {results.saved:,} bytes; by plain JAX: {results.saved_by_plain:,}")
    return results


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    main()
