"""The check of a whole port: outputs, gradients of all parameters, buffers, and steps of gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxfn._check.closeness import group_scale
from jaxfn._parity.backends import function_name
from jaxfn._parity.comparison import compare, rounding
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._parity.layers import LayerSearch
from jaxfn._parity.module_record import LEARNING_RATE, ModuleRecord
from jaxfn._parity.names import Match, Matcher, Names
from jaxfn._parity.ported_module import ParameterTree, PortedModule
from jaxfn._parity.report import ParityReport, Row
from jaxfn._tree import is_inexact

# Noise of a gradient that is zero (of a bias before a normalization), relative to the largest gradient.
_NOISE = 1e-2
_LARGER = 256  # the ratio of that gradient to the median of all from which on it says nothing about the others
_NOT_FOUND = (
    "no layer was found that deviates first: none of torch's values is missing in the port, or a later one is there. "
    "Name them in the port: jax.ad_checkpoint.checkpoint_name(y, 'name of the torch layer')."
)


def check_module(
    func: Any,
    record: ModuleRecord,
    parameters: Any,
    buffers: Any,
    names: Names,
    versions: dict[str, str],
    rtol: float | None,
    atol: float | None,
) -> ParityReport:
    """Returns the report of a port."""
    report = ParityReport(record.name, function_name(func), versions | {"jax": jax.__version__})
    report.notes += record.notes
    with jax.enable_x64(True):
        _ModuleCheck(func, record, parameters, buffers, names, report).run(rtol, atol)
    return report


class _ModuleCheck:
    def __init__(
        self, func: Any, record: ModuleRecord, parameters: Any, buffers: Any, names: Names, report: ParityReport
    ) -> None:
        self._record = record
        self._report = report
        self._parameters = ParameterTree(parameters, record.is_double)
        self._buffers = None if buffers is None else ParameterTree(buffers, record.is_double)
        self._port = PortedModule(func, self._parameters, self._buffers, Inputs(record.args))
        self._names = names
        self._parameter_names = Matcher(self._parameters, names)

    def run(self, rtol: float | None, atol: float | None) -> None:
        record, report, self._tolerances = self._record, self._report, (rtol, atol)
        (outputs, new_buffers, gradients, of_inputs), values, coarse = self._port.evaluate(rounding)
        if coarse and record.is_double:
            report.notes.append(
                f"compared with the tolerance of {coarse}, in which the port computes with arguments of float64: a "
                "mistake as small as a wrong epsilon may not show. Pass captured arrays in `parameters` or `buffers`."
            )
        self._rtol = max(values.rtol, 0.0 if record.is_double else rounding(np.float32))
        sizes = [float(abs(x).max(initial=0)) for x in record.gradients.values() if x.any()] or [0.0]
        self._noise = _NOISE * self._rtol * min(max(sizes), _LARGER * float(np.median(sizes)))
        self._gradients = [np.zeros_like(x) for x in self._parameters.arrays]
        for i, gradient in zip(self._port.trainable, gradients, strict=True):
            self._gradients[i] = gradient
        self._matches = self._parameter_names.match(record.parameters, self._has_gradient)
        self._check_outputs(outputs)
        outputs_pass = not report.failures
        self._check_parameters(of_inputs)
        self._check_buffers(new_buffers)
        if record.steps:
            self._check_steps()
        failed = {row.what for row in report.failures}
        wrong = [name for name in self._matches if f"gradient of {name}" in failed]
        if wrong or not outputs_pass:
            search = LayerSearch(record, values, self._leaves())
            if outputs_pass:
                ours = {name: match.select(self._gradients) for name, match in self._matches.items()}
                both = {name: (record.gradients[f"gradient of {name}"], x) for name, x in ours.items()}
                report.first_deviation = search.first_gradient(both, wrong)
            else:
                output = next((i for i in range(len(record.outputs)) if f"output {i}" in failed), 0)
                expected = record.outputs.get(f"output {output}", np.zeros(0))
                report.first_deviation = search.first_output(expected, outputs.get(output))
            if report.first_deviation is None:
                report.notes.append(_NOT_FOUND)

    def _add(self, what: str, ours: Array | None, expected: Array, noise: float = 0.0) -> None:
        if ours is not None and is_inexact(ours.dtype) == is_inexact(expected.dtype):
            ours = ours.astype(expected.dtype)  # dtypes are not those of the user's run
        rtol, atol = self._tolerances
        row = compare(self._report.port, what, ours, expected, rtol, atol, None, self._rtol, noise)
        row.verdict = "formula" if row.verdict == "differs" else row.verdict
        self._report.rows.append(row)

    def _add_failure(self, what: str, array: Array, verdict: str) -> None:
        self._report.rows.append(Row(self._report.port, what, array.shape, str(array.dtype), verdict=verdict))

    def _is_close(self, ours: Array, expected: Array, noise: float = 0.0) -> bool:
        return bool((abs(ours - expected) <= self._rtol * group_scale(abs(expected)) + noise).all())

    def _has_gradient(self, name: str, select: Callable[[Sequence[Any]], Array]) -> bool:
        return self._is_close(select(self._gradients), self._record.gradients[f"gradient of {name}"], self._noise)

    def _check_outputs(self, outputs: Mapping[int, Array]) -> None:
        for what, expected in self._record.outputs.items():
            self._add(what, outputs.get(int(what.removeprefix("output "))), expected)
        for i, output in outputs.items():
            if f"output {i}" not in self._record.outputs:
                self._add_failure(f"output {i}", output, "extra")

    def _check_parameters(self, of_inputs: Sequence[Array]) -> None:
        gradients = self._record.gradients
        for name, tensor in self._record.parameters.items():
            if name not in self._matches:
                self._add_failure(f"parameter {name}", tensor, "unmatched")
                continue
            if not self._matches[name].is_equal:
                self._add_failure(f"parameter {name}", tensor, "other numbers")
            ours = self._matches[name].select(self._gradients)
            self._add(f"gradient of {name}", ours, gradients[f"gradient of {name}"], self._noise)
        for name, ours in zip(Inputs(self._record.args).names, of_inputs, strict=True):
            self._add(f"gradient of {name}", ours, gradients[f"gradient of {name}"], self._noise)
        zero = [what.removeprefix("gradient of ") for what, x in gradients.items() if not x.any()]
        if zero:
            self._report.notes.append(
                f"zero in torch are the gradients of {', '.join(zero)}: mistakes in what they belong to may not show"
            )

    def _check_buffers(self, new_buffers: Sequence[Array]) -> None:
        def is_updated(name: str, select: Callable[[Sequence[Any]], Array]) -> bool:
            return self._is_close(select(new_buffers), self._record.new_buffers[name])

        before, after = self._record.buffers, self._record.new_buffers
        self._buffer_matches: dict[str, Match] = {}
        if self._buffers is not None:
            self._buffer_matches = Matcher(self._buffers, self._names).match(before, is_updated, strict=False)
        rest = {name: x for name, x in before.items() if name not in self._buffer_matches}
        frozen = self._parameter_names.match(rest, lambda name, select: False, strict=False)
        self._frozen = {i for match in frozen.values() for i in match.leaves}
        for name, match in self._buffer_matches.items():
            self._add(f"buffer {name}", match.select(new_buffers), after[name])
        for name in (name for name, x in rest.items() if not np.array_equal(x, after[name])):
            if is_inexact(after[name].dtype) and self._buffers is not None:
                self._add_failure(f"buffer {name}", after[name], "unmatched")
            else:
                self._report.notes.append(f"not compared: buffer {name}, which is not in `buffers`")
        for i in self._parameter_names.unused():
            if (abs(self._gradients[i]) > self._noise).any():
                self._add_failure(f"gradient of the port's {self._parameters.paths[i]}", self._gradients[i], "extra")

    def _check_steps(self) -> None:
        record = self._record
        updated = [i for i in self._port.trainable if i not in self._frozen]
        arrays, new_buffers = self._port.descend(updated, record.steps)
        noise = self._noise * LEARNING_RATE * record.steps
        for name, expected in record.stepped.items():
            what = f"{name} after {record.steps} step{'s' * (record.steps > 1)}"
            if name in self._matches:
                self._add(what, self._matches[name].select(arrays), expected, noise)
            elif name in self._buffer_matches:
                self._add(what, self._buffer_matches[name].select(new_buffers), expected)

    def _leaves(self) -> dict[str, int]:
        """Returns the index among the trainable leaves for each torch parameter that is one leaf."""
        leaves = {name: match.leaves for name, match in self._matches.items()}
        return {name: self._port.trainable.index(x[0]) for name, x in leaves.items() if len(x) == 1}
