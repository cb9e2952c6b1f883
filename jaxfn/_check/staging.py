"""Functions staged to jaxprs, which run without the user's Python and can be compared."""

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
    tree_structure,
    tree_unflatten,
)

from jaxfn._compat import add_jaxvals_p, custom_jvp_call_p, custom_vjp_call_p, dce_jaxpr, make_jaxpr, manual_axes
from jaxfn._jaxpr import all_eqns, flat_params, is_variable, jaxprs_in_params, open_jaxpr
from jaxfn._tree import is_inexact

# JAX's operations, which run no Python code.
LAX_PRIMITIVES = frozenset(
    {p for module in (jax.lax, jax.lax.linalg) for name, p in vars(module).items() if name.endswith("_p")}
    | {add_jaxvals_p}
)
# The params of these primitives hold AD and batching rules, which no longer matter in a compiled program, so they do
# not count as callbacks.
HAVE_RULES = frozenset({custom_vjp_call_p, custom_jvp_call_p})


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
        return _is_equal(self.constants, other.constants) and _is_equal(self.jaxpr, other.jaxpr)

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


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two jaxprs, params or constants are surely equal in what they compute."""
    if a is b:
        return True
    if hasattr(a, "eqns") and hasattr(b, "eqns"):
        (first, consts), (second, others) = open_jaxpr(a), open_jaxpr(b)
        return _is_equal(consts, others) and _has_equal_eqns(first, second)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        a, b = ([*params.items()] for params in (a, b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_is_equal, a, b))
    if isinstance(a, (int, float, complex)):  # also JAX's, with a dtype
        return repr(a) == repr(b)  # 0.0 and -0.0 differ
    if not hasattr(a, "dtype"):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()  # jax.numpy would compile a program


def _has_equal_eqns(first: Any, second: Any) -> bool:
    """Whether two jaxprs have equal operations on corresponding variables."""
    counterparts: dict[Any, Any] = {}

    def bind(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
        counterparts.update(zip(ours, theirs, strict=False))
        return [v.aval for v in ours] == [v.aval for v in theirs]

    def is_equal_atom(a: Any, b: Any) -> bool:
        if is_variable(a):
            return counterparts[a] is b
        return not is_variable(b) and a.aval == b.aval and _is_equal(a.val, b.val)

    def is_equal_eqn(a: Any, b: Any) -> bool:
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return False
        params = (jaxprs_in_params(e) if e.primitive in HAVE_RULES else e.params for e in (a, b))
        return all(map(is_equal_atom, a.invars, b.invars)) and bind(a.outvars, b.outvars) and _is_equal(*params)

    return (
        bind([*first.constvars, *first.invars], [*second.constvars, *second.invars])
        and len(first.eqns) == len(second.eqns)
        and all(map(is_equal_eqn, first.eqns, second.eqns))
        and len(first.outvars) == len(second.outvars)
        and all(map(is_equal_atom, first.outvars, second.outvars))
    )
