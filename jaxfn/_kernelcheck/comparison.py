"""A kernel and its reference, in one dtype and for arguments of one shape: results and expected results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import Arguments
from jaxfn._check.modes import PartialDerivative, parts
from jaxfn._check.staging import stage
from jaxfn._compat import compile_as_written, compile_quickly
from jaxfn._kernelcheck.arguments import Arrays, add_rounding_noise, rounded, sample_nearby
from jaxfn._kernelcheck.error_bounds import ExpectedArray, ExpectedIntegers, expect
from jaxfn._kernelcheck.float64 import promote_to_float64
from jaxfn._kernelcheck.implementations import Implementation, KernelError, OutputTypes
from jaxfn._kernelcheck.report import KernelcheckRow
from jaxfn._tree import is_inexact

_FEW_DRAWS = 2
_MAX_NUMBERS = 1 << 20  # in all samples of all inputs and outputs


@dataclass(frozen=True)
class Samples:
    """Samples of inputs and cotangents."""

    xs: Arrays  # floating-point inputs, rounded to the dtype, in float64, each of shape (draws, *shape)
    cotangents: Arrays  # cotangents of the floating-point outputs, in the same form


Named = dict[str, Any]
"""Arrays, or what is expected of them, by their names in reports: outputs, gradients, and outputs of integers."""


@dataclass
class KernelComparison:
    """A comparison of a kernel with a reference."""

    kernel: Callable[..., Any]  # kernel, reference: the functions
    reference: Callable[..., Any]
    arguments: Arguments  # the arguments of both
    dtype: Any  # the dtype of floating-point arrays
    max_draws: int  # the largest number of samples
    factor: float  # see `kernelcheck`
    generator: np.random.Generator  # the source of random numbers
    exact: Float64Reference  # the reference in float64, shared by all dtypes

    def with_arguments(self, arguments: Arguments) -> KernelComparison:
        """Returns the comparison for other arguments."""
        return replace(self, arguments=arguments, exact=Float64Reference(self.reference, arguments))

    @cached_property
    def implementation(self) -> Implementation:
        """The kernel."""
        return Implementation(self.kernel, self.arguments)

    @cached_property
    def outputs(self) -> OutputTypes:
        """The types of the kernel's outputs."""
        try:
            return self.implementation.outputs(self.dtype)
        except Exception as error:
            raise KernelError(error) from error

    @cached_property
    def reference_outputs(self) -> OutputTypes:
        """The types of the reference's outputs."""
        return Implementation(self.reference, self.arguments).outputs(self.dtype)

    @cached_property
    def parts(self) -> list[PartialDerivative]:
        """The parts of the gradients that a rule may compute differently."""
        inputs = [self.arguments.names[i] for i in self.arguments.differentiated]
        return parts(inputs, self.outputs.names[: len(self.outputs.floats)], is_forward=False)

    @cached_property
    def has_derivative(self) -> list[bool]:
        """Whether the reference has a derivative with respect to each floating-point input; a mask has none."""
        arguments = replace(self.arguments, chosen=frozenset(self.arguments.owners))
        reference = Implementation(self.reference, arguments)
        try:
            gradients = stage(lambda *args: reference.run(*args)[2], *self.arrays(self.main, 0))
        except Exception:  # of an input that argnums= excludes
            return [True] * len(self.arguments.values)
        return [gradients.output_alone(i).depends_on_inputs for i in range(len(self.arguments.values))]

    @cached_property
    def draws(self) -> int:
        """The number of samples, fewer for large arrays: they have many entries each, and would need much memory."""
        arrays = [*self.arguments.values, *self.outputs.floats]
        size = sum(math.prod(array.shape) for array in arrays)
        return min(self.max_draws, max(_FEW_DRAWS, _MAX_NUMBERS // max(size, 1)))

    @cached_property
    def compiled_kernel(self) -> Callable[..., Any]:
        """The kernel for all samples, compiled."""
        return jax.jit(self.implementation.mapped)

    @cached_property
    def _compiled_reference(self) -> Callable[..., Any]:
        reference = Implementation(self.reference, self.arguments)
        return compile_as_written(jax.jit(reference.mapped).lower(*self.arrays(self.main)))

    @cached_property
    def main(self) -> Samples:
        """Samples of the inputs of `kernelcheck`."""
        return self.sample(self.arguments.values)

    @cached_property
    def expected(self) -> Named:
        """The expected results for `main`."""
        return self.expect(self.main)

    def sample(self, values: Sequence[Any]) -> Samples:
        """Returns samples near some values."""
        xs = sample_nearby(values, self.draws, self.dtype, self.generator)
        cotangents = [
            rounded(self.generator.standard_normal((self.draws, *y.shape)), y.dtype) for y in self.outputs.floats
        ]
        return Samples(xs, cotangents)

    def arrays(self, samples: Samples, draw: int | None = None) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the arrays that an implementation takes, for all samples or for one."""
        at: Any = slice(None) if draw is None else draw
        xs = [jnp.asarray(x[at].astype(self.dtype)) for x in samples.xs]
        cotangents = [
            jnp.asarray(ct[at].astype(y.dtype)) for ct, y in zip(samples.cotangents, self.outputs.floats, strict=True)
        ]
        return list(self.arguments.others), xs, cotangents

    def named(self, results: tuple[Arrays, Arrays, Arrays], inputs: Sequence[int] | None = None) -> Named:
        """Returns results of `Implementation.run` by name, on the host; `inputs` are the indices of the gradients."""
        floats, others, gradients = results
        names, of_gradients = self.outputs.names, self.gradient_names()
        of_gradients = of_gradients[: len(gradients)] if inputs is None else [of_gradients[i] for i in inputs]
        in_order = [*names[: len(floats)], *of_gradients, *names[len(floats) :]]
        return dict(zip(in_order, map(np.asarray, [*floats, *gradients, *others]), strict=True))

    def results(self, run: Callable[..., Any], *args: Any, inputs: Sequence[int] | None = None) -> Named:
        """Runs a function like `Implementation.run` of the kernel; see `named`.

        Raises:
          KernelError: it raised an error.
        """
        try:
            return self.named(run(*args), inputs)
        except Exception as error:
            raise KernelError(error) from error

    def first_results(self, run: Callable[..., Any], *args: Any) -> Named:
        """Returns the results for the first sample, or for `args`, with an axis of size 1 for samples."""
        found = self.results(run, *(args or self.arrays(self.main, 0)))
        return {name: array[None] for name, array in found.items()}

    def first_inputs(self) -> tuple[Any, ...]:
        """Returns the arguments of the kernel for the first sample."""
        fixed, xs, _ = self.arrays(self.main, 0)
        return self.arguments.call(lambda *args: args, xs, fixed)

    @cached_property
    def plain(self) -> Named:
        """The results of the compiled kernel for `main`."""
        return self.run(self.main)

    @cached_property
    def eager(self) -> Named:
        """The kernel's results for the first sample, without `jax.jit`."""
        return self.first_results(self.implementation.run)

    def run(self, samples: Samples) -> Named:
        """Runs the compiled kernel on all samples."""
        return self.results(self.compiled_kernel, *self.arrays(samples))

    @cached_property
    def _of_main(self) -> Named:
        return self._compute_expected(self.main)

    def expect(self, samples: Samples) -> Named:
        """Returns the expected results for some samples."""
        expected = self._of_main if samples is self.main else self._compute_expected(samples)
        outputs = [expected[name].exact for name in self.outputs.names[: len(samples.cotangents)]]
        pairs = zip(samples.cotangents, outputs, strict=True)
        size = _largest(samples.xs) * max((_largest([ct]) * _largest([y]) for ct, y in pairs), default=1.0)
        zeros = [name for name in self.gradient_names() if self._of_main[name].is_exact_zero]
        return expected | {name: expected[name].with_cancellation(size) for name in zeros}

    def _compute_expected(self, samples: Samples) -> Named:
        """Runs the reference in float64 and in the dtype, and again in float64 on inputs with rounding noise."""
        noisy = [add_rounding_noise(arrays, self.dtype, self.generator) for arrays in (samples.xs, samples.cotangents)]
        # A condition on an input, such as `mask > 0`, is not a rounding error.
        noisy[0] = [
            moved if has else x for moved, x, has in zip(noisy[0], samples.xs, self.has_derivative, strict=True)
        ]
        nearby = self.named(self.exact.results(*noisy))
        exact = self.named(self.exact.results(samples.xs, samples.cotangents))
        reference = self.named(self._compiled_reference(*self.arrays(samples)))
        return {
            name: expect(array, reference[name], nearby[name], self.dtype)
            if is_inexact(array.dtype)
            else ExpectedIntegers(array, reference[name])
            for name, array in exact.items()
        }

    def gradient_names(self) -> list[str]:
        """Returns the names of the gradients in reports."""
        return [f"gradient of {self.arguments.names[i]}" for i in self.arguments.differentiated]

    def row(self, check: str, what: str, result: KernelcheckRow) -> KernelcheckRow:
        """Returns the result for one array as a row of the report."""
        return replace(result, check=check, what=what, dtype=str(np.dtype(self.dtype)))

    def message(self, check: str, what: str, message: str, *, passed: bool = False) -> KernelcheckRow:
        """Returns a row of the report with a message; without a message the row passes."""
        return self.row(check, what, KernelcheckRow(passed=passed or not message, message=message))

    def compare(
        self,
        check: str,
        results: Named,
        expected: Named,
        draws: Sequence[int] | None = None,
        suffix: str = "",
        only_overflow: bool = False,
    ) -> list[KernelcheckRow]:
        """Returns rows for the results for some samples.

        Args:
          check: the name of the check.
          results: the results of the kernel, which may lack some.
          expected: the expected results.
          draws: the samples that `results` has. Default: all.
          suffix: the conditions of the check, as text.
          only_overflow: whether values must only be finite.
        """
        rows: list[KernelcheckRow] = []
        for name, values in results.items():
            e = expected[name] if draws is None else expected[name].at(draws)
            result = e.overflow(values) if only_overflow else e.compare(values, self.factor)
            under = "gradients" if check == "outputs" and name in self.gradient_names() else check
            rows.append(self.row(under, name + suffix, result))
        return rows

    def compare_runs(
        self, condition: str, first: Named, second: Named, draws: Sequence[int] | None = None
    ) -> list[KernelcheckRow]:
        """Returns a row for each array of two runs, which fails unless they are bitwise equal."""
        rows: list[KernelcheckRow] = []
        for name, one in first.items():
            if one.tobytes() == second[name].tobytes():
                rows.append(self.message("determinism", name + condition, ""))
                continue
            e = self.expected[name] if draws is None else self.expected[name].at(draws)
            result = e.with_exact(one).compare(second[name], self.factor)
            result = replace(result, passed=False, message="two runs on the same inputs differ")
            rows.append(self.row("determinism", name + condition, result))
        return rows


def combined(expected: Named, other: Named, combine: Callable[[ExpectedArray, ExpectedArray], ExpectedArray]) -> Named:
    """Combines what is expected of each floating-point array with its counterpart in other results."""
    return {name: combine(e, other[name]) if isinstance(e, ExpectedArray) else e for name, e in expected.items()}


def _largest(arrays: Sequence[Any]) -> float:
    """Returns the largest finite number in arrays, at least 1."""
    return max((float(abs(x[np.isfinite(x)]).max(initial=1.0)) for x in arrays), default=1.0)


class Float64Reference:
    """The reference in float64, compiled when it is first needed.

    Attributes:
      note: how the reference was run, for the report; empty if it simply runs in float64.
    """

    def __init__(self, reference: Callable[..., Any], arguments: Arguments) -> None:
        self._implementation = Implementation(reference, arguments)
        self._executable: Any = None
        self.note = ""

    def results(self, xs: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the results for samples of inputs and cotangents, in double precision."""
        args = self._implementation.arguments.others, xs, cotangents
        config: Any = jax.config
        has_x64: bool = config.jax_enable_x64
        with jax.enable_x64(True):
            if self._executable is None:
                function, self.note = promote_to_float64(
                    self._implementation.mapped, *args, same_random_numbers=has_x64
                )
                self._executable = compile_quickly(jax.jit(function).lower(*args))
            return self._executable(*args)
