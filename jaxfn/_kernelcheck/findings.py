"""Failures of a kernel grouped by cause.

# Note: which failures have one cause

A wrong kernel fails many checks. Failures are one finding only where the simpler one explains the other; otherwise a
second fault would be hidden behind the first. Nothing is measured here, and there is no threshold:

- **One error.** What raised an error of one class at one line of the kernel is one finding, in whichever check.
- **One wrong array.** If an output or a gradient is wrong for the plain inputs, it is expected to be wrong for others,
  and wherever a check returns what the plain kernel returns (`Row.repeats`). If it is right for the plain inputs,
  failures of one check are one finding. A check that returns something else is about its own conditions, and so is a
  result that is not finite where the plain one is: each is a separate finding. Different arrays are separate as well,
  since either may be wrong alone.
- **Two runs that differ.** If two runs on equal inputs differ in an array by more than rounding, its other results are
  not reproducible, and what they lack is not known. Where they differ by rounding only, as sums in another order do,
  that explains nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxfn._kernelcheck.rows import PLAIN, PLAIN_CHECKS, Row


@dataclass(frozen=True)
class Finding:
    """One fault of a kernel.

    Attributes:
      first: the simplest failure.
      others: further failures that it explains.
    """

    first: Row
    others: list[Row]


def group(failures: Sequence[Row]) -> list[Finding]:
    """Groups failures by cause, the simplest first."""
    findings: list[Finding] = []
    for row in sorted(failures, key=_complexity):
        for finding in findings:
            if any(_explains(other, row) for other in (finding.first, *finding.others)):
                finding.others.append(row)
                break
        else:
            findings.append(Finding(row, []))
    return findings


def _complexity(row: Row) -> int:
    if _is_irreproducible(row):
        return 0
    return 1 if row.check in PLAIN_CHECKS else 2


def _explains(first: Row, row: Row) -> bool:
    """Whether a failure explains another one that is not simpler."""
    if first.raised or row.raised:
        return first.raised == row.raised
    if first.array != row.array:
        return False
    if first.check == row.check == "determinism":
        return True
    if _is_irreproducible(first):
        return first.repeats == PLAIN or row.repeats != PLAIN
    if "determinism" in (first.check, row.check) or _is_finite(first) != _is_finite(row):
        return False
    if PLAIN not in (first.repeats, row.repeats):
        return row.check == first.check or row.repeats == first.check
    if first.check in PLAIN_CHECKS and first.dtype == row.dtype:
        return row.repeats == PLAIN
    return first.check == row.check and first.repeats == row.repeats


def _is_irreproducible(row: Row) -> bool:
    """Whether two runs differ by more than rounding."""
    return row.check == "determinism" and row.count > 0


def _is_finite(row: Row) -> bool:
    """Whether the worst entry is finite; one that is not always counts as the worst."""
    return not row.worst or math.isfinite(row.worst[0].value)
