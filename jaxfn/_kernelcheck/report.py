"""The report of `kernelcheck`: as data, as a table, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxfn._inspection.reports import CheckError, CheckReport, aligned, html_table, preformatted, small


class KernelcheckError(CheckError):
    """A kernel has larger errors than its reference allows.

    Attributes:
      report: the `KernelReport`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> def softmax(x):
      ...     return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)
      >>> try:
      ...     jaxfn.kernelcheck(softmax, jax.nn.softmax, jax.ShapeDtypeStruct((4, 7), "float32"))
      ... except jaxfn.KernelcheckError as error:
      ...     print(error.report.failed_checks)
      ['scales']

    Torch counterpart: none.
    """


@dataclass(frozen=True)
class Entry:
    """One entry of an output or a gradient.

    Attributes:
      index: the index of the entry.
      value: the value of the kernel.
      expected: the value of the reference in float64.
      error, allowed: the error, and the largest error allowed.
      ulps: the error in units in the last place of `expected`.
    """

    index: tuple[int, ...]
    value: float
    expected: float
    error: float
    allowed: float
    ulps: float


@dataclass(frozen=True)
class Row:
    """The result of a check for one array.

    Attributes:
      check: the name of the check.
      dtype: the dtype of the inputs.
      what: the output or gradient, and the conditions of the check.
      passed: whether it passed.
      message: the failure or a remark, as text.
      norm, allowed_norm: the root mean square of the errors, and the largest allowed.
      worst: the entries with the largest errors relative to what is allowed, the worst first.
      count, total: the number of entries with an error larger than allowed, and of all entries.
    """

    check: str
    dtype: str
    what: str
    passed: bool = True
    message: str = ""
    norm: float | None = None
    allowed_norm: float | None = None
    worst: list[Entry] = field(default_factory=list[Entry])
    count: int = 0
    total: int = 0

    @property
    def index(self) -> tuple[int, ...] | None:
        """The index of the worst entry."""
        return self.worst[0].index if self.worst else None

    @property
    def error(self) -> float | None:
        """The error of the worst entry."""
        return self.worst[0].error if self.worst else None

    @property
    def allowed(self) -> float | None:
        """The largest error allowed for the worst entry."""
        return self.worst[0].allowed if self.worst else None

    @property
    def ulps(self) -> float | None:
        """The error of the worst entry in units in the last place."""
        return self.worst[0].ulps if self.worst else None


@dataclass(repr=False, eq=False)
class KernelReport(CheckReport):
    """The report of `kernelcheck`; true if it passed.

    Attributes:
      kernel, reference: the names of both functions.
      factor: the largest allowed ratio of the kernel's error to the reference's.
      rows: all results, check by check.
      notes: how it was checked, as far as that matters for the result.
    """

    error: ClassVar[type[CheckError]] = KernelcheckError

    kernel: str
    reference: str
    factor: float
    rows: list[Row] = field(default_factory=list[Row])

    @property
    def failures(self) -> list[Row]:
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
        main = [row for row in self.rows if row.check in ("outputs", "gradients")]
        head, _, rest = str(self).partition("\n")
        rest = "\n".join(rest.splitlines()[len(main) + 1 :])
        return preformatted(head) + html_table(_HEADERS, list(map(_cells, main))) + preformatted(rest)

    def __str__(self) -> str:
        head = f"kernelcheck of {self.kernel} against {self.reference}: {'passed' if self.passed else 'FAILED'}"
        main = [row for row in self.rows if row.check in ("outputs", "gradients")]
        lines = [head, *aligned([_HEADERS, *map(_cells, main)])]
        for check in self.checks:
            rows = [row for row in self.rows if row.check == check]
            wrong = [row for row in rows if not row.passed]
            if check not in ("outputs", "gradients"):
                remarks = [f"{row.what}: {row.message}" for row in rows if row.passed and row.message]
                result = f"FAILED ({len(wrong)} of {len(rows)})" if wrong else f"passed ({len(rows)})"
                lines.append("; ".join([f"{check}: {result}", *remarks]))
            for row in wrong:
                lines += _explained(row)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


_HEADERS = ["", "dtype", "worst entry", "error", "allowed", "ulps", "in norm", "allowed", ""]


def _cells(row: Row) -> list[str]:
    numbers = (row.error, row.allowed, row.ulps, row.norm, row.allowed_norm)
    result = "" if row.passed else "WRONG"
    return [row.what, row.dtype, "" if row.index is None else str(list(row.index)), *map(small, numbers), result]


def _explained(row: Row) -> list[str]:
    lines = [f"  {row.what} in {row.dtype}: {row.message}"]
    if row.worst:
        header = ["", "value", "expected", "error", "allowed", "ulps"]
        cells = [
            [str(list(e.index)), f"{e.value:.7g}", f"{e.expected:.7g}", *map(small, (e.error, e.allowed, e.ulps))]
            for e in row.worst
        ]
        lines += [f"    {line}" for line in aligned([header, *cells])]
    return lines
