"""The base of all reports, of their rows and entries, and text tables for reports."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np

Number = float | complex
_Class = TypeVar("_Class", bound=type)
_Report = TypeVar("_Report", bound="Report")


def public(cls: _Class) -> _Class:
    """Sets the module of a public type, which pickles and tracebacks name."""
    cls.__module__ = "jaxfn.reports"
    return cls


@public
@dataclass(frozen=True)
class Entry:
    """A wrong entry of an array, or of a Jacobian.

    Attributes:
      index: the index in the array; in the output of a Jacobian.
      value, expected: the value, and that of the reference that decides.
      error, allowed: the absolute error, and the largest that is allowed.
    """

    index: tuple[int, ...]
    value: Number
    expected: Number
    error: float
    allowed: float


@public
@dataclass
class Row:
    """The result of a check for one array.

    Attributes:
      what: the array, and the conditions of the check.
      passed: whether it passed.
      message: the failure or a remark, as text.
      entries: the worst few entries, the worst first.
      count, total: the number of wrong entries, and of all entries.
    """

    what: str = ""
    passed: bool = True
    message: str = ""
    entries: Sequence[Any] = ()
    count: int = 0
    total: int = 0


class CheckError(RuntimeError):
    """A check failed.

    Attributes:
      report: the report of the check.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> def softmax(x):
      ...     return jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True)
      >>> try:
      ...     jaxfn.kernelcheck(softmax, jax.nn.softmax, jax.ShapeDtypeStruct((4, 7), "float32"))
      ... except jaxfn.CheckError as error:
      ...     print(error.report.failed_checks)
      ['scales']

    Torch counterpart: none.
    """

    def __init__(self, report: Any) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> Any:
        return type(self), (self.report,)


@public
class Report:
    """The base of everything that checks and tools report. Prints as text; true if nothing is wrong."""

    _error: ClassVar[type[CheckError]] = CheckError

    @property
    def failures(self) -> Sequence[Any]:
        """Everything that is wrong."""
        return ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.failures

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_failed(self) -> None:
        """Raises a `CheckError` with this report (`GradcheckError` for those of the gradchecks), unless it passed."""
        if not self.passed:
            raise self._error(self)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain Python values."""
        content: Any = self  # a dataclass, unless the method is overridden
        return asdict(content) | {"passed": self.passed}

    def to_json(self) -> str:
        """Returns the report as JSON; complex numbers and numbers that are not finite are strings."""
        return json.dumps(_json_value(self.to_dict()), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Returns the report for a notebook."""
        return preformatted(str(self))


def concluded(report: _Report, raise_exception: bool) -> _Report:
    """Returns the report of a check, or raises if it failed and `raise_exception` says so."""
    if raise_exception:
        report.raise_if_failed()
    return report


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, np.generic):
        return _json_value(value.item())
    is_number = isinstance(value, float) and math.isfinite(value)
    return value if value is None or is_number or isinstance(value, (bool, int, str)) else str(value)


def aligned(table: Sequence[Sequence[str]], to_the_right: Collection[int] = ()) -> list[str]:
    """Returns the rows of a table as lines, some of its columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    justify = [str.rjust if i in to_the_right else str.ljust for i in range(len(widths))]
    return ["  ".join(f(cell, w) for f, cell, w in zip(justify, row, widths, strict=True)).rstrip() for row in table]


def entry_table(header: Sequence[str], rows: Sequence[Sequence[str]], indent: str) -> list[str]:
    """Returns a table of entries as lines, without columns that are empty."""
    columns = [column for column in zip(header, *rows, strict=True) if any(column[1:])]
    return [indent + line for line in aligned(list(zip(*columns, strict=True)), range(len(columns)))]


def show_index(index: Sequence[int]) -> str:
    """Returns an index as text, as NumPy takes it."""
    return f"[{', '.join(map(str, index))}]"


def preformatted(text: str) -> str:
    """Returns text as HTML."""
    return f"<pre>{html.escape(text)}</pre>"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML, without columns that are empty."""
    used = [i for i in range(len(header)) if any(row[i] for row in rows)]
    head = "".join(f"<th>{html.escape(header[i])}</th>" for i in used)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(row[i])}</td>" for i in used) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def small(number: complex | None) -> str:
    """Returns an error or a tolerance as a cell, empty for `None`."""
    return "" if number is None else f"{number:.2g}"


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's text, or its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
