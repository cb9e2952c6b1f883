"""The programs that an equation of a jaxpr runs, and how their variables are bound to its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from jaxfn._compat import jaxprs_of, lowered_jaxpr, open_jaxpr, scan_sizes, while_sizes
from jaxfn._primitives.linear import linear_p


class Subprogram(NamedTuple):
    """A program that an equation runs.

    Attributes:
      jaxpr: the program, without its constants.
      consts: those.
      operands: for each of its arguments, which operand of the equation it is, or is a part of.
      results: for each of its results, which result of the equation it becomes, or becomes a part of; `None` for what
        stays inside, as the condition of a loop.
      carried: pairs of a result and the argument that it is in the next step.
      kind: "jit", "scan", "while", "cond", "checkpoint", "shard_map", or "call".
      length: how many steps it runs for: 1 but for a scan, `None` where that is not known.
      is_reversed: whether a scan begins at the end of its arrays.
    """

    jaxpr: Any
    consts: Sequence[Any]
    operands: Sequence[int]
    results: Sequence[int | None]
    carried: Sequence[tuple[int, int]] = ()
    kind: str = "call"
    length: int | None = 1
    is_reversed: bool = False


def subprograms(equation: Any) -> list[Subprogram]:
    """The programs that an equation runs, in order; none for an operation."""
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return [_scan(equation)]
    if name == "while":
        return _while(equation)
    if name == "cond":
        operands = range(1, len(equation.invars))
        return [_simple(branch, equation, "cond", operands) for branch in params["branches"]]
    if name == "custom_linear_solve":
        return [_solver(equation)]
    if equation.primitive is linear_p:
        return _linear(equation)
    kind, parameter = _CALLS.get(name, (None, None))
    if kind is None or params.get(parameter) is None:
        return []
    return [_simple(params[parameter], equation, kind, range(len(equation.invars)))]


# By the names of primitives, the kind of program, and the parameter that it is (0.10.0 to 0.12.0).
_CALLS = {
    "jit": ("jit", "jaxpr"),
    "pjit": ("jit", "jaxpr"),
    "remat2": ("checkpoint", "jaxpr"),
    "checkpoint": ("checkpoint", "jaxpr"),
    "shard_map": ("shard_map", "jaxpr"),
    "custom_jvp_call": ("call", "call_jaxpr"),
    "custom_vjp_call": ("call", "call_jaxpr"),
    "custom_vmap_call": ("call", "call"),
    "closed_call": ("call", "call_jaxpr"),
    "core_call": ("call", "call_jaxpr"),
    "eval_jaxpr": ("call", "call_jaxpr"),
    "composite": ("call", "jaxpr"),
}


def _simple(jaxpr: Any, equation: Any, kind: str, operands: Sequence[int]) -> Subprogram:
    opened, consts = open_jaxpr(jaxpr)
    return Subprogram(opened, consts, operands, range(len(equation.outvars)), kind=kind)


def _scan(equation: Any) -> Subprogram:
    num_consts, num_carry = scan_sizes(equation)
    carried = [(i, num_consts + i) for i in range(num_carry)]
    simple = _simple(equation.params["jaxpr"], equation, "scan", range(len(equation.invars)))
    return simple._replace(carried=carried, length=equation.params["length"], is_reversed=equation.params["reverse"])


def _while(equation: Any) -> list[Subprogram]:
    of_cond, of_body = while_sizes(equation)
    carry = range(of_cond + of_body, len(equation.invars))
    cond = _simple(equation.params["cond_jaxpr"], equation, "while", [*range(of_cond), *carry])
    body = _simple(equation.params["body_jaxpr"], equation, "while", range(of_cond, len(equation.invars)))
    carried = [(i, of_body + i) for i in range(len(carry))]
    return [cond._replace(results=[None], length=None), body._replace(carried=carried, length=None)]


# By the solver as it is given.
_lowered_solvers: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _solver(equation: Any) -> Subprogram:
    """That which solves; the others that the equation has are for derivatives (0.10.0 to 0.12.0)."""
    solver, lengths = equation.params["jaxprs"].solve, equation.params["const_lengths"]
    lowered = _lowered_solvers.get(solver) or lowered_jaxpr(solver)
    if lowered is not solver:  # JAX's coming implementations do not lower it with the program that it is in
        _lowered_solvers[solver] = lowered
    first = lengths.matvec + lengths.vecmat
    right_sides = range(sum(lengths), len(equation.invars))
    return _simple(lowered, equation, "call", [*range(first, first + lengths.solve), *right_sides])


# What a linear function of tangents computes is known once it is traced.
_of_linear: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _linear(equation: Any) -> list[Subprogram]:
    linear = equation.params["linear"]
    if linear not in _of_linear:
        types = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in equation.invars]
        try:
            _of_linear[linear] = jax.make_jaxpr(partial(linear_p.impl, **equation.params))(*types)
        except NameError:  # an axis of a mesh, or of a vmap, that is not known here
            return []
    return [_simple(_of_linear[linear], equation, "call", range(len(equation.invars)))]


def any_equation(jaxpr: Any, condition: Callable[[Any], bool]) -> bool:
    """Whether some equation, of the jaxpr or of a program that it runs, fulfils the condition."""
    return any(
        condition(equation) or any(any_equation(inner.jaxpr, condition) for inner in subprograms(equation))
        for equation in jaxpr.eqns
    )


def unknown_programs(equation: Any) -> Iterator[tuple[str, Any]]:
    """The jaxprs that an equation runs in a way that `subprograms` does not know, each with the operation's name.

    Also those that are run by what it runs.
    """
    programs = [program.jaxpr for program in subprograms(equation)]
    if not programs:
        programs = [open_jaxpr(lowered_jaxpr(jaxpr))[0] for jaxpr in jaxprs_of(equation)]
        yield from ((equation.primitive.name, program) for program in programs)
    for program in programs:
        for inner in program.eqns:
            yield from unknown_programs(inner)
