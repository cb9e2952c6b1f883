"""The report of `trainingcheck`: as data, as a table, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxfn._reports import Report, aligned, html_table, preformatted, public, small

STAGES = ("loss", "gradient", "clipping", "optimizer", "parameters", "buffers")


@public
@dataclass
class TrainingcheckRow:
    """The comparison of one quantity, over all steps.

    Attributes:
      stage: "loss", "gradient", "clipping", "optimizer" (its state), "parameters" (after the step) or "buffers".
      name: the name of the term of the loss, of torch's parameter or buffer, or of the optimizer's array of one.
      step: the step of the worst entry: the index of its group of batches.
      error, tolerance: the error of that entry, and the largest that is allowed.
      verdict: "equal" or "differs"; "missing" or "extra" where only torch or only the port has it; or
        "shape ...", that of the port.
    """

    stage: str
    name: str
    step: int = 0
    error: float = 0.0
    tolerance: float = 0.0
    verdict: str = "equal"


_HEADER = ["stage", "", "step", "error", "tolerance", "verdict"]


@public
@dataclass(repr=False, eq=False)
class TrainingcheckReport(Report):
    """The report of `trainingcheck`; true if every step agrees.

    Attributes:
      reference: the name of the class of the torch module.
      optimizer: the name of the class of torch's optimizer.
      port: the name of the JAX loss.
      versions: the versions of torch, NumPy and JAX.
      steps: how many steps were compared; the comparison stops after the first that deviates.
      rows: a row for each quantity.
      step, stage, name: the first deviation; `None` and "" if there is none.
      looks_like: what the deviation looks like, if that is known.
      notes: how it was checked, as far as that matters for the result.
    """

    reference: str
    optimizer: str
    port: str
    versions: dict[str, str]
    steps: int = 0
    rows: list[TrainingcheckRow] = field(default_factory=list[TrainingcheckRow])
    step: int | None = None
    stage: str = ""
    name: str = ""
    looks_like: str = ""
    notes: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[TrainingcheckRow]:
        """The rows that differ."""
        return [row for row in self.rows if row.verdict != "equal"]

    def __str__(self) -> str:
        return "\n".join([self._head(), *aligned([_HEADER, *self._cells()], (2, 3, 4)), *self._remarks()])

    def _head(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        verdict = "passed"
        if not self.passed:
            verdict = f"FAILED at step {self.step}, {self.stage}: {self.name}"
            verdict += f" ({self.looks_like})" if self.looks_like else ""
        job = f"{self.port}, a port of the training of {self.reference} by {self.optimizer}"
        return f"trainingcheck of {job}, {self.steps} steps: {verdict} ({versions})"

    def _cells(self) -> list[list[str]]:
        return [
            [row.stage, row.name, str(row.step), small(row.error), small(row.tolerance), row.verdict]
            for row in self.rows
        ]

    def _remarks(self) -> list[str]:
        return [f"note: {note}" for note in self.notes]

    def _repr_html_(self) -> str:
        notes = "\n".join(self._remarks())
        return preformatted(self._head()) + html_table(_HEADER, self._cells()) + (preformatted(notes) if notes else "")
