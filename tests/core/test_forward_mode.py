"""Contract rows D4-D7 and B11: forward mode and reverse mode of one Function, in every mix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.both_modes import CASES, Case
from tests.support.derivatives import ALL, DERIVATIVES, JACOBIANS, check, jit, taken
from tests.support.marks import cells, row, slow

ROWS = 8
BY_NAME = {case.name: case for case in CASES}


def rows_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch whose first row is `args`."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.arange(float(ROWS)).reshape(ROWS, *[1] * x.ndim), args)


def first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


@pytest.fixture(scope="module")
def expected() -> Callable[[Case], dict[str, Any]]:
    """The expected value of every derivative of a case, for all rows."""
    found: dict[str, dict[str, Any]] = {}

    def of(case: Case) -> dict[str, Any]:
        if case.name not in found:

            def each(*args: Any) -> dict[str, Any]:
                return {name: d(case.reference(modes), args) for name, (modes, d) in ALL.items()}

            found[case.name] = jit(jax.vmap(each))(*rows_of(case.args))
        return found[case.name]

    return of


def sharded(f: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    mesh = jax.make_mesh((ROWS,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)


# How derivatives of one row are taken.
SINGLE = {
    "eager": lambda f: taken(f, DERIVATIVES),
    "jit": lambda f: jit(taken(f, ALL)),
    "checkpoint_of_jit": lambda f: jit(taken(jax.checkpoint(jax.jit(f)), DERIVATIVES | JACOBIANS)),
}
# How derivatives of all rows are taken: of a function of all rows, and then row by row.
MAPPED = {
    "of_vmap": lambda f: taken(jax.vmap(f), DERIVATIVES),
    "of_scan": lambda f: taken(lambda *rows: jax.lax.map(lambda row: f(*row), rows), DERIVATIVES),
    "of_shard_map_check_vma": lambda f: taken(sharded(jax.vmap(f), True), DERIVATIVES),
    "of_shard_map": lambda f: taken(sharded(jax.vmap(f), False), DERIVATIVES),
    "vmap": lambda f: jax.vmap(taken(f, DERIVATIVES | JACOBIANS)),
    "shard_map_check_vma": lambda f: sharded(jax.vmap(taken(f, DERIVATIVES | JACOBIANS)), True),
    "shard_map": lambda f: sharded(jax.vmap(taken(f, JACOBIANS)), False),
}


@row("D4", "D7")
@cells(
    "name, how",
    [("output", "checkpoint_of_jit"), ("two_inputs", "jit"), ("non_differentiable", "eager")],
    BY_NAME,
    SINGLE,
)
def test_each_mode_has_its_own_rule(name, how, expected):
    case = BY_NAME[name]
    check(SINGLE[how](case.apply)(*case.args), first(expected(case)))


@row("D4", "D7")
@slow
@pytest.mark.parametrize("how", MAPPED)
@pytest.mark.parametrize("name", ["output", "intermediate", "pytrees", "integers", "non_differentiable"])
def test_each_mode_has_its_own_rule_when_mapped(name, how, expected):
    case = BY_NAME[name]
    check(jit(MAPPED[how](case.apply))(*rows_of(case.args)), expected(case))


@row("D7")
def test_jacobians_run_eagerly_too(expected):
    check(taken(CASES[0].apply, JACOBIANS)(*CASES[0].args), first(expected(CASES[0])))
