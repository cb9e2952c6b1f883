"""What tests are marked with: rows of the contract, the lane, and what JAX's coming implementations do otherwise."""

import os
from collections.abc import Container, Iterable
from typing import Any

import pytest

# The rows of docs/contract.md that a test is about: `@row("B4", "E1b")`.
row = pytest.mark.row
# Left out without `--all`: it takes long, and a quicker test is about the same row.
thorough = pytest.mark.thorough
# Without `--all`, only as many of its cases run as show each value of each parameter; with it, each pair of values,
# which where there are two parameters is all cases. `--product` runs all of them.
sampled = pytest.mark.sampled


def lane_cases(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """The values of a parameter, all but these few thorough."""
    return [pytest.param(value, marks=() if value in quick else thorough) for value in values]


# JAX's coming implementations, which are switched on in the environment.
COMING = bool(int(os.environ.get("JAX_CUSTOM_VJP3", "0")))
ALL_PERTURBED = pytest.mark.xfail(
    COMING, reason="JAX_REMAT3 says that every input of a checkpoint is perturbed", strict=False
)
TWO_TRACES = pytest.mark.xfail(COMING, reason="JAX_REMAT3 takes the value of a checkpoint from another trace")
KEEPS_TRACES = pytest.mark.xfail(
    COMING, reason="JAX_CUSTOM_VJP3 keeps traces, and what they hold, until its caches are full or cleared"
)
TRACES_ALWAYS = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces a custom_vjp even where its values are known")
NO_REMAT_TRANSPOSE = pytest.mark.xfail(COMING, reason="JAX_REMAT3 cannot transpose jax.checkpoint by itself yet")
