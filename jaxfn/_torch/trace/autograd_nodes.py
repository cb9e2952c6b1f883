"""Nodes of autograd's graph, as traced code sees them."""

from __future__ import annotations

from typing import Any

import torch

from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.values.errors import TranslationError

# The attribute that marks a tensor with a registered hook.
HOOKED = "jaxfn_is_hooked"


class GradFn:
    """A node of autograd's graph as traced code sees it. It can be inspected, and rejects hooks."""

    def __init__(self, name: str, node: Any) -> None:
        self._name = name
        self.node = node

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes that autograd visits next."""
        return tuple((node and GradFn(self._name, node), i) for node, i in self.node.next_functions)

    def register_hook(self, hook: Any) -> Any:
        """Raises, since JAX does not use this graph."""
        raise TranslationError(
            f"{self._name} registers a hook on a `grad_fn`, {self.node.name()}, which torch's autograd calls and JAX "
            f"does not. Register a hook on the tensor, `tensor.register_hook(hook)`, where it is created{source_line()}"
        )

    register_prehook = register_hook

    def _register_hook_dict(self, tensor: torch.Tensor) -> None:
        """Implements what `tensor.register_hook` calls inside a library's operation."""
        if HOOKED not in vars(tensor):
            self.register_hook(None)
        self.node._register_hook_dict(tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)

    def __eq__(self, other: object) -> bool:
        return self.node is unwrap_node(other)

    def __hash__(self) -> int:
        return hash(self.node)


torch.autograd.graph.Node.register(GradFn)  # for `isinstance`


def unwrap_node(value: Any) -> Any:
    """Returns torch's node of a `GradFn`; other values unchanged."""
    return value.node if type(value) is GradFn else value
