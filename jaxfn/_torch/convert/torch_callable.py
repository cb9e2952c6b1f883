"""A piece of torch code that is no Function, traced as a whole: JAX differentiates what it was translated to."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import torch

from jaxfn._primitives import DeferredError
from jaxfn._torch._compat import without_functions
from jaxfn._torch.convert.definition import TorchCode
from jaxfn._torch.convert.explain import Explanation, Part
from jaxfn._torch.convert.nondifferentiable import nondifferentiable
from jaxfn._torch.convert.traced_code import TensorSpec, TracedCode, get_or_trace
from jaxfn._torch.graph.recorder import AssumedValue
from jaxfn._torch.trace.leaks import checking_leaks
from jaxfn._torch.trace.scope import trace_scope
from jaxfn._torch.trace.state import TraceState
from jaxfn._torch.values.arrays import torch_dtype
from jaxfn._torch.values.errors import DataDependentError, TranslationError
from jaxfn._torch.values.flatten import FlatTensors, flatten_tensors, slots, unflatten_tensors
from jaxfn._torch.values.trace_cache import LRUCache
from jaxfn._tree import as_array, is_array_leaf

# How many traces of one piece of code are kept.
_MAX_TRACES = 256


class TracedCallable(TracedCode):
    """Code, traced for some arguments.

    Args:
      whole: the code.
      arguments: the template of its arguments.
      specs: of the tensors in its slots.
      are_trained: which of those require a gradient, as parameters do.
      tracing: the trace.

    Attributes:
      written: the parameters of a module that it wrote to, and that do not come back.
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
            inputs = [
                state.add_input(*spec, requires_grad=True if is_parameter else None)
                for spec, is_parameter in zip(specs, are_parameters, strict=True)
            ]
            # As torch has it where a function is called: what is computed under `torch.no_grad()` has no derivative.
            state.recorder.follows_grad_mode = True
            with torch.enable_grad():
                given = [*inputs]
                for i in slots(arguments if tracks_all_inputs else arguments[-2:]):  # the last two are no state
                    if (tracks_all_inputs or state.arguments_require_grad) and not are_parameters[i]:
                        given[i] = state.make_argument(inputs[i])
                returned = torch_callable.function(*unflatten_tensors(arguments, given))
            state.recorder.follows_grad_mode = False
            state.check_saved_arguments()
            returned_flat = flatten_tensors(to_pytree(returned))
            values = [state.lower(tensor) for tensor in returned_flat.leaves]
            _check_gradients(state, inputs, returned_flat.leaves, values)
        self.mutated_parameters = state.mutated_parameters
        self.output = returned_flat.template
        self.gradient_error: DeferredError | None = None  # why nothing but parameters can be differentiated by
        hook = state.hook_on_used_output
        self._second_order_error = (
            None if hook is None else DeferredError(TranslationError, _HOOK_ON_USED_OUTPUT.format(code.name, hook))
        )
        self._are_parameters = are_parameters
        super().__init__(code, "forward", state, values)

    def run(self, arrays: Sequence[Any], key: Any) -> Any:
        """Runs the code on JAX arrays."""
        if self.gradient_error is not None or self._second_order_error is not None:
            arrays = [self._with_gradient_errors(x, t) for x, t in zip(arrays, self._are_parameters, strict=True)]
        return unflatten_tensors(self.output, self.run_graph(arrays, key))

    def _with_gradient_errors(self, x: Any, is_parameter: bool) -> Any:
        """An array that raises where a derivative by it would not be torch's."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if self.gradient_error is not None and not is_parameter:
            x = nondifferentiable(self.gradient_error, jnp.asarray(x))
        if self._second_order_error is not None:
            x = _once_differentiable(self._second_order_error, jnp.asarray(x))
        return x


_DATA_MUTATION = (
    "{} writes by `.data` to a tensor that autograd saves where arguments or buffers require a gradient. torch's "
    "gradients take the new values then, and JAX's the old ones, so that only parameters can be differentiated by. "
    "Write before the tensor is used, or to a copy, `tensor.clone()`{}"
)


_HOOK_ON_USED_OUTPUT = (
    "{} registers a hook on a tensor that the derivative of the operation which made it may use, as that of tanh does, "
    "and torch's second derivatives pass the hook there too, which JAX's would not. Register it on a copy, "
    "`y = y.clone()`, or change the gradient in a torch.autograd.Function{}"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once_differentiable(gradient_error: DeferredError, x: jax.Array) -> jax.Array:
    """An array whose gradient cannot be differentiated."""
    return x


def _once_differentiable_fwd(gradient_error: DeferredError, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _once_differentiable_bwd(gradient_error: DeferredError, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (nondifferentiable(gradient_error, gradient),)


_once_differentiable.defvjp(_once_differentiable_fwd, _once_differentiable_bwd)


class TorchCallable:
    """Code that is called with arrays in place of tensors.

    Args:
      code: what it is called, and traced with.
      function: takes the arguments, one after the other.
    """

    def __init__(self, code: TorchCode, function: Callable[..., Any]) -> None:
        self.code = code
        self.function = function
        self.arguments_require_grad = False  # whether autograd is to know of them, as the code asks for that
        self._traces = LRUCache[TracedCallable](_MAX_TRACES)

    def trace(
        self, arguments: tuple[Any, ...], num_parameter_args: int, state: Any
    ) -> tuple[TracedCallable, Sequence[Any]]:
        """The trace for these arguments, and the arrays in them.

        Args:
          arguments: `function`'s, any pytrees of arrays and other values.
          num_trained: in how many of them, the first ones, arrays require a gradient.
          state: what the code's behaviour depends on besides.
        """
        request = self._make_request(arguments, num_parameter_args)
        try:
            traced = get_or_trace(
                self.code.name,
                self._traces,
                (request.arguments.template, tuple(request.are_parameters), state),
                request.specs,
                lambda specs: request._replace(specs=specs)(),
            )
        except DataDependentError as error:
            _, assumed = _trace_with_assumed_values(request)
            if len(assumed) < 2:
                raise
            more = "".join(map(str, assumed[1:]))
            raise DataDependentError(
                f"{error}\nAs far as can be seen it asks for values further on, too:{more}"
            ) from error
        return traced, request.arguments.leaves

    def explain(self, arguments: tuple[Any, ...], num_parameter_args: int = 0) -> Explanation:
        """Explains what becomes of the code for these arguments."""
        name, request = self.code.name, self._make_request(arguments, num_parameter_args)
        try:
            with checking_leaks(name):
                return Explanation(name, [Part("forward", request())])
        except TranslationError as error:
            traced, assumed = _trace_with_assumed_values(request)
            return Explanation(name, [Part("forward", traced, error)], assumed)

    def _make_request(self, arguments: tuple[Any, ...], num_parameter_args: int) -> _TraceRequest:
        flat = flatten_tensors(arguments, is_array_leaf)
        num_parameters = len(flatten_tensors(arguments[:num_parameter_args], is_array_leaf).leaves)
        specs = [TensorSpec(tuple(x.shape), torch_dtype(x.dtype)) for x in map(as_array, flat.leaves)]
        return _TraceRequest(self, flat, specs, [i < num_parameters for i in range(len(specs))])


class _TraceRequest(NamedTuple):
    """The request for a program.

    Attributes:
      sees_all: whether autograd is to know of all inputs, as of parameters.
    """

    torch_callable: TorchCallable
    arguments: FlatTensors
    specs: Sequence[TensorSpec]
    are_parameters: list[bool]
    tracks_all_inputs: bool = False

    def __call__(self, assumed: list[AssumedValue] | None = None) -> TracedCallable:
        """The program.

        Code that asks whether it is being compiled hears that it is, and leaves out what needs values; where it then
        does what cannot be translated (operations of a package's own, in the place of torch's), that it is not.

        Args:
          assumed: to see what else Python code does where it asks for a tensor's value, it is told something, which is
            noted here.
        """
        first = self._attempt(assumed, is_compiling=True)
        if first.is_translated or not first.reads_is_compiling:
            return first.get()
        second = self._attempt(assumed, is_compiling=False)
        return second.get() if second.is_translated or not first.is_informative else first.get()

    def _attempt(self, assumed: list[AssumedValue] | None, *, is_compiling: bool) -> _TraceAttempt:
        code = self.torch_callable.code
        state = TraceState(code.name, code.config, is_compiling=is_compiling)
        state.recorder.assumed = assumed
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
            return self._attempt(assumed, is_compiling=is_compiling)
        line = state.recorder.data_mutation
        if isinstance(result, TracedCallable) and line and not self.tracks_all_inputs:
            for_all = self._replace(tracks_all_inputs=True)._attempt(assumed, is_compiling=is_compiling)
            if not for_all.is_translated:
                result.gradient_error = DeferredError(TranslationError, _DATA_MUTATION.format(code.name, line))
        return _TraceAttempt(result, state.reads_is_compiling)


class _TraceAttempt(NamedTuple):
    """An attempt to make a program.

    Attributes:
      result: the program, or what was raised.
      asks_compiling: whether the code asked whether it is being compiled.
    """

    result: TracedCallable | Exception
    reads_is_compiling: bool

    @property
    def is_translated(self) -> bool:
        """Whether there is a program, which JAX can run."""
        return isinstance(self.result, TracedCallable) and self.result.is_translated

    @property
    def is_informative(self) -> bool:
        """Whether there is a program or a message about what JAX lacks, and no mistake of the code's own."""
        return isinstance(self.result, (TracedCallable, TranslationError))

    def get(self) -> TracedCallable:
        if isinstance(self.result, Exception):
            # A message that names the line needs no frames of torch's and jaxfn's.
            raise self.result.with_traceback(None) if isinstance(self.result, TranslationError) else self.result
        return self.result


def _trace_with_assumed_values(request: _TraceRequest) -> tuple[TracedCallable | None, list[AssumedValue]]:
    """The program of code that asks for values, if it can be made so, and where it asks."""
    assumed: list[AssumedValue] = []
    try:
        with checking_leaks(request.torch_callable.code.name):
            return request(assumed), assumed
    except Exception:  # of any kind: the code was told what is not so
        return None, assumed


def _check_gradients(
    state: TraceState, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Raises where torch's autograd finds a way from an output to a parameter, and the graph shows none."""
    indices = {id(x): i for i, x in enumerate(inputs)}
    with without_functions():
        for output, value in zip(outputs, values, strict=True):
            by_autograd = {indices[id(leaf)] for leaf in _autograd_leaves(output) if id(leaf) in indices}
            if by_autograd and not by_autograd <= state.recorder.differentiable_inputs(value):
                raise TranslationError(
                    f"{state.name} writes to a parameter's memory in a way that autograd does not see (by `.data`, "
                    "or by a detached view of it), and the derivative by that parameter would be lost. Write the new "
                    "value to a tensor of its own"
                )


def _autograd_leaves(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that autograd, going back from one, comes to in the end."""
    if tensor.grad_fn is None:
        return iter([tensor] if tensor.requires_grad else [])
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in seen:
            seen.add(function)
            waiting += [following for following, _ in function.next_functions]
    return (function.variable for function in seen if hasattr(function, "variable"))


def to_pytree(value: Any) -> Any:
    """A value in containers that are pytrees to JAX; of other ones, what they hold, by name."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    kind = type(value)
    if kind in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        if isinstance(value, dict):
            return {name: to_pytree(item) for name, item in cast(dict[Any, Any], value).items()}
        items = map(to_pytree, cast(Sequence[Any], value))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, (tuple, list)):  # torch.return_types among them
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
    return {name: item for name, item in converted.items() if _has_tensors(item)}


def _has_tensors(value: Any) -> bool:
    return bool(flatten_tensors(value).leaves)
