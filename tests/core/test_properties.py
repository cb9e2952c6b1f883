"""Drawn argument patterns, dtypes, shapes and perturbed subsets, against a direct computation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxfn
from tests.support.marks import row

DTYPES = ["float32", "float16", "bfloat16", "complex64", "int32", "uint8", "bool"]
DIFFERENTIABLE = ("float32", "float16", "bfloat16", "complex64")
SHAPES = [(), (1,), (2,), (3, 2), (0,), (2, 0, 1)]


@st.composite
def array(draw):
    dtype, shape, seed = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES)), draw(st.integers(0, 99))
    values = np.random.default_rng(seed).integers(-2, 3, shape)
    converted = jnp.asarray(values, dtype)
    return converted if draw(st.booleans()) or dtype == "bfloat16" else np.asarray(converted)


statics = st.one_of(st.none(), st.integers(-3, 3), st.floats(-2, 2), st.booleans(), st.sampled_from(["text", "", sum]))
leaves = st.one_of(array(), array(), statics)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=4,
)


def is_array(x: object) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


def flat(tree: Any) -> list[Any]:
    return jax.tree.flatten(tree, is_leaf=lambda x: x is None)[0]


class Scale(jaxfn.Function):
    """Multiplies every differentiable leaf by its position plus two; returns its arguments, statics included."""

    needs: tuple[bool, ...] | None = None
    statics: list[Any] | None = None

    @staticmethod
    def forward(ctx, *inputs, **named):
        everything = (*inputs, *named.values())
        ctx.names = list(named)
        Scale.statics = [x for x in flat(everything) if not is_array(x)]
        ctx.structures = [jax.tree.structure(x, is_leaf=lambda x: x is None) for x in everything]
        ctx.masks = [[is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact) for x in flat(tree)] for tree in everything]
        scaled = [times(x, i + 2) for i, x in enumerate(flat(everything)) if is_array(x)]
        return [x for x in scaled if jnp.issubdtype(x.dtype, jnp.inexact)], Scale.statics

    @staticmethod
    def backward(ctx, grads, _statics):
        Scale.needs = tuple(ctx.needs_input_grad)
        remaining, position, result = iter(grads), 2, []
        for structure, mask in zip(ctx.structures, ctx.masks, strict=True):
            pieces = []
            for differentiable in mask:
                pieces.append(next(remaining) * position if differentiable else None)
                position += 1
            result.append(jax.tree.unflatten(structure, pieces))
        if len(ctx.names) < 2:
            return tuple(result)
        num_inputs = len(result) - len(ctx.names)  # keywords have no order
        return {"inputs": result[:num_inputs]} | dict(zip(ctx.names, result[num_inputs:], strict=True))


def times(x: jax.Array, factor: int) -> jax.Array:
    return (x * factor).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x


@row("A1", "A2", "B7", "C6", "C8")
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    inputs=st.lists(trees, max_size=3),
    named=st.dictionaries(st.sampled_from(["x", "y"]), trees, max_size=2),
    data=st.data(),
    jit=st.booleans(),
)
def test_any_arguments(inputs, named, data, jit):
    everything = (*inputs, *named.values())
    all_leaves = flat(everything)
    structure = jax.tree.structure(everything, is_leaf=lambda x: x is None)
    candidates = [i for i, x in enumerate(all_leaves) if is_array(x) and x.dtype.name in DIFFERENTIABLE]
    chosen = data.draw(st.sets(st.sampled_from(candidates))) if candidates else set()
    order = sorted(chosen)

    def rebuild(values):
        replaced = list(all_leaves)
        for i, value in zip(order, values, strict=True):
            replaced[i] = value
        tree = jax.tree.unflatten(structure, replaced)
        return tree[: len(inputs)], dict(zip(named, tree[len(inputs) :], strict=True))

    def loss(values):
        args, kwargs = rebuild(values)
        outputs, statics = Scale.apply(*args, **kwargs)
        assert [repr(s) for s in statics] == [repr(x) for x in all_leaves if not is_array(x)]
        return total(outputs)

    def direct(values):
        args, kwargs = rebuild(values)
        scaled = [times(jnp.asarray(x), i + 2) for i, x in enumerate(flat((*args, *kwargs.values()))) if is_array(x)]
        return total([x for x in scaled if jnp.issubdtype(x.dtype, jnp.inexact)])

    values = [jnp.asarray(all_leaves[i]) for i in order]
    Scale.needs = None
    transform = jax.jit if jit else (lambda f: f)
    got = transform(jax.value_and_grad(loss))(values)
    expected = transform(jax.value_and_grad(direct))(values)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        np.testing.assert_allclose(np.asarray(ours, np.complex64), np.asarray(theirs, np.complex64), rtol=2e-2)
    if order:
        owners = [i for i, tree in enumerate(everything) for _ in flat(tree)]
        assert Scale.needs == tuple(i in {owners[j] for j in order} for i in range(len(everything)))
    else:
        assert Scale.needs is None


def total(outputs: list[jax.Array]) -> jax.Array:
    parts = [jnp.sum(jnp.abs(x.astype(jnp.complex64)) ** 2) for x in outputs]
    return sum(parts, start=jnp.float32(0))
