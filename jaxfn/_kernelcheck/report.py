"""The report of `kernelcheck`: as data, as a table, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxfn._reports import (
    Entry,
    Report,
    Row,
    aligned,
    entry_table,
    html_table,
    preformatted,
    public,
    show_index,
    small,
)

PLAIN_CHECKS = ("outputs", "gradients")  # of plain results for the inputs of `kernelcheck`


@public
@dataclass(frozen=True)
class KernelcheckEntry(Entry):
    """An entry of an output or a gradient of a kernel.

    Attributes:
      ulps: the error in units in the last place of `expected`.
    """

    ulps: float


@public
@dataclass
class KernelcheckRow(Row):
    """The result of a check of a kernel for one array.

    Attributes:
      check: the name of the check.
      dtype: the dtype of the inputs.
      norm, allowed_norm: the root mean square of the errors, and the largest allowed.
    """

    check: str = ""
    dtype: str = ""
    norm: float | None = None
    allowed_norm: float | None = None


@public
@dataclass(repr=False, eq=False)
class KernelcheckReport(Report):
    """The report of `kernelcheck`; true if it passed.

    Attributes:
      kernel, reference: the names of both functions.
      factor: the largest allowed ratio of the kernel's error to the reference's.
      rows: all results, check by check; `failures` are those that failed.
      notes: how it was checked, as far as that matters for the result.
    """

    kernel: str
    reference: str
    factor: float
    rows: list[KernelcheckRow] = field(default_factory=list[KernelcheckRow])
    notes: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[KernelcheckRow]:
        """The rows that failed."""
        return [row for row in self.rows if not row.passed]

    @property
    def checks(self) -> list[str]:
        """The names of the checks that ran, in order."""
        return list(dict.fromkeys(row.check for row in self.rows))

    @property
    def failed_checks(self) -> list[str]:
        """The names of the checks that failed."""
        return list(dict.fromkeys(row.check for row in self.failures))

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain Python values."""
        return super().to_dict() | {"failed_checks": self.failed_checks}

    def _repr_html_(self) -> str:
        head, table, rest = self._sections()
        return preformatted(head) + html_table(_HEADERS, table) + preformatted("\n".join(rest))

    def __str__(self) -> str:
        head, table, rest = self._sections()
        return "\n".join([head, *aligned([_HEADERS, *table]), *rest])

    def _sections(self) -> tuple[str, list[list[str]], list[str]]:
        """Returns the first line, the table of plain results, and the lines after it."""
        head = f"kernelcheck of {self.kernel} against {self.reference}: {'passed' if self.passed else 'FAILED'}"
        table = [_cells(row) for row in self.rows if row.check in PLAIN_CHECKS]
        lines: list[str] = []
        for check in self.checks:
            rows = [row for row in self.rows if row.check == check]
            num_wrong = sum(not row.passed for row in rows)
            if num_wrong or check not in PLAIN_CHECKS:
                remarks = [f"{row.what}: {row.message}" for row in rows if row.passed and row.message]
                result = f"FAILED ({num_wrong} of {len(rows)})" if num_wrong else f"passed ({len(rows)})"
                lines.append("; ".join([f"{check}: {result}", *remarks]))
        for row in self.failures:
            lines += _explained(row)
        return head, table, lines + [f"note: {note}" for note in self.notes]


_HEADERS = ["", "dtype", "worst entry", "error", "allowed", "ulps", "in norm", "allowed", ""]


def _cells(row: KernelcheckRow) -> list[str]:
    cells = [[show_index(e.index), *map(small, (e.error, e.allowed, e.ulps))] for e in row.entries[:1]] or [[""] * 4]
    result = "" if row.passed else "WRONG"
    return [row.what, row.dtype, *cells[0], small(row.norm), small(row.allowed_norm), result]


def _explained(row: KernelcheckRow) -> list[str]:
    lines = [f"{row.check}: {row.what} in {row.dtype}: {row.message}"]
    cells = [
        [show_index(e.index), f"{e.value:.7g}", f"{e.expected:.7g}", *map(small, (e.error, e.allowed, e.ulps))]
        for e in row.entries
    ]
    return lines + (entry_table(["", "value", "expected", "error", "allowed", "ulps"], cells, "    ") if cells else [])
