"""The values of a JAX program, and the search among them for those of torch.

# Note: when a value is found

A value is the output of a torch layer if the port gave it the layer's name, by `jax.ad_checkpoint.checkpoint_name`.
Otherwise a value is found if one has its numbers, up to the order of axes and to a reshape: a port may have the
channels last, or the batch in another axis. The program runs in double precision, so that another value with these
numbers is not a matter of chance. Arrays whose numbers are all equal, such as zeros, are found anywhere and do not
count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfn._compat import eqn_source_line, name_p
from jaxfn._inspection.interpreter import EqnInterpreter
from jaxfn._parity.inputs import Array
from jaxfn._tree import is_inexact, is_key

_MAX_AXES = 6
# How far the search goes back from a value that is combined with random numbers, such as one scaled for dropout.
_MAX_ANCESTORS = 4


class _PortValue(NamedTuple):
    """A value with the eqn that computes it; `None` for arguments and constants."""

    array: Array
    eqn: Any


class _ValueOrigin(NamedTuple):
    """The origin of a value that depends on an argument or on random numbers.

    Attributes:
      value: the value, referenced so that its id is unique.
      is_random: whether it depends on random numbers and keys alone.
      parent: the only operand that is not random, if there is one.
    """

    value: Any
    is_random: bool = False
    parent: Any = None


class Values:
    """The values of a program.

    Args:
      rtol: the relative tolerance with which numbers are equal.

    Attributes:
      randomized: values that were combined with random numbers, and those that they were computed from, each with the
        result.
    """

    def __init__(self, rtol: float) -> None:
        self.rtol = rtol
        self.randomized: list[tuple[Array, Array]] = []
        self._named: dict[str, list[_PortValue]] = {}
        self._stopped: list[tuple[Any, Array]] = []  # variables with their values
        self._used: set[int] = set()  # ids of variables that something else than `stop_gradient` uses
        self._origins: dict[int, _ValueOrigin] = {}  # by the id of a value
        self._by_size: dict[int, list[_PortValue]] = {}
        self._moments: dict[int, Array] = {}

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Evaluates a program and records its values; returns its outputs."""
        for argument in arguments:
            self._origins[id(argument)] = _ValueOrigin(argument)
        for value in (*arguments, *consts):  # among the constants are the gradients of the outputs
            self._add(value, None)
        return EqnInterpreter(jaxpr, consts, arguments, self._visit).results

    def _add(self, value: Any, eqn: Any) -> None:
        if not is_key(value) and is_inexact(value.dtype) and np.size(value):
            array = np.asarray(value)
            self._by_size.setdefault(array.size, []).append(_PortValue(array, eqn))

    def _visit(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        if eqn.primitive is jax.lax.stop_gradient_p:
            self._stopped.append((eqn.invars[0], np.asarray(operands[0])))
        else:
            self._used.update(map(id, eqn.invars))
        if eqn.primitive is name_p:
            self._named.setdefault(eqn.params["name"], []).append(_PortValue(np.asarray(operands[0]), eqn))
        origins = [self._origins[id(x)] for x in operands if id(x) in self._origins]
        others = [origin.value for origin in origins if not origin.is_random]
        if len(others) == 1 and len(origins) > 1:
            self.randomized += [(x, np.asarray(results[0])) for x in self._ancestors(others[0])]
        draws = eqn.primitive.name.startswith(("random_", "threefry", "rng_"))
        is_random = draws or (bool(origins) and not others)
        for result in results:
            if id(result) in self._origins:  # an operand, or a result of an inner eqn
                continue
            if origins or draws:
                self._origins[id(result)] = _ValueOrigin(result, is_random, others[0] if len(others) == 1 else None)
            self._add(result, eqn)

    def _ancestors(self, value: Any) -> Iterator[Array]:
        for _ in range(_MAX_ANCESTORS):
            if value is None:
                return
            yield np.asarray(value)
            value = self._origins[id(value)].parent

    @property
    def stopped(self) -> list[tuple[Array, bool]]:
        """The operands of `stop_gradient`, each with whether nothing else uses it."""
        return [(x, id(variable) not in self._used) for variable, x in self._stopped]

    def is_named(self, name: str) -> bool:
        """Whether the port gave a name to a value."""
        return name in self._named

    def find(self, target: Array, name: str = "", reshapes: bool = True) -> str:
        """Returns which value of the port an array of torch is, "" if none is.

        Args:
          target: the array.
          name: the name of the layer that returned it.
          reshapes: whether the value may have another shape than that of permuted axes.
        """
        for value in self._named[name] if self.is_named(name) else self._with_moments_of(target):
            axes = order_of_axes(value.array, target, self.rtol, reshapes)
            if axes is not None:
                return _described(value.eqn, axes)
        return ""

    def _with_moments_of(self, target: Array) -> list[_PortValue]:
        """Returns values with the moments of an array, which do not depend on the order of its numbers."""
        values = self._by_size.get(target.size, [])
        if values and target.size not in self._moments:
            self._moments[target.size] = np.array([_moments(x.array) for x in values])
        wanted = _moments(target)
        with np.errstate(invalid="ignore"):
            moments = self._moments.get(target.size, np.empty((0, len(wanted))))
            is_near = (abs(moments - wanted) <= 10 * self.rtol * abs(wanted)).all(1)
        return [values[i] for i in np.flatnonzero(is_near)]

    def nearest(self, target: Array, name: str) -> Array | None:
        """Returns the closest value in the target's axes, of those with the layer's name or with permuted axes."""
        named = self._named.get(name, [])
        values = named or self._by_size.get(target.size, [])
        arrays = [moved for x in values for _, moved in _layouts(x.array, target.shape, reshapes=bool(named))]
        return min(arrays, key=lambda x: float(np.linalg.norm(x - target)), default=None)


def _described(eqn: Any, axes: Sequence[int]) -> str:
    source = "an argument or a constant" if eqn is None else eqn_source_line(eqn) or eqn.primitive.name
    name = f"named {eqn.params['name']!r}, " if eqn is not None and eqn.primitive is name_p else ""
    return f"{name}{source}" + (f", axes {tuple(axes)}" if list(axes) != sorted(axes) else "")


def _moments(array: Array) -> Array:
    flat = abs(array.ravel())
    return np.array([flat.sum(), (flat**2).sum(), (flat**3).sum()])


def is_informative(array: Array) -> bool:
    """Whether an array has finite numbers that are not all equal."""
    return bool(array.size) and bool(np.isfinite(array).all()) and bool((array != array.flat[0]).any())


def order_of_axes(array: Array, target: Array, rtol: float, reshapes: bool = True) -> tuple[int, ...] | None:
    """Returns the order of axes in which an array has the numbers of another; `None` if it does not have them.

    Args:
      array, target: the arrays.
      rtol: the tolerance, relative to the target's largest number.
      reshapes: whether the array may have another shape than that of permuted axes.
    """
    if array.size != target.size:
        return None
    bound = rtol * float(abs(target).max(initial=0))
    found = _layouts(array, target.shape, reshapes)
    return next((axes for axes, moved in found if (abs(moved - target) <= bound).all()), None)


def _layouts(array: Array, shape: tuple[int, ...], reshapes: bool) -> Iterator[tuple[tuple[int, ...], Array]]:
    """Yields an array of another shape with its axes in each order, before a reshape to the shape or after it."""
    for axes in _orders(array.shape):
        moved = array.transpose(axes)
        if reshapes or _without_ones(moved.shape) == _without_ones(shape):
            yield axes, moved.reshape(shape)
    if reshapes and len(_without_ones(shape)) > len(_without_ones(array.shape)):
        for axes in _orders(shape):
            yield axes, array.reshape([shape[i] for i in axes]).transpose(np.argsort(axes))


def _orders(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the orders of axes, the present one first; those of size 1 do not matter."""
    long = [i for i, n in enumerate(shape) if n != 1]
    yield tuple(range(len(shape)))
    if len(long) <= _MAX_AXES:
        ones = [i for i, n in enumerate(shape) if n == 1]
        yield from ((*axes, *ones) for axes in permutations(long) if list(axes) != long)


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [n for n in shape if n != 1]
