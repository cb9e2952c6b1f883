"""torch's recurrent layers, as one `jax.lax.scan` for each layer and direction.

torch computes them by compiled code that shows no operations, or by as many operations as there are time steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import Array, lax

from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.trace.jax_function_node import JaxFunctionNode, draw_key, wrap_key
from jaxfn._torch.trace.state import TraceState
from jaxfn._torch.values.errors import TranslationError

# One time step: the new state, from the input's part of the gates, the state and the recurrent weights.
_Step = Callable[[Array, tuple[Array, ...], Sequence[Array]], tuple[Array, ...]]


class _RecurrentLayers(NamedTuple):
    """The arguments of a recurrent layer, except tensors.

    Attributes:
      num_states: The number of state arrays of one layer, two for an LSTM.
      num_weights: The number of weights for each layer and direction.
      is_dropping: Whether dropout is applied between layers.
    """

    step: _Step
    num_states: int
    num_weights: int
    has_biases: bool
    num_layers: int
    dropout: float
    is_bidirectional: bool
    is_dropping: bool

    def run(
        self, steps: Array, lengths: Array | None, states: Sequence[Array], weights: Sequence[Array], key: Any
    ) -> Any:
        """Returns the outputs (time, batch, features) and the last states of all layers."""
        last: list[tuple[Array, ...]] = []
        unit = 0
        for layer in range(self.num_layers):
            outputs_by_direction: list[Array] = []
            for is_reversed in (False, True) if self.is_bidirectional else (False,):
                layer_weights = weights[unit * self.num_weights : (unit + 1) * self.num_weights]
                outputs, state = self._unit(steps, lengths, tuple(x[unit] for x in states), layer_weights, is_reversed)
                outputs_by_direction.append(outputs)
                last.append(state)
                unit += 1
            steps = jnp.concatenate(outputs_by_direction, axis=-1)
            if self.is_dropping and layer < self.num_layers - 1:
                mask = jax.random.bernoulli(jax.random.fold_in(key, layer), 1 - self.dropout, steps.shape)
                steps = jnp.where(mask, steps / (1 - self.dropout), 0) if self.dropout < 1 else jnp.zeros_like(steps)
        return [steps, *(jnp.stack(parts) for parts in zip(*last, strict=True))]

    def _unit(
        self, steps: Array, lengths: Array | None, state: tuple[Array, ...], weights: Sequence[Array], is_reversed: bool
    ) -> tuple[Array, tuple[Array, ...]]:
        gates = steps @ weights[0].T
        biases = weights[2:4] if self.has_biases else ()
        gates = gates + biases[0] if biases else gates
        bias = biases[1] if biases else jnp.zeros((), weights[1].dtype)
        recurrent = [weights[1], bias, *weights[4 if self.has_biases else 2 :]]

        def body(state: tuple[Array, ...], of_step: tuple[Array, Array]) -> tuple[tuple[Array, ...], Array]:
            gates, time = of_step
            new_state = self.step(gates, state, recurrent)
            if lengths is not None:  # The state after a sequence's end does not change.
                goes_on = (time < lengths)[:, None]
                new_state = tuple(jnp.where(goes_on, new, old) for new, old in zip(new_state, state, strict=True))
            return new_state, new_state[0]

        last, outputs = lax.scan(body, state, (gates, jnp.arange(len(steps))), reverse=is_reversed)
        return outputs, last


def _lstm_step(gates: Array, state: tuple[Array, ...], weights: Sequence[Array]) -> tuple[Array, ...]:
    hidden, cell = state
    recurrent, bias, *projection = weights
    i, f, g, o = jnp.split(gates + hidden @ recurrent.T + bias, 4, axis=-1)
    cell = jax.nn.sigmoid(f) * cell + jax.nn.sigmoid(i) * jnp.tanh(g)
    hidden = jax.nn.sigmoid(o) * jnp.tanh(cell)
    return (hidden @ projection[0].T if projection else hidden), cell


def _gru_step(gates: Array, state: tuple[Array, ...], weights: Sequence[Array]) -> tuple[Array, ...]:
    (hidden,) = state
    recurrent, bias = weights
    of_input, of_state = jnp.split(gates, 3, axis=-1), jnp.split(hidden @ recurrent.T + bias, 3, axis=-1)
    reset, update = (jax.nn.sigmoid(a + b) for a, b in zip(of_input[:2], of_state[:2], strict=True))
    new = jnp.tanh(of_input[2] + reset * of_state[2])
    return ((1 - update) * new + update * hidden,)


def _plain_step(activation: Callable[[Array], Array]) -> _Step:
    def step(gates: Array, state: tuple[Array, ...], weights: Sequence[Array]) -> tuple[Array, ...]:
        recurrent, bias = weights
        return (activation(gates + state[0] @ recurrent.T + bias),)

    return step


_STEPS: dict[Any, _Step] = {
    torch.lstm: _lstm_step,
    torch.gru: _gru_step,
    torch.rnn_tanh: _plain_step(jnp.tanh),
    torch.rnn_relu: _plain_step(jax.nn.relu),
}


def recurrent(state: TraceState, func: Any, *args: Any) -> Any:
    """Implements `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`, as `torch.nn` calls them."""
    is_packed = isinstance(args[1], torch.Tensor) and isinstance(args[3], (tuple, list))
    if is_packed:
        steps, batch_sizes, states, weights, has_biases, num_layers, dropout, is_training, is_bidirectional = args
        is_batch_first = False
        lengths = _lengths(state, batch_sizes)
        rows, columns = _packed_positions(lengths)
        steps = _pad_packed(steps, rows, columns)
    else:
        steps, states, weights, has_biases, num_layers, dropout, is_training, is_bidirectional, is_batch_first = args
        lengths = rows = columns = None
    states = [*states] if isinstance(states, (tuple, list)) else [states]
    units = num_layers * (1 + is_bidirectional)
    layers = _RecurrentLayers(
        _STEPS[func],
        len(states),
        len(weights) // units,
        has_biases,
        num_layers,
        dropout,
        is_bidirectional,
        is_training and dropout > 0 and num_layers > 1,
    )
    if is_batch_first:
        steps = steps.transpose(0, 1)
    num_states, num_operands = len(states), len(states) + len(weights)  # The graph references only these.

    def function(steps: Array, *others: Array) -> list[Array]:
        key = wrap_key(others[-1]) if layers.is_dropping else None
        ends = None if lengths is None else jnp.asarray(lengths)
        return layers.run(steps, ends, others[:num_states], others[num_states:num_operands], key)

    features = states[0].shape[-1] * (1 + is_bidirectional)
    shapes = [((*steps.shape[:2], features), steps.dtype), *((tuple(x.shape), x.dtype) for x in states)]
    keys = [draw_key(state)] if layers.is_dropping else []
    outputs, *last = JaxFunctionNode(state, function, func.__name__, shapes)(steps, *states, *weights, *keys)
    if is_packed:
        outputs = outputs[rows, columns]
    if is_batch_first:
        outputs = outputs.transpose(0, 1)
    return (outputs, *last)


# ---------------------------------------------------------------------------------------------------------- packed


def _concrete_values(state: TraceState, tensor: torch.Tensor, what: str) -> list[int]:
    """Returns a tensor's concrete values, which determine shapes. Raises if it is traced."""
    if state.is_traced(tensor):
        raise TranslationError(
            f"{state.name}: {what} depend on the arguments, but they determine the shapes of packed sequences, which "
            f"are static on JAX. Pass them as Python numbers{source_line()}"
        )
    return tensor.tolist()


def _lengths(state: TraceState, batch_sizes: torch.Tensor) -> list[int]:
    sizes = _concrete_values(state, batch_sizes, "batch sizes")
    return [sum(size > i for size in sizes) for i in range(sizes[0])]


def _packed_positions(lengths: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the time and the sequence index of each packed step."""
    positions = [(time, i) for time in range(lengths[0]) for i, length in enumerate(lengths) if time < length]
    times, sequences = torch.tensor(positions).reshape(-1, 2).unbind(1)
    return times, sequences


def _pad_packed(data: torch.Tensor, times: torch.Tensor, sequences: torch.Tensor, value: float = 0.0) -> torch.Tensor:
    """Returns packed steps as (time, sequence, ...)."""
    size = int(times.max()) + 1, int(sequences.max()) + 1
    return data.new_full((*size, *data.shape[1:]), value).index_put((times, sequences), data)


def pack(state: TraceState, func: Any, steps: torch.Tensor, lengths: torch.Tensor, is_batch_first: bool) -> Any:
    """Implements `pack_padded_sequence` for sequences that are sorted by length."""
    sequence_lengths = _concrete_values(state, lengths, "lengths")
    if is_batch_first:
        steps = steps.transpose(0, 1)
    if (
        sorted(sequence_lengths, reverse=True) != sequence_lengths
        or len(sequence_lengths) != steps.shape[1]
        or sequence_lengths[0] > len(steps)
        or sequence_lengths[-1] < 1
    ):
        raise TranslationError(
            f"{state.name}: the lengths {sequence_lengths} of packed sequences are not sorted, or do not match the "
            f"shape {tuple(steps.shape)}{source_line()}"
        )
    sizes = [sum(length > time for length in sequence_lengths) for time in range(sequence_lengths[0])]
    return steps[_packed_positions(sequence_lengths)], torch.tensor(sizes)


def pad(state: TraceState, func: Any, *args: Any) -> Any:
    """Implements `pad_packed_sequence`."""
    data, batch_sizes, is_batch_first, padding, total = args
    lengths = _lengths(state, batch_sizes)
    padded = _pad_packed(data, *_packed_positions(lengths), padding)
    if total > len(padded):
        rest = padded.new_full((total - len(padded), *padded.shape[1:]), padding)
        padded = torch.cat([padded, rest])
    return padded.transpose(0, 1) if is_batch_first else padded, torch.tensor(lengths)
