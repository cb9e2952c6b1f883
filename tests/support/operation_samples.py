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

from jaxfn._torch.graph.interpreter import TranslatedGraph, operation_name  # noqa: E402
from jaxfn._torch.operations import entry_name  # noqa: E402
from tests.support.recorded import recorded  # noqa: E402
from tests.support.torch_internals import torch_internal  # noqa: E402

_internal: Any = torch_internal("common_methods_invocations")
# Random numbers after a seed that the code sets itself are refused, and these set one only to draw the same again.
_internal.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
# Whenever torch makes samples it searches the whole stack for a `unittest.TestCase`, which took half of the time of
# these tests. Under pytest there is none.
for _module in (torch_internal("common_utils"), torch_internal("opinfo.core")):
    if hasattr(_module, "extract_test_fn"):
        _module.extract_test_fn = lambda: None
op_db = _internal.op_db

# How many of torch's samples are taken for each operation and dtype; "all" for all of them.
_SAMPLES = os.environ.get("JAXFN_SAMPLES", "1")
ALL_SAMPLES = _SAMPLES == "all"
COUNT = None if ALL_SAMPLES else int(_SAMPLES)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.int32, torch.bool, torch.complex64, torch.bfloat16)


class Sample(NamedTuple):
    """One call of an operation.

    Attributes:
      label: the dtype and the number of the sample.
      function: the call, of tensors.
      tensors: its arguments.
      process: what torch's own tests do to results that are not unique, such as eigenvectors; or None.
      graph_module: the traced call, or None if it cannot be traced.
      missing: the operations in it that have no translation.
      error: what was raised while it was traced, or None.
    """

    label: str
    function: Callable[..., Any]
    tensors: Sequence[Any]
    process: Callable[[Any], Any] | None
    graph_module: Any
    missing: Sequence[str]
    error: Exception | None = None

    @property
    def dtype(self) -> str:
        """The dtype that the sample was made for."""
        return self.label.partition(" ")[0]

    @property
    def is_translated(self) -> bool:
        """Whether JAX can run it."""
        return self.error is None and not self.missing

    @property
    def entries(self) -> set[str]:
        """The table's entries that the translation uses."""
        nodes = self.graph_module.graph.nodes if self.graph_module is not None else ()
        names = (operation_name(node.target) for node in nodes if hasattr(node.target, "_schema"))
        return {entry for entry in map(entry_name, names) if entry is not None}


def full_name(op: Any) -> str:
    """An operation's name in `op_db`, unique."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name


OPERATIONS = {full_name(op): op for op in op_db}


@functools.cache
def samples(name: str, *, backward: bool = False) -> tuple[Sample, ...]:
    """An operation's samples, traced; with `backward`, of the operation and its derivative."""
    op = OPERATIONS[name]
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    return tuple(sample for dtype in dtypes for sample in _samples(op, dtype, backward))


def first_sample(name: str) -> Sequence[Sample]:
    """One sample of an operation, or none."""
    op = OPERATIONS[name]
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    return list(itertools.islice(_samples(op, dtypes[0], False), 1)) if dtypes else []


def _samples(op: Any, dtype: Any, backward: bool) -> Iterator[Sample]:
    if backward and (dtype is not torch.float64 if COUNT == 1 else not dtype.is_floating_point):
        return
    torch.manual_seed(0)
    with quiet():
        for number, given in enumerate(itertools.islice(op.sample_inputs("cpu", dtype), COUNT)):
            function, tensors = _of_tensors(op, given)
            process = given.output_process_fn_grad
            if backward:
                function, process = functools.partial(with_derivative, function), None
            yield sample(f"{dtype} {number}".removeprefix("torch."), function, tensors, process)


def differentiable_sample(name: str, dtype: Any) -> tuple[Sample, list[bool]]:
    """An operation's first sample, and which of its tensors torch differentiates it by."""
    torch.manual_seed(0)
    with quiet():
        given = next(iter(OPERATIONS[name].sample_inputs("cpu", dtype, requires_grad=True)))
        function, tensors = _of_tensors(OPERATIONS[name], given)
        flags = [tensor.requires_grad for tensor in tensors]
        return sample(f"{dtype} 0".removeprefix("torch."), function, [t.detach() for t in tensors]), flags


def _of_tensors(op: Any, given: Any) -> tuple[Callable[..., Any], list[Any]]:
    """A call of torch's as a function of its tensors, and those."""
    leaves, tree = pytree.tree_flatten((given.input, given.args, given.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    return functools.partial(_call, op, leaves, tree, places), [leaves[i] for i in places]


def _call(op: Any, leaves: Sequence[Any], tree: Any, places: Sequence[int], *tensors: Any) -> Any:
    filled = list(leaves)
    for place, tensor in zip(places, tensors, strict=True):
        filled[place] = tensor
    first, args, kwargs = pytree.tree_unflatten(filled, tree)
    return op.op(first, *args, **kwargs)


def with_derivative(function: Callable[..., Any], *tensors: Any) -> Any:
    """The real outputs of a function, and their derivative for fixed cotangents."""
    places = [i for i, tensor in enumerate(tensors) if tensor.is_floating_point()]

    def outputs(*varied: Any) -> Any:
        filled = list(tensors)
        for place, tensor in zip(places, varied, strict=True):
            filled[place] = tensor
        return tuple(x for x in pytree.tree_leaves(function(*filled)) if torch.is_tensor(x) and x.is_floating_point())

    results, pull = torch.func.vjp(outputs, *(tensors[place] for place in places))
    return results, pull(tuple(cotangent(result) for result in results))


def cotangent(result: Any) -> Any:
    """Fixed numbers in the shape of a result; where that is traced they are too, so that nothing is computed ahead."""
    numbers = torch.cos(torch.arange(result.numel(), dtype=result.dtype)).reshape(result.shape)
    return numbers + torch.zeros_like(result)


def sample(label: str, function: Callable[..., Any], tensors: Sequence[Any], process: Any = None) -> Sample:
    """A call, traced."""
    try:
        graph_module = trace(function, tensors)
        missing = [entry.operation for entry in TranslatedGraph(graph_module).unsupported]
    except Exception as error:
        return Sample(label, function, tensors, process, None, [], error)
    return Sample(label, function, tensors, process, graph_module, missing)


def trace(function: Callable[..., Any], tensors: Sequence[Any]) -> Any:
    """The graph of a function of tensors."""
    with quiet():
        return recorded(function, tensors)


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
