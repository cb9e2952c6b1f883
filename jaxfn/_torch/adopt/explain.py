"""What `from_torch(F).explain(*args)` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfn._torch.adopt.program import TracedGraph
from jaxfn._torch.graph.code import code
from jaxfn._torch.graph.names import name_of
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
    """

    def __init__(self, name: str, traced: TracedGraph | TranslationError) -> None:
        self.name = name
        self.error = traced if isinstance(traced, TranslationError) else None
        self.graph, self.operations, self.unsupported, self.code, self.draws = "", [], [], "", False
        if isinstance(traced, TracedGraph):
            nodes = traced.graph_module.graph.nodes
            self.graph = str(traced.graph_module.graph).strip()
            self.operations = sorted({name_of(node.target) for node in nodes if node.op == "call_function"})
            self.unsupported = traced.unsupported
            self.code = code(traced.graph_module, traced.code.replacements.operations)
            self.draws = traced.draws

    def __str__(self) -> str:
        if self.error is not None:
            return f"{self.name} cannot be traced:\n{_indented(str(self.error))}"
        missing = "".join(
            f"\n    {entry.operation}, {entry.line or 'line unknown'}{f': {entry.reason}' if entry.reason else ''}"
            for entry in self.unsupported
        )
        return (
            f"{self.name}, as torch traced it:\n{_indented(self.graph)}\n"
            f"{self.name}, operations: {', '.join(self.operations) or 'none'}\n"
            f"{self.name}, without a translation:{missing or ' none'}\n"
            + (f"{self.name} draws random numbers: it needs a key\n" if self.draws else "")
            + f"{self.name}, in JAX:\n{_indented(self.code.strip())}"
        )


class Explanation:
    """What becomes of a torch Function for certain arguments; prints as text.

    Attributes:
      name: the Function's.
      parts: `forward` and, where it has one and forward could be traced, `backward`.
    """

    def __init__(self, name: str, parts: Sequence[Part]) -> None:
        self.name = name
        self.parts = list(parts)

    @property
    def is_supported(self) -> bool:
        """Whether all of it can run on JAX."""
        return not any(part.error or part.unsupported for part in self.parts)

    def __str__(self) -> str:
        return "\n\n".join([self.name, *map(str, self.parts)])

    __repr__ = __str__


def _indented(text: Any) -> str:
    return "\n".join(f"    {line}" for line in str(text).splitlines())
