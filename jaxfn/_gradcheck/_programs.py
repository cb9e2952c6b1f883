"""Running traced functions: batched, compiled, and kept for the next check.

A function is traced anew for every check, so a check never sees an old version of the code. What is kept are compiled
programs, by their own text: tracing takes milliseconds, compiling a hundred.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property, partial
from operator import itemgetter
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.extend.core import Var
from jax.tree_util import tree_flatten, tree_map, tree_unflatten

from jaxfn._compat import compile_quickly

_PROGRAMS_KEPT = 256
_kept: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()
_lock = Lock()

# Where there is little to compute, compiling would take far longer than running.
_SMALL_BYTES = 32 << 20

# Their callables are rules for transformations, of which none comes after a program's text is taken.
_HAVE_RULES = frozenset({"custom_vjp_call", "custom_jvp_call", "custom_vmap_call", "attach"})


class Mode(enum.Enum):
    """How a function is run for many directions."""

    VECTORIZED = "vectorized"
    COMPILED_LOOP = "a compiled loop"
    PYTHON_LOOP = "a Python loop"


class Traced:
    """A function as a jaxpr: calling it runs what was recorded and none of the user's Python.

    Args:
      function: takes and returns pytrees of arrays.
      args: arrays, or their shapes and dtypes.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        leaves, self.args_tree = tree_flatten(args)
        trees: list[Any] = []

        def flat(*leaves: Any) -> Sequence[Any]:  # a new one each time, since JAX keeps traces by identity
            returned, tree = tree_flatten(function(*tree_unflatten(self.args_tree, leaves)))
            trees.append(tree)
            return returned

        closed = jax.make_jaxpr(flat)(*leaves)
        self.jaxpr = closed.jaxpr
        self.constants = closed.consts
        self.tree = trees[0]

    def __call__(self, *args: Any) -> Any:
        return tree_unflatten(self.tree, eval_jaxpr(self.jaxpr, self.constants, *tree_flatten(args)[0]))

    def same_as(self, other: Traced) -> bool:
        """Whether both recorded the same operations on the same constants."""
        return self.text == other.text and all(map(_equal, self.constants, other.constants))

    def key(self) -> Hashable:
        """Equal for traces that compute the same, given the constants."""
        return self.text, *_callables(self.jaxpr), *map(jax.typeof, self.constants)

    @cached_property
    def text(self) -> str:
        """The operations, without the addresses of objects, which 0.10.0 shows and later versions do not."""
        return re.sub("0x[0-9a-f]+", "0x", str(self.jaxpr))

    @cached_property
    def bytes_each(self) -> int:
        """What one call computes, all intermediate results included."""
        avals = (v.aval for equation in equations(self.jaxpr) for v in equation.outvars)
        return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype"))

    def out_avals(self) -> list[Any]:
        """The types of what it returns."""
        return [v.aval for v in self.jaxpr.outvars]

    def from_inputs(self) -> list[Any]:
        """The types of everything that is computed from the inputs."""
        known = set(self.jaxpr.invars)
        avals: list[Any] = []
        for equation in self.jaxpr.eqns:
            if any(isinstance(v, Var) and v in known for v in equation.invars):
                known.update(equation.outvars)
                avals += [v.aval for inner in (equation, *_inside(equation)) for v in inner.outvars]
        return avals


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        yield from _inside(equation)


def _inside(equation: Any) -> Iterator[Any]:
    """The equations of the programs that one equation runs."""
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def _callables(jaxpr: Any) -> Iterator[Hashable]:
    """What the text leaves out: which Python functions are called back."""
    for equation in equations(jaxpr):
        if equation.primitive.name not in _HAVE_RULES:
            for value in equation.params.values():
                if callable(value):
                    yield _by_value(value)


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


def _stacked(*items: Any) -> Any:
    return jnp.stack(items)


def _by_value(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _equal(a: Any, b: Any) -> bool:
    return bool(jnp.array_equal(a, b, equal_nan=jnp.issubdtype(jnp.result_type(a), jnp.inexact)))


class Engine:
    """Runs functions in one `Mode`."""

    def __init__(self, mode: Mode) -> None:
        self.mode = mode

    def map(self, function: Callable[..., Any], *args: Any) -> Any:
        """The function of each item along the first axis."""
        if self.mode is Mode.VECTORIZED:
            return jax.vmap(function)(*args)
        if self.mode is Mode.COMPILED_LOOP:
            return jax.lax.map(partial(_called, function), args)
        count = len(tree_flatten(args)[0][0])
        results = [function(*tree_map(itemgetter(i), args)) for i in range(count)]
        return tree_map(_stacked, *results)

    def program(self, function: Callable[..., Any], *args: Any, runs: int = 1) -> Callable[..., Any]:
        """The function compiled for arguments like these, or as it is in a Python loop.

        Args:
          function: of arrays.
          args: such arrays.
          runs: how often it is going to be called.
        """
        return function if self.mode is Mode.PYTHON_LOOP else Program(function, args, runs)


class Program:
    """A compiled function of arrays."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], runs: int) -> None:
        self._traced = traced = Traced(function, *args)
        self._compiled = _compiled(traced, tree_flatten(args)[0], traced.bytes_each * runs < _SMALL_BYTES)

    def __call__(self, *args: Any) -> Any:
        return tree_unflatten(self._traced.tree, self._compiled(self._traced.constants, tree_flatten(args)[0]))

    def bytes(self) -> int:
        """What running it needs, arguments and results included; 0 where the backend does not say."""
        memory = self._compiled.memory_analysis()
        if memory is None:
            return 0
        return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


def _compiled(traced: Traced, leaves: Sequence[Any], quickly: bool) -> Any:
    """The executable, an earlier one where the program is the same."""
    key = traced.key(), _settings(), quickly
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key][0]
    jaxpr = traced.jaxpr

    def run(constants: Any, leaves: Any) -> Any:
        return eval_jaxpr(jaxpr, constants, *leaves)

    lowered = jax.jit(run).lower(traced.constants, leaves)
    compiled = compile_quickly(lowered) if quickly else lowered.compile()
    with _lock:
        _kept[key] = compiled, jaxpr  # keeps what the key names by id
        while len(_kept) > _PROGRAMS_KEPT:
            _kept.popitem(last=False)
    return compiled


def _settings() -> Hashable:
    """What compiling depends on besides the program."""
    config: Any = jax.config
    return jax.default_backend(), config.jax_default_matmul_precision, config.jax_default_device
