"""The kernel and the reference as functions of arrays, with their gradients."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from jaxfn._check.arguments import Arguments, output_arrays
from jaxfn._check.modes import Batching, PartialDerivative
from jaxfn._kernelcheck.arguments import Arrays
from jaxfn._tree import is_inexact, replace_at


@dataclass(frozen=True)
class OutputTypes:
    """The types of the arrays that a function returns."""

    names: tuple[str, ...]  # the names of the floating-point arrays, then of the others
    floats: tuple[Any, ...]  # floats, others: the shapes and dtypes of both
    others: tuple[Any, ...]

    def listed(self) -> str:
        """Lists the types as text."""
        types = [f"{y.dtype}{list(y.shape)}" for y in (*self.floats, *self.others)]
        return ", ".join(f"{x} as {name}" for name, x in zip(self.names, types, strict=True)) or "nothing"


@dataclass(frozen=True)
class Implementation:
    """A kernel or reference, with its gradients, for one sample."""

    function: Callable[..., Any]
    arguments: Arguments

    def outputs(self, dtype: Any) -> OutputTypes:
        """Returns the types of the outputs for inputs of a dtype, without computing them."""
        names: list[str] = []

        def floats_and_others(fixed: Arrays, xs: Arrays) -> Any:
            floats, others = _returned(self.arguments.call(self.function, xs, fixed))
            names[:] = [*floats, *others]
            return list(floats.values()), list(others.values())

        xs = [jax.ShapeDtypeStruct(value.shape, dtype) for value in self.arguments.values]
        floats, others = jax.eval_shape(floats_and_others, self.arguments.others, xs)
        return OutputTypes(tuple(names), tuple(floats), tuple(others))

    def call(self, fixed: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """Returns the floating-point outputs and the others."""
        floats, others = _returned(self.arguments.call(self.function, xs, fixed))
        return list(floats.values()), list(others.values())

    def run(
        self, fixed: Arrays, xs: Arrays, cotangents: Arrays, part: PartialDerivative | None = None
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Returns floating-point outputs, other outputs, and gradients.

        Args:
          fixed: the input arrays that are not floating-point.
          xs: the floating-point input arrays.
          cotangents: a cotangent for each floating-point output.
          part: the part of the gradients to compute. Default: all.
        """
        chosen, used = self.arguments.differentiated, range(len(cotangents))
        if part is not None:
            chosen, used = [chosen[i] for i in part.inputs], part.outputs

        def function(*differentiated: Any) -> Any:
            floats, others = self.call(fixed, replace_at(chosen, xs, differentiated))
            return [floats[i] for i in used], (floats, others)

        if not chosen:
            _, (floats, others) = function()
            return floats, others, []
        used_outputs, vjp, (floats, others) = jax.vjp(function, *(xs[i] for i in chosen), has_aux=True)
        gradients = vjp([cotangents[i].astype(y.dtype) for i, y in zip(used, used_outputs, strict=True)])
        return floats, others, list(gradients)

    def mapped(self, fixed: Arrays, xs: Arrays, cotangents: Arrays, part: PartialDerivative | None = None) -> Any:
        """Calls `run` for one sample after the other."""

        def run_one(sample: tuple[Arrays, Arrays]) -> Any:
            return self.run(fixed, *sample, part)

        return jax.lax.map(run_one, (xs, cotangents))


@dataclass(frozen=True)
class BatchedImplementation(Implementation):
    """An implementation under `jax.vmap`, which the derivative sees."""

    batching: Batching

    def call(self, fixed: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        def run_one(*xs: Any) -> Any:
            return super(BatchedImplementation, self).call(fixed, list(xs))

        return self.batching.vmap(run_one)(*xs)


class KernelError(Exception):
    """An error that a kernel raised, which is the `__cause__`; names the line of the kernel's code that raised it."""

    def __init__(self, error: Exception) -> None:
        name, text = type(error).__name__, str(error).strip().partition("\n")[0]
        location = _location(error)
        super().__init__(f"it raised {name}: {text}" + (f" ({location})" if location else ""))


# Each ends with the separator, so that a sibling such as jaxfn2 or jax_kernels does not count.
_FILES = (os.path.dirname(__file__), jax.__file__, jaxlib.__file__, np.__file__)
_FOLDERS = tuple(os.path.join(os.path.dirname(file), "") for file in _FILES)


def _location(error: Exception) -> str | None:
    """Returns the last line of user code that raised an error, "file:line"; `None` if there is none."""
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith(_FOLDERS)
    ]
    return lines[-1] if lines else None


def _returned(returned: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the floating-point arrays in a function's result, and its other arrays, by name."""
    floats: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, array in output_arrays(returned):
        dtype = jnp.result_type(array)
        if jnp.issubdtype(dtype, jnp.complexfloating):
            raise TypeError("kernelcheck is for real numbers, and an output is complex. gradcheck takes complex ones.")
        (floats if is_inexact(dtype) else others)[name] = jnp.asarray(array)
    return floats, others
