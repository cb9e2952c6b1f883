"""The function to be differentiated, as a function from a list of double-precision arrays to another."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.arguments import Arguments, as_double, as_function, flatten_arguments, function_name, output_arrays
from jaxfn._check.modes import LeafFunction
from jaxfn._traces import is_ref
from jaxfn._tree import double, is_array_leaf, is_inexact, replace_at


@dataclass(frozen=True)
class Leaf:
    """An array leaf of the inputs or the outputs.

    A complex array of `size` elements has `2 * size` real components: first all real parts, then all imaginary ones.
    """

    name: str  # the name in reports
    shape: tuple[int, ...]  # the shape
    dtype: np.dtype[Any]  # `float64` or `complex128`

    @cached_property
    def is_complex(self) -> bool:
        return self.dtype.kind == "c"

    @cached_property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))

    @cached_property
    def num_components(self) -> int:
        return self.size * (2 if self.is_complex else 1)

    def locate(self, component: int) -> tuple[tuple[int, ...], str]:
        """Returns the index of a component's element, and for complex arrays its part."""
        part, element = divmod(component, max(self.size, 1))
        index = tuple(int(i) for i in np.unravel_index(element, self.shape)) if self.shape else ()
        return index, ("real", "imaginary")[part] if self.is_complex else ""


@dataclass
class Problem:
    """A function, and the point at which it is differentiated."""

    name: str  # the function's name
    call: LeafFunction  # the function itself
    target: LeafFunction  # the function whose derivative the rule should be, and whose values finite differences use
    # the function for autodiff: `target`, without the rules of `jax.custom_vjp` and `jax.custom_jvp`
    reference: LeafFunction
    inputs: tuple[Leaf, ...]  # the leaves with respect to which it is differentiated
    values: list[jax.Array]  # the values of `inputs`, in double precision
    # returns the names of the outputs of the last call, and their dtypes before the cast to double
    describe_outputs: Callable[[], list[tuple[str, Any]]]
    may_stop: bool = True  # whether an output may have no derivative, as one that is marked non-differentiable
    # whether `reference` is another function than `call`, even if no rule of a Function is bypassed
    has_reference: bool = False


def make_problem(
    check: str,
    func: Callable[..., Any],
    inputs: Any,
    argnums: int | Sequence[int] | None,
    surrogate: Callable[..., Any] | None = None,
) -> Problem:
    """Makes a problem of a function and its inputs, for a check of this name.

    Raises:
      TypeError: the function is torch code.
      ValueError: nothing is differentiable, or `argnums` names an argument that is missing or not differentiable.
    """
    func = as_function(func, check)
    surrogate = None if surrogate is None else as_function(surrogate, f"{check}(surrogate=...)")
    warned: list[str] = []

    def in_double_precision(name: str, leaf: Any, is_differentiated: bool) -> Any:
        is_number = is_differentiated and argnums is not None and type(leaf) in (float, complex)
        if not (is_number or is_array_leaf(leaf)):
            return leaf
        if is_ref(leaf):
            raise TypeError(
                f"{name} is a jax.Ref. The function may write to it, so it cannot be run again and again: make the Ref "
                "inside the function."
            )
        dtype = getattr(leaf, "dtype", None)
        if is_differentiated and dtype is not None and is_inexact(dtype) and double(dtype) != dtype:
            warned.append(f"{name} is {dtype}")
        return as_double(leaf)

    arguments = flatten_arguments(func, inputs, argnums, in_double_precision)
    _require_differentiable(argnums, arguments)
    if warned:
        warnings.warn(
            f"{', '.join(warned)}, which is not double precision. {check} computes in double precision, and a function "
            "that converts back will likely fail.",
            stacklevel=3,
        )
    indices, outputs = arguments.differentiated, [list[tuple[str, Any]]()]

    def flat(function: Callable[..., Any]) -> LeafFunction:
        def call(*values: Any) -> list[jax.Array]:
            returned = output_arrays(arguments.call(function, replace_at(indices, arguments.values, values)))
            inexact = [(name, y) for name, y in returned if is_inexact(jnp.result_type(y))]
            outputs[0] = [(name, jnp.result_type(y)) for name, y in inexact]
            return [as_double(y) for _, y in inexact]

        return call

    values = [arguments.values[i] for i in indices]
    call = flat(func)
    target = call if surrogate is None else flat(surrogate)
    # The rules of custom_vjp and custom_jvp are removed here; `CallMonitor.bypass_rules` removes those of Functions.
    has_rule = surrogate is None and isinstance(func, (jax.custom_vjp, jax.custom_jvp))
    reference = flat(cast(Any, func).__wrapped__ if has_rule else surrogate or func) if has_rule else target
    return Problem(
        function_name(func),
        call,
        target,
        reference,
        tuple(Leaf(arguments.names[i], x.shape, double(x.dtype)) for i, x in zip(indices, values, strict=True)),
        values,
        lambda: outputs[0],
        has_reference=has_rule or surrogate is not None,
    )


def _require_differentiable(argnums: int | Sequence[int] | None, arguments: Arguments) -> None:
    owners = {arguments.owners[i] for i in arguments.differentiated}
    missing = sorted(arguments.chosen - owners)
    if argnums is not None and missing:
        raise ValueError(f"argnums names input {missing[0]}, which has no floating or complex array")
    if not owners:
        raise ValueError(
            "gradcheck expects at least one floating or complex array among its inputs, to differentiate with respect "
            "to. Python numbers are static: make them arrays, or name their argument in argnums."
        )
