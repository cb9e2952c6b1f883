"""Functions, right and wrong, each built on both torch and jaxfn, whose gradcheck is compared with torch's.

A *definition* is a function of a library (`Jax` or `torch_library()`) that writes a Function in it and returns what
calls it. `@pair(...)` enters one in `PAIRS`, with its inputs and the check. Right rules of usual operations, and
mistakes in them, are in `gradcheck_mutants`: what stands here is unusual in its inputs, options, outputs or verdict.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from tests.support.cases import Dense, Linear, MulConstant, StraightThrough, Swish, in_library
from tests.support.libraries import Define, Jax, Kind, Library, make_function, output_saved

Verdict = Literal["passes", "fails", "raises"]


def verdict(library: Library, kind: Kind, f: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> Verdict:
    """Runs the library's own gradcheck (or gradgradcheck).

    Returns:
      `"passes"`; `"fails"` where it raised its GradcheckError; `"raises"` where something else was raised, in the
      Function or by the machinery beneath it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert library.check(kind, f, args, **keywords)
        except library.GradcheckError:
            return "fails"
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return "raises"
    return "passes"


# ---------------------------------------------------------------------------------------------------------------------
# Inputs: functions of a random generator. Anything else is passed unchanged as an input.

Generate = Callable[[np.random.Generator], np.ndarray]


def real(*shape: int) -> Generate:
    """Real numbers of either sign, away from zero."""
    return lambda r: np.asarray(r.uniform(0.3, 1.5, shape) * r.choice([-1.0, 1.0], shape))


def positive(*shape: int) -> Generate:
    return lambda r: r.uniform(0.5, 2.0, shape)


def complex_(*shape: int) -> Generate:
    return lambda r: real(*shape)(r) + 1j * real(*shape)(r)


def integers(high: int, *shape: int) -> Generate:
    return lambda r: r.integers(0, high, shape)


def distinct(*shape: int) -> Generate:
    """No two within 0.2 of each other, and none within 0.05 of a multiple of 0.25."""
    size = int(np.prod(shape))
    return lambda r: (0.25 * (r.permutation(size) - size // 2) + r.uniform(0.1, 0.15, size)).reshape(shape)


def regular(n: int) -> Generate:
    """A square matrix that is far from singular and not symmetric."""
    return lambda r: r.uniform(-0.5, 0.5, (n, n)) + 2 * np.eye(n)


def generated(inputs: Sequence[Any], seed: int) -> tuple[Any, ...]:
    """The inputs drawn with that seed."""
    generator = np.random.default_rng(seed)
    return tuple(x(generator) if callable(x) else x for x in inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The catalog.


@dataclass(frozen=True)
class Pair:
    """A definition, the check that it is put through, and the verdicts.

    Attributes:
      name: for test ids.
      define: writes the Function in a library.
      inputs: see `generated`.
      kind: which check.
      keywords: of that check; `argnums` selects the inputs that are differentiated, torch's `requires_grad`.
      ours: the result of jaxfn.
      torchs: the result of torch.
      because: why they differ.
    """

    name: str
    define: Define
    inputs: Sequence[Any]
    kind: Kind
    keywords: dict[str, Any]
    ours: Verdict
    torchs: Verdict
    because: str

    def __str__(self) -> str:
        return f"{self.name}-{self.kind}"

    def verdict(self, library: Library) -> Verdict:
        return verdict(library, self.kind, self.define(library), generated(self.inputs, 0), **self.keywords)


PAIRS: list[Pair] = []


def enter(
    name: str,
    inputs: Sequence[Any],
    define: Define,
    *,
    first: Verdict | None = None,
    second: Verdict | None = None,
    torch: Verdict | None = None,
    because: str = "what torch's engine rejects is a failure to jaxfn",
    **keywords: Any,
) -> None:
    """Enters a definition in the catalog.

    Args:
      name: Its name.
      inputs: See `generated`.
      define: Writes the Function in a library.
      first: The result of gradcheck, if it is checked by that.
      second: The result of gradgradcheck, if it is checked by that.
      torch: torch's result. Default: jaxfn's.
      because: Why that is another one.
      **keywords: Of the checks.
    """
    if first is not None:
        PAIRS.append(Pair(name, define, inputs, "gradcheck", keywords, first, torch or first, because))
    if second is not None:
        PAIRS.append(Pair(name, define, inputs, "gradgradcheck", keywords, second, torch or second, because))


def pair(*inputs: Any, **options: Any) -> Callable[[Define], Define]:
    """`enter` as a decorator of the definition."""

    def decorate(define: Define) -> Define:
        enter(define.__name__, inputs, define, **options)
        return define

    return decorate


def rule(library: Library, *forward_and_backward: Any, **options: Any) -> Callable[..., Any]:
    """The call of a Function of `make_function`."""
    return make_function(library, *forward_and_backward, **options).apply


# ---------------------------------------------------------------------------------------------------------------------
# Tolerances, kinks, sizes and dtypes.


def scaled_square(factor):
    """x², with a gradient that is `factor` times what it should be."""
    return lambda lib: rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * factor)


SINGLE = {"eps": 1e-2, "atol": 1e-2, "rtol": 1e-2}
EXACT = "torch compares within a relative 1e-3, jaxfn also with exact derivatives"
enter("half a square", [real(3, 4)], scaled_square(0.5), first="fails", second="passes")
enter("off by 5e-4", [real(3, 4)], scaled_square(1.0005), first="fails", torch="passes", because=EXACT)
enter("off by 0.02, 0.05 allowed", [real(3, 4)], scaled_square(1.02), first="passes", rtol=0.05)
enter("off by 5e-4, 1e-5 allowed", [real(3, 4)], scaled_square(1.0005), first="fails", rtol=1e-5, atol=1e-7)
enter("of nothing", [np.zeros((0, 3))], scaled_square(1), first="passes")
enter("single precision", [np.float32([0.5, -1.25, 2.0])], scaled_square(1), first="passes", **SINGLE)
enter("single precision, wrong", [np.float32([0.5, -1.25, 2.0])], scaled_square(0.5), first="fails", **SINGLE)
enter("dtype of a gradient", [real(3)], scaled_square(1), first="passes", check_grad_dtypes=True)
enter("batched gradients", [positive(3)], scaled_square(1), first="passes", check_batched_grad=True)
enter("no jvp", [real(3)], scaled_square(1), first="fails", torch="raises", check_forward_ad=True)


def gradient_in_single_precision(lib):
    return rule(lib, lambda x: x * x, lambda g, x: lib.as_float32(2 * x * g))


enter("float32 gradient", [real(3)], gradient_in_single_precision, first="passes")
enter(
    "dtype of a float32 gradient",
    [real(3)],
    gradient_in_single_precision,
    first="fails",
    torch="passes",
    because="torch's engine casts the gradient before its gradcheck looks; jaxfn looks at what backward returned",
    check_grad_dtypes=True,
)


def relu(lib):
    return rule(lib, lambda x: lib.m.where(x > 0, x, 0.0), lambda g, x: lib.m.where(x > 0, g, 0.0))


def sqrt(lib):
    return rule(lib, lib.m.sqrt, lambda g, y: g / (2 * y), output_saved)


enter("relu at its kink", [np.array([0.7, 0.0, -0.4])], relu, first="fails")
enter("sqrt near zero", [np.array([1e-3, 1e-4, 1.0])], sqrt, first="passes")
enter(
    "sqrt a step from zero",
    [np.array([1e-6, 1.0])],
    sqrt,
    first="passes",
    torch="fails",
    because="torch takes a difference across the end of the domain, jaxfn one that is as small as that needs",
)


def sinc(lib, backward):
    def forward(x):
        return lib.m.where(x == 0, 1.0, lib.m.sin(x) / lib.m.where(x == 0, 1.0, x))

    return rule(lib, forward, backward)


@pair(np.array([0.5, 0.0, 2.0]), first="fails")
def sinc_not_a_number_at_zero(lib):
    return sinc(lib, lambda g, x: g * (lib.m.cos(x) - lib.m.sin(x) / x) / x)


@pair(np.array([0.5, 0.0, 2.0]), first="passes")
def sinc_with_care_at_zero(lib):
    def backward(g, x):
        safe = lib.m.where(x == 0, 1.0, x)
        return g * lib.m.where(x == 0, 0.0, (lib.m.cos(safe) - lib.m.sin(safe) / safe) / safe)

    return sinc(lib, backward)


@pair(np.arange(1.0, 13.0).reshape(3, 4).T, np.arange(24.0).reshape(4, 6)[:, ::2], first="passes")
def of_strided_arrays(lib):
    return rule(lib, lambda x, y: lib.m.sin(x) * y, lambda g, x, y: (g * lib.m.cos(x) * y, g * lib.m.sin(x)))


# ---------------------------------------------------------------------------------------------------------------------
# Rules that are not the derivative, or not linear in the gradient.


def published(function):
    """A Function of `cases`."""
    return lambda lib: in_library(function, lib).apply


enter("straight through round", [real(3)], published(StraightThrough), first="fails", second="passes")


@pair(real(3), first="fails", second="fails")
def straight_through_sign_times_its_output(lib):
    return rule(lib, lib.m.sign, lambda g, y: g * y, output_saved)


@pair(real(3), first="fails")
def affine_in_its_gradient(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g + 1)


COMBINATION = "torch looks at basis vectors alone, jaxfn at a combination of two vectors too"


@pair(real(3), first="fails", torch="passes", because=COMBINATION)
def quadratic_in_its_gradient(lib):
    """Right for every basis vector, wrong for anything else."""
    return rule(lib, lambda x: 3 * x, lambda g, x: 3 * g * g)


def root(lib, derivative):
    """The root of y³ + y = x by Newton's method, in a loop that JAX cannot differentiate in reverse."""

    def newton_step(x, y):
        step = (y**3 + y - x) / (3 * y * y + 1)
        return y - step, step

    def forward(x):
        start = (x, 0 * x + 1)
        return lib.while_loop(
            lambda state: lib.m.abs(state[1]).max() > 1e-14,
            lambda state: newton_step(x, state[0]),
            start,
        )[0]

    return rule(lib, forward, lambda g, y: g * derivative(y), output_saved)


@pair(real(4), first="passes", second="passes")
def root_differentiated_implicitly(lib):
    return root(lib, lambda y: 1 / (3 * y * y + 1))


@pair(real(4), first="fails")
def root_with_a_term_dropped(lib):
    return root(lib, lambda y: 1 / (3 * y * y))


# ---------------------------------------------------------------------------------------------------------------------
# Inputs and outputs: shapes, None, static arguments, indices, dictionaries.


def linear(grad_weight):
    """The linear layer, where the gradient of the weight is passed."""
    return lambda lib: rule(lib, lambda x, w, b: x @ w.T + b, lambda g, x, w, b: (g @ w, grad_weight(g, x), g.sum(0)))


LINEAR = published(Linear)
WIDE, SQUARE = [real(2, 3), real(4, 3), real(4)], [real(3, 3), real(3, 3), real(3)]
enter("linear", WIDE, LINEAR, first="passes", second="passes", eps=1e-6, atol=1e-4)
enter("linear without bias", [*WIDE[:2], None], LINEAR, first="passes")
enter("linear, frozen wrong weight", SQUARE, linear(lambda g, x: 2 * g.T @ x), first="passes", argnums=(0, 2))
enter("linear, gradient of wrong shape", WIDE, linear(lambda g, x: x.T @ g), first="fails", torch="raises")
STATIC = published(MulConstant)
enter("static argument", [real(3), 2.5], STATIC, first="passes", second="passes")


@pair(real(3, 4), real(4), first="passes")
def product_summed_by_the_library(lib):
    """The gradient of the vector has the matrix's shape; both libraries sum it."""
    return rule(lib, lambda x, v: x * v, lambda g, x, v: (g * v, g * x))


@pair(distinct(5), first="passes", second="passes")
def sort_and_order(lib):
    """An integer output next to the sorted values."""

    def forward(x):
        order = lib.m.argsort(x)
        return x[order], order

    return rule(lib, forward, lambda g, _, order: lib.scatter_set(5, order, g), lambda inputs, output: (output[1],))


def marked(lib, forward, which):
    """A Function whose first output is x², and whose output at `which` is marked as not differentiable."""
    return rule(lib, forward, lambda g, *others: 2 * others[-1] * g, marked=which)


@pair(real(3), first="passes", second="passes")
def an_output_without_derivative(lib):
    return marked(lib, lambda x: (x * x, lib.m.round(x)), 1)


@pair(real(3), first="fails")
def the_wrong_output_without_derivative(lib):
    return marked(lib, lambda x: (x * x,), 0)


@pair(real(3), real(3), first="passes", second="passes")
def none_where_there_is_none(lib):
    return rule(lib, lambda x, y: x * lib.m.sign(y), lambda g, x, y: (g * lib.m.sign(y), None))


@pair(real(3), real(3), first="fails", torch="raises")
def too_few_gradients(lib):
    return rule(lib, lambda x, y: x * y, lambda g, x, y: g * y)


@pair(real(3), first="passes")
def too_many_nones(lib):
    return rule(lib, lambda x: x * x, lambda g, x: (2 * x * g, None, None))


@pair(
    {"w": np.array([[0.4, -0.7], [1.1, 0.3]]), "b": np.array([0.2, -0.5])}, real(3, 2), first="passes", second="passes"
)
def layer_of_a_dictionary(lib):
    """torch gets the dictionary's leaves one by one."""
    if lib is Jax:
        return lambda params, x: Dense.apply(params, x)["out"]
    return rule(lib, lambda w, b, x: x @ w + b, lambda g, w, b, x: (x.T @ g, g.sum(0), g @ w.T))


# ---------------------------------------------------------------------------------------------------------------------
# Complex numbers.


@pair(real(3), first="fails", torch="raises")
def complex_gradient_for_a_real_input(lib):
    return rule(lib, lambda t: lib.m.exp(1j * t), lambda g, t: g * lib.m.conj(1j * lib.m.exp(1j * t)))


@pair(complex_(3), positive(3), first="passes")
def complex_and_real_inputs(lib):
    return rule(lib, lambda z, x: z * x, lambda g, z, x: (g * x, (g * lib.m.conj(z)).real))


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives, and Functions inside Functions.


DROPS = "torch drops the derivative of a saved intermediate, jaxfn has it"
enter("saved intermediate", [real(3)], published(Swish), first="passes")
enter("saved intermediate twice", [real(3)], published(Swish), second="passes", torch="fails", because=DROPS)


@pair(real(3), second="passes", grad_outputs=(np.array([0.5, -1.0, 2.0]),))
def cube_with_gradients(lib):
    return rule(lib, lambda x: x**3, lambda g, x: 3 * x * x * g)


def nested(lib, slope):
    """`backward` applies another Function, whose own derivative is `slope`."""
    cosine = rule(lib, lib.m.cos, lambda g, x: g * slope(x))
    return rule(lib, lib.m.sin, lambda g, x: g * cosine(x))


@pair(real(3), first="passes", second="passes")
def nested_in_backward(lib):
    return nested(lib, lambda x: -lib.m.sin(x))


@pair(real(3), first="passes", second="fails")
def nested_with_a_wrong_derivative(lib):
    return nested(lib, lib.m.sin)


@pair(real(3), first="passes", second="passes")
def nested_in_forward(lib):
    """The outer rule is right, and the inner one, which is not differentiated, is wrong."""
    inner = rule(lib, lib.m.sin, lambda g, x: 7 * g)
    return rule(lib, lambda x: inner(x) * x, lambda g, x: g * (lib.m.sin(x) + x * lib.m.cos(x)))


def inside_a_plain_function(factor):
    def define(lib):
        cube = rule(lib, lambda x: x**3, lambda g, x: factor * x * x * g)
        return lambda x: lib.m.tanh(cube(x)) * x

    return define


enter("inside a plain function", [real(3)], inside_a_plain_function(3), first="passes", second="passes")
enter("wrong inside a plain function", [real(3)], inside_a_plain_function(2), first="fails")


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be traced or batched, and what differs from call to call.


def python_branch_in_backward(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g if float(g.sum()) != 0 else 0 * g)


enter("python branch in backward", [positive(3)], python_branch_in_backward, first="passes")
enter("batched python branch", [positive(3)], python_branch_in_backward, first="fails", check_batched_grad=True)


def noisy(size):
    """x², with a gradient that grows by `size` from call to call."""

    def define(lib):
        calls = itertools.count()
        return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * (1 + size * next(calls)))

    return define


enter("noise of 1e-11", [real(3)], noisy(1e-11), first="fails")
enter("noise of 1e-11, 1e-6 allowed", [real(3)], noisy(1e-11), first="passes", nondet_tol=1e-6)
enter("noise of 1e-2, 1e-6 allowed", [real(3)], noisy(1e-2), first="fails", nondet_tol=1e-6)
