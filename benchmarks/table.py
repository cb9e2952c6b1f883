"""The measurements as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from benchmarks.functions import HAND_WRITTEN
from benchmarks.results import BYTES, SAME_AS_HAND_WRITTEN, TARGETS, Row

_LABEL, _CELL = 22, 18


def header(forms: Sequence[str]) -> str:
    """Returns the header of the table."""
    return " " * _LABEL + "".join(form.rjust(_CELL) for form in forms)


def lines(forms: Sequence[str]) -> Callable[[Row], str]:
    """Yields the text of each row: its line, after a title if a new group begins."""
    last = ""

    def text(row: Row) -> str:
        nonlocal last
        over, last = (f"{title(row)}\n" if title(row) != last else ""), title(row)
        return over + line(row, forms)

    return text


def title(row: Row) -> str:
    """Returns the title of the measurements of one Function in one network."""
    return f"{row.function}, {row.network}"


def line(row: Row, forms: Sequence[str]) -> str:
    """Formats one measurement in every form, with its ratio to the hand-written form."""
    cells = "".join(_cell(row, form).rjust(_CELL) for form in forms)
    return f"  {row.measurement.ljust(_LABEL - 2)}{cells}".rstrip()


def summary(rows: Iterable[Row]) -> list[str]:
    """Summarizes how often each target was met, and the largest deviations."""
    rows = list(rows)
    lines: list[str] = []
    for measurement in (*TARGETS, SAME_AS_HAND_WRITTEN):
        judged = [row for row in rows if row.measurement == measurement and row.is_met is not None]
        if judged:
            lines.append(_summary_line(measurement, judged))
    return lines


def _summary_line(measurement: str, judged: Sequence[Row]) -> str:
    wanted = f"<= {TARGETS[measurement]:.2f}" if measurement in TARGETS else "1.00 within noise"
    met = sum(bool(row.is_met) for row in judged)
    worst = max(judged, key=lambda row: row.ratios["jaxfn"] or 0)
    verdict = "met" if met == len(judged) else "NOT MET"
    return (
        f"{measurement} {wanted} x hand-written: {verdict}, in {met} of {len(judged)}; "
        f"highest {worst.ratios['jaxfn']:.3f} ({title(worst)})"
    )


def _cell(row: Row, form: str) -> str:
    value = row.medians.get(form)
    if value is None:
        return "-"
    text = shown(value, "bytes" if row.measurement in BYTES else "seconds")
    ratio = row.ratios[form]
    return text + " " * 7 if form == HAND_WRITTEN or ratio is None else f"{text} {ratio:5.2f}x"


def shown(value: float, unit: str) -> str:
    """Formats seconds, bytes, or a number."""
    if unit == "seconds":
        size, unit = next(((size, u) for u, size in (("s", 1.0), ("ms", 1e-3)) if value >= size), (1e-6, "us"))
        return f"{value / size:.1f} {unit}"
    if unit == "bytes":
        return f"{value:,.0f} B" if value < 100_000 else f"{value / 1024:,.0f} KiB"
    return f"{value / 1e6:,.1f} M"
