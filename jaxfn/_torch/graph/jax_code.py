"""The translation of a graph as JAX code, for reading."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import GraphModule, Node

from jaxfn._torch.graph.interpreter import Unsupported, find_implementation, node_source_line, steps
from jaxfn._torch.graph.targets import OperationMap, key_by_name, operation_name
from jaxfn._torch.values.arrays import jax_dtype

_MODULES = {"jnp": jnp, "jnp.linalg": jnp.linalg, "lax": lax, "jax.nn": jax.nn, "jax.scipy.special": jax.scipy.special}


def format_jax_code(graph_module: GraphModule, ops: OperationMap | None = None) -> str:
    """Formats a graph's translation as Python code: one line for each operation, with torch's name and its type.

    A result whose JAX dtype differs from torch's is cast to the dtype in the comment.

    Args:
      graph_module: The graph from `Recorder.finish`.
      ops: JAX functions that replace torch operations.

    Returns:
      A function `translated` of the placeholders. Names such as `elementwise.add` are in the modules of `operations`.
    """
    replacements = key_by_name(ops)
    names: list[str] = []
    lines: list[str] = []
    for step in steps(graph_module):
        node = step.node
        if node.op == "placeholder":
            names.append(node.name)
        elif node.op == "get_attr":
            lines.append(f"{node.name} = constants[{str(node.target)!r}]{_comment(node, None)}")
        elif node.op == "output":
            lines.append(f"return {_format(step.arguments[0])}")
        else:
            found = find_implementation(node, replacements)
            arguments = [_format(argument) for argument in step.arguments]
            if node.target is operator.getitem:
                lines.append(f"{node.name} = {arguments[0]}[{arguments[1]}]{_comment(node, None)}")
                continue
            arguments += [f"{name}={_format(value)}" for name, value in step.options.items()]
            if isinstance(found, Unsupported):
                call = f"unsupported({', '.join([repr(found.operation), *arguments])})"
            else:
                function, bound = _format_function(found.function)
                call = f"{function}({', '.join(['key'] * found.draws + bound + arguments)})"
            lines.append(f"{node.name} = {call}{_comment(node, operation_name(node.target))}")
    return "\n    ".join((f"def translated({', '.join(names)}):", *lines)) + "\n"


def _format_function(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """Returns a function's name, and the arguments that a `partial` binds."""
    if isinstance(function, partial):
        name, bound = _format_function(function.func)
        return name, bound + [_format(argument) for argument in function.args]
    name = getattr(function, "__name__", None) or repr(function)
    wrapped: list[Any] = [function]  # `promote` wraps functions.
    while (inner := getattr(wrapped[-1], "__wrapped__", None)) is not None:
        wrapped.append(inner)
    for prefix, module in _MODULES.items():
        if getattr(module, name, None) in wrapped:
            return f"{prefix}.{name}", []
    module_name = getattr(function, "__module__", None) or ""
    if module_name.startswith("jaxfn._torch.operations."):
        return f"{module_name.rpartition('.')[2]}.{name}", []
    return name, []


def _format(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if isinstance(value, torch.dtype):
        return f"jnp.{jax_dtype(value).name}"
    if callable(value):
        return _format_function(value)[0]
    if isinstance(value, tuple):
        return f"({', '.join(map(_format, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(_format, value))}]"
    if isinstance(value, slice):
        return f"slice({_format(value.start)}, {_format(value.stop)}, {_format(value.step)})"
    if isinstance(value, float) and not np.isfinite(value):
        return f"float({str(value)!r})"
    return repr(value)


def _comment(node: Node, operation: str | None) -> str:
    """Returns a comment with torch's name of the operation, the result's dtype and shape, and the user's line."""
    recorded = node.meta.get("val")
    results = recorded if isinstance(recorded, (tuple, list)) else [recorded]
    shapes = [
        f"{jax_dtype(result.dtype).name}[{','.join(str(length) for length in result.shape)}]"
        for result in results
        if isinstance(result, torch.Tensor)
    ]
    parts = [part for part in (operation, ", ".join(shapes), node_source_line(node)) if part]
    return f"  # {'; '.join(parts)}" if parts else ""
