"""Reverse mode where an output lacks a batch that `jax.vmap` maps the call over; see the note in `summing`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax

from jaxfn._compat import Batch, SymbolicZero, batches_of, enclosing_batches, zeros_of
from jaxfn._primitives.attach import Mapping
from jaxfn._primitives.linearity import is_constant, is_zero
from jaxfn._primitives.summing import NOT_MAPPED, sum_over_batches
from jaxfn._run.run import Run, Site
from jaxfn._values.arrays import is_inexact


def with_mappings(site: Site, run: Run, outputs: Sequence[Any], depended_on: Sequence[Any]) -> Run:
    """The run, knowing which outputs lack a batch, where a mapped call is differentiated.

    Args:
      site: where it was called.
      run: the run.
      outputs: its array leaves.
      depended_on: the array leaves of the inputs, then what its rules close over.
    """
    batches_of_inputs, batches_of_outputs = list(map(batches_of, depended_on)), list(map(batches_of, outputs))
    mappings: list[Mapping] = []
    here, num_around = enclosing_batches()
    for operations in here[: max(len(here) + num_around - site.num_around, 0)]:
        unbatched = frozenset(i for i, batches in enumerate(batches_of_outputs) if operations.batch not in batches)
        mapped = frozenset(i for i, batches in enumerate(batches_of_inputs) if operations.batch in batches)
        mappings.append(Mapping(operations, unbatched, mapped))
    if any(m.unbatched for m in mappings):
        run = copy.copy(run)
        run.mappings = mappings
    return run


def pull_of(run: Run) -> Pull:
    """What takes a run, its residuals and cotangents, and gives the cotangents of its inputs."""
    mappings = _mappings_of(run)
    return partial(_pulled_apart, mappings) if mappings else Run.backward


Pull = Callable[[Run, Sequence[Any], Sequence[Any]], "list[jax.Array | None]"]


def _mappings_of(run: Run) -> list[Mapping]:
    """The uses of `jax.vmap` of which the derivative is taken from outside, where outputs lack their batch.

    # Note: grad of vmap, and vmap of grad, of a jitted function

    Under `jax.jit` forward runs where no batch is seen. `jax.vmap` maps the program that it was traced into, and there
    `attach` notes which operands are mapped. It does so in either order; but only where the derivative is taken from
    outside JAX runs `bwd` in the midst of that very vmap:

        grad(vmap(jit(f)))    fwd: jit            bwd: vmap, transposing jit
        vmap(grad(jit(f)))    fwd: jit            bwd: transposing jit, vmap

    Where a program has the derivative inside, `bwd` may run in the midst of a vmap from outside as well, such as where
    a jitted function returns what `jax.vjp` did, or where JAX's coming checkpoint computes residuals again. But `fwd`
    and `bwd` are not mapped as the rule of one call then.
    """
    here = enclosing_batches().here
    of_call = [
        m._replace(operations=bwd)  # JAX's coming custom_vjp maps fwd and bwd one by one, each by a batch of its own
        for m, bwd in zip(run.mappings, here, strict=False)
        if m.unbatched and not m.operations.are_of_one_run(bwd)
    ]
    of_program = [
        m._replace(inputs=frozenset(run.call.places_without_refs[i] for i in m.inputs))
        for m in run.mappings_of_program
        if any(map(m.operations.are_of_one_rule, here))
    ]
    return [*of_call, *of_program]


def _pulled_apart(
    mappings: Sequence[Mapping], run: Run, residuals: Sequence[Any], cotangents: Sequence[Any]
) -> list[jax.Array | None]:
    """The user's backward for each output that lacks a batch, and for all others together; see `summing`.

    Raises:
      NotImplementedError: an input's gradient by an output without a batch depends on that batch. JAX has summed that
        output's cotangent over the batch (0.10.0 to 0.12.0), so no example's own is left.
    """
    zeros: list[Any] = [SymbolicZero(aval.to_tangent_aval()) for aval in run.output_avals]
    lacking = [
        i
        for i in sorted(frozenset[int]().union(*(m.unbatched for m in mappings)))
        if not isinstance(cotangents[i], SymbolicZero) and is_inexact(run.output_avals[i].dtype)
    ]
    if not lacking:
        return run.backward(residuals, cotangents)
    others = [zeros[i] if i in lacking else ct for i, ct in enumerate(cotangents)]
    terms: list[list[tuple[Any, frozenset[Batch]]]] = [
        [] if ct is None else [(ct, frozenset())] for ct in run.backward(residuals, others)
    ]
    for place in lacking:
        absent = [m for m in mappings if place in m.unbatched]
        alone = [*zeros[:place], cotangents[place], *zeros[place + 1 :]]
        for i, cotangent in enumerate(run.backward(residuals, alone)):
            if cotangent is None:
                continue
            if any(i in m.inputs for m in absent):  # as the output does not depend on this input, so must its gradient
                _refuse_unless_zero(run, residuals, alone, place, i)
                continue
            _refuse_unless_constant(run, residuals, alone, i, [m.batch for m in absent])
            terms[i].append((cotangent, frozenset(m.batch for m in absent)))
    return [_sum(cotangent, [m.batch for m in mappings if i not in m.inputs]) for i, cotangent in enumerate(terms)]


def _sum(terms: Sequence[tuple[Any, frozenset[Batch]]], sought: Sequence[Batch]) -> jax.Array | None:
    if not terms:
        return None
    return sum_over_batches([x for x, _ in terms], [absent for _, absent in terms], frozenset(sought))


def _refuse_unless_zero(
    run: Run, residuals: Sequence[Any], cotangents: Sequence[Any], place: int, input_place: int
) -> None:
    def gradient_by(cotangent: Any) -> list[Any]:
        gradient = run.backward(residuals, [*cotangents[:place], cotangent, *cotangents[place + 1 :]])[input_place]
        return [] if gradient is None else [gradient]

    if not is_zero(gradient_by, [zeros_of(run.output_avals[place])]):
        raise NotImplementedError(NOT_MAPPED.format(name=run.call.name))


def _refuse_unless_constant(
    run: Run, residuals: Sequence[Any], cotangents: Sequence[Any], input_place: int, batches: Sequence[Batch]
) -> None:
    mapped = [i for i, x in enumerate(residuals) if not batches_of(x).isdisjoint(batches)]

    def gradient_by(*values: Any) -> list[Any]:
        filled = list(residuals)
        for i, value in zip(mapped, values, strict=True):
            filled[i] = value
        gradient = run.backward(filled, cotangents)[input_place]
        return [] if gradient is None else [gradient]

    if mapped and not is_constant(gradient_by, [residuals[i] for i in mapped]):
        raise NotImplementedError(NOT_MAPPED.format(name=run.call.name))
