"""A kernel beside its reference, in one dtype and for arguments of one shape: what each gives, and what it should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import compile_as_written, compile_quickly
from jaxfn._kernelcheck.arguments import Arguments, Arrays, add_rounding_noise, rounded, sample_nearby
from jaxfn._kernelcheck.error_bounds import ArrayResult, ExpectedArray, expect
from jaxfn._kernelcheck.float64 import promote_to_float64
from jaxfn._kernelcheck.implementations import Implementation, KernelError, OutputTypes, Results, computed, on_host
from jaxfn._kernelcheck.report import Row


@dataclass(frozen=True)
class Samples:
    """Some draws of inputs and cotangents.

    Attributes:
      xs: floating-point inputs, in float64, as the dtype has them: (draws, *shape) each.
      cotangents: likewise.
    """

    xs: Arrays
    cotangents: Arrays


@dataclass(frozen=True)
class ExpectedResults:
    """The expected results of a case; see `Results`.

    Attributes:
      others: what the reference gives in float64, and what in the dtype.
    """

    outputs: list[ExpectedArray]
    others: list[tuple[Any, Any]]
    gradients: list[ExpectedArray]

    def with_equal_inputs(self, other: ExpectedResults) -> ExpectedResults:
        """Returns the results for equal inputs, given those of unequal ones (see `ExpectedArray.with_equal_inputs`)."""
        outputs = list(map(ExpectedArray.with_equal_inputs, self.outputs, other.outputs))
        gradients = list(map(ExpectedArray.with_equal_inputs, self.gradients, other.gradients))
        return ExpectedResults(outputs, self.others, gradients)


@dataclass
class KernelComparison:
    """A kernel and a reference.

    Attributes:
      dtype: what floating-point arrays are.
      draws: how many there are in a case.
      factor: see `kernelcheck`.
      exact: the reference in float64, which all dtypes share.
    """

    kernel: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: Arguments
    dtype: Any
    draws: int
    factor: float
    generator: np.random.Generator
    exact: Float64Reference

    @cached_property
    def side(self) -> Implementation:
        """The kernel."""
        return Implementation(self.kernel, self.arguments)

    @cached_property
    def outputs(self) -> OutputTypes:
        """The types of the kernel's outputs."""
        try:
            return self.side.outputs(self.dtype)
        except Exception as error:
            raise KernelError(error) from error

    @cached_property
    def reference_outputs(self) -> OutputTypes:
        """The types of the reference's outputs."""
        return Implementation(self.reference, self.arguments).outputs(self.dtype)

    @cached_property
    def program(self) -> Callable[..., Any]:
        """The kernel for all draws of a case, compiled."""
        return jax.jit(self.side.mapped)

    @cached_property
    def _reference_program(self) -> Callable[..., Any]:
        side = Implementation(self.reference, self.arguments)
        return compile_as_written(jax.jit(side.mapped).lower(*self.arrays(self.main)))

    @cached_property
    def main(self) -> Samples:
        """The inputs that were given."""
        return self.case(self.arguments.values)

    @cached_property
    def target(self) -> ExpectedResults:
        """The expected results for the main case."""
        return self.expected_results(self.main)

    def case(self, values: Sequence[Any]) -> Samples:
        """Draws near to some values."""
        xs = sample_nearby(values, self.draws, self.dtype, self.generator)
        cotangents = [
            rounded(self.generator.standard_normal((self.draws, *y.shape)), y.dtype) for y in self.outputs.floats
        ]
        return Samples(xs, cotangents)

    def arrays(self, case: Samples, draw: int | None = None) -> tuple[Arrays, Arrays, Arrays]:
        """Returns the arguments of a side's program."""
        at: Any = slice(None) if draw is None else draw
        xs = [jnp.asarray(x[at].astype(self.dtype)) for x in case.xs]
        cotangents = [
            jnp.asarray(ct[at].astype(y.dtype)) for ct, y in zip(case.cotangents, self.outputs.floats, strict=True)
        ]
        return self.arguments.fixed, xs, cotangents

    def first_results(self, run: Callable[..., Any]) -> Results:
        """Returns the results of a function like `Implementation.run` for the first draw."""
        return computed(run, *self.arrays(self.main, 0)).as_draw()

    @cached_property
    def eager(self) -> Results:
        """The kernel's results for the first draw, without `jax.jit`."""
        return self.first_results(self.side.run)

    def run_kernel(self, case: Samples) -> Results:
        """Runs the kernel on a case."""
        return computed(self.program, *self.arrays(case))

    @cached_property
    def _main_target(self) -> ExpectedResults:
        return self._compute_expected(self.main)

    def expected_results(self, case: Samples) -> ExpectedResults:
        """Returns the expected results of a case."""
        target = self._main_target if case is self.main else self._compute_expected(case)
        size = _largest(case.xs) * max(
            (_largest([ct]) * _largest([y.exact]) for ct, y in zip(case.cotangents, target.outputs, strict=True)),
            default=1.0,
        )
        gradients = [
            e.made_of(size) if of_main.is_exact_zero else e
            for e, of_main in zip(target.gradients, self._main_target.gradients, strict=True)
        ]
        return replace(target, gradients=gradients)

    def _compute_expected(self, case: Samples) -> ExpectedResults:
        """The reference in float64 beside itself in the dtype."""
        exact = self.exact.results(case.xs, case.cotangents)
        moved = (add_rounding_noise(arrays, self.dtype, self.generator) for arrays in (case.xs, case.cotangents))
        nearby = self.exact.results(*moved)
        reference = on_host(self._reference_program(*self.arrays(case)))
        make = partial(expect, dtype=self.dtype)
        return ExpectedResults(
            list(map(make, exact.outputs, reference.outputs, nearby.outputs)),
            list(zip(exact.others, reference.others, strict=True)),
            list(map(make, exact.gradients, reference.gradients, nearby.gradients)),
        )

    def gradient_names(self) -> list[str]:
        """The names of the gradients in reports."""
        return [f"gradient of {self.arguments.names[i]}" for i in self.arguments.differentiated]

    def row(self, check: str, what: str, result: ArrayResult) -> Row:
        """A result in the report."""
        return Row(check, str(np.dtype(self.dtype)), what, **vars(result))

    def message_row(self, check: str, what: str, message: str, *, passed: bool = False) -> Row:
        """A finding in words; without any, nothing is wrong."""
        return Row(check, str(np.dtype(self.dtype)), what, passed or not message, message)

    def compare_rows(
        self,
        check: str,
        results: Results,
        target: ExpectedResults,
        draws: Sequence[int] | None = None,
        suffix: str = "",
        only_overflow: bool = False,
    ) -> list[Row]:
        """Rows for results of some draws of a case; by default of all. Results may be without gradients."""
        rows: list[Row] = []
        count = len(results.outputs)
        gradients = zip(self.gradient_names(), results.gradients, target.gradients, strict=True)
        named = [
            *zip(self.outputs.names[:count], results.outputs, target.outputs, strict=True),
            *(gradients if results.gradients else ()),
        ]
        for position, (name, values, e) in enumerate(named):
            e = e if draws is None else e.at(draws)
            under = "gradients" if check == "outputs" and position >= count else check
            result = e.overflow(values) if only_overflow else e.compare(values, self.factor)
            rows.append(self.row(under, name + suffix, result))
        others = self.outputs.names[count:]
        for name, values, (exact, reference) in zip(others, results.others, target.others, strict=True):
            at = slice(None) if draws is None else list(draws)
            wrong = (values != exact[at]) & (values != reference[at])
            message = f"{wrong.sum():,} of {wrong.size:,} entries are others than in the reference"
            rows.append(self.message_row(check, name + suffix, message if wrong.any() else ""))
        return rows


def _largest(arrays: Sequence[Any]) -> float:
    """The largest finite number in arrays, and at least 1."""
    return max((float(abs(x[np.isfinite(x)]).max(initial=1.0)) for x in arrays), default=1.0)


class Float64Reference:
    """The reference in float64, compiled when it is first needed; the `note` says what is to be known about it."""

    def __init__(self, reference: Callable[..., Any], arguments: Arguments) -> None:
        self._side = Implementation(reference, arguments)
        self._program: Any = None
        self.note = ""

    def results(self, xs: Arrays, cotangents: Arrays) -> Results:
        """Returns the results for draws of inputs and cotangents, in double precision."""
        args = self._side.arguments.fixed, xs, cotangents
        config: Any = jax.config
        has_x64: bool = config.jax_enable_x64
        with jax.enable_x64(True):
            if self._program is None:
                function, self.note = promote_to_float64(self._side.mapped, *args, draws_alike=has_x64)
                self._program = compile_quickly(jax.jit(function).lower(*args))
            return on_host(self._program(*args))
