"""The report of a parity check: as data, as a table, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from jaxfn._inspection.reports import aligned, small


@dataclass
class Row:
    """One array that both computed.

    Attributes:
      what: which one.
      shape, dtype: torch's.
      max_error, relative_error: the largest ones; `None` where the arrays cannot be compared.
      tolerance: what the worst number may be off.
      double_error: the largest relative error where both compute in double precision.
      verdict: "equal"; or how they differ: "intermediate" (they agree if saved intermediates have no derivative in
        JAX either), "rounding" (in double precision they agree), "kink" (they agree a small step aside), "formula",
        "missing", "shape ..." or "dtype ..." (what JAX has).
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    max_error: float | None = None
    relative_error: float | None = None
    tolerance: float | None = None
    double_error: float | None = None
    verdict: str = "equal"


@dataclass
class ParityReport:
    """The report of `paritycheck`; true if all agrees, apart from derivatives of saved intermediates.

    Attributes:
      function: the torch function's name.
      versions: of torch, NumPy and JAX.
      rows: one for each output, gradient and second derivative.
      notes: what one should know about the check.
      has_extra_outputs: whether JAX returned arrays that torch did not.
    """

    function: str
    versions: dict[str, str]
    rows: list[Row]
    notes: list[str]
    has_extra_outputs: bool = False

    @property
    def passed(self) -> bool:
        """Whether everything agrees that torch computes."""
        return all(row.verdict in ("equal", "intermediate") for row in self.rows) and not self.has_extra_outputs

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values."""
        return asdict(self) | {"passed": self.passed}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        head = f"paritycheck of {self.function}: {'passed' if self.passed else 'FAILED'} ({versions})"
        table = [["", "shape", "dtype", "error", "relative", "tolerance", "in float64", "verdict"]]
        for row in self.rows:
            numbers = map(small, (row.max_error, row.relative_error, row.tolerance, row.double_error))
            table.append([row.what, str(row.shape), row.dtype, *numbers, row.verdict])
        return "\n".join([head, *aligned(table), *(f"note: {note}" for note in self.notes)])
