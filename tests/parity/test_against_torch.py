"""The real torch.autograd.Function compared with jaxfn's: one source, in both, on equal NumPy numbers.

Rows B and C are compared in `tests/core/test_context.py` and `test_backward.py`, and rows A in `test_calling.py`.
Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import CASES, ComplexSquare, Mul, StraightThrough, in_library, make_args
from tests.support.either_library import Torch, cotangent, gradients, in_each_library
from tests.support.libraries import Jax, JittedJax, assert_same
from tests.support.marks import row

pytest.importorskip("torch")


class CumulativeProduct(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        result = jnp.cumprod(x, 0)
        ctx.save_for_backward(x, result)
        return result

    @staticmethod
    def backward(ctx, grad_output):
        x, result = ctx.saved_tensors
        weighted = jnp.flip(grad_output * result, (0,))
        return jnp.flip(jnp.cumsum(weighted, 0), (0,)) / x


class ClipGradient(jaxfn.Function):
    """Not linear in its gradient."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad_output):
        return jnp.clip(grad_output, -1.5, 1.5) * grad_output


class AffineInTheGradient(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        y = jnp.sin(x)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        return grad_output * y * jnp.cos(x) + 1


class LogSumExp(jaxfn.Function):
    """Separate style, its output saved, and the other name of backward."""

    @staticmethod
    def forward(x):
        return jnp.log(jnp.exp(x).sum(-1))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output)

    @staticmethod
    def vjp(ctx, grad_output):
        x, output = ctx.saved_tensors
        return grad_output[..., None] * jnp.exp(x - output[..., None])


class CubeBackward(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, grad_output):
        ctx.save_for_backward(x, grad_output)
        return 3 * x**2 * grad_output

    @staticmethod
    def backward(ctx, grad):
        x, grad_output = ctx.saved_tensors
        return 7 * x * grad * grad_output, 3 * x**2 * grad  # 7 for 6: the rule itself must be what is used


class Cube(jaxfn.Function):
    """The idiom of torch's double-backward tutorial: a Function applied in another's backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return CubeBackward.apply(x, grad_output)


class ComplexModulus(jaxfn.Function):
    """Complex in, real out."""

    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return jnp.abs(z)

    @staticmethod
    def backward(ctx, grad_output):
        (z,) = ctx.saved_tensors
        return grad_output * z / jnp.sqrt(jnp.real(z * jnp.conj(z)))


class RealTimesComplex(jaxfn.Function):
    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(x, z)
        return x * z

    @staticmethod
    def backward(ctx, grad_output):
        x, z = ctx.saved_tensors
        return jnp.real(grad_output * jnp.conj(z)), grad_output * x


class ReturnedInput(jaxfn.Function):
    """An input as an output, with a rule that is not the identity's."""

    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return b, a * b

    @staticmethod
    def backward(ctx, grad_b, grad_product):
        a, b = ctx.saved_tensors
        return grad_product * b, 3 * grad_b + grad_product * a


RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Away from the kinks of rounding and ReLU."""
    return np.asarray(RANDOM.uniform(0.1, 0.4, shape) + RANDOM.integers(-2, 3, shape))


# pytrees and named saves, which torch has not, and a saved intermediate, whose derivative torch drops
NOT_IN_TORCH = ("dense", "rotate", "gelu")
Z = np.array([0.3 + 1.1j, -0.7 + 0.2j, 1.5 - 0.4j])
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = {
    case.name: (case.function, make_args(case), case.statics) for case in CASES if case.name not in NOT_IN_TORCH
} | {
    function.__name__: (function, args, ())
    for function, args in [
        (Mul, (numbers(4, 3), numbers(4, 3))),
        (CumulativeProduct, (numbers(5),)),
        (ClipGradient, (numbers(4, 3),)),
        (AffineInTheGradient, (numbers(4, 3),)),
        (LogSumExp, (numbers(4, 3),)),
        (Cube, (numbers(4, 3),)),
        (ReturnedInput, (numbers(4, 3), numbers(4, 3))),
        (ComplexSquare, (Z,)),
        (ComplexModulus, (Z,)),
        (RealTimesComplex, (np.array([0.5, -1.5, 2.0]), Z)),
    ]
}
SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


def call_in_torch(function: Any, statics: tuple[Any, ...]) -> Any:
    names = {"CubeBackward": in_library(CubeBackward, Torch)}
    apply = in_library(function, Torch, **names).apply
    statics = tuple(Torch.array(s) if isinstance(s, np.ndarray) else s for s in statics)
    return lambda *args: apply(*args, *statics)


@row("D1", "D9")
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("library", "precision"), [(Jax, np.float64), (JittedJax, np.float32)], ids=["eager", "jit"])
@pytest.mark.usefixtures("double_precision")
def test_value_and_two_derivatives_as_torch(library, precision, name):
    function, args, statics = FUNCTIONS[name]
    args = [np.array(a, precision if a.dtype.kind == "f" else np.result_type(precision, 1j)) for a in args]
    want = Torch.derivatives(call_in_torch(function, statics), args, 2)
    with jax.enable_x64(precision is np.float64):
        got = library.derivatives(lambda *a: function.apply(*a, *statics), args, 2)
    for ours, theirs in zip(got, want, strict=True):
        assert [y.dtype for y in ours] == [y.dtype for y in theirs]
        assert_same(ours, theirs, rtol=1e-9 if precision is np.float64 else 5e-5)


@row("D2", "D9")
@pytest.mark.parametrize("name", ["exp", "straight_through", "Cube", "AffineInTheGradient"])
@pytest.mark.usefixtures("double_precision")
def test_third_derivatives_of_a_composition_as_torch(name):
    function = FUNCTIONS[name][0]

    def composed(f):
        return lambda x: f(x) * f(f(x)) + x

    args = [np.array([0.7, -0.3])]
    want = Torch.derivatives(composed(call_in_torch(function, ())), args, 3)
    for ours, theirs in zip(JittedJax.derivatives(composed(function.apply), args, 3), want, strict=True):
        assert_same(ours, theirs)


class SavedRound(jaxfn.Function):
    @staticmethod
    def forward(ctx, x):
        y = jnp.round(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * y


@row("D1", "D2")
@in_each_library
@pytest.mark.parametrize(
    ("function", "derivatives"), [(StraightThrough, [2, 2, 0]), (SavedRound, [4, 12, 28])], ids=["round", "saved"]
)
def test_the_derivatives_that_the_contract_names(lib, function, derivatives):
    apply = (in_library(function, lib) if lib is Torch else function).apply
    for order, expected in enumerate(derivatives, 1):
        (got,) = gradients(lib, lambda x: (apply(x) - 1) ** 2, 2.3, order=order)
        np.testing.assert_allclose(got / cotangent(()) ** order, expected, atol=1e-12)


@row("D8")
@in_each_library
def test_mixed_partials(lib):
    """Each derivative needs the gradient of another input."""
    apply = (in_library(Mul, lib) if lib is Torch else Mul).apply

    def of(x, w):
        return apply(x, w) ** 2

    if lib is Torch:
        x, w = (lib.m.tensor(v, requires_grad=True) for v in (2.0, 3.0))
        (first,) = lib.m.autograd.grad(of(x, w), x, create_graph=True)
        (mixed,) = lib.m.autograd.grad(first, w)
    else:
        mixed = lib.wrap(jax.grad(jax.grad(of), argnums=1))(2.0, 3.0)
    assert float(mixed) == 24.0
