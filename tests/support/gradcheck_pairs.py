"""Functions, right and wrong, each built on both torch and jaxfn, for gradcheck to be compared with torch's.

A *definition* is a function of a library (`Jax` or `torch_library()`) that writes a Function in it and returns what
calls it. `@pair(...)` enters one in `PAIRS`, with the inputs and the check it is meant for.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

import jaxfn
from tests.support.libraries import Define, Jax, Kind, Library

Verdict = Literal["passes", "fails", "refuses"]


def verdict(library: Library, kind: Kind, f: Callable[..., Any], args: tuple[Any, ...], **keywords: Any) -> Verdict:
    """What the library's own gradcheck (or gradgradcheck) says.

    Returns:
      `"passes"`; `"fails"` where it raised its GradcheckError; `"refuses"` where something else was raised, in the
      Function or by the machinery beneath it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert library.check(kind, f, args, **keywords) is True
        except library.GradcheckError:
            return "fails"
        except (ArithmeticError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError):
            return "refuses"
    return "passes"


# ---------------------------------------------------------------------------------------------------------------------
# Inputs: functions of a random generator. Whatever else stands for an input is passed as it is.

Generate = Callable[[np.random.Generator], np.ndarray]


def real(*shape: int) -> Generate:
    """Of either sign, away from zero."""
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
    """The inputs made with that seed."""
    generator = np.random.default_rng(seed)
    return tuple(x(generator) if callable(x) else x for x in inputs)


# ---------------------------------------------------------------------------------------------------------------------
# The catalog.


@dataclass(frozen=True)
class Pair:
    """A definition and the check it is put through.

    Attributes:
      name: for test ids.
      define: writes the Function in a library.
      inputs: see `generated`.
      kind: which check.
      keywords: of that check; `argnums` is which inputs are differentiated, torch's `requires_grad`.
      ours: what jaxfn is to say, where that is not what torch says.
      because: why it differs.
    """

    name: str
    define: Define
    inputs: tuple[Any, ...]
    kind: Kind
    keywords: dict[str, Any] = field(default_factory=dict)
    ours: Verdict | None = None
    because: str = ""

    def __str__(self) -> str:
        return self.name

    def verdict(self, library: Library, **keywords: Any) -> Verdict:
        return verdict(library, self.kind, self.define(library), generated(self.inputs, 0), **self.keywords, **keywords)


PAIRS: list[Pair] = []


def pair(
    *inputs: Any, kind: Kind | None = None, ours: Verdict | None = None, because: str = "", **keywords: Any
) -> Callable[[Define], Define]:
    """Enters a definition in the catalog: for both checks unless `kind` says for which."""

    def enter(define: Define) -> Define:
        for each in ("gradcheck", "gradgradcheck") if kind is None else (kind,):
            name = f"{define.__name__}-{each}" + "".join(f"-{key}" for key in keywords)
            assert name not in {known.name for known in PAIRS}
            PAIRS.append(Pair(name, define, inputs, each, keywords, ours, because))
        return define

    return enter


first = functools.partial(pair, kind="gradcheck")
second = functools.partial(pair, kind="gradgradcheck")


def inputs_saved(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return inputs


def output_saved(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    return output if isinstance(output, tuple) else (output,)


def rule(
    library: Library,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    save: Callable[[tuple[Any, ...], Any], tuple[Any, ...]] = inputs_saved,
    materialize: bool = True,
) -> Callable[..., Any]:
    """A Function from two plain ones: `backward` gets the gradients of the outputs, then what was saved."""

    class Rule(library.Function):
        @staticmethod
        def forward(ctx, *inputs):
            ctx.set_materialize_grads(materialize)
            output = forward(*inputs)
            ctx.save_for_backward(*save(inputs, output))
            return output

        @staticmethod
        def backward(ctx, *grad_outputs):
            return backward(*grad_outputs, *ctx.saved_tensors)

    return Rule.apply


# ---------------------------------------------------------------------------------------------------------------------
# Element by element.


@pair(real(3, 4))
def square(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g)


@pair(real(3, 4))
def square_without_the_factor(lib):
    return rule(lib, lambda x: x * x, lambda g, x: x * g)


@first(real(3, 4), ours="fails", because="torch compares within a relative 1e-3, jaxfn also with exact derivatives")
def square_off_by_half_a_thousandth(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * (1 + 5e-4))


@first(real(3, 4), rtol=0.05)
def square_off_by_less_than_asked_for(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * 1.02)


@first(real(3, 4), rtol=1e-5, atol=1e-7)
def square_off_by_more_than_asked_for(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * (1 + 5e-4))


@first(real(3, 4))
def exp_saving_its_output(lib):
    return rule(lib, lib.m.exp, lambda g, y: y * g, output_saved)


@first(real(3, 4))
def exp_saving_its_input(lib):
    return rule(lib, lib.m.exp, lambda g, x: x * g)


@pair(real(3, 4))
def tanh_with_a_constant_output(lib):
    """Right once, wrong twice: the saved output is cut off."""
    return rule(lib, lib.m.tanh, lambda g, y: g * (1 - lib.detach(y) ** 2), output_saved)


@first(real(5))
def cos_with_the_wrong_sign(lib):
    return rule(lib, lib.m.cos, lambda g, x: g * lib.m.sin(x))


@pair(real(2, 3))
def relu(lib):
    return rule(lib, lambda x: lib.m.where(x > 0, x, 0.0), lambda g, x: lib.m.where(x > 0, g, 0.0))


@first(np.array([0.7, 0.0, -0.4]))
def relu_at_its_kink(lib):
    return rule(lib, lambda x: lib.m.where(x > 0, x, 0.0), lambda g, x: lib.m.where(x > 0, g, 0.0))


@first(np.array([1e-3, 1e-4, 1.0]))
def sqrt_near_zero(lib):
    return rule(lib, lib.m.sqrt, lambda g, y: g / (2 * y), output_saved)


@first(np.array([1e-6, 1.0]))
def sqrt_a_step_from_zero(lib):
    return rule(lib, lib.m.sqrt, lambda g, y: g / (2 * y), output_saved)


@first(np.array([0.5, 0.0, 2.0]))
def sinc_not_a_number_at_zero(lib):
    def forward(x):
        return lib.m.where(x == 0, 1.0, lib.m.sin(x) / lib.m.where(x == 0, 1.0, x))

    return rule(lib, forward, lambda g, x: g * (lib.m.cos(x) - lib.m.sin(x) / x) / x)


@first(np.array([0.5, 0.0, 2.0]))
def sinc_with_care_at_zero(lib):
    def forward(x):
        return lib.m.where(x == 0, 1.0, lib.m.sin(x) / lib.m.where(x == 0, 1.0, x))

    def backward(g, x):
        safe = lib.m.where(x == 0, 1.0, x)
        return g * lib.m.where(x == 0, 0.0, (lib.m.cos(safe) - lib.m.sin(safe) / safe) / safe)

    return rule(lib, forward, backward)


@pair(real(3))
def straight_through_round(lib):
    return rule(lib, lib.m.round, lambda g, x: g)


@pair(real(3))
def straight_through_sign_times_its_output(lib):
    return rule(lib, lib.m.sign, lambda g, y: g * y, output_saved)


@pair(positive(4), positive(4))
def power(lib):
    def backward(g, x, p):
        return g * p * x ** (p - 1), g * x**p * lib.m.log(x)

    return rule(lib, lambda x, p: x**p, backward)


@first(positive(4), positive(4))
def power_with_its_gradients_swapped(lib):
    def backward(g, x, p):
        return g * x**p * lib.m.log(x), g * p * x ** (p - 1)

    return rule(lib, lambda x, p: x**p, backward)


@first(real(3))
def affine_in_its_gradient(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g + 1)


@first(real(3), ours="fails", because="torch looks at basis vectors alone, jaxfn at a combination of two vectors too")
def quadratic_in_its_gradient(lib):
    """Right for every basis vector, wrong for anything else."""
    return rule(lib, lambda x: 3 * x, lambda g, x: 3 * g * g)


@first(real())
def of_a_scalar(lib):
    return rule(lib, lambda x: x**3, lambda g, x: 3 * x * x * g)


@first(np.zeros((0, 3)))
def of_nothing(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g)


@first(np.arange(1.0, 13.0).reshape(3, 4).T, np.arange(24.0).reshape(4, 6)[:, ::2])
def of_strided_arrays(lib):
    return rule(lib, lambda x, y: lib.m.sin(x) * y, lambda g, x, y: (g * lib.m.cos(x) * y, g * lib.m.sin(x)))


@first(np.float32([0.5, -1.25, 2.0]), eps=1e-2, atol=1e-2, rtol=1e-2)
def of_single_precision(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g)


@first(np.float32([0.5, -1.25, 2.0]), eps=1e-2, atol=1e-2, rtol=1e-2)
def of_single_precision_wrong(lib):
    return rule(lib, lambda x: x * x, lambda g, x: x * g)


# ---------------------------------------------------------------------------------------------------------------------
# Matrices, broadcasting, reductions.


def linear_rule(lib, grad_weight, grad_bias):
    """torch's own example; the gradients of weight and bias are given."""

    class Linear(lib.Function):
        @staticmethod
        def forward(ctx, input, weight, bias=None):
            ctx.save_for_backward(input, weight, bias)
            output = input @ weight.T
            return output if bias is None else output + bias

        @staticmethod
        def backward(ctx, grad_output):
            input, weight, bias = ctx.saved_tensors
            to_input = to_weight = to_bias = None
            if ctx.needs_input_grad[0]:
                to_input = grad_output @ weight
            if ctx.needs_input_grad[1]:
                to_weight = grad_weight(grad_output, input)
            if bias is not None and ctx.needs_input_grad[2]:
                to_bias = grad_bias(grad_output)
            return to_input, to_weight, to_bias

    return Linear.apply


@pair(real(2, 3), real(4, 3), real(4))
@first(real(2, 3), real(4, 3), real(4), eps=1e-6, atol=1e-4)
def linear(lib):
    return linear_rule(lib, lambda g, x: g.T @ x, lambda g: g.sum(0))


@first(real(2, 3), real(4, 3), None)
def linear_without_bias(lib):
    return linear_rule(lib, lambda g, x: g.T @ x, lambda g: g.sum(0))


@first(real(3, 3), real(3, 3), real(3))
def linear_transposed(lib):
    return linear_rule(lib, lambda g, x: x.T @ g, lambda g: g.sum(0))


@first(real(3, 3), real(3, 3), real(3))
@first(real(3, 3), real(3, 3), real(3), argnums=(0, 2))
def linear_of_a_frozen_wrong_weight(lib):
    return linear_rule(lib, lambda g, x: 2 * g.T @ x, lambda g: g.sum(0))


@first(real(3, 3), real(3, 3), real(3))
def linear_without_the_gradient_of_its_bias(lib):
    return linear_rule(lib, lambda g, x: g.T @ x, lambda g: None)


@first(real(2, 3), real(4, 3), real(4))
def linear_with_a_gradient_of_wrong_shape(lib):
    return linear_rule(lib, lambda g, x: x.T @ g, lambda g: g.sum(0))


@first(real(3, 4), real(4))
def product_summed_by_the_library(lib):
    """The gradient of the vector has the matrix's shape; both libraries sum it."""
    return rule(lib, lambda x, v: x * v, lambda g, x, v: (g * v, g * x))


@first(real(4, 4), real(4))
def product_summed_over_the_wrong_axis(lib):
    return rule(lib, lambda x, v: x * v, lambda g, x, v: (g * v, (g * x).sum(1)))


@first(real(3, 4), real(3, 1))
def product_not_summed(lib):
    return rule(lib, lambda x, v: x * v, lambda g, x, v: (g * v, (g * x)[:, :1]))


@first(real(3, 4))
def mean_of_rows(lib):
    def backward(g, x):
        return lib.m.broadcast_to(g[:, None], x.shape) / x.shape[1]

    return rule(lib, lambda x: x.mean(1), backward)


@first(real(3, 4))
def mean_of_rows_undivided(lib):
    return rule(lib, lambda x: x.mean(1), lambda g, x: lib.m.broadcast_to(g[:, None], x.shape))


@pair(distinct(3, 4))
def largest_of_rows(lib):
    def backward(g, x):
        return lib.m.where(x == lib.m.amax(x, 1)[:, None], g[:, None], 0.0)

    return rule(lib, lambda x: lib.m.amax(x, 1), backward)


@first(real(5))
def cumulative_sum(lib):
    def backward(g, x):
        return lib.m.flip(lib.m.cumsum(lib.m.flip(g, (0,)), 0), (0,))

    return rule(lib, lambda x: lib.m.cumsum(x, 0), backward)


@first(real(5))
def cumulative_sum_not_reversed(lib):
    return rule(lib, lambda x: lib.m.cumsum(x, 0), lambda g, x: lib.m.cumsum(g, 0))


@first(real(2, 4))
def softmax(lib):
    def backward(g, y):
        return y * (g - (g * y).sum(-1, keepdims=True))

    return rule(lib, lambda x: lib.nn.softmax(x, -1), backward, output_saved)


@first(real(2, 4))
def softmax_diagonal_only(lib):
    return rule(lib, lambda x: lib.nn.softmax(x, -1), lambda g, y: g * y * (1 - y), output_saved)


def layer_norm_rule(lib, term):
    """Layer norm; `term` is what is subtracted beside the mean of the gradients."""

    def normal_and_scale(x):
        centred = x - x.mean(-1, keepdims=True)
        scale = 1 / lib.m.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-3)
        return centred * scale, scale

    def backward(g, x, gain, bias):
        normal, scale = normal_and_scale(x)
        h = g * gain
        h = h - h.mean(-1, keepdims=True) - term(h, normal)
        return h * scale, (g * normal).sum(0), g.sum(0)

    return rule(lib, lambda x, gain, bias: normal_and_scale(x)[0] * gain + bias, backward)


@first(real(3, 4), positive(4), real(4))
def layer_norm(lib):
    return layer_norm_rule(lib, lambda h, normal: normal * (h * normal).mean(-1, keepdims=True))


@first(real(3, 4), positive(4), real(4))
def layer_norm_of_constant_variance(lib):
    return layer_norm_rule(lib, lambda h, normal: 0.0)


def convolution_rule(lib, grad_input):
    """Five windows of three; the gradient of the signal is given."""

    def forward(x, w):
        return sum(w[k] * x[k : k + 5] for k in range(3))

    def backward(g, x, w):
        return grad_input(g, x, w), lib.m.stack([(g * x[k : k + 5]).sum() for k in range(3)])

    return rule(lib, forward, backward)


def spread(lib, g, k):
    """The five gradients at the places k to k + 4 of seven."""
    return lib.m.concatenate([0 * g[:k], g, 0 * g[: 2 - k]])


@first(real(7), real(3))
def convolution(lib):
    return convolution_rule(lib, lambda g, x, w: sum(w[k] * spread(lib, g, k) for k in range(3)))


@first(real(7), real(3))
def convolution_flipped(lib):
    return convolution_rule(lib, lambda g, x, w: sum(w[2 - k] * spread(lib, g, k) for k in range(3)))


def solve_rule(lib, adjoint):
    """`linalg.solve`, differentiated implicitly."""

    def backward(g, a, b, y):
        u = lib.m.linalg.solve(adjoint(a), g)
        return -lib.m.outer(u, y), u

    return rule(lib, lib.m.linalg.solve, backward, lambda inputs, output: (*inputs, output))


@first(regular(3), real(3))
def solve(lib):
    return solve_rule(lib, lambda a: a.T)


@first(regular(3), real(3))
def solve_untransposed(lib):
    return solve_rule(lib, lambda a: a)


def root_rule(lib, derivative):
    """The root of y³ + y = x by Newton's method, in a loop that JAX cannot differentiate in reverse."""

    def forward(x):
        start = (x, 0 * x + 1)
        return lib.while_loop(
            lambda state: lib.m.abs(state[1]).max() > 1e-14,
            lambda state: newton_step(x, state[0]),
            start,
        )[0]

    def newton_step(x, y):
        step = (y**3 + y - x) / (3 * y * y + 1)
        return y - step, step

    return rule(lib, forward, lambda g, y: g * derivative(y), output_saved)


@pair(real(4))
def root_differentiated_implicitly(lib):
    return root_rule(lib, lambda y: 1 / (3 * y * y + 1))


@first(real(4))
def root_with_a_term_dropped(lib):
    return root_rule(lib, lambda y: 1 / (3 * y * y))


# ---------------------------------------------------------------------------------------------------------------------
# Indices.


@first(real(4, 2), integers(4, 6))
def lookup(lib):
    return rule(lib, lambda table, i: table[i], lambda g, table, i: (lib.scatter_add(4, i, g), None))


@first(real(4, 2), integers(4, 6))
def lookup_off_by_one(lib):
    return rule(lib, lambda table, i: table[i], lambda g, table, i: (lib.scatter_add(4, (i + 1) % 4, g), None))


@first(real(4, 2), np.array([0, 1, 1, 3]))
def lookup_that_overwrites(lib):
    return rule(lib, lambda table, i: table[i], lambda g, table, i: (lib.scatter_set(4, i, g), None))


@first(np.array([0, 2, 2, 1]), real(4, 2))
def segment_sum(lib):
    return rule(lib, lambda i, x: lib.scatter_add(3, i, x), lambda g, i, x: (None, g[i]))


def cross_entropy_rule(lib, delta):
    def forward(logits, labels):
        picked = labels[:, None] == lib.m.arange(logits.shape[1])
        return -lib.m.where(picked, lib.nn.log_softmax(logits, -1), 0.0).sum() / logits.shape[0]

    def backward(g, logits, labels):
        picked = labels[:, None] == lib.m.arange(logits.shape[1])
        return g * delta(picked, lib.nn.softmax(logits, -1)) / logits.shape[0], None

    return rule(lib, forward, backward)


@first(real(3, 4), integers(4, 3))
def cross_entropy(lib):
    return cross_entropy_rule(lib, lambda picked, p: lib.m.where(picked, p - 1, p))


@first(real(3, 4), integers(4, 3))
def cross_entropy_without_its_labels(lib):
    return cross_entropy_rule(lib, lambda picked, p: p)


@pair(distinct(5))
def sort_and_order(lib):
    """An integer output beside the sorted values."""

    def forward(x):
        order = lib.m.argsort(x)
        return x[order], order

    return rule(lib, forward, lambda g, _, order: lib.scatter_set(5, order, g), lambda inputs, output: (output[1],))


@first(distinct(5))
def sort_unsorted_the_wrong_way(lib):
    def forward(x):
        order = lib.m.argsort(x)
        return x[order], order

    return rule(lib, forward, lambda g, _, order: g[order], lambda inputs, output: (output[1],))


# ---------------------------------------------------------------------------------------------------------------------
# Outputs, None, static arguments, symbolic zeros.


def two_outputs_rule(lib, of_first, of_second):
    """(sin(x) y, cos(x) + y²); how each output's gradient reaches x is given."""

    def backward(g, h, x, y):
        return of_first(g, x, y) + of_second(h, x), g * lib.m.sin(x) + 2 * h * y

    return rule(lib, lambda x, y: (lib.m.sin(x) * y, lib.m.cos(x) + y * y), backward)


@first(real(3), real(3))
def two_outputs(lib):
    return two_outputs_rule(lib, lambda g, x, y: g * lib.m.cos(x) * y, lambda h, x: -h * lib.m.sin(x))


@first(real(3), real(3))
def two_outputs_the_second_ignored(lib):
    return two_outputs_rule(lib, lambda g, x, y: g * lib.m.cos(x) * y, lambda h, x: 0 * h)


@first(real(3), real(3))
def two_outputs_the_second_wrong(lib):
    return two_outputs_rule(lib, lambda g, x, y: g * lib.m.cos(x) * y, lambda h, x: h * lib.m.sin(x))


def undefined_rule(lib, of_first, of_second):
    """(x², 3x) without materialized gradients."""

    def backward(g, h, x):
        return of_first(g, x) + of_second(h)

    return rule(lib, lambda x: (x * x, 3 * x), backward, materialize=False)


@pair(real(3))
def undefined_gradients_handled(lib):
    return undefined_rule(lib, lambda g, x: 0 * x if g is None else 2 * x * g, lambda h: 0.0 if h is None else 3 * h)


@first(real(3))
def undefined_gradients_not_handled(lib):
    return undefined_rule(lib, lambda g, x: 2 * x * g, lambda h: 3 * h)


@first(real(3))
def undefined_gradients_taken_for_ones(lib):
    return undefined_rule(lib, lambda g, x: 2 * x * (1 if g is None else g), lambda h: 0.0 if h is None else 3 * h)


def marked_rule(lib, mark):
    class Marked(lib.Function):
        @staticmethod
        def forward(ctx, x):
            result, rounded = x * x, lib.m.round(x)
            ctx.save_for_backward(x)
            ctx.mark_non_differentiable(*mark(result, rounded))
            return result, rounded

        @staticmethod
        def backward(ctx, g, _):
            (x,) = ctx.saved_tensors
            return 2 * x * g

    return Marked.apply


@pair(real(3))
def an_output_without_derivative(lib):
    return marked_rule(lib, lambda result, rounded: (rounded,))


@first(real(3))
def the_wrong_output_without_derivative(lib):
    """The one that has a derivative is marked, and `backward` is never asked for it."""

    class Marked(lib.Function):
        @staticmethod
        def forward(ctx, x):
            result = x * x
            ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        def backward(ctx, g):
            return None

    return Marked.apply


@pair(real(3), 2.5)
def a_static_argument(lib):
    class Scale(lib.Function):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, g):
            return g * ctx.factor, None

    return Scale.apply


@first(real(3), real(3))
def none_where_there_is_a_gradient(lib):
    return rule(lib, lambda x, y: x * y, lambda g, x, y: (g * y, None))


@pair(real(3), real(3))
def none_where_there_is_none(lib):
    return rule(lib, lambda x, y: x * lib.m.sign(y), lambda g, x, y: (g * lib.m.sign(y), None))


@first(real(3), real(3))
def too_few_gradients(lib):
    return rule(lib, lambda x, y: x * y, lambda g, x, y: g * y)


@first(real(3))
def too_many_nones(lib):
    return rule(lib, lambda x: x * x, lambda g, x: (2 * x * g, None, None))


@first(real(3))
def separate_style(lib):
    class Cube(lib.Function):
        @staticmethod
        def forward(x):
            return x**3, x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.mark_non_differentiable(output[1])
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g, _):
            (x,) = ctx.saved_tensors
            return 3 * x * x * g

    return lambda x: Cube.apply(x)[0]


@pair({"weight": np.array([[0.4, -0.7], [1.1, 0.3]]), "bias": np.array([0.2, -0.5])}, real(3, 2))
def layer_of_a_dictionary(lib):
    """torch gets the dictionary's leaves one by one."""
    return dense_rule(lib, lambda g: g.sum(0))


@first({"weight": np.array([[0.4, -0.7], [1.1, 0.3]]), "bias": np.array([0.2, -0.5])}, real(2, 2))
def layer_of_a_dictionary_summed_over_the_wrong_axis(lib):
    return dense_rule(lib, lambda g: g.sum(1))


def dense_rule(lib, grad_bias):
    if lib is not Jax:
        return rule(lib, lambda w, b, x: x @ w + b, lambda g, w, b, x: (x.T @ g, grad_bias(g), g @ w.T))

    class Dense(jaxfn.Function):
        @staticmethod
        def forward(ctx, parameters, x):
            ctx.parameters, ctx.x = parameters, x
            return x @ parameters["weight"] + parameters["bias"]

        @staticmethod
        def backward(ctx, g):
            return {"weight": ctx.x.T @ g, "bias": grad_bias(g)}, g @ ctx.parameters["weight"].T

    return Dense.apply


# ---------------------------------------------------------------------------------------------------------------------
# Complex numbers.


@pair(complex_(3))
def complex_square(lib):
    return rule(lib, lambda z: z * z, lambda g, z: 2 * g * lib.m.conj(z))


@first(complex_(3))
def complex_square_unconjugated(lib):
    return rule(lib, lambda z: z * z, lambda g, z: 2 * g * z)


@first(complex_(3))
def conjugate(lib):
    return rule(lib, lambda z: lib.m.conj(z) * 1, lambda g, z: lib.m.conj(g) * 1)


@first(complex_(3))
def conjugate_unconjugated(lib):
    return rule(lib, lambda z: lib.m.conj(z) * 1, lambda g, z: g)


@pair(complex_(3))
def complex_abs(lib):
    return rule(lib, lib.m.abs, lambda g, z: g * z / lib.m.abs(z))


@first(complex_(3))
def complex_abs_squared_halved(lib):
    return rule(lib, lambda z: (z * lib.m.conj(z)).real, lambda g, z: g * z)


@first(complex_(2, 3), complex_(3, 2))
def complex_matmul(lib):
    return rule(lib, lambda a, b: a @ b, lambda g, a, b: (g @ lib.m.conj(b.T), lib.m.conj(a.T) @ g))


@first(complex_(2, 3), complex_(3, 2))
def complex_matmul_transposed_only(lib):
    return rule(lib, lambda a, b: a @ b, lambda g, a, b: (g @ b.T, a.T @ g))


def phase_rule(lib, part):
    return rule(lib, lambda t: lib.m.exp(1j * t), lambda g, t: part(g * lib.m.conj(1j * lib.m.exp(1j * t))))


@first(real(3))
def phase_of_a_real_angle(lib):
    return phase_rule(lib, lambda z: z.real)


@first(real(3))
def phase_with_the_imaginary_part(lib):
    return phase_rule(lib, lambda z: z.imag)


@first(real(3))
def complex_gradient_for_a_real_input(lib):
    return phase_rule(lib, lambda z: z)


@first(complex_(3), positive(3))
def complex_and_real_inputs(lib):
    return rule(lib, lambda z, x: z * x, lambda g, z, x: (g * x, (g * lib.m.conj(z)).real))


# ---------------------------------------------------------------------------------------------------------------------
# Second derivatives.


def saved_intermediate(lib):
    class Gate(lib.Function):
        @staticmethod
        def forward(ctx, x):
            gate = lib.m.tanh(x)
            ctx.save_for_backward(x, gate)
            return x * gate

        @staticmethod
        def backward(ctx, g):
            x, gate = ctx.saved_tensors
            return g * (gate + x * (1 - gate * gate))

    return Gate.apply


first(real(3))(saved_intermediate)
second(real(3), ours="passes", because="torch drops the derivative of a saved intermediate, jaxfn has it")(
    saved_intermediate
)


@pair(real(3))
def once_differentiable(lib):
    class Cube(lib.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        @lib.once_differentiable
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 3 * x * x * g

    return Cube.apply


@second(real(3), real(3))
def mixed_derivative_cut_off(lib):
    return rule(lib, lambda x, y: x * y, lambda g, x, y: (g * lib.detach(y), g * x))


@second(real(3))
def gradient_cut_off(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * lib.detach(g))


@second(real(3), grad_outputs=(np.array([0.5, -1.0, 2.0]),))
def cube_with_given_gradients(lib):
    return rule(lib, lambda x: x**3, lambda g, x: 3 * x * x * g)


def nested_rule(lib, slope):
    """`backward` applies another Function, whose own derivative is `slope`."""
    cosine = rule(lib, lib.m.cos, lambda g, x: g * slope(x))
    return rule(lib, lib.m.sin, lambda g, x: g * cosine(x))


@pair(real(3))
def nested(lib):
    return nested_rule(lib, lambda x: -lib.m.sin(x))


@pair(real(3))
def nested_with_a_wrong_derivative(lib):
    return nested_rule(lib, lib.m.sin)


@pair(real(3))
def nested_in_forward(lib):
    """The outer rule is right, and the inner one, which nobody differentiates, is wrong."""
    inner = rule(lib, lib.m.sin, lambda g, x: 7 * g)
    return rule(lib, lambda x: inner(x) * x, lambda g, x: g * (lib.m.sin(x) + x * lib.m.cos(x)))


@pair(real(3))
def inside_a_plain_function(lib):
    cube = rule(lib, lambda x: x**3, lambda g, x: 3 * x * x * g)
    return lambda x: lib.m.tanh(cube(x)) * x


@first(real(3))
def wrong_inside_a_plain_function(lib):
    cube = rule(lib, lambda x: x**3, lambda g, x: 3 * x * g)
    return lambda x: lib.m.tanh(cube(x)) * x


# ---------------------------------------------------------------------------------------------------------------------
# What cannot be traced or batched, what differs from call to call, and the optional checks.


@first(real(3))
def forward_on_the_host(lib):
    return rule(lib, lambda x: lib.on_host(np.sin, x), lambda g, x: g * lib.m.cos(x))


@first(real(3))
def forward_on_the_host_wrong(lib):
    return rule(lib, lambda x: lib.on_host(np.sin, x), lambda g, x: g * lib.m.sin(x))


@first(positive(3))
def python_branch_in_forward(lib):
    return rule(lib, lambda x: x * x if float(x.sum()) > 0 else -x, lambda g, x: 2 * x * g)


@first(positive(3))
def python_branch_in_forward_wrong(lib):
    return rule(lib, lambda x: x * x if float(x.sum()) > 0 else -x, lambda g, x: -g)


@first(positive(3))
@first(positive(3), check_batched_grad=True)
def python_branch_in_backward(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g if float(g.sum()) != 0 else 0 * g)


@first(positive(3), check_batched_grad=True)
def cube_with_batched_gradients(lib):
    return rule(lib, lambda x: x**3, lambda g, x: 3 * x * x * g)


@first(real(3), check_grad_dtypes=True)
def square_with_its_dtype(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g)


@first(real(3))
@first(
    real(3),
    check_grad_dtypes=True,
    ours="fails",
    because="torch's engine casts the gradient before its gradcheck looks; jaxfn looks at what backward returned",
)
def gradient_in_single_precision(lib):
    return rule(lib, lambda x: x * x, lambda g, x: lib.as_float32(2 * x * g))


def noisy_rule(lib, size):
    calls = itertools.count()
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g * (1 + size * next(calls)))


@first(real(3))
@first(real(3), nondet_tol=1e-6)
def slightly_different_each_time(lib):
    return noisy_rule(lib, 1e-11)


@first(real(3), nondet_tol=1e-6)
def different_each_time(lib):
    return noisy_rule(lib, 1e-2)


@first(real(3))
def forward_different_each_time(lib):
    calls = itertools.count()
    return rule(lib, lambda x: x * x + 1e-3 * next(calls), lambda g, x: 2 * x * g)


@first(real(3), check_forward_ad=True)
def forward_mode_without_jvp(lib):
    return rule(lib, lambda x: x * x, lambda g, x: 2 * x * g)
