"""The saved figures as tables and plots of README.md and the pages: `python -m benchmarks.pages`."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import checking, plots, saved
from benchmarks.functions import HAND_WRITTEN, TORCH
from benchmarks.table import shown

_ROOT = Path(__file__).parents[1]
_FORMS = ("jaxfn", "equinox", TORCH)
_MODEL_FORMS = ("from_torch", "flax", TORCH)
_MEASUREMENTS = (  # in the table of medians
    "eager call",
    "eager value-and-grad",
    "trace",
    "compiled step",
    "hessian",
    "saved bytes",
    "peak memory",
)
_FIGURES = re.compile(r"(<!-- figures: python -m benchmarks.pages -->\n\n).*?(\n\n<!-- end of figures -->)", re.DOTALL)


def write() -> None:
    """Writes the tables into the pages, between the comments there, and the plots."""
    for path, make in PAGES.items():
        path.write_text(with_figures(path.read_text(), make(saved.load_all())))
    for path, plot in pictures(saved.load_all()).items():
        path.write_text(plot)


def with_figures(page: str, figures: str) -> str:
    """Returns the page with its figures replaced by these."""
    return _FIGURES.sub(lambda found: f"{found[1]}{figures}{found[2]}", page)


def readme(figures: Sequence[Mapping[str, Any]]) -> str:
    """Returns README's tables, of the first machine: medians of ratios to the hand-written rule, and whole models."""
    functions = _first(figures, saved.FUNCTIONS)
    models = _first(figures, saved.TRAINING)
    steps = [
        [result["model"], *_cells(result["values"], _MODEL_FORMS, result["unit"])]
        for result in models[saved.TRAINING]
        if result["measurement"] == "step"
    ]
    tables = [_medians(functions[saved.FUNCTIONS]), _table(["training step", *_MODEL_FORMS], steps)]
    return "\n\n".join([f"On {_machine(functions)}:", *tables])


def sentence(figures: Sequence[Mapping[str, Any]]) -> str:
    """Returns jaxfn's ratios to the hand-written rule, for the FAQ: their medians, smallest and largest."""
    content = _first(figures, saved.FUNCTIONS)
    parts: list[str] = []
    for measurement in ("compiled step", "trace", "eager value-and-grad", "eager call"):
        found = _ratios(content[saved.FUNCTIONS], measurement, "jaxfn")
        parts.append(f"{measurement} {statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})")
    return f"Times over those of a hand-written rule, on {_machine(content)}: {', '.join(parts)}."


def _first(figures: Iterable[Mapping[str, Any]], part: str) -> Mapping[str, Any]:
    return next(content for content in figures if content.get(part))


def _ratios(rows: Iterable[Mapping[str, Any]], measurement: str, form: str) -> list[float]:
    found = [row["ratios_to_hand_written"].get(form) for row in rows if row["measurement"] == measurement]
    return [ratio for ratio in found if ratio is not None]


def _medians(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the medians, over all Functions and networks, of the ratios to the hand-written rule."""
    cells: list[list[str]] = []
    for measurement in _MEASUREMENTS:
        found = [_ratios(rows, measurement, form) for form in _FORMS]
        cells.append([measurement, *(f"{statistics.median(values):.2f}" if values else "" for values in found)])
    return _table(["", *_FORMS], cells)


def everything(figures: Sequence[Mapping[str, Any]]) -> str:
    """Returns tables of all figures of every machine."""
    parts: list[str] = []
    for content in figures:
        details: list[str] = []
        environment = content["environment"]
        name = environment["device"] if environment["backend"] != "cpu" else environment["processor"]
        parts.append(f"## {name}\n\nMeasured on {_machine(content)}.")
        for part, (title, make) in _PARTS.items():
            if content.get(part):
                parts += [f"### {title}", *_shown_plot(content, part)]
                if part == saved.FUNCTIONS:  # a long table, so its medians come first
                    parts.append(_medians(content[part]))
                    details += ["### Each Function and network", make(content[part])]
                else:
                    parts.append(make(content[part]))
        parts += details
    return "\n\n".join(parts)


def pictures(kept: Sequence[Mapping[str, Any]]) -> dict[Path, str]:
    """Returns the plots of every machine, by the paths of their files."""
    return {
        _plot_path(content, part): plot(content[part])
        for content in kept
        for part, (plot, _) in _PLOTS.items()
        if content.get(part)
    }


def _plot_path(content: Mapping[str, Any], part: str) -> Path:
    return _PICTURES / f"{saved.path_for(content['environment']).stem}-{part}.svg"


def _shown_plot(content: Mapping[str, Any], part: str) -> list[str]:
    if part not in _PLOTS:
        return []
    path = _plot_path(content, part).relative_to(_PICTURES.parents[1])
    return [f"![{_PLOTS[part][1]}]({path.as_posix()})"]


def _machine(content: Mapping[str, Any]) -> str:
    where = content["environment"]
    name = f"{where['processor']}, {where['cpus']} cores" if where["backend"] == "cpu" else f"one {where['device']}"
    packages = ("python", "jax", "equinox", "flax", "torch")
    return ", ".join([name, *(f"{package} {where[package]}" for package in packages if where.get(package))])


def _functions(rows: Iterable[Mapping[str, Any]]) -> str:
    cells: list[list[str]] = []
    for row in rows:
        medians, unit = row["medians"], row["unit"]
        ratios = [row["ratios_to_hand_written"].get(form) for form in _FORMS]
        cells.append(
            [
                f"{row['function']}, {row['network']}: {row['measurement']}",
                "" if medians[HAND_WRITTEN] is None else shown(medians[HAND_WRITTEN], unit),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            ]
        )
    return _table(["measurement", HAND_WRITTEN, *_FORMS], cells)


def _checking(results: Iterable[Mapping[str, Any]]) -> str:
    return _table(
        ["tanh(c x @ w)", *checking.FORMS],
        [[r["name"], *_cells(r["values"], checking.FORMS, r["unit"])] for r in results],
    )


def _training(results: Iterable[Mapping[str, Any]]) -> str:
    results = list(results)
    measured = {form for result in results for form in result["values"]}
    forms = [form for form in ("from_torch", "flax", TORCH, "torch.compile") if form in measured]
    return _table(
        ["training step", *forms],
        [[f"{r['model']}: {r['measurement']}", *_cells(r["values"], forms, r["unit"])] for r in results],
    )


def _operations(results: Iterable[Mapping[str, Any]]) -> str:
    forms = ("from_torch", "plain JAX", TORCH)
    return _table(
        ["operation", *forms],
        [[f"{r['operation']}: {r['measurement']}", *_cells(r["medians"], forms, r["unit"])] for r in results],
    )


def _kernels(results: Iterable[Mapping[str, Any]]) -> str:
    forms = ("kernel", "plain JAX")
    return _table(
        ["", *forms],
        [
            [f"{r['kernel']}, {r['dtype']}: {r['measurement']}", *_cells(r["medians"], forms, r["unit"])]
            for r in results
        ],
    )


def _cells(values: Mapping[str, float | None], forms: Iterable[str], unit: str) -> list[str]:
    found = [values.get(form) for form in forms]
    return ["" if value is None else shown(value, unit) for value in found]


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["--:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


_PARTS: Mapping[str, tuple[str, Callable[[Iterable[Mapping[str, Any]]], str]]] = {
    saved.FUNCTIONS: ("A Function in four forms", _functions),
    saved.CHECKING: ("Checking derivatives", _checking),
    saved.TRAINING: ("Whole models", _training),
    saved.OPERATIONS: ("Operations", _operations),
    saved.KERNELS: ("Kernels", _kernels),
}
_PICTURES = _ROOT / "docs" / "pictures" / "benchmarks"
_PLOTS: Mapping[str, tuple[Callable[[Iterable[Mapping[str, Any]]], str], str]] = {
    saved.FUNCTIONS: (plots.functions, "Time and memory over the hand-written rule, by measurement and Function"),
    saved.CHECKING: (plots.checking, "Seconds of gradcheck by number of elements, in jaxfn and torch"),
    saved.TRAINING: (plots.training, "Training steps of whole models over those in flax"),
}
PAGES: Mapping[Path, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    _ROOT / "README.md": readme,
    _ROOT / "docs" / "benchmarks.md": everything,
    _ROOT / "docs" / "faq.md": sentence,
}

if __name__ == "__main__":
    write()
