"""The intermediate values of a JAX program, searched for those of torch.

# Note: when a value is found

If an intermediate value has the numbers of torch's, after its axes are permuted and it is reshaped: a port may have the
channels last, or the batch in another axis. The program runs in double precision, so that another value with these
numbers is not a matter of chance. Arrays whose numbers are all equal, such as zeros, are found anywhere and do not
count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import jax
import numpy as np

from jaxfn._compat import name_p
from jaxfn._inspection.interpreter import EqnInterpreter
from jaxfn._jaxpr import is_any_of, primitives
from jaxfn._parity.inputs import Array
from jaxfn._tree import is_inexact, is_key

_CONTRACTIONS = primitives("dot_general conv_general_dilated")
_MAX_AXES = 6
# How far the search goes back from a value that is combined with random numbers, such as one scaled for dropout.
_MAX_ANCESTORS = 4


@dataclass
class _Provenance:
    """Provenance of a value.

    Attributes:
      leaf: the index of the parameter that it depends on alone; -1 for other values.
      is_random: whether it depends on random numbers and keys alone.
      parent: the only operand that is neither a parameter nor random, if there is one.
    """

    leaf: int = -1
    is_random: bool = False
    parent: Any = None


class Values:
    """The intermediate values of a program.

    Args:
      num_parameters: how many of its first arguments are parameters.
      rtol: the relative tolerance.

    Attributes:
      consumed: for each parameter, the values that it was multiplied with in matrix products and convolutions.
      randomized: values that were combined with random numbers, and those that they were computed from, each with the
        result.
      named: values with a name of `jax.ad_checkpoint.checkpoint_name`.
    """

    def __init__(self, num_parameters: int, rtol: float) -> None:
        self.rtol = rtol
        self.consumed: dict[int, list[Array]] = {}
        self.randomized: list[tuple[Array, Array]] = []
        self._stopped: list[tuple[Any, Array]] = []  # variables with their values
        self._used: set[int] = set()  # ids of variables that something else than `stop_gradient` uses
        self.named: dict[str, list[Array]] = {}
        self._num_parameters = num_parameters
        # By the id of a value, which is referenced; `None` for constants.
        self._provenance: dict[int, tuple[Any, _Provenance | None]] = {}
        self._by_size: dict[int, list[Array]] = {}
        self._moments: dict[int, Array] = {}

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Evaluates a program and records its values; returns its outputs."""
        for i, argument in enumerate(arguments):
            self._provenance[id(argument)] = argument, _Provenance(leaf=i if i < self._num_parameters else -1)
            self._add(argument)
        for constant in consts:  # among them the gradients of the outputs
            self._add(constant)
        return EqnInterpreter(jaxpr, consts, arguments, self._visit).results

    def _add(self, value: Any) -> None:
        if not is_key(value) and is_inexact(value.dtype) and np.size(value):
            array = np.asarray(value)
            self._by_size.setdefault(array.size, []).append(array)

    def _visit(self, eqn: Any, operands: Sequence[Any], results: Sequence[Any]) -> None:
        origins = [self._provenance.get(id(x), (None, None))[1] for x in operands]
        if eqn.primitive is jax.lax.stop_gradient_p:
            self._stopped.append((eqn.invars[0], np.asarray(operands[0])))
        else:
            self._used.update(map(id, eqn.invars))
        if eqn.primitive is name_p:
            self.named.setdefault(eqn.params["name"], []).append(np.asarray(operands[0]))
        arrays = [(x, o) for x, o in zip(operands, origins, strict=True) if o is not None]
        parameters = {o.leaf for _, o in arrays if o.leaf >= 0}
        random = any(o.is_random for _, o in arrays)
        others = [x for x, o in arrays if o.leaf < 0 and not o.is_random]
        if is_any_of(eqn, _CONTRACTIONS) and len(parameters) == len(others) == 1:
            self.consumed.setdefault(min(parameters), []).append(np.asarray(others[0]))
        if random and len(others) == 1:
            self.randomized += [(x, np.asarray(results[0])) for x in self._ancestors(others[0])]
        draws = eqn.primitive.name.startswith(("random_", "threefry", "rng_"))
        origin = _Provenance(
            leaf=next(iter(parameters)) if len(parameters) == 1 and not others and not random else -1,
            is_random=draws or (random and not others and not parameters),
            parent=others[0] if len(others) == 1 else None,
        )
        for result in results:
            if id(result) not in self._provenance:  # otherwise it is an operand, or a result of an inner eqn
                self._provenance[id(result)] = result, origin if arrays or draws else None
                self._add(result)

    @property
    def stopped(self) -> list[tuple[Array, bool]]:
        """The operands of `stop_gradient`, each with whether nothing else uses it."""
        return [(x, id(variable) not in self._used) for variable, x in self._stopped]

    def _ancestors(self, value: Any) -> Iterator[Array]:
        for _ in range(_MAX_ANCESTORS):
            if value is None:
                return
            yield np.asarray(value)
            origin = self._provenance[id(value)][1]
            value = origin.parent if origin else None

    def finds(self, target: Array) -> bool:
        """Whether an intermediate value has these numbers."""
        candidates = self._by_size.get(target.size, [])
        if not candidates:
            return False
        if target.size not in self._moments:
            self._moments[target.size] = np.array([_moments(x) for x in candidates])
        wanted = _moments(target)
        with np.errstate(invalid="ignore"):
            is_near = (abs(self._moments[target.size] - wanted) <= 10 * self.rtol * abs(wanted)).all(1)
        return any(is_equal(candidates[i], target, self.rtol) for i in np.flatnonzero(is_near))

    def nearest(self, target: Array) -> Array | None:
        """Returns the intermediate value with the least distance, among those of this shape or a permuted one."""
        return closest(self._by_size.get(target.size, []), target, reshapes=False)


def closest(arrays: Sequence[Array], target: Array, reshapes: bool = True) -> Array | None:
    """Returns the array that is closest to another one, in its layout; `None` if none has a layout of this shape."""
    found = [y for x in arrays for y in layouts(x, target.shape, reshapes)]
    return min(found, key=lambda y: float(np.linalg.norm(y - target)), default=None)


def _moments(array: Array) -> Array:
    flat = abs(array.ravel())
    return np.array([flat.sum(), (flat**2).sum(), (flat**3).sum()])


def is_informative(array: Array) -> bool:
    """Whether an array has finite numbers that are not all equal."""
    return bool(array.size) and bool(np.isfinite(array).all()) and bool((array != array.flat[0]).any())


def layouts(array: Array, shape: tuple[int, ...], reshapes: bool = True) -> Iterator[Array]:
    """Yields an array with its axes permuted and then reshaped to a shape; and permuted axes of the shape."""
    squeezed = array.reshape([n for n in array.shape if n != 1])
    wanted = [n for n in shape if n != 1]
    if max(squeezed.ndim, len(wanted)) > _MAX_AXES:
        if array.shape == shape:
            yield array
        return
    for axes in permutations(range(squeezed.ndim)):
        moved = squeezed.transpose(axes)
        if reshapes or list(moved.shape) == wanted:
            yield moved.reshape(shape)
    if reshapes and len(wanted) > squeezed.ndim:
        for axes in permutations(range(len(wanted))):
            back = np.argsort(axes)
            yield array.reshape([wanted[i] for i in axes]).transpose(back).reshape(shape)


def is_equal(array: Array, target: Array, rtol: float, keeps_last: bool = False) -> bool:
    """Whether an array has the numbers of another, in some layout.

    Args:
      array, target: the arrays.
      rtol: the tolerance, relative to the target's largest number.
      keeps_last: whether the target's last axis has to be an axis of the array, if the array has one of this size.
    """
    if array.size != target.size:
        return False
    bound = rtol * float(abs(target).max(initial=0))
    if keeps_last and target.ndim and target.shape[-1] in array.shape:
        size = target.shape[-1]
        rows = (target.size // size, size)
        flat = target.reshape(rows)
        lead = [n for n in target.shape[:-1] if n != 1]
        for axis in (i for i, n in enumerate(array.shape) if n == size):
            last = np.moveaxis(array, axis, -1)
            for x in _leading_layouts(last, lead):
                if (abs(x.reshape(rows) - flat) <= bound).all():
                    return True
        return False
    return any((abs(x - target) <= bound).all() for x in layouts(array, target.shape))


def _leading_layouts(array: Array, lead: Sequence[int]) -> Iterator[Array]:
    """Yields an array with all axes but the last permuted and reshaped."""
    size = array.shape[-1]
    for column in layouts(np.arange(array.size // size).reshape(array.shape[:-1]), tuple(lead)):
        yield array.reshape(-1, size)[column.ravel()]
