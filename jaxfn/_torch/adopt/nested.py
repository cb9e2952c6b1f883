"""Functions that the code being traced applies: each is a call of its own jaxfn Function, one node of the graph."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from jaxfn._primitives import DeferredError
from jaxfn._torch.adopt.adopted import Adopted, adopt
from jaxfn._torch.adopt.captured import ORIGINAL, TakingTensors
from jaxfn._torch.adopt.program import Forward
from jaxfn._torch.adopt.refusing import without_derivative
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.inside import CalledFunction, as_key, new_key
from jaxfn._torch.trace.leftovers import may_share_elements
from jaxfn._torch.trace.silent import share_memory
from jaxfn._torch.trace.state import HeldTensors, Nested, Tracing
from jaxfn._torch.values.errors import OtherTraceError, TranslationError
from jaxfn._torch.values.flat import Flat, put_in, slots, take_out
from jaxfn._tree import is_array_leaf, is_inexact


class _Previewed(NamedTuple):
    """The preview of a Function that is applied inside another one, before it is recorded; see `Adapter.preview`."""

    adopted: type[Adopted]
    arguments: Flat
    program: Forward
    draws: bool


def _previewed(tracing: Tracing, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Previewed:
    arguments = take_out((tuple(args), dict(kwargs)))
    stood_in = tracing.recorder.stood_in_inside([*map(tracing.lower, arguments.leaves)], function.__name__)
    adopted = adopt(function, __name__, tracing.config._replace(externals=stood_in, is_nested=True))
    return _Previewed(adopted, arguments, *adopted.adapter.preview(arguments))


def can_be_repeated(tracing: Tracing, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the same call once more gives the same again: it draws nothing, and writes to no argument."""
    try:
        _, _, program, draws = _previewed(tracing, function, args, kwargs)
    except OtherTraceError:  # it uses tensors of a module, and may write to them
        return False
    return not draws and not program.dirty and not program.written


def _applied_to_tensors_of_module(tracing: Tracing, held: HeldTensors, function: Any, args: Sequence[Any]) -> Any:
    """Applies a Function that uses a module's tensors, as one that takes them."""
    taking_all = TakingTensors(function, args, held, [*held.tensors])
    _, arguments, program, _ = _previewed(tracing, taking_all.function, taking_all.args, {})
    places = {id(x): i for i, x in enumerate(arguments.leaves)}
    used, written = program.used_inputs(), set(program.written)
    names = [name for name, x in held.tensors.items() if places[id(x)] in used or name in (taking_all.written or ())]
    moved = [name for name in names if places[id(held.tensors[name])] in written]
    taking = TakingTensors(function, args, held, names, moved)
    returned = _recorded(tracing, _previewed(tracing, taking.function, taking.args, {}))
    read = program.read_by_backward()
    tracing.read_in_backward += [
        (f"{function.__name__}.backward", name, tracing.recorder.node(tracing.lower(x)))
        for name, x in held.tensors.items()
        if places[id(x)] in read and name not in (taking_all.written or ())  # those it reads to write them anew
    ]
    return returned


def applied_inside(tracing: Tracing, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Applies a torch Function in the code being traced, as a call of its own jaxfn Function."""
    held = None if kwargs else tracing.held
    try:
        previewed = _previewed(tracing, function, args, kwargs)
    except OtherTraceError:
        if held is None:
            raise
        return _applied_to_tensors_of_module(tracing, held, function, args)
    if previewed.program.refusal is not None and held is not None:
        try:
            return _applied_to_tensors_of_module(tracing, held, function, args)
        except OtherTraceError:  # it is no tensor of the module: a gradient is refused
            pass
        except TranslationError as error:
            previewed.adopted.adapter.refuse_backward(previewed.program, error)
    return _recorded(tracing, previewed)


def _recorded(tracing: Tracing, previewed: _Previewed) -> Any:
    """Records the call; what it returns."""
    adopted, arguments, program, draws = previewed
    adapter = adopted.adapter
    tracing.functions.append(program)
    places = slots(program.output)
    template = arguments.template  # all that the graph keeps of the arguments
    refusals: list[DeferredError] = []

    def apply_to_arrays(*arrays: Any) -> list[Any]:
        options = {adapter.definition.key_name: as_key(arrays[-1])} if draws else {}
        for refusal in refusals:
            arrays = tuple(without_derivative(refusal, x) if is_inexact(x.dtype) else x for x in arrays)
        args, kwargs = put_in(template, arrays)
        return take_out(adopted.apply(*args, **kwargs, **options), is_array_leaf).leaves

    specs = [program.specs[slot] for slot in places]
    marked = [i for i, slot in enumerate(places) if slot in program.non_differentiable]
    shapes = [(x.shape, x.dtype) for x in specs]
    called = CalledFunction(tracing, apply_to_arrays, adapter.definition.name, shapes, marked)
    written = {*program.dirty, *program.written}
    _refuse_shared(tracing, adapter.definition.name, arguments.leaves, written)
    # What it writes to is to have the old value still where autograd goes back through the call.
    given = [x.clone() if i in written else x for i, x in enumerate(arguments.leaves)]
    made = called(*given, *([new_key(tracing)] if draws else []))
    for tensor, spec in zip(made, specs, strict=True):
        if spec.permuted is not None:
            tracing.recorder.note_order(tracing.lower(tensor), spec.permuted)
    outputs = dict(zip(places, made, strict=True))
    for index, slot in program.dirty.items():
        if slot is None:
            raise TranslationError(
                f"{adapter.definition.name}, applied inside {tracing.owner}, marks an input dirty and does not "
                "return it"
            )
        outputs[slot] = arguments.leaves[index].copy_(outputs[slot])
        if not torch.is_grad_enabled():  # it is another tensor then, and what was written to keeps its derivative
            outputs[slot] = outputs[slot].detach()
    returned = put_in(program.output, outputs)
    if program.handed_on:
        returned, new_values = returned[: -len(program.handed_on)], returned[-len(program.handed_on) :]
        with torch.no_grad():  # as `forward` wrote it: what is written to keeps its derivative
            for index, value in zip(program.handed_on, new_values, strict=True):
                arguments.leaves[index].copy_(value)
        returned = returned[0] if program.returns_one else returned
    tensors = {("input", i): x for i, x in enumerate(arguments.leaves)}
    tensors |= {("output", slot): x for slot, x in outputs.items()}
    for slot, kind, i in program.sharing:
        if slot in outputs and ((kind == "input" and i not in program.dirty) or (kind == "output" and slot < i)):
            what = "is an argument of it, or a part of one" if kind == "input" else "lies in the memory of another one"
            reason = f"for what {adapter.definition.name} returned {what}"
            cure = "Make one of them a copy before: `tensor.clone()`"
            share_memory(tracing.recorder, outputs[slot], tensors[kind, i], reason, cure)
    _look_after_kept(tracing, program, tensors, refusals)
    return returned


def _look_after_kept(
    tracing: Tracing, program: Forward, tensors: Mapping[tuple[str, int], torch.Tensor], refusals: list[DeferredError]
) -> None:
    """Has the call refuse to be differentiated where torch's backward would find, or leave, other values than JAX's.

    # Note: a tensor that is an attribute

        forward    ctx.state = state      backward finds in `ctx.state` what the buffer has by then, and JAX's what it
                   return x * state       had at the call. What it writes there is the buffer's new value in torch, and
        later      state.add_(1)          nobody's in JAX. Of `save_for_backward` torch says that it was modified.
    """
    if program.refusal is not None:
        return
    try:
        backward = None if program.is_inside_own_backward else program.whole_backward()
        shared = program.shared_with_backward()
    except Exception:  # it says so itself where it is called
        return
    name, owner = program.definition.name, tracing.owner

    def refuse(kind: str, i: int, what: str) -> None:
        message = (
            f"{name}.backward {what} {kind} {i} of the call in {owner}, which forward keeps on ctx. In torch that is "
            "the memory of the caller, and on JAX a value of its own. Keep a copy, `tensor.clone()`"
        )
        refusals.append(DeferredError(TranslationError, message))

    for _, kind, i in shared:
        told = functools.partial(refuse, kind, i, "computes with what was written afterwards to")
        tensor = tensors[kind, i]
        tracing.kept.append((tensor, tracing.recorder.node(tracing.lower(tensor)), told))
    held = [*tracing.held.tensors.values()] if tracing.held is not None else []
    takes_them = hasattr(program.definition.function, ORIGINAL)  # and has refused what would be lost
    for i in backward.written if backward is not None and not takes_them else ():
        if any(may_share_elements(tensors["input", i], x) for x in held):
            refuse("input", i, "writes to")


def _refuse_shared(tracing: Tracing, name: str, tensors: Sequence[torch.Tensor], written: Collection[int]) -> None:
    """Raises where what a Function writes to one of its tensors is seen in another one that it was given."""
    for i in written:
        for j, other in enumerate(tensors):
            if i != j and may_share_elements(tensors[i], other):
                raise TranslationError(
                    f"{name}, applied inside {tracing.owner}, writes to tensor {i} of those that it is applied to, "
                    f"and tensor {j} lies in the same memory. JAX's arrays share none. Pass a copy: `.clone()`"
                    f"{source_line()}"
                )


NESTED = Nested(applied_inside, can_be_repeated)
