"""Sums over devices in a `backward` that count the same more than once.

# Note: Megatron's copy, as it is written in torch

    forward   x                 backward   psum(g, "model")

In torch `g` is what each device has of the gradient. Inside `shard_map(check_vma=True)` types say which values vary
over an axis, and JAX sums the gradient of what does not before `backward` gets it: 8 devices then count 8 times. (So
they do with a custom_vjp by hand where its types allow it, JAX 0.10.0 to 0.12.0.) So the program of `backward` is
looked through for sums of what is the same on all devices, the sum that JAX makes of what was returned among them; and
for gradients that were summed although each device has its own input, which JAX sums once more where that input comes
from one that does not vary.

Where `forward` itself passes values along that axis, such sums may be right, and nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from jaxfn._compat import (
    equation_of,
    is_variable,
    jaxprs_of,
    make_jaxpr,
    manual_axes_here,
    open_jaxpr,
    opened,
    scan_sizes,
    variable_of,
    varying_axes,
    while_sizes,
    zeros_of,
)
from jaxfn._run.call import Call
from jaxfn._run.forward import call_forward
from jaxfn._values.arrays import is_key, is_traced

# Collectives after which all devices have the same, by the name of the parameter that has the axes.
_SUMMING = dict.fromkeys(["psum", "psum_invariant", "pmax", "pmin"], "axes")
_GATHERING = dict.fromkeys(["all_gather", "all_gather_invariant", "all_gather_reduced"], "axis_name")
_SPREADING = _SUMMING | _GATHERING
# Those after which they have not.
_PARTING = {
    "ppermute": "axis_name",
    "all_to_all": "axis_name",
    "reduce_scatter": "axis_name",
    "axis_index": "axis_name",
}


class _Known(NamedTuple):
    """What is known of a value in the program of `backward`.

    Attributes:
      depends: whether it depends on a gradient that `backward` was given.
      same: the axes along which all devices have the same, whatever its type says.
    """

    depends: bool
    same: frozenset[str]


def refuse_repeated_sums(
    call: Call,
    input_avals: Sequence[Any],
    residuals: Sequence[Any],
    given: Sequence[Any],
    returned: Sequence[jax.Array | None],
    cotangents: Sequence[jax.Array | None],
) -> None:
    """Raises where a gradient counts more than once what the devices of an axis have in common.

    Args:
      call: the call.
      input_avals: the types of its array leaves.
      residuals, given: what `backward` had to work with, besides constants: what was kept, and gradients.
      returned: what it made of that, `None` for zero.
      cotangents: the same, as JAX wants it.
    """
    sums = _Sums(frozenset(manual_axes_here()))
    starts = {variable_of(x): sums.known_by_type(jax.typeof(x), False) for x in residuals if is_traced(x)}
    starts |= {variable_of(x): sums.known_by_type(jax.typeof(x), True) for x in given if is_traced(x)}
    as_returned = sums.known_of_arrays(returned, starts)
    sums.known_of_arrays(cotangents, starts)
    repeated = sums.repeated
    lost = [
        (i, axis)
        for i, (aval, x, known) in enumerate(zip(input_avals, returned, as_returned, strict=True))
        if x is not None and known.depends
        for axis in sorted(varying_axes(aval) - varying_axes(jax.typeof(x)))
    ]
    if not repeated and not lost:
        return
    communicating = _axes_of_forward(call, input_avals)
    for axis in sorted(repeated - communicating):
        raise RuntimeError(_REPEATED.format(name=call.name, axis=axis, size=jax.lax.axis_size(axis)))
    for i, axis in lost:
        if axis not in communicating:
            raise RuntimeError(_LOST.format(name=call.name, axis=axis, where=_described(call, i)))


_REPEATED = (
    "{name}.backward sums over the mesh axis {axis!r} what all of its {size} devices have the same of, so that it "
    "counts {size} times, and {name}.forward passes nothing along {axis!r}. Inside of shard_map(check_vma=True) JAX "
    "sums the gradient of what does not vary over an axis by itself: return it without jax.lax.psum or pmean, or let "
    "forward return jax.lax.pcast(output, {axis!r}, to='varying'), after which backward gets what each device has. In "
    "the place of a gradient that was gathered along {axis!r}, return what each device adds to it, with zeros for the "
    "rest."
)
_LOST = (
    "{name}.backward returned the same on all devices of the mesh axis {axis!r} as the gradient of {where}, which "
    "varies over {axis!r}, and {name}.forward passes nothing along {axis!r}: it would count once for every device "
    "where that input comes from one that does not vary. Leave out the jax.lax.pcast of the input, or the jax.lax.psum "
    "in backward; or, if that sum is the gradient of each device's own input, return "
    "jax.lax.pcast(gradient, {axis!r}, to='varying')."
)


def _described(call: Call, leaf: int) -> str:
    """The input that an array leaf belongs to."""
    owners = [position for position, layout in enumerate(call.layouts) for _ in range(layout.num_arrays)]
    return call.form.describe(owners[leaf])


class _Sums:
    """Looks for sums of what is the same on all devices.

    Attributes:
      repeated: the axes that such sums are over.
    """

    def __init__(self, axes: frozenset[str]) -> None:
        self._axes = axes
        self.repeated: frozenset[str] = frozenset()

    def known_by_type(self, aval: Any, depends: bool) -> _Known:
        """What the type of a value tells."""
        return _Known(depends, self._axes - varying_axes(aval))

    def known_of_arrays(self, arrays: Sequence[Any], starts: dict[int, _Known]) -> list[_Known]:
        """What is known of values of the program being written down."""
        known = dict(starts)
        pending = [x for x in arrays if is_traced(x)]
        while pending:
            array = pending[-1]
            made_by = None if variable_of(array) in known else equation_of(array)
            if made_by is None:
                known.setdefault(variable_of(array), self.known_by_type(jax.typeof(array), False))
                pending.pop()
                continue
            equation, operands = made_by
            unknown = [x for x in operands if variable_of(x) not in known]
            if unknown:
                pending += unknown
            else:
                results = self._known_in_equation(equation, [known[variable_of(x)] for x in operands])
                known |= zip(map(id, equation.outvars), results, strict=True)
        constant = _Known(False, self._axes)
        return [known[variable_of(x)] if is_traced(x) else constant for x in arrays]

    def _known_in_jaxpr(self, jaxpr: Any, operands: Sequence[_Known]) -> list[_Known]:
        jaxpr, _ = open_jaxpr(jaxpr)
        known: dict[Any, _Known] = {v: self.known_by_type(v.aval, False) for v in jaxpr.constvars}
        known |= zip(jaxpr.invars, operands, strict=True)

        def known_of_atom(atom: Any) -> _Known:
            return known[atom] if is_variable(atom) else _Known(False, self._axes)

        for equation in jaxpr.eqns:
            known |= zip(
                equation.outvars,
                self._known_in_equation(equation, list(map(known_of_atom, equation.invars))),
                strict=True,
            )
        return list(map(known_of_atom, jaxpr.outvars))

    def _known_in_equation(self, equation: Any, operands: list[_Known]) -> list[_Known]:
        name, params = equation.primitive.name, equation.params
        types = [self.known_by_type(v.aval, any(x.depends for x in operands)) for v in equation.outvars]
        given = [x for x in operands if x.depends]
        if name == "ppermute" and _gives_to_all(params):  # each device gets what it has itself, where all have the same
            return operands
        if name in _PARTING:
            if name == "reduce_scatter" and given:
                # With types that say what varies its result does; without them nothing is known of its operand either.
                self.repeated |= (
                    given[0].same & varying_axes(equation.outvars[0].aval) & {*_axes_of(params["axis_name"])}
                )
            return types
        if name in _SPREADING:
            axes = frozenset(_axes_of(params[_SPREADING[name]]))
            if name == "psum_invariant":
                self.repeated |= axes.intersection(*[x.same for x in given] or [()])
            return [x._replace(same=x.same | axes) for x in operands]
        if name == "cond":
            known_in_branches = [self._known_in_jaxpr(branch, operands[1:]) for branch in params["branches"]]
            return [_met([operands[0], *results]) for results in zip(*known_in_branches, strict=True)]
        if name == "while":
            num_cond, num_consts = while_sizes(equation)
            self._known_in_loop(params["body_jaxpr"], operands[num_cond:], num_consts, len(types))
            return types
        bodies = (params[key] for key in ("jaxpr", "call_jaxpr", "callee", "call") if key in params)
        body = next(bodies, opened(equation))
        if body is not None and _is_called_as_it_is(open_jaxpr(body)[0], equation):
            return self._known_in_loop(body, operands, *(scan_sizes(equation) if name == "scan" else (0, 0)))
        if not operands:
            return types
        met = _met(operands)
        return [_Known(met.depends, own.same | met.same) for own in types]

    def _known_in_loop(self, body: Any, operands: list[_Known], num_consts: int, num_carry: int) -> list[_Known]:
        """What is known of a body's results, once what is carried is what it becomes."""
        while True:
            results = self._known_in_jaxpr(body, operands)
            carry = operands[num_consts : num_consts + num_carry]
            after = [_met(pair) for pair in zip(carry, results, strict=False)]
            if after == carry:
                return results
            operands = [*operands[:num_consts], *after, *operands[num_consts + num_carry :]]


def _gives_to_all(params: Any) -> bool:
    """Whether a permutation leaves no device with zeros."""
    receivers = {receiver for _, receiver in params["perm"]}
    return len(receivers) == math.prod(map(jax.lax.axis_size, _axes_of(params["axis_name"])))


def _is_called_as_it_is(jaxpr: Any, equation: Any) -> bool:
    """Whether an equation's operands and results are those of a jaxpr in it; a kernel's, for one, are references."""
    return len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)


def _met(values: Sequence[_Known]) -> _Known:
    """What is known of a value that depends on all of these, or is one of them."""
    return _Known(any(x.depends for x in values), frozenset.intersection(*[x.same for x in values]))


def _axes_of_forward(call: Call, input_avals: Sequence[Any]) -> frozenset[str]:
    """The axes along which `forward` passes values between devices. Runs `forward`, to write it down."""

    def program(*inputs: Any) -> list[Any]:
        return call_forward(call, inputs, call.unperturbed)[2].arrays

    like = [jax.ShapeDtypeStruct(a.shape, a.dtype) if is_key(a) else zeros_of(a) for a in input_avals]
    return frozenset(_communicating(make_jaxpr(program, *like).jaxpr))


def _communicating(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        parameter = (_SPREADING | _PARTING).get(equation.primitive.name)
        if parameter is not None and equation.primitive.name != "axis_index":
            yield from _axes_of(equation.params[parameter])
        for inner in jaxprs_of(equation):
            yield from _communicating(open_jaxpr(inner)[0])


def _axes_of(parameter: Any) -> Sequence[Any]:
    return parameter if isinstance(parameter, (tuple, list)) else (parameter,)
