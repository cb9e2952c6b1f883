"""Plots of the figures as SVG files, without a library: equal figures are equal files, whatever is installed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from benchmarks.functions import HAND_WRITTEN, TORCH

_COLORS = ("#1f83c4", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _STEP = 720, 150, 20, 48, 30, 4
# In an <img>, the preferred scheme is that of the page, in browsers that pass it on, or else that of the system.
_STYLE = (
    "svg{color:#57606a;font:12px sans-serif}text{fill:currentColor}line{stroke:currentColor}"
    "@media(prefers-color-scheme:dark){svg{color:#9ba4ae}}"
)


class _Mark(NamedTuple):
    """A value in a plot; its series has a color."""

    value: float
    series: str
    is_filled: bool


def functions(rows: Iterable[Mapping[str, Any]]) -> str:
    """Plots time and memory of jaxfn and equinox over the hand-written rule, by measurement and Function."""
    marks: dict[str, list[_Mark]] = {}
    for row in sorted(rows, key=lambda row: row["unit"] == "bytes"):
        for form in ("equinox", "jaxfn"):
            if (ratio := row["ratios_to_hand_written"].get(form)) is not None:
                marks.setdefault(row["measurement"], []).append(_Mark(ratio, row["function"], form == "jaxfn"))
    return _dots(f"over the {HAND_WRITTEN} rule: jaxfn filled, equinox hollow", marks)


def training(results: Iterable[Mapping[str, Any]]) -> str:
    """Plots times and peak memory of a training step over those in flax, by measurement and model."""
    marks: dict[str, list[_Mark]] = {}
    for result in sorted(results, key=lambda result: result["unit"] == "bytes"):
        if result["unit"] == "seconds" or result["measurement"] == "peak memory":
            for form in (TORCH, "from_torch"):
                if (value := result["values"].get(form)) is not None:
                    mark = _Mark(value / result["values"]["flax"], result["model"], form == "from_torch")
                    marks.setdefault(result["measurement"], []).append(mark)
    return _dots("over flax: from_torch filled, torch hollow", marks)


def checking(results: Iterable[Mapping[str, Any]]) -> str:
    """Plots the seconds of a first `gradcheck` or `gradgradcheck` over the number of elements."""
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for result in results:
        size = sum(math.prod(shape) for shape in result["shapes"])
        for form in ("jaxfn", TORCH):
            value = result["values"].get(form)
            if result["unit"] == "seconds" and not result["warm_ups"] and value is not None:
                lines.setdefault((form, result["check"]), []).append((size, value))
    sizes, seconds = zip(*(point for line in lines.values() for point in line), strict=True)
    left, right, bottom = 70, 500, 300
    x, y = _Axis(sizes, left, right), _Axis(seconds, bottom, _TOP)
    parts = [_text(left, 16, "seconds of a first check, by number of elements")]
    parts += [
        _line(x.at(n), bottom, x.at(n), _TOP) + _text(x.at(n), bottom + 18, f"{n:,g}", "middle") for n in x.ticks()
    ]
    parts += [_line(left, y.at(s), right, y.at(s)) + _text(left - 8, y.at(s) + 4, f"{s:g} s", "end") for s in y.ticks()]
    for row, ((form, check), line) in enumerate(lines.items()):
        color, is_filled = _COLORS[form == TORCH], check == "gradcheck"
        path = " ".join(f"{x.at(size):.1f},{y.at(value):.1f}" for size, value in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [_circle(x.at(size), y.at(value), color, is_filled) for size, value in line]
        parts.append(_circle(right + 30, 70 + 20 * row, color, is_filled))
        parts.append(_text(right + 42, 74 + 20 * row, f"{form}, {check}"))
    return _svg(bottom + 30, parts)


class _Axis:
    """A logarithmic axis from `start` to `end`, in pixels, around all values."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        self.low, self.high = min(values) / 1.15, max(values) * 1.15
        self.start, self.end = start, end

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Returns powers of 2 or, if there are many, of 10."""
        base = 2 if self.high / self.low < 100 else 10
        first, last = (math.log(value, base) for value in (self.low, self.high))
        return [float(base) ** power for power in range(math.ceil(first), math.floor(last) + 1)]


def _dots(title: str, marks: Mapping[str, Sequence[_Mark]]) -> str:
    """Plots ratios on a logarithmic axis, with a row for each label, and a color and a height for each series."""
    series = list(dict.fromkeys(mark.series for row in marks.values() for mark in row))
    axis = _Axis([1, *(mark.value for row in marks.values() for mark in row)], _LEFT, _WIDTH - _RIGHT)
    bottom = _TOP + _ROW * len(marks)
    parts = [_text(8, 16, title)]
    for tick in axis.ticks():
        parts.append(_line(axis.at(tick), _TOP, axis.at(tick), bottom, 0.8 if tick == 1 else 0.25))
        parts.append(_text(axis.at(tick), bottom + 16, f"{tick:g}", "middle"))
    for row, (label, found) in enumerate(marks.items()):
        middle = _TOP + _ROW * (row + 0.5)
        parts.append(_text(_LEFT - 10, middle + 4, label, "end"))
        for value, name, is_filled in found:
            y = middle + _STEP * (series.index(name) - (len(series) - 1) / 2)
            parts.append(_circle(axis.at(value), y, _COLORS[series.index(name)], is_filled))
    for i, name in enumerate(series):
        x = _LEFT + i * (_WIDTH - _LEFT) / len(series)
        parts.append(_circle(x, 34, _COLORS[i], is_filled=True) + _text(x + 9, 38, name))
    return _svg(bottom + 26, parts)


def _svg(height: float, parts: Iterable[str]) -> str:
    box = f'viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}"'
    return "\n".join(
        [f'<svg xmlns="http://www.w3.org/2000/svg" {box}>', f"<style>{_STYLE}</style>", *parts, "</svg>\n"]
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float = 0.25) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" opacity="{opacity}"/>'


def _circle(x: float, y: float, color: str, is_filled: bool) -> str:
    fill = color if is_filled else "none"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{fill}" stroke="{color}" stroke-width="1.5"/>'
