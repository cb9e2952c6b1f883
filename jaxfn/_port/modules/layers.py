"""The first layer of a port that deviates from the torch module.

# Note: the search

Whether a layer deviates follows from the values of the port (see `Values`): those that torch's layer returned are found
or not. A value that the port does not compute, since it fuses two layers, is not found either; it does not count if a
later one that depends on it is found.

The first layer whose output is not found deviates, if its input is found. Otherwise something before it does: a layer
that returns its input, such as dropout in evaluation mode, or the code of the module around it. Gradients are searched
from the last layer to the first, where a layer deviates if the gradient of its output is found, and that of its input
or of a parameter is not. A `stop_gradient` of a layer's output counts for that layer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from jaxfn._parity.inputs import Array
from jaxfn._parity.report import Deviation
from jaxfn._port.modules.module_record import LayerCall, ModuleRecord
from jaxfn._port.modules.values import Values, is_informative, order_of_axes

_OF_INPUT = "gradient of its input"
Gradients = Mapping[str, tuple[Array, Array]]


class LayerSearch:
    """The search for the first layer that deviates.

    Args:
      record: what torch computed.
      values: the values of the port.
    """

    def __init__(self, record: ModuleRecord, values: Values) -> None:
        self._calls = record.calls
        self._values = values
        self._found: dict[int, bool | None] = {}

    def first_output(self, expected: Array, found: Array | None) -> Deviation | None:
        """Returns the first layer, in forward order, whose output deviates.

        Args:
          expected, found: an output of the module and that of the port, which differ.
        """
        missing = [i for i in range(len(self._calls)) if self._output_is_found(i) is False]
        for i in missing:
            later = (j for j in range(i + 1, len(self._calls)) if i in self._calls[j].depends)
            if not any(self._output_is_found(j) for j in later):
                return self._locate(i)
        if missing or (found is not None and found.shape != expected.shape):
            return None
        reason = "its own code: the outputs of all layers are in the port, and it returns other ones"
        return describe(self._calls[-1], "output", "", reason, expected, found)

    def first_gradient(self, gradients: Gradients, wrong: Collection[str]) -> Deviation | None:
        """Returns the first layer, in backward order, that returns another gradient.

        Args:
          gradients: torch's gradient and that of the port, for each parameter.
          wrong: the parameters where they differ.
        """
        deviating = {i: what for i in range(len(self._calls)) if (what := self._wrong_gradient(i, wrong))}
        first = next((i for i in sorted(deviating, reverse=True) if not self._contains_any(i, deviating)), -1)
        if first < 0 or deviating[first] == _OF_INPUT:
            stopped = [i for i in range(len(self._calls)) if self._is_stopped(i, gradients)]
            innermost = [self._calls[i] for i in reversed(stopped) if not self._contains_any(i, stopped)]
            if innermost:  # A value that the port uses elsewhere may be stopped there as part of an operation.
                last = max(innermost, key=self._is_only_stopped)
                gradient = last.output_gradients[0]
                zero = None if gradient is None else np.zeros_like(gradient)
                return describe(last, "gradient of its output", "", "stop_gradient stops it", gradient, zero)
        return self._gradient_deviation(first, deviating[first], gradients) if first >= 0 else None

    def _all_found(self, arrays: Sequence[Array | None], name: str = "", reshapes: bool = True) -> bool | None:
        """Whether all arrays are values of the port; `None` if they say nothing."""
        key = [x for x in arrays if x is not None and is_informative(x)]
        return all(self._values.find(x, name, reshapes) for x in key) if key else None

    def _output_is_found(self, i: int) -> bool | None:
        if i not in self._found:
            self._found[i] = self._find_output(self._calls[i])
        return self._found[i]

    def _find_output(self, call: LayerCall) -> bool | None:
        if self._values.is_named(call.name) or not _returns_input(call):
            return self._all_found(call.outputs, call.name)
        if self._randomized(call) is not None:
            return False
        # What the layer computes is the shape alone.
        return None if call.outputs[0].shape == call.inputs[0].shape else self._all_found(call.outputs, reshapes=False)

    def _randomized(self, call: LayerCall) -> Array | None:
        """Returns what the port computes from the input of a layer and random numbers, if it does."""
        found = (y for x, y in self._values.randomized if self._is_equal(x, call.inputs[0]))
        return next(found, None)

    def _is_equal(self, array: Array, target: Array) -> bool:
        return order_of_axes(array, target, self._values.rtol) is not None

    def _input_is_found(self, i: int) -> bool:
        return self._all_found(self._calls[i].inputs) is not False

    def _matched(self, arrays: Sequence[Array | None]) -> str:
        """Returns which values of the port the arrays are, as text."""
        found = [self._values.find(x) for x in arrays if x is not None and is_informative(x)]
        return f" ({'; '.join(found)})" if found else ""

    def _locate(self, i: int) -> Deviation:
        """Returns where the output of a layer begins to deviate: in the layer, or before it."""
        call, before = self._calls[i], None
        while not self._input_is_found(i) and before is not call:
            before = call
            returning = [j for j in call.sources if j >= 0 and _returns_input(self._calls[j])]
            i = returning[0] if returning else max(call.parent, i)
            call = self._calls[i]
            if returning and self._input_is_found(i):
                return self._deviation(call, None, "changes its input, which torch's returns")
        if before is not None:
            name = repr(before.name)
            return self._deviation(call, before, f"its own code before {name}: the input of {name} is not in the port")
        if any(self._calls[j].parent == i for j in range(len(self._calls))):
            return self._deviation(call, None, "its own code: its layers agree, its output is not in the port")
        return self._deviation(call, None, f"its input is in the port{self._matched(call.inputs)}, its output is not")

    def _deviation(self, call: LayerCall, before: LayerCall | None, reason: str) -> Deviation:
        target = call.outputs[0] if before is None else before.inputs[0]
        nearest = self._randomized(call) if _returns_input(call) else None
        if nearest is None or nearest.shape != target.shape:
            nearest = self._values.nearest(target, call.name)
        else:
            reason = "the port combines its input with random numbers, torch's returns it"
        return describe(call, "output", "" if before is None else before.name, reason, target, nearest)

    def _wrong_gradient(self, i: int, wrong: Collection[str]) -> str:
        """Returns the gradient that a layer returns and the port does not compute, if it receives the right one."""
        call = self._calls[i]
        if self._all_found(call.output_gradients) is False:
            return ""
        # The gradient of a shared parameter is a sum, which is complete only where it was first used.
        earlier = {p for c in self._calls[:i] for p in c.parameters}
        parameters = [p for p in call.parameters if p in wrong and p not in earlier]
        if parameters:
            return f"gradient of {parameters[0]}"
        if self._all_found(call.input_gradients) is not False:
            return ""
        # JAX may add it to others in another order. It is right if what is before the layer receives the right sum.
        root = len(self._calls) - 1
        sums = [self._all_found(self._calls[j].output_gradients) for j in call.depends]
        sums += [self._all_found(self._calls[root].input_gradients)] if i != root else []
        return "" if any(sums) else _OF_INPUT

    def _is_inside(self, i: int, outer: int) -> bool:
        while i >= 0:
            i = self._calls[i].parent
            if i == outer:
                return True
        return False

    def _contains_any(self, outer: int, calls: Iterable[int]) -> bool:
        return any(self._is_inside(i, outer) for i in calls)

    def _gradient_deviation(self, i: int, what: str, gradients: Gradients) -> Deviation:
        call = self._calls[i]
        if what != _OF_INPUT:
            name = what.removeprefix("gradient of ")
            reason = f"the gradient of its output is in the port{self._matched(call.output_gradients)}"
            others = {repr(c.name) for c in self._calls if name in c.parameters and c.name != call.name}
            reason += f"; it shares the parameter with {', '.join(sorted(others))}" if others else ""
            return describe(call, what, "", reason, *gradients[name])
        where = self._matched(call.output_gradients)
        reason = f"the gradient of its output is in the port{where}, that of its input is not"
        expected = next((g for g in call.input_gradients if g is not None), None)
        nearest = None if expected is None else self._values.nearest(expected, "")
        return describe(call, what, "", reason, expected, nearest)

    def _is_only_stopped(self, call: LayerCall) -> bool:
        """Whether the port uses a layer's output nowhere else than in `stop_gradient`."""
        return any(only and self._is_equal(x, call.outputs[0]) for x, only in self._values.stopped)

    def _is_stopped(self, i: int, gradients: Gradients) -> bool:
        """Whether the port stops the gradient of a layer's output, so that it does not reach the layer's parameters."""
        call = self._calls[i]
        if self._all_found(call.output_gradients) is None or _returns_input(call):
            return False
        if not any(self._is_equal(x, call.outputs[0]) for x, _ in self._values.stopped):
            return False
        parameters = [p for j in range(i + 1) if j == i or self._is_inside(j, i) for p in self._calls[j].parameters]
        earlier = (self._calls[j].parameters for j in reversed(call.depends) if self._calls[j].parameters)
        if all(p in gradients and not gradients[p][1].any() for p in parameters or next(earlier, [])):
            return True
        gradient = call.output_gradients[0]
        received = [g for c in self._calls for j, g in zip(c.sources, c.input_gradients, strict=True) if j == i]
        return any(x is not None and gradient is not None and self._is_equal(x, gradient) for x in received)


def _returns_input(call: LayerCall) -> bool:
    """Whether a layer only returns its input, perhaps with another shape."""
    return (
        len(call.outputs) == len(call.inputs) == 1
        and not call.parameters
        and np.array_equal(np.sort(call.outputs[0], axis=None), np.sort(call.inputs[0], axis=None))
    )


def describe(
    call: LayerCall, what: str, before: str, reason: str, expected: Array | None, found: Array | None
) -> Deviation:
    """Returns a deviation, with the numbers where two arrays differ most."""
    index: tuple[int, ...] = ()
    numbers: list[complex | None] = [None, None]
    if expected is not None and expected.size:
        other = np.zeros_like(expected) if found is None else found
        index = tuple(map(int, np.unravel_index(int(np.argmax(abs(other - expected))), expected.shape)))
        numbers = [None if x is None else x[index].item() for x in (expected, found)]
    return Deviation(call.name, call.kind, what, before, reason, index, *numbers)
