"""`python -m benchmarks`: measures, prints the table, saves it as JSON."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import jax

from benchmarks import checking, kernels, suite, table, training
from benchmarks.environment import environment
from benchmarks.functions import TORCH, installed_forms
from benchmarks.measure import settle
from benchmarks.results import Row

_FULL = suite.Effort(calls=40, builds=20, compiles=5, steps=20)
_QUICK = suite.Effort(calls=8, builds=3, compiles=1, steps=8)


def main() -> None:
    options = _arguments()
    begin = time.perf_counter()
    jax.config.update("jax_enable_compilation_cache", False)  # a compilation found on disk is none
    forms = installed_forms()
    where = environment()
    print(", ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    rows = _measure(forms, _QUICK if options.quick else _FULL)
    print("\n" + "\n".join(table.summary(rows)))
    checks = _measure_checks(TORCH in forms, options.quick)
    models = [] if options.quick else _measure_models()
    measured_kernels = [] if options.quick else _measure_kernels()
    if options.quick:
        print("Quick: few samples, and one executable of each form; take the verdicts from a full run.")
    _save(
        options.output,
        {
            "environment": where,
            "quick": options.quick,
            "rows": [row.as_json() for row in rows],
            "checking": [c.as_json() for c in checks],
            "training": [m.as_json() for m in models],
            "kernels": [k.as_json() for k in measured_kernels],
        },
    )
    print(f"\n{time.perf_counter() - begin:.0f} s; saved to {options.output}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What a Function costs in four forms.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"), help="the JSON file")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few repeats and nothing that takes long: less than a minute, and more noise",
    )
    return parser.parse_args()


def _measure(forms: Mapping[str, ModuleType], effort: suite.Effort) -> list[Row]:
    """Prints the table as it is measured."""
    print(table.header(list(forms)))
    rows: list[Row] = []
    settle()
    for row in suite.run(forms, effort):
        if not rows or table.title(rows[-1]) != table.title(row):
            print(table.title(row))
        print(table.line(row, list(forms)), flush=True)
        rows.append(row)
    return rows


def _measure_checks(has_torch: bool, quick: bool) -> list[checking.Result]:
    """Prints what checking derivatives costs, as it is measured."""
    print("\n" + checking.header())
    results: list[checking.Result] = []
    for result in checking.run(has_torch, quick):
        print(result.line(), flush=True)
        results.append(result)
    return results


def _measure_models() -> list[training.Result]:
    """Prints what training steps of whole torch models cost, as it is measured."""
    print("\n" + training.header())
    results: list[training.Result] = []
    for result in training.run(_FULL.steps):
        print(result.line(), flush=True)
        results.append(result)
    return results


def _measure_kernels() -> list[kernels.Result]:
    """Prints what kernels need and take, as it is measured."""
    print("\n" + kernels.header())
    results: list[kernels.Result] = []
    for result in kernels.run(_FULL.steps):
        print(result.line(), flush=True)
        results.append(result)
    return results


def _save(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
