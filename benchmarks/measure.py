"""Timing of several implementations, so that noise affects all of them equally."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

_K = TypeVar("_K")

Samples = dict[str, list[float]]


def medians(samples: Samples) -> dict[str, float]:
    """Returns the median of each form."""
    return {form: statistics.median(values) for form, values in samples.items()}


def summary(samples: Samples) -> dict[str, dict[str, float]]:
    """Returns the fields of a measurement that are saved: the median of each form, and its number of samples."""
    return {"medians": medians(samples), "num_samples": {form: len(values) for form, values in samples.items()}}


@contextmanager
def no_collection() -> Iterator[None]:
    """Disables the garbage collector during a timing, as `timeit` does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Excludes all existing objects from garbage collection, so that `no_collection` is quick."""
    gc.collect()
    gc.freeze()


def seconds(call: Callable[[], object], number: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns the seconds of one call, averaged over `number` calls."""
    begin = clock()
    for _ in range(number):
        call()
    return (clock() - begin) / number


def shuffled(names: Iterable[_K], round: int) -> list[_K]:
    """Returns the names in a new random order, so that none always follows one other name.

    After another library's code, the processor's caches are cold and that library's threads are still waiting.
    """
    return random.Random(round).sample(names := list(names), len(names))


def interleaved(
    calls: Mapping[_K, Callable[[], object]],
    rounds: int,
    sample_seconds: float = 0.004,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_K, list[float]]:
    """Returns the seconds of each call in each round; every round runs all of the calls.

    Args:
      calls: by name; each waits for its own result.
      rounds: how many samples of each.
      sample_seconds: how long one sample should take: short calls are repeated within it.
      clock: what measures; `time.process_time` counts the time of the processor, of all threads.
    """
    numbers: dict[_K, int] = {}
    for name, call in calls.items():
        seconds(call)  # warms up
        numbers[name] = max(1, round(sample_seconds / seconds(call, 3)))
    samples: dict[_K, list[float]] = {name: [] for name in calls}
    for i in range(rounds):
        with no_collection():
            for name in shuffled(calls, i):
                calls[name]()  # once untimed, since another library ran before
                samples[name].append(seconds(calls[name], numbers[name], clock))
    return samples


def quartiles(values: Sequence[float]) -> list[float]:
    """Returns the first quartile, the median and the third quartile; for one value, that value three times."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
