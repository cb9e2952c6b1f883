"""Where the arrays of a run of `forward` come from, read off the program that JAX is writing down."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._compat import carry_out, equation_of, is_batched, repeats_safely, under_batches, used_operands, variable_of
from jaxfn._primitives.attach import detach
from jaxfn._values.arrays import double, is_inexact, is_key, is_staged, is_traced


def closed_over_origins(arrays: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
    """The traced values that have a bearing on the derivative of `arrays`, other than the inputs.

    Args:
      arrays: what forward made.
      inputs: what it was given.

    Returns:
      Arguments and constants of the program that forward was written into, and whatever else JAX traces.
    """
    seen = {id(under_batches(x)) for x in inputs}
    pending = [under_batches(x) for x in arrays]
    origins: list[Any] = []
    while pending:
        array = pending.pop()
        if id(array) in seen or not is_traced(array) or not _is_differentiable(array):
            continue
        seen.add(id(array))
        made_by = equation_of(array) if is_staged(array) else None
        if made_by is not None:
            pending += used_operands(*made_by)
        elif is_traced(array.full_lower()):
            origins.append(array)
    return origins


def is_written_down(arrays: Sequence[Any]) -> bool:
    """Whether each of the arrays is a value of the program that JAX is writing down, or a constant."""
    return all(is_staged(x) or not is_traced(x) for x in arrays)


def computed_again(
    arrays: Sequence[Any], inputs: Sequence[Any], instead: Sequence[Any], *, with_effects: bool
) -> list[Any] | None:
    """The arrays as functions of other inputs: their equations once more, as far as they depend on the inputs.

    Args:
      arrays: what forward made of the inputs; see `is_written_down`.
      inputs: what it was given.
      instead: what is to be in the inputs' place.
      with_effects: whether effects may happen once more.

    Returns:
      The arrays; `None` where an equation cannot be repeated.
    """
    again: dict[int, Any] = {variable_of(x): y for x, y in zip(inputs, instead, strict=True) if is_traced(x)}
    constant: set[int] = set()
    pending = [x for x in arrays if is_traced(x)]
    while pending:
        variable = variable_of(pending[-1])
        made_by = None if variable in again or variable in constant else equation_of(pending[-1])
        if made_by is None:
            constant |= {variable} - again.keys()
            pending.pop()
            continue
        equation, operands = made_by
        known = [variable_of(x) in again or variable_of(x) in constant for x in operands]
        if not all(known):
            pending += [x for x, is_known in zip(operands, known, strict=True) if not is_known]
        elif any(variable_of(x) in again for x in operands):
            if not repeats_safely(equation, operands, with_effects=with_effects):
                return None
            results = carry_out(equation, [again.get(variable_of(x), x) for x in operands], is_of_jaxpr=False)
            again |= zip(map(id, equation.outvars), results, strict=True)
        else:
            constant |= set(map(id, equation.outvars))
    return [again.get(variable_of(x), x) if is_traced(x) else x for x in arrays]


def _is_differentiable(array: Any) -> bool:
    dtype = getattr(array, "dtype", None)
    return dtype is not None and is_inexact(dtype)


class Fingerprint:
    """What `forward` computed, to be compared with what it computes when it runs again.

    Attributes:
      constants: the constants that went in, by value, and the names of the operations. They are the same where the
        computation is batched along another axis, or not at all.
      operations: every operation with its operands; `None` where the computation is batched.

    Args:
      arrays: what forward made.
      inputs: what it was given.
    """

    def __init__(self, arrays: Sequence[Any], inputs: Sequence[Any]) -> None:
        self._names = {id(under_batches(x)): f"input {i}" for i, x in enumerate(inputs)}
        self._kept: list[Any] = []  # so that no identity is given out again
        self._operations: list[str] = []
        self.constants: collections.Counter[str] = collections.Counter()
        results = [self._named(under_batches(x)) for x in arrays]
        is_mapped = any(map(is_batched, (*arrays, *inputs)))
        self.operations = None if is_mapped else [*self._operations, str(results)]
        del self._names, self._kept, self._operations

    def agrees_with(self, other: Fingerprint) -> bool:
        """Whether nothing shows that the two are of different computations."""
        if self.operations is None or other.operations is None:
            return self.constants == other.constants
        return self.operations == other.operations

    def _named(self, array: Any) -> str:
        """The name of an array, after those of all that it was made from."""
        pending: list[Any] = [array]
        while pending:
            array = pending[-1]
            made_by = equation_of(array) if is_staged(array) else None
            unnamed = [x for x in made_by[1] if id(x) not in self._names] if made_by is not None else []
            if id(array) in self._names:
                pending.pop()
            elif unnamed:
                pending += unnamed
            elif made_by is None:
                self._name(array, _described_value(array), _described_value(array))
            else:
                equation, operands = made_by
                place = list(map(id, equation.outvars)).index(variable_of(array))
                names = [self._names[id(x)] for x in operands]
                text = f"{place} of {equation.primitive.name} {_described_params(equation.params)} of {names}"
                kind = "" if equation.primitive.name in _MOVING else equation.primitive.name
                self._name(array, text, f"{kind} {equation.params.get('name', '')}".strip())
        return self._names[id(array)]

    def _name(self, array: Any, operation: str, constant: str) -> None:
        self._names[id(array)] = f"value {len(self._kept)}"
        self._kept.append(array)
        self._operations.append(operation)
        if constant:
            self.constants[constant] += 1


# What batching may add or leave out.
_MOVING = {"transpose", "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "pvary", "settle", "attach", "detach"}


def _described_value(array: Any) -> str:
    """A constant by its value; what is traced by its identity."""
    value = array.full_lower() if is_traced(array) else array
    if is_traced(value):
        return f"traced {id(value)}"
    value = jax.random.key_data(value) if isinstance(value, jax.Array) and is_key(value) else value
    return f"{jax.typeof(value)} {np.asarray(value).tobytes()!r}"


def _described_params(params: dict[str, Any]) -> str:
    described = {name: _name_of(value) if callable(value) else str(value) for name, value in params.items()}
    return re.sub(r" at 0x[0-9a-f]+", "", str(described))


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def agree(a: Any, b: Any) -> bool:
    """Whether two arrays, whose values are known, are the same but for rounding."""
    a, b = (under_batches(x) for x in detach([a, b]))
    if jax.typeof(a) != jax.typeof(b) or is_traced(a) or is_traced(b):
        return False
    if is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    if not is_inexact(a.dtype):
        return bool(np.array_equal(np.asarray(a), np.asarray(b)))
    # Under differentiation JAX compiles the same operations into other programs, which round differently.
    tolerance = float(jnp.finfo(a.dtype).eps) ** 0.5
    a, b = (np.asarray(x).astype(double(a.dtype)) for x in (a, b))
    finite = a[np.isfinite(a)]
    largest = float(np.abs(finite).max(initial=0.0))
    return bool(np.allclose(a, b, rtol=tolerance, atol=tolerance * largest, equal_nan=True))
