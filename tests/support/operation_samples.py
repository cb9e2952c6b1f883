"""torch's own sample inputs for its operations, traced as `from_torch` does."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.utils import _pytree as pytree

from jaxfn._torch.convert.nested import NESTED_APPLY  # noqa: E402
from jaxfn._torch.convert.traced_code import tensor_spec  # noqa: E402
from jaxfn._torch.graph.interpreter import TranslatedGraph, operation_name  # noqa: E402
from jaxfn._torch.operations import entry_name  # noqa: E402
from jaxfn._torch.trace.leaks import checking_leaks  # noqa: E402
from jaxfn._torch.trace.scope import trace_scope  # noqa: E402
from jaxfn._torch.trace.state import Replacements, TraceConfig, TraceState  # noqa: E402
from jaxfn._torch.values.arrays import to_jax  # noqa: E402
from jaxfn._torch.values.flatten import flatten_tensors, unflatten_tensors  # noqa: E402
from tests.support.torch_internals import torch_internal  # noqa: E402

_internal: Any = torch_internal("common_methods_invocations")
# Random numbers after a seed that the code sets itself raise, and these set one only to repeat a draw.
_internal.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
# Whenever torch makes samples it searches the whole stack for a `unittest.TestCase`, which took half of the time of
# these tests. Under pytest there is none.
for _module in (torch_internal("common_utils"), torch_internal("opinfo.core")):
    if hasattr(_module, "extract_test_fn"):
        _module.extract_test_fn = lambda: None
op_db = _internal.op_db

# How many of torch's samples are taken for each operation and dtype; "all" for all of them.
_SAMPLES = os.environ.get("JAXFN_SAMPLES", "1")
COUNT = None if _SAMPLES == "all" else int(_SAMPLES)
USUAL_DTYPES = (torch.float32, torch.float64, torch.int64)
OTHER_DTYPES = (torch.int32, torch.bool, torch.complex64, torch.bfloat16)


class Sample(NamedTuple):
    """One call of an operation.

    Attributes:
      label: the dtype and the number of the sample.
      function: the call, of tensors.
      tensors: its arguments.
      process: what torch's own tests do to results that are not unique, such as eigenvectors; or None.
      recorded: the traced call, or None if it cannot be traced.
      missing: the operations in it that have no translation.
      error: what was raised while it was traced, or None.
    """

    label: str
    function: Callable[..., Any]
    tensors: Sequence[Any]
    process: Callable[[Any], Any] | None
    recorded: Any
    missing: Sequence[str]
    error: Exception | None = None

    @property
    def dtype(self) -> str:
        return self.label.partition(" ")[0]

    @property
    def is_translated(self) -> bool:
        """Whether JAX can run it."""
        return self.error is None and not self.missing

    @property
    def entries(self) -> set[str]:
        """The table's entries that the translation uses."""
        nodes = self.recorded.graph.nodes if self.recorded is not None else ()
        names = (operation_name(node.target) for node in nodes if hasattr(node.target, "_schema"))
        return {entry for entry in map(entry_name, names) if entry is not None}


def full_name(op: Any) -> str:
    """An operation's name in `op_db`, unique."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATIONS = {full_name(op): op for op in op_db}


@functools.cache
def samples(name: str, dtypes: Sequence[Any]) -> list[Sample]:
    """An operation's samples in those of the dtypes that it has, traced."""
    return [
        sample(f"{dtype} {number}".removeprefix("torch."), function, tensors, process)
        for dtype, number, function, tensors, process in _calls(name, dtypes)
    ]


@functools.cache
def samples_with_derivative(name: str) -> list[Sample]:
    """Samples of an operation and its derivative, traced."""
    return [
        sample(f"{dtype} {number}".removeprefix("torch."), functools.partial(with_derivative, function), tensors)
        for dtype, number, function, tensors, _ in _calls(name, [torch.float64])
    ]


def _calls(name: str, dtypes: Sequence[Any]) -> Iterator[tuple[Any, int, Callable[..., Any], list[Any], Any]]:
    """The dtype, number, function, tensors and `process` of each of torch's samples."""
    op = OPERATIONS[name]
    for dtype in dtypes:
        if dtype in op.supported_dtypes("cpu"):
            torch.manual_seed(0)
            with quiet():
                for number, input_sample in enumerate(itertools.islice(op.sample_inputs("cpu", dtype), COUNT)):
                    yield dtype, number, *_of_tensors(op, input_sample), input_sample.output_process_fn_grad


def differentiable_sample(name: str, dtype: Any) -> tuple[Sample, list[bool]]:
    """An operation's first sample, and which of its tensors torch differentiates it by."""
    torch.manual_seed(0)
    with quiet():
        input_sample = next(iter(OPERATIONS[name].sample_inputs("cpu", dtype, requires_grad=True)))
        function, tensors = _of_tensors(OPERATIONS[name], input_sample)
        flags = [tensor.requires_grad for tensor in tensors]
        return sample(f"{dtype} 0".removeprefix("torch."), function, [t.detach() for t in tensors]), flags


def _of_tensors(op: Any, input_sample: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A call of torch's as a function of its tensors, and those."""
    leaves, tree = pytree.tree_flatten((input_sample.input, input_sample.args, input_sample.kwargs))
    indices = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return functools.partial(_call, op, leaves, tree, indices), [leaves[i] for i in indices]


def _call(op: Any, leaves: Sequence[Any], tree: Any, indices: Sequence[int], *tensors: Any) -> Any:
    filled = list(leaves)
    for index, tensor in zip(indices, tensors, strict=True):
        filled[index] = tensor
    first, args, kwargs = pytree.tree_unflatten(filled, tree)
    return op.op(first, *args, **kwargs)


def with_derivative(function: Callable[..., Any], *tensors: Any) -> Any:
    """The real outputs of a function, and their derivative for fixed cotangents."""
    indices = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def outputs(*varied: Any) -> Any:
        filled = list(tensors)
        for index, tensor in zip(indices, varied, strict=True):
            filled[index] = tensor
        return tuple(x for x in pytree.tree_leaves(function(*filled)) if torch.is_tensor(x) and x.is_floating_point())

    results, pull = torch.func.vjp(outputs, *(tensors[index] for index in indices))
    return results, pull(tuple(cotangent(result) for result in results))


def cotangent(result: Any) -> Any:
    """Fixed numbers in the shape of a result; where that is traced they are too, so that nothing is computed ahead."""
    numbers = torch.cos(torch.arange(result.numel(), dtype=result.dtype)).reshape(result.shape)
    return numbers + torch.zeros_like(result)


def sample(label: str, function: Callable[..., Any], tensors: Sequence[Any], process: Any = None) -> Sample:
    """A call, traced."""
    try:
        recorded = trace(function, tensors)
        missing = [entry.operation for entry in TranslatedGraph(recorded).unsupported]
    except Exception as error:
        return Sample(label, function, tensors, process, None, [], error)
    return Sample(label, function, tensors, process, recorded, missing)


def trace(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The graph of a function of tensors, which returns what the function returned, with an equal structure."""
    for tensor in tensors:
        to_jax(tensor)  # raises where a tensor has no counterpart
    with quiet(), checking_leaks("Recorded"):
        return _traced(function, tensors)  # whose frame, and the tensors in it, are gone when it is cleaned up


def _traced(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    tracing = TraceState("Recorded", TraceConfig(Replacements.of({}), NESTED_APPLY))
    with trace_scope(tracing):
        outputs = flatten_tensors(
            function(*(tracing.add_input(*tensor_spec(tensor)) for tensor in tensors)), torch.is_tensor
        )
        values = [tracing.lower(tensor) for tensor in outputs.leaves]
    recorded = tracing.finish(values)
    node = recorded.graph.output_node()
    node.args = (unflatten_tensors(outputs.template, node.args[0]),)
    return recorded


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says about operations that cannot be traced, and about deprecated samples."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
