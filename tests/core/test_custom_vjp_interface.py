"""Programs written for `jax.custom_vjp` on a Function that offers its interface (`support/custom_vjp_interface.py`).

`BEHAVIOURS` covers what JAX's own `CustomVJPTest` covers, in programs of ours. Each takes a `custom_vjp` and returns
numbers, and what is expected is mathematics; JAX's own must give the same. Where it does not, the row says what JAX
gives and why jaxfn gives something else.
"""

import collections
import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import float0, lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.interpreters import partial_eval

from tests.support import custom_vjp_interface
from tests.support.marks import COMING, TRACES_ALWAYS


class Raises(NamedTuple):
    """In place of numbers: an exception, and a pattern in its message."""

    kind: type[Exception]
    text: str


class Behaviour(NamedTuple):
    """A row of the table.

    Attributes:
      program: takes `custom_vjp`, returns a pytree of numbers.
      expected: these numbers.
      in_jax: what JAX's own gives, where that is something else.
      reason: why it is something else.
      uncompared: why JAX's own is not asked here, where it is not.
    """

    program: Callable[[Any], Any]
    expected: Any
    in_jax: Any
    reason: str
    uncompared: str


RUNS_PRIMAL_TOO = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces the primal function next to fwd")
BATCHES_BY_PRIMAL = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 refuses fwd batched where the primal is not")
REFUSES_CLOSURES = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 refuses what closes over what vmap maps")

SAME = object()
BEHAVIOURS: list[Any] = []


def behaviour(
    expected: Any, *, in_jax: Any = SAME, reason: str = "", uncompared: str = "", mark: Any = None
) -> Callable[..., Any]:
    """Enters the program into the table under its own name; `mark` is pytest's."""
    assert (in_jax is SAME) == (not reason)

    def enter(program: Callable[[Any], Any]) -> Callable[[Any], Any]:
        row = Behaviour(program, expected, in_jax, reason, uncompared)
        BEHAVIOURS.append(pytest.param(row, id=program.__name__, marks=mark or ()))
        return program

    return enter


def coming(what: str) -> str:
    """For `uncompared`: what JAX's coming implementation does otherwise."""
    return what if COMING else ""


def outcome(program: Callable[[Any], Any], custom_vjp: Any) -> Any:
    try:
        return program(custom_vjp)
    except Exception as error:
        return error


def check(got: Any, expected: Any) -> None:
    if isinstance(expected, Raises):
        assert isinstance(got, expected.kind), f"{expected} is expected, and this came: {got!r}"
        assert re.search(expected.text, str(got), re.DOTALL)
        return
    if isinstance(got, Exception):
        raise got
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if not (is_float0(x) and is_float0(y)):
            assert not is_float0(x) and not is_float0(y)
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def is_float0(x: Any) -> bool:
    return getattr(x, "dtype", None) == float0


def aval(x: Any) -> Any:
    return x.shape if is_float0(x) else (jnp.shape(x), jnp.asarray(x).dtype)


def ruled(custom_vjp, fun, fwd, bwd, nondiff_argnums=(), **how):
    f = custom_vjp(fun, nondiff_argnums=nondiff_argnums)
    f.defvjp(fwd, bwd, **how)
    return f


# The derivatives are made up, so that nothing but the rule can have given them.


def cube(custom_vjp):
    """x**3, with 7x for its derivative; keeps an input."""

    @custom_vjp
    def f(x):
        assert jnp.ndim(x) == 0
        return x**3

    def fwd(x):
        assert jnp.ndim(x) == 0
        return f(x), x

    f.defvjp(fwd, lambda x, g: (7 * x * g,))
    return f


def power(custom_vjp):
    """x**3, with 7x**2 for its derivative; keeps an intermediate."""

    @custom_vjp
    def f(x):
        return x**3

    f.defvjp(lambda x: (f(x), x * x), lambda square, g: (7 * square * g,))
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
XX = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], np.float32)

# --- Calls and gradients ---


@behaviour([8.0, 14.0, (8.0, 14.0), 7.0, 0.0])
def call_and_gradients(custom_vjp):
    f = cube(custom_vjp)
    d = jax.grad(f)
    return [f(2.0), d(2.0), jax.value_and_grad(f)(2.0), jax.grad(d)(2.0), jax.grad(jax.grad(d))(2.0)]


@behaviour([28.0, 28.0, 14.0])
def gradients_with_an_intermediate(custom_vjp):
    d = jax.grad(power(custom_vjp))
    return [d(2.0), jax.grad(d)(2.0), jax.grad(jax.grad(d))(2.0)]


@behaviour([8.0, 8.0, 8.0, 14.0, 14.0, 14.0])
def value_beside_the_gradient_is_the_function(custom_vjp):
    f = cube(custom_vjp)

    def again(g):
        return lambda x: jax.value_and_grad(g)(x)[0]

    functions = [f, again(f), again(again(f))]
    return [g(2.0) for g in functions] + [jax.grad(g)(2.0) for g in functions]


@behaviour([4.0, 2.0], uncompared="cannot be copied" if jax.__version_info__ < (0, 11) else "")
def copied(custom_vjp):
    f = ruled(custom_vjp, lambda x: x * x, lambda x: (x * x, None), lambda _, g: (2 * g,))
    g = copy.deepcopy(f)
    return [g(2.0), jax.grad(g)(2.0)]


@behaviour([3.0, 5.0, (3.0, 10.0), (5.0, 20.0)], mark=TRACES_ALWAYS)
def python_branches_on_values(custom_vjp):
    @custom_vjp
    def f(x):
        return x + 1 if x > 0 else 3 - x

    def fwd(x):
        return (x + 1, x) if x > 0 else (3 - x, x)

    f.defvjp(fwd, lambda x, g: (10 * g,) if x > 0 else (20 * g,))
    return [f(2.0), f(-2.0), jax.value_and_grad(f)(2.0), jax.value_and_grad(f)(-2.0)]


@behaviour([{"sum": 5.0, "parts": [4.0, 6.0]}, {"a": 40.0, "b": (300.0,)}])
def pytrees_everywhere(custom_vjp):
    @custom_vjp
    def f(tree):
        a, (b,) = tree["a"], tree["b"]
        return {"sum": a + b, "parts": [2 * a, 2 * b]}

    def bwd(kept, g):
        return ({"a": kept["one"][0] * g["sum"], "b": (g["parts"][1] * kept["other"],)},)

    f.defvjp(lambda tree: (f(tree), {"one": (10 * tree["a"],), "other": 50 * tree["a"]}), bwd)
    tree = {"a": 2.0, "b": (3.0,)}
    return [f(tree), jax.grad(lambda t: 2 * f(t)["sum"] + 3 * f(t)["parts"][1])(tree)]


@behaviour([80.0, [7.0, 11.0, 13.0], 6.0, [7.0, 11.0, 13.0]])
def keywords_and_defaults_become_positions(custom_vjp):
    @custom_vjp
    def f(x, y, c=1.0):
        return c * (x + y)

    f.defvjp(lambda x, y, c: (f(x, y, c), None), lambda _, g: (7 * g, 11 * g, 13 * g))
    return [
        f(10.0, 30.0, c=2.0),
        list(jax.grad(lambda x, y, c: f(y=y, c=c, x=x), (0, 1, 2))(10.0, 30.0, 2.0)),
        f(2.0, y=4.0),
        list(jax.grad(f, (0, 1, 2))(2.0, 4.0, 1.0)),
    ]


@behaviour([1.0, 3.0, 9.0, 5.0])
def rule_given_a_second_time_replaces_the_first(custom_vjp):
    @custom_vjp
    def f(x):
        return x * x

    f.defvjp(lambda x: (f(x), None), lambda _, g: (3 * g,))
    before = [f(1.0), jax.grad(f)(3.0)]
    f.defvjp(lambda x: (f(x), None), lambda _, g: (5 * g,))
    return [*before, f(3.0), jax.grad(f)(3.0)]


@behaviour([[16.0, 28.0, 10.0], [12.0, 20.0]])
def vjp_function_is_called_twice(custom_vjp):
    f = product(custom_vjp)
    value, pullback = jax.vjp(jax.vmap(f), jnp.array([4.0]), jnp.array([4.0]))
    first, second = pullback(jnp.array([3.5])), pullback(jnp.array([1.25]))
    _, of_scalars = jax.vjp(f, 2.0, 3.0)
    return [[value[0], first[0][0], second[0][0]], [of_scalars(2.0)[0], of_scalars(2.0)[1]]]


def ran(custom_vjp, *, keep):
    """How often each function ran: called, differentiated, differentiated in jit."""
    counts = collections.Counter()

    def counting(name, f):
        def counted(*args):
            counts[name] += 1
            return f(*args)

        return counted

    bodies = [lambda x: x**3, lambda x: (x**3, keep(x)), lambda x, g: (x * g,)]
    f = ruled(custom_vjp, *map(counting, ("fun", "fwd", "bwd"), bodies))
    result = []
    for program in (f, jax.grad(f), jax.jit(jax.grad(f)), jax.grad(f)):
        program(2.0)
        result.append(dict(counts))
        counts.clear()
    return result


@behaviour([{"fun": 1}, *[{"fwd": 1, "bwd": 1}] * 3], mark=RUNS_PRIMAL_TOO)
def each_function_runs_once(custom_vjp):
    return ran(custom_vjp, keep=lambda x: x)


@behaviour([{"fun": 1}, *[{"fwd": 1, "bwd": 1}] * 3], mark=RUNS_PRIMAL_TOO)
def each_function_runs_once_with_an_intermediate(custom_vjp):
    return ran(custom_vjp, keep=lambda x: 2 * x)


# --- jit, vmap, scan ---


@behaviour([8.0, 8.0, 14.0, 14.0, 14.0, 7.0, 7.0, 7.0])
def jit_and_grad_either_way_round(custom_vjp):
    f = cube(custom_vjp)
    grad, jit = jax.grad, jax.jit
    first = [jit(grad(f)), grad(jit(f)), jit(grad(jit(f)))]
    second = [jit(grad(grad(f))), grad(jit(grad(f))), grad(grad(jit(f)))]
    return [g(2.0) for g in (jit(f), jit(jit(f)), *first, *second)]


@behaviour([X**3, XX**3, 7 * X, (X**3, 7 * X), 7 * XX, (XX**3, 7 * XX), 7 * X, 7 * XX, 7 * XX, [7.0, 7.0, 7.0]])
def vmap_and_grad_either_way_round(custom_vjp):
    f = cube(custom_vjp)
    grad, vmap, both = jax.grad, jax.vmap, jax.value_and_grad
    return [
        vmap(f)(X),
        vmap(vmap(f))(XX),
        vmap(grad(f))(X),
        vmap(both(f))(X),
        vmap(vmap(grad(f)))(XX),
        vmap(vmap(both(f)))(XX),
        grad(summed(vmap(f)))(X),
        grad(summed(vmap(vmap(f))))(XX),
        vmap(grad(summed(vmap(f))))(XX),
        list(vmap(grad(grad(f)))(X)),
    ]


@behaviour([XX * X[:2, None], 2 * X[:2, None] * np.ones(3), 5 * XX.sum(1), XX * X, 2 * X * np.ones((2, 1))] * 2)
def vmap_over_other_axes_and_unbatched_arguments(custom_vjp):
    f = product(custom_vjp)
    of_columns = jax.vmap(f, in_axes=(1, None), out_axes=1)
    of_entries = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(1, 0), out_axes=1)

    def rows(wrap):
        return [
            wrap(of_columns)(XX, X[:2]),
            *wrap(jax.grad(summed(of_columns), (0, 1)))(XX, X[:2]),
            wrap(of_entries)(XX, X),
            wrap(jax.grad(summed(of_entries)))(XX, X),
        ]

    return rows(lambda g: g) + rows(jax.jit)


@behaviour([XX**3, 7 * XX**2, 14 * XX] * 2)
def vmap_over_columns_inside_and_outside_of_jit(custom_vjp):
    f = power(custom_vjp)

    def orders(mapped):
        second = jax.grad(lambda x: jax.grad(summed(mapped))(x).sum())
        return [mapped(XX), jax.grad(summed(mapped))(XX), second(XX)]

    return [
        *orders(jax.jit(jax.vmap(f, in_axes=1, out_axes=1))),
        *orders(jax.vmap(jax.jit(f), in_axes=1, out_axes=1)),
    ]


@behaviour([8.0, 14.0, 7.0, X**3, 7 * X, 7 * X, 14 * np.ones(3)])
def scan_with_grad_and_vmap(custom_vjp):
    f = cube(custom_vjp)

    def one_step(x):
        return lax.scan(lambda carry, _: (f(carry), None), x, None, length=1)[0]

    def in_scan(x):
        return lax.scan(lambda carry, _: (carry, jax.grad(summed(jax.vmap(f)))(carry)), x, None, length=2)[1][1]

    return [
        one_step(2.0),
        jax.grad(one_step)(2.0),
        jax.grad(jax.grad(one_step))(2.0),
        jax.vmap(one_step)(X),
        jax.grad(summed(jax.vmap(one_step)))(X),
        in_scan(jnp.asarray(X)),
        jax.grad(lambda x: 2 * in_scan(x).sum())(jnp.asarray(X)),
    ]


@behaviour([6 * X, 9 * X])
def scan_of_a_function_that_closes_over_an_array(custom_vjp):
    constant = jnp.arange(1.0, 4.0)

    @custom_vjp
    def f(x):
        return x * jnp.sum(constant)

    f.defvjp(lambda x: (f(x), 9 * x), lambda kept, g: (kept * g,))
    mapped = jax.vmap(lambda x: lax.scan(lambda carry, _: (f(carry), None), x, None, length=1)[0])
    return [mapped(X), jax.grad(summed(mapped))(X)]


@behaviour([[16.0, 54.0], [16.0, 16.0], [48.0, 108.0]])
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


@behaviour([8.0, [2.0, 2.0, 2.0, 2.0]])
def collective_of_the_mapped_axis(custom_vjp):
    @custom_vjp
    def f(x):
        return lax.psum(x, "axis")

    f.defvjp(lambda x: (lax.psum(x, "axis"), None), lambda _, g: (2 * g,))

    def staged(x):
        jaxpr = jax.make_jaxpr(f)(x)
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x)[0]

    mapped = jax.vmap(lambda _, x: staged(x), axis_name="axis", in_axes=(0, None), out_axes=None)
    gradient = jax.vmap(jax.grad(f), axis_name="axis")(jnp.arange(4.0))
    return [mapped(jnp.arange(4.0), 2.0), list(gradient)]


@behaviour([1.0, 1.0])
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


@behaviour([0.0, 0.0, 0.0], mark=BATCHES_BY_PRIMAL)
def output_that_does_not_depend_on_the_input(custom_vjp):
    f = ruled(custom_vjp, lambda x: np.zeros((), np.float32), lambda x: (x * 0, None), lambda _, g: (0 * g,))
    return list(jax.grad(summed(jax.vmap(f)))(jnp.asarray(X)))


@behaviour([[np.sin(2.0), 3.0, 0.0], [1.5, 0.5 * 2.0], 0, 1])
def output_that_is_not_used(custom_vjp):
    @custom_vjp
    def f(x, y):
        return jnp.sin(x), x + jnp.cos(y)

    f.defvjp(lambda x, y: (f(x, y), y), lambda y, g: (3 * g[0] + 1.5 * g[1], 0.5 * y * g[1]))

    def programs(i):
        return jax.jit(lambda x, y: f(x, y)[i])

    text = [programs(i).lower(2.0, 2.0).compile().as_text() for i in (0, 1)]
    return [
        [programs(0)(2.0, 2.0), *jax.grad(programs(0), (0, 1))(2.0, 2.0)],
        list(jax.grad(programs(1), (0, 1))(2.0, 2.0)),
        text[0].count(" cosine("),
        text[1].count(" cosine("),
    ]


@behaviour([[1, 1], [1, 0], [0, 1], [0, 0]], mark=pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 keeps it all"))
def output_that_is_not_used_is_dropped_from_the_traced_program(custom_vjp):
    @custom_vjp
    def f(x, y):
        return jnp.sin(x), jnp.cos(y)

    f.defvjp(lambda x, y: (f(x, y), None), lambda _, g: g)
    jaxpr = jax.make_jaxpr(f)(1.0, 2.0)

    def left(*used):
        text = str(partial_eval.dce_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), used)[0])
        return [text.count(" = sin "), text.count(" = cos ")]

    return [left(True, True), left(True, False), left(False, True), left(False, False)]


# --- Forward mode ---


@behaviour([True] * 4)
def forward_mode_is_refused(custom_vjp):
    f = cube(custom_vjp)
    symbolic = ruled(custom_vjp, lambda x: x, lambda x: (x.value, None), lambda _, g: (g,), symbolic_zeros=True)
    ones = (jnp.ones(3),)

    def refuses(g, x):
        with pytest.raises(TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"):
            jax.jvp(g, x, x)
        return True

    return [refuses(f, (1.0,)), refuses(jax.vmap(f), ones), refuses(jax.jit(f), (1.0,)), refuses(symbolic, (1.0,))]


# --- nondiff_argnums and nondiff_argnames ---


def calling(custom_vjp, **which):
    """g(x), whose derivative is 5x for every g."""

    @partial(custom_vjp, **which)
    def call(g, x):
        return g(x)

    call.defvjp(lambda g, x: (call(g, x), 5 * x), lambda g, kept, ct: (kept * ct,))
    return call


@behaviour([6, 6.0, (6.0, 15.0), 15.0, 5.0, 5 * X])
def function_for_an_argument(custom_vjp):
    call = calling(custom_vjp, nondiff_argnums=(0,))

    def f(x):
        return call(lambda y: 2 * y, x)

    return [
        f(3),
        f(3.0),
        jax.value_and_grad(f)(3.0),
        jax.jit(jax.grad(f))(3.0),
        jax.grad(jax.grad(f))(3.0),
        jax.vmap(jax.grad(f))(X),
    ]


@behaviour([6.0, 15.0, 6.0, 15.0])
def non_differentiable_argument_by_name(custom_vjp):
    by_name = calling(custom_vjp, nondiff_argnames=("g",))
    return [
        by_name(jnp.negative, -6.0),
        jax.grad(partial(by_name, jnp.negative))(3.0),
        by_name(x=-6.0, g=jnp.negative),
        jax.grad(lambda x: by_name(x=x, g=jnp.negative))(3.0),
    ]


@behaviour([[12.0, 15.0], 10.0])
def non_differentiable_arguments_by_number_and_name(custom_vjp):
    @partial(custom_vjp, nondiff_argnums=(0,), nondiff_argnames=("h",))
    def f(g, x, h):
        return g(x) + h(x)

    f.defvjp(lambda g, x, h: (f(g, x, h), x), lambda g, h, x, ct: (5 * x * ct,))

    def double(x):
        return 2 * x

    return [list(jax.value_and_grad(f, 1)(double, 3.0, double)), jax.grad(f, argnums=1)(double, 2.0, double)]


@behaviour([6.0, 6.0, 6.0, [2.0, 4.0, 6.0], 6.0])
def non_differentiable_list(custom_vjp):
    @partial(custom_vjp, nondiff_argnums=(0,))
    def f(numbers, x):
        return numbers[0] * x

    f.defvjp(lambda numbers, x: (f(numbers, x), x), lambda numbers, x, g: (numbers[0] * x * g,))
    numbers = [2.0]
    gradient = jax.grad(f, 1)
    return [
        f(numbers, 3.0),
        gradient(numbers, 3.0),
        jax.jit(lambda x: gradient(numbers, x))(3.0),
        list(jax.vmap(lambda x: gradient(numbers, x))(X)),
        jax.grad(jax.checkpoint(lambda x: f(numbers, x)))(3.0),
    ]


@behaviour([(7.0, 14.0), (7.0, 14.0)])
def non_differentiable_list_that_changes_between_calls(custom_vjp):
    f = custom_vjp(lambda numbers, x: numbers[0] * x, nondiff_argnums=(0,))
    f.defvjp(lambda numbers, x: (f(numbers, x), None), lambda numbers, _, g: (7 * numbers[0] * g,))
    numbers = [1.0]

    def both(gradient):
        numbers[0] = 1.0
        first = gradient(numbers, 3.0)
        numbers[0] = 2.0
        return first, gradient(numbers, 3.0)

    return [both(jax.grad(f, 1)), both(lambda n, x: jax.jit(lambda x: jax.grad(f, 1)(n, x))(x))]


@behaviour([[True, True], 20.0])
def symbolic_zeros_leave_other_arguments_alone(custom_vjp):
    seen = []

    def fwd(k, x):
        seen[:] = [isinstance(k, float), isinstance(x.perturbed, bool)]
        return f(k, x.value), None

    f = custom_vjp(lambda k, x: k * x, nondiff_argnums=(0,))
    f.defvjp(fwd, lambda k, _, g: (10 * k * g,), symbolic_zeros=True)
    gradient = jax.grad(partial(f, 2.0))(3.0)
    return [seen, gradient]


@behaviour(
    [6.0, 5.0, 5.0],
    in_jax=Raises(jax.errors.UnexpectedTracerError, "custom_vjp"),
    reason="What JAX traces is a good input of a Function, which has no derivative here.",
)
def traced_non_differentiable_argument(custom_vjp):
    f = custom_vjp(lambda xs, y: xs[0] * y, nondiff_argnums=(0,))
    f.defvjp(lambda xs, y: (f(xs, y), None), lambda xs, _, g: (5 * g,))
    g = jax.jit(lambda x, y: f((x,), y))
    return [g(2.0, 3.0), jax.grad(g, 1)(2.0, 3.0), jax.vmap(jax.grad(g, 1), in_axes=(0, None))(jnp.ones(1), 3.0)[0]]


@behaviour(
    Raises(TypeError, "f: argument 0 is among nondiff_argnums, and is being differentiated"),
    in_jax=Raises(jax.errors.UnexpectedTracerError, "custom_vjp"),
    reason="Where it is differentiated, the adapter refuses.",
)
def differentiated_non_differentiable_argument(custom_vjp):
    @partial(custom_vjp, nondiff_argnums=(0,))
    def f(x, y):
        return x * y

    f.defvjp(lambda x, y: (f(x, y), None), lambda x, _, g: (5 * g,))
    return jax.grad(jax.jit(lambda x, y: f(x, y)), (0, 1))(2.0, 3.0)


@behaviour([np.cos(2.0), [84.0, 84.0], [17.0, 17.0], [126.0, 126.0], [17.0, 17.0]])
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


# --- Closing over what is traced ---


@behaviour([3 * X, 2 * X, 6 * X, X], uncompared=coming("refuses"))
def fun_closes_over_what_vmap_maps(custom_vjp):
    def outer(x):
        f = custom_vjp(lambda y: x * y)
        f.defvjp(lambda y: (f(y), (x, 2 * y)), lambda kept, g: (kept[0] * kept[1] * g,))
        return f

    return [
        jax.vmap(lambda x: outer(x)(3.0))(X),
        jax.vmap(lambda x: jax.grad(outer(x))(1.0))(X),
        jax.jit(jax.vmap(lambda x: jax.grad(outer(x))(3.0)))(X),
        jax.vmap(lambda x: outer(x)(jnp.float32(1.0)))(X),
    ]


@behaviour(42.0, mark=REFUSES_CLOSURES)
def gradient_of_a_vmap_that_is_closed_over(custom_vjp):
    def h(z):
        def one(x):
            f = custom_vjp(lambda y: x * y)
            f.defvjp(lambda y: (x * y, (x, y, x * y)), lambda kept, g: (7 * kept[0] * g,))
            return f(z)

        return jax.vmap(one)(jnp.asarray(X)).sum()

    return jax.grad(h)(3.0)


@behaviour([6.0, [21.0, 3.0, 21.0]])
def fun_closes_over_what_jit_traces(custom_vjp):
    def outer(x, y):
        f = custom_vjp(lambda y: x * y)
        f.defvjp(lambda y: (f(y), y), lambda y, g: (7 * y * g,))
        return f(y)

    def right_or_refused(gradient, right):
        try:
            return gradient(2.0, 3.0)
        except Exception:  # of several kinds; JAX supports it no longer
            return jnp.float32(right)

    g = jax.jit(outer)
    gradients = [(jax.grad(g, 1), 21), (jax.grad(g, 0), 3), (jax.grad(outer, 1), 21)]
    return [g(2.0, 3.0), [right_or_refused(*each) for each in gradients]]


def closing(custom_vjp, y, *, in_fwd):
    f = custom_vjp(lambda x: 2 * x)
    if in_fwd:
        f.defvjp(lambda x: (f(x), y), lambda kept, g: (kept**3 * g,))
    else:
        f.defvjp(lambda x: (f(x), ()), lambda _, g: (y**3 * g,))
    return jax.grad(f)(1.0)


def over_every_tracer(g):
    transformed = [jax.vmap(g), jax.jit(jax.vmap(g)), jax.vmap(jax.jit(g))]
    return [jax.jit(g)(2.0), jax.grad(g)(2.0), jax.jit(jax.grad(g))(2.0), *(h(X) for h in transformed)]


@behaviour([8.0, 12.0, 12.0, X**3, X**3, X**3])
def bwd_closes_over_what_is_traced(custom_vjp):
    return over_every_tracer(lambda y: closing(custom_vjp_interface.custom_vjp, y, in_fwd=False))


@behaviour([8.0, 12.0, 12.0, X**3, X**3, X**3], uncompared=coming("refuses in vmap"))
def fwd_closes_over_what_is_traced(custom_vjp):
    return over_every_tracer(lambda y: closing(custom_vjp_interface.custom_vjp, y, in_fwd=True))


# --- Residuals ---


@behaviour([12.0, 12.0, 5.0])
def residual_is_a_vjp_function(custom_vjp):
    def fwd(x):
        return jax.vjp(lambda x: 3 * x * x, x)

    f = ruled(custom_vjp, lambda x: 3 * x * x, fwd, lambda pullback, g: pullback(g))
    _, pullback = jax.vjp(f, 2.0)
    through_jit = jax.jit(lambda x: jax.vjp(f, x)[1])
    return [pullback(1.0)[0], through_jit(2.0)(1.0)[0], through_jit(0.5)(5 / 3)[0]]


@behaviour([20.0, 20.0])
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


class Opaque:
    def __init__(self, number):
        self.number = number


@behaviour(
    21.0,
    in_jax=Raises(TypeError, "not a valid JAX type"),
    reason="What fwd keeps is an attribute of ctx, which takes any Python value.",
)
def residual_is_any_object(custom_vjp):
    f = ruled(custom_vjp, lambda x: x, lambda x: (x, Opaque(3)), lambda kept, g: (7 * kept.number * g,))
    return jax.grad(f)(1.0)


# --- What bwd returns ---


@behaviour([14.0, 14.0 * np.ones(3), 14.0])
def none_for_no_gradient(custom_vjp):
    @custom_vjp
    def f(xs, y):
        return sum(jax.tree.leaves(xs)) * y

    f.defvjp(lambda xs, y: (f(xs, y), None), lambda _, g: (None, 14 * g))
    return [
        jax.grad(lambda x: f(x, x))(3.0),
        jax.grad(lambda x: jax.vmap(f)(x, x).sum())(X),
        jax.grad(lambda x: f((x, [x]), x))(3.0),
    ]


@behaviour([(4.0, (0.0, 0.0)), (4.0, (0.0, None))])
def none_for_a_subtree(custom_vjp):
    f = ruled(custom_vjp, lambda x: x[0], lambda x: (x[0], None), lambda _, g: ((4 * g, (None, None)),))
    return [jax.grad(f)((1.0, (2.0, 3.0))), jax.grad(f)((1.0, (2.0, None)))]


@behaviour([0.0, 0.0, 2.0])
def gradient_is_clipped(custom_vjp):
    f = custom_vjp(lambda low, high, x: x)
    f.defvjp(lambda low, high, x: (x, (low, high)), lambda kept, g: (None, None, jnp.clip(g, *kept)))
    return list(jax.grad(lambda low, high, x: 5 * f(low, high, x), (0, 1, 2))(-2.0, 2.0, 1.0))


@behaviour([12.0, 10.0])
def list_in_place_of_the_tuple(custom_vjp):
    f = ruled(
        custom_vjp, lambda x, y: x * y, lambda x, y: (x * y, (x, y)), lambda xy, g: [4 * xy[1] * g, 5 * xy[0] * g]
    )
    return list(jax.grad(f, (0, 1))(2.0, 3.0))


@behaviour([(3.0, [3.0, {"a": 3.0}])])
def one_gradient_for_every_leaf(custom_vjp):
    f = ruled(custom_vjp, lambda tree: tree[0], lambda tree: (tree[0], None), lambda _, g: (3 * g,))
    return [jax.grad(f)((1.0, [1.0, {"a": 1.0}]))]


@jax.tree_util.register_pytree_node_class
class Strict(list):
    """A pytree that cannot hold `None`."""

    def tree_flatten(self):
        return tuple(self), None

    @classmethod
    def tree_unflatten(cls, _, children):
        assert children[0] is not None
        return cls(children)


@behaviour([8.0], uncompared=coming("rebuilds pytrees with None in them"))
def pytree_that_cannot_hold_none(custom_vjp):
    f = ruled(custom_vjp, lambda x: x[0], lambda x: (x[0], None), lambda _, g: (Strict([8 * g]),))
    return list(jax.grad(f)(Strict([1.0])))


@behaviour(
    [1.0, 1.0, 1.0],
    in_jax=Raises(ValueError, r"float32\[3\]"),
    reason="A gradient that broadcasts over its input is summed, as torch does (row C7).",
)
def gradient_of_a_broadcast_shape(custom_vjp):
    f = ruled(
        custom_vjp, lambda x: jnp.sum(x), lambda x: (jnp.sum(x), None), lambda _, g: (g * jnp.full((4, 3), 0.25),)
    )
    return list(jax.grad(f)(jnp.asarray(X)))


# --- Integers ---


@behaviour([(2.0, np.zeros((), float0)), (2.0, np.zeros((), float0)), 6.0, 6.0, 3.0])
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


@behaviour([(5.0, np.zeros((), float0)), (5.0, np.zeros((), float0))])
def integers_in_a_tuple_argument(custom_vjp):
    f = custom_vjp(lambda xi: xi)
    f.defvjp(lambda xi: (xi, None), lambda _, g: ((5 * g[0], np.zeros((), float0)),))

    def loop(x, i):
        return lax.scan(lambda xi, _: (f(xi), None), (x, i), None, length=1)[0][0]

    return [jax.grad(g, (0, 1), allow_int=True)(1.0, 3) for g in (loop, lambda x, i: f((x, i))[0])]


@behaviour([True, 3.0])
def cotangent_of_an_integer_output(custom_vjp):
    seen = []

    def bwd(_, g):
        seen.append(is_float0(g[1]))
        return (3 * g[0],)

    f = ruled(custom_vjp, lambda x: (x, jnp.int32(1)), lambda x: ((x, jnp.int32(1)), None), bwd)
    gradient = jax.grad(lambda x: f(x)[0])(2.0)
    return [all(seen), gradient]


# --- Complex numbers ---


@behaviour([(2 + 6j) * (3 + 2j), (1 + 2j) * (3 + 2j), 3 + 2j, (2 + 6j) * (3 + 2j), 2 - 6j])
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


# --- checkpoint ---


@behaviour([2.0**9, 7 * 2 * 7 * 8.0, 2.0**9, 7 * 2 * 7 * 8.0, 1764.0, 1764.0])
def checkpoint(custom_vjp):
    f = cube(custom_vjp)
    twice = jax.checkpoint(lambda x: f(f(x)))
    saving = jax.checkpoint(lambda x: f(f(x)), policy=jax.checkpoint_policies.everything_saveable)
    # The derivative is 7 f(x) * 7 x, so the second one is 49 (7 x^2 + f(x)), and the third one 49 (14 x + 7 x).
    second = [jax.grad(jax.grad(twice))(2.0), jax.grad(jax.checkpoint(jax.grad(twice)))(2.0)]
    return [twice(2.0), jax.grad(twice)(2.0), saving(2.0), jax.grad(saving)(2.0), *second]


@behaviour([2058.0, 2058.0])
def checkpoint_at_third_order(custom_vjp):
    f = cube(custom_vjp)
    grad = jax.grad
    third = [grad(grad(grad(jax.checkpoint(lambda x: f(f(x)))))), grad(jax.checkpoint(grad(grad(lambda x: f(f(x))))))]
    return [g(2.0) for g in third]


@behaviour([18.0, {"a": 18.0, "b": 30.0}])
def checkpoint_of_pytrees(custom_vjp):
    f = custom_vjp(lambda xy: xy["a"] * xy["b"])
    f.defvjp(lambda xy: (f(xy), xy), lambda xy, g: ({"a": 2 * g * xy["b"], "b": 5 * g * xy["a"]},))
    g = jax.checkpoint(lambda xy: 3 * f(xy))
    return [g({"a": 2.0, "b": 3.0}), jax.grad(g)({"a": 2.0, "b": 3.0})]


@behaviour([9.0, 9.0, 25.0])
def checkpoint_with_symbolic_zeros(custom_vjp):
    f = ruled(custom_vjp, lambda x: x, lambda x: (f(x.value), None), lambda _, g: (3 * g,), symbolic_zeros=True)
    g = product(custom_vjp)
    mixed = jax.checkpoint(lambda x: g(g(1.0, x), 1.0))
    return [
        jax.grad(jax.checkpoint(lambda x: f(f(x))))(2.0),
        jax.grad(jax.checkpoint(f))(2.0) * 3,
        2.5 * jax.grad(mixed)(2.0),
    ]


@behaviour([[6.0, 10.0], [6.0, 10.0], 2 * X])
def optimize_remat_leaves_derivatives_alone(custom_vjp):
    bwd = [lambda xy, g: (2 * g * xy[1], 5 * g * xy[0])]
    f = custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (f(x, y), (x, y)), *bwd, optimize_remat=True)
    with_keyword = custom_vjp(lambda x, y: x * y)
    with_keyword.defvjp(lambda x, y, *, unused=None: (x * y, (x, y)), *bwd, optimize_remat=True)

    @jax.custom_batching.custom_vmap
    def fwd(x, y):
        return x * y, (x, y)

    @fwd.def_vmap
    def _(size, are_batched, x, y):
        return (np.array([1.0], np.float32) * x * y, (x, y)), (True, (True, True))

    batched = custom_vjp(lambda x, y: x * y)
    batched.defvjp(fwd, *bwd, optimize_remat=True)
    gradients = [list(jax.grad(jax.checkpoint(g), (0, 1))(2.0, 3.0)) for g in (f, with_keyword)]
    return [*gradients, jax.jit(jax.vmap(jax.grad(batched)))(jnp.asarray(X), jnp.asarray(X))]


@behaviour([8.0, 9.0], mark=RUNS_PRIMAL_TOO)
def a_value_that_is_differentiated_is_that_of_fwd(custom_vjp):
    f = custom_vjp(lambda x: 4 * x)
    f.defvjp(lambda x: (4.5 * x, None), lambda _, g: (g,))  # fwd that is another function
    return [f(2.0), jax.value_and_grad(jax.checkpoint(f))(2.0)[0]]


# --- symbolic_zeros ---


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


@behaviour(
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


@behaviour([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], 1.0, (1.0, 0, 0)])
def symbolic_zeros_may_be_returned(custom_vjp):
    f = spying(custom_vjp, {})
    i = np.int32(7)
    both = jax.jacrev(lambda *xs: jax.jit(f)(*xs)[0], (0, 1, 2), allow_int=True)(4.0, i, i)
    return [
        list(jax.grad(lambda *xs: f(*xs)[0], (0, 1, 2))(4.0, 5.0, 6.0)),
        list(jax.grad(lambda *xs: f(*xs)[1], (0, 1, 2))(4.0, 5.0, 6.0)),
        jax.jacrev(lambda x: jax.jit(f)(x, 5.0, 6.0)[0])(4.0),
        both,
    ]


@behaviour([[99.0, [101.0, 102.0]]] * 4)
def symbolic_zeros_beside_constants(custom_vjp):
    f = custom_vjp(lambda a, b, x, y: (a, b, a + x, b + y))

    def fwd(*args):
        assert [arg.perturbed for arg in args] == [False, False, True, True]
        values = [arg.value for arg in args]
        return f(*values), values

    def bwd(kept, g):
        assert [isinstance(ct, SymbolicZero) for ct in g] == [True, False, False, False]
        assert [x.shape if isinstance(x, SymbolicZero) else jnp.shape(x) for x in g] == [(), (2,), (), (2,)]
        return kept[0] + 90, g[1] + 91, g[2] + 92, g[3] + 93

    f.defvjp(fwd, bwd, symbolic_zeros=True)

    def mapped(*args):
        outputs = jax.vmap(f)(*(jnp.asarray(x)[None] for x in args))
        return jax.tree.map(lambda x: x[0], outputs)

    def run(g):
        def pulled(x, y, cts):
            return jax.vjp(lambda x, y: g(1.0, jnp.array([2.0, 3.0]), x, y)[1:], x, y)[1](cts)

        return pulled

    given = 4.0, jnp.array([5.0, 6.0]), (jnp.array([10.0, 11.0]), 7.0, jnp.array([8.0, 9.0]))
    results = [g(*given) for g in (run(f), run(mapped), jax.jit(run(f)), jax.jit(run(mapped)))]
    return [[x, list(y)] for x, y in results]


@jax.tree_util.register_pytree_node_class
class Box:
    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@behaviour([3.0, 5.0, 3.0])
def symbolic_zeros_in_a_pytree(custom_vjp):
    strip = jax.custom_derivatives.custom_vjp_primal_tree_values
    f = custom_vjp(lambda box, y: box.value * y)

    def fwd(expected, box, y):
        assert (box.value.perturbed, y.perturbed) == expected
        return f(strip(box), strip(y)), (strip(box), strip(y))

    def bwd(kept, g):
        box, y = kept
        return Box(y * g), box.value * g

    box = Box(jnp.float32(5.0))
    f.defvjp(partial(fwd, (True, False)), bwd, symbolic_zeros=True)
    of_box = jax.grad(f)(box, 3.0)
    f.defvjp(partial(fwd, (False, True)), bwd, symbolic_zeros=True)
    of_y = jax.grad(f, 1)(box, 3.0)
    f.defvjp(lambda box, y: (f(box, y), (box, y)), bwd)
    return [of_box.value, of_y, jax.grad(f)(box, 3.0).value]


@behaviour([[6.0, 0.0], 6.0, [6.0, 0.0]])
def symbolic_zeros_of_several_patterns_in_one_program(custom_vjp):
    f = custom_vjp(lambda x, y: x * y)
    f.defvjp(lambda x, y: (x.value, None), lambda _, g: (6 * g, None), symbolic_zeros=True)
    jaxpr = jax.make_jaxpr(f)(2.0, 3.0)

    def evaluated(x, y):
        return jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, x, y)[0]

    def both():
        return list(jax.vjp(evaluated, 2.0, 3.0)[1](1.0))

    return [both(), jax.vjp(lambda x: evaluated(x, 3.0), 2.0)[1](1.0)[0], both()]


@behaviour(
    [0.0, 0.0, 5.0],
    in_jax=Raises(ValueError, "None"),
    reason="A symbolic zero is a zero whatever its shape; jaxfn is given None for it.",
    uncompared=coming("takes it too"),
)
def symbolic_zero_of_another_shape(custom_vjp):
    f = custom_vjp(lambda x, y, z: (x, y, z))
    f.defvjp(lambda *xs: (tuple(x.value for x in xs), None), lambda _, g: (g[1], g[0], 5 * g[2]), symbolic_zeros=True)
    gradients = jax.grad(lambda *xs: f(*xs)[2].sum(), (0, 1, 2))(jnp.ones(1), jnp.ones(2), jnp.ones(3))
    return [gradients[0][0], gradients[1][0], gradients[2][0]]


# --- What can be seen from outside ---


@behaviour(
    [True, False],
    in_jax=[False, True],
    reason="What forward computes is part of the program around it, where a policy sees it.",
    uncompared=coming("another primitive"),
)
def one_equation_of_that_name_is_traced(custom_vjp):
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(cube(custom_vjp))(1.0).eqns]
    return ["integer_pow" in names, names == ["custom_vjp_call"]]


@behaviour(
    [True, False],
    in_jax=[False, True],
    reason="Python numbers are static to a Function, so the adapter makes arrays of them.",
    uncompared=coming("arrays too"),
)
def python_number_that_is_returned(custom_vjp):
    f = ruled(custom_vjp, lambda x, y: (x, y), lambda x, y: ((x, y), None), lambda _, g: g)
    _, returned = jax.vjp(lambda x: f(x, 2.0), 1.0)[0]
    return [isinstance(returned, jax.Array), isinstance(returned, float)]


@behaviour(
    Raises(AttributeError, "defvjp_with_logs"),
    in_jax={"seen": 3.0},
    reason="A backward returns gradients and nothing beside them.",
    uncompared="" if hasattr(jax.custom_vjp, "defvjp_with_logs") else "not there yet",
)
def logs_of_bwd(custom_vjp):
    f = custom_vjp(lambda x: x)
    f.defvjp_with_logs(lambda x: (x, x), lambda x, g: ((g,), {"seen": x}))
    return jax.vjp(f, 3.0)[1].with_logs(1.0)[1]


# --- Errors ---


@behaviour(
    Raises(AttributeError, "call defvjp"),
    in_jax=Raises(AttributeError, "No VJP defined"),
    reason="The adapter's own words.",
)
def no_rule(custom_vjp):
    return jax.grad(custom_vjp(lambda x: x))(1.0)


@behaviour(Raises(TypeError, "missing a required argument: 'y'"))
def missing_argument(custom_vjp):
    return product(custom_vjp)(2.0)


@behaviour(
    Raises(TypeError, "f takes no arguments by keyword alone: z"),
    in_jax=Raises(TypeError, "could not be resolved to positions: z"),
    reason="The adapter's own words.",
)
def argument_by_keyword_alone(custom_vjp):
    @custom_vjp
    def f(x, *, z=None):
        return x

    f.defvjp(lambda x: (x, None), lambda _, g: (g,))
    return f(1.0, z=2.0)


OWN_WORDS = "jaxfn's own check comes first, and its message names the Function and the input."


def scale_with(custom_vjp, bwd):
    @custom_vjp
    def f(x):
        return x

    f.defvjp(lambda x: (x, None), bwd)
    return f


@behaviour(
    Raises(RuntimeError, r"f\.backward returned an incorrect number of gradients: expected 1 .*got 2"),
    in_jax=Raises(TypeError, "must produce"),
    reason=OWN_WORDS,
    uncompared=coming("other words"),
)
def too_many_gradients(custom_vjp):
    f = scale_with(custom_vjp, lambda _, g: (g, g))
    assert f(2.0) == 2  # it is bwd that is wrong, which does not run
    return jax.grad(f)(2.0)


@behaviour(
    Raises(TypeError, "f: bwd must return a tuple"),
    in_jax=Raises(TypeError, "must produce a tuple"),
    reason="The adapter's own words.",
)
def gradient_without_its_tuple(custom_vjp):
    return jax.grad(scale_with(custom_vjp, lambda _, g: 2 * g))(2.0)


@behaviour(
    Raises(RuntimeError, r"\.backward returned a gradient for input 0.*structure"),
    in_jax=Raises(Exception, "structure"),
    reason=OWN_WORDS,
    uncompared=coming("other words"),
)
def gradient_of_another_structure(custom_vjp):
    f = ruled(custom_vjp, lambda x: x[0], lambda x: (x[0], None), lambda _, g: ({"a": g},))
    return jax.grad(f)([1.0])


@behaviour(
    Raises(RuntimeError, r"backward returned an invalid gradient for input 1 .*shape \(3,\).*\(4,\)"),
    in_jax=Raises(ValueError, r"\[3\]"),
    reason=OWN_WORDS,
    uncompared=coming("other words"),
)
def gradient_of_another_shape(custom_vjp):
    f = ruled(custom_vjp, lambda x, y: x, lambda x, y: (x, None), lambda _, g: (jnp.zeros(3), jnp.zeros(3)))
    return jax.grad(lambda x, y: f(x, y * y).sum(), 1)(jnp.ones(3), jnp.ones(4))


@behaviour(
    Raises(RuntimeError, r"forward returned tuple\(\(array, array\)\) .* and tuple\(array\) when nothing"),
    in_jax=Raises(TypeError, "must produce a pair|fwd output"),
    reason=OWN_WORDS,
)
def fwd_with_outputs_of_another_structure(custom_vjp):
    f = ruled(custom_vjp, lambda x: x, lambda x: ((x, x), None), lambda _, g: (g[0],))
    return jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0])(1.0)


@behaviour(
    Raises(RuntimeError, r"forward returned \['float32\[3\]'\] .* and \['float32\[\]'\] when nothing"),
    in_jax=Raises(TypeError, "must produce a pair|fwd output"),
    reason=OWN_WORDS,
)
def fwd_with_outputs_of_another_shape(custom_vjp):
    f = ruled(custom_vjp, lambda x: x, lambda x: (jnp.zeros(3), None), lambda _, g: (g[0],))
    return jax.grad(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=1)[0])(1.0)


# --- What jaxfn is for ---


@behaviour(
    [2.0, 2.0, 2.0],
    in_jax=[2.0, 0.0, 0.0],
    reason="JAX differentiates what fwd itself computes, which is flat; jaxfn has the rule at every order (row D1).",
)
def second_derivative_by_the_rule(custom_vjp):
    f = ruled(custom_vjp, lambda x: jnp.round(x), lambda x: (jnp.round(x), None), lambda _, g: (g,))

    def loss(x):
        return (f(x) - 1) ** 2

    return [jax.grad(loss)(2.3), jax.grad(jax.grad(loss))(2.3), jax.grad(jax.jit(jax.grad(loss)))(2.3)]


@pytest.mark.parametrize("row", BEHAVIOURS)
def test_behaves_as_custom_vjp(row):
    ours = outcome(row.program, custom_vjp_interface.custom_vjp)
    check(ours, row.expected)
    if row.uncompared:
        return
    theirs = outcome(row.program, jax.custom_vjp)
    check(theirs, row.expected if row.in_jax is SAME else row.in_jax)
    if not isinstance(ours, Exception) and not isinstance(theirs, Exception):
        assert list(map(aval, jax.tree.leaves(ours))) == list(map(aval, jax.tree.leaves(theirs)))
