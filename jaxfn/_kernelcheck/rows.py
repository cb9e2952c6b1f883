"""Rows of the report of `kernelcheck`: the result of a check for one array."""

from __future__ import annotations

from dataclasses import dataclass

from jaxfn._reports import Entry, Row, public

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
