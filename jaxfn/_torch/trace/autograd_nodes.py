"""Nodes of autograd's graph, as the code sees them."""

from __future__ import annotations

from typing import Any

import torch

from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.values.errors import TranslationError

# The attribute of a tensor that the code registered a hook on.
HOOKED = "jaxfn_is_hooked"


class GradFn:
    """A node of autograd's graph as the code sees it: it can be looked at, and takes no hooks.

    Args:
      owner: whose code it is, for messages.
      node: the node.
    """

    def __init__(self, name: str, node: Any) -> None:
        self._name = name
        self.node = node

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        """The nodes that follow in backward."""
        return tuple((node and GradFn(self._name, node), i) for node, i in self.node.next_functions)

    def register_hook(self, hook: Any) -> Any:
        """Refuses: JAX does not go through this graph."""
        raise TranslationError(
            f"{self._name} registers a hook on a `grad_fn`, {self.node.name()}, which torch's autograd calls and JAX "
            f"does not. Register a hook on the tensor, `tensor.register_hook(hook)`, where it is made{source_line()}"
        )

    register_prehook = register_hook

    def _register_hook_dict(self, tensor: torch.Tensor) -> None:
        """Implements what `tensor.register_hook` calls inside an operation of a library."""
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
    """autograd's own node of a `GradFn`; anything else as it is."""
    return value.node if type(value) is GradFn else value
