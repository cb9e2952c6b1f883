"""Running traced functions: batched, compiled, and kept for the next check.

A function is traced anew for every check, so a check never sees an old version of the code. What is kept are compiled
programs, by the text of the traces in them: tracing takes milliseconds, compiling a hundred.

A computation is a callable that is a pytree: the traces that it calls are its nodes, their constants its leaves, and
all else that it depends on is static. So equal structures compute the same, and are compiled once.
"""

from __future__ import annotations

import enum
import re
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from operator import itemgetter
from threading import Lock
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.tree_util import (
    all_leaves,
    register_dataclass,
    register_pytree_node_class,
    tree_flatten,
    tree_map,
    tree_unflatten,
)

from jaxfn._compat import Var, compile_quickly, make_jaxpr

_PROGRAMS_KEPT = 256
_kept: OrderedDict[Hashable, Any] = OrderedDict()
_lock = Lock()

# Where there is little to compute, compiling would take far longer than running.
_SMALL_BYTES = 32 << 20

# Their parameters are rules of derivatives and of batching, of which none is taken any more when a program's text is.
_HAVE_RULES = frozenset({"custom_vjp_call", "custom_jvp_call", "attach", "detach", "settle"})


class Mode(enum.Enum):
    """How a function is run for many directions."""

    VECTORIZED = "vectorized"
    COMPILED_LOOP = "a compiled loop"
    PYTHON_LOOP = "a Python loop"


class _Operations:
    """The operations of a trace; equal to others that compute the same, given the constants."""

    def __init__(self, jaxpr: Any, args_tree: Any, tree: Any) -> None:
        self.jaxpr = jaxpr
        self.args_tree = args_tree
        self.tree = tree

    @cached_property
    def key(self) -> Hashable:
        # The operations, without the addresses of objects, which 0.10.0 shows and later versions do not.
        text = re.sub("0x[0-9a-f]+", "0x", str(self.jaxpr))
        return text, self.args_tree, self.tree, *_left_out(self.jaxpr)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Operations) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


@register_pytree_node_class
class Traced:
    """A function as a jaxpr: calling it runs what was recorded and none of the user's Python.

    Args:
      function: takes and returns pytrees of arrays.
      args: arrays, or their shapes and dtypes.
    """

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        leaves, args_tree = tree_flatten(args)
        trees: list[Any] = []

        def flat(*leaves: Any) -> Sequence[Any]:  # a new one each time, since JAX keeps traces by identity
            returned, tree = tree_flatten(function(*tree_unflatten(args_tree, leaves)))
            trees.append(tree)
            return returned

        closed = make_jaxpr(flat, *leaves)
        self.constants = closed.consts
        self._recorded = _Operations(closed.jaxpr, args_tree, trees[0])

    def tree_flatten(self) -> tuple[Sequence[Any], _Operations]:
        return self.constants, self._recorded

    @classmethod
    def tree_unflatten(cls, recorded: _Operations, constants: Sequence[Any]) -> Traced:
        traced = object.__new__(cls)
        traced.constants, traced._recorded = list(constants), recorded
        return traced

    @property
    def jaxpr(self) -> Any:
        return self._recorded.jaxpr

    def __call__(self, *args: Any) -> Any:
        results = eval_jaxpr(self.jaxpr, self.constants, *tree_flatten(args)[0])
        return tree_unflatten(self._recorded.tree, results)

    def same_as(self, other: Traced) -> bool:
        """Whether both recorded the same operations on the same constants."""
        return self._recorded == other._recorded and all(map(_equal, self.constants, other.constants))

    @cached_property
    def bytes_each(self) -> int:
        """What one call computes, all intermediate results included."""
        return computed_bytes(self.jaxpr)

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


_C = TypeVar("_C", bound=type)


def computation(*calls: str) -> Callable[[_C], _C]:
    """Makes a frozen dataclass with `__call__` a computation; `calls` are the fields that hold others, or traces."""

    def register(cls: _C) -> _C:
        static = [field.name for field in fields(cls) if field.name not in calls]
        return register_dataclass(cls, data_fields=list(calls), meta_fields=static)

    return register


def bytes_each(function: object) -> int:
    """What one call of a trace, or of a computation that says so, computes; 0 of what is not traced."""
    return getattr(function, "bytes_each", 0)


def computed_bytes(jaxpr: Any) -> int:
    """What a program computes, all intermediate results included."""
    avals = (v.aval for equation in equations(jaxpr) for v in equation.outvars)
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype"))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        yield from _inside(equation)


def _inside(equation: Any) -> Iterator[Any]:
    """The equations of the programs that one equation runs."""
    for item in _parameters(equation):
        if _is_program(item):
            yield from equations(getattr(item, "jaxpr", item))


def _parameters(equation: Any) -> Iterator[Any]:
    """The parameters of one equation, those in tuples and lists one by one."""
    for value in equation.params.values():
        yield from value if isinstance(value, (tuple, list)) else (value,)


def _is_program(parameter: Any) -> bool:
    return hasattr(getattr(parameter, "jaxpr", parameter), "eqns")


def _left_out(jaxpr: Any) -> Iterator[Hashable]:
    """What the text leaves out: Python functions that are called back, and objects that only equal themselves."""
    for equation in equations(jaxpr):
        if equation.primitive.name not in _HAVE_RULES:
            for item in _parameters(equation):
                if not _is_program(item) and (callable(item) or type(item).__eq__ is object.__eq__):
                    yield _by_value(item)


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


@dataclass(frozen=True)
class Engine:
    """Runs functions in one `Mode`."""

    mode: Mode

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
    """A compiled function of arrays.

    Args:
      function: a computation, or any function, which is traced then.
      args: arrays like those that it is called with.
      runs: how often it is going to be called.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], runs: int) -> None:
        called = Traced(function, *args) if all_leaves([function]) else function
        self._constants, structure = tree_flatten(called)
        self._compiled = _compiled(structure, self._constants, args, runs)

    def __call__(self, *args: Any) -> Any:
        return self._compiled(self._constants, args)

    def bytes(self) -> int:
        """What running it needs, arguments and results included; 0 where the backend does not say."""
        memory = self._compiled.memory_analysis()
        if memory is None:
            return 0
        return memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes


def _compiled(structure: Any, constants: Sequence[Any], args: tuple[Any, ...], runs: int) -> Any:
    """The executable of the computation of this structure, an earlier one where there is one."""
    leaves, args_tree = tree_flatten(args)
    key = structure, args_tree, *map(jax.typeof, (*constants, *leaves)), runs, _settings()
    with _lock:
        if key in _kept:
            _kept.move_to_end(key)
            return _kept[key]

    def run(constants: Any, args: Any) -> Any:
        return tree_unflatten(structure, constants)(*args)

    traced = jax.jit(run).trace(constants, args)
    is_small = computed_bytes(traced.jaxpr.jaxpr) * runs < _SMALL_BYTES
    compiled = compile_quickly(traced.lower()) if is_small else traced.lower().compile()
    with _lock:
        _kept[key] = compiled
        while len(_kept) > _PROGRAMS_KEPT:
            _kept.popitem(last=False)
    return compiled


def _settings() -> Hashable:
    """What compiling depends on besides the program."""
    config: Any = jax.config
    return jax.default_backend(), config.jax_default_matmul_precision, config.jax_default_device
