"""A kernel and its reference, in one dtype and for arguments of one shape: results and expected results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
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
from jaxfn._kernelcheck.implementations import Implementation, KernelError, OutputTypes, Results, on_host, run_on_host
from jaxfn._kernelcheck.report import KernelcheckRow

_FEW_DRAWS = 2
_MAX_NUMBERS = 1 << 20  # in all samples of all inputs and outputs


@dataclass(frozen=True)
class Samples:
    """Samples of inputs and cotangents."""

    xs: Arrays  # floating-point inputs, rounded to the dtype, in float64, each of shape (draws, *shape)
    cotangents: Arrays  # cotangents of the floating-point outputs, in the same form


@dataclass(frozen=True)
class ExpectedResults:
    """The expected results for some samples."""

    outputs: list[ExpectedArray]  # the floating-point outputs
    others: list[ExpectedIntegers]  # the other outputs
    gradients: list[ExpectedArray]  # the gradients

    def combined(
        self, other: ExpectedResults, combine: Callable[[ExpectedArray, ExpectedArray], ExpectedArray]
    ) -> ExpectedResults:
        """Combines each array with its counterpart in other results."""
        outputs = list(map(combine, self.outputs, other.outputs))
        return ExpectedResults(outputs, self.others, list(map(combine, self.gradients, other.gradients)))


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
    def expected(self) -> ExpectedResults:
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

    def first_results(self, run: Callable[..., Any]) -> Results:
        """Returns the results of a function like `Implementation.run` for the first sample."""
        return run_on_host(run, *self.arrays(self.main, 0)).as_one_sample()

    def first_inputs(self) -> tuple[Any, ...]:
        """Returns the arguments of the kernel for the first sample."""
        fixed, xs, _ = self.arrays(self.main, 0)
        return self.arguments.call(lambda *args: args, xs, fixed)

    @cached_property
    def plain(self) -> Results:
        """The results of the compiled kernel for `main`."""
        return self.run(self.main)

    @cached_property
    def eager(self) -> Results:
        """The kernel's results for the first sample, without `jax.jit`."""
        return self.first_results(self.implementation.run)

    def run(self, samples: Samples) -> Results:
        """Runs the compiled kernel on all samples."""
        return run_on_host(self.compiled_kernel, *self.arrays(samples))

    @cached_property
    def _main_results(self) -> ExpectedResults:
        return self._compute_expected(self.main)

    def expect(self, samples: Samples) -> ExpectedResults:
        """Returns the expected results for some samples."""
        expected = self._main_results if samples is self.main else self._compute_expected(samples)
        size = _largest(samples.xs) * max(
            (_largest([ct]) * _largest([y.exact]) for ct, y in zip(samples.cotangents, expected.outputs, strict=True)),
            default=1.0,
        )
        gradients = [
            e.with_cancellation(size) if of_main.is_exact_zero else e
            for e, of_main in zip(expected.gradients, self._main_results.gradients, strict=True)
        ]
        return replace(expected, gradients=gradients)

    def _compute_expected(self, samples: Samples) -> ExpectedResults:
        """Runs the reference in float64 and in the dtype, and again in float64 on inputs with rounding noise."""
        noisy = [add_rounding_noise(arrays, self.dtype, self.generator) for arrays in (samples.xs, samples.cotangents)]
        # A condition on an input, such as `mask > 0`, is not a rounding error.
        noisy[0] = [
            moved if has else x for moved, x, has in zip(noisy[0], samples.xs, self.has_derivative, strict=True)
        ]
        nearby = self.exact.results(*noisy)
        exact = self.exact.results(samples.xs, samples.cotangents)
        reference = on_host(self._compiled_reference(*self.arrays(samples)))
        make = partial(expect, dtype=self.dtype)
        return ExpectedResults(
            list(map(make, exact.outputs, reference.outputs, nearby.outputs)),
            list(map(ExpectedIntegers, exact.others, reference.others)),
            list(map(make, exact.gradients, reference.gradients, nearby.gradients)),
        )

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
        results: Results,
        expected: ExpectedResults,
        draws: Sequence[int] | None = None,
        suffix: str = "",
        only_overflow: bool = False,
        inputs: Sequence[int] | None = None,
    ) -> list[KernelcheckRow]:
        """Returns rows for the results for some samples.

        Args:
          check: the name of the check.
          results: the results of the kernel, which may lack gradients.
          expected: the expected results.
          draws: the samples that `results` has. Default: all.
          suffix: the conditions of the check, as text.
          only_overflow: whether values must only be finite.
          inputs: the indices of the gradients that `results` has, among those of `expected`. Default: all.
        """
        rows: list[KernelcheckRow] = []
        if inputs is not None:
            expected = replace(expected, gradients=[expected.gradients[i] for i in inputs])
        for kind, index, array in self._named(results, inputs):
            values, e = getattr(results, kind)[index], getattr(expected, kind)[index]
            e = e if draws is None else e.at(draws)
            result = e.overflow(values) if only_overflow else e.compare(values, self.factor)
            under = "gradients" if check == "outputs" and kind == "gradients" else check
            rows.append(self.row(under, array + suffix, result))
        return rows

    def _named(self, results: Results, inputs: Sequence[int] | None = None) -> list[tuple[str, int, str]]:
        """Returns the arrays in results: the attribute that has them, the index in it, and the name in reports."""
        count, gradients = len(results.outputs), self.gradient_names()
        if inputs is not None:
            gradients = [gradients[i] for i in inputs]
        names = {
            "outputs": self.outputs.names[:count],
            "gradients": gradients if results.gradients else [],
            "others": self.outputs.names[count:],
        }
        return [(kind, index, name) for kind, of_kind in names.items() for index, name in enumerate(of_kind)]

    def compare_runs(
        self, condition: str, first: Results, second: Results, draws: Sequence[int] | None = None
    ) -> list[KernelcheckRow]:
        """Returns a row for each array of two runs, which fails unless they are bitwise equal."""
        rows: list[KernelcheckRow] = []
        for kind, index, array in self._named(first):
            one, two = getattr(first, kind)[index], getattr(second, kind)[index]
            if one.tobytes() == two.tobytes():
                rows.append(self.message("determinism", array + condition, ""))
                continue
            e = getattr(self.expected, kind)[index]
            e = (e if draws is None else e.at(draws)).with_exact(one)
            result = replace(e.compare(two, self.factor), passed=False, message="two runs on the same inputs differ")
            rows.append(self.row("determinism", array + condition, result))
        return rows


def _largest(arrays: Sequence[Any]) -> float:
    """Returns the largest finite number in arrays, at least 1."""
    return max((float(abs(x[np.isfinite(x)]).max(initial=1.0)) for x in arrays), default=1.0)


class Float64Reference:
    """The reference in float64, compiled when it is first needed.

    Attributes:
      note: how the reference was run_on_host, for the report; empty if it simply runs in float64.
    """

    def __init__(self, reference: Callable[..., Any], arguments: Arguments) -> None:
        self._implementation = Implementation(reference, arguments)
        self._executable: Any = None
        self.note = ""

    def results(self, xs: Arrays, cotangents: Arrays) -> Results:
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
            return on_host(self._executable(*args))
