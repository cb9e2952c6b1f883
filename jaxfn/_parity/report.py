"""The report of `paritycheck`: as data, as a table, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from jaxfn._reports import Report, Row, aligned, html_table, preformatted, public, small


@public
@dataclass(kw_only=True)
class ParitycheckRow(Row):
    """The comparison of one array.

    Attributes:
      port: the name of the port.
      shape, dtype: the shape and dtype in torch.
      entries: the worst entry.
      max_error, relative_error: the largest errors; `None` if the arrays cannot be compared.
      double_error: the largest relative error in double precision.
      verdict: "equal", or how they differ: "intermediate" (they agree if saved intermediates have no derivative in JAX
        either), "rounding" (they agree in double precision), "kink" (they agree a small step away), "formula",
        "missing", "shape ..." or "dtype ..." (those of JAX), "extra" (torch does not have it), "not loaded" (nothing
        that `load` returns depends on it).
    """

    PASSING: ClassVar[frozenset[str]] = frozenset({"equal", "intermediate"})

    port: str
    shape: tuple[int, ...]
    dtype: str
    max_error: float | None = None
    relative_error: float | None = None
    double_error: float | None = None
    verdict: str = "equal"

    def __post_init__(self) -> None:
        self.passed = self.verdict in self.PASSING
        self.message = "" if self.verdict == "equal" else self.verdict


def uncompared_row(port: str, what: str, array: np.ndarray[Any, Any], verdict: str) -> ParitycheckRow:
    """Returns the row of an array that has no counterpart."""
    return ParitycheckRow(port=port, what=what, shape=array.shape, dtype=str(array.dtype), verdict=verdict)


@public
@dataclass(frozen=True)
class Deviation:
    """The first layer of a ported module that deviates.

    Attributes:
      layer: the name of the torch layer; "" for the module.
      layer_class: the name of its class.
      what: "output", "gradient of its input", "gradient of its output" or "gradient of" one of its parameters.
      before: where the layer's own code deviates, the layer inside it whose input is wrong; "" otherwise.
      reason: what of it is in the port, with the line of the value and the order of its axes, and what is not.
      index: the index of the number that differs most.
      torch, jax: the number in torch, and in the port: in the parameter's gradient, or in the value of this shape that
        is nearest to that of torch. `None` if there is none.
    """

    layer: str
    layer_class: str
    what: str
    before: str
    reason: str
    index: tuple[int, ...]
    torch: complex | None
    jax: complex | None

    def __str__(self) -> str:
        name = f"{self.layer} ({self.layer_class})" if self.layer else f"{self.layer_class}, the module"
        numbers = ""
        if self.torch is not None:
            nearest = (
                "no value of this shape" if self.jax is None else f"{self.jax:.6g} in the nearest value of the port"
            )
            numbers = f"; at {list(self.index)}: {self.torch:.6g} in torch, {nearest}"
        return f"first layer that deviates: {name}, {self.what}: {self.reason}{numbers}"


_HEADER = ["", "shape", "dtype", "error", "relative", "tolerance", "in float64", "verdict"]


@public
@dataclass(repr=False, eq=False)
class ParitycheckReport(Report):
    """The report of `paritycheck`; true if everything agrees, apart from derivatives of saved intermediates.

    Attributes:
      reference: the name of the torch function, Function or module.
      port: the name of the JAX one.
      versions: the versions of torch, NumPy and JAX.
      rows: a row for each output, gradient and second derivative.
      first_deviation: of a ported module, the first layer that deviates, if one was found.
      notes: how it was checked, as far as that matters for the result.
    """

    reference: str
    port: str
    versions: dict[str, str]
    rows: list[ParitycheckRow] = field(default_factory=list[ParitycheckRow])
    first_deviation: Deviation | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[ParitycheckRow]:
        """The rows that differ."""
        return [row for row in self.rows if not row.passed]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        name = self.port if self.port == self.reference else f"{self.port}, a port of {self.reference}"
        head = f"paritycheck of {name}: {'passed' if self.passed else 'FAILED'} ({versions})"
        return "\n".join([head, *aligned([_HEADER, *self._cells()]), *self._remarks()])

    def _remarks(self) -> list[str]:
        first = [] if self.first_deviation is None else [str(self.first_deviation)]
        return first + [f"note: {note}" for note in self.notes]

    def _cells(self) -> list[list[str]]:
        rows: list[list[str]] = []
        for row in self.rows:
            tolerance = row.entries[0].allowed if row.entries else None
            numbers = map(small, (row.max_error, row.relative_error, tolerance, row.double_error))
            rows.append([row.what, str(row.shape), row.dtype, *numbers, row.verdict])
        return rows

    def _repr_html_(self) -> str:
        head, notes = str(self).partition("\n")[0], "\n".join(self._remarks())
        return preformatted(head) + html_table(_HEADER, self._cells()) + (preformatted(notes) if notes else "")
