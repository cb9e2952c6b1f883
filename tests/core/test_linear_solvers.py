"""Linear maps and solvers of JAX through Functions: linear_transpose, gmres, custom_linear_solve, custom_root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

import jaxfn
from tests.support.contexts import CONTEXTS
from tests.support.marks import row, sampled

N, K = 5, 3
rng = np.random.default_rng(0)
A = (np.eye(N) * 4 + rng.normal(size=(N, N)) * 0.5).astype(np.float32)  # not symmetric
WIDE = rng.normal(size=(K, N)).astype(np.float32)
B = rng.normal(size=N).astype(np.float32)
G = rng.normal(size=N).astype(np.float32)


def matvec_rules(rules: str) -> dict[str, Any]:
    methods: dict[str, Any] = {}
    if rules != "jvp":
        methods["backward"] = staticmethod(lambda ctx, g: _pull(*ctx.saved_tensors, g))
    if rules in ("both", "jvp"):
        methods["jvp"] = staticmethod(lambda ctx, ta, tx: _push(*ctx.saved_tensors, ta, tx))
    return methods | {"generate_jvp_rule": rules == "generated"}


def _pull(a, x, g):
    return jnp.outer(g, x), a.T @ g


def _push(a, x, ta, tx):
    return ta @ x + a @ tx


def matvec(rules: str) -> Callable[..., Any]:
    """a @ x, with the rules of this kind, which know nothing of how forward computes."""

    def forward(ctx, a, x):
        ctx.save_for_backward(a, x)
        return jax.pure_callback(
            lambda a, x: np.asarray(a) @ np.asarray(x),
            jax.ShapeDtypeStruct(a.shape[:1], x.dtype),
            a,
            x,
            vmap_method="sequential",
        )

    return type("MatVec", (jaxfn.Function,), {"forward": staticmethod(forward)} | matvec_rules(rules)).apply


RULES = ("both", "generated", "jvp")
EVERY_RULES = pytest.mark.parametrize("rules", RULES)
JIT = pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["", "jit"])


def close(got, expected, rtol=2e-3):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


# --- jax.linear_transpose

# Linear functions of x, of (a matrix product, a, x).
LINEAR: dict[str, Callable[..., Any]] = {
    "alone": lambda f, a, x: f(a, x),
    "among others": lambda f, a, x: 2 * f(a, x + jnp.flip(x)) - jnp.cumsum(f(a, 3 * x)),
    "jit": lambda f, a, x: jax.jit(f)(a, x),
    "jit of linear": lambda f, a, x: jax.jit(lambda x: f(a, x) + f(a, jnp.flip(x)))(x),
    "vmap": lambda f, a, x: jax.vmap(f, (None, 1), 1)(a, jnp.stack([x, jnp.flip(x)], 1)).sum(1),
    "scan": lambda f, a, x: lax.scan(lambda c, s: (c + s * f(a, x), None), jnp.zeros(len(a)), jnp.arange(1.0, 4))[0],
    "cond": lambda f, a, x: lax.cond(jnp.sum(a) < 1e9, lambda x: f(a, x), lambda x: 0 * f(a, x), x),
}


@row("D7", "E1")
@EVERY_RULES
@pytest.mark.parametrize("linear", LINEAR)
@pytest.mark.parametrize("matrix", [A, WIDE], ids=["square", "wide"])
@JIT
def test_linear_transpose_goes_through_a_function_with_forward_mode(wrap, matrix, linear, rules):
    """Before: "Transpose rule for 'settle' not implemented"."""

    def transposed(f):
        y = jnp.cos(jnp.arange(len(matrix), dtype=jnp.float32))
        return wrap(lambda y: jax.linear_transpose(lambda x: LINEAR[linear](f, matrix, x), B)(y))(y)

    close(transposed(matvec(rules)), transposed(jnp.matmul))


@row("D7", "E1")
@EVERY_RULES
@JIT
def test_linear_transpose_of_a_batch_and_of_its_derivative(wrap, rules):
    """The transpose is mapped, and differentiated with respect to the matrix."""

    def both(f):
        def transposed(a, y):
            return jax.linear_transpose(lambda x: f(a, x), B)(y)[0]

        ys = jnp.stack([G, 2 * G, -G], 1)
        mapped = jax.vmap(transposed, (None, 1), 1)(A, ys)
        return mapped, jax.grad(lambda a, y: jnp.sum(jnp.sin(transposed(a, y))), (0, 1))(A, G)

    close(wrap(lambda: both(matvec(rules)))(), both(jnp.matmul))


@row("D7", "L1")
@pytest.mark.parametrize("linear", LINEAR)
@JIT
def test_linear_transpose_of_a_function_without_forward_mode_is_right_or_names_it(wrap, linear):
    def transposed(f):
        return wrap(lambda y: jax.linear_transpose(lambda x: LINEAR[linear](f, A, x), B)(y))(G)

    try:
        got = transposed(matvec("backward"))
    except (TypeError, NotImplementedError) as error:
        assert "MatVec" in str(error) and "generate_jvp_rule" in str(error), error
    else:
        close(got, transposed(jnp.matmul))


# --- iterative solvers

SOLVERS: dict[str, Callable[..., Any]] = {
    "gmres": lambda matvec, b: gmres(matvec, b, tol=1e-6, restart=N)[0],
    "gmres batched": lambda matvec, b: gmres(matvec, b, tol=1e-6, restart=N, solve_method="batched")[0],
    "bicgstab": lambda matvec, b: bicgstab(matvec, b, tol=1e-6)[0],
    "cg": lambda matvec, b: cg(lambda x: matvec(matvec(x)), b, tol=1e-7)[0],  # of a symmetric matrix, squared
    "custom_linear_solve": lambda matvec, b: lax.custom_linear_solve(
        matvec, b, lambda f, b: gmres(f, b, tol=1e-6, restart=N)[0], lambda f, b: gmres(f, b, tol=1e-6, restart=N)[0]
    ),
}


def matrix_of(solver, scale):
    a = scale * A
    return (a + a.T) / 2 if solver == "cg" else a


def solved(solver, f):
    """The solution for a scaled matrix and a right side."""
    return lambda scale, b: SOLVERS[solver](lambda x: f(matrix_of(solver, scale), x), b)


def plain_solution(solver):
    def solution(scale, b):
        a = matrix_of(solver, scale)
        return jnp.linalg.solve(a @ a if solver == "cg" else a, b)

    return solution


ARGS = jnp.float32(0.9), jnp.asarray(B)
DERIVATIVES: dict[str, Callable[..., Any]] = {
    "value": lambda f: f(*ARGS),
    "grad": lambda f: jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)) * G), (0, 1))(*ARGS),
    "jvp": lambda f: jax.jvp(f, ARGS, (jnp.float32(0.7), jnp.asarray(G)))[1],
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda s, b: jnp.sum(jnp.sin(f(s, b)) * G), (0, 1)), (None, 1))(
        ARGS[0], jnp.stack([B, 2 * B], 1)
    ),
    "grad of vmap": lambda f: jax.grad(lambda s, bs: jnp.sum(jnp.sin(jax.vmap(f, (None, 1))(s, bs)) * G), (0, 1))(
        ARGS[0], jnp.stack([B, 2 * B], 1)
    ),
    "grad of grad": lambda f: jax.grad(
        lambda *a: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(lambda *a: jnp.sum(jnp.sin(f(*a)) * G), (0, 1))(*a)),
        (0, 1),
    )(*ARGS),
}


@row("D7", "E1")
@sampled
@EVERY_RULES
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_solvers_through_a_function_with_forward_mode(derivative, solver, rules):
    f = solved(solver, matvec(rules))
    got = jax.jit(lambda: DERIVATIVES[derivative](f))()
    close(got, DERIVATIVES[derivative](plain_solution(solver)), 5e-3)


@row("D7", "E1")
@pytest.mark.parametrize("solver", ["gmres", "custom_linear_solve"])
@pytest.mark.parametrize("derivative", ["grad", "jvp"])
@pytest.mark.parametrize("program", ["eager", "checkpoint", "scan"])
def test_solvers_through_a_function_in_every_program(program, derivative, solver):
    f = CONTEXTS[program](solved(solver, matvec("both")))
    close(DERIVATIVES[derivative](f), DERIVATIVES[derivative](plain_solution(solver)), 5e-3)


@row("D6", "D7", "L1")
@pytest.mark.parametrize("solver", [s for s in SOLVERS if s != "cg"])
@pytest.mark.parametrize("derivative", ["grad", "jvp", "grad of vmap"])
@JIT
def test_solvers_through_a_function_without_forward_mode_are_right_or_name_it(wrap, derivative, solver):
    f = solved(solver, matvec("backward"))
    try:
        got = wrap(lambda: DERIVATIVES[derivative](f))()
    except (TypeError, NotImplementedError) as error:
        assert "MatVec" in str(error) and "generate_jvp_rule" in str(error), error
    else:
        close(got, DERIVATIVES[derivative](plain_solution(solver)), 5e-3)


# --- custom_root


def curve(rules: str) -> Callable[..., Any]:
    """sinh(y) + y, by a callback: JAX cannot differentiate its forward."""

    def forward(ctx, y):
        ctx.save_for_backward(y)
        return jax.pure_callback(
            lambda y: np.sinh(y) + y, jax.ShapeDtypeStruct(y.shape, y.dtype), y, vmap_method="expand_dims"
        )

    methods: dict[str, Any] = {"forward": staticmethod(forward)}
    if rules != "jvp":
        methods["backward"] = staticmethod(lambda ctx, g: g * (jnp.cosh(ctx.saved_tensors[0]) + 1))
    if rules in ("both", "jvp"):
        methods["jvp"] = staticmethod(lambda ctx, t: t * (jnp.cosh(ctx.saved_tensors[0]) + 1))
    return type("Curve", (jaxfn.Function,), methods | {"generate_jvp_rule": rules == "generated"}).apply


def root_of(f, how):
    """The y with f(y) = x, for each entry."""

    def newton(g, y):
        def step(y, _):
            return y - g(y) / (jnp.cosh(y) + 1), None

        return lax.scan(step, y, None, length=20)[0]

    def tangent_solve(g, y):
        if how == "ones":
            return y / g(jnp.ones_like(y))
        return gmres(g, y, tol=1e-7, restart=N)[0] if how == "gmres" else jnp.linalg.solve(jax.jacfwd(g)(y), y)

    return lambda x: lax.custom_root(lambda y: f(y) - x, jnp.zeros_like(x), newton, tangent_solve)


def inverse(x):
    """The root by Newton's steps, differentiated by the implicit function theorem at every order."""

    @jax.custom_jvp
    def root(x):
        y = jnp.zeros_like(x)
        for _ in range(30):
            y = y - (jnp.sinh(y) + y - x) / (jnp.cosh(y) + 1)
        return y

    @root.defjvp
    def _(primals, tangents):
        y = root(*primals)
        return y, tangents[0] / (jnp.cosh(y) + 1)

    return root(x)


ROOTS: dict[str, Callable[..., Any]] = {
    "value": lambda f: f(jnp.asarray(B)),
    "grad": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x)) * G))(B),
    "jvp": lambda f: jax.jvp(f, (jnp.asarray(B),), (jnp.asarray(G),))[1],
    "jacrev": lambda f: jax.jacrev(f)(B),
    "jacfwd": lambda f: jax.jacfwd(f)(B),
    "grad of vmap": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(jax.vmap(f, 1, 1)(x))))(np.stack([B, G], 1)),
}


# JAX cannot transpose a custom_linear_solve in a tangent solve, whatever the function is.
WAYS = [
    (how, derivative)
    for how in ("ones", "gmres", "jacobian")
    for derivative in ROOTS
    if how != "gmres" or derivative in ("value", "jvp", "jacfwd")
]


@row("D7", "E1")
@EVERY_RULES
@pytest.mark.parametrize(("how", "derivative"), WAYS)
@JIT
def test_roots_of_a_function_with_forward_mode(wrap, derivative, how, rules):
    f = root_of(curve(rules), how)
    close(wrap(lambda: ROOTS[derivative](f))(), ROOTS[derivative](inverse))


@row("D6", "L1")
@pytest.mark.parametrize(("how", "derivative"), [way for way in WAYS if way[1] != "value"])
@JIT
def test_roots_of_a_function_without_forward_mode_are_right_or_name_it(wrap, derivative, how):
    f = root_of(curve("backward"), how)
    try:
        got = wrap(lambda: ROOTS[derivative](f))()
    except (TypeError, NotImplementedError) as error:
        assert "Curve" in str(error) and "generate_jvp_rule" in str(error), error
    else:
        close(got, ROOTS[derivative](inverse))


# --- a backward that applies a linear Function


class HostSolve(jaxfn.Function):
    """a⁻¹ b on the host, whose backward is a solve with the transposed matrix: itself."""

    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, a, b):
        x = jax.pure_callback(
            lambda a, b: np.linalg.solve(a, b[..., None])[..., 0].astype(np.float32),
            jax.ShapeDtypeStruct(b.shape, b.dtype),
            a,
            b,
            vmap_method="broadcast_all",
        )
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        of_b = HostSolve.apply(a.T, g)
        return -jnp.outer(of_b, x), of_b


class HostSolveInReverse(HostSolve):
    generate_jvp_rule = False

    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        of_b = HostSolveInReverse.apply(a.T, g)
        return -jnp.outer(of_b, x), of_b


class SolvesInBackward(jaxfn.Function):
    """A solve whose backward applies another Function, which is linear in the gradient; none for the matrix."""

    generate_jvp_rule = True

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a)
        return jnp.linalg.solve(a, b)

    @staticmethod
    def backward(ctx, g):
        (a,) = ctx.saved_tensors
        return None, HostSolve.apply(a.T, g)


@jax.custom_jvp
def solve_with_tangent_of_b(a, b):
    return jnp.linalg.solve(a, b)


@solve_with_tangent_of_b.defjvp
def _(primals, tangents):
    a, _ = primals
    return solve_with_tangent_of_b(*primals), jnp.linalg.solve(a, tangents[1])


SOLVES: dict[str, tuple[Any, Any]] = {
    "itself": (HostSolve.apply, jnp.linalg.solve),
    "itself, in reverse mode alone": (HostSolveInReverse.apply, jnp.linalg.solve),
    "another": (SolvesInBackward.apply, solve_with_tangent_of_b),
}
REVERSE_OF_SOLVE: dict[str, Callable[..., Any]] = {
    "grad": lambda f: jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b)) * G), (0, 1))(A, B),
    "grad of vmap": lambda f: jax.grad(
        lambda a, b: jnp.sum(jnp.sin(jax.vmap(f, (None, 1), 1)(a, b)) * G[:, None]), (0, 1)
    )(A, np.stack([B, G], 1)),
    "grad of vmap over the matrix": lambda f: jax.grad(
        lambda a, b: jnp.sum(jnp.sin(jax.vmap(f, (2, None), 1)(a, b)) * G[:, None]), (0, 1)
    )(np.stack([A, 2 * A], 2), B),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b)) * G), (0, 1)), (None, 1))(
        A, np.stack([B, G], 1)
    ),
    "grad of grad": lambda f: jax.grad(
        lambda a, b: sum(
            jnp.sum(jnp.cos(g)) for g in jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b)) * G), (0, 1))(a, b)
        ),
        (0, 1),
    )(A, B),
}
FORWARD_OF_SOLVE: dict[str, Callable[..., Any]] = {
    "jvp": lambda f: jax.jvp(f, (A, B), (jnp.sin(A), jnp.cos(B)))[1],
    "jacfwd": lambda f: jax.jacfwd(f, 1)(A, B),
    "jvp of vmap": lambda f: jax.jvp(
        jax.vmap(f, (None, 1), 1), (A, np.stack([B, G], 1)), (jnp.sin(A), jnp.cos(np.stack([B, G], 1)))
    )[1],
    "jvp of grad": lambda f: jax.jvp(
        jax.grad(lambda a, b: jnp.sum(jnp.sin(f(a, b)) * G), (0, 1)), (A, B), (jnp.sin(A), jnp.cos(B))
    )[1],
    "jvp of jvp": lambda f: jax.jvp(
        lambda a, b: jax.jvp(f, (a, b), (jnp.sin(a), jnp.cos(b)))[1], (A, B), (jnp.cos(A), jnp.sin(B))
    )[1],
}


@row("D5", "E1c")
@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("derivative", REVERSE_OF_SOLVE)
@pytest.mark.parametrize("program", ["eager", "jit", "checkpoint"])
def test_a_backward_that_applies_a_linear_function_in_reverse_mode(program, derivative, solve):
    """Before, the batch was not seen to be linear: a Function in a backward, or mapped beside an unmapped argument."""
    f, plain = SOLVES[solve]
    f = CONTEXTS[program](f)
    close(jax.jit(lambda: REVERSE_OF_SOLVE[derivative](f))(), REVERSE_OF_SOLVE[derivative](plain))


@row("D5", "D7")
@pytest.mark.parametrize("solve", ["itself", "another"])
@pytest.mark.parametrize("derivative", FORWARD_OF_SOLVE)
@JIT
def test_a_backward_that_applies_a_linear_function_in_forward_mode(wrap, derivative, solve):
    f, plain = SOLVES[solve]
    close(wrap(lambda: FORWARD_OF_SOLVE[derivative](f))(), FORWARD_OF_SOLVE[derivative](plain))


# --- optimistix and lineax


@row("D7", "E1")
@EVERY_RULES
@pytest.mark.parametrize("derivative", ROOTS)
def test_roots_in_optimistix(derivative, rules):
    optx = pytest.importorskip("optimistix")
    f = curve(rules)

    def root(x):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(lambda y, x: f(y) - x, solver, jnp.zeros_like(x), args=x, max_steps=64).value

    close(ROOTS[derivative](root), ROOTS[derivative](inverse))


@row("D7", "E1")
@EVERY_RULES
@pytest.mark.parametrize("derivative", ["value", "grad", "jvp", "grad of vmap"])
def test_solves_in_lineax(derivative, rules):
    lineax = pytest.importorskip("lineax")
    f = matvec(rules)

    def solution(scale, b):
        operator = lineax.FunctionLinearOperator(
            lambda x: f(matrix_of("", scale), x), jax.ShapeDtypeStruct(b.shape, b.dtype)
        )
        return lineax.linear_solve(operator, b, lineax.GMRES(rtol=1e-6, atol=1e-6)).value

    close(DERIVATIVES[derivative](solution), DERIVATIVES[derivative](plain_solution("")), 5e-3)
