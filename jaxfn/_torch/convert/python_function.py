"""`from_torch` of a Python function of tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxfn._torch.convert.definition import TorchCode, with_key
from jaxfn._torch.convert.torch_callable import TorchCallable
from jaxfn._torch.trace.state import TraceConfig
from jaxfn._torch.values.trace_cache import static_key


def convert_callable(function: Callable[..., Any], config: TraceConfig) -> Callable[..., Any]:
    """A Python function of tensors as a function of JAX arrays, with a parameter more for the random key."""
    plain = function.func if isinstance(function, functools.partial) else function
    name = getattr(plain, "__name__", type(plain).__name__)
    signature = _signature(function)
    code = TorchCode(name, config, signature.parameters, name)

    def call_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)

    torch_callable = TorchCallable(code, call_function)

    @functools.wraps(plain)
    def adopted(*args: Any, **kwargs: Any) -> Any:
        key = kwargs.pop(code.key_name, None)
        signature.bind(*args, **kwargs)
        traced, arrays = torch_callable.trace((args, kwargs), 0, _state_key(function))
        return traced.run(arrays, key)

    parameters = list(with_key(list(signature.parameters.values()), code.key_name))
    vars(adopted)["__signature__"] = signature.replace(parameters=parameters)
    return adopted


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """A function's signature; any arguments for compiled ones, such as `torch.sin`, which have none."""
    try:
        return inspect.signature(function)
    except ValueError:
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds.items()])


def _state_key(function: Callable[..., Any]) -> Any:
    """Returns a key of what a function captures; an object that equals nothing else if that may change."""
    try:
        return static_key(function)
    except TypeError:
        return object()
