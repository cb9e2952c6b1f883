"""Going through all unit vectors of a basis, as many at a time as fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.tree_util import tree_map

from jaxfn._gradcheck.jacobian import Basis
from jaxfn._gradcheck.programs import Engine, Mode, Program, bytes_each
from jaxfn._gradcheck.progress import Progress

# More at a time is slower: the numbers no longer fit into the processor's caches.
_BATCH_BYTES = 16 << 20
_LOOP_BATCH = 64
_JUDGED_ON_HOST = 1 << 20  # numbers


class Sweep:
    """Runs functions of a batch of unit vectors over whole bases.

    Args:
      engine: how.
      xs: where the derivatives are taken.
      max_memory: bytes that one batch may need.
      progress: is told of every batch.
    """

    def __init__(self, engine: Engine, xs: Sequence[Any], max_memory: int, progress: Progress) -> None:
        self.engine = engine
        self.xs = list(xs)
        self.max_memory = max_memory
        self.progress = progress
        self._programs: dict[tuple[Callable[..., Any], int], tuple[int, Any]] = {}

    def at(self, xs: Sequence[Any]) -> Sweep:
        """A sweep of the same programs at other inputs."""
        sweep = Sweep(self.engine, xs, self.max_memory, self.progress)
        sweep._programs = self._programs
        return sweep

    def judged(
        self, basis: Basis, compute: Callable[..., Any], judge: Callable[..., Any], costs: Sequence[object], width: int
    ) -> Any:
        """What `judge` makes of everything that `compute` computes.

        Where all of it is small, it is judged on the host, which saves compiling that; otherwise batch by batch where
        it was computed, and only the verdicts come back.

        Args:
          basis: the vectors.
          compute: of the inputs and the vectors' numbers; returns arrays with one row for each number.
          judge: of such arrays; the same.
          costs: what `compute` calls for each vector.
          width: how many numbers it returns for each vector.
        """
        if basis.size * width <= _JUDGED_ON_HOST:
            return judge(self.over(basis, compute, costs))

        def both(xs: Any, numbers: Any) -> Any:
            return judge(compute(xs, numbers))

        return self.over(basis, both, costs)

    def over(
        self, basis: Basis, function: Callable[..., Any], costs: Sequence[object], which: Sequence[int] | None = None
    ) -> Any:
        """All results, on the host, one behind the other.

        Args:
          basis: the vectors.
          function: of the inputs and the vectors' numbers; returns arrays with one row for each number.
          costs: what it calls for each vector.
          which: the numbers of the vectors, by default all of them.
        """
        every = np.asarray(range(basis.size) if which is None else which, np.int32)
        batch, program = self._program(len(every), function, costs)
        self.progress.expect(len(every))
        parts: list[Any] = []
        for start in range(0, len(every), batch):
            numbers = every[start : start + batch]
            count = len(numbers)
            # The last batch is filled up, so that one program serves all.
            numbers = np.concatenate([numbers, np.repeat(numbers[-1:], batch - count)])
            parts.append(tree_map(partial(_on_host, count), program(self.xs, numbers)))
            self.progress.advance(count)
        return parts[0] if len(parts) == 1 else tree_map(_concatenated, *parts)

    def _program(self, size: int, function: Callable[..., Any], costs: Sequence[object]) -> tuple[int, Any]:
        """How many vectors at a time, and what to run for so many."""
        key = function, size
        if key not in self._programs:
            self._programs[key] = self._made(size, function, costs)
        return self._programs[key]

    def _made(self, size: int, function: Callable[..., Any], costs: Sequence[object]) -> tuple[int, Any]:
        batch = min(size, self._batch(costs))
        while True:
            program = self.engine.program(function, self.xs, np.zeros(batch, np.int32), runs=-(-size // batch))
            if batch == 1 or not isinstance(program, Program) or program.bytes() <= self.max_memory:
                return batch, program
            batch = (batch + 1) // 2

    def _batch(self, costs: Sequence[object]) -> int:
        if self.engine.mode is Mode.PYTHON_LOOP:
            return _LOOP_BATCH
        each = sum(map(bytes_each, costs))
        return max(1, min(_BATCH_BYTES, self.max_memory) // max(each, 1))


def _on_host(count: int, array: Any) -> Any:
    return np.asarray(array)[:count]


def _concatenated(*arrays: Any) -> Any:
    return np.concatenate(arrays)
