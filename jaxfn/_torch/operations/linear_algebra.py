"""Matrix products, decompositions and solvers."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from jaxfn._torch import ties
from jaxfn._torch._compat import SOLVE_FACTORS_TRANSPOSE
from jaxfn._torch.operations.derivative import apply_vjp
from jaxfn._torch.operations.primitives import add, matmul
from jaxfn._torch.operations.promotion import compute_dtype, half_to_single
from jaxfn._torch.operations.reductions import vector_norm
from jaxfn._torch.operations.table import mark_unsupported, operation, register_all
from jaxfn._torch.values.errors import TranslationError

register_all(
    {
        "aten.mm.default": matmul,
        "aten.bmm.default": matmul,
        "aten.mv": jnp.matmul,
        "aten.dot": jnp.dot,
        "aten.vdot": jnp.vdot,
    },
    accepts_half=True,
)
register_all({"aten.linalg_eig": jnp.linalg.eig, "aten._linalg_eigvals": jnp.linalg.eigvals})


@operation("aten.addmm.default", "aten.addmv", "aten.baddbmm.default", accepts_half=True)
def addmm(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    """Leaves `x` out if `beta` is 0, even if it is NaN. Half precision is rounded once, at the end."""
    product = scale(matmul(first, second, compute_dtype(first.dtype)), alpha)
    return product if beta == 0 else add(scale(half_to_single(x), beta), product)


@operation("aten.addr")
def addr(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    return addmm(x, first[:, None], second[None], beta=beta, alpha=alpha)


@operation("aten.addbmm")
def addbmm(x: Array, first: Array, second: Array, *, beta: Any = 1, alpha: Any = 1) -> Array:
    product = scale(jnp.einsum("bij,bjk->ik", first, second), alpha)
    return product if beta == 0 else scale(x, beta) + product


@operation("aten._grouped_mm", accepts_half=True)
def grouped_mm(a: Array, b: Array, ends: Array | None = None, bias: None = None, dtype: Any = None) -> Array:
    """Multiplies one pair of matrices for each group; a matrix without an axis of groups has groups of rows or columns.

    `ends` has the end of each group. Elements after the last end, which torch leaves uninitialized, are 0.

    Note: JAX (0.10 to 0.12) has no second derivatives of `lax.ragged_dot`, and batches it only if all its operands are
    batched.
    """
    product = functools.partial(jnp.einsum, preferred_element_type=compute_dtype(a.dtype))
    if ends is None:
        return product("gmk,gkn->gmn", a, b)
    length = a.shape[0] if b.ndim == 3 else b.shape[1]  # of the grouped axis
    length = a.shape[1] if a.ndim == b.ndim else length
    position = jnp.arange(length, dtype=ends.dtype)
    begins = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    is_inside = (position >= begins[:, None]) & (position < ends[:, None])
    if b.ndim == 3:
        return product("gmk,gkn->mn", jnp.where(is_inside[:, :, None], a, 0), b)
    masked = jnp.where(is_inside[:, None, :], a[None] if a.ndim == 2 else b[None], 0)
    return product("gmk,kn->gmn", masked, b) if a.ndim == 2 else product("gmk,gkn->mn", a, masked)


def scale(x: Array, factor: Any) -> Array:
    """Returns `factor * x` in the dtype of `x`."""
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


def _adjoint(x: Array) -> Array:
    return jnp.conj(x.mT)


def _from_triangle(x: Array, lower: bool) -> Array:
    """Returns the Hermitian matrix of which `x` has one triangle. Derivatives are spread over both, as in torch."""
    return ties.hermitian(x if lower else _adjoint(x))


def _factor(a: Array) -> tuple[Array, Array, Array]:
    """Returns LU, pivots counted from 1, and the number of the first pivot that is 0 (or 0), as LAPACK does."""
    lu, pivots, _ = lax.linalg.lu(a)
    is_zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    found = jnp.where(is_zero.any(-1), jnp.argmax(is_zero, -1) + 1, 0) if is_zero.shape[-1] else jnp.zeros(a.shape[:-2])
    return lu, pivots + 1, found.astype(np.int32)


def _factor_transposed(a: Array) -> tuple[Array, Array, Array]:
    """Returns `_factor` where torch passes a real contiguous matrix to LAPACK as its transpose."""
    return _factor(a if jnp.iscomplexobj(a) else a.mT)


def _permutation(pivots: Array, rows: int) -> Array:
    return lax.linalg.lu_pivots_to_permutation(pivots.astype(np.int32) - 1, rows)


@operation("aten.linalg_inv_ex")
def inv_ex(a: Array, check_errors: bool = False) -> tuple[Array, Array]:
    return jnp.linalg.inv(a), _factor(a)[2]


# For a determinant, and on torch 2.8 for a solution, torch passes a real contiguous matrix to LAPACK as its transpose.
# Autograd uses those factors.


def det_noncontiguous(a: Array) -> tuple[Array, Array, Array]:
    # JAX cannot differentiate the determinant of an empty matrix, which is 1.
    value = jnp.linalg.det(a) if a.size else jnp.ones(a.shape[:-2], a.dtype)
    return value, *_factor(a)[:2]


@operation("aten._linalg_det", for_noncontiguous=det_noncontiguous)
def det(a: Array) -> tuple[Array, Array, Array]:
    return det_noncontiguous(a)[0], *_factor_transposed(a)[:2]


def slogdet_noncontiguous(a: Array) -> tuple[Array, Array, Array, Array]:
    return *jnp.linalg.slogdet(a), *_factor(a)[:2]


@operation("aten._linalg_slogdet", for_noncontiguous=slogdet_noncontiguous)
def slogdet(a: Array) -> tuple[Array, Array, Array, Array]:
    return *jnp.linalg.slogdet(a), *_factor_transposed(a)[:2]


def _solve(a: Array, b: Array, left: bool) -> Array:
    is_vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    columns = b[..., None] if is_vector else b
    operands = (a, columns) if left else (a.mT, columns.mT)
    solution = jnp.linalg.solve(*_broadcast_batches(*operands))
    solution = solution if left else solution.mT
    return solution[..., 0] if is_vector else solution


def solve_noncontiguous(
    a: Array, b: Array, left: bool = True, check_errors: bool = False
) -> tuple[Array, Array, Array, Array]:
    return _solve(a, b, left), *_factor(a)


@operation("aten._linalg_solve_ex", for_noncontiguous=solve_noncontiguous)
def solve_ex(a: Array, b: Array, left: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array, Array]:
    return _solve(a, b, left), *(_factor_transposed if SOLVE_FACTORS_TRANSPOSE else _factor)(a)


def _broadcast_batches(a: Array, b: Array) -> tuple[Array, Array]:
    """Broadcasts the batch axes of both matrices."""
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))


@operation("aten.linalg_lu_factor_ex")
def lu_factor_ex(a: Array, pivot: bool = True, check_errors: bool = False) -> tuple[Array, Array, Array]:
    _need_pivots(pivot)
    return _factor(a)


def _need_pivots(pivot: bool) -> None:
    if not pivot:
        raise TranslationError("LU factorization without pivoting has no counterpart on JAX: use `pivot=True`")


@operation("aten.linalg_lu")
def lu(a: Array, pivot: bool = True) -> tuple[Array, Array, Array]:
    _need_pivots(pivot)
    factors, pivots, _ = _factor(a)
    return lu_unpack(factors, pivots)


@operation("aten.lu_unpack")
def lu_unpack(factors: Array, pivots: Array, data: bool = True, permutation: bool = True) -> tuple[Array, Array, Array]:
    rows, columns = factors.shape[-2:]
    rank = min(rows, columns)
    none = jnp.zeros(0, factors.dtype)
    lower = jnp.tril(factors[..., :rank], -1) + jnp.eye(rows, rank, dtype=factors.dtype) if data else none
    upper = jnp.triu(factors[..., :rank, :]) if data else none
    order = _permutation(pivots, rows) if permutation else None
    swaps = none if order is None else jnp.eye(rows, dtype=factors.dtype)[order].mT
    return swaps, lower, upper


@operation("aten.linalg_lu_solve")
def lu_solve(factors: Array, pivots: Array, b: Array, left: bool = True, adjoint: bool = False) -> Array:
    if not left:
        # X A = B is the adjoint of A' X' = B'.
        return _adjoint(lu_solve(factors, pivots, _adjoint(b), True, not adjoint))
    factors, b = _broadcast_batches(factors, b)
    order = jnp.broadcast_to(_permutation(pivots, factors.shape[-1]), factors.shape[:-1])
    solve = functools.partial(lax.linalg.triangular_solve, left_side=True)
    if not adjoint:
        b = jnp.take_along_axis(b, order[..., None], -2)
        b = solve(factors, b, lower=True, unit_diagonal=True)
        return solve(factors, b, lower=False)
    b = solve(factors, b, lower=False, transpose_a=True, conjugate_a=True)
    b = solve(factors, b, lower=True, unit_diagonal=True, transpose_a=True, conjugate_a=True)
    return jnp.take_along_axis(b, jnp.argsort(order, -1)[..., None], -2)


@operation("aten.linalg_cholesky_ex")
def cholesky_ex(a: Array, upper: bool = False, check_errors: bool = False) -> tuple[Array, Array]:
    """Returns NaN, and 1 as second result, for a matrix that is not positive definite."""
    factor = cholesky(a, upper)
    return factor, jnp.isnan(factor).any((-2, -1)).astype(np.int32)


@operation("aten.cholesky")
def cholesky(a: Array, upper: bool = False) -> Array:
    factor = lax.linalg.cholesky(_from_triangle(a, lower=not upper), symmetrize_input=False)
    return _adjoint(factor) if upper else factor


@operation("aten.cholesky_solve")
def cholesky_solve(b: Array, factor: Array, upper: bool = False) -> Array:
    factor, b = _broadcast_batches(_adjoint(factor) if upper else factor, b)
    half = lax.linalg.triangular_solve(factor, b, left_side=True, lower=True)
    return lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True, conjugate_a=True)


@operation("aten.cholesky_inverse")
def cholesky_inverse(factor: Array, upper: bool = False) -> Array:
    return cholesky_solve(jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape), factor, upper)


@operation("aten.linalg_qr")
def qr(a: Array, mode: str = "reduced") -> tuple[Array, Array]:
    if mode == "r":
        return jnp.zeros(0, a.dtype), jnp.linalg.qr(a, mode="r")
    return tuple(jnp.linalg.qr(a, mode=mode))


@operation("aten.geqrf")
def geqrf(a: Array) -> tuple[Array, Array]:
    """Returns LAPACK's factored form: the reflections below the diagonal of the triangular factor, and their
    factors.
    """
    reflections, taus = jnp.linalg.qr(a, mode="raw")
    return reflections.mT, taus


mark_unsupported(
    "JAX has no LDL factorization; use torch.linalg.eigh or lu_factor, or cholesky if the matrix is positive definite",
    "aten.linalg_ldl_factor_ex",
    "aten.linalg_ldl_factor",
    "aten.linalg_ldl_solve",
)
mark_unsupported(
    "the shapes of its results depend on the rank; `torch.linalg.pinv(a) @ b` is the solution",
    "aten.linalg_lstsq",
)


@operation("aten._linalg_svd")
def svd(
    a: Array, full_matrices: bool = False, compute_uv: bool = True, driver: str | None = None
) -> tuple[Array, Array, Array]:
    if compute_uv:
        return tuple(jnp.linalg.svd(a, full_matrices=full_matrices))
    none = jnp.zeros(0, a.dtype)
    return none, jnp.linalg.svd(a, compute_uv=False), none


@operation("aten._linalg_eigh")
def eigh(a: Array, triangle: str = "L", compute_v: bool = True) -> tuple[Array, Array]:
    a = _from_triangle(a, lower=triangle.upper() == "L")
    if compute_v:
        return tuple(jnp.linalg.eigh(a, symmetrize_input=False))
    return jnp.linalg.eigvalsh(a), jnp.zeros(0, a.dtype)


@operation("aten.linalg_matrix_exp")
def matrix_exp(a: Array) -> Array:
    return jax.scipy.linalg.expm(a) if a.size else a


@operation("aten.linalg_pinv.atol_rtol_tensor")
def pinv(a: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False) -> Array:
    """Treats singular values up to `atol`, or `rtol` times the largest one, as 0."""
    if not a.size:
        return a.mT
    if rtol is None:
        default = jnp.asarray(max(a.shape[-2:]) * jnp.finfo(a.dtype).eps)
        rtol = default if atol is None else jnp.where(atol > 0, 0, default)
    if atol is not None:
        largest = jnp.linalg.norm(lax.stop_gradient(a), 2, (-2, -1))
        rtol = jnp.maximum(rtol, atol / largest)
    if hermitian:
        # Only the values come from one triangle; torch differentiates by the whole matrix.
        a = a + lax.stop_gradient(_from_triangle(a, lower=True) - a)
    return _pinv(a, rtol)


@jax.custom_jvp
def _pinv(a: Array, rtol: Any) -> Array:
    # The derivative of JAX's function raises if `rtol` is traced (0.10; 0.12 differentiates it).
    return jnp.linalg.pinv(a, rtol=rtol)


@_pinv.defjvp
@jax.default_matmul_precision("float32")
def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Differentiates a pseudoinverse of constant rank (Golub and Pereyra, 1973)."""
    a, tangent = primals[0], tangents[0]
    inverse = _pinv(*primals)
    left = inverse @ (_adjoint(inverse) @ _adjoint(tangent))
    right = (_adjoint(tangent) @ _adjoint(inverse)) @ inverse
    parts = left - left @ (a @ inverse) + right - (inverse @ a) @ right
    return inverse, parts - inverse @ tangent @ inverse


@operation("aten.linalg_solve_triangular")
def solve_triangular(a: Array, b: Array, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Array:
    a, b = _broadcast_batches(a, b)
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular)


@operation("aten.triangular_solve")
def triangular_solve(
    b: Array, a: Array, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> tuple[Array, Array]:
    a, b = _broadcast_batches(a, b)
    x = lax.linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unitriangular
    )
    return x, a


@operation("aten.linalg_cross")
def cross(a: Array, b: Array, dim: int = -1) -> Array:
    a, b = jnp.broadcast_arrays(a, b)
    return jnp.cross(a, b, axis=dim)


@operation("aten._cdist_forward")
def cdist(a: Array, b: Array, p: float, compute_mode: int | None = None) -> Array:
    """Returns the p-norm distances between the rows. The derivative of a distance at 0 is 0."""
    difference = a[..., :, None, :] - b[..., None, :, :]
    return vector_norm(difference, p, -1) if a.shape[-1] else jnp.zeros(difference.shape[:-1], a.dtype)


@operation("aten._cdist_backward")
def cdist_backward(gradient: Array, a: Array, b: Array, p: float, distances: Array) -> Array:
    return apply_vjp(lambda a: cdist(a, b, p), gradient, a)


@operation("aten._pdist_forward")
def pdist(a: Array, p: float = 2) -> Array:
    rows, columns = np.triu_indices(a.shape[0], 1)
    return vector_norm(a[rows] - a[columns], p, -1) if a.size else jnp.zeros(len(rows), a.dtype)


@operation("aten._pdist_backward")
def pdist_backward(gradient: Array, a: Array, p: float, distances: Array) -> Array:
    return apply_vjp(lambda a: pdist(a, p), gradient, a)
