"""torch code traced as `from_torch` traces a forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jaxfn._torch.adopt.nested import NESTED  # noqa: E402
from jaxfn._torch.adopt.program import spec_of  # noqa: E402
from jaxfn._torch.trace.leftovers import cleaned_up  # noqa: E402
from jaxfn._torch.trace.running import running  # noqa: E402
from jaxfn._torch.trace.state import Replacements, TraceConfig, Tracing  # noqa: E402
from jaxfn._torch.values.arrays import to_jax  # noqa: E402
from jaxfn._torch.values.flat import put_in, take_out  # noqa: E402

OWNER = "Recorded"


def recorded(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The graph of a function of tensors, which returns what the function returned, with the same structure."""
    for tensor in tensors:
        to_jax(tensor)  # raises where a tensor has no counterpart
    with cleaned_up(OWNER):
        return _recorded(function, tensors)


def _recorded(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    tracing = Tracing(OWNER, TraceConfig(Replacements.of({}), NESTED))
    with running(tracing):
        made = take_out(function(*(tracing.input(*spec_of(tensor)) for tensor in tensors)), torch.is_tensor)
        values = [tracing.lower(tensor) for tensor in made.leaves]
    graph_module = tracing.finish(values)
    output = graph_module.graph.output_node()
    output.args = (put_in(made.template, output.args[0]),)
    graph_module.recompile()
    return graph_module
