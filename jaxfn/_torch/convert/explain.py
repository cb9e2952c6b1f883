"""The explanation that `from_torch(F).explain(*args)` returns."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.convert.lifting import ORIGINAL
from jaxfn._torch.convert.traced_code import TracedCode, TracedForward
from jaxfn._torch.graph.jax_code import format_jax_code
from jaxfn._torch.graph.recorder import AssumedValue
from jaxfn._torch.graph.targets import operation_name
from jaxfn._torch.values.errors import TranslationError


class Part:
    """`forward` or `backward`, explained.

    Attributes:
      name: which.
      error: why it could not be traced, or `None`.
      graph: the graph that torch traced, as text.
      operations: the operations in it, each once, as torch prints them.
      unsupported: those among them that have no translation, each with the source line that called it.
      code: the JAX code of the translation, which stands for it in text; it is not what runs.
      draws: whether it draws random numbers.
      functions: the Functions that are applied in it, each once.
    """

    def __init__(self, name: str, traced: TracedCode | None, error: TranslationError | None = None) -> None:
        self.name = name
        self.error = error
        self.graph, self.operations, self.unsupported, self.code, self.draws = "", [], [], "", False
        self.functions: list[AppliedFunction] = []
        if traced is not None:
            self.functions = _count_applied_functions(traced.functions)
            nodes = traced.graph_module.graph.nodes
            self.graph = str(traced.graph_module.graph).strip()
            self.operations = sorted({operation_name(node.target) for node in nodes if node.op == "call_function"})
            self.unsupported = traced.unsupported
            self.code = format_jax_code(traced.graph_module, traced.code.config.replacements.operations)
            self.draws = traced.draws

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name} cannot be traced:\n{_indent(str(self.error))}" + self._functions_and_unsupported()
        return (
            f"{self.name}, as torch traced it:\n{_indent(self.graph)}\n"
            f"{self.name}, operations: {', '.join(self.operations) or 'none'}"
            + self._functions_and_unsupported()
            + (f"\n{self.name} draws random numbers: it needs a key" if self.draws else "")
            + f"\n{self.name}, in JAX:\n{_indent(self.code.strip())}"
        )

    def _functions_and_unsupported(self) -> str:
        applied = "".join(f"\n    {function}" for function in self.functions)
        missing = "".join(
            f"\n    {entry.operation}, {entry.line or 'line unknown'}"
            f"{f', in {entry.callable}' if entry.callable else ''}{f': {entry.reason}' if entry.reason else ''}"
            for entry in self.unsupported
        )
        return (f"\n{self.name}, Functions in it:{applied}" if applied else "") + (
            f"\n{self.name}, without a translation:{missing or ' none'}" if self.graph else ""
        )


class AppliedFunction(NamedTuple):
    """A torch Function that code applies.

    Attributes:
      name: its name.
      place: where it was written, `file:line`.
      times: how often it is applied, in Functions too that are applied.
      rules: which of "backward" and "jvp" are its own: those are what JAX uses. Without any it has no derivative.
    """

    name: str
    location: str
    times: int
    rules: tuple[str, ...]

    def __str__(self) -> str:
        rules = f"by its own {' and '.join(self.rules)}" if self.rules else "not differentiable"
        return f"{self.name} ({self.location}), {self.times} x, {rules}"


def _count_applied_functions(programs: Sequence[TracedForward]) -> list[AppliedFunction]:
    times: Counter[Any] = Counter()
    definitions: dict[Any, Definition] = {}
    pending = list(programs)
    while pending:
        traced = pending.pop(0)
        function = getattr(traced.definition.function, ORIGINAL, traced.definition.function)
        times[function] += 1
        definitions[function] = traced.definition
        pending += traced.functions
    return [_describe_function(function, definitions[function], number) for function, number in times.items()]


def _describe_function(function: Any, definition: Definition, times: int) -> AppliedFunction:
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    location = f"{code.co_filename}:{code.co_firstlineno}" if code else "place unknown"
    rules = [*["backward"] * (definition.backward is not None), *["jvp"] * definition.has_jvp]
    return AppliedFunction(definition.name, location, times, tuple(rules))


class Explanation:
    """An explanation of what becomes of a torch Function for certain arguments; prints as text.

    Attributes:
      name: the Function's.
      parts: `forward` and, where it has one and forward could be traced, `backward`.
      values_needed: the places where Python code asks for a tensor's value, as far as can be seen: each is told
        something, to see what else the code does. Their `line.callable` is a function that `ops=` may name.
    """

    def __init__(self, name: str, parts: Sequence[Part], values_needed: Sequence[AssumedValue] = ()) -> None:
        self.name = name
        self.parts = list(parts)
        self.values_needed = list(values_needed)

    @property
    def is_supported(self) -> bool:
        """Whether all of it can run on JAX."""
        return not any(part.error or part.unsupported for part in self.parts)

    def __str__(self) -> str:
        asking = "".join(map(str, self.values_needed))
        needed = [f"values of tensors that Python code asks for:{asking}"] if asking else []
        return "\n\n".join([self.name, *map(str, self.parts), *needed])

    __repr__ = __str__


def _indent(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
