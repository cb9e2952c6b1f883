"""Shapes and dtypes of operations' results, which torch infers by running an operation on `FakeTensor`s.

Layers of a model repeat operations on equal shapes. What was inferred before in a trace is looked up, which takes a
small part of the time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from jaxfn._torch._compat import FakeTensor, FakeTensorMode, plain_torch


class _Spec(NamedTuple):
    """The metadata of a tensor; the length is that of its storage, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    length: int
    dtype: torch.dtype


class _NoSpecError(Exception):
    """A tensor is more than a `_Spec`, such as a conjugated view or a sparse tensor."""


class ShapeInference:
    """Infers the results of one trace's operations.

    Attributes:
      mode: The mode in which operations run on tensors without values.
    """

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # torch's own cache, whose lookup takes longer
        self._results: dict[Any, Any] = {}

    def make_fake(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns a contiguous tensor without values."""
        with plain_torch():
            return FakeTensor(self.mode, torch.empty(tuple(shape), dtype=dtype, device="meta"), torch.device("cpu"))

    def fake_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor without values that is like another one, in its own storage."""
        with plain_torch():
            return self._make(_spec(tensor))

    def results(self, operation: Any, args: Any, kwargs: Any, infer: Callable[[], Any]) -> Any:
        """Returns the results of an operation: of an equal one that was inferred before, or else `infer()`."""
        with plain_torch():
            key = _key(operation, args, kwargs)
            known = None if key is None else self._results.get(key)
            if known is not None:
                return _map_results(self._make, known)
        results = infer()
        if key is not None:
            with plain_torch(), contextlib.suppress(_NoSpecError):
                self._results[key] = _map_results(_result_spec, results)
        return results

    def _make(self, spec: _Spec) -> torch.Tensor:
        meta = torch.empty(spec.length, dtype=spec.dtype, device="meta")
        return FakeTensor(self.mode, meta.as_strided(spec.shape, spec.strides, spec.offset), torch.device("cpu"))


def _key(operation: Any, args: Any, kwargs: Any) -> Any:
    """Returns a key of everything that the results' specs depend on, or `None`."""
    if operation.namespace != "aten" or operation._schema.is_mutable:  # Other ones may run any code.
        return None
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    settings = torch.get_default_dtype(), torch.is_grad_enabled(), *autocast
    try:
        key = operation, settings, _argument_key(args), _argument_key(kwargs)
        hash(key)
    except (_NoSpecError, TypeError):  # An argument is not hashable.
        return None
    return key


def _argument_key(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _checked_spec(value)
    kind = type(value)
    if isinstance(value, (tuple, list)):
        return kind, *map(_argument_key, cast(Sequence[Any], value))
    if kind is dict:
        return tuple((name, _argument_key(item)) for name, item in value.items() if name != "generator")
    return kind, value  # 1, 1.0 and True are equal.


def _spec(tensor: torch.Tensor) -> _Spec:
    length = tensor.untyped_storage().nbytes() // tensor.element_size()
    return _Spec(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), length, tensor.dtype)


def _checked_spec(tensor: torch.Tensor) -> _Spec:
    device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
    is_plain = tensor.layout is torch.strided and not (tensor.dtype.is_complex or tensor.is_quantized)
    if not is_plain or tensor.is_neg() or device.type != "cpu":
        raise _NoSpecError
    return _spec(tensor)


def _result_spec(result: Any) -> _Spec:
    if not isinstance(result, FakeTensor):
        raise _NoSpecError
    return _checked_spec(result)


def _map_results(function: Callable[[Any], Any], results: Any) -> Any:
    """Applies a function to a tensor, or to those in a tuple or list, where an operation may leave out some."""
    if type(results) in (tuple, list):
        return type(results)(None if result is None else function(result) for result in results)
    return function(results)
