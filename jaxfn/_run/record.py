"""A run of `forward` that is written down first and carried out afterwards, once more to be differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._compat import AbstractRef, carry_out, is_variable, used_operands


class Record:
    """The program of a function of arrays.

    Args:
      function: takes arrays; returns two lists of arrays.
      arrays: arguments; only their types matter.
      stand_ins: pairs of a traced value that the function closes over, and what to use in its place.
    """

    def __init__(
        self,
        function: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
        arrays: Sequence[Any],
        stand_ins: Sequence[tuple[Any, Any]],
    ) -> None:
        sizes: list[int] = []

        def flat(*arrays: Any) -> list[Any]:
            first, second = function(*arrays)
            sizes.append(len(first))
            return [*first, *second]

        closed = jax.make_jaxpr(flat)(*arrays)
        values = {id(traced): value for traced, value in stand_ins}
        self._jaxpr: Any = closed.jaxpr
        self._closed_over = closed.consts
        self._consts = [values.get(id(const), const) for const in closed.consts]
        self._num_first = sizes[0]

    def perform(self, arrays: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Both lists for these arguments."""
        values = self._arguments(arrays)
        for equation in self._jaxpr.eqns:
            _perform(equation, values)
        results = [_result(atom, values) for atom in self._jaxpr.outvars]
        return results[: self._num_first], results[self._num_first :]

    def second(self, arrays: Sequence[Any]) -> list[Any]:
        """The second list for these arguments, by the equations that it takes."""
        wanted = self._jaxpr.outvars[self._num_first :]
        equations, _ = self._needed_for(wanted)
        values = self._arguments(arrays)
        for equation in equations:
            _perform(equation, values)
        return [_result(atom, values) for atom in wanted]

    def first_needs(self, closed_over: Sequence[Any]) -> bool:
        """Whether the first list depends on one of these values that the function closes over."""
        _, needed = self._needed_for(self._jaxpr.outvars[: self._num_first])
        sought = set(map(id, closed_over))
        consts = zip(self._jaxpr.constvars, self._closed_over, strict=True)
        return any(id(const) in sought for variable, const in consts if variable in needed)

    def _needed_for(self, wanted: Sequence[Any]) -> tuple[list[Any], set[Any]]:
        """The equations that these results take, in order, and all variables in them."""
        needed = set(filter(is_variable, wanted))
        equations: list[Any] = []
        for equation in reversed(self._jaxpr.eqns):
            variables = list(filter(is_variable, equation.invars))
            touches_ref = any(isinstance(v.aval, AbstractRef) and v in needed for v in variables)
            if touches_ref or not needed.isdisjoint(equation.outvars):
                equations.append(equation)
                operands = equation.invars if equation.effects else used_operands(equation, equation.invars)
                needed |= set(filter(is_variable, operands))
        return equations[::-1], needed

    def _arguments(self, arrays: Sequence[Any]) -> dict[Any, Any]:
        variables = [*self._jaxpr.constvars, *self._jaxpr.invars]
        return dict(zip(variables, [*self._consts, *arrays], strict=True))


def _perform(equation: Any, values: dict[Any, Any]) -> None:
    results = carry_out(equation, [_read(atom, values) for atom in equation.invars], is_of_jaxpr=True)
    values.update(zip(equation.outvars, results, strict=True))


def _read(atom: Any, values: dict[Any, Any]) -> Any:
    return values[atom] if is_variable(atom) else atom.val


def _result(atom: Any, values: dict[Any, Any]) -> Any:
    return values[atom] if is_variable(atom) else jnp.asarray(atom.val, atom.aval.dtype)
