"""Tables in reports: cells in aligned columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(table: Sequence[Sequence[str]], to_the_right: Collection[int] = ()) -> list[str]:
    """The rows of a table as lines, some of its columns aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    justify = [str.rjust if i in to_the_right else str.ljust for i in range(len(widths))]
    return ["  ".join(f(cell, w) for f, cell, w in zip(justify, row, widths, strict=True)).rstrip() for row in table]


def small(number: complex | None) -> str:
    """An error or a tolerance as a cell, empty where there is none."""
    return "" if number is None else f"{number:.2g}"
