"""Functions staged to jaxprs, which run without the user's Python and can be compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.tree_util import (
    register_dataclass,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from jaxfn._compat import add_jaxvals_p, dce_jaxpr, make_jaxpr, manual_axes
from jaxfn._jaxpr import HAVE_RULES, all_eqns, flat_params, is_variable, jaxprs_in_params, same_program
from jaxfn._tree import is_inexact

# JAX's operations, which run no Python code.
LAX_PRIMITIVES = frozenset(
    {p for module in (jax.lax, jax.lax.linalg) for name, p in vars(module).items() if name.endswith("_p")}
    | {add_jaxvals_p}
)


@register_dataclass
@dataclass(frozen=True, eq=False)
class JaxprFunction:
    """A function staged to a jaxpr; calling it evaluates the jaxpr.

    It is a pytree of its constants, so that it can be an argument of a jitted function.
    """

    constants: Sequence[Any]  # the constants of the jaxpr
    jaxpr: Any = field(metadata={"static": True})  # a jaxpr of the array leaves of the arguments
    tree: Any = field(metadata={"static": True})  # the treedef of the result

    def __call__(self, *args: Any) -> Any:
        return tree_unflatten(self.tree, eval_jaxpr(self.jaxpr, self.constants, *tree_leaves(args)))

    @cached_property
    def eqns(self) -> list[Any]:
        """All eqns, including those of sub-jaxprs."""
        return list(all_eqns(self.jaxpr))

    def output_alone(self, index: int) -> JaxprFunction:
        """Returns the function that computes one of the outputs only."""
        jaxpr = dce_jaxpr(self.jaxpr, [i == index for i in range(len(self.jaxpr.outvars))])
        return JaxprFunction(self.constants, jaxpr, tree_structure(0))

    def is_same_computation(self, other: JaxprFunction) -> bool:
        """Whether both have equal operations and constants."""
        return same_program((self.constants, self.jaxpr), (other.constants, other.jaxpr))

    @property
    def depends_on_inputs(self) -> bool:
        """Whether an output depends on an input."""
        return bool(self.dependent_eqns()) or not set(self.jaxpr.invars).isdisjoint(
            filter(is_variable, self.jaxpr.outvars)
        )

    def mesh_axes(self) -> dict[str, int]:
        """Returns the sizes of the mesh axes that are manual in a `shard_map`, by name."""
        mapped = [eqn for eqn in self.eqns if eqn.primitive.name == "shard_map"]  # the name in 0.10.0 to 0.12.0
        return {name: eqn.params["mesh"].shape[name] for eqn in mapped for name in manual_axes(eqn)}

    def dependent_eqns(self) -> list[Any]:
        """Returns the eqns that depend on the inputs, in order, without those of sub-jaxprs."""
        dependent = set(self.jaxpr.invars)
        eqns: list[Any] = []
        for eqn in self.jaxpr.eqns:
            if any(is_variable(v) and v in dependent for v in eqn.invars):
                eqns.append(eqn)
                dependent.update(eqn.outvars)
        return eqns

    def dtypes_from_inputs(self) -> set[Any]:
        """Returns the inexact dtypes of everything that is computed from the inputs."""
        eqns = self.dependent_eqns()
        eqns += [eqn for outer in eqns for jaxpr in jaxprs_in_params(outer) for eqn in all_eqns(jaxpr)]
        avals = [v.aval for eqn in eqns for v in eqn.outvars]
        return {aval.dtype for aval in avals if hasattr(aval, "dtype") and is_inexact(aval.dtype)}


def stage(function: Callable[..., Any], *args: Any) -> JaxprFunction:
    """Stages a function of pytrees of arrays, for arguments that are arrays or `jax.ShapeDtypeStruct`s."""
    leaves, args_tree = tree_flatten(args)
    trees: list[Any] = []

    def flat(*leaves: Any) -> Sequence[Any]:  # a new function each time, since JAX caches traces by identity
        returned, tree = tree_flatten(function(*tree_unflatten(args_tree, leaves)))
        trees.append(tree)
        return returned

    closed = make_jaxpr(flat, *leaves)
    return JaxprFunction(closed.consts, closed.jaxpr, trees[0])


def is_same_output(alone: object, whole: object, index: int) -> bool:
    """Whether the only output of one staged function is computed as one of the outputs of another."""
    if not (isinstance(alone, JaxprFunction) and isinstance(whole, JaxprFunction)):
        return False
    return alone.output_alone(0).is_same_computation(whole.output_alone(index))


def bytes_per_call(function: object) -> int:
    """Returns the bytes that one call computes, including intermediates; 0 if the function is not staged."""
    return computed_bytes(function.eqns) if isinstance(function, JaxprFunction) else 0


def computed_bytes(eqns: Sequence[Any]) -> int:
    """Returns the number of bytes that some eqns compute, including intermediates."""
    avals = [v.aval for eqn in eqns for v in eqn.outvars]
    return sum([aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype")])


def python_callbacks(eqns: Sequence[Any]) -> list[Any]:
    """Returns the params that compare by identity: Python callbacks, which the text of a jaxpr does not show."""
    return [
        item
        for eqn in eqns
        if eqn.primitive not in HAVE_RULES
        for item in flat_params(eqn)
        if item is not None and not hasattr(item, "eqns")
        if callable(item) or type(item).__eq__ is object.__eq__
    ]
