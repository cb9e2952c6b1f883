"""Compiled programs, kept for the next check, and how a function is run for many directions.

A function is traced and lowered anew for every check, so a check never sees an old version of the code. What is kept
are compiled programs, by all that XLA gets: lowering takes milliseconds, compiling a hundred.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.tree_util import tree_flatten, tree_map, tree_unflatten

from jaxfn._compat import compile_quickly, keeps_constants_apart
from jaxfn._gradcheck.problem.traced import called_back, computed_bytes
from jaxfn._jaxpr import all_eqns, is_variable, open_jaxpr

_PROGRAMS_KEPT = 256
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = Lock()

# Below this much to compute, optimizing a program takes longer than that saves.
_SMALL_BYTES = 256 << 20


class Mode(enum.Enum):
    """A way to run a function for many directions."""

    VECTORIZED = "vectorized"
    COMPILED_LOOP = "a compiled loop"
    PYTHON_LOOP = "a Python loop"

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Applies the function to each item along the first axis."""
        if self is Mode.VECTORIZED:
            return jax.vmap(function)(*args)
        if self is Mode.COMPILED_LOOP:
            return jax.lax.map(partial(_called, function), args)
        leaves, tree = tree_flatten(args)
        items = [[jnp.asarray(array[i]) for array in leaves] for i in range(len(leaves[0]))]
        results = [function(*tree_unflatten(tree, item)) for item in items]
        return tree_map(lambda *items: jnp.stack(items), *results)

    def program(self, function: Callable[..., Any], *args: Any, runs: int = 1) -> Program | PythonProgram:
        """The function compiled for arguments like these, or as it is in a Python loop.

        Args:
          function: of pytrees of arrays. What it calls of the user's is among its arguments, as a `Traced` each.
          args: such arguments.
          runs: how often it is going to be called.
        """
        return PythonProgram(function) if self is Mode.PYTHON_LOOP else Program(function, args, runs)


@dataclass(frozen=True)
class PythonProgram:
    """A function of pytrees of arrays that runs as it is."""

    function: Callable[..., Any]

    def start(self, *args: Any) -> Callable[[], Any]:
        """Starts the function; returns what waits for its results."""
        return partial(tree_map, np.asarray, self.function(*args))


class Program:
    """A compiled function of pytrees of arrays.

    # Note: what may be taken for the same

    XLA gets a text. Where two functions have the same one they compute the same, whatever Python they come from; but
    four things are not in it. Which arguments are used: JAX leaves the others out of the text, so that `sin(a)` and
    `sin(b)` of the arguments `a` and `b` would read the same, unless `keep_unused` is set. How results are arranged:
    that is no part of what is kept here. Python functions that are called back have only numbers in the text, so they
    are part of the key. And constants, in an option of JAX, with which nothing is kept.

    Args:
      function: see `Mode.program`.
      args: arguments like those that it is called with.
      runs: how often it is going to be called.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], runs: int) -> None:
        leaves, args_tree = tree_flatten(args)
        self._tree: Any = None

        def flat(*leaves: Any) -> Sequence[Any]:
            results, self._tree = tree_flatten(function(*tree_unflatten(args_tree, leaves)))
            return results

        traced = jax.jit(flat, keep_unused=True).trace(*leaves)
        untransposed, self._axes = _without_last_transpositions(traced.jaxpr)
        if untransposed is not None:
            traced = jax.jit(untransposed, keep_unused=True).trace(*leaves)
        eqns = list(all_eqns(traced.jaxpr))
        is_small = computed_bytes(eqns) * runs < _SMALL_BYTES
        places = [getattr(leaf, "sharding", None) for leaf in leaves]
        self._compiled = _compiled(traced.lower(), is_small, places, called_back(eqns))

    def start(self, *args: Any) -> Callable[[], Any]:
        """Begins to compute; what is returned waits for the results, which are NumPy's."""
        return partial(self._on_host, self._compiled(*tree_flatten(args)[0]))

    def _on_host(self, results: Sequence[Any]) -> Any:
        arrays = [np.asarray(r) for r in results]
        return tree_unflatten(self._tree, [a.transpose(axes) for a, axes in zip(arrays, self._axes, strict=True)])

    def bytes(self) -> int:
        """The memory that a run needs, arguments and results included; 0 where the backend does not tell."""
        memory = self._compiled.memory_analysis()
        if memory is None:
            return 0
        return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


def _without_last_transpositions(closed: Any) -> tuple[Callable[..., Any] | None, list[Sequence[int]]]:
    """Returns a jaxpr as a function whose results are not transposed yet, and the order of their axes.

    XLA copies to transpose, which takes as long as multiplying matrices of a hundred rows; NumPy makes a view. `None`
    stands for the jaxpr itself, if no result is transposed last.
    """
    jaxpr, consts = open_jaxpr(closed)
    last = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns if eqn.primitive is jax.lax.transpose_p}
    eqns = [last.get(atom) if is_variable(atom) else None for atom in jaxpr.outvars]
    pairs = list(zip(jaxpr.outvars, eqns, strict=True))
    axes: list[Sequence[int]] = [range(len(v.aval.shape)) if e is None else e.params["permutation"] for v, e in pairs]
    if all(eqn is None for eqn in eqns):
        return None, axes
    outvars = [v if e is None else e.invars[0] for v, e in pairs]
    return partial(eval_jaxpr, jaxpr.replace(outvars=outvars), consts), axes


def _compiled(lowered: Any, is_small: bool, places: Sequence[Hashable], called: Sequence[Any]) -> Any:
    """The executable of a program, an earlier one where there is one with the same text that calls back the same."""
    config: Any = jax.config
    backend = jax.default_backend(), config.jax_default_device
    key = lowered.as_text(), is_small, *backend, *places, *map(_key_of, called)
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key][0]
    compiled = compile_quickly(lowered) if is_small else lowered.compile()
    if not keeps_constants_apart():
        with _lock:
            _kept[key] = compiled, called  # held, so that nothing else takes their identities
            while len(_kept) > _PROGRAMS_KEPT:
                _kept.popitem(last=False)
    return compiled


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _key_of(value: Any) -> Hashable:
    """Returns a hashable stand-in for a value: itself, or its `id` if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
