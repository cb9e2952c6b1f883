"""Compilation of functions for many directions, with a cache of executables that later checks reuse.

A function is traced and lowered again for every check, so a check never sees an old version of the code. Executables
are cached by everything that XLA receives: lowering takes milliseconds, compiling a hundred.
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
from jax.tree_util import tree_flatten, tree_map, tree_unflatten

from jaxfn._check.staging import computed_bytes, python_callbacks
from jaxfn._compat import compile_quickly, keeps_constants_apart
from jaxfn._jaxpr import all_eqns

_MAX_CACHED = 256
_cache: OrderedDict[Hashable, Any] = OrderedDict()
_lock = Lock()

# Below this size, XLA's optimizations take longer than they save.
_SMALL_BYTES = 256 << 20


class ExecutionMode(enum.Enum):
    """A way to run a function for many directions."""

    VECTORIZED = "vectorized"
    COMPILED_LOOP = "a compiled loop"
    PYTHON_LOOP = "a Python loop"
    OPERATIONS = "operation by operation"

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """Applies the function to each item along the first axis."""
        if self is ExecutionMode.OPERATIONS:
            return function(*args)  # which takes batches
        if self is ExecutionMode.VECTORIZED:
            return jax.vmap(function)(*args)
        if self is ExecutionMode.COMPILED_LOOP:
            return jax.lax.map(partial(_apply, function), args)
        leaves, tree = tree_flatten(args)
        items = [[jnp.asarray(array[i]) for array in leaves] for i in range(len(leaves[0]))]
        results = [function(*tree_unflatten(tree, item)) for item in items]
        return tree_map(lambda *items: jnp.stack(items), *results)

    def prepare(self, function: Callable[..., Any], *args: Any, runs: int = 1) -> CompiledFunction | PythonFunction:
        """Returns the function compiled for arguments like these, or uncompiled for a Python loop.

        User code that it calls is passed in `args`, as `JaxprFunction`s. `runs` is the expected number of calls.
        """
        if self in (ExecutionMode.PYTHON_LOOP, ExecutionMode.OPERATIONS):
            return PythonFunction(function)
        return CompiledFunction(function, args, runs)


@dataclass(frozen=True)
class PythonFunction:
    """A function of pytrees of arrays that is not compiled."""

    function: Callable[..., Any]

    def start(self, *args: Any) -> Callable[[], Any]:
        """Calls the function, and returns a function that waits for its results."""
        return partial(tree_map, np.asarray, self.function(*args))


class CompiledFunction:
    """A compiled function of pytrees of arrays.

    # Note: the key of the cache

    XLA receives a text, and two functions with equal texts have equal results, whatever their Python code. Four
    things are not in the text. Unused arguments: JAX drops them, so `sin(a)` and `sin(b)` of the arguments `a` and `b`
    would have equal texts; `keep_unused` prevents that. The pytree of the results: it is not cached. Python callbacks:
    the text has numbers instead of them, so they are part of the key. Constants, under an option of JAX: then nothing
    is cached.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], runs: int) -> None:
        leaves, args_tree = tree_flatten(args)
        self._tree: Any = None

        def flat(*leaves: Any) -> Sequence[Any]:
            results, self._tree = tree_flatten(function(*tree_unflatten(args_tree, leaves)))
            return results

        traced = jax.jit(flat, keep_unused=True).trace(*leaves)
        eqns = list(all_eqns(traced.jaxpr))
        is_small = computed_bytes(eqns) * runs < _SMALL_BYTES
        shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
        self._compiled = _compiled(traced.lower(), is_small, shardings, python_callbacks(eqns))

    def start(self, *args: Any) -> Callable[[], Any]:
        """Starts the computation, and returns a function that waits for the results as NumPy arrays."""
        return partial(self._on_host, self._compiled(*tree_flatten(args)[0]))

    def _on_host(self, results: Sequence[Any]) -> Any:
        return tree_unflatten(self._tree, list(map(np.asarray, results)))

    def bytes(self) -> int:
        """Returns the memory of one call, arguments and results included; 0 if the backend does not report it."""
        memory = self._compiled.memory_analysis()
        if memory is None:
            return 0
        return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


def _compiled(lowered: Any, is_small: bool, shardings: Sequence[Hashable], callbacks: Sequence[Any]) -> Any:
    """Returns an executable, from the cache if one with equal text and callbacks is there."""
    config: Any = jax.config
    backend = jax.default_backend(), config.jax_default_device
    key = lowered.as_text(), is_small, *backend, *shardings, *map(_key_of, callbacks)
    with _lock:
        if key in _cache:
            _cache.move_to_end(key)
            return _cache[key][0]
    compiled = compile_quickly(lowered) if is_small else lowered.compile()
    if not keeps_constants_apart():
        with _lock:
            _cache[key] = compiled, callbacks  # a reference to each, so that no other object gets its `id`
            while len(_cache) > _MAX_CACHED:
                _cache.popitem(last=False)
    return compiled


def _apply(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _key_of(value: Any) -> Hashable:
    """Returns the value itself, or its `id` if it cannot be hashed."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value
