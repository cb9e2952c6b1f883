"""What `backward` returned, checked and turned into cotangents of the inputs.

Inner functions know one gradient and one input; `input_cotangents` walks over all of them. Every refusal is a row of
`_MESSAGES`, raised by `_refuse` with the Function's and the input's name put in.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxfn._protocol.structure import AvalLeaf, StructureError, paired_leaves
from jaxfn._values.arguments import Form
from jaxfn._values.arrays import as_array, conjugate, is_array_leaf, is_key
from jaxfn._values.layouts import ARRAY_LAYOUT, Layout
from jaxfn._watch import WATCH

_MESSAGES: dict[str, tuple[type[Exception], str]] = {
    "count": (
        RuntimeError,
        "returned an incorrect number of gradients: expected {expected} ({names}), got {got}. Return one gradient for "
        "each input, and None for an input that has none.",
    ),
    "names": (
        RuntimeError,
        "returned gradients for {unknown}, which {verb} not among its parameters. The parameters are {names}.",
    ),
    "type": (
        TypeError,
        "returned {got} as the gradient of {where}: expected an array{shape} or None.",
    ),
    "static": (
        RuntimeError,
        "returned a gradient different than None for {where}, but that input is the Python value {value}, not an "
        "array. Return None for it.",
    ),
    "structure": (
        RuntimeError,
        "returned a gradient for {where} that does not have that input's structure: {problem}. Any subtree of the "
        "gradient may be None.",
    ),
    "shape": (
        RuntimeError,
        "returned an invalid gradient for {where}: got shape {got}, which cannot be summed to the input's shape "
        "{expected}.",
    ),
    "complex": (
        TypeError,
        "returned a complex gradient ({got}) for {where}, which is real ({expected}). Return its .real.",
    ),
}


class _InputPlace(NamedTuple):
    """An input, or a leaf of it; put into words only when something is wrong there."""

    name: str
    form: Form
    position: int
    path: str = ""

    def __str__(self) -> str:
        return self.form.describe(self.position) + self.path


def _refuse(name: str, row: str, **facts: object) -> Exception:
    kind, text = _MESSAGES[row]
    return kind(f"{name}.backward {text.format(**facts)}")


def input_cotangents(
    name: str,
    form: Form,
    returned: Any,
    layouts: Sequence[Layout],
    avals: Sequence[Any],
    perturbed: Sequence[bool],
) -> list[jax.Array | None]:
    """One JAX cotangent (or `None` for zero) for each array leaf of the inputs, lying anywhere on a mesh.

    Args:
      name: the Function's.
      form: which inputs it was given, and what they are called.
      returned: what the user's `backward` returned.
      layouts: one per input.
      avals: one per array leaf, over all inputs.
      perturbed: whether each array leaf is being differentiated; gradients of the others are not looked into.

    Raises:
      RuntimeError, TypeError: see the table at the top of this module.
    """
    leaves = zip(avals, perturbed, strict=True)
    gradients = _one_per_input(name, form, returned, layouts)
    cotangents: list[jax.Array | None] = []
    for position, (gradient, layout) in enumerate(zip(gradients, layouts, strict=True)):
        where = _InputPlace(name, form, position)
        if layout is ARRAY_LAYOUT:  # by far the most frequent
            cotangents.append(_cotangent(gradient, *next(leaves), where))
            continue
        skeleton = layout.merge(AvalLeaf(*leaf) for leaf in islice(leaves, layout.num_arrays))
        try:
            pieces = list(paired_leaves(gradient, skeleton, layout))
        except StructureError as problem:
            raise _refuse(name, "structure", where=where, problem=problem) from None
        for path, piece, leaf in pieces:
            if isinstance(leaf, AvalLeaf):
                cotangents.append(_cotangent(piece, leaf.aval, leaf.is_wanted, where._replace(path=path)))
            elif piece is not None:
                raise _refuse(name, "static", where=where._replace(path=path), value=repr(leaf))
    return cotangents


def _one_per_input(name: str, form: Form, returned: Any, layouts: Sequence[Layout]) -> Sequence[Any]:
    expected = len(form.names)
    if type(returned) is tuple and len(cast(tuple[Any, ...], returned)) == expected:  # as nearly always
        return cast(tuple[Any, ...], returned)
    if isinstance(returned, dict):
        named = cast(dict[Any, Any], returned)
        unknown = [name for name in named if name not in form.names and name != form.variadic]
        if not unknown:
            return _from_names(name, form, named)
        if len(unknown) < len(named):
            names = ", ".join(map(repr, unknown))
            verb = "is" if len(unknown) == 1 else "are"
            raise _refuse(name, "names", unknown=names, verb=verb, names=", ".join(form.names))
    # A namedtuple is the gradient of the one input where that is itself such a namedtuple.
    if not isinstance(returned, tuple) or (
        type(returned) is not tuple and expected == 1 and layouts[0].container is type(returned)
    ):
        returned = (returned,)
    gradients = list(cast(tuple[Any, ...], returned))
    while len(gradients) > expected and gradients[-1] is None:
        gradients.pop()
    if not form.num_given <= len(gradients) <= expected:
        wanted = expected if form.num_given == expected else f"{form.num_given} to {expected}"
        names = ", ".join(form.names)
        is_list = len(gradients) == 1 and isinstance(gradients[0], list)
        got = "a list, which counts as one gradient" if is_list else len(gradients)
        raise _refuse(name, "count", expected=wanted, names=names, got=got)
    return gradients + [None] * (expected - len(gradients))


def _from_names(name: str, form: Form, named: dict[Any, Any]) -> Sequence[Any]:
    """Gradients in the inputs' order; the name of a `*args` parameter stands for all of its items."""
    by_name = dict(named)
    if form.variadic in by_name:
        items = by_name.pop(form.variadic)
        group = [name for name in form.names if name.startswith(f"{form.variadic}[")]
        if items is not None:
            if len(items) != len(group):
                problem = f"{len(items)} gradients were returned for {len(group)} arguments"
                raise _refuse(name, "structure", where=f"*{form.variadic}", problem=problem)
            by_name |= dict(zip(group, items, strict=True))
    return [by_name.get(name) for name in form.names]


def _cotangent(gradient: Any, aval: Any, perturbed: bool, where: _InputPlace) -> jax.Array | None:
    """The cotangent of one array leaf: summed to its shape, cast to its dtype, in JAX's complex convention."""
    if gradient is None:
        return None
    if perturbed and isinstance(gradient, jax.Array) and jax.typeof(gradient) == aval and aval.dtype.kind == "f":
        return gradient  # as nearly always
    if not is_array_leaf(gradient) or is_key(gradient):
        got = "a random key" if is_array_leaf(gradient) else f"a Python {type(gradient).__name__}"
        raise _refuse(where.name, "type", got=got, where=where, shape=f" of shape {getattr(aval, 'shape', ())}")
    if not perturbed:  # integers, and whatever torch would not look at either
        return None
    gradient = as_array(gradient)
    if gradient.dtype.kind == "c" and aval.dtype.kind != "c":
        raise _refuse(where.name, "complex", got=gradient.dtype, where=where, expected=aval.dtype)
    gradient = _sum_to_shape(gradient, aval.shape, where)
    if gradient.dtype != aval.dtype:
        watch = WATCH.value
        if watch is not None:
            watch.casts[f"{where.name}, {where}", str(gradient.dtype), str(aval.dtype)] = None
        gradient = gradient.astype(aval.dtype)
    return conjugate(gradient)


def _sum_to_shape(gradient: jax.Array, shape: tuple[int, ...], where: _InputPlace) -> jax.Array:
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    pairs = list(zip(gradient.shape[max(extra, 0) :], shape, strict=False))
    if extra < 0 or any(got != want and want != 1 for got, want in pairs):
        raise _refuse(where.name, "shape", got=gradient.shape, where=where, expected=shape)
    stretched = [extra + axis for axis, (got, want) in enumerate(pairs) if got != want]
    summed = jnp.sum(gradient, axis=(*range(extra), *stretched))
    return jax.lax.expand_dims(summed, [axis - extra for axis in stretched])  # reshape may not know how to shard it
