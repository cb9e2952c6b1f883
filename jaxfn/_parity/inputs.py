"""The inputs of a parity check: NumPy arrays and Python values, of which torch and JAX receive copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import flatten_arguments
from jaxfn._check.draws import draw
from jaxfn._tree import double, is_array_leaf

Array = np.ndarray[Any, Any]

# A relative step away from a kink: large compared with double precision, small compared with the values.
_STEP = 1e-4
_ULPS = 2  # the change of a sample, in units in the last place


def _as_numpy(_name: str, leaf: Any, _is_differentiated: bool) -> Any:
    return np.asarray(leaf) if is_array_leaf(leaf) else leaf


def _as_tuple(*args: Any) -> tuple[Any, ...]:
    return args


class Inputs:
    """The arguments of one call.

    Args:
      args: pytrees; array leaves become NumPy arrays.

    Attributes:
      names: the names of the differentiable array leaves, `input 0` and so on, with paths into pytrees.
      values: the differentiable arrays.
    """

    def __init__(self, args: Sequence[Any]) -> None:
        self._arguments = flatten_arguments(None, tuple(args), None, _as_numpy)
        self.names = self._arguments.names
        self.values: Sequence[Array] = self._arguments.values

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments."""
        return self.call(_as_tuple, np.asarray, self.values)

    def call(self, function: Callable[..., Any], convert: Callable[[Any], Any], values: Sequence[Any]) -> Any:
        """Calls a function with all arguments: differentiable arrays as they are passed here, others converted."""
        return self._arguments.call(function, values, list(map(convert, self._arguments.others)))

    def _with_values(self, values: Sequence[Array]) -> Inputs:
        return Inputs(self.call(_as_tuple, np.asarray, values))

    def in_double(self) -> Inputs:
        """The inputs in double precision."""
        return self._with_values([x.astype(double(x.dtype)) for x in self.values])

    @property
    def are_double(self) -> bool:
        """Whether the differentiable arrays are in double precision."""
        return bool(self.values) and all(x.dtype == double(x.dtype) for x in self.values)

    def sample(self, number: int) -> Inputs:
        """The inputs below double precision, changed by a few units in the last place unless the number is 0."""
        values: list[Array] = []
        for i, x in enumerate(self.values):
            single = np.dtype(np.complex64 if x.dtype.kind == "c" else np.float32)
            dtype = single if self.are_double else x.dtype
            factors = 1 + _ULPS * float(jnp.finfo(dtype).eps) * draw(f"sample {number}", i, x.real.astype(np.float64))
            values.append((x * factors).astype(dtype) if number else x.astype(dtype))
        return self._with_values(values)

    def nudged(self) -> Inputs:
        """The inputs in double precision, each number changed by a small random step."""
        moved = [x + _STEP * (1 + abs(x)) * draw("step", i, x) for i, x in enumerate(self.in_double().values)]
        return self._with_values(moved)
