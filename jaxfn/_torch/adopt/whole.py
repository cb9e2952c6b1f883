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
from jaxfn._torch.adopt.definition import TorchCode
from jaxfn._torch.adopt.explain import Explanation, Part
from jaxfn._torch.adopt.program import Spec, TracedCode, known_or_made
from jaxfn._torch.adopt.refusing import without_derivative
from jaxfn._torch.graph.recorder import AssumedValue
from jaxfn._torch.trace.leftovers import cleaned_up
from jaxfn._torch.trace.running import running
from jaxfn._torch.trace.state import Tracing
from jaxfn._torch.values.arrays import torch_dtype
from jaxfn._torch.values.errors import NeededValueError, TranslationError
from jaxfn._torch.values.flat import Flat, put_in, slots, take_out
from jaxfn._torch.values.statics import Recent
from jaxfn._tree import as_array, is_array_leaf

# How many traces of one piece of code are kept.
_PROGRAMS_KEPT = 256


class WholeProgram(TracedCode):
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
        whole: Whole,
        arguments: Any,
        specs: Sequence[Spec],
        are_trained: Sequence[bool],
        tracing: Tracing,
        sees_all: bool = False,
    ) -> None:
        code = whole.code
        with running(tracing):
            inputs = [
                tracing.input(*spec, requires_grad=True if is_trained else None)
                for spec, is_trained in zip(specs, are_trained, strict=True)
            ]
            # As torch has it where a function is called: what is computed under `torch.no_grad()` has no derivative.
            tracing.recorder.follows_grad_mode = True
            with torch.enable_grad():
                given = [*inputs]
                for i in slots(arguments if sees_all else arguments[-2:]):  # the last two are no state
                    if (sees_all or tracing.arguments_require_grad) and not are_trained[i]:
                        given[i] = tracing.as_argument(inputs[i])
                returned = whole.function(*put_in(arguments, given))
            tracing.recorder.follows_grad_mode = False
            tracing.refuse_written_afterwards()
            made = take_out(known_to_jax(returned))
            values = [tracing.lower(tensor) for tensor in made.leaves]
            _check_gradients(tracing, inputs, made.leaves, values)
        self.written = tracing.written
        self.output = made.template
        self.refusal: DeferredError | None = None  # why nothing but parameters can be differentiated by
        hook = tracing.hooked_where_used
        self._refusal_of_second = (
            None if hook is None else DeferredError(TranslationError, _HOOKED.format(code.name, hook))
        )
        self._are_trained = are_trained
        super().__init__(code, "forward", tracing, values)

    def run(self, arrays: Sequence[Any], key: Any) -> Any:
        """Runs the code on JAX arrays."""
        if self.refusal is not None or self._refusal_of_second is not None:
            arrays = [self._with_refusals(x, t) for x, t in zip(arrays, self._are_trained, strict=True)]
        return put_in(self.output, self.run_graph(arrays, key))

    def _with_refusals(self, x: Any, is_trained: bool) -> Any:
        """An array that raises where a derivative by it would not be torch's."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        if self.refusal is not None and not is_trained:
            x = without_derivative(self.refusal, jnp.asarray(x))
        if self._refusal_of_second is not None:
            x = _once_differentiable(self._refusal_of_second, jnp.asarray(x))
        return x


_AFTER_USE = (
    "{} writes by `.data` to a tensor that autograd saves where arguments or buffers require a gradient. torch's "
    "gradients take the new values then, and JAX's the old ones, so that only parameters can be differentiated by. "
    "Write before the tensor is used, or to a copy, `tensor.clone()`{}"
)


_HOOKED = (
    "{} registers a hook on a tensor that the derivative of the operation which made it may use, as that of tanh does, "
    "and torch's second derivatives pass the hook there too, which JAX's would not. Register it on a copy, "
    "`y = y.clone()`, or change the gradient in a torch.autograd.Function{}"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _once_differentiable(refusal: DeferredError, x: jax.Array) -> jax.Array:
    """An array whose gradient cannot be differentiated."""
    return x


def _once_differentiable_fwd(refusal: DeferredError, x: jax.Array) -> tuple[jax.Array, None]:
    return x, None


def _once_differentiable_bwd(refusal: DeferredError, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (without_derivative(refusal, gradient),)


_once_differentiable.defvjp(_once_differentiable_fwd, _once_differentiable_bwd)


class Whole:
    """Code that is called with arrays in place of tensors.

    Args:
      code: what it is called, and traced with.
      function: takes the arguments, one after the other.
    """

    def __init__(self, code: TorchCode, function: Callable[..., Any]) -> None:
        self.code = code
        self.function = function
        self.arguments_require_grad = False  # whether autograd is to know of them, as the code asks for that
        self._programs = Recent[WholeProgram](_PROGRAMS_KEPT)

    def traced(self, arguments: tuple[Any, ...], num_trained: int, state: Any) -> tuple[WholeProgram, Sequence[Any]]:
        """The trace for these arguments, and the arrays in them.

        Args:
          arguments: `function`'s, any pytrees of arrays and other values.
          num_trained: in how many of them, the first ones, arrays require a gradient.
          state: what the code's behaviour depends on besides.
        """
        new = self._new_program(arguments, num_trained)
        try:
            program = known_or_made(
                self.code.name,
                self._programs,
                (new.arguments.template, tuple(new.are_trained), state),
                new.specs,
                lambda specs: new._replace(specs=specs)(),
            )
        except NeededValueError as error:
            _, assumed = _assuming(new)
            if len(assumed) < 2:
                raise
            more = "".join(map(str, assumed[1:]))
            raise NeededValueError(
                f"{error}\nAs far as can be seen it asks for values further on, too:{more}"
            ) from error
        return program, new.arguments.leaves

    def explain(self, arguments: tuple[Any, ...], num_trained: int = 0) -> Explanation:
        """Explains what becomes of the code for these arguments."""
        name, new = self.code.name, self._new_program(arguments, num_trained)
        try:
            with cleaned_up(name):
                return Explanation(name, [Part("forward", new())])
        except TranslationError as error:
            program, assumed = _assuming(new)
            return Explanation(name, [Part("forward", program, error)], assumed)

    def _new_program(self, arguments: tuple[Any, ...], num_trained: int) -> _NewProgram:
        flat = take_out(arguments, is_array_leaf)
        trained = len(take_out(arguments[:num_trained], is_array_leaf).leaves)
        specs = [Spec(tuple(x.shape), torch_dtype(x.dtype)) for x in map(as_array, flat.leaves)]
        return _NewProgram(self, flat, specs, [i < trained for i in range(len(specs))])


class _NewProgram(NamedTuple):
    """The request for a program.

    Attributes:
      sees_all: whether autograd is to know of all inputs, as of parameters.
    """

    whole: Whole
    arguments: Flat
    specs: Sequence[Spec]
    are_trained: list[bool]
    sees_all: bool = False

    def __call__(self, assumed: list[AssumedValue] | None = None) -> WholeProgram:
        """The program.

        Code that asks whether it is being compiled hears that it is, and leaves out what needs values; where it then
        does what cannot be translated (operations of a package's own, in the place of torch's), that it is not.

        Args:
          assumed: to see what else Python code does where it asks for a tensor's value, it is told something, which is
            noted here.
        """
        first = self._attempt(assumed, says_compiling=True)
        if first.is_translated or not first.asks_compiling:
            return first.get()
        second = self._attempt(assumed, says_compiling=False)
        return second.get() if second.is_translated or not first.says_why else first.get()

    def _attempt(self, assumed: list[AssumedValue] | None, *, says_compiling: bool) -> _Attempt:
        code = self.whole.code
        tracing = Tracing(code.name, code.config, says_compiling=says_compiling)
        tracing.recorder.assumed = assumed
        tracing.arguments_require_grad = self.whole.arguments_require_grad
        try:
            with cleaned_up(code.name):
                result = WholeProgram(
                    self.whole, self.arguments.template, self.specs, self.are_trained, tracing, self.sees_all
                )
        except Exception as error:
            result = error
        if tracing.asks_requires_grad and not self.whole.arguments_require_grad:
            self.whole.arguments_require_grad = True
            return self._attempt(assumed, says_compiling=says_compiling)
        line = tracing.recorder.writes_data
        if isinstance(result, WholeProgram) and line and not self.sees_all:
            for_all = self._replace(sees_all=True)._attempt(assumed, says_compiling=says_compiling)
            if not for_all.is_translated:
                result.refusal = DeferredError(TranslationError, _AFTER_USE.format(code.name, line))
        return _Attempt(result, tracing.asks_compiling)


class _Attempt(NamedTuple):
    """An attempt to make a program.

    Attributes:
      result: the program, or what was raised.
      asks_compiling: whether the code asked whether it is being compiled.
    """

    result: WholeProgram | Exception
    asks_compiling: bool

    @property
    def is_translated(self) -> bool:
        """Whether there is a program, which JAX can run."""
        return isinstance(self.result, WholeProgram) and self.result.is_translated

    @property
    def says_why(self) -> bool:
        """Whether there is a program or a message about what JAX lacks, and no mistake of the code's own."""
        return isinstance(self.result, (WholeProgram, TranslationError))

    def get(self) -> WholeProgram:
        if isinstance(self.result, Exception):
            # A message that names the line needs no frames of torch's and jaxfn's.
            raise self.result.with_traceback(None) if isinstance(self.result, TranslationError) else self.result
        return self.result


def _assuming(new: _NewProgram) -> tuple[WholeProgram | None, list[AssumedValue]]:
    """The program of code that asks for values, if it can be made so, and where it asks."""
    assumed: list[AssumedValue] = []
    try:
        with cleaned_up(new.whole.code.name):
            return new(assumed), assumed
    except Exception:  # of any kind: the code was told what is not so
        return None, assumed


def _check_gradients(
    tracing: Tracing, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> None:
    """Raises where torch's autograd finds a way from an output to a parameter, and the graph shows none."""
    places = {id(x): i for i, x in enumerate(inputs)}
    with without_functions():
        for output, value in zip(outputs, values, strict=True):
            by_autograd = {places[id(leaf)] for leaf in _leaves_behind(output) if id(leaf) in places}
            if by_autograd and not by_autograd <= tracing.recorder.reaches(value):
                raise TranslationError(
                    f"{tracing.owner} writes to a parameter's memory in a way that autograd does not see (by `.data`, "
                    "or by a detached view of it), and the derivative by that parameter would be lost. Write the new "
                    "value to a tensor of its own"
                )


def _leaves_behind(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
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


def known_to_jax(value: Any) -> Any:
    """A value in containers that are pytrees to JAX; of other ones, what they hold, by name."""
    if isinstance(value, torch.Tensor) or value is None:
        return value
    kind = type(value)
    if kind in (list, tuple, dict) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        if isinstance(value, dict):
            return {name: known_to_jax(item) for name, item in cast(dict[Any, Any], value).items()}
        items = map(known_to_jax, cast(Sequence[Any], value))
        return kind(*items) if hasattr(kind, "_fields") else kind(items)
    if isinstance(value, (tuple, list)):  # torch.return_types among them
        return tuple(map(known_to_jax, cast(Sequence[Any], value)))
    if isinstance(value, Mapping):
        return _named(cast(Mapping[Any, Any], value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _named({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if not jax.tree_util.all_leaves([value]):
        return jax.tree_util.tree_map(known_to_jax, value, is_leaf=lambda leaf: leaf is not value)
    attributes = getattr(value, "__dict__", {})
    return _named(attributes) if attributes and not isinstance(value, (type, torch.nn.Module)) else value


def _named(items: Mapping[Any, Any]) -> dict[Any, Any]:
    converted = {name: known_to_jax(item) for name, item in items.items() if item is not None}
    return {name: item for name, item in converted.items() if _holds_tensors(item)}


def _holds_tensors(value: Any) -> bool:
    return bool(take_out(value).leaves)
