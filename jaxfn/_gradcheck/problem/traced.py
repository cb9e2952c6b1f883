"""Functions as they were recorded: what runs is none of the user's Python, and what it consists of can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_jaxpr
from jax.tree_util import register_pytree_node_class, tree_flatten, tree_map, tree_structure, tree_unflatten

from jaxfn._compat import Var, make_jaxpr, without_unused
from jaxfn._values.arrays import double

# Their parameters are rules of derivatives and of batching, of which none is taken any more when a program is compiled.
_HAVE_RULES = frozenset({"custom_vjp_call", "custom_jvp_call", "attach", "detach", "settle"})


@dataclass(frozen=True, eq=False)
class _Recorded:
    jaxpr: Any
    tree: Any


@register_pytree_node_class
class Traced:
    """A function as a jaxpr: calling it runs what was recorded and none of the user's Python.

    As a pytree it consists of its constants, so that a program may take it for an argument.

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
        self._recorded = _Recorded(closed.jaxpr, trees[0])

    def tree_flatten(self) -> tuple[Sequence[Any], _Recorded]:
        return self.constants, self._recorded

    @classmethod
    def tree_unflatten(cls, recorded: _Recorded, constants: Sequence[Any]) -> Traced:
        traced = object.__new__(cls)
        traced.constants, traced._recorded = list(constants), recorded
        return traced

    @property
    def jaxpr(self) -> Any:
        return self._recorded.jaxpr

    def __call__(self, *args: Any) -> Any:
        return self.run_by(eval_jaxpr, *args)

    def run_by(self, evaluate: Callable[..., Sequence[Any]], *args: Any) -> Any:
        """What it returns where something else than JAX goes through the jaxpr, given that, constants and arrays."""
        results = evaluate(self.jaxpr, self.constants, *tree_flatten(args)[0])
        return tree_unflatten(self._recorded.tree, results)

    def part(self, position: int) -> Traced:
        """What computes one of the arrays that are returned, as a function that returns it alone."""
        jaxpr = without_unused(self.jaxpr, [i == position for i in range(len(self.jaxpr.outvars))])
        return Traced.tree_unflatten(_Recorded(jaxpr, tree_structure(0)), self.constants)

    def same_as(self, other: Traced) -> bool:
        """Whether both recorded the same operations on the same constants, as far as that is seen."""
        return str(self.jaxpr) == str(other.jaxpr) and _all_equal(
            [*self.constants, *_not_in_text(self.jaxpr)], [*other.constants, *_not_in_text(other.jaxpr)]
        )

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


def traced_without_x64(function: Callable[..., Any], *args: Any) -> Traced:
    """A trace that takes and returns double precision, of a function that was traced in single precision.

    Kernels are written for JAX's own default; with x64, their whole numbers would be others, of which many fail.
    """
    with jax.enable_x64(False):
        traced = Traced(function, *tree_map(single, args))

    def widened(*args: Any) -> Any:
        return tree_map(_double, traced(*tree_map(_cast, args, tree_map(single, args))))

    return Traced(widened, *args)


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
    """What one call of a trace computes, all intermediate results included; 0 of what is not traced."""
    return computed_bytes(function.jaxpr) if isinstance(function, Traced) else 0


def computed_bytes(jaxpr: Any) -> int:
    """What a program computes, all intermediate results included."""
    avals = (v.aval for equation in equations(jaxpr) for v in equation.outvars)
    return sum(aval.size * aval.dtype.itemsize for aval in avals if hasattr(aval, "dtype"))


def equations(jaxpr: Any) -> list[Any]:
    """All equations, those of inner programs included."""
    found: list[Any] = []
    for equation in jaxpr.eqns:
        found += [equation, *_inside(equation)]
    return found


def called_back(jaxpr: Any) -> list[Any]:
    """Python functions that a program calls when it runs, and whatever else only equals itself."""
    return [
        item
        for equation in equations(jaxpr)
        if equation.primitive.name not in _HAVE_RULES
        for item in _parameters(equation)
        if item is not None and not _is_program(item)
        if callable(item) or type(item).__eq__ is object.__eq__
    ]


def _not_in_text(jaxpr: Any) -> Iterator[Any]:
    """What a jaxpr's text may leave out: numbers in operations, constants of inner programs, Python functions."""
    for equation in equations(jaxpr):
        yield from (v.val for v in equation.invars if hasattr(v, "val"))
        yield from (c for item in _parameters(equation) for c in getattr(item, "consts", ()))
    yield from called_back(jaxpr)


def _inside(equation: Any) -> list[Any]:
    """The equations of the programs that one equation runs."""
    return [inner for item in _parameters(equation) if _is_program(item) for inner in equations(_opened(item))]


def _parameters(equation: Any) -> list[Any]:
    """The parameters of one equation, those in tuples and lists one by one."""
    values = equation.params.values()
    return [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]


def _is_program(parameter: Any) -> bool:
    return hasattr(_opened(parameter), "eqns")


def _opened(parameter: Any) -> Any:
    return getattr(parameter, "jaxpr", parameter)


def _all_equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return len(first) == len(second) and all(map(_equal, first, second))


def _equal(a: Any, b: Any) -> bool:
    if not (hasattr(a, "dtype") and hasattr(b, "dtype")):
        return a is b or (type(a) is type(b) and bool(a == b))
    if a.dtype != b.dtype:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)  # not by jax.numpy, which would compile something
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
