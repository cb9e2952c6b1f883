"""The real torch.autograd.Function compared with jaxfn's: one source, in both, on equal NumPy numbers.

Rows B and C are compared in `tests/core/test_context.py` and `test_backward.py`, and rows A in `test_calling.py`.
Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest

from tests.support.cases import CASES, Mul, StraightThrough, in_library, make_args
from tests.support.either_library import Torch, cotangent, gradients, in_each_library
from tests.support.gradcheck_mutants import BASES
from tests.support.gradcheck_pairs import generated
from tests.support.libraries import Define, Jax, JittedJax, assert_same, make_function, output_saved
from tests.support.marks import row

pytest.importorskip("torch")


def inputs_and_output_saved(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return *inputs, output


def cumulative_product(lib):
    def backward(g, x, y):
        return lib.m.flip(lib.m.cumsum(lib.m.flip(g * y, (0,)), 0), (0,)) / x

    return make_function(lib, lambda x: lib.m.cumprod(x, 0), backward, inputs_and_output_saved)


def clip_gradient(lib):
    """Not linear in its gradient."""
    return make_function(lib, lambda x: x * 2, lambda g, _: lib.m.clip(g, -1.5, 1.5) * g)


def affine_in_the_gradient(lib):
    return make_function(lib, lib.m.sin, lambda g, x, y: g * y * lib.m.cos(x) + 1, inputs_and_output_saved)


def log_sum_exp(lib):
    class LogSumExp(lib.Function):
        """Separate style, its output saved, and the other name of backward."""

        @staticmethod
        def forward(x):
            return lib.m.log(lib.m.exp(x).sum(-1))

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs, output)

        @staticmethod
        def vjp(ctx, grad_output):
            x, output = ctx.saved_tensors
            return grad_output[..., None] * lib.m.exp(x - output[..., None])

    return LogSumExp


def cube(lib):
    """The idiom of torch's double-backward tutorial: a Function applied in another's backward."""

    def backward(grad, x, g):
        return 7 * x * grad * g, 3 * x**2 * grad  # 7 for 6: the rule itself must be what is used

    slope = make_function(lib, lambda x, g: 3 * x**2 * g, backward)
    return make_function(lib, lambda x: x**3, lambda g, x: slope.apply(x, g))


def returned_input(lib):
    """An input as an output, with a rule that is not the identity's."""
    return make_function(lib, lambda a, b: (b, a * b), lambda g, h, a, b: (h * b, 3 * g + h * a))


def saved_round(lib):
    return make_function(lib, lib.m.round, lambda g, y: g * y, output_saved)


RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Away from the kinks of rounding and ReLU."""
    return np.asarray(RANDOM.uniform(0.1, 0.4, shape) + RANDOM.integers(-2, 3, shape))


# pytrees and named saves, which torch has not, and a saved intermediate, whose derivative torch drops
NOT_IN_TORCH = ("dense", "rotate", "gelu")
FUNCTIONS: dict[str, tuple[Define, tuple[Any, ...], tuple[Any, ...]]] = {
    case.name: (functools.partial(in_library, case.function), make_args(case), case.statics)
    for case in CASES
    if case.name not in NOT_IN_TORCH
} | {
    name: (define, args, ())
    for name, define, *args in [
        ("cumulative_product", cumulative_product, numbers(5)),
        ("clip_gradient", clip_gradient, numbers(4, 3)),
        ("affine_in_the_gradient", affine_in_the_gradient, numbers(4, 3)),
        ("log_sum_exp", log_sum_exp, numbers(4, 3)),
        ("cube", cube, numbers(4, 3)),
        ("returned_input", returned_input, numbers(4, 3), numbers(4, 3)),
        ("mul", functools.partial(in_library, Mul), numbers(4, 3), numbers(4, 3)),
    ]
}
BASES_BY_NAME = {str(base): base for base in BASES}


def call_in(library: Any, name: str) -> tuple[Any, list[np.ndarray]]:
    """The call of a Function in a library, and the arrays that it is called with."""
    if name in BASES_BY_NAME:
        base = BASES_BY_NAME[name]
        return base.define(library), [*map(np.asarray, generated(base.inputs, 0))]
    define, args, statics = FUNCTIONS[name]
    apply = define(library).apply
    statics = tuple(library.array(s) if isinstance(s, np.ndarray) else s for s in statics)
    return lambda *args: apply(*args, *statics), [*args]


@row("D1", "D9", "G1")
@pytest.mark.parametrize("name", [*FUNCTIONS, *BASES_BY_NAME])
@pytest.mark.parametrize(("library", "precision"), [(Jax, np.float64), (JittedJax, np.float32)], ids=["eager", "jit"])
@pytest.mark.usefixtures("double_precision")
def test_value_and_two_derivatives_as_torch(library, precision, name):
    theirs, args = call_in(Torch, name)
    kinds = {"f": precision, "c": np.result_type(precision, 1j)}
    args = [np.array(a, kinds.get(a.dtype.kind, a.dtype)) for a in args]
    want = Torch.derivatives(theirs, args, 2)
    with jax.enable_x64(precision is np.float64):
        got = library.derivatives(call_in(Jax, name)[0], args, 2)
    for ours, theirs in zip(got, want, strict=True):
        assert [y.dtype for y in ours] == [y.dtype for y in theirs]
        assert_same(ours, theirs, rtol=1e-9 if precision is np.float64 else 5e-5)


@row("D2", "D9")
@pytest.mark.parametrize("name", ["exp", "straight_through", "cube", "affine_in_the_gradient"])
@pytest.mark.usefixtures("double_precision")
def test_third_derivatives_of_a_composition_as_torch(name):
    def composed(f):
        return lambda x: f(x) * f(f(x)) + x

    args = [np.array([0.7, -0.3])]
    want = Torch.derivatives(composed(call_in(Torch, name)[0]), args, 3)
    for ours, theirs in zip(JittedJax.derivatives(composed(call_in(Jax, name)[0]), args, 3), want, strict=True):
        assert_same(ours, theirs)


@row("D1", "D2")
@in_each_library
@pytest.mark.parametrize(
    ("define", "derivatives"),
    [(functools.partial(in_library, StraightThrough), [2, 2, 0]), (saved_round, [4, 12, 28])],
    ids=["round", "saved"],
)
def test_the_derivatives_that_the_contract_names(lib, define, derivatives):
    apply = define(lib).apply
    for order, expected in enumerate(derivatives, 1):
        (got,) = gradients(lib, lambda x: (apply(x) - 1) ** 2, 2.3, order=order)
        np.testing.assert_allclose(got / cotangent(()) ** order, expected, atol=1e-12)


@row("D8")
@in_each_library
def test_mixed_partials(lib):
    """Each derivative needs the gradient of another input."""
    apply = in_library(Mul, lib).apply

    def of(x, w):
        return apply(x, w) ** 2

    if lib is Torch:
        x, w = (lib.m.tensor(v, requires_grad=True) for v in (2.0, 3.0))
        (first,) = lib.m.autograd.grad(of(x, w), x, create_graph=True)
        (mixed,) = lib.m.autograd.grad(first, w)
    else:
        mixed = lib.wrap(jax.grad(jax.grad(of), argnums=1))(2.0, 3.0)
    assert float(mixed) == 24.0
