"""The kernel and the reference as functions of arrays, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from jaxfn._kernelcheck.arguments import Arguments, Arrays
from jaxfn._tree import is_array_leaf, is_inexact


@dataclass(frozen=True)
class Results:
    """The results of one side, on the host.

    Attributes:
      outputs: floating-point ones.
      others: of whole numbers and truth values.
      gradients: one for each input that is differentiated.
    """

    outputs: Arrays
    others: Arrays
    gradients: Arrays

    @property
    def arrays(self) -> Arrays:
        return [*self.outputs, *self.others, *self.gradients]

    def as_draw(self) -> Results:
        """Results of one draw, with an axis for draws."""
        return Results(*([array[None] for array in arrays] for arrays in (self.outputs, self.others, self.gradients)))

    def same_as(self, other: Results) -> bool:
        """Whether both are equal to the bit."""
        return all(a.tobytes() == b.tobytes() for a, b in zip(self.arrays, other.arrays, strict=True))


@dataclass(frozen=True)
class OutputTypes:
    """The arrays that a function returns, less their values.

    Attributes:
      names: of the floating-point ones, then of the others.
      floats, others: their shapes and dtypes.
    """

    names: tuple[str, ...]
    floats: tuple[Any, ...]
    others: tuple[Any, ...]

    def listed(self) -> str:
        """Lists the types as text."""
        return ", ".join(f"{y.dtype}{list(y.shape)}" for y in (*self.floats, *self.others)) or "nothing"


@dataclass(frozen=True)
class Implementation:
    """The user's function of arguments, with its gradients, for one draw."""

    function: Callable[..., Any]
    arguments: Arguments

    def outputs(self, dtype: Any) -> OutputTypes:
        """Returns the types of the outputs for inputs of a dtype; nothing is computed."""
        names: list[str] = []

        def described(fixed: Arrays, xs: Arrays) -> Any:
            floats, others = _returned(self.arguments.call(self.function, fixed, xs))
            names[:] = [*floats, *others]
            return list(floats.values()), list(others.values())

        xs = [jax.ShapeDtypeStruct(value.shape, dtype) for value in self.arguments.values]
        floats, others = jax.eval_shape(described, self.arguments.fixed, xs)
        return OutputTypes(tuple(names), tuple(floats), tuple(others))

    def call(self, fixed: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        """The floating-point outputs, and the others."""
        floats, others = _returned(self.arguments.call(self.function, fixed, xs))
        return list(floats.values()), list(others.values())

    def run(
        self,
        fixed: Arrays,
        xs: Arrays,
        cotangents: Arrays,
        inputs: Sequence[int] | None = None,
        outputs: Sequence[int] | None = None,
    ) -> tuple[Arrays, Arrays, Arrays]:
        """Outputs, the other outputs, gradients.

        Args:
          fixed: arrays that are no floating-point ones.
          xs: those that are.
          cotangents: for each floating-point output.
          inputs: which of `xs` are differentiated; by default those of the arguments.
          outputs: which outputs have a cotangent; that of others is undefined.
        """
        chosen = self.arguments.differentiated if inputs is None else inputs
        kept = range(len(cotangents)) if outputs is None else outputs

        def of(*differentiated: Any) -> Any:
            merged = list(xs)
            for position, x in zip(chosen, differentiated, strict=True):
                merged[position] = x
            floats, others = self.call(fixed, merged)
            return [floats[i] for i in kept], (floats, others)

        if not chosen:
            _, (floats, others) = of()
            return floats, others, []
        some, pull, (floats, others) = jax.vjp(of, *(xs[i] for i in chosen), has_aux=True)
        gradients = pull([cotangents[i].astype(y.dtype) for i, y in zip(kept, some, strict=True)])
        return floats, others, list(gradients)

    def mapped(self, fixed: Arrays, xs: Arrays, cotangents: Arrays, **kept: Sequence[int]) -> Any:
        """`run` for one draw after the other."""

        def run_one(draw: tuple[Arrays, Arrays]) -> Any:
            return self.run(fixed, *draw, **kept)

        return jax.lax.map(run_one, (xs, cotangents))


@dataclass(frozen=True)
class BatchedImplementation(Implementation):
    """A side under `jax.vmap`.

    Attributes:
      axes: of floating-point inputs; `None` of those that have no batch.
    """

    axes: tuple[int | None, ...]

    def call(self, fixed: Arrays, xs: Arrays) -> tuple[Arrays, Arrays]:
        def run_one(*xs: Any) -> Any:
            return super(BatchedImplementation, self).call(fixed, list(xs))

        return jax.vmap(run_one, in_axes=self.axes)(*xs)


class KernelError(Exception):
    """An error of a kernel, as text; its cause is the error itself."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"it raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")


def computed(run: Callable[..., Any], *args: Any) -> Results:
    """Runs a kernel's program.

    Raises:
      KernelError: the kernel raised something.
    """
    try:
        return on_host(run(*args))
    except Exception as error:
        raise KernelError(error) from error


def on_host(results: tuple[Arrays, Arrays, Arrays]) -> Results:
    """Results as NumPy arrays."""
    outputs, others, gradients = ([np.asarray(array) for array in arrays] for arrays in results)
    return Results(outputs, others, gradients)


def _returned(returned: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The floating-point arrays that a function returned, and its other arrays, by name."""
    floats: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(returned)[0]:
        if not is_array_leaf(leaf):
            continue
        array = jnp.asarray(leaf)
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError("kernelcheck is for real numbers, and an output is complex. gradcheck takes those.")
        name = f"output{keystr(path)}" if path else "output"
        (floats if is_inexact(array.dtype) else others)[name] = array
    return floats, others
