"""Programs written for `jax.custom_vjp` on a Function that has its interface (`support/custom_vjp_interface.py`).

Each takes a `custom_vjp` and returns numbers. The expected numbers are mathematics, and JAX's own `custom_vjp` gives
the same. These are patterns of its users that no row of the contract names.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import float0, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from tests.support import custom_vjp_interface
from tests.support.marks import COMING

RUNS_PRIMAL_TOO = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces the primal function next to fwd")


PROGRAMS: list[Any] = []


def program(expected: Any, mark: Any = ()) -> Callable[..., Any]:
    """Enters a program and its numbers into the table under its own name; `mark` is pytest's."""

    def enter(f: Callable[[Any], Any]) -> Callable[[Any], Any]:
        PROGRAMS.append(pytest.param(f, expected, id=f.__name__, marks=mark))
        return f

    return enter


def is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == float0


def ruled(custom_vjp, fun, fwd, bwd, **how):
    f = custom_vjp(fun)
    f.defvjp(fwd, bwd, **how)
    return f


def cube(custom_vjp):
    """x**3, with 7x for its derivative."""
    f = custom_vjp(lambda x: x**3)
    f.defvjp(lambda x: (f(x), x), lambda x, g: (7 * x * g,))
    return f


def product(custom_vjp):
    """x*y, with (2y, 5x) for its derivatives."""

    @custom_vjp
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (f(x, y), (x, y)), lambda xy, g: (2 * g * xy[1], 5 * g * xy[0]))
    return f


def summed(f):
    return lambda *args: f(*args).sum()


X = np.array([1.0, 2.0, 3.0], np.float32)


# --- jit, vmap, scan ---


@program([[16.0, 54.0], [16.0, 16.0], [48.0, 108.0]])
def scan_whose_carry_alone_is_batched(custom_vjp):
    @custom_vjp
    def scale(x, factor):
        return x * factor

    scale.defvjp(
        lambda x, factor: (scale(x, factor), (x, factor)),
        lambda kept, g: (g * kept[1], (g * kept[0]).sum()),
    )

    def f(x, factor):
        return lax.scan(lambda x, _: (scale(x, factor), None), x, jnp.arange(3))[0]

    mapped = jax.vmap(f, in_axes=(0, None))
    x, factor = jnp.array([2.0, 6.75]), jnp.float32(2.0)
    _, pullback = jax.vjp(mapped, x, factor)
    second = jax.grad(lambda factor: jax.grad(summed(mapped))(x, factor).sum())
    gradient = pullback(jnp.ones(2) * 2)
    return [list(mapped(x, factor)), list(gradient[0]), [second(factor) * 2, gradient[1] - 102]]


@program([1.0, 1.0])
def no_output_at_all(custom_vjp):
    def bwd(_, g):
        raise AssertionError("there is nothing to differentiate")

    f = ruled(custom_vjp, lambda x, y: None, lambda x, y: (None, y), bwd)

    def body(x, _):
        mapped = jax.vmap(f, in_axes=(0, None), out_axes=None)
        out, pullback = jax.vjp(mapped, x, jnp.zeros(1))
        assert out is None
        return x + sum(map(jnp.sum, pullback(None))), None

    return list(lax.scan(body, jnp.ones(2), None, length=3)[0])


@program([np.cos(2.0), [84.0, 84.0], [17.0, 17.0], [126.0, 126.0], [17.0, 17.0]])
def converted_closure(custom_vjp):
    call = custom_vjp(lambda g, x, *rest: jnp.cos(g(x, *rest)), nondiff_argnums=(0,))
    call.defvjp(
        lambda g, x, *rest: (call(g, x, *rest), (x, rest)),
        lambda g, kept, ct: (17 * kept[0], *(42 * of for of in kept[1])),
    )

    def solve(center, weight, x):
        converted, constants = jax.closure_convert(lambda x: jnp.sum(weight * (x - center) ** 2), x)
        return call(converted, x, *constants)

    center, weight, x = 2 * jnp.ones(2), jnp.ones(2), jnp.ones(2)
    of_both = [*jax.grad(solve, (0, 2))(center, weight, x), *jax.grad(solve, (0, 2))(1.5 * center, 3 * weight, x)]
    return [solve(center, weight, x), *map(list, of_both)]


@program([12.0, 12.0, 5.0])
def residual_is_a_vjp_function(custom_vjp):
    def fwd(x):
        return jax.vjp(lambda x: 3 * x * x, x)

    f = ruled(custom_vjp, lambda x: 3 * x * x, fwd, lambda pullback, g: pullback(g))
    _, pullback = jax.vjp(f, 2.0)
    through_jit = jax.jit(lambda x: jax.vjp(f, x)[1])
    return [pullback(1.0)[0], through_jit(2.0)(1.0)[0], through_jit(0.5)(5 / 3)[0]]


@program([20.0, 20.0])
def residuals_of_another_structure_for_another_pattern(custom_vjp):
    @custom_vjp
    def f(x, y):
        return x + y

    def fwd(x, y):
        return f(x.value, y.value), None if y.perturbed else []

    f.defvjp(fwd, lambda kept, g: (5 * g, 3 * g), symbolic_zeros=True)

    def loop(x):
        return lax.scan(lambda xy, _: ((f(*xy), xy[0]), None), (x, 1.0), None, length=2)[0][0]

    # x1 = f(x, 1), x2 = f(x1, x) has 5*5 + 3; the scan is one program, where both inputs are perturbed.
    return [jax.grad(loop)(1.0) - 8, jax.jit(jax.grad(loop))(1.0) - 8]


# --- Integers ---


@program([(2.0, np.zeros((), float0)), (2.0, np.zeros((), float0)), 6.0, 6.0, 3.0])
def integer_arguments(custom_vjp):
    f = ruled(custom_vjp, lambda x, i: x, lambda x, i: (x, (2.0, 1)), lambda kept, g: kept)

    def loop(x, i):
        return lax.scan(lambda xi, _: ((f(*xi), xi[1]), None), (x, i), None, length=1)[0][0]

    ignoring = ruled(custom_vjp, lambda i, x: x, lambda i, x: (x, 2 * x), lambda kept, g: (None, kept * g))
    explicit = ruled(
        custom_vjp, lambda i, x: x, lambda i, x: (x, 2 * x), lambda kept, g: (np.zeros(2, float0), kept * g)
    )
    pulled = jax.jit(lambda i: jax.vjp(f, 0.0, i)[1](1.5)[0] + 1)(1)
    return [
        jax.grad(f, (0, 1), allow_int=True)(2.0, 3),
        jax.grad(loop, (0, 1), allow_int=True)(2.0, 3),
        jax.grad(ignoring, 1)(jnp.arange(2), 3.0),
        jax.grad(explicit, 1)(jnp.arange(2), 3.0),
        pulled,
    ]


@program([(2 + 6j) * (3 + 2j), (1 + 2j) * (3 + 2j), 3 + 2j, (2 + 6j) * (3 + 2j), 2 - 6j])
def complex_numbers_in_jax_convention(custom_vjp):
    # The rule says that the derivative of z**2 is 2 Re(z) + 6 Im(z) i.
    square = custom_vjp(lambda z: z * z)
    square.defvjp(lambda z: (z * z, z), lambda z, g: (g * (2 * z.real + 6j * z.imag),))
    part = custom_vjp(lambda z: z.real)
    part.defvjp(lambda z: (z.real, z), lambda z, g: (g * (1 + 2j) * (3 + 2j),))
    widened = custom_vjp(lambda x: x * (1 + 0j))
    widened.defvjp(lambda x: (x * (1 + 0j), None), lambda _, g: (g.real,))
    z = jnp.complex64(1 + 1j)

    def pulled(f, at, cotangent):
        return jax.vjp(f, at)[1](cotangent)[0]

    return [
        pulled(square, z, jnp.complex64(3 + 2j)),
        pulled(part, z, jnp.float32(1)),
        pulled(widened, jnp.float32(1), jnp.complex64(3 + 2j)) + 2j,
        jax.jit(partial(pulled, square))(z, jnp.complex64(3 + 2j)),
        jnp.conj(jax.grad(lambda z: square(z).real)(z)),
    ]


@program([2058.0, 2058.0])
def checkpoint_at_third_order(custom_vjp):
    f = cube(custom_vjp)
    grad = jax.grad
    third = [grad(grad(grad(jax.checkpoint(lambda x: f(f(x)))))), grad(jax.checkpoint(grad(grad(lambda x: f(f(x))))))]
    return [g(2.0) for g in third]


@program([9.0, 9.0, 25.0])
def checkpoint_with_symbolic_zeros(custom_vjp):
    f = ruled(custom_vjp, lambda x: x, lambda x: (f(x.value), None), lambda _, g: (3 * g,), symbolic_zeros=True)
    g = product(custom_vjp)
    mixed = jax.checkpoint(lambda x: g(g(1.0, x), 1.0))
    return [
        jax.grad(jax.checkpoint(lambda x: f(f(x))))(2.0),
        jax.grad(jax.checkpoint(f))(2.0) * 3,
        2.5 * jax.grad(mixed)(2.0),
    ]


@program([8.0, 9.0], mark=RUNS_PRIMAL_TOO)
def a_value_that_is_differentiated_is_that_of_fwd(custom_vjp):
    f = custom_vjp(lambda x: 4 * x)
    f.defvjp(lambda x: (4.5 * x, None), lambda _, g: (g,))  # fwd that is another function
    return [f(2.0), jax.value_and_grad(jax.checkpoint(f))(2.0)[0]]


def spying(custom_vjp, seen):
    """(x, y) for (x, y, z); notes what fwd and bwd are told."""

    def fwd(*args):
        seen["perturbed"] = tuple(isinstance(x, CustomVJPPrimal) and x.perturbed for x in args)
        return (args[0].value, args[1].value), None

    def bwd(_, g):
        seen["zero"] = tuple(isinstance(ct, SymbolicZero) for ct in g)
        seen["shapes"] = tuple(ct.shape for ct in g)
        return g[0], g[1], None

    return ruled(custom_vjp, lambda x, y, z: (x, y), fwd, bwd, symbolic_zeros=True)


@program(
    [
        {"perturbed": (True, False, False), "shapes": ((), ()), "zero": (False, True)},
        {"perturbed": (True, True, True), "shapes": ((), ()), "zero": (True, False)},
        {"perturbed": (True, False, False), "shapes": ((), ()), "zero": (False, True)},
        {"perturbed": (True, False, False), "shapes": ((), ()), "zero": (False, True)},
        {"perturbed": (True, False, True), "shapes": ((), ()), "zero": (False, True)},
    ]
)
def symbolic_zeros_say_what_is_not_needed(custom_vjp):
    result = []

    def told(g, *args):
        seen = {}
        g(spying(custom_vjp, seen))(*args)
        result.append(seen)

    numbers = 4.0, 5.0, 6.0
    told(lambda f: jax.grad(lambda *xs: f(*xs)[0]), *numbers)
    told(lambda f: jax.grad(lambda *xs: f(*xs)[1], (0, 1, 2)), *numbers)
    told(lambda f: jax.grad(jax.jit(lambda *xs: f(*xs)[0])), *numbers)
    told(lambda f: jax.grad(lambda *xs: jax.vmap(f)(*xs)[0].sum()), *(jnp.full(2, x) for x in numbers))
    told(lambda f: jax.grad(lambda *xs: f(*xs)[0], (0, 2)), *numbers)
    return result


@program([[6.0, 0.0], 6.0, [6.0, 0.0]])
def symbolic_zeros_of_several_patterns_in_one_program(custom_vjp):
    f = custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x.value, None), lambda _, g: (6 * g, None), symbolic_zeros=True)
    jaxpr = jax.make_jaxpr(f)(2.0, 3.0)

    def evaluated(x, y):
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x, y)[0]

    def both():
        return list(jax.vjp(evaluated, 2.0, 3.0)[1](1.0))

    return [both(), jax.vjp(lambda x: evaluated(x, 3.0), 2.0)[1](1.0)[0], both()]


@pytest.mark.parametrize(("run", "expected"), PROGRAMS)
def test_a_program_of_custom_vjp(run, expected):
    ours, theirs = run(custom_vjp_interface.custom_vjp), run(jax.custom_vjp)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs) == jax.tree.structure(expected)
    for x, by_jax, number in zip(*map(jax.tree.leaves, (ours, theirs, expected)), strict=True):
        assert is_float0(x) == is_float0(by_jax) == is_float0(number)
        if not is_float0(x):
            assert jnp.asarray(x).dtype == jnp.asarray(by_jax).dtype
            np.testing.assert_allclose(x, number, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(by_jax, number, rtol=1e-5, atol=1e-6)
