"""Python functions and modules of torch, each traced as a whole. JAX differentiates the translation."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import torch

from jaxfn._primitives import DeferredError, guard
from jaxfn._torch._compat import without_functions
from jaxfn._torch.convert.definition import TorchCode, with_key
from jaxfn._torch.convert.explain import Conversion, ExplainedMethod, Explanation
from jaxfn._torch.convert.traced_code import TensorSpec, TracedCode, TraceLookup, requiring_no_change
from jaxfn._torch.graph.reads import NO_VALUES, Answerer, AssumedValues, Read
from jaxfn._torch.trace.leaks import checking_leaks
from jaxfn._torch.trace.scope import trace_scope
from jaxfn._torch.trace.state import TraceConfig, TraceState
from jaxfn._torch.values.arrays import torch_dtype
from jaxfn._torch.values.errors import DataDependentError, TranslationError
from jaxfn._torch.values.flatten import FlatTensors, flatten_tensors, slots, unflatten_tensors
from jaxfn._torch.values.trace_cache import LRUCache, capture_key
from jaxfn._tree import as_array, is_array_leaf

# The number of traces that are cached for one callable.
_MAX_TRACES = 256


class TracedCallable(TracedCode):
    """A torch callable, traced for some arguments.

    Attributes:
      mutated_parameters: The parameters of a module that it mutates. Their new values are not returned.
      gradient_error: The error of a derivative by anything except parameters, if those differ from torch's.
    """

    def __init__(
        self,
        torch_callable: TorchCallable,
        arguments: Any,
        specs: Sequence[TensorSpec],
        are_parameters: Sequence[bool],
        state: TraceState,
        tracks_all_inputs: bool = False,
    ) -> None:
        code = torch_callable.code
        with trace_scope(state):
            requires_grad = [True if is_parameter else None for is_parameter in are_parameters]
            inputs = [state.add_input(*x, requires_grad=r) for x, r in zip(specs, requires_grad, strict=True)]
            # What the code computes under `torch.no_grad()` has no derivative, as in torch.
            state.recorder.follows_grad_mode = True
            with torch.enable_grad():
                tensors = [*inputs]
                # The last two arguments are args and kwargs; a module's parameters and buffers come before them.
                for i in slots(arguments if tracks_all_inputs else arguments[-2:]):
                    if (tracks_all_inputs or state.arguments_require_grad) and not are_parameters[i]:
                        tensors[i] = state.make_argument(inputs[i])
                returned = torch_callable.function(*unflatten_tensors(arguments, tensors, shares_containers=True))
            state.recorder.follows_grad_mode = False
            returned_flat = flatten_tensors(to_pytree(returned))
            values = [state.lower(tensor) for tensor in returned_flat.leaves]
            _check_gradients(state, inputs, returned_flat.leaves, values)
        self.mutated_parameters = state.mutated_parameters
        self.output = returned_flat.template
        self.gradient_error: DeferredError | None = None
        hook = state.hook_on_used_output
        message = _HOOK_ON_USED_OUTPUT.format(code.name, hook)
        self._second_order_error = None if hook is None else DeferredError(TranslationError, message)
        self._are_parameters = are_parameters
        super().__init__(code, "forward", state, values)

    def run(self, arrays: Sequence[Any], key: Any) -> Any:
        """Runs the translation on JAX arrays."""
        if self.gradient_error is not None or self._second_order_error is not None:
            arrays = [self._with_gradient_errors(x, t) for x, t in zip(arrays, self._are_parameters, strict=True)]
        return unflatten_tensors(self.output, self.run_graph(arrays, key))

    def _with_gradient_errors(self, x: Any, is_parameter: bool) -> Any:
        """Returns an input array that raises where a derivative by it would differ from torch's."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if self.gradient_error is not None and not is_parameter:
            (x,) = guard([jnp.asarray(x)], (), self.gradient_error)
        if self._second_order_error is not None:
            x = _once_differentiable(self._second_order_error, jnp.asarray(x))
        return x


_DATA_MUTATION = (
    "{} mutates by `.data` a tensor that autograd saves if arguments or buffers require a gradient. torch would "
    "compute gradients from the new values, and JAX from the old ones, so only parameters can be differentiated. "
    "Mutate the tensor before its first use, or mutate a copy, `tensor.clone()`{}"
)


_HOOK_ON_USED_OUTPUT = (
    "{} registers a hook on the output of an operation whose derivative may use that output, as that of tanh does. "
    "torch's second derivatives pass through the hook there too, and JAX's would not. Register it on a copy, "
    "`y = y.clone()`, or change the gradient in a torch.autograd.Function{}"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once_differentiable(gradient_error: DeferredError, x: jax.Array) -> jax.Array:
    """Returns `x`. Raises if the gradient by it is differentiated."""
    return x


def _once_differentiable_fwd(gradient_error: DeferredError, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _once_differentiable_bwd(gradient_error: DeferredError, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    (gradient,) = guard([gradient], (), gradient_error)
    return (gradient,)


_once_differentiable.defvjp(_once_differentiable_fwd, _once_differentiable_bwd)


class TorchCallable:
    """A function of tensors that is called with arrays.

    Attributes:
      arguments_require_grad: Whether autograd tracks the arguments, since the code reads their `requires_grad`.
    """

    def __init__(self, code: TorchCode, function: Callable[..., Any]) -> None:
        self.code = code
        self.function = function
        self.arguments_require_grad = False
        self._traces = LRUCache[TracedCallable](_MAX_TRACES)

    def trace(
        self, arguments: tuple[Any, ...], num_parameter_args: int, state: Callable[[], Hashable | None]
    ) -> tuple[TracedCallable, Sequence[Any]]:
        """Returns the trace for these arguments, and the arrays in them.

        Args:
          arguments: The arguments of `function`: pytrees of arrays and other values.
          num_parameter_args: The number of arguments, from the first, whose arrays require a gradient.
          state: Returns a key of everything else that the code depends on; `None` if there is none.
        """
        request = self._make_request(arguments, num_parameter_args)
        template = request.arguments.template, tuple(request.are_parameters)

        def trace(specs: Sequence[TensorSpec], answerer: Answerer) -> TracedCallable:
            return request._replace(specs=specs)(answerer)

        try:
            traced = TraceLookup(self.code.name, self._traces, template, request.specs, trace, state=state).get()
        except DataDependentError as error:
            _, reads = _trace_with_assumed_values(request)
            if len(reads) < 2:
                raise
            more = "".join(map(str, reads[1:]))
            raise DataDependentError(
                f"{error}\nAs far as can be seen, the code reads concrete values in more indices:{more}"
            ) from error
        return traced, request.arguments.leaves

    def explain(self, arguments: tuple[Any, ...], num_parameter_args: int = 0) -> Explanation:
        """Explains how the code is translated for these arguments."""
        name, request = self.code.name, self._make_request(arguments, num_parameter_args)
        try:
            with checking_leaks(name):
                return Explanation(name, [ExplainedMethod("forward", request())])
        except TranslationError as error:
            traced, reads = _trace_with_assumed_values(request)
            return Explanation(name, [ExplainedMethod("forward", traced, error)], reads)

    def _make_request(self, arguments: tuple[Any, ...], num_parameter_args: int) -> _TraceRequest:
        flat = flatten_tensors(arguments, is_array_leaf, shares_containers=True)
        num_parameters = len(flatten_tensors(arguments[:num_parameter_args], is_array_leaf).leaves)
        specs = [TensorSpec(tuple(x.shape), torch_dtype(x.dtype)) for x in map(as_array, flat.leaves)]
        return _TraceRequest(self, flat, specs, [i < num_parameters for i in range(len(specs))])


class _TraceRequest(NamedTuple):
    """A request to trace a callable; `tracks_all_inputs` if autograd tracks all inputs like parameters."""

    torch_callable: TorchCallable
    arguments: FlatTensors
    specs: Sequence[TensorSpec]
    are_parameters: list[bool]
    tracks_all_inputs: bool = False

    def __call__(self, answerer: Answerer = NO_VALUES) -> TracedCallable:
        """Traces the callable.

        `torch.compiler.is_compiling()` returns True first, so that the code skips data-dependent checks. If that path
        cannot be translated (it may call a package's own operations in place of torch's), tracing is retried with
        False.

        Args:
          answerer: Answers the reads of values of traced tensors.
        """
        first = self._attempt(answerer, is_compiling=True)
        if first.is_translated or not first.reads_is_compiling:
            return first.get()
        second = self._attempt(answerer, is_compiling=False)
        return second.get() if second.is_translated or not first.is_informative else first.get()

    def _attempt(self, answerer: Answerer, *, is_compiling: bool) -> _TraceAttempt:
        code = self.torch_callable.code
        state = TraceState(code.name, code.config, is_compiling=is_compiling, answerer=answerer)
        state.arguments_require_grad = self.torch_callable.arguments_require_grad
        try:
            with checking_leaks(code.name):
                result = TracedCallable(
                    self.torch_callable,
                    self.arguments.template,
                    self.specs,
                    self.are_parameters,
                    state,
                    self.tracks_all_inputs,
                )
        except Exception as error:
            result = error
        if state.reads_requires_grad and not self.torch_callable.arguments_require_grad:
            self.torch_callable.arguments_require_grad = True
            return self._attempt(answerer, is_compiling=is_compiling)
        line = state.recorder.data_mutation
        if isinstance(result, TracedCallable) and line and not self.tracks_all_inputs:
            for_all = self._replace(tracks_all_inputs=True)._attempt(answerer, is_compiling=is_compiling)
            if not for_all.is_translated:
                result.gradient_error = DeferredError(TranslationError, _DATA_MUTATION.format(code.name, line))
        return _TraceAttempt(result, state.reads_is_compiling)


class _TraceAttempt(NamedTuple):
    """The result of an attempt to trace a callable, and whether the code called `torch.compiler.is_compiling()`."""

    result: TracedCallable | Exception
    reads_is_compiling: bool

    @property
    def is_translated(self) -> bool:
        """Whether the callable was traced, and JAX can run the translation."""
        return isinstance(self.result, TracedCallable) and not self.result.unsupported

    @property
    def is_informative(self) -> bool:
        """Whether the result is a trace or the reason why there is none, and not an error of the code itself."""
        return isinstance(self.result, (TracedCallable, TranslationError))

    def get(self) -> TracedCallable:
        if isinstance(self.result, Exception):
            # The message names the user's line, so the frames of torch and jaxfn are dropped.
            raise self.result.with_traceback(None) if isinstance(self.result, TranslationError) else self.result
        return self.result


def _trace_with_assumed_values(request: _TraceRequest) -> tuple[TracedCallable | None, list[Read]]:
    """Traces code that reads concrete values, with assumed values. Returns the trace, or `None`, and the reads."""
    answerer = AssumedValues()
    try:
        with checking_leaks(request.torch_callable.code.name):
            return request(answerer), answerer.reads
    except Exception:  # Any exception: the code ran with wrong values.
        return None, answerer.reads


def _check_gradients(
    state: TraceState, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Raises if torch's autograd finds a path from an output to a parameter and the graph has none."""
    indices = {id(x): i for i, x in enumerate(inputs)}
    with without_functions():
        for output, value in zip(outputs, values, strict=True):
            by_autograd = {indices[id(leaf)] for leaf in _autograd_leaves(output) if id(leaf) in indices}
            if by_autograd and not by_autograd <= state.recorder.differentiable_inputs(value):
                raise TranslationError(
                    f"{state.name} mutates a parameter in a way that autograd does not see (by `.data`, or by a "
                    "detached view), so the derivative by that parameter would be lost. Write the new value to "
                    "another tensor"
                )


def _autograd_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Returns the leaf tensors that autograd reaches from a tensor."""
    if tensor.grad_fn is None:
        return iter([tensor] if tensor.requires_grad else [])
    seen: set[Any] = set()
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        function = pending.pop()
        if function is not None and function not in seen:
            seen.add(function)
            pending += [following for following, _ in function.next_functions]
    return (function.variable for function in seen if hasattr(function, "variable"))


def to_pytree(value: Any) -> Any:
    """Converts a value to containers that are pytrees to JAX. Other ones become dicts of their tensors by name."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    kind = type(value)
    if kind in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        if isinstance(value, dict):
            return {name: to_pytree(item) for name, item in cast(dict[Any, Any], value).items()}
        items = map(to_pytree, cast(Sequence[Any], value))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, (tuple, list)):  # `torch.return_types`, for example
        return tuple(map(to_pytree, cast(Sequence[Any], value)))
    if isinstance(value, Mapping):
        return _to_dict(cast(Mapping[Any, Any], value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _to_dict({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if not jax.tree_util.all_leaves([value]):
        return jax.tree_util.tree_map(to_pytree, value, is_leaf=lambda leaf: leaf is not value)
    attributes = getattr(value, "__dict__", {})
    return _to_dict(attributes) if attributes and not isinstance(value, (type, torch.nn.Module)) else value


def _to_dict(items: Mapping[Any, Any]) -> dict[Any, Any]:
    converted = {name: to_pytree(item) for name, item in items.items() if item is not None}
    return {name: item for name, item in converted.items() if flatten_tensors(item).leaves}


def convert_callable(function: Callable[..., Any], config: TraceConfig) -> Callable[..., Any]:
    """Converts a Python function of tensors to a function of JAX arrays, with an extra parameter for the random key."""
    plain = function.func if isinstance(function, functools.partial) else function
    name = getattr(plain, "__name__", type(plain).__name__)
    signature = _signature_of(function)
    code = TorchCode(name, config, signature.parameters, name)

    def call_function(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = [*map(str, range(len(args))), *map(repr, kwargs)]
        with requiring_no_change(name, lambda i: f"argument {names[i]}", (*args, *kwargs.values())):
            return function(*args, **kwargs)

    torch_callable = TorchCallable(code, call_function)

    def check_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}{signature}: {error}") from None

    @functools.wraps(plain)
    def converted(*args: Any, **kwargs: Any) -> Any:
        key = kwargs.pop(code.key_name, None)
        check_arguments(args, kwargs)
        traced, arrays = torch_callable.trace((args, kwargs), 0, functools.partial(capture_key, function))
        return traced.run(arrays, key)

    parameters = list(with_key(list(signature.parameters.values()), code.key_name))
    vars(converted)["__signature__"] = signature.replace(parameters=parameters)

    def explain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        kwargs.pop(code.key_name, None)
        check_arguments(args, kwargs)
        return torch_callable.explain((args, kwargs))

    vars(converted)["_jaxfn_conversion"] = Conversion(function, converted, code.key_name, explain)
    return converted


def _signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Returns a function's signature; `(*args, **kwargs)` for a compiled function without one, such as `torch.sin`."""
    try:
        return inspect.signature(function)
    except ValueError:
        kinds = {"args": inspect.Parameter.VAR_POSITIONAL, "kwargs": inspect.Parameter.VAR_KEYWORD}
        return inspect.Signature([inspect.Parameter(name, kind) for name, kind in kinds.items()])
