"""`python -m benchmarks`: measures, prints the tables, saves them as JSON."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import jax

from benchmarks import checking, kernels, operations, pages, saved, suite, table, training
from benchmarks.environment import environment
from benchmarks.functions import TORCH, installed_forms
from benchmarks.measure import settle

_R = TypeVar("_R")

_FULL = suite.Effort(calls=40, builds=20, compiles=5, steps=20)
_QUICK = suite.Effort(calls=8, builds=2, compiles=1, steps=8)


def main() -> None:
    options = _arguments()
    if options.device and jax.default_backend() == "cpu":
        raise SystemExit("JAX sees no GPU or TPU here (jax.devices() has CPUs only): nothing was measured.")
    begin = time.perf_counter()
    jax.config.update("jax_enable_compilation_cache", False)  # otherwise compilations are read from disk
    where = environment()
    print(", ".join(f"{name} {value}" for name, value in where.items() if value is not None))
    path = saved.path_for(where) if options.save else options.output
    for part in options.only or _parts(options):
        saved.update(path, where, options.quick, {part: [result.as_json() for result in _measured(part, options)]})
    if options.save:
        pages.write()
    print(f"\n{time.perf_counter() - begin:.0f} s; saved to {path}")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="What a Function costs in four forms.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results.json"), help="the JSON file")
    parser.add_argument(
        "--save", action="store_true", help="store the figures in benchmarks/results, and show them in README and docs"
    )
    parser.add_argument("--only", action="append", choices=saved.PARTS, help="measure this part; may be repeated")
    parser.add_argument("--device", action="store_true", help="what is to be measured on a GPU or TPU: kernels, traces")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="few samples, and the Functions only unless --only names another part: a minute, and more noise",
    )
    return parser.parse_args()


def _parts(options: argparse.Namespace) -> tuple[str, ...]:
    if options.device:
        return (saved.FUNCTIONS, saved.KERNELS)
    return (saved.FUNCTIONS,) if options.quick else saved.PARTS


def _measured(part: str, options: argparse.Namespace) -> list[Any]:
    """Returns the results of one part, and prints them as they are measured."""
    effort = _QUICK if options.quick else _FULL
    forms = installed_forms() if part in (saved.FUNCTIONS, saved.CHECKING) else {}
    if part == saved.FUNCTIONS:
        settle()
        rows = (suite.traces if options.device else suite.run)(forms, effort)
        found = _printed(table.header(list(forms)), rows, table.lines(list(forms)))
        if not options.quick:  # of whose few samples half are noise
            print("\n" + "\n".join(table.summary(found)))
        return found
    if part == saved.CHECKING:
        return _with_targets(_printed(checking.header(), checking.run(TORCH in forms), checking.Result.line))
    if part == saved.TRAINING:
        return _with_targets(_printed(training.header(), training.run(effort.steps), training.Result.line))
    if part == saved.OPERATIONS:
        return _printed(operations.header(), operations.run(effort.steps), operations.Result.line)
    return _printed(kernels.header(), kernels.run(effort.steps), kernels.Result.line)


def _printed(header: str, results: Iterator[_R], text: Callable[[_R], str]) -> list[_R]:
    print("\n" + header)
    found: list[_R] = []
    for result in results:
        print(text(result), flush=True)
        found.append(result)
    return found


def _with_targets(results: list[_R]) -> list[_R]:
    """Returns the results, and prints those that miss their target."""
    compared: list[Any] = [result for result in results if cast(Any, result).is_met is not None]
    missed = [result for result in compared if not result.is_met]
    print(f"\n{len(compared) - len(missed)} of {len(compared)} targets met" + (". Not met:" if missed else ""))
    for result in missed:
        print(result.line())
    return results


if __name__ == "__main__":
    main()
