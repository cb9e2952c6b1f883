"""Derivatives along many vectors, by rules and by finite differences, as many at a time as fit into memory.

Only functions of the user's run in compiled programs. Vectors are made, and results judged, on the host: XLA takes
longer to compile such arithmetic than NumPy to do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_map

from jaxfn._gradcheck.numbers.programs import Engine, Mode, Program
from jaxfn._gradcheck.numbers.vectors import Arrays, Vectors
from jaxfn._gradcheck.problem.derivatives import Derivative
from jaxfn._gradcheck.problem.problem import OfLeaves
from jaxfn._gradcheck.problem.traced import bytes_each
from jaxfn._gradcheck.report.progress import Progress

# More at a time is slower: the numbers no longer fit into the processor's caches.
_BATCH_BYTES = 16 << 20
_LOOP_BATCH = 64
_STEPS = (1, -1, 2, -2)


class Differences(NamedTuple):
    """Finite differences along some vectors, for each output an array of (vectors, size).

    Attributes:
      values: the derivatives.
      errors: estimates of their errors.
    """

    values: Arrays
    errors: Arrays


def points(xs: Sequence[Any], vectors: Arrays, step: float) -> Arrays:
    """Where finite differences along vectors evaluate the function, four places for each vector."""
    steps = step * np.asarray(_STEPS, float)
    return [_points(np.asarray(x), v, steps.reshape(-1, *[1] * x.ndim)) for x, v in zip(xs, vectors, strict=True)]


def _points(x: Any, vectors: Any, steps: Any) -> Any:
    return (x + steps * vectors[:, None]).reshape(len(steps) * len(vectors), *x.shape)


def differences(outputs: Arrays, step: float) -> Differences:
    """Derivatives of values at `points`: exact to the fourth order of the step, with an estimated error."""
    found = Differences([], [])
    for y in outputs:
        above, below, far_above, far_below = np.moveaxis(
            y.reshape(len(y) // len(_STEPS), len(_STEPS), y.shape[-1]), 1, 0
        )
        near, far = (above - below) / (2 * step), (far_above - far_below) / (4 * step)
        found.values.append((4 * near - far) / 3)
        found.errors.append(near - far)
    return found


class Sweep:
    """Runs functions for many vectors.

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
        self._programs: dict[Any, list[tuple[int, int, Any]]] = {}

    def at(self, xs: Sequence[Any]) -> Sweep:
        """A sweep of the same programs at other inputs."""
        sweep = Sweep(self.engine, xs, self.max_memory, self.progress)
        sweep._programs = self._programs
        return sweep

    def along(self, derivatives: Sequence[Derivative], vectors: Vectors, later: int = 0) -> list[Arrays]:
        """What each of some derivatives gives: for everything returned an array of (vectors, size).

        Args:
          derivatives: in the same direction.
          vectors: of that.
          later: how many other vectors will follow, so that the same program will do for them.
        """
        return _flat(self.batches(derivatives, vectors, later))

    def batches(self, derivatives: Sequence[Derivative], vectors: Vectors, later: int = 0) -> Iterator[list[Arrays]]:
        """The same, for one batch of the vectors after the other, and in the shapes of what is returned."""

        def compute(derivatives: Sequence[Derivative], xs: Arrays, given: Arrays) -> list[Arrays]:
            every = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in vectors.leaves]
            return [derivative(xs, _replaced(every, vectors.chosen, given))[1] for derivative in derivatives]

        return self._batches(compute, derivatives, vectors, vectors.make, 1, later)

    def differences(self, function: OfLeaves, vectors: Vectors, step: float) -> Differences:
        """Finite differences of a function along vectors of inputs."""
        chosen_xs = [self.xs[i] for i in vectors.chosen]

        def compute(functions: Sequence[OfLeaves], xs: Arrays, given: Arrays) -> list[Arrays]:
            return [list(function(*_replaced(xs, vectors.chosen, given))) for function in functions]

        def make(numbers: Any) -> Arrays:
            return points(chosen_xs, vectors.make(numbers), step)

        (outputs,) = _flat(self._batches(compute, [function], vectors, make, len(_STEPS), 0))
        return differences(outputs, step)

    def _batches(
        self,
        compute: Callable[..., list[Arrays]],
        functions: Sequence[Any],
        vectors: Vectors,
        make: Callable[[Any], Arrays],
        each: int,
        later: int,
    ) -> Iterator[list[Arrays]]:
        """What `compute` makes of what `make` makes of the numbers of vectors, `each` for every number.

        While one batch is looked at, the next one is computed.
        """
        wanted = max(vectors.count, later)
        batch, program = self._program(compute, functions, vectors, make, each, wanted)
        self.progress.expect(vectors.count)
        before: tuple[int, Callable[[], list[Arrays]]] | None = None
        for start in range(0, vectors.count, batch):
            numbers = np.arange(start, min(start + batch, vectors.count))
            # The last batch is filled up, so that one program serves all.
            padded = np.concatenate([numbers, np.repeat(numbers[-1:], batch - len(numbers))])
            computing = len(numbers), program.start(functions, self.xs, make(padded))
            if before:
                yield self._finished(*before, each)
            before = computing
        if before:
            yield self._finished(*before, each)

    def _finished(self, count: int, results: Callable[[], list[Arrays]], each: int) -> list[Arrays]:
        computed = [[array[: count * each] for array in arrays] for arrays in results()]
        self.progress.advance(count)
        return computed

    def _program(
        self,
        compute: Callable[..., list[Arrays]],
        functions: Sequence[Any],
        vectors: Vectors,
        make: Callable[[Any], Arrays],
        each: int,
        wanted: int,
    ) -> tuple[int, Any]:
        """How many vectors at a time, and what to run for so many."""
        batch = min(wanted, self._fitting(each * sum(map(bytes_each, functions))))
        key = *map(id, functions), vectors.chosen, each  # the functions live as long as the check
        for known in self._programs.get(key, ()):
            if known[0] >= batch:
                return known[1:]

        def run(functions: Sequence[Any], xs: Arrays, given: Arrays) -> list[Arrays]:
            return self.engine.map(lambda *given: compute(functions, xs, given), *given)

        asked = batch
        while True:
            args = functions, self.xs, make(np.zeros(batch, int))
            program = self.engine.program(run, *args, runs=-(-wanted // batch))
            if batch == 1 or not isinstance(program, Program) or program.bytes() <= self.max_memory:
                self._programs.setdefault(key, []).append((asked, batch, program))
                return batch, program
            batch = (batch + 1) // 2

    def _fitting(self, bytes_each: int) -> int:
        if self.engine.mode is Mode.PYTHON_LOOP:
            return _LOOP_BATCH
        return max(1, min(_BATCH_BYTES, self.max_memory) // max(bytes_each, 1))


def _replaced(arrays: Sequence[Any], positions: Sequence[int], given: Sequence[Any]) -> Arrays:
    replaced = list(arrays)
    for position, array in zip(positions, given, strict=True):
        replaced[position] = array
    return replaced


def _flat(batches: Iterator[list[Arrays]]) -> list[Arrays]:
    """All batches in one, each item in a row."""
    return tree_map(_rows, *batches)


def _rows(*arrays: Any) -> Any:
    return np.concatenate([a.reshape(len(a), -1) if a.size else a.reshape(len(a), 0) for a in arrays])
