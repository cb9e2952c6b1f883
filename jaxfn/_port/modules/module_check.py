"""The check of a whole port: outputs, gradients of all parameters, and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxfn._parity.backends import function_name
from jaxfn._parity.comparison import compare, noise_of_zero, rounding
from jaxfn._parity.inputs import Array
from jaxfn._parity.report import ParitycheckReport, uncompared_row
from jaxfn._port.modules.layers import LayerSearch
from jaxfn._port.modules.module_record import ModuleRecord
from jaxfn._port.modules.ported_module import Load, PortedModule
from jaxfn._tree import is_inexact

_NOT_FOUND = (
    "no layer was found that deviates first: none of torch's values is missing in the port, or a later one is there. "
    "Name them in the port: jax.ad_checkpoint.checkpoint_name(y, 'name of the torch layer')."
)


def check_module(
    func: Any,
    record: ModuleRecord,
    load: Load,
    has_buffers: bool,
    versions: dict[str, str],
    rtol: float | None,
    atol: float | None,
) -> ParitycheckReport:
    """Returns the report of a port."""
    report = ParitycheckReport(record.name, function_name(func), versions | {"jax": jax.__version__})
    report.notes += record.notes
    with jax.enable_x64(True):
        _ModuleCheck(PortedModule(func, load, has_buffers, record), record, report, rtol, atol).run()
    return report


@dataclass
class _ModuleCheck:
    port: PortedModule
    record: ModuleRecord
    report: ParitycheckReport
    rtol: float | None
    atol: float | None

    def run(self) -> None:
        record, report = self.record, self.report
        results, values, coarse = self.port.evaluate(rounding)
        if coarse and record.is_double:
            report.notes.append(
                f"compared with the tolerance of {coarse}, in which the port computes with arguments of float64: a "
                "mistake as small as a wrong epsilon may not show. Return captured arrays from `load`."
            )
        self._usual = max(values.rtol, 0.0 if record.is_double else rounding(np.float32))
        self._noise = noise_of_zero(record.gradients.values(), self._usual)
        self._check_outputs(results.outputs)
        outputs_pass = not report.failures
        self._check_gradients(results.gradients)
        self._check_buffers(results.buffers)
        self._find_first_deviation(LayerSearch(record, values), results.outputs, results.gradients, outputs_pass)

    def _add(self, what: str, ours: Array | None, expected: Array, noise: float = 0.0) -> None:
        if ours is not None and is_inexact(ours.dtype) == is_inexact(expected.dtype):
            ours = ours.astype(expected.dtype)  # dtypes are not those of the user's run
        row = compare(self.report.port, what, ours, expected, self.rtol, self.atol, None, self._usual, noise)
        self.report.rows.append(replace(row, verdict="formula") if row.verdict == "differs" else row)

    def _add_failure(self, what: str, array: Array, verdict: str) -> None:
        self.report.rows.append(uncompared_row(self.report.port, what, array, verdict))

    def _check_outputs(self, outputs: Mapping[int, Array]) -> None:
        for what, expected in self.record.outputs.items():
            self._add(what, outputs.get(int(what.removeprefix("output "))), expected)
        for i, output in outputs.items():
            if f"output {i}" not in self.record.outputs:
                self._add_failure(f"output {i}", output, "extra")

    def _check_gradients(self, gradients: Mapping[str, Array]) -> None:
        zero: list[str] = []
        lost: list[str] = []
        for name, expected in self.record.gradients.items():
            if not expected.any():
                zero.append(name)
            if name in self.port.lost and expected.any():
                lost.append(name)
                self._add_failure(f"gradient of {name}", expected, "not loaded")
            else:
                self._add(f"gradient of {name}", gradients[name], expected, self._noise)
        extra = [path for path in self.port.extra if (abs(gradients[path]) > self._noise).any()]
        for path in extra:
            self._add_failure(f"gradient of the port's {path}", gradients[path], "extra")
        notes = {
            "zero in torch are the gradients of {}: mistakes in what they belong to may not show": zero,
            "not loaded: nothing that `load` returns is differentiable by {}. It left them out, returned arrays that "
            "it captured, or made integers or constants of them": lost,
            "extra: the port has a gradient by {}, which `load` makes of none of torch's arrays. torch does not train "
            "it; a constant belongs into the port": extra,
        }
        self.report.notes += [text.format(", ".join(names)) for text, names in notes.items() if names]

    def _check_buffers(self, buffers: Mapping[str, Array]) -> None:
        record = self.record
        expected = self.port.expected_buffers(record.parameters | record.new_buffers)
        for path, names in self.port.buffer_sources.items():
            if names:
                self._add(f"buffer {', '.join(sorted(names))}", buffers[path], expected[path])
        missing, notes = self.port.unreturned_buffers(record.buffers, record.new_buffers)
        for name in missing:
            self._add_failure(f"buffer {name}", record.new_buffers[name], "not loaded")
        self.report.notes += notes

    def _find_first_deviation(
        self, search: LayerSearch, outputs: Mapping[int, Array], gradients: Mapping[str, Array], outputs_pass: bool
    ) -> None:
        record, report = self.record, self.report
        failed = {row.what for row in report.failures}
        wrong = [name for name in record.parameters if f"gradient of {name}" in failed and name not in self.port.lost]
        if outputs_pass and not wrong:
            return
        if outputs_pass:
            both = {name: (record.gradients[name], gradients[name]) for name in record.parameters}
            report.first_deviation = search.first_gradient(both, wrong)
        else:
            output = next((i for i in range(len(record.outputs)) if f"output {i}" in failed), 0)
            expected = record.outputs.get(f"output {output}", np.zeros(0))
            report.first_deviation = search.first_output(expected, outputs.get(output))
        if report.first_deviation is None:
            report.notes.append(_NOT_FOUND)
