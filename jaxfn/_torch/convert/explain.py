"""The result of `jaxfn.explain`, and where converted code comes from."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxfn._reports import Report, public
from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.convert.lifting import ORIGINAL
from jaxfn._torch.convert.traced_code import TracedCode, TracedForward
from jaxfn._torch.graph.reads import Read
from jaxfn._torch.graph.targets import operation_name
from jaxfn._torch.values.errors import TranslationError


@public
class ExplainedMethod:
    """One traced method (`forward` or `backward`), explained.

    Attributes:
      name: The method's name.
      error: The error that tracing raised, or `None`.
      graph: The graph that torch traced, as text.
      operations: The operations in the graph, without duplicates, as torch prints them.
      unsupported: The operations without a translation, each with the source line that called it.
      draws: Whether the method draws random numbers.
      functions: The Functions that it applies, without duplicates.
      reads: The values of tensors that its Python code reads: the line, the kind and the answer. A later call with
        other values may read others.
    """

    def __init__(self, name: str, traced: TracedCode | None, error: TranslationError | None = None) -> None:
        self.name = name
        self.error = error
        self.graph, self.operations, self.unsupported, self.draws = "", [], [], False
        self.functions: list[AppliedFunction] = []
        self.reads: list[Read] = []
        if traced is not None:
            self.reads = [*traced.reads, *traced.skipped, *traced.numbers]
            self.functions = _count_applied_functions(traced.functions)
            graph = traced.recorded.graph
            self.graph = str(graph).strip()
            self.operations = sorted(
                {operation_name(node.target) for node in graph.nodes if node.op == "call_function"}
            )
            self.unsupported = traced.unsupported
            self.draws = traced.draws

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation of the method as plain Python values."""
        texts = {name: _texts(getattr(self, name)) for name in ("functions", "reads")}
        missing = [entry.operation for entry in self.unsupported]
        return vars(self) | texts | {"unsupported": missing, "error": self.error and str(self.error)}

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name} cannot be traced:\n{_indent(str(self.error))}" + self._functions_and_unsupported()
        return (
            f"{self.name}, as torch traced it:\n{_indent(self.graph)}\n"
            f"{self.name}, operations: {', '.join(self.operations) or 'none'}"
            + self._functions_and_unsupported()
            + (f"\n{self.name} draws random numbers: it needs a key" if self.draws else "")
            + (f"\n{self.name}, values that it reads:" * bool(self.reads) + "".join(map(str, self.reads)))
        )

    def _functions_and_unsupported(self) -> str:
        applied = "".join(f"\n    {function}" for function in self.functions)
        missing = "".join(f"\n    {entry}" for entry in self.unsupported)
        return (f"\n{self.name}, Functions in it:{applied}" if applied else "") + (
            f"\n{self.name}, without a translation:{missing or ' none'}" if self.graph else ""
        )


@public
class AppliedFunction(NamedTuple):
    """A torch Function that traced code applies, with the location of its definition (`file:line`).

    Attributes:
      times: The number of times that it is applied, including inside other Functions.
      rules: Which of "backward" and "jvp" it defines; JAX uses those. Without any it is not differentiable.
    """

    name: str
    location: str
    times: int
    rules: tuple[str, ...]

    def __str__(self) -> str:
        rules = f"by its own {' and '.join(self.rules)}" if self.rules else "not differentiable"
        return f"{self.name} ({self.location}), {self.times} x, {rules}"


def _count_applied_functions(traces: Sequence[TracedForward]) -> list[AppliedFunction]:
    times: Counter[Any] = Counter()
    definitions: dict[Any, Definition] = {}
    pending = list(traces)
    while pending:
        traced = pending.pop(0)
        function = getattr(traced.definition.function, ORIGINAL, traced.definition.function)
        times[function] += 1
        definitions[function] = traced.definition
        pending += traced.functions
    return [_describe_function(function, definitions[function], number) for function, number in times.items()]


def _describe_function(function: Any, definition: Definition, times: int) -> AppliedFunction:
    code = getattr(inspect.unwrap(function.forward), "__code__", None)
    location = f"{code.co_filename}:{code.co_firstlineno}" if code else "location unknown"
    rules = [*["backward"] * (definition.backward is not None), *["jvp"] * definition.has_jvp]
    return AppliedFunction(definition.name, location, times, tuple(rules))


@public
@dataclass(frozen=True, repr=False, eq=False)
class Explanation(Report):
    """An explanation of how torch code is translated for certain arguments. Prints as text; true if it is supported.

    Attributes:
      name: The name of the code.
      parts: `forward` and, if the code has one and forward could be traced, `backward`.
      values_needed: Where Python code reads a concrete value of a tensor, as far as can be seen: tracing went on with
        assumed values. Their `line.callable` is a function that `ops=` can name.
    """

    name: str
    parts: Sequence[ExplainedMethod]
    values_needed: Sequence[Read] = ()

    @property
    def is_supported(self) -> bool:
        """Whether all of the code can run on JAX."""
        return self.passed

    @property
    def failures(self) -> list[ExplainedMethod]:
        """The parts that cannot run on JAX."""
        return [part for part in self.parts if part.error or part.unsupported]

    def to_dict(self) -> dict[str, Any]:
        """Returns the explanation as plain Python values; errors, operations and reads as text."""
        parts = [part.to_dict() for part in self.parts]
        return {"name": self.name, "parts": parts, "values_needed": _texts(self.values_needed), "passed": self.passed}

    def __str__(self) -> str:
        reads = "".join(map(str, self.values_needed))
        needed = [f"concrete values of tensors that Python code reads:{reads}"] if reads else []
        return "\n\n".join([self.name, *map(str, self.parts), *needed])


class Conversion(NamedTuple):
    """The attribute `_jaxfn_conversion` of what `from_torch` returns."""

    original: Any
    call: Callable[..., Any]
    key_name: str
    explain: Callable[[tuple[Any, ...], dict[str, Any]], Explanation]


def _texts(items: Sequence[Any]) -> list[str]:
    return [str(item).strip() for item in items]


def _indent(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
