"""The boundary between user code and JAX: what `forward`, `backward` and `jvp` take and return, checked.

Torch's words hold on one side (gradients, one per input, in torch's complex convention), JAX's on the other (cotangents
and tangents, one per array leaf). A cotangent or tangent that is symbolically zero is `None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from operator import is_
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxfn._compat import zeros_of
from jaxfn._context import ContextState
from jaxfn._jaxpr import ArrayIdentity
from jaxfn._mesh_types import match_tangent
from jaxfn._observe import active_monitor
from jaxfn._signature import InputNames, InputSpec
from jaxfn._traces import is_ref
from jaxfn._tree import (
    ARRAY_SPEC,
    ExpectedLeaf,
    StructureError,
    TreeSpec,
    as_array,
    conjugate,
    flatten,
    is_array_leaf,
    is_inexact,
    is_key,
    is_wrapped_array,
    leaf_key,
    match_leaves,
)


@dataclass(eq=False, slots=True)
class OutputSpec:
    """The static part of the outputs of a forward pass; equal if the structures are equal."""

    container: type | None  # tuple or a namedtuple type; None: one output
    trees: tuple[TreeSpec, ...]
    non_differentiable: frozenset[int] = frozenset()  # indices of array leaves that were marked

    def _key(self) -> tuple[object, ...]:
        """Returns what specs are compared by. Objects that `forward` creates count as equal."""
        # PyTreeDef does not compare with None.
        trees = [(tree.treedef is None, tree.treedef, *map(leaf_key, tree.leaves)) for tree in self.trees]
        return self.container, self.non_differentiable, trees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OutputSpec) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((self.container, self.non_differentiable, len(self.trees)))

    def __repr__(self) -> str:
        outputs = ", ".join(map(repr, self.trees))
        return outputs if self.container is None else f"{self.container.__name__}({outputs})"

    def unflatten(self, arrays: Sequence[jax.Array]) -> Any:
        """Returns the outputs that have these array leaves."""
        remaining = iter(arrays)
        values = [tree.unflatten(remaining) for tree in self.trees]
        if self.container is None:
            return values[0]
        make: Any = getattr(self.container, "_make", self.container)  # a namedtuple's constructor takes no iterable
        return make(values)

    def stop_marked(self, arrays: Sequence[jax.Array]) -> Sequence[jax.Array]:
        """Returns the array leaves; those that are marked as non-differentiable without a derivative."""
        marked = self.non_differentiable
        return [jax.lax.stop_gradient(x) if i in marked else x for i, x in enumerate(arrays)] if marked else arrays

    def grad_outputs(
        self, cotangents: Sequence[jax.Array | None], avals: Sequence[Any], materialize: bool
    ) -> list[Any]:
        """Returns a gradient for each top-level output, in torch's convention."""
        if len(cotangents) == len(self.trees) == 1 and self.trees[0] is ARRAY_SPEC and cotangents[0] is not None:
            return [conjugate(as_array(cotangents[0]))]
        leaves = iter(
            [
                _zeros(aval, materialize) if ct is None else conjugate(as_array(ct))
                for ct, aval in zip(cotangents, avals, strict=True)
            ]
        )
        gradients: list[Any] = []
        for tree in self.trees:
            own = list(islice(leaves, tree.num_arrays))
            is_zero = bool(own) and not materialize and all(leaf is None for leaf in own)
            gradients.append(None if is_zero else tree.unflatten_gradient(iter(own)))
        return gradients


def _zeros(aval: Any, materialize: bool) -> Any:
    return zeros_of(aval) if materialize and not is_key(aval) else None  # random keys have no zero


class ForwardOutputs(NamedTuple):
    """The outputs that `forward` returned."""

    value: Any  # the outputs themselves, with NumPy arrays in them converted to JAX ones
    originals: Sequence[Any]  # their array leaves as returned; their identity tells what `forward` marks and saves
    arrays: list[Any]  # the converted array leaves
    spec: OutputSpec  # everything else


def flatten_outputs(value: Any) -> ForwardOutputs:
    """Flattens what `forward` returned: a tuple is several outputs, anything else is one."""
    container: type | None = None
    outputs: tuple[Any, ...] = (value,)
    if isinstance(value, tuple):
        container, outputs = type(value), cast(tuple[Any, ...], value)
    originals: list[Any] = []
    trees: list[TreeSpec] = []
    for output in outputs:
        leaves, tree = flatten(output)
        if tree is not ARRAY_SPEC and is_wrapped_array(output):
            leaves, tree = (output,), ARRAY_SPEC
        originals += leaves
        trees.append(tree)
    arrays = [as_array(array) for array in originals]
    spec = OutputSpec(container, tuple(trees))
    if not all(map(is_, originals, arrays)):
        value = spec.unflatten(arrays)
    return ForwardOutputs(value, originals, arrays, spec)


# Marks


def non_differentiable_outputs(
    name: str,
    state: ContextState,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    warn_once: Callable[[str, str], None],
) -> frozenset[int]:
    """Returns the indices of the marked outputs among the array leaves; warns of marked values that are not outputs.

    Raises:
      ValueError: A marked array is returned more often than it was marked.
    """
    marked = jax.tree_util.tree_leaves(state.non_differentiable)
    identity = ArrayIdentity(inputs)
    keys, marked_keys = list(map(identity.key, outputs)), list(map(identity.key, marked))
    found: set[int] = set()
    for mark, key in zip(marked, marked_keys, strict=True):
        indices = [i for i, other in enumerate(keys) if key == other]
        if not indices:
            warn_once(
                "mark",
                f"{name}: mark_non_differentiable was passed a value that forward did not return; it has no effect. "
                "Pass the very array that is returned.",
            )
        elif marked_keys.count(key) < len(indices) and is_inexact(jax.dtypes.result_type(mark)):
            raise ValueError(
                f"{name}: mark_non_differentiable was passed an array that forward returns {len(indices)} times, as "
                f"outputs {', '.join(map(str, indices))}, so it is ambiguous which is meant. (A function that "
                "changes nothing, as `y.ravel()` of a vector, returns the array itself.) Return a copy, "
                "`jnp.array(y, copy=True)`, as the output without derivative, and mark that; or mark the array once "
                "for each output."
            )
        found.update(indices)
    return frozenset(found)


def check_dirty(
    name: str,
    state: ContextState,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    warn_once: Callable[[str, str], None],
) -> None:
    """Checks the inputs that were marked dirty; warns if one is an array, which the caller sees unchanged.

    Raises:
      ValueError: Something is not an array input, or no output has the shape and dtype of the input.
    """
    dirty = jax.tree_util.tree_leaves(state.dirty)
    for position, marked in enumerate(dirty):
        if not any(marked is x for x in inputs):
            raise ValueError(
                f"{name}: mark_dirty was passed something that is not an array input of forward (argument {position}, "
                f"a {type(marked).__name__}). Pass the input as forward received it, and return its new value."
            )
        if not is_ref(marked) and not any(x.shape == marked.shape and x.dtype == marked.dtype for x in outputs):
            raise ValueError(
                f"{name}: mark_dirty was passed an input of shape {marked.shape} and dtype {marked.dtype} (argument "
                f"{position}), but no output has that shape and dtype. JAX arrays are immutable: return the new value."
            )
    if not all(map(is_ref, dirty)):
        warn_once(
            "dirty",
            f"{name}: mark_dirty on a JAX array does not change the caller's array; use the returned one. To "
            "write in place, pass a jax.Ref.",
        )


# Gradients and tangents

# By the method, if the two methods differ. "type" and "complex" are `TypeError`s, the others `RuntimeError`s.
_MESSAGES = {
    "backward count": (
        "returned an incorrect number of gradients: expected {expected} ({names}), got {got}. Return one gradient for "
        "each input, and None for an input that has none."
    ),
    "jvp count": (
        "returned an invalid number of tangents: expected {expected}, one for each output of forward, got {got}. "
        "Return None for an output whose tangent is zero."
    ),
    "backward names": (
        "returned gradients for {unknown}, which {verb} not among its parameters.{close} The parameters are {names}."
    ),
    "backward keywords": (
        "returned gradients by position for the keywords {keywords}, whose order jax.jit and jax.checkpoint change. "
        "Return a dict of gradients by name: {{{example}}}."
    ),
    "backward static": (
        "returned a gradient different than None for {where}, but that input is the Python value {value}, not an "
        "array. Return None for it, or pass jax.numpy.asarray({value}) to have its gradient."
    ),
    "jvp static": (
        "returned a tangent different than None for {where}, which is not differentiable ({value}). Return None for it."
    ),
    "backward shape": (
        "returned an invalid gradient for {where}: got shape {got}, which cannot be summed to the input's shape "
        "{expected}."
    ),
    "jvp shape": "returned a tangent of shape {got} for {where}: expected the output's shape {expected}.",
    "structure": (
        "returned a {vector} for {where} that does not have that {side}'s structure: {problem}. Any subtree of the "
        "{vector} may be None."
    ),
    "type": "returned {got} as the {vector} of {where}: expected an array of shape {shape} or None.",
    "complex": "returned a complex {vector} ({got}) for {where}, which is real ({expected}). Return its .real.",
}


class _Where(NamedTuple):
    """The input or output of a value that `backward` or `jvp` returned; formatted only in errors."""

    function: str
    names: InputNames | None  # of the inputs, for backward; None for jvp
    position: int = 0
    path: str = ""

    def __str__(self) -> str:
        text = f"output {self.position}" if self.names is None else self.names.describe(self.position)
        return text + self.path

    def error(self, message: str, **facts: object) -> Exception:
        """Returns the error with this message."""
        method, vector, side = ("jvp", "tangent", "output") if self.names is None else ("backward", "gradient", "input")
        text = _MESSAGES[message if message in _MESSAGES else f"{method} {message}"]
        facts = {"where": self, "vector": vector, "side": side} | facts
        kind = TypeError if message in ("type", "complex") else RuntimeError
        return kind(f"{self.function}.{method} {text.format(**facts)}")

    def check_array(self, value: Any, aval: Any) -> None:
        """Raises if a value cannot be the gradient or tangent of an array leaf."""
        if not is_array_leaf(value) or is_key(value):
            got = "a random key" if is_array_leaf(value) else f"a Python {type(value).__name__}"
            raise self.error("type", got=got, shape=aval.shape)

    def check_real(self, value: jax.Array, aval: Any) -> None:
        """Raises if a value is complex for an array leaf that is real."""
        if jnp.iscomplexobj(value) and not jnp.issubdtype(aval.dtype, jnp.complexfloating):
            raise self.error("complex", got=value.dtype, expected=aval.dtype)

    def match(
        self, value: Any, tree: TreeSpec, leaves: Iterator[tuple[Any, bool]]
    ) -> Iterator[tuple[_Where, Any, ExpectedLeaf]]:
        """Yields for each array leaf its `_Where`, its entry in `value`, and the leaf; raises for other structures."""
        skeleton = tree.unflatten(iter([ExpectedLeaf(*leaf) for leaf in islice(leaves, tree.num_arrays)]))
        try:
            pieces = list(match_leaves(value, skeleton))
        except StructureError as problem:
            raise self.error("structure", problem=problem) from None
        for path, piece, leaf in pieces:
            where = self._replace(path=path)
            if isinstance(leaf, ExpectedLeaf):
                yield where, piece, leaf
            elif piece is not None:
                raise where.error("static", value=f"the Python value {leaf!r}" if self.names is None else repr(leaf))


def input_cotangents(
    name: str, spec: InputSpec, returned: Any, avals: Sequence[Any], perturbed: Sequence[bool]
) -> list[jax.Array | None]:
    """Returns a cotangent, or `None` for zero, for each array leaf of the inputs, with any sharding.

    The gradients that `backward` returned for leaves that are not perturbed are not checked.
    """
    leaves = zip(avals, perturbed, strict=True)
    cotangents: list[jax.Array | None] = []
    for index, (gradient, tree) in enumerate(zip(_one_per_input(name, spec, returned), spec.trees, strict=True)):
        where = _Where(name, spec.names, index)
        if tree is ARRAY_SPEC:  # by far the most frequent
            cotangents.append(_cotangent(gradient, *next(leaves), where))
            continue
        cotangents += [
            _cotangent(piece, leaf.aval, leaf.is_differentiated, leaf_where)
            for leaf_where, piece, leaf in where.match(gradient, tree, leaves)
        ]
    return cotangents


def _one_per_input(name: str, spec: InputSpec, returned: Any) -> Sequence[Any]:
    names, where = spec.names, _Where(name, spec.names)
    expected = len(names.names)
    if type(returned) is tuple and len(cast(tuple[Any, ...], returned)) == expected and not names.extra_keywords:
        return cast(tuple[Any, ...], returned)  # as nearly always
    if isinstance(returned, dict):
        named = cast(dict[Any, Any], returned)
        unknown = [key for key in named if key is None or (key not in names.names and key != names.variadic)]
        if not unknown:
            return _from_names(where, names, named)
        # Otherwise it may itself be the gradient of the only input.
        if len(unknown) < len(named) or names.num_passed > 1 or spec.trees[0] is ARRAY_SPEC:
            verb = "is" if len(unknown) == 1 else "are"
            text = ", ".join(map(repr, unknown))
            close = get_close_matches(str(unknown[0]), names.names, 1)
            close = f" Did you mean {close[0]!r}?" if close else ""
            raise where.error("names", unknown=text, verb=verb, close=close, names=", ".join(names.names))
    # A namedtuple is one gradient if the only input is a namedtuple of that type.
    if not isinstance(returned, tuple) or (
        type(returned) is not tuple and expected == 1 and spec.trees[0].container is type(returned)
    ):
        returned = (returned,)
    gradients = list(cast(tuple[Any, ...], returned))
    while len(gradients) > expected and gradients[-1] is None:
        gradients.pop()
    if not names.num_passed <= len(gradients) <= expected:
        wanted = expected if names.num_passed == expected else f"{names.num_passed} to {expected}"
        is_list = len(gradients) == 1 and isinstance(gradients[0], list)
        got = "a list, which counts as one gradient" if is_list else len(gradients)
        raise where.error("count", expected=wanted, names=", ".join(names.names), got=got)
    gradients += [None] * (expected - len(gradients))
    keywords = names.extra_keywords
    if len(keywords) > 1 and any(gradients[names.names.index(keyword)] is not None for keyword in keywords):
        example = ", ".join(f"{keyword!r}: ..." for keyword in keywords)
        raise where.error("keywords", keywords=", ".join(map(repr, keywords)), example=example)
    return gradients


def _from_names(where: _Where, names: InputNames, named: dict[Any, Any]) -> Sequence[Any]:
    """Returns gradients in the order of the inputs; the name of a `*args` parameter means all of its items."""
    by_name = dict(named)
    if names.variadic in by_name:
        items = by_name.pop(names.variadic)
        group = names.variadic_items
        if items is not None:
            if len(items) != len(group):
                problem = f"{len(items)} gradients were returned for {len(group)} arguments"
                raise where.error("structure", where=f"*{names.variadic}", problem=problem)
            by_name |= dict(zip(group, items, strict=True))
    return [by_name.get(name) for name in names.names]


def _cotangent(gradient: Any, aval: Any, is_differentiated: bool, where: _Where) -> jax.Array | None:
    """Returns the cotangent of one array leaf: summed to its shape, cast to its dtype, in JAX's complex convention."""
    if gradient is None:
        monitor = active_monitor() if is_differentiated else None
        if monitor is not None:
            monitor.without_gradient[f"{where.function}.backward", str(where)] = None
        return None
    if (
        is_differentiated
        and isinstance(gradient, jax.Array)
        and jax.typeof(gradient) == aval
        and not jnp.iscomplexobj(gradient)
    ):
        return gradient  # as nearly always
    where.check_array(gradient, aval)
    if not is_differentiated:  # integers, and leaves whose gradient torch ignores too
        return None
    gradient = as_array(gradient)
    where.check_real(gradient, aval)
    gradient = _sum_to_shape(gradient, aval.shape, where)
    if gradient.dtype != aval.dtype:
        monitor = active_monitor()
        if monitor is not None:
            monitor.casts[f"{where.function}, {where}", str(gradient.dtype), str(aval.dtype)] = None
        gradient = gradient.astype(aval.dtype)
    return conjugate(gradient)


def _sum_to_shape(gradient: jax.Array, shape: tuple[int, ...], where: _Where) -> jax.Array:
    if gradient.shape == shape:
        return gradient
    extra = gradient.ndim - len(shape)
    pairs = list(zip(gradient.shape[max(extra, 0) :], shape, strict=False))
    if extra < 0 or any(got != want and want != 1 for got, want in pairs):
        raise where.error("shape", got=gradient.shape, expected=shape)
    stretched = [extra + axis for axis, (got, want) in enumerate(pairs) if got != want]
    summed = jnp.sum(gradient, axis=(*range(extra), *stretched))
    return jax.lax.expand_dims(summed, [axis - extra for axis in stretched])  # reshape may not know how to shard it


def input_tangents(
    tangents: Sequence[jax.Array | None], spec: InputSpec, avals: Sequence[Any], materialize: bool
) -> list[Any]:
    """Returns a tangent for each input: of its structure, `None` for leaves that cannot be differentiated."""
    leaves = iter(
        [
            zeros_of(aval) if tangent is None and materialize and is_inexact(aval.dtype) else tangent
            for tangent, aval in zip(tangents, avals, strict=True)
        ]
    )
    results: list[Any] = []
    for tree in spec.trees:
        own = list(islice(leaves, tree.num_arrays))
        results.append(None if all(x is None for x in own) else tree.unflatten_gradient(iter(own)))
    return results


def output_tangents(name: str, returned: Any, spec: OutputSpec, avals: Sequence[Any]) -> list[jax.Array | None]:
    """Returns a tangent, or `None` for zero, for each array leaf of the outputs, from the result of `jvp`."""
    expected = len(spec.trees)
    per_output = cast(tuple[Any, ...], returned) if isinstance(returned, tuple) else (returned,)
    if len(per_output) != expected:
        raise _Where(name, None).error("count", expected=expected, got=len(per_output))
    leaves = iter([(aval, i not in spec.non_differentiable) for i, aval in enumerate(avals)])
    tangents: list[jax.Array | None] = []
    for index, (tangent, tree) in enumerate(zip(per_output, spec.trees, strict=True)):
        matched = _Where(name, None, index).match(tangent, tree, leaves)
        tangents += [_tangent(piece, leaf.aval, leaf.is_differentiated, where) for where, piece, leaf in matched]
    return tangents


def _tangent(tangent: Any, aval: Any, is_differentiable: bool, where: _Where) -> jax.Array | None:
    if tangent is None:
        return None
    where.check_array(tangent, aval)
    if not is_differentiable or not is_inexact(aval.dtype):
        why = f"its dtype is {aval.dtype}" if is_differentiable else "it was marked so"
        raise where.error("static", value=why)
    tangent = as_array(tangent)
    where.check_real(tangent, aval)
    if tangent.shape != aval.shape:
        raise where.error("shape", got=tangent.shape, expected=aval.shape)
    return match_tangent(tangent.astype(aval.dtype), aval)
