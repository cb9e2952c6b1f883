"""Derivatives along many vectors, by rules and by finite differences, in batches that fit into memory.

Results are compared on the host, and compiled functions compute little but the user's code: XLA takes longer to
compile such arithmetic than NumPy to evaluate it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_map

from jaxfn._check.modes import Derivative, LeafFunction
from jaxfn._check.staging import bytes_per_call
from jaxfn._gradcheck.evaluation.execution import CompiledFunction, ExecutionMode
from jaxfn._gradcheck.evaluation.vectors import Arrays, Vectors
from jaxfn._gradcheck.report.progress import Progress
from jaxfn._gradcheck.tolerance import SAFETY

# Larger batches are slower, as they no longer fit into the processor's caches.
BATCH_BYTES = 16 << 20
_LOOP_BATCH = 64
# Points in units of the step, and the weights of the values there: in the derivative, and in an estimate of its error.
_CENTRAL = (1, -1, 2, -2), (2 / 3, -2 / 3, -1 / 12, 1 / 12), (1 / 2, -1 / 2, -1 / 4, 1 / 4)
_FORWARD = (0, 1, 2, 3), (-11 / 6, 3, -3 / 2, 1 / 3), (-2 / 3, 2, -2, 2 / 3)
_STEPS = _CENTRAL[0]
# Differences for where those are not finite, next to the end of a function's domain, with factors of the step.
_OTHERS = [
    (stencil, sign * 10.0**-k) for k in range(9) for stencil, sign in ((_CENTRAL, 1), (_FORWARD, 1), (_FORWARD, -1))
]
_SMALL_ERROR = 1e-6  # relative to the derivative
_AS_GOOD = 1.1
_DIFFERENCE_ULPS = 4  # rounding error of a difference of two values, in units in their last place


def points(xs: Sequence[Any], vectors: Arrays, step: float) -> Arrays:
    """Returns the points at which finite differences along vectors evaluate the function, four for each vector."""
    steps = step * np.asarray(_STEPS, float)
    return [_points(np.asarray(x), v, steps.reshape(-1, *[1] * x.ndim)) for x, v in zip(xs, vectors, strict=True)]


def _points(x: Any, vectors: Any, steps: Any) -> Any:
    return (x + steps * vectors[:, None]).reshape(len(steps) * len(vectors), *x.shape)


def differences(outputs: Arrays, step: float, precision: float, stencil: Any = _CENTRAL) -> tuple[Arrays, Arrays]:
    """Returns derivatives from values at the points of a stencil, by default `points`, and bounds of their errors.

    Each has shape (vectors, size), for each output; a bound of a complex number has those of both parts. Central
    differences are of fourth order in the step.
    """
    values: Arrays = []
    errors: Arrays = []
    for y in outputs:
        rows = y.reshape(len(y) // len(_STEPS), len(_STEPS), math.prod(y.shape[1:]))
        value, error = (sum(w / step * rows[:, i] for i, w in enumerate(weights)) for weights in stencil[1:])
        values.append(value)
        rounding = _DIFFERENCE_ULPS * precision / abs(step) * abs(rows[:, 0])
        bound = SAFETY * abs(error.real) + rounding
        errors.append(bound + 1j * (SAFETY * abs(error.imag) + rounding) if np.iscomplexobj(error) else bound)
    return values, errors


def _listed(*results: Arrays) -> list[Arrays]:
    return list(results)


class BatchedEvaluator:
    """Evaluation of derivatives along many vectors."""

    def __init__(self, mode: ExecutionMode, xs: Sequence[Any], max_memory: int, progress: Progress) -> None:
        self.mode = mode
        self.xs = list(xs)
        self.max_memory = max_memory
        self.progress = progress
        self._executables: dict[Any, tuple[Any, int, Any]] = {}

    def at(self, xs: Sequence[Any]) -> BatchedEvaluator:
        """Returns an evaluator at another point that shares the executables."""
        evaluator = BatchedEvaluator(self.mode, xs, self.max_memory, self.progress)
        evaluator._executables = self._executables
        return evaluator

    def along(self, derivatives: Sequence[Derivative], vectors: Vectors) -> list[Arrays]:
        """Evaluates derivatives along all vectors; each result is an array of shape (vectors, size)."""
        return _flat(self.batches(derivatives, vectors))

    def batches(
        self, derivatives: Sequence[Derivative], vectors: Vectors, combine: Callable[..., list[Arrays]] = _listed
    ) -> Iterator[list[Arrays]]:
        """Evaluates derivatives along one batch of vectors after the other; results are not flattened.

        Args:
          derivatives: derivatives of one mode.
          vectors: the cotangents or tangents.
          combine: computes the results from those of all derivatives for one vector.
        """

        def compute(derivatives: Sequence[Derivative], xs: Arrays, components: Arrays) -> list[Arrays]:
            every = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in vectors.leaves]
            for i, vector in zip(vectors.chosen, vectors.expand(components), strict=True):
                every[i] = vector
            return combine(*(f(xs, every)[1] for f in derivatives))

        key = *map(id, derivatives), combine
        return self._batches(key, compute, derivatives, vectors, vectors.make)

    def differences(
        self, function: LeafFunction, vectors: Vectors, step: float, precision: float
    ) -> tuple[Arrays, Arrays]:
        """Returns finite differences of a function along vectors of inputs; see `differences`.

        Where they are not finite, those of shorter steps or of one side with the smallest relative error are used.
        """

        def along(stencil: Any, step: float) -> tuple[Arrays, Arrays]:
            outputs = self._at_points(function, vectors, step * np.asarray(stencil[0], float))
            return differences(outputs, step, precision, stencil)

        values, errors = along(_CENTRAL, step)
        missing = [~np.isfinite(error) for error in errors]
        for stencil, factor in _OTHERS:
            if all((abs(e) <= _SMALL_ERROR * abs(v))[m].all() for v, e, m in zip(values, errors, missing, strict=True)):
                break
            for i, (value, error) in enumerate(zip(*along(stencil, factor * step), strict=True)):
                # Of relative errors that are about equal, that of the shorter step is right.
                is_worse = abs(error * values[i]) > _AS_GOOD * abs(errors[i] * value)
                is_better = missing[i] & np.isfinite(error) & ~is_worse
                values[i], errors[i] = np.where(is_better, value, values[i]), np.where(is_better, error, errors[i])
        return values, errors

    def _at_points(self, function: LeafFunction, vectors: Vectors, steps: Any) -> Arrays:
        """Evaluates a function at some steps along each of the vectors."""

        def compute(functions: Sequence[LeafFunction], xs: Arrays, step_and_components: Arrays) -> list[Arrays]:
            step, *components = step_and_components
            moved = list(xs)
            for i, vector in zip(vectors.chosen, vectors.expand(components), strict=True):
                moved[i] = xs[i] + step * vector
            return [list(function(*moved)) for function in functions]

        def make(numbers: Any) -> Arrays:
            every = (np.repeat(array, len(steps), axis=0) for array in vectors.make(numbers))
            return [np.tile(steps, len(numbers)), *every]

        (outputs,) = _flat(self._batches((id(function),), compute, [function], vectors, make, len(steps)))
        return outputs

    def _batches(
        self,
        key: tuple[Any, ...],
        compute: Callable[..., list[Arrays]],
        functions: Sequence[Any],
        vectors: Vectors,
        make: Callable[[Any], Arrays],
        each: int = 1,
    ) -> Iterator[list[Arrays]]:
        """Runs `compute` on what `make` returns for the indices of vectors, `each` evaluations for every index.

        While one batch is compared, the next one is computed.
        """
        types = (array.dtype for array in make(np.zeros(1, int)))  # indices of unit vectors, or vectors themselves
        key = *key, vectors.chosen, vectors.count, *types
        if key not in self._executables:
            # With the functions, so that no other one gets the `id` of one of them.
            self._executables[key] = functions, *self._compile(compute, functions, vectors.count, make, each)
        _, batch, executable = self._executables[key]
        self.progress.expect(vectors.count)
        before: tuple[int, Callable[[], list[Arrays]]] | None = None
        for start in range(0, vectors.count, batch):
            numbers = np.arange(start, min(start + batch, vectors.count))
            # The last batch is padded, so that one executable serves all.
            padded = np.concatenate([numbers, np.repeat(numbers[-1:], batch - len(numbers))])
            computing = len(numbers), executable.start(functions, self.xs, make(padded))
            if before:
                yield self._finished(*before, each)
            before = computing
        if before:
            yield self._finished(*before, each)

    def _finished(self, count: int, results: Callable[[], list[Arrays]], each: int) -> list[Arrays]:
        computed = [[array[: count * each] for array in arrays] for arrays in results()]
        self.progress.advance(count)
        return computed

    def _compile(
        self,
        compute: Callable[..., list[Arrays]],
        functions: Sequence[Any],
        count: int,
        make: Callable[[Any], Arrays],
        each: int,
    ) -> tuple[int, Any]:
        """Returns the batch size, and the executable for one batch."""
        batch = min(count, self._fitting(each * sum(map(bytes_per_call, functions))))

        def run(functions: Sequence[Any], xs: Arrays, batch: Arrays) -> list[Arrays]:
            return self.mode.map(lambda *items: compute(functions, xs, items), *batch)

        while True:
            args = functions, self.xs, make(np.zeros(batch, int))
            executable = self.mode.prepare(run, *args, runs=-(-count // batch))
            if batch == 1 or not isinstance(executable, CompiledFunction) or executable.bytes() <= self.max_memory:
                return batch, executable
            batch = (batch + 1) // 2

    def _fitting(self, bytes_per_call: int) -> int:
        if self.mode is ExecutionMode.PYTHON_LOOP:
            return _LOOP_BATCH
        return max(1, min(BATCH_BYTES, self.max_memory) // max(bytes_per_call, 1))


def _flat(batches: Iterator[list[Arrays]]) -> list[Arrays]:
    """Concatenates batches, each item flattened to a row."""
    return tree_map(as_rows, *batches)


def as_rows(*arrays: Any) -> Any:
    """Concatenates arrays along the first axis, with the other axes flattened."""
    return np.concatenate([a.reshape(len(a), math.prod(a.shape[1:])) for a in arrays])
