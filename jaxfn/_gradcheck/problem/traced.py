"""Functions as they were recorded: what runs is none of the user's Python, and what it consists of can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.tree_util import (
    register_dataclass,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from jaxfn._compat import custom_jvp_call_p, custom_vjp_call_p, dce_jaxpr, make_jaxpr, manual_axes
from jaxfn._jaxpr import all_eqns, dependent_eqns, flat_params, is_variable, jaxprs_in_params
from jaxfn._primitives import attach_p, stop_p
from jaxfn._tree import double, is_inexact

# The params of these primitives hold AD and batching rules, which no longer matter in a compiled program, so they do
# not count as callbacks.
_HAVE_RULES = frozenset({custom_vjp_call_p, custom_jvp_call_p, attach_p, stop_p})


@register_dataclass
@dataclass(frozen=True, eq=False)
class Traced:
    """A function as a jaxpr: calling it runs what was recorded and none of the user's Python.

    As a pytree it consists of its constants, so that a program may take it for an argument.

    Attributes:
      constants: of the jaxpr.
      jaxpr: what was recorded, of the arrays in the arguments.
      tree: what the arrays that it returns are arranged as.
    """

    constants: Sequence[Any]
    jaxpr: Any = field(metadata={"static": True})
    tree: Any = field(metadata={"static": True})

    def __call__(self, *args: Any) -> Any:
        return tree_unflatten(self.tree, eval_jaxpr(self.jaxpr, self.constants, *tree_leaves(args)))

    @cached_property
    def eqns(self) -> list[Any]:
        """All eqns, those of inner jaxprs included."""
        return list(all_eqns(self.jaxpr))

    def part(self, position: int) -> Traced:
        """Returns the function that computes one of the results alone."""
        jaxpr = dce_jaxpr(self.jaxpr, [i == position for i in range(len(self.jaxpr.outvars))])
        return Traced(self.constants, jaxpr, tree_structure(0))

    def same_as(self, other: Traced) -> bool:
        """Whether both recorded the same operations on the same constants, as far as that is seen."""
        if str(self.jaxpr) != str(other.jaxpr):
            return False
        first, second = ([*traced.constants, *_not_in_text(traced.eqns)] for traced in (self, other))
        return len(first) == len(second) and all(map(_equal, first, second))

    def mesh_axes(self) -> dict[str, int]:
        """The sizes of the mesh axes that are manual in a `shard_map`, by name."""
        mapped = [eqn for eqn in self.eqns if eqn.primitive.name == "shard_map"]  # 0.10.0 to 0.12.0 name it so
        return {name: eqn.params["mesh"].shape[name] for eqn in mapped for name in manual_axes(eqn)}

    def dtypes_from_inputs(self) -> set[Any]:
        """The floating and complex dtypes of everything that is computed from the inputs."""
        eqns, _ = dependent_eqns(self.jaxpr, self.jaxpr.invars)
        eqns += [eqn for outer in eqns for jaxpr in jaxprs_in_params(outer) for eqn in all_eqns(jaxpr)]
        avals = [v.aval for eqn in eqns for v in eqn.outvars]
        return {aval.dtype for aval in avals if hasattr(aval, "dtype") and is_inexact(aval.dtype)}


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Records a function of pytrees of arrays, for arguments like these: arrays, or their shapes and dtypes."""
    leaves, args_tree = tree_flatten(args)
    trees: list[Any] = []

    def flat(*leaves: Any) -> Sequence[Any]:  # a new one each time, since JAX keeps traces by identity
        returned, tree = tree_flatten(function(*tree_unflatten(args_tree, leaves)))
        trees.append(tree)
        return returned

    closed = make_jaxpr(flat, *leaves)
    return Traced(closed.consts, closed.jaxpr, trees[0])


def trace_without_x64(function: Callable[..., Any], *args: Any) -> Traced:
    """A trace that takes and returns double precision, of a function that was traced in single precision.

    Kernels are written for JAX's own default; with x64, their whole numbers would be others, of which many fail.
    """
    with jax.enable_x64(False):
        traced = trace(function, *tree_map(single, args))

    def widened(*args: Any) -> Any:
        return tree_map(_double, traced(*tree_map(_cast, args, tree_map(single, args))))

    return trace(widened, *args)


def _cast(array: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.asarray(array, like.dtype)


def _double(array: Any) -> jax.Array:
    return array.astype(double(array.dtype))


def single(array: Any) -> jax.ShapeDtypeStruct:
    """The type of a double-precision array in single precision."""
    dtypes: dict[Any, Any] = {np.float64: np.float32, np.complex128: np.complex64}
    return jax.ShapeDtypeStruct(array.shape, dtypes.get(array.dtype.type, array.dtype))


def is_part(alone: object, whole: object, position: int) -> bool:
    """Whether a trace recorded the operations that make one of the arrays that another one returns."""
    if not (isinstance(alone, Traced) and isinstance(whole, Traced)):
        return False
    return alone.part(0).same_as(whole.part(position))


def bytes_each(function: object) -> int:
    """Returns the bytes that one call computes, intermediates included; 0 if the function is not traced."""
    return computed_bytes(function.eqns) if isinstance(function, Traced) else 0


def computed_bytes(eqns: Sequence[Any]) -> int:
    """Returns the size of what some eqns compute, all intermediate results included."""
    avals = [v.aval for eqn in eqns for v in eqn.outvars]
    return sum([aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype")])


def called_back(eqns: Sequence[Any]) -> list[Any]:
    """Returns the Python functions that a program calls when it runs, and whatever else only equals itself."""
    return [
        item
        for eqn in eqns
        if eqn.primitive not in _HAVE_RULES
        for item in flat_params(eqn)
        if item is not None and not hasattr(item, "eqns")
        if callable(item) or type(item).__eq__ is object.__eq__
    ]


def _not_in_text(eqns: Sequence[Any]) -> list[Any]:
    """Returns what a jaxpr's text may leave out: literals, constants of inner jaxprs, Python functions."""
    found: list[Any] = []
    for eqn in eqns:
        found += [atom.val for atom in eqn.invars if not is_variable(atom)]
        for inner in jaxprs_in_params(eqn):
            found += getattr(inner, "consts", ())
    return found + called_back(eqns)


def _equal(a: Any, b: Any) -> bool:
    if not (hasattr(a, "dtype") and hasattr(b, "dtype")):
        return a is b or (type(a) is type(b) and bool(a == b))
    if a.dtype != b.dtype:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)  # not by jax.numpy, which would compile something
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
