"""torch code traced as `from_torch` traces a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jaxfn._torch.convert.nested import NESTED_APPLY  # noqa: E402
from jaxfn._torch.convert.traced_code import tensor_spec  # noqa: E402
from jaxfn._torch.trace.leaks import checking_leaks  # noqa: E402
from jaxfn._torch.trace.scope import trace_scope  # noqa: E402
from jaxfn._torch.trace.state import Replacements, TraceConfig, TraceState  # noqa: E402
from jaxfn._torch.values.arrays import to_jax  # noqa: E402
from jaxfn._torch.values.flatten import flatten_tensors, unflatten_tensors  # noqa: E402

NAME = "Recorded"


def recorded(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The graph of a function of tensors, which returns what the function returned, with the same structure."""
    for tensor in tensors:
        to_jax(tensor)  # raises where a tensor has no counterpart
    with checking_leaks(NAME):
        return _recorded(function, tensors)


def _recorded(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    state = TraceState(NAME, TraceConfig(Replacements.of({}), NESTED_APPLY))
    with trace_scope(state):
        returned = flatten_tensors(
            function(*(state.add_input(*tensor_spec(tensor)) for tensor in tensors)), torch.is_tensor
        )
        values = [state.lower(tensor) for tensor in returned.leaves]
    graph_module = state.finish(values)
    output = graph_module.graph.output_node()
    output.args = (unflatten_tensors(returned.template, output.args[0]),)
    graph_module.recompile()
    return graph_module
