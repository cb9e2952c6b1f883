"""One run of `forward`, detached from derivatives of its operations, whatever it saves.

See the note in `attach.Gate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxfn._compat import under_batches
from jaxfn._primitives.attach import Gate, attach, detach
from jaxfn._primitives.refusal import Refusal
from jaxfn._protocol.saved_tensor_hooks import Hooks
from jaxfn._run.call import Call
from jaxfn._run.provenance import Fingerprint, agree, closed_over_origins, computed_again, is_written_down
from jaxfn._run.record import Record
from jaxfn._run.run import Run, run_forward
from jaxfn._values.arrays import is_inexact, is_staged, is_traced


class Done(NamedTuple):
    """A run of forward, with its arrays.

    Attributes:
      run, outputs, intermediates: see `run_forward`.
      closed_over: values of which the outputs do not have the derivative that they ought to have.
    """

    run: Run
    outputs: Sequence[Any]
    intermediates: Sequence[Any]
    closed_over: Sequence[Any] = ()


# Traced values that forward closes over, and what they are where forward runs.
StandIns = Sequence[tuple[Any, Any]]


_STATEFUL = (
    "{name}.forward changes an object that it closes over (a source of random numbers, a counter), and JAX writes it "
    "down apart from the program around it here, as it does for nested derivatives under vmap and in jit, scan and "
    "checkpoint, so that the change would be lost. Pass the random key, or what changes, as an argument."
)
CHANGED = (
    "{name}.forward has to run again for this higher derivative{why}, and computed something else than the first time: "
    "what it closes over has changed in between (a counter, a stateful source of random numbers, NumPy's random "
    "state). Pass the random key, or what changes, as an argument."
)


def run_once(
    call: Call,
    inputs: Sequence[Any],
    perturbed: tuple[bool, ...],
    hooks: Hooks | None,
    stand_ins: StandIns,
) -> Done:
    """Runs forward so that nothing differentiates its own operations, which may have no derivative (a kernel, say).

    But intermediates that it saved have the derivative of those operations. See the note in `attach.Gate`.
    """
    gate = Gate()
    detached = _detached(call, inputs, gate)
    expected = _expected(call, perturbed, gate)
    lies_elsewhere = is_elsewhere(stand_ins)
    is_recorded = lies_elsewhere or (not call.methods.hides_arrays and _needs_record(detached, gate, stand_ins))
    if is_recorded and not call.has_refs:
        done = recorded(call, inputs, detached, perturbed, hooks, expected, stand_ins)
        if not done.run.hides_staged:
            return done
        if lies_elsewhere:
            raise done.run.hidden_elsewhere()
        call.methods.remember_hidden_arrays()
    run, outputs, intermediates = run_forward(call, detached, perturbed, hooks, expected)
    is_written = any(map(is_traced, detached))
    if run.read_needs_input_grad and is_written:
        run.fingerprint = Fingerprint(outputs, detached)
    if not run.saves_intermediates:
        return Done(run, outputs, intermediates)
    if call.has_refs:  # which must not be written twice
        return Done(run, outputs, _refused(run, intermediates, inputs))
    if gate.perturbed and not is_written:
        return _confirmed(run, outputs, intermediates, inputs)
    closed_over = closed_over_origins(outputs, detached)
    if closed_over or gate.perturbed:
        again = None
        if not run.hides_arrays and is_written_down([*detached, *intermediates]):
            again = computed_again(intermediates, detached, inputs, with_effects=bool(gate.perturbed))
        if again is not None:
            return Done(run, outputs, again)
        if gate.perturbed:  # what is hidden is to have the derivative as well
            run, outputs, intermediates = run_forward(call, inputs, perturbed, hooks, expected)
    gate.is_open = True
    run.is_detached = False
    return Done(run, outputs, intermediates, closed_over)


def is_elsewhere(stand_ins: StandIns) -> bool:
    """Whether values in forward's closure belong to another program than this one."""
    return any(under_batches(traced) is not under_batches(value) for traced, value in stand_ins)


def _needs_record(detached: Sequence[Any], gate: Gate, stand_ins: StandIns) -> bool:
    """Whether a run is to be written down by itself, and not as a part of the program around it.

    A forward with a state (a source of random numbers) must not be if that can be helped: its state would become a
    part of the record.
    """
    if not gate.perturbed or not any(map(is_traced, detached)):
        return False
    return not is_written_down(detached) or any(is_inexact(value.dtype) for _, value in stand_ins)


def _expected(call: Call, perturbed: tuple[bool, ...], gate: Gate) -> tuple[bool, ...]:
    """Which inputs are being differentiated, here or further out."""
    if not gate.perturbed:
        return perturbed
    further_out = call.with_refs([i in gate.perturbed for i in range(call.are_refs.count(False))], False)
    return tuple(a or b for a, b in zip(perturbed, further_out, strict=True))


def recorded(
    call: Call,
    inputs: Sequence[Any],
    detached: Sequence[Any],
    perturbed: tuple[bool, ...],
    hooks: Hooks | None,
    expected: tuple[bool, ...] | None = None,
    stand_ins: StandIns = (),
) -> Done:
    """A run whose program is written down first, so that intermediates can be computed again, to be differentiated.

    Args:
      call: the call.
      inputs: its array leaves.
      detached: the same without derivatives, or the very same.
      perturbed, hooks, expected: see `run_forward`.
      stand_ins: see `StandIns`.

    Returns:
      The run. Arrays that it hides in closures or objects belong to the record.
    """
    runs: list[Run] = []

    def program(*arrays: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        run, outputs, intermediates = run_forward(call, arrays, perturbed, hooks, expected)
        runs.append(run)
        return outputs, intermediates

    before = {id(x) for x in call.closed_over_tracers()}
    record = Record(program, detached, stand_ins)
    (run,) = runs
    if any(is_staged(x) and id(x) not in before for x in call.closed_over_tracers()):
        raise NotImplementedError(_STATEFUL.format(name=call.name))
    outputs, intermediates = record.perform(detached)
    if run.read_needs_input_grad:
        run.fingerprint = Fingerprint(outputs, detached)
    if run.saves_intermediates and inputs is not detached:
        intermediates = record.second(inputs)
    return Done(run, outputs, intermediates)


def _confirmed(run: Run, outputs: Sequence[Any], intermediates: Sequence[Any], inputs: Sequence[Any]) -> Done:
    """The run once more, on the inputs themselves, for intermediates with their derivative."""
    again, outputs_again, intermediates_again = run_forward(run.call, inputs, run.perturbed, run.hooks, run.expected)
    before, after = [*outputs, *intermediates], [*outputs_again, *intermediates_again]
    if again.outputs != run.outputs or len(before) != len(after) or not all(map(agree, before, after)):
        why = ", which goes through an array that it saved and that is neither an input nor an output"
        raise NotImplementedError(CHANGED.format(name=run.call.name, why=why))
    return Done(again, outputs, intermediates_again)


def _refused(run: Run, intermediates: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
    """The intermediates of a run that takes references, which have no derivative."""
    name = run.call.name
    if run.hides_arrays:
        raise NotImplementedError(
            f"{name} takes a jax.Ref and keeps a JAX array inside a closure or an object on ctx, where its derivative "
            "cannot be had. Save the array itself: ctx.save_for_backward(array)."
        )
    refusal = Refusal(
        NotImplementedError,
        f"{name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be "
        "differentiated twice: forward would have to write twice. Save inputs or outputs instead.",
    )
    return attach(intermediates, (), run.call.without_refs(inputs), refusal, made_is_detached=True)


def _detached(call: Call, inputs: Sequence[Any], gate: Gate) -> list[Any]:
    """The inputs without derivatives, each an object of its own: what was saved is known by identity."""
    detached = [x if is_traced(x) else jnp.array(x) for x in detach(call.without_refs(inputs), gate)]
    if len(detached) == len(inputs):
        return detached
    remaining = iter(detached)
    return [x if is_ref else next(remaining) for x, is_ref in zip(inputs, call.are_refs, strict=True)]
