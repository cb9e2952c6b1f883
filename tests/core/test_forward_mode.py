"""Contract rows D4-D7, D5b, B11 and E1c: the rules of one Function in every mix of modes, and along any axes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tests.support.both_modes import CASES
from tests.support.contexts import CONTEXTS
from tests.support.derivatives import ALL, DERIVATIVES, JACOBIANS, check, derivative, jit, modes_of, taken
from tests.support.marks import cells, row, slow

ROWS = 8
BY_NAME = {case.name: case for case in CASES}
# Which derivatives a Function has, by its rules.
IN_REVERSE, IN_BOTH_MODES = ("grad", "vjp of grad"), ("jvp", "grad", "jvp of grad", "grad of jvp")


def rows_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A batch whose first row is `args`, and each of whose rows has other values, so that an exchange shows."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.arange(float(ROWS)).reshape(ROWS, *[1] * x.ndim), args)


@functools.cache
def expected(name: str, rules: str, names: tuple[str, ...]) -> dict[str, Any]:
    """The derivatives of these names, for all rows."""
    case = BY_NAME[name]

    def each(*args: Any) -> dict[str, Any]:
        return {name: derivative(name, case.reference(modes_of(name), rules))(*args) for name in names}

    return jax.device_get(jit(jax.vmap(each))(*rows_of(case.args)))


def rows(wanted: dict[str, Any], which: Any) -> dict[str, Any]:
    return jax.tree.map(lambda x: x[which], wanted)


def sharded(f: Callable[..., Any], check_vma: bool) -> Callable[..., Any]:
    mesh = jax.make_mesh((ROWS,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=check_vma)


# How derivatives of one row are taken.
SINGLE = {
    "eager": lambda f: taken(f, ("jvp", "grad", "hessian")),
    "jit": lambda f: jit(taken(f, ALL)),
    "checkpoint of jit": lambda f: jit(taken(jax.checkpoint(jax.jit(f)), DERIVATIVES + JACOBIANS)),
}
# How derivatives of all rows are taken: of a function of all rows, and then row by row.
MAPPED = {
    "of scan": lambda f: taken(lambda *args: jax.lax.map(lambda row: f(*row), args), DERIVATIVES),
    "of shard_map check_vma": lambda f: taken(sharded(jax.vmap(f), True), DERIVATIVES),
    "of shard_map": lambda f: taken(sharded(jax.vmap(f), False), DERIVATIVES),
    "vmap": lambda f: jax.vmap(taken(f, DERIVATIVES + JACOBIANS)),
    "shard_map check_vma": lambda f: sharded(jax.vmap(taken(f, DERIVATIVES + JACOBIANS)), True),
    "shard_map": lambda f: sharded(jax.vmap(taken(f, JACOBIANS)), False),
}


@row("D4", "D5", "D5b", "D7")
@cells(
    "name, rules, how",
    [
        ("output", "both", "checkpoint of jit"),
        ("two_inputs", "both", "jit"),
        ("non_differentiable", "both", "eager"),
        ("intermediate", "jvp", "jit"),
        ("output", "generated", "jit"),
        *[pytest.param(name, rules, "jit", marks=slow) for name in BY_NAME for rules in ("both", "generated", "jvp")],
    ],
)
def test_each_mode_has_its_own_rule(name, rules, how):
    """Or that of the other mode, transposed."""
    case = BY_NAME[name]
    got = SINGLE[how](case.apply(rules))(*case.args)
    check(got, rows(expected(name, rules, tuple(got)), 0))


@row("D4", "D7")
@cells(
    "name, how",
    [("integers", "shard_map")],
    ["output", "intermediate", "pytrees", "integers", "non_differentiable"],
    MAPPED,
)
def test_each_mode_has_its_own_rule_when_mapped(name, how):
    case = BY_NAME[name]
    got = jit(MAPPED[how](case.apply()))(*rows_of(case.args))
    check(got, expected(name, "both", tuple(got)))


def over(f: Callable[..., Any], in_axis: int, out_axis: int) -> Callable[..., Any]:
    """Maps over rows that are moved to another axis first, and back in the outputs."""

    def mapped(*args: Any) -> Any:
        outputs = jax.vmap(f, in_axis, out_axis)(*jax.tree.map(lambda x: jnp.moveaxis(x, 0, in_axis), args))
        return jax.tree.map(lambda y: jnp.moveaxis(y, out_axis, 0), outputs)

    return mapped


@row("E1c")
@cells(
    "name, rules, inside, outside, axes",
    [
        ("input", "backward", "eager", "eager", ((1, 0),)),
        ("output", "both", "eager", "jit", ((-1, -1), (0, 1))),
        ("intermediate", "generated", "jit", "eager", ((0, -1),)),
        ("nothing", "jvp", "jit", "jit", ((-1, 0),)),
        ("two_outputs", "backward", "eager", "checkpoint", ((1, -1),)),
        ("pytrees", "both", "checkpoint", "eager", ((-1, 0),)),
        ("save_for_forward", "both", "eager", "scan", ((1, 1),)),
        ("two_inputs", "jvp", "scan", "eager", ((-1, 0), (1, -1))),
        ("non_differentiable", "backward", "eager", "cond", ((-1, -1),)),
        ("integers", "generated", "cond", "eager", ((1, 1), (-1, 0))),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [ROWS, pytest.param(1, marks=slow), 0])
def test_axes_of_one_vmap_or_two_inside_and_outside_other_transformations(name, rules, inside, outside, axes, size):
    """The pairs are axes of all arguments and of all outputs, those of the inner vmap first."""
    if size < ROWS and len(axes) > 1:
        return
    case = BY_NAME[name]
    f = CONTEXTS[inside](case.apply(rules))
    for pair in axes:
        f = over(f, *pair)
    shape = (size,) if len(axes) == 1 else (2, size // 2)

    def mapped(*args: Any) -> Any:
        outputs = f(*jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), args))
        return jax.tree.map(lambda y: y.reshape(size, *y.shape[len(shape) :]), outputs)

    derivatives = jit(taken(CONTEXTS[outside](mapped), IN_REVERSE if rules == "backward" else IN_BOTH_MODES))
    args = rows(rows_of(case.args), slice(size))
    if jax.__version_info__ < (0, 11) and rules != "backward" and "scan" in (inside, outside):
        with pytest.raises(TypeError, match="forward-mode"):  # JAX forgets a custom_jvp there (row D7)
            derivatives(*args)
        return
    got = derivatives(*args)
    check(got, rows(expected(name, rules, tuple(got)), slice(size)))
