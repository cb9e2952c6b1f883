"""What is computed in a few random directions, for the smaller checks: one program for each mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.derivatives import Pullback, Pushforward
from jaxfn._gradcheck.jacobian import Basis, columns, richardson_differences
from jaxfn._gradcheck.problem import Leaf, OfLeaves
from jaxfn._gradcheck.programs import Engine, computation

Arrays = list[Any]
COMBINATION = (2.0, -3.0)
# That every rule is tried in: two random ones, their combination, zero.
DIRECTIONS = 4
_ELSEWHERE = 1.001


def random_vectors(leaves: Sequence[Leaf], seed: int) -> Arrays:
    """Normal numbers of each leaf's type, the same for the same seed; no global generator is touched."""
    generator = np.random.default_rng(seed)
    vectors: Arrays = []
    for leaf in leaves:
        values = generator.standard_normal(leaf.shape)
        if leaf.is_complex:
            values = values + 1j * generator.standard_normal(leaf.shape)
        vectors.append(np.asarray(values, leaf.dtype))
    return vectors


@computation("pushforward", "measured")
@dataclass(frozen=True)
class AutodiffAndDifferences:
    """For every output autodiff's derivatives in some directions, finite differences, and their errors."""

    engine: Engine
    pushforward: Pushforward
    measured: OfLeaves
    basis: Basis
    step: float

    def __call__(self, xs: Arrays, vectors: Arrays) -> Any:
        exact = columns(self.engine, self.pushforward, xs, self.basis, vectors)
        differences = richardson_differences(self.engine, self.measured, xs, self.basis, vectors, self.step)
        return list(zip(exact, *differences, strict=True))


@computation("forward", "pullback", "retraced", "missing", "alone", "sampled")
@dataclass(frozen=True)
class ReverseMode:
    """What the checks of reverse mode look at.

    Attributes:
      engine: how batches run.
      forward, pullback, retraced: see `Derivatives`.
      missing: by output, the pullback of the others.
      alone: by input, its gradient alone.
      sampled: the comparison of autodiff with finite differences, where there is one.
    """

    engine: Engine
    forward: OfLeaves
    pullback: Pullback
    retraced: Pullback | None
    missing: dict[int, Pullback]
    alone: dict[int, Pullback]
    sampled: AutodiffAndDifferences | None

    def __call__(self, xs: Arrays, first: Arrays, second: Arrays, samples: Arrays) -> dict[str, Any]:
        a, b = COMBINATION
        mixed = [a * u + b * v for u, v in zip(first, second, strict=True)]
        directions = [first, second, mixed, _zeros(first), *(_without(first, i) for i in self.missing)]
        batch = [jnp.stack(items) for items in zip(*directions, strict=True)]
        outputs, gradients = self.pullback(xs, first)
        both = [jnp.stack([x, x * _ELSEWHERE]) for x in xs]
        return {
            "outputs": list(self.forward(*xs)),
            "outputs of fwd": outputs,
            "gradients": gradients,
            "again": gradients if self.retraced is None else self.retraced(xs, first)[1],
            "batch": self.engine.map(lambda *cts: self.pullback(xs, cts)[1], *batch),
            "missing": [p(xs, [u for j, u in enumerate(first) if j != i])[1] for i, p in self.missing.items()],
            "alone": [p(xs, first) for p in self.alone.values()],
            "outputs batch": self.engine.map(lambda *xs: list(self.forward(*xs)), *both),
            "samples": [] if self.sampled is None else self.sampled(xs, samples),
        }


@computation("forward", "pushforward", "missing", "sampled")
@dataclass(frozen=True)
class ForwardMode:
    """What the checks of forward mode look at.

    Attributes:
      engine: how batches run.
      forward, pushforward: see `Derivatives`.
      missing: by input, the pushforward in which its tangent is a symbolic zero.
      sampled: as in `ReverseMode`.
    """

    engine: Engine
    forward: OfLeaves
    pushforward: Pushforward
    missing: dict[int, Callable[..., Any]]
    sampled: AutodiffAndDifferences | None

    def __call__(self, xs: Arrays, first: Arrays, second: Arrays, samples: Arrays) -> dict[str, Any]:
        batch = [jnp.stack(items) for items in zip(first, second, strict=True)]
        return {
            "outputs": list(self.forward(*xs)),
            "tangents": self.pushforward(xs, first),
            "batch": self.engine.map(lambda *ts: self.pushforward(xs, ts), *batch),
            "missing": [p(xs, first) for p in self.missing.values()],
            "zero": [self.pushforward(xs, _without(first, j)) for j in self.missing],
            "samples": [] if self.sampled is None else self.sampled(xs, samples),
        }


def _zeros(vectors: Arrays) -> Arrays:
    return [jnp.zeros_like(v) for v in vectors]


def _without(vectors: Arrays, position: int) -> Arrays:
    return [jnp.zeros_like(v) if i == position else v for i, v in enumerate(vectors)]
