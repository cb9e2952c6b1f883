"""Row D7: JAX transposes the tangents of a Function by its own rule, and not its calls; solvers of JAX.

gmres, cg, bicgstab, custom_linear_solve and custom_root, of JAX, optimistix and lineax.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.scipy.sparse.linalg import bicgstab, cg, gmres

from tests.support.cases import function_of, on_host
from tests.support.contexts import CONTEXTS, jit
from tests.support.derivatives import check, derivative
from tests.support.marks import HIGH_PRIMITIVES, cells, row

N = 5
rng = np.random.default_rng(0)
A = (np.eye(N) * 4 + rng.normal(size=(N, N)) * 0.5).astype(np.float32)  # not symmetric
B = rng.normal(size=N).astype(np.float32)
G = rng.normal(size=N).astype(np.float32)
BS = np.stack([B, G], 1)


def matvec(rules: str, where: str = "here", factor: float = 1) -> Callable[..., Any]:
    """a @ x, with so many times its derivative; on the host JAX cannot transpose forward's operations."""

    def value(a, x):
        return on_host(np.matmul, jax.ShapeDtypeStruct(a.shape[:1], x.dtype), a, x) if where == "host" else a @ x

    def push(saved, ta, tx):
        a, x = saved
        return factor * (ta @ x + a @ tx)

    def pull(saved, g):
        a, x = saved
        return factor * jnp.outer(g, x), factor * a.T @ g

    return function_of(rules, value, push, pull, name="MatVec")


# --- transposition

RULES = ["both", "generated", "jvp"]
RECTANGLE = A[:3]
PROGRAMS = {
    **{name: CONTEXTS[name] for name in ("eager", "jit", "vmap", "checkpoint")},
    "cond": lambda f: lambda x: lax.cond(A[0, 0] > -9, f, lambda x: 2 * f(x), x),
}


@row("D7")
@pytest.mark.parametrize("rules", [*RULES, "backward"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_tangent_is_transposed_by_the_rule_and_a_call_is_not(program, rules):
    """Whatever forward computes, and also without a forward mode."""
    f, g = (PROGRAMS[program](partial(matvec(rules, where, 3), RECTANGLE)) for where in ("host", "here"))
    for wrap in (lambda f: f, jax.jit):
        pull = wrap(lambda y: jax.linear_transpose(jax.linearize(f, B)[1], B)(y)[0])
        np.testing.assert_allclose(pull(G[:3]), 3 * RECTANGLE.T @ G[:3], rtol=1e-5)
        with pytest.raises(NotImplementedError, match=r"'custom_vjp_call' not implemented|must implement .transpose"):
            wrap(lambda y: jax.linear_transpose(g, B)(y))(G[:3])


@row("E1")
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("around", [lambda f: f, jax.checkpoint, jax.vmap], ids=["", "checkpoint", "vmap"])
def test_the_invariant_part_of_a_loop_is_taken_out_of_it(around, rules):
    """JAX evaluates the rest of the body, by partial evaluation, as in `linear_transpose`."""

    def slope(saved, moving):
        e, x = saved
        return e * (1 - jnp.tanh(x) ** 2) * moving

    f = function_of(
        rules,
        lambda x, w: jnp.tanh(x) * jnp.exp(w) + 5,
        lambda saved, tx, _: slope(saved, tx),
        lambda saved, g: (slope(saved, g), None),
        lambda args, _: (jnp.exp(args[1]), args[0]),
    )

    def derivatives(f):
        def loss(x, w):
            step = jax.vmap(lambda x: f(x, w)) if around is jax.vmap else around(lambda x: f(x, w))
            return jnp.sum(lax.scan(lambda c, _: (0.1 * step(c), c), x, None, length=3)[0] * x)

        slope = jax.grad(loss)
        return [loss, slope, jax.grad(lambda x, w: jnp.sum(slope(x, w) ** 2))]

    def plain(x, w):
        return jnp.tanh(x) * jnp.exp(lax.stop_gradient(w)) + 5

    for ours, theirs in zip(derivatives(f), derivatives(plain), strict=True):
        np.testing.assert_allclose(jax.jit(ours)(B, jnp.float32(0.3)), theirs(B, jnp.float32(0.3)), rtol=1e-3)


# --- iterative solvers

close = partial(check, rtol=5e-3, atol=5e-3)

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


def of_solution(solver, name, f):
    """A derivative of the solution, for a matrix of some scale and one right side or, under vmap, two."""
    vmap = partial(jax.vmap, in_axes=(None, 1))
    return derivative(name, f, vmap=vmap)(jnp.float32(0.9), jnp.asarray(BS if "vmap" in name else B))


@row("D7", "E1")
@cells(
    "solver,derivative,rules,program",
    [
        ("cg", "eager", "jvp", "jit"),
        ("cg", "jvp", "both", "eager"),
        ("cg", "grad of vmap", "generated", "jit"),
    ],
)
def test_a_solver_that_transposes_nothing(solver, derivative, rules, program):
    f = CONTEXTS[program](solved(solver, matvec(rules)))
    got = CONTEXTS[program](lambda: of_solution(solver, derivative, f))()
    close(got, of_solution(solver, derivative, plain_solution(solver)))


@row("D7", "E1")
@cells(
    "solver,derivative,rules",
    [("gmres", "grad", "both"), ("bicgstab", "jvp", "jvp"), ("custom_linear_solve", "grad of grad", "generated")],
)
def test_solvers_through_a_tangent_follow_the_rule(solver, derivative, rules):
    """Whatever `forward` computes."""

    def f(a, x):
        return jax.linearize(lambda x: matvec(rules, "host")(a, x), jnp.zeros_like(x))[1](x)

    got = jit(lambda: of_solution(solver, derivative, solved(solver, f)))()
    close(got, of_solution(solver, derivative, plain_solution(solver)))


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
        derived = CONTEXTS[program](lambda: of_solution(solver, derivative, solved(solver, matvec(rules, where))))
        if (solver, rules) == ("cg", "both"):
            close(derived(), of_solution(solver, derivative, plain_solution(solver)))
            continue
        with pytest.raises((NotImplementedError, TypeError), match="custom_vjp"):
            derived()


# --- custom_root


def curve(rules: str) -> Callable[..., Any]:
    """sinh(y) + y, by a callback: JAX cannot differentiate its forward."""

    def rule(saved, moving):
        return moving * (jnp.cosh(saved[0]) + 1)

    return function_of(rules, lambda y: on_host(lambda y: np.sinh(y) + y, y, y), rule, rule, name="Curve")


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


def of_root(name, f):
    return derivative(name, f, vmap=partial(jax.vmap, in_axes=1, out_axes=1))(jnp.asarray(BS if "vmap" in name else B))


@row("D7", "E1")
@cells(
    "how,derivative,rules,program",
    [
        ("ones", "eager", "generated", "jit"),
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
    close(CONTEXTS[program](lambda: of_root(derivative, f))(), of_root(derivative, inverse))


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
        CONTEXTS[program](lambda: of_root(derivative, f))()


# --- a backward that applies a linear Function


def host_solve(rules: str) -> Callable[..., Any]:
    """a⁻¹ b on the host, whose backward is a solve with the transposed matrix: itself."""

    def value(a, b):
        return on_host(lambda a, b: np.linalg.solve(a, b[..., None])[..., 0], b, a, b, vmap_method="broadcast_all")

    def push(saved, ta, tb):
        a, x = saved
        return solve(a, tb - ta @ x)

    def pull(saved, g):
        a, x = saved
        of_b = solve(a.T, g)
        return -jnp.outer(of_b, x), of_b

    solve = function_of(rules, value, push, pull, lambda args, x: (args[0], x), "HostSolve")
    return solve


def of_solve(name, f):
    """A derivative of the solve, for several right sides or matrices under vmap."""
    by_matrix = name.endswith("over the matrix")
    steps = {
        "vmap": partial(jax.vmap, in_axes=(None, 1), out_axes=1),
        "vmap over the matrix": partial(jax.vmap, in_axes=(2, None), out_axes=1),
    }
    args = (np.stack([A, 2 * A], 2), B) if by_matrix else (A, BS) if "vmap" in name else (A, B)
    return derivative(name, f, **steps)(*map(jnp.asarray, args))


@row("D7", "E1c")
@cells(
    "rules,derivative,program",
    [
        ("both", "grad", "checkpoint"),
        ("both", "grad of vmap", "eager"),
        ("both", "jvp", "jit"),
        ("both", "jvp of vmap", "eager"),
        ("both", "jvp of grad", "jit"),
        ("both", "grad of vmap over the matrix", "checkpoint"),
        ("both", "grad of grad", "jit"),
        ("both", "jacfwd", "eager"),
        ("both", "jvp of jvp", "jit"),
        ("backward", "grad of vmap over the matrix", "jit"),
        ("backward", "vmap of grad", "checkpoint"),
        ("backward", "grad", "jit"),
        ("backward", "grad of grad", "jit"),
    ],
)
def test_a_backward_that_applies_a_linear_function(rules, derivative, program):
    f = CONTEXTS[program](host_solve(rules))
    close(jit(lambda: of_solve(derivative, f))(), of_solve(derivative, jnp.linalg.solve))


@row("D5", "D7")
def test_a_generated_forward_mode_of_a_callback_is_not_transposed():
    with pytest.raises(RuntimeError, match="JAX has no transpose of something in it"):
        of_solve("jvp", host_solve("generated"))


# --- optimistix and lineax


@row("D7", "E1")
@cells(
    "derivative,rules",
    [("eager", "jvp"), ("grad", "generated"), ("jvp", "both"), ("jacfwd", "jvp"), ("grad of vmap", "both")],
)
def test_roots_in_optimistix(derivative, rules):
    optx = pytest.importorskip("optimistix")
    f = curve(rules)

    def root(x):
        solver = optx.Newton(rtol=1e-6, atol=1e-6)
        return optx.root_find(lambda y, x: f(y) - x, solver, jnp.zeros_like(x), args=x, max_steps=64).value

    close(of_root(derivative, root), of_root(derivative, inverse))


@row("D7", "E1")
@cells("derivative,rules", [("eager", "both"), ("grad", "jvp"), ("jvp", "generated"), ("grad of vmap", "generated")])
def test_solves_in_lineax(derivative, rules):
    lineax = pytest.importorskip("lineax")
    f = matvec(rules)

    def solution(scale, b):
        operator = lineax.FunctionLinearOperator(
            lambda x: f(matrix_of("", scale), x), jax.ShapeDtypeStruct(b.shape, b.dtype)
        )
        return lineax.linear_solve(operator, b, lineax.GMRES(rtol=1e-6, atol=1e-6)).value

    close(of_solution("", derivative, solution), of_solution("", derivative, plain_solution("")))
