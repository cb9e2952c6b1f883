"""The real torch.autograd.Function beside jaxfn's: one source, built on both, the same NumPy numbers.

A *definition* is a function of a library, torch or JAX, that writes a Function in it and returns what calls it.
Gradients are compared in torch's convention: JAX's of a complex input is the conjugate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.libraries import Define, Jax, JittedJax, Library, assert_same, loss, torch_library
from tests.support.marks import row

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("double_precision")


Torch = torch_library()
LIBRARIES = pytest.mark.parametrize("library", [Torch, Jax, JittedJax])
JAXES = pytest.mark.parametrize("library", [Jax, JittedJax])
REFUSALS = (RuntimeError, TypeError, ValueError, NotImplementedError)


def assert_agree(define: Define, *args: Any, order: int = 2) -> None:
    """Outputs and derivatives up to that order, eager and jitted, against torch."""
    want = Torch.derivatives(define(Torch), args, order)
    for library in (Jax, JittedJax):
        for ours, theirs in zip(library.derivatives(define(library), args, order), want, strict=True):
            assert_same(ours, theirs)


def described(library: Library, value: Any) -> Any:
    """An argument of backward, comparable between the libraries."""
    if value is None:
        return None
    if isinstance(value, jax.core.Tracer):
        return "traced"
    array = library.numpy(value)
    return array.dtype.name, array.shape, array.tolist()


def assert_sees_the_same(define: Callable[[Library, list[Any]], Callable[..., Any]], *args: Any) -> list[Any]:
    """What a Function's methods put into `seen` while one first derivative is taken."""
    seen: dict[Library, list[Any]] = {Torch: [], Jax: []}
    for library, log in seen.items():
        library.gradients(define(library, log), [np.asarray(a) for a in args])
    assert seen[Jax] == seen[Torch]
    assert seen[Torch]
    return seen[Torch]


def returning(library: Library, value: Callable[[Any], Any], **attributes: Any) -> Any:
    """A Function of (x, w) whose backward returns `value(grad_output)`."""

    class Returning(library.Function):
        @staticmethod
        def forward(ctx, x, w=None):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return value(grad_output)

    for name, attribute in attributes.items():
        setattr(Returning, name, attribute)
    return Returning.apply


# ---------------------------------------------------------------------------------------------------------------------
# Functions as people write them, each from one source.


def square(lib):
    class Square(lib.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return 2 * x * grad_output

    return Square.apply


def exp(lib):
    class Exp(lib.Function):
        @staticmethod
        def forward(ctx, x):
            result = lib.m.exp(x)
            ctx.save_for_backward(result)
            return result

        @staticmethod
        def backward(ctx, grad_output):
            (result,) = ctx.saved_tensors
            return grad_output * result

    return Exp.apply


def linear(lib):
    class Linear(lib.Function):
        @staticmethod
        def forward(ctx, input, weight, bias=None):
            ctx.save_for_backward(input, weight, bias)
            output = input @ weight.T
            if bias is not None:
                output = output + bias
            return output

        @staticmethod
        def backward(ctx, grad_output):
            input, weight, bias = ctx.saved_tensors
            grad_input = grad_weight = grad_bias = None
            if ctx.needs_input_grad[0]:
                grad_input = grad_output @ weight
            if ctx.needs_input_grad[1]:
                grad_weight = grad_output.T @ input
            if bias is not None and ctx.needs_input_grad[2]:
                grad_bias = grad_output.sum(0)
            return grad_input, grad_weight, grad_bias

    return Linear.apply


def mul_constant(lib):
    class MulConstant(lib.Function):
        @staticmethod
        def forward(ctx, tensor, constant):
            ctx.set_materialize_grads(False)
            ctx.constant = constant
            return tensor * constant

        @staticmethod
        def backward(ctx, grad_output):
            if grad_output is None:
                return None, None
            return grad_output * ctx.constant, None

    return lambda x: MulConstant.apply(x, 2.5)


def relu(lib):
    class Relu(lib.Function):
        @staticmethod
        def forward(ctx, x):
            mask = x > 0
            ctx.save_for_backward(mask)
            return lib.m.where(mask, x, 0.0)

        @staticmethod
        def backward(ctx, grad_output):
            (mask,) = ctx.saved_tensors
            return lib.m.where(mask, grad_output, 0.0)

    return Relu.apply


def swish(lib):
    class Swish(lib.Function):
        @staticmethod
        def forward(x):
            return x * lib.nn.sigmoid(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            (x,) = inputs
            ctx.save_for_backward(x, output)

        @staticmethod
        def backward(ctx, grad_output):
            x, output = ctx.saved_tensors
            s = lib.nn.sigmoid(x)
            return grad_output * (output + s * (1 - output))

    return Swish.apply


def two_outputs(lib):
    class Rotate(lib.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return lib.m.sin(x) * y, lib.m.cos(x) + y * y

        @staticmethod
        def backward(ctx, grad_first, grad_second):
            x, y = ctx.saved_tensors
            grad_x = grad_first * lib.m.cos(x) * y - grad_second * lib.m.sin(x)
            return grad_x, grad_first * lib.m.sin(x) + 2 * grad_second * y

    return Rotate.apply


def cumulative_product(lib):
    class CumulativeProduct(lib.Function):
        @staticmethod
        def forward(ctx, x):
            result = lib.m.cumprod(x, 0)
            ctx.save_for_backward(x, result)
            return result

        @staticmethod
        def backward(ctx, grad_output):
            x, result = ctx.saved_tensors
            weighted = lib.m.flip(grad_output * result, (0,))
            return lib.m.flip(lib.m.cumsum(weighted, 0), (0,)) / x

    return CumulativeProduct.apply


def cross_entropy(lib):
    class CrossEntropy(lib.Function):
        @staticmethod
        def forward(ctx, logits, labels):
            ctx.save_for_backward(logits, labels)
            picked = labels[:, None] == lib.m.arange(logits.shape[1])
            return -lib.m.where(picked, lib.nn.log_softmax(logits, -1), 0.0).sum() / logits.shape[0]

        @staticmethod
        def backward(ctx, grad_output):
            logits, labels = ctx.saved_tensors
            picked = labels[:, None] == lib.m.arange(logits.shape[1])
            probabilities = lib.nn.softmax(logits, -1)
            return grad_output * lib.m.where(picked, probabilities - 1, probabilities) / logits.shape[0], None

    return CrossEntropy.apply


def spike(lib):
    class Spike(lib.Function):
        @staticmethod
        def forward(ctx, x, slope=2.0):
            ctx.slope = slope
            ctx.save_for_backward(x)
            return lib.m.asarray(x > 0, dtype=x.dtype)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return grad_output / (1 + ctx.slope * lib.m.abs(x)) ** 2, None

    return Spike.apply


def quantizer(lib):
    class Quantize(lib.Function):
        @staticmethod
        def forward(ctx, x, scale):
            codes = lib.m.clip(lib.m.round(x / scale), -8, 7)
            result = codes * scale
            error = x - result
            ctx.mark_non_differentiable(error)
            ctx.save_for_backward(error)
            return result, lib.m.asarray(codes, dtype=lib.m.int8), error

        @staticmethod
        def backward(ctx, grad_output, _codes, _error):
            (error,) = ctx.saved_tensors
            return grad_output, (grad_output * error).sum()

    return Quantize.apply


def layer_norm(lib):
    class LayerNorm(lib.Function):
        @staticmethod
        def forward(ctx, x, gain, bias, eps=1e-3):
            ctx.eps = eps
            ctx.save_for_backward(x, gain)
            centred = x - x.mean(-1, keepdims=True)
            return centred / lib.m.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * gain + bias

        @staticmethod
        def backward(ctx, grad_output):
            x, gain = ctx.saved_tensors
            centred = x - x.mean(-1, keepdims=True)
            scale = 1 / lib.m.sqrt((centred * centred).mean(-1, keepdims=True) + ctx.eps)
            normal, g = centred * scale, grad_output * gain
            g = g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True)
            return g * scale, (grad_output * normal).sum(0), grad_output.sum(0)

    return LayerNorm.apply


def clamp_straight_through(lib):
    class Clamp(lib.Function):
        @staticmethod
        def forward(ctx, x, low, high):
            ctx.save_for_backward(x)
            return lib.m.clip(x, low, high)

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return grad_output + 0 * x, None, None

    return lambda x: Clamp.apply(x, -1.0, 1.0)


def reverse_gradient(lib):
    class ReverseGradient(lib.Function):
        @staticmethod
        def forward(ctx, x, factor=0.5):
            ctx.factor = factor
            return x + 0

        @staticmethod
        def backward(ctx, grad_output):
            return -ctx.factor * grad_output, None

    return ReverseGradient.apply


def straight_through_round(lib):
    class Round(lib.Function):
        @staticmethod
        def forward(ctx, x):
            return lib.m.round(x)

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output

    return Round.apply


def clip_gradient(lib):
    """Not linear in its gradient."""

    class ClipGradient(lib.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad_output):
            return lib.m.clip(grad_output, -1.5, 1.5) * grad_output

    return ClipGradient.apply


def log_sum_exp(lib):
    class LogSumExp(lib.Function):
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

    return LogSumExp.apply


def cube_with_own_double_backward(lib):
    """The idiom of torch's double-backward tutorial: a Function applied in another's backward."""

    class CubeBackward(lib.Function):
        @staticmethod
        def forward(ctx, x, grad_output):
            ctx.save_for_backward(x, grad_output)
            return 3 * x**2 * grad_output

        @staticmethod
        def backward(ctx, grad):
            x, grad_output = ctx.saved_tensors
            return 7 * x * grad * grad_output, 3 * x**2 * grad  # 7 for 6: the rule itself must be what is used

    class Cube(lib.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return CubeBackward.apply(x, grad_output)

    return Cube.apply


def complex_square(lib):
    class ComplexSquare(lib.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, grad_output):
            (z,) = ctx.saved_tensors
            return 2 * grad_output * lib.m.conj(z)

    return ComplexSquare.apply


def complex_modulus(lib):
    """Complex in, real out."""

    class Modulus(lib.Function):
        @staticmethod
        def forward(ctx, z):
            ctx.save_for_backward(z)
            return lib.m.abs(z)

        @staticmethod
        def backward(ctx, grad_output):
            (z,) = ctx.saved_tensors
            return grad_output * z / lib.m.sqrt(lib.m.real(z * lib.m.conj(z)))

    return Modulus.apply


def returned_input(lib):
    """An input as an output, with a rule that is not the identity's."""

    class Swap(lib.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return b, a * b

        @staticmethod
        def backward(ctx, grad_b, grad_product):
            a, b = ctx.saved_tensors
            return grad_product * b, 3 * grad_b + grad_product * a

    return Swap.apply


def saved_marked_output(lib):
    class Marked(lib.Function):
        @staticmethod
        def forward(ctx, x):
            square, triple = x * x, x * 3
            ctx.mark_non_differentiable(triple)
            ctx.save_for_backward(triple, square)
            return square, triple

        @staticmethod
        def backward(ctx, grad_output, _):
            triple, square = ctx.saved_tensors
            return grad_output * triple * square

    return Marked.apply


RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Away from the kinks of rounding and ReLU."""
    return np.asarray(RANDOM.uniform(0.1, 0.4, shape) + RANDOM.integers(-2, 3, shape))


LABELS = np.array([0, 2, 1])
FUNCTIONS: list[tuple[Define, tuple[np.ndarray, ...]]] = [
    (square, (numbers(4, 3),)),
    (exp, (numbers(4, 3),)),
    (linear, (numbers(4, 3), numbers(5, 3), numbers(5))),
    (linear, (numbers(4, 3), numbers(5, 3))),
    (mul_constant, (numbers(4, 3),)),
    (relu, (numbers(4, 3),)),
    (swish, (numbers(4, 3),)),
    (two_outputs, (numbers(4, 3), numbers(4, 3))),
    (cumulative_product, (numbers(5),)),
    (cross_entropy, (numbers(3, 4), LABELS)),
    (spike, (numbers(4, 3),)),
    (quantizer, (numbers(4, 3), np.array(0.37))),
    (layer_norm, (numbers(4, 3), numbers(3), numbers(3))),
    (clamp_straight_through, (numbers(4, 3),)),
    (reverse_gradient, (numbers(4, 3),)),
    (straight_through_round, (numbers(4, 3),)),
    (clip_gradient, (numbers(4, 3),)),
    (log_sum_exp, (numbers(4, 3),)),
    (cube_with_own_double_backward, (numbers(4, 3),)),
    (returned_input, (numbers(4, 3), numbers(4, 3))),
    (saved_marked_output, (numbers(4, 3),)),
    (complex_square, (numbers(3) + 1j * numbers(3),)),
    (complex_modulus, (numbers(3) + 1j * numbers(3),)),
]
SINGLE = {np.dtype(np.float64): np.float32, np.dtype(np.complex128): np.complex64}


@row("D1")
@pytest.mark.parametrize(("define", "args"), FUNCTIONS, ids=[f"{f.__name__}{len(a)}" for f, a in FUNCTIONS])
@pytest.mark.parametrize(("library", "precision"), [(Jax, "float64"), (JittedJax, "float32")])
def test_value_and_two_derivatives_as_torch(library, precision, define, args):
    if precision == "float32":
        args = [a.astype(SINGLE.get(a.dtype, a.dtype)) for a in args]
    want = Torch.derivatives(define(Torch), args, 2)
    with jax.enable_x64(precision == "float64"):
        got = library.derivatives(define(library), args, 2)
    for ours, theirs in zip(got, want, strict=True):
        assert [y.dtype for y in ours] == [y.dtype for y in theirs]
        assert_same(ours, theirs, rtol=1e-9 if precision == "float64" else 5e-5)


# ---------------------------------------------------------------------------------------------------------------------
# A. Calling

X = np.array([[0.3, -1.2], [2.1, 0.7], [-0.4, 1.6]])


@row("A1")
@pytest.mark.parametrize("kwargs", [{}, {"scale": 3.0}, {"shift": 1.0}, {"shift": 1.0, "scale": 3.0}], ids=str)
def test_keywords_and_defaults_as_torch(kwargs):
    def define(lib):
        class Affine(lib.Function):
            @staticmethod
            def forward(x, scale=2.0, shift=0.5):
                return x * x * scale + shift

            @staticmethod
            def setup_context(ctx, inputs, output):
                x, ctx.scale, _ = inputs
                ctx.save_for_backward(x)

            @staticmethod
            def backward(ctx, grad_output):
                (x,) = ctx.saved_tensors
                return 2 * x * ctx.scale * grad_output, None, None

        return lambda x: Affine.apply(x, **kwargs)

    assert_agree(define, X)


@row("A1")
def test_all_by_keyword_and_variadic_as_torch():
    def by_keyword(lib):
        apply = _keyword_product(lib)
        return lambda x, y: apply(y=y, x=x)

    def variadic(lib):
        class Total(lib.Function):
            @staticmethod
            def forward(ctx, *arrays):
                ctx.save_for_backward(*arrays)
                return sum(a * a for a in arrays)

            @staticmethod
            def backward(ctx, grad_output):
                return tuple(2 * a * grad_output for a in ctx.saved_tensors)

        return Total.apply

    assert_agree(by_keyword, X, X + 1)
    assert_agree(variadic, X, X + 1, X - 1)


def _keyword_product(lib):
    class Product(lib.Function):
        @staticmethod
        def forward(x, y):
            return x * y

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, grad_output):
            x, y = ctx.saved_tensors
            return y * grad_output, 3 * x * grad_output

    return Product.apply


@row("A2")
@LIBRARIES
def test_static_arguments_are_the_same_objects_in_torch(library):
    given = (print, {"a": 1}, [1, 2], "text", object(), slice(1, 2), None)
    received = []

    class Takes(library.Function):
        @staticmethod
        def forward(ctx, x, *rest):
            received.append(rest)
            return x * 1

        @staticmethod
        def backward(ctx, grad_output):
            return (grad_output, *(None,) * len(given))

    library.gradients(lambda x: Takes.apply(x, *given), [X])
    for static in received:
        assert static[1:3] == given[1:3]  # a list and a dict: looked into by jaxfn
        assert all(a is b for a, b in zip(static[:1] + static[3:], given[:1] + given[3:], strict=True))


@row("A3")
def test_python_numbers_steer_control_flow_as_torch():
    def define(lib):
        class Power(lib.Function):
            @staticmethod
            def forward(ctx, x, n, flip):
                assert type(n) is int and type(flip) is bool
                ctx.save_for_backward(x)
                ctx.n, ctx.sign = n, -1 if flip else 1
                result = x
                for _ in range(n - 1):
                    result = result * x
                return -result if flip else result

            @staticmethod
            def backward(ctx, grad_output):
                (x,) = ctx.saved_tensors
                return ctx.sign * ctx.n * x ** (ctx.n - 1) * grad_output, None, None

        return lambda x: Power.apply(x, 3, True)

    assert_agree(define, X)


# ---------------------------------------------------------------------------------------------------------------------
# D. Derivatives of every order


def scalar_derivatives(library: Library, f: Callable[[Any], Any], x: float, orders: int) -> list[float]:
    """The first, second, ... derivative of a function of one number."""
    found = []
    if library is Torch:
        point = torch.tensor(x, dtype=torch.float64, requires_grad=True)
        value = f(point)
        for _ in range(orders):
            (value,) = torch.autograd.grad(value, point, create_graph=True)
            found.append(value.item())
        return found
    for _ in range(orders):
        f = jax.grad(f)
        found.append(float(library.wrap(f)(x)))
    return found


@row("D1")
@LIBRARIES
def test_straight_through_second_derivative_as_torch(library):
    y = straight_through_round(library)
    np.testing.assert_allclose(scalar_derivatives(library, lambda x: (y(x) - 1) ** 2, 2.3, 2), [2, 2])


@row("D2")
@LIBRARIES
def test_saved_output_differentiates_by_the_rule_as_torch(library):
    class Round(library.Function):
        @staticmethod
        def forward(ctx, x):
            y = library.m.round(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            (y,) = ctx.saved_tensors
            return grad_output * y

    np.testing.assert_allclose(scalar_derivatives(library, lambda x: (Round.apply(x) - 1) ** 2, 2.3, 3), [4, 12, 28])


@row("D2")
@pytest.mark.parametrize("define", [exp, swish, straight_through_round, cube_with_own_double_backward])
def test_third_derivatives_as_torch(define):
    for library in (Jax, JittedJax):
        got, want = (
            scalar_derivatives(lib, lambda x: (f(x) - 1) ** 2 * x**3, 0.7, 3)
            for lib, f in ((library, define(library)), (Torch, define(Torch)))
        )
        np.testing.assert_allclose(got, want, rtol=1e-10)


@row("D8")
@LIBRARIES
def test_mixed_partials_as_torch(library):
    class Product(library.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, grad_output):
            x, w = ctx.saved_tensors
            grad_x = grad_output * w if ctx.needs_input_grad[0] else None
            grad_w = grad_output * x if ctx.needs_input_grad[1] else None
            return grad_x, grad_w

    def of(x, w):
        return Product.apply(x, w) ** 2

    if library is Torch:
        x, w = (torch.tensor(v, requires_grad=True) for v in (2.0, 3.0))
        (first,) = torch.autograd.grad(of(x, w), x, create_graph=True)
        (mixed,) = torch.autograd.grad(first, w)
    else:
        mixed = library.wrap(jax.grad(jax.grad(of), argnums=1))(2.0, 3.0)
    assert float(mixed) == 24.0


@row("D9")
def test_affine_backward_as_torch():
    def define(lib):
        class Affine(lib.Function):
            @staticmethod
            def forward(ctx, x):
                y = lib.m.sin(x)
                ctx.save_for_backward(x, y)
                return y

            @staticmethod
            def backward(ctx, grad_output):
                x, y = ctx.saved_tensors
                return grad_output * y * lib.m.cos(x) + 1

        return Affine.apply

    assert_agree(define, X)

    def composed(lib):
        f = define(lib)
        return lambda x: f(x) * f(f(x)) + x

    assert_agree(composed, X)
    for library in (Jax, JittedJax):
        got, want = (
            scalar_derivatives(lib, lambda x: f(x) ** 2 * x, 0.7, 3)
            for lib, f in ((library, define(library)), (Torch, define(Torch)))
        )
        np.testing.assert_allclose(got, want, rtol=1e-10)
