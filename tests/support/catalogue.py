"""Functions of both libraries: each is written once, and built on jaxfn or on torch.

A definition returns the Function's class in a library of `tests.support.libraries`. Arrays among the arguments are its
inputs, in double precision where they are floating; anything else is passed to `apply` unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import numpy as np

from tests.support.cases import CASES, Mul, in_library, make_args
from tests.support.gradcheck_mutants import BASES, Base
from tests.support.gradcheck_pairs import generated
from tests.support.libraries import Library, make_function, output_saved


class Shared(NamedTuple):
    """A definition, and arguments."""

    define: Callable[[Library], Any]
    args: tuple[Any, ...]


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


def rounded_and_saved(lib):
    """Its own output is its slope."""
    return make_function(lib, lib.m.round, lambda g, y: g * y, output_saved)


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


def real_times_complex(lib):
    return make_function(lib, lambda x, z: x * z, lambda g, x, z: (lib.m.real(g * lib.m.conj(z)), g * x))


RANDOM = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    """Away from the kinks of rounding and ReLU."""
    return np.asarray(RANDOM.uniform(0.1, 0.4, shape) + RANDOM.integers(-2, 3, shape))


def in_double(x: Any) -> Any:
    """An array in double precision, and anything else as it is."""
    return np.asarray(x, np.float64 if x.dtype.kind == "f" else None) if isinstance(x, (jax.Array, np.ndarray)) else x


def class_of_base(base: Base, library: Library) -> Any:
    apply = base.define(library)
    return getattr(apply, "__self__", None) or SimpleNamespace(apply=apply)


# Pytrees and named saves, which torch has not, and a saved intermediate, whose derivative torch drops
NOT_IN_TORCH = ("dense", "rotate", "swish")
FUNCTIONS = (
    {
        case.name: Shared(partial(in_library, case.function), tuple(map(in_double, (*make_args(case), *case.statics))))
        for case in CASES
        if case.name not in NOT_IN_TORCH
    }
    | {
        "cumulative_product": Shared(cumulative_product, (numbers(5),)),
        "clip_gradient": Shared(clip_gradient, (numbers(4, 3),)),
        "affine_in_the_gradient": Shared(affine_in_the_gradient, (numbers(4, 3),)),
        "rounded_and_saved": Shared(rounded_and_saved, (numbers(4, 3),)),
        "log_sum_exp": Shared(log_sum_exp, (numbers(4, 3),)),
        "cube": Shared(cube, (numbers(4, 3),)),
        "returned_input": Shared(returned_input, (numbers(4, 3), numbers(4, 3))),
        "real_times_complex": Shared(
            real_times_complex, (np.array([0.5, -1.5, 2.0]), np.array([0.3 + 1.1j, -0.7 + 0.2j, 1.5 - 0.4j]))
        ),
        "mul": Shared(partial(in_library, Mul), (numbers(4, 3), numbers(4, 3))),
    }
    | {f"{base} of gradcheck": Shared(partial(class_of_base, base), generated(base.inputs, 0)) for base in BASES}
)
