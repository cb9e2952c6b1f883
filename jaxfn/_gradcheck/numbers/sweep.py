"""Derivatives along many vectors, by rules and by finite differences, as many at a time as fit into memory.

Results are judged on the host, and little is computed in programs but functions of the user's: XLA takes longer to
compile such arithmetic than NumPy to do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_map

from jaxfn._gradcheck.numbers.programs import Mode, Program
from jaxfn._gradcheck.numbers.vectors import Arrays, Vectors
from jaxfn._gradcheck.problem.derivatives import Derivative
from jaxfn._gradcheck.problem.problem import OfLeaves
from jaxfn._gradcheck.problem.traced import bytes_each
from jaxfn._gradcheck.report.progress import Progress

# More at a time is slower: the numbers no longer fit into the processor's caches.
_BATCH_BYTES = 16 << 20
_LOOP_BATCH = 64
_STEPS = (1, -1, 2, -2)


def points(xs: Sequence[Any], vectors: Arrays, step: float) -> Arrays:
    """Returns the points at which finite differences along vectors evaluate the function, four for each vector."""
    steps = step * np.asarray(_STEPS, float)
    return [_points(np.asarray(x), v, steps.reshape(-1, *[1] * x.ndim)) for x, v in zip(xs, vectors, strict=True)]


def _points(x: Any, vectors: Any, steps: Any) -> Any:
    return (x + steps * vectors[:, None]).reshape(len(steps) * len(vectors), *x.shape)


def differences(outputs: Arrays, step: float) -> tuple[Arrays, Arrays]:
    """Derivatives of values at `points`, exact to the fourth order of the step, and estimates of their errors.

    For each output these are arrays of (vectors, size).
    """
    values: Arrays = []
    errors: Arrays = []
    for y in outputs:
        rows = y.reshape(len(y) // len(_STEPS), len(_STEPS), math.prod(y.shape[1:]))
        above, below, far_above, far_below = np.moveaxis(rows, 1, 0)
        near, far = (above - below) / (2 * step), (far_above - far_below) / (4 * step)
        values.append((4 * near - far) / 3)
        errors.append(near - far)
    return values, errors


def _listed(*results: Arrays) -> list[Arrays]:
    return list(results)


class Sweep:
    """Runs functions for many vectors.

    Args:
      xs: where the derivatives are taken.
      max_memory: bytes that one batch may need.
    """

    def __init__(self, mode: Mode, xs: Sequence[Any], max_memory: int, progress: Progress) -> None:
        self.mode = mode
        self.xs = list(xs)
        self.max_memory = max_memory
        self.progress = progress
        self._programs: dict[Any, tuple[int, Any]] = {}

    def at(self, xs: Sequence[Any]) -> Sweep:
        """A sweep of the same programs at other inputs."""
        sweep = Sweep(self.mode, xs, self.max_memory, self.progress)
        sweep._programs = self._programs
        return sweep

    def along(self, derivatives: Sequence[Derivative], vectors: Vectors) -> list[Arrays]:
        """Evaluates derivatives along all vectors; each result is an array of shape (vectors, size)."""
        return _flat(self.batches(derivatives, vectors))

    def batches(
        self, derivatives: Sequence[Derivative], vectors: Vectors, combine: Callable[..., list[Arrays]] = _listed
    ) -> Iterator[list[Arrays]]:
        """Evaluates derivatives along one batch of vectors after the other; results keep their shapes.

        Args:
          derivatives: in the same direction.
          vectors: of that.
          combine: what to compute from all that they give for one vector.
        """

        def compute(derivatives: Sequence[Derivative], xs: Arrays, given: Arrays) -> list[Arrays]:
            every = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in vectors.leaves]
            for i, vector in zip(vectors.chosen, vectors.expand(given), strict=True):
                every[i] = vector
            return combine(*(f(xs, every)[1] for f in derivatives))

        key = *map(id, derivatives), combine  # the derivatives live as long as the check
        return self._batches(key, compute, derivatives, vectors, vectors.make)

    def differences(self, function: OfLeaves, vectors: Vectors, step: float) -> tuple[Arrays, Arrays]:
        """Finite differences of a function along vectors of inputs, and their errors; see `differences`."""
        steps = step * np.asarray(_STEPS, float)

        def compute(functions: Sequence[OfLeaves], xs: Arrays, given: Arrays) -> list[Arrays]:
            moved = list(xs)
            for i, vector in zip(vectors.chosen, vectors.expand(given[1:]), strict=True):
                moved[i] = xs[i] + given[0] * vector
            return [list(function(*moved)) for function in functions]

        def make(numbers: Any) -> Arrays:
            every = (np.repeat(array, len(steps), axis=0) for array in vectors.make(numbers))
            return [np.tile(steps, len(numbers)), *every]

        (outputs,) = _flat(self._batches((id(function),), compute, [function], vectors, make, len(_STEPS)))
        return differences(outputs, step)

    def _batches(
        self,
        key: tuple[Any, ...],
        compute: Callable[..., list[Arrays]],
        functions: Sequence[Any],
        vectors: Vectors,
        make: Callable[[Any], Arrays],
        each: int = 1,
    ) -> Iterator[list[Arrays]]:
        """Runs `compute` on what `make` returns for the numbers of vectors, `each` evaluations for every number.

        While one batch is looked at, the next one is computed.
        """
        types = (array.dtype for array in make(np.zeros(1, int)))  # numbers of unit vectors, or vectors themselves
        key = *key, vectors.chosen, vectors.count, *types
        if key not in self._programs:
            self._programs[key] = self._program(compute, functions, vectors.count, make, each)
        batch, program = self._programs[key]
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
        count: int,
        make: Callable[[Any], Arrays],
        each: int,
    ) -> tuple[int, Any]:
        """Returns how many of the vectors run at a time, and the program for them."""
        batch = min(count, self._fitting(each * sum(map(bytes_each, functions))))

        def run(functions: Sequence[Any], xs: Arrays, given: Arrays) -> list[Arrays]:
            return self.mode.map(lambda *given: compute(functions, xs, given), *given)

        while True:
            args = functions, self.xs, make(np.zeros(batch, int))
            program = self.mode.program(run, *args, runs=-(-count // batch))
            if batch == 1 or not isinstance(program, Program) or program.bytes() <= self.max_memory:
                return batch, program
            batch = (batch + 1) // 2

    def _fitting(self, bytes_each: int) -> int:
        if self.mode is Mode.PYTHON_LOOP:
            return _LOOP_BATCH
        return max(1, min(_BATCH_BYTES, self.max_memory) // max(bytes_each, 1))


def _flat(batches: Iterator[list[Arrays]]) -> list[Arrays]:
    """All batches in one, each item in a row."""
    return tree_map(_rows, *batches)


def _rows(*arrays: Any) -> Any:
    return np.concatenate([a.reshape(len(a), math.prod(a.shape[1:])) for a in arrays])
