"""The function to be differentiated, as a function from a list of double-precision arrays to another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxfn._check.arguments import function_name, named_leaves
from jaxfn._traces import is_ref
from jaxfn._tree import double, is_array_leaf, is_inexact

# A function of arrays that returns a list of arrays.
LeafFunction = Callable[..., list[Any]]


@dataclass(frozen=True)
class Leaf:
    """An array leaf of the inputs or the outputs.

    A complex array of `size` elements has `2 * size` real components: first all real parts, then all imaginary ones.

    Attributes:
      name: the name in reports.
      shape: the shape.
      dtype: `float64` or `complex128`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @cached_property
    def is_complex(self) -> bool:
        return self.dtype.kind == "c"

    @cached_property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @cached_property
    def num_components(self) -> int:
        return self.size * (2 if self.is_complex else 1)

    def locate(self, component: int) -> tuple[tuple[int, ...], str]:
        """Returns the index of a component's element, and for complex arrays its part."""
        part, element = divmod(component, max(self.size, 1))
        index = tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()
        return index, ("real", "imaginary")[part] if self.is_complex else ""


@dataclass
class Problem:
    """A function, and the point at which it is differentiated.

    Attributes:
      name: the function's name.
      call: the function itself.
      target: the function whose derivative the rule should be, and whose values finite differences use.
      reference: the function for autodiff: `target`, without the rules of `jax.custom_vjp` and `jax.custom_jvp`.
      inputs: the leaves with respect to which it is differentiated.
      values: the values of `inputs`, in double precision.
      describe_outputs: returns the names of the outputs of the last call, and their dtypes before the cast to double.
      may_stop: whether an output may have no derivative, as one that is marked non-differentiable.
      has_reference: whether `reference` is another function than `call`, even if no rule of a Function is bypassed.
    """

    name: str
    call: LeafFunction
    target: LeafFunction
    reference: LeafFunction
    inputs: tuple[Leaf, ...]
    values: list[jax.Array]
    describe_outputs: Callable[[], list[tuple[str, Any]]]
    may_stop: bool = True
    has_reference: bool = False


def as_double(array: Any) -> jax.Array:
    """Returns an inexact array in double precision (in single precision without x64), any other unchanged."""
    array = jnp.asarray(array)
    return array.astype(jax.dtypes.canonicalize_dtype(double(array.dtype))) if is_inexact(array.dtype) else array


def make_problem(
    func: Callable[..., Any],
    inputs: Any,
    argnums: int | Sequence[int] | None,
    surrogate: Callable[..., Any] | None = None,
) -> Problem:
    """Makes a problem of a function and its inputs.

    Args:
      func: any callable.
      inputs: a tuple of positional arguments, or the only argument.
      argnums: the arguments to differentiate with respect to. Default: every inexact array leaf of all arguments.
      surrogate: the function whose derivative the rule should be. Default: `func`.

    Raises:
      ValueError: nothing is differentiable, or `argnums` names an argument that is missing or not differentiable.
    """
    named, tree, chosen = named_leaves(func, inputs, argnums)
    leaves: list[Any] = []  # of all arguments; the differentiated ones will be replaced
    positions: list[int] = []
    described: list[Leaf] = []
    for argument, name, leaf in named:
        if is_array_leaf(leaf) and is_ref(leaf):
            raise TypeError(
                f"{name} is a jax.Ref. The function may write to it, so it cannot be run "
                "again and again: make the Ref inside the function."
            )
        is_number = argnums is not None and argument in chosen and type(leaf) in (float, complex)
        if not (is_number or is_array_leaf(leaf)):
            leaves.append(leaf)
            continue
        array = as_double(leaf)
        if argument in chosen and is_inexact(array.dtype):
            _warn_of_precision(name, leaf)
            positions.append(len(leaves))
            described.append(Leaf(name, array.shape, double(array.dtype)))
        leaves.append(array)
    _require_differentiable(argnums, chosen, [named[i][0] for i in positions])
    outputs: list[list[tuple[str, Any]]] = [[]]

    def flat(function: Callable[..., Any]) -> LeafFunction:
        def call(*values: Any) -> list[jax.Array]:
            merged = list(leaves)
            for position, value in zip(positions, values, strict=True):
                merged[position] = value
            returned = function(*tree_unflatten(tree, merged))
            outputs[0], arrays = _inexact_outputs(returned)
            return arrays

        return call

    values = [leaves[i] for i in positions]
    call = flat(func)
    target = call if surrogate is None else flat(surrogate)
    # The rules of custom_vjp and custom_jvp are removed here; `CallMonitor.bypass_rules` removes those of Functions.
    has_rule = surrogate is None and isinstance(func, (jax.custom_vjp, jax.custom_jvp))
    reference = flat(cast(Any, func).__wrapped__ if has_rule else surrogate or func) if has_rule else target
    return Problem(
        function_name(func),
        call,
        target,
        reference,
        tuple(described),
        values,
        lambda: outputs[0],
        has_reference=has_rule or surrogate is not None,
    )


def _require_differentiable(argnums: int | Sequence[int] | None, chosen: frozenset[int], found: Sequence[int]) -> None:
    missing = sorted(chosen - set(found))
    if argnums is not None and missing:
        raise ValueError(f"argnums names input {missing[0]}, which has no floating or complex array")
    if not found:
        raise ValueError(
            "gradcheck expects at least one floating or complex array among its inputs, to differentiate with respect "
            "to. Python numbers are static: make them arrays, or name their argument in argnums."
        )


def _warn_of_precision(name: str, leaf: Any) -> None:
    dtype = getattr(leaf, "dtype", None)
    if dtype is not None and double(dtype) != dtype:
        warnings.warn(
            f"{name} is {dtype}, which is not double precision. gradcheck converts it and computes in double "
            "precision; a function that converts it back will likely fail the check.",
            stacklevel=4,
        )


def _inexact_outputs(returned: Any) -> tuple[list[tuple[str, Any]], list[jax.Array]]:
    """Returns names and original dtypes, and double-precision values, of the inexact leaves of a function's result."""
    several = isinstance(returned, tuple)
    described: list[tuple[str, Any]] = []
    arrays: list[jax.Array] = []
    for path, leaf in tree_flatten_with_path(returned)[0]:
        if not (is_array_leaf(leaf) or type(leaf) in (float, complex)):
            continue
        dtype = jnp.result_type(leaf)
        if not is_inexact(dtype):
            continue
        name, rest = (f"output {_position(path[0])}", path[1:]) if several else ("output 0", path)
        described.append((name + keystr(rest), dtype))
        arrays.append(as_double(leaf))
    return described, arrays


def _position(key: Any) -> str:
    """Returns the index or name of an entry of a tuple or namedtuple."""
    return str(getattr(key, "idx", getattr(key, "name", key)))
