"""Results of measurements: samples, medians, ratios, targets."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.functions import HAND_WRITTEN
from benchmarks.measure import quartiles

# jaxfn's time over that of the hand-written form, at most.
TARGETS = {"eager call": 0.35, "eager value-and-grad": 1.15, "trace": 1.10, "hessian": 1.10}
# jaxfn's time over that of the hand-written form is to be 1.00 within noise.
SAME_AS_HAND_WRITTEN = "compiled step"
BYTES = ("saved bytes", "peak memory")


@dataclass(frozen=True)
class Row:
    """One measurement of one Function in every form.

    Attributes:
      function: the Function's name.
      network: the network that it was called in, "call" for a single call.
      measurement: the measured quantity.
      samples: for each form its samples, in seconds or bytes; empty where there was nothing to measure.
    """

    function: str
    network: str
    measurement: str
    samples: Mapping[str, Sequence[float]]

    @property
    def medians(self) -> dict[str, float | None]:
        """The median of each form."""
        return {form: statistics.median(values) if values else None for form, values in self.samples.items()}

    @property
    def ratios(self) -> dict[str, float | None]:
        """Each form's median over that of the hand-written form."""
        medians = self.medians
        base = medians[HAND_WRITTEN]
        return {form: value / base if value is not None and base else None for form, value in medians.items()}

    @property
    def target(self) -> float | None:
        """The largest allowed ratio; for the compiled step, upper quartile over median of the hand-written form."""
        if self.measurement != SAME_AS_HAND_WRITTEN:
            return TARGETS.get(self.measurement)
        _, median, upper = quartiles(self.samples[HAND_WRITTEN])
        return upper / median

    @property
    def is_met(self) -> bool | None:
        """Whether jaxfn meets the target; `None` without one."""
        ratio, target = self.ratios["jaxfn"], self.target
        return None if ratio is None or target is None else ratio <= target

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {
            "function": self.function,
            "network": self.network,
            "measurement": self.measurement,
            "unit": "bytes" if self.measurement in BYTES else "seconds",
            "medians": self.medians,
            "quartiles": {form: quartiles(values) for form, values in self.samples.items()},
            "ratios_to_hand_written": self.ratios,
            "num_samples": {form: len(values) for form, values in self.samples.items()},
            "target_ratio": self.target,
            "target_met": self.is_met,
        }
