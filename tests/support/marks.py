"""Marks of tests: rows of the contract, slow tests, and differences of JAX's experimental implementations."""

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

# The rows of docs/contract.md that a test is about: `@row("B4", "E1b")`.
row = pytest.mark.row
# Runs with `--all` only: it takes long, and a quicker test covers the row.
slow = pytest.mark.slow


def cells(names: str, quick: Sequence[Any], *values: Iterable[Any], ids: Any = None) -> pytest.MarkDecorator:
    """Parametrizes a test by a table: the cells in `quick` always run, the others of the product of `values` with
    `--all`.

    Args:
      names: Names of the parameters, separated by commas.
      quick: One tuple for each cell, or one value where there is one parameter.
      *values: All values of each parameter. Default: the cells in `quick` are all there are.
      ids: As in `pytest.mark.parametrize`.
    """
    others = list(itertools.product(*values)) if values else []
    if "," not in names:
        others = [value for (value,) in others]
    if unknown := [cell for cell in quick if values and cell not in others]:
        raise ValueError(f"not in the product: {unknown}")
    rest = [pytest.param(*(c if "," in names else [c]), marks=slow) for c in others if c not in quick]
    return pytest.mark.parametrize(names, [*quick, *rest], ids=ids)


# JAX's experimental implementations, which are switched on in the environment. Not strict: of a test with a table of
# cells, some differ.
EXPERIMENTAL = bool(int(os.environ.get("JAX_CUSTOM_VJP3", "0")))


def _differs(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(EXPERIMENTAL, reason=reason, strict=False)


ALL_PERTURBED = _differs("JAX_REMAT3 says that every input of a checkpoint is perturbed")
TWO_TRACES = _differs("JAX_REMAT3 takes the value of a checkpoint from another trace")
LOGS_AGAIN = _differs("JAX_REMAT3 logs what a checkpoint computes again")
CACHES_TRACES = _differs("JAX_CUSTOM_VJP3 caches traces, and what they hold, until its caches are full or cleared")
TRACES_ALWAYS = _differs("JAX_CUSTOM_VJP3 traces a custom_vjp of concrete values too")
HIGH_PRIMITIVES = _differs(
    "JAX_CUSTOM_VJP3 and JAX_CUSTOM_JVP3 stage a call_hi_primitive, whose params, rules and messages differ"
)
