"""Timing several implementations so that noise falls on all of them alike."""

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


@contextmanager
def no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of a timing, as `timeit` does."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settle() -> None:
    """Takes everything made so far out of the collector's sight, so that `no_collection` is quick."""
    gc.collect()
    gc.freeze()


def seconds(call: Callable[[], object], number: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call, over `number` of them."""
    begin = clock()
    for _ in range(number):
        call()
    return (clock() - begin) / number


def shuffled(names: Iterable[_K], round: int) -> list[_K]:
    """The names in an order of this round's own, so that none always follows the same other one.

    What follows another library's code finds the processor's caches cold and that library's threads still waiting.
    """
    return random.Random(round).sample(names := list(names), len(names))


def interleaved(
    calls: Mapping[_K, Callable[[], object]],
    rounds: int,
    sample_seconds: float = 0.004,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[_K, list[float]]:
    """Seconds of each call in each round, every round going through all of the calls.

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
                calls[name]()  # once untimed, for the same reason
                samples[name].append(seconds(calls[name], numbers[name], clock))
    return samples


def quartiles(values: Sequence[float]) -> list[float]:
    """The first quartile, the median and the third quartile; of one value, three times itself."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
