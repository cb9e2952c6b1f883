"""The report of a kernel check: as data, as a table, as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxfn._inspection.reports import aligned, small


class KernelcheckError(RuntimeError):
    """A kernel is not as good as its reference.

    Attributes:
      report: what was found, as data.

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

    def __init__(self, report: KernelReport) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> Any:
        return KernelcheckError, (self.report,)


@dataclass(frozen=True)
class Entry:
    """One entry of an output or a gradient.

    Attributes:
      place: its index.
      value: the kernel's.
      expected: the reference's in float64.
      error, allowed: how far apart they are, and may be.
      ulps: the error in units of the last place of what is expected.
    """

    place: tuple[int, ...]
    value: float
    expected: float
    error: float
    allowed: float
    ulps: float


@dataclass(frozen=True)
class Row:
    """One thing that was looked at.

    Attributes:
      check: the name of the check that it belongs to.
      dtype: what the inputs were cast to.
      what: which output or gradient, and under what circumstances.
      passed: whether it is right.
      message: what is wrong, or what one should know, in words.
      norm, allowed_norm: the error's root mean square, and what it may be.
      worst: the entries that come closest to what is allowed, or exceed it most; the worst comes first.
      count, total: how many entries of how many are further off than is allowed.
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
    def place(self) -> tuple[int, ...] | None:
        """The worst entry's index."""
        return self.worst[0].place if self.worst else None

    @property
    def error(self) -> float | None:
        """The worst entry's error."""
        return self.worst[0].error if self.worst else None

    @property
    def allowed(self) -> float | None:
        """The largest error that is allowed."""
        return self.worst[0].allowed if self.worst else None

    @property
    def ulps(self) -> float | None:
        """It in units of the last place."""
        return self.worst[0].ulps if self.worst else None


@dataclass
class KernelReport:
    """The report of `kernelcheck`; true if nothing is wrong.

    Attributes:
      kernel, reference: their names.
      factor: how many times the reference's own error a kernel's may be.
      rows: everything that was looked at, check by check.
      notes: what one should know about how it was checked.
    """

    kernel: str
    reference: str
    factor: float
    rows: list[Row] = field(default_factory=list[Row])
    notes: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def __bool__(self) -> bool:
        return self.passed

    @property
    def failures(self) -> list[Row]:
        """The rows that failed."""
        return [row for row in self.rows if not row.passed]

    @property
    def checks(self) -> list[str]:
        """The names of the checks that were made, in order."""
        return list(dict.fromkeys(row.check for row in self.rows))

    @property
    def failed_checks(self) -> list[str]:
        """The names of those that found something."""
        return list(dict.fromkeys(row.check for row in self.failures))

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values."""
        return asdict(self) | {"passed": self.passed, "failed_checks": self.failed_checks}

    def to_json(self) -> str:
        """The report as JSON; a number that is not finite is a string."""
        return json.dumps(_finite(self.to_dict()), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        head = f"kernelcheck of {self.kernel} against {self.reference}: {'passed' if self.passed else 'FAILED'}"
        main = [row for row in self.rows if row.check in ("outputs", "gradients")]
        lines = [head, *aligned([_HEADERS, *map(_cells, main)])]
        for check in self.checks:
            rows = [row for row in self.rows if row.check == check]
            wrong = [row for row in rows if not row.passed]
            if check not in ("outputs", "gradients"):
                said = [f"{row.what}: {row.message}" for row in rows if row.passed and row.message]
                result = f"FAILED ({len(wrong)} of {len(rows)})" if wrong else f"passed ({len(rows)})"
                lines.append("; ".join([f"{check}: {result}", *said]))
            for row in wrong:
                lines += _explained(row)
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


_HEADERS = ["", "dtype", "worst place", "error", "allowed", "ulps", "in norm", "allowed", ""]


def _cells(row: Row) -> list[str]:
    numbers = (row.error, row.allowed, row.ulps, row.norm, row.allowed_norm)
    result = "" if row.passed else "WRONG"
    return [row.what, row.dtype, "" if row.place is None else str(list(row.place)), *map(small, numbers), result]


def _explained(row: Row) -> list[str]:
    lines = [f"  {row.what} in {row.dtype}: {row.message}"]
    if row.worst:
        header = ["", "value", "expected", "error", "allowed", "ulps"]
        cells = [
            [str(list(e.place)), f"{e.value:.7g}", f"{e.expected:.7g}", *map(small, (e.error, e.allowed, e.ulps))]
            for e in row.worst
        ]
        lines += [f"    {line}" for line in aligned([header, *cells])]
    return lines


def _finite(value: Any) -> Any:
    """Replaces floats that JSON does not have by strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
