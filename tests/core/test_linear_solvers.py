"""Solvers of JAX through Functions: gmres, cg, bicgstab, custom_linear_solve and custom_root."""

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
from tests.support.cases import on_host, with_rules
from tests.support.contexts import CONTEXTS, jit
from tests.support.marks import HIGH_PRIMITIVES, cells, row

N = 5
rng = np.random.default_rng(0)
A = (np.eye(N) * 4 + rng.normal(size=(N, N)) * 0.5).astype(np.float32)  # not symmetric
B = rng.normal(size=N).astype(np.float32)
G = rng.normal(size=N).astype(np.float32)


def matvec(rules: str, where: str = "here") -> Callable[..., Any]:
    """a @ x, with the rules of this kind; on the host JAX cannot transpose forward's operations."""

    def forward(ctx, a, x):
        ctx.save_for_backward(a, x)
        return on_host(np.matmul, jax.ShapeDtypeStruct(a.shape[:1], x.dtype), a, x) if where == "host" else a @ x

    def backward(ctx, g):
        a, x = ctx.saved_tensors
        return jnp.outer(g, x), a.T @ g

    def jvp(ctx, ta, tx):
        a, x = ctx.saved_tensors
        return ta @ x + a @ tx

    return with_rules(rules, forward, backward, jvp, "MatVec")


def close(got, expected, rtol=2e-3):
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


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
@cells(
    "solver,derivative,rules,program",
    [
        ("cg", "value", "jvp", "jit"),
        ("cg", "jvp", "both", "eager"),
        ("cg", "grad of vmap", "generated", "jit"),
        ("cg", "vmap of grad", "both", "jit"),
    ],
)
def test_a_solver_that_transposes_nothing(solver, derivative, rules, program):
    f = CONTEXTS[program](solved(solver, matvec(rules)))
    got = CONTEXTS["eager" if program == "eager" else "jit"](lambda: DERIVATIVES[derivative](f))()
    close(got, DERIVATIVES[derivative](plain_solution(solver)), 5e-3)


@row("D7", "E1")
@cells(
    "solver,derivative,rules",
    [("gmres", "grad", "both"), ("bicgstab", "jvp", "jvp"), ("custom_linear_solve", "grad of grad", "generated")],
)
def test_solvers_through_a_tangent_follow_the_rule(solver, derivative, rules):
    """Whatever `forward` computes."""

    def f(a, x):
        return jax.linearize(lambda x: matvec(rules, "host")(a, x), jnp.zeros_like(x))[1](x)

    got = jit(lambda: DERIVATIVES[derivative](solved(solver, f)))()
    close(got, DERIVATIVES[derivative](plain_solution(solver)), 5e-3)


@row("D6", "D7")
@cells(
    "solver,derivative,program",
    [
        ("gmres", "grad", "eager"),
        ("bicgstab", "grad of vmap", "jit"),
        ("custom_linear_solve", "grad", "jit"),
        ("cg", "jvp", "eager"),  # cg transposes nothing: with backward alone it has gradients
    ],
)
@HIGH_PRIMITIVES
def test_errors_of_solvers_are_those_of_jax(solver, derivative, program):
    for rules, where in [("backward", "here"), ("both", "host")]:
        derived = CONTEXTS[program](lambda: DERIVATIVES[derivative](solved(solver, matvec(rules, where))))
        if (solver, rules) == ("cg", "both"):
            close(derived(), DERIVATIVES[derivative](plain_solution(solver)), 5e-3)
            continue
        with pytest.raises((NotImplementedError, TypeError), match="custom_vjp"):
            derived()


# --- custom_root


def curve(rules: str) -> Callable[..., Any]:
    """sinh(y) + y, by a callback: JAX cannot differentiate its forward."""

    def forward(ctx, y):
        ctx.save_for_backward(y)
        return on_host(lambda y: np.sinh(y) + y, y, y)

    def rule(ctx, moving):
        return moving * (jnp.cosh(ctx.saved_tensors[0]) + 1)

    return with_rules(rules, forward, rule, rule, "Curve")


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


@row("D7", "E1")
@cells(
    "how,derivative,rules,program",
    [
        ("ones", "value", "generated", "jit"),
        ("ones", "grad", "jvp", "eager"),
        ("ones", "grad of vmap", "both", "jit"),
        # JAX cannot transpose a custom_linear_solve in a tangent solve, whatever the function is.
        ("gmres", "jvp", "jvp", "jit"),
        ("gmres", "jacfwd", "generated", "jit"),
        ("jacobian", "grad", "generated", "jit"),
        ("jacobian", "jvp", "both", "eager"),
        ("jacobian", "jacrev", "jvp", "jit"),
    ],
)
def test_roots_of_a_function_with_forward_mode(how, derivative, rules, program):
    f = root_of(curve(rules), how)
    close(CONTEXTS[program](lambda: ROOTS[derivative](f))(), ROOTS[derivative](inverse))


@row("D6", "D7")
@cells(
    "how,derivative,program",
    [
        ("ones", "grad", "jit"),
        ("ones", "jvp", "eager"),
        ("gmres", "jacfwd", "jit"),
        ("jacobian", "jacrev", "eager"),
        ("jacobian", "grad of vmap", "jit"),
    ],
)
def test_roots_of_a_function_without_forward_mode_raise(how, derivative, program):
    f = root_of(curve("backward"), how)
    with pytest.raises((TypeError, NotImplementedError), match=r"\(jvp\) to a custom_vjp|rule for 'custom_lin'"):
        CONTEXTS[program](lambda: ROOTS[derivative](f))()


# --- a backward that applies a linear Function


class HostSolve(jaxfn.Function):
    """a⁻¹ b on the host, whose backward is a solve with the transposed matrix: itself."""

    @staticmethod
    def forward(ctx, a, b):
        x = on_host(lambda a, b: np.linalg.solve(a, b[..., None])[..., 0], b, a, b, vmap_method="broadcast_all")
        ctx.save_for_backward(a, x)
        return x

    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        of_b = HostSolve.apply(a.T, g)
        return -jnp.outer(of_b, x), of_b


class HostSolveInBothModes(HostSolve):
    @staticmethod
    def backward(ctx, g):
        a, x = ctx.saved_tensors
        of_b = HostSolveInBothModes.apply(a.T, g)
        return -jnp.outer(of_b, x), of_b

    @staticmethod
    def jvp(ctx, ta, tb):
        a, x = ctx.saved_tensors
        return HostSolveInBothModes.apply(a, tb - ta @ x)


SOLVES = {"reverse mode": HostSolve.apply, "both modes": HostSolveInBothModes.apply}
BS = jnp.stack([B, G], 1)


def solve_loss(f):
    return lambda a, b: jnp.sum(jnp.sin(f(a, b)).T * G)


def solve_slopes(f):
    return jax.grad(solve_loss(f), (0, 1))


def tangent(f, a, b):
    return jax.jvp(f, (a, b), (jnp.sin(a), jnp.cos(b)))[1]


DERIVATIVES_OF_SOLVE: dict[str, Callable[..., Any]] = {
    "grad": lambda f: solve_slopes(f)(A, B),
    "grad of vmap": lambda f: solve_slopes(jax.vmap(f, (None, 1), 1))(A, BS),
    "grad of vmap over the matrix": lambda f: solve_slopes(jax.vmap(f, (2, None), 1))(np.stack([A, 2 * A], 2), B),
    "vmap of grad": lambda f: jax.vmap(solve_slopes(f), (None, 1))(A, BS),
    "grad of grad": lambda f: jax.grad(lambda a, b: sum(jnp.sum(jnp.cos(g)) for g in solve_slopes(f)(a, b)), (0, 1))(
        A, B
    ),
    "jvp": lambda f: tangent(f, A, B),
    "jacfwd": lambda f: jax.jacfwd(f, 1)(A, B),
    "jvp of vmap": lambda f: tangent(jax.vmap(f, (None, 1), 1), A, BS),
    "jvp of grad": lambda f: tangent(solve_slopes(f), A, B),
    "jvp of jvp": lambda f: tangent(lambda a, b: tangent(f, a, b), A, B),
}


@row("D7", "E1c")
@cells(
    "solve,derivative,program",
    [
        ("both modes", "grad", "checkpoint"),
        ("both modes", "grad of vmap", "eager"),
        ("both modes", "jvp", "jit"),
        ("both modes", "jvp of vmap", "eager"),
        ("both modes", "jvp of grad", "jit"),
        ("both modes", "grad of vmap over the matrix", "checkpoint"),
        ("both modes", "grad of grad", "jit"),
        ("both modes", "jacfwd", "eager"),
        ("both modes", "jvp of jvp", "jit"),
        ("reverse mode", "grad of vmap over the matrix", "jit"),
        ("reverse mode", "vmap of grad", "checkpoint"),
        ("reverse mode", "grad", "jit"),
        ("reverse mode", "grad of grad", "jit"),
    ],
)
def test_a_backward_that_applies_a_linear_function(solve, derivative, program):
    f = CONTEXTS[program](SOLVES[solve])
    close(jit(lambda: DERIVATIVES_OF_SOLVE[derivative](f))(), DERIVATIVES_OF_SOLVE[derivative](jnp.linalg.solve))


@row("D5", "D7")
def test_a_generated_forward_mode_of_a_callback_is_not_transposed():
    class Generated(HostSolve):
        generate_jvp_rule = True

    with pytest.raises(RuntimeError, match="JAX has no transpose of something in it"):
        tangent(Generated.apply, A, B)


# --- optimistix and lineax


@row("D7", "E1")
@cells(
    "derivative,rules",
    [("value", "jvp"), ("grad", "generated"), ("jvp", "both"), ("jacfwd", "jvp"), ("grad of vmap", "both")],
)
def test_roots_in_optimistix(derivative, rules):
    optx = pytest.importorskip("optimistix")
    f = curve(rules)

    def root(x):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(lambda y, x: f(y) - x, solver, jnp.zeros_like(x), args=x, max_steps=64).value

    close(ROOTS[derivative](root), ROOTS[derivative](inverse))


@row("D7", "E1")
@cells("derivative,rules", [("value", "both"), ("grad", "jvp"), ("jvp", "generated"), ("grad of vmap", "generated")])
def test_solves_in_lineax(derivative, rules):
    lineax = pytest.importorskip("lineax")
    f = matvec(rules)

    def solution(scale, b):
        operator = lineax.FunctionLinearOperator(
            lambda x: f(matrix_of("", scale), x), jax.ShapeDtypeStruct(b.shape, b.dtype)
        )
        return lineax.linear_solve(operator, b, lineax.GMRES(rtol=1e-6, atol=1e-6)).value

    close(DERIVATIVES[derivative](solution), DERIVATIVES[derivative](plain_solution("")), 5e-3)
