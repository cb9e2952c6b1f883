"""Backward hooks of modules (`register_full_backward_hook`, and its pre-hook): called with the gradients of a module.

# Note: two identities

    y = module(x)       enter: x passes an identity      leave: y passes another one
    backward            2. grad_input is there:          1. grad_output is there: the pre-hooks are called with it
                        the hooks are called with both

torch keeps grad_output in an object from 1 to 2. Here each identity is a Function, and grad_output goes from the one
to the other as a gradient: `enter` returns a *token* for each output, zeros of its shape, which `leave` takes, and to
which its backward gives grad_output as gradient. What the outputs look like is known when the module has returned. So
`enter` is recorded then, in the place where it was called; the nodes that stood for its results are fed by it.

The first token is a number, whose gradient is one: without it the gradient has come to the inputs by another way than
by the outputs, and torch calls no hook.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxfn._torch.trace.silent import attach, is_detached, refuse_writes
from jaxfn._torch.trace.state import Tracing
from jaxfn._torch.trace.tensor_hooks import following
from jaxfn._torch.values.errors import TranslationError

_Gradients = tuple[torch.Tensor | None, ...]

# The attribute of torch's `BackwardHook`, one for each call of a module, that has what is known of that call here.
_CALL = "jaxfn_call"


def set_up_inputs(tracing: Tracing, original: Callable[..., Any], hooks: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """`BackwardHook.setup_input_hook`: the arguments that a module gets."""
    if not _looks_after_gradients(tracing):
        return original(hooks, args)
    given = _set_up_for_autograd(tracing, original, hooks, args)
    call = vars(hooks)[_CALL] = _ModuleCall(tracing, hooks, args)
    return call.entered(args, given)


def set_up_outputs(tracing: Tracing, original: Callable[..., Any], hooks: Any, result: Any) -> Any:
    """`BackwardHook.setup_output_hook`: what a module returns."""
    call: _ModuleCall | None = vars(hooks).pop(_CALL, None)
    if call is None or not _looks_after_gradients(tracing):
        return original(hooks, result)
    outputs = result if isinstance(result, tuple) else (result,)
    given = _set_up_for_autograd(tracing, original, hooks, outputs)
    left = call.left(outputs, given)
    return left if isinstance(result, tuple) else left[0]


def choose_hooks(tracing: Tracing, original: Callable[..., Any], module: Any) -> Any:
    """`Module._get_backward_hooks`: the hooks by kind, of which one is torch's autograd's alone."""
    full, others = original(module)
    if others and _looks_after_gradients(tracing):
        raise TranslationError(
            f"{tracing.owner}: {tracing.part_name(module)} has a backward hook of the old kind, "
            f"{_name(others[0])}, which gets the gradients of the module's last operation alone. JAX has no such "
            "operations. Use register_full_backward_hook (of all modules: register_module_full_backward_hook)"
        )
    return full, others


def _looks_after_gradients(tracing: Tracing) -> bool:
    """Whether the trace does, which is where they are on."""
    return tracing.recorder.follows_grad_mode and torch.is_grad_enabled()


def _set_up_for_autograd(
    tracing: Tracing, original: Callable[..., Any], hooks: Any, values: tuple[Any, ...]
) -> tuple[Any, ...]:
    """What torch makes of a module's inputs or outputs, for autograd that the code calls."""
    tracing.registers_on_nodes = True
    try:
        return original(hooks, values)
    finally:
        tracing.registers_on_nodes = False


class _ModuleCall:
    """One call of a module that has backward hooks.

    Args:
      tracing: the trace.
      hooks: torch's `BackwardHook`.
      args: the module's.
    """

    def __init__(self, tracing: Tracing, hooks: Any, args: tuple[Any, ...]) -> None:
        self._tracing = tracing
        self._calls = _HookCalls(
            hooks.module,
            tuple(hooks.user_hooks),
            tuple(hooks.user_pre_hooks),
            f"{tracing.owner}: the backward hooks of {tracing.part_name(hooks.module)}",
        )
        self._inputs = [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else None for x in args]
        self._places = self._differentiable(args)
        self._copies: list[torch.Tensor] = []
        self._nodes: list[Any] = []

    def _differentiable(self, values: Sequence[Any]) -> list[int]:
        tracing = self._tracing
        return [
            i
            for i, x in enumerate(values)
            if isinstance(x, torch.Tensor) and tracing.is_traced(x) and tracing.recorder.varies(tracing.lower(x))
        ]

    def entered(self, args: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, of which those with a derivative are nodes that `left` feeds."""
        if not self._calls.are_of_inputs:
            self._places = []
        lower, recorder = self._tracing.lower, self._tracing.recorder
        self._copies = [args[i].clone() for i in self._places]
        passed = [recorder.passed(lower(x)) for x in self._copies]
        self._nodes = [recorder.node(x) for x in passed]
        return self._exchanged(args, given, dict(zip(self._places, passed, strict=True)))

    def left(self, outputs: tuple[Any, ...], given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The outputs, after the module has returned."""
        places = self._differentiable(outputs)
        if not places:
            return given
        tracing = self._tracing
        specs = [(tuple(outputs[i].shape), outputs[i].dtype) for i in places]
        tokens: Sequence[torch.Tensor] = ()
        if self._places:
            enter = self._calls.enter(self._inputs, self._places, len(outputs), places, specs)
            with tracing.recorder.recording_before(self._nodes[0], self._calls.owner):
                entered = tracing.nested.apply(tracing, enter, self._copies, {})
                following = self._following(entered, self._copies)
            tracing.recorder.feed(self._nodes, following)
            tokens = entered[len(self._places) :]
        leave = self._calls.leave(len(self._inputs), len(outputs), places)
        given_to = [outputs[i] for i in places]
        left = self._following(tracing.nested.apply(tracing, leave, [*given_to, *tokens], {}), given_to)
        self._copies.clear()
        return self._exchanged(outputs, given, dict(zip(places, left, strict=True)))

    def _following(self, made: Sequence[torch.Tensor], leaders: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [following(self._tracing, x, leader) for x, leader in zip(made, leaders, strict=False)]

    def _exchanged(
        self, values: tuple[Any, ...], given: tuple[Any, ...], passed: dict[int, torch.Tensor]
    ) -> tuple[Any, ...]:
        """`given`, in which the values of some are others."""
        items = list(given)
        for value, item in zip(values, items, strict=True):
            if item is not value and not is_detached(value):
                attach(item)
        for i, x in passed.items():
            if items[i] is values[i]:  # autograd inside does not look at it
                items[i] = values[i].clone()
                refuse_writes(self._tracing.recorder, items[i], _ARE_VIEWS)
            self._tracing.recorder.alias(self._tracing.lower(items[i]), x)
        return tuple(items) if type(values) is tuple else type(values)(*items)


_ARE_VIEWS = "it is an input or an output of a module with backward hooks, where torch makes views"


class _HookCalls:
    """Calls the hooks of one module.

    Args:
      module: that.
      hooks: of its inputs' gradients.
      pre_hooks: of its outputs' gradients.
      owner: whose they are, for messages.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        hooks: Sequence[Callable[..., Any]],
        pre_hooks: Sequence[Callable[..., Any]],
        owner: str,
    ) -> None:
        self.owner = owner
        self.are_of_inputs = bool(hooks)
        self._module = module
        self._hooks = hooks
        self._pre_hooks = pre_hooks

    def enter(
        self,
        inputs: Sequence[tuple[tuple[int, ...], torch.dtype] | None],
        places: Sequence[int],
        num_outputs: int,
        output_places: Sequence[int],
        outputs: Sequence[tuple[tuple[int, ...], torch.dtype]],
    ) -> Any:
        """The identity of the inputs, a Function.

        Args:
          inputs: shape and dtype of the module's, those that are tensors.
          places: which of them it takes.
          num_outputs: how many the module has.
          output_places: of which of them it returns tokens.
          outputs: shape and dtype of those.
        """

        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            tokens = [torch.zeros(shape, dtype=dtype) for shape, dtype in outputs]
            return *_copies(ctx, tensors), torch.zeros((), dtype=torch.float32), *tokens

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> _Gradients:
            own, has_come, of_tokens = gradients[: len(places)], gradients[len(places)], gradients[len(places) + 1 :]
            if has_come is None:
                return own
            given = [None if spec is None else torch.zeros(spec[0], dtype=spec[1]) for spec in inputs]
            for i, gradient in zip(places, own, strict=True):
                given[i] = given[i] if gradient is None else gradient
            before = tuple(given)
            after = self.called(before, _spread(num_outputs, output_places, of_tokens))
            return tuple(_chosen(has_come, after[i], before[i]) for i in places)

        return _function(self._described("backward", self._hooks), forward, backward)

    def leave(self, num_inputs: int, num_outputs: int, places: Sequence[int]) -> Any:
        """The identity of the outputs, a Function; of what else it takes, the first is the number.

        Args:
          num_inputs: how many the module has.
          num_outputs: likewise.
          places: which of its outputs the Function takes.
        """

        def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return _copies(ctx, tensors[: len(places)])

        def backward(ctx: Any, *gradients: torch.Tensor | None) -> _Gradients:
            needed = ctx.needs_input_grad
            replaced = self.pre_called(_spread(num_outputs, places, gradients))
            given = tuple(replaced[i] for i in places)
            if any(needed[len(places) :]):
                return *given, torch.ones((), dtype=torch.float32), *given
            self.called_without_inputs(num_inputs, replaced)
            return *given, *(None for _ in needed[len(places) :])

        return _function(self._described("backward pre", self._pre_hooks), forward, backward)

    def _described(self, kind: str, hooks: Sequence[Callable[..., Any]]) -> str:
        names = ", ".join(map(_name, hooks)) or "none"
        return f"{kind} hooks of {self.owner.rpartition('hooks of ')[2]}: {names}"

    def called(self, grad_inputs: _Gradients, grad_outputs: _Gradients) -> _Gradients:
        """The gradients of all inputs, after the hooks."""
        given = grad_inputs
        for hook in self._hooks:
            returned = hook(self._module, grad_inputs, grad_outputs)
            if returned is not None:
                grad_inputs = _checked(f"{self.owner}: {_name(hook)}", "grad_input", returned, given)
        return grad_inputs

    def pre_called(self, grad_outputs: _Gradients) -> _Gradients:
        """The gradients of all outputs, after the pre-hooks."""
        given = grad_outputs
        for hook in self._pre_hooks:
            returned = hook(self._module, grad_outputs)
            if returned is not None:
                grad_outputs = _checked(f"{self.owner}: {_name(hook)}", "grad_output", returned, given)
        return grad_outputs

    def called_without_inputs(self, num_inputs: int, grad_outputs: _Gradients) -> None:
        """Calls the hooks where no input needs a gradient, so that they may only look."""
        for hook in self._hooks:
            returned = hook(self._module, (None,) * num_inputs, grad_outputs)
            if returned is not None and any(gradient is not None for gradient in returned):
                raise RuntimeError(
                    f"{self.owner}: {_name(hook)} returned gradients, and no input of this call needs one. Return None"
                )


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), body)


def _copies(ctx: Any, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The outputs of an identity, which tells gradients that are None from zeros."""
    ctx.set_materialize_grads(False)
    return tuple(x.clone() for x in tensors)


def _spread(size: int, places: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> _Gradients:
    found = dict(zip(places, gradients, strict=True))
    return tuple(found.get(i) for i in range(size))


def _chosen(has_come: torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor:
    assert b is not None
    return torch.where(has_come > 0, torch.zeros_like(b) if a is None else a, b)


def _checked(who: str, what: str, returned: Any, given: _Gradients) -> _Gradients:
    """What a hook returned in the place of gradients."""
    if not isinstance(returned, (tuple, list)) or len(returned) != len(given):
        kind = "a tensor" if isinstance(returned, torch.Tensor) else f"a {type(returned).__name__}"
        found = f"{len(returned)} of them" if isinstance(returned, (tuple, list)) else kind
        raise RuntimeError(f"{who} returned {found}; expected None or a tuple of {len(given)}, one for each {what}")
    for i, (new, old) in enumerate(zip(returned, given, strict=True)):
        if new is not None and not isinstance(new, torch.Tensor):
            raise TypeError(f"{who} returned a {type(new).__name__} for {what}[{i}]; expected a tensor or None")
        if new is not None and old is not None and (new.shape, new.dtype) != (old.shape, old.dtype):
            raise RuntimeError(
                f"{who} returned a tensor of shape {tuple(new.shape)} and {new.dtype} for {what}[{i}]; expected "
                f"{tuple(old.shape)} and {old.dtype}, which is what it was given"
            )
    return tuple(returned)


def _name(hook: Any) -> str:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return getattr(hook, "__qualname__", type(hook).__qualname__).rpartition("<locals>.")[2]
