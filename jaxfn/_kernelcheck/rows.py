"""Rows of the report of `kernelcheck`: the result of a check for one array."""

from __future__ import annotations

from dataclasses import dataclass, field

PLAIN_CHECKS = ("outputs", "gradients")  # of plain results for the inputs of `kernelcheck`


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
