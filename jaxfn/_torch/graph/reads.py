"""Reads of the values of traced tensors by Python code, and who answers them.

A *read* is a traced tensor whose values Python code needs, as in `if x.any()`, `x.item()` or `x.numpy()`. The trace's
answerer returns them:

    Answerer        nothing. The read raises, or a check is skipped
    CallValues      the arrays of a call outside `jax.jit`. The trace is valid for calls that read the same values.
    AssumedValues   placeholders, to list the reads of code that cannot run
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from jaxfn._reports import public
from jaxfn._torch.graph.int64 import LARGEST, has_int64, saturate_to_int32
from jaxfn._torch.graph.interpreter import RecordedGraph, TranslatedGraph
from jaxfn._torch.graph.source_lines import Line, format_line
from jaxfn._torch.values.arrays import jax_dtype
from jaxfn._torch.values.errors import DataDependentError, TranslationError
from jaxfn._traces import elements_under_vmaps, is_concrete, manual_axes_here, staging_trace

STAYS = "stays"  # The source of a number's "answer" if it is not read.


@public
class Read(NamedTuple):
    """A traced tensor whose values Python code read.

    Attributes:
      node: The node of the tensor.
      line: The line that read it.
      answer: The values that it got.
      source: Whose answer it is.
      kind: What the values are needed for: "check", "branch", "loop", "number", "array" or "shape".
    """

    node: Node
    line: Line | None
    answer: np.ndarray[Any, Any]
    source: str
    kind: str

    def __str__(self) -> str:
        name = self.line and self.source != STAYS and self.line.callable
        hint = f"; ops={{{name}: jax_function}} would replace the function around it" if name else ""
        answer = self.answer.item() if self.answer.size == 1 else f"an array of shape {self.answer.shape}"
        return f"{format_line(self.line)}\n    ({self.kind}, {self.source} {answer}{hint})"


class Answerer:
    """Answers the reads of a trace: this one, none of them.

    Attributes:
      source: Whose answers they are.
      knows_sizes: Whether `x[mask]` is a tensor, since the number of its elements may be read.
      reads_numbers: Whether `item()` reads a value, and does not return a traced number.
      gave_numbers: Whether `item()` has returned a traced number.
      ways_out: What to do about a read without an answer, for messages.
      skips_checks: Whether a check without an answer passes.
    """

    source = "skipped: assumed to be"
    knows_sizes = reads_numbers = gave_numbers = False

    def __init__(
        self,
        ways_out: str = "Use torch.where, or pass the number as a Python number",
        skips_checks: bool = False,
    ) -> None:
        self.ways_out = ways_out
        self.skips_checks = skips_checks

    def answer(self, graph: RecordedGraph, node: Node, line: Line | None) -> np.ndarray[Any, Any] | None:
        """Returns the values of a node in the dtype that JAX has for it; `None` if they are unknown."""
        return None


NO_VALUES = Answerer()


class AssumedValues(Answerer):
    """Answers with ones; with False to a condition, unless it is asserted. `reads` lists them without duplicates."""

    source = "assumed to be"

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[Read] = []

    def answer(self, graph: RecordedGraph, node: Node, line: Line | None) -> np.ndarray[Any, Any]:
        tensor = node.meta["val"]
        is_false = tensor.dtype is torch.bool and not (line and line.text.startswith("assert"))
        answer = np.full(tuple(tensor.shape), not is_false).astype(jax_dtype(tensor.dtype))
        if (line, str(answer)) not in [(read.line, str(read.answer)) for read in self.reads]:
            self.reads.append(Read(node, line, answer, self.source, "value"))
        return answer


class CallValues(Answerer):
    """Answers with the values of a call's arrays. Each node is evaluated once, when it is first needed.

    Args:
      inputs: The arrays of the graph's inputs. Under `jax.vmap` all elements of a batch must give one answer.
      key: The random key.
      known: What the trace's first reads gave in a compiled program, whose rounding may differ.
      outside_trace: A context in which the thread is not tracing.
      knows_sizes: See `Answerer`; also for `reads_numbers`.

    Attributes:
      values: The values of the evaluated nodes.
      has_key: Whether there is a random key.
    """

    source = "in this call"

    def __init__(
        self,
        inputs: Sequence[Any],
        key: Any,
        known: Sequence[np.ndarray[Any, Any]],
        outside_trace: Callable[[], AbstractContextManager[None]],
        knows_sizes: bool,
        reads_numbers: bool,
    ) -> None:
        super().__init__()
        self.knows_sizes = knows_sizes
        self.reads_numbers = reads_numbers
        self.values: dict[Node, Any] = {}
        self._inputs = inputs
        self._key = key
        self._known = [*known]
        self._outside_trace = outside_trace
        self.has_key = key is not None

    def evaluate(self, graph: RecordedGraph, node: Node) -> Any:
        """Returns the array that a node computes."""
        if node not in self.values:
            with self._outside_trace():
                self._evaluate(graph, node)
        return self.values[node]

    def answer(self, graph: RecordedGraph, node: Node, line: Line | None) -> np.ndarray[Any, Any]:
        value = self.evaluate(graph, node)
        answer = one_answer(elements_under_vmaps(saturate_to_int32(value) if has_int64(value) else value), line)
        if node.meta["val"].dtype == torch.int64 and answer.dtype == np.int32 and (abs(answer) >= LARGEST).any():
            raise TranslationError(
                "Python code reads an integer that needs 64 bits. Without jax.config.update('jax_enable_x64', True) "
                f"JAX's integers have 32{format_line(line)}"
            )
        known = self._known.pop(0) if self._known else answer
        if known.shape == answer.shape and known.dtype == answer.dtype and jnp.issubdtype(answer.dtype, jnp.inexact):
            return known
        self._known *= same_bits(known, answer)  # What follows was read after another answer.
        return answer

    def first_answers(self, graph: RecordedGraph, reads: Sequence[Read]) -> list[np.ndarray[Any, Any]]:
        """Returns what the reads of a trace give, up to the first that differs from the trace's answer."""
        found: list[np.ndarray[Any, Any]] = []
        for read in reads:
            found.append(self.answer(graph, read.node, read.line))
            if not same_bits(found[-1], read.answer):
                break
        return found

    def _evaluate(self, graph: RecordedGraph, node: Node) -> None:
        """Adds the values of a node and of all that it is computed from."""
        pending, needed = [node], set[Node]()
        while pending:
            operand = pending.pop()
            if operand not in self.values and operand not in needed:
                needed.add(operand)
                pending += operand.all_input_nodes
        nodes = [x for x in graph.graph.nodes if x in needed]
        inputs = [array for x, array in zip(graph.inputs, self._inputs, strict=False) if x in needed]
        self.values |= TranslatedGraph(graph, nodes=nodes).evaluate(self.values, inputs, self._key)


def are_concrete(arrays: Iterable[Any]) -> bool:
    """Whether arrays have values here, perhaps under derivatives and `jax.vmap`."""
    return staging_trace() is None and not manual_axes_here() and all(map(is_concrete, arrays))


def to_bytes(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the bytes of arrays as one vector."""
    parts = [jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x for x in arrays]
    parts = [x.astype(np.uint8) if x.dtype == np.bool_ else x for x in parts]
    return jnp.concatenate([np.zeros(0, np.uint8), *(lax.bitcast_convert_type(x, np.uint8).ravel() for x in parts)])


def first_answers(values: jax.Array, reads: Sequence[Read]) -> list[np.ndarray[Any, Any]]:
    """Returns what the reads gave in a call, from their bytes, up to the first that differs from the trace's answer.

    What was read after that belongs to another course of the code.
    """
    elements, begin = elements_under_vmaps(values), 0
    found: list[np.ndarray[Any, Any]] = []
    for read in reads:
        part = elements[:, begin : begin + read.answer.nbytes]
        begin += read.answer.nbytes
        found.append(one_answer(part, read.line).view(read.answer.dtype).reshape(read.answer.shape))
        if not same_bits(found[-1], read.answer):
            break
    return found


def one_answer(elements: np.ndarray[Any, Any], line: Line | None) -> np.ndarray[Any, Any]:
    """Returns what all elements of a batch give. Raises if they differ."""
    if len(elements) and all(same_bits(element, elements[0]) for element in elements[1:]):
        return elements[0]
    raise DataDependentError(
        "under jax.vmap, Python code reads a value that is not the same for all elements of the batch. Call it for one "
        f"element at a time, in a Python loop{format_line(line)}"
    )


def same_bits(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    """Whether arrays have one shape and dtype, and equal bits."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
