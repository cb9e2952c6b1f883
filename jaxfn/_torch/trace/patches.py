"""Stand-ins for names of torch's that no mode of torch's sees used, in place while any thread traces.

Names are looked up in modules and classes, which all threads share. So a stand-in asks which trace its own thread is
making, and in a thread that makes none it does what the original does. Threads trace side by side: a name is replaced
when the first of them begins, and put back when the last one ends, and only that is done under a lock.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint

from jaxfn._torch import _compat
from jaxfn._torch.graph.source_lines import is_users, source_line
from jaxfn._torch.trace.applications import apply, apply_taken_before
from jaxfn._torch.trace.composed import cumulative_batch_norm
from jaxfn._torch.trace.hooks import register_hook
from jaxfn._torch.trace.inside import call_replacement
from jaxfn._torch.trace.module_hooks import choosing_hooks, setting_up_inputs, setting_up_outputs
from jaxfn._torch.trace.nodes import GradFn
from jaxfn._torch.trace.silent import detach as mark_detached
from jaxfn._torch.trace.state import current
from jaxfn._torch.values.errors import TranslationError


class _Name(NamedTuple):
    """An attribute, and what makes the stand-in of its value."""

    owner: Any
    name: str
    stand_in: Callable[[Any], Any]


class _Replaced:
    """An attribute that has a stand-in, and how many traces need it."""

    def __init__(self, name: _Name) -> None:
        self._owner, self._attribute, stand_in = name
        self._before = vars(self._owner).get(self._attribute, _MISSING)
        self.num_traces = 0
        setattr(self._owner, self._attribute, stand_in(getattr(self._owner, self._attribute)))

    def put_back(self) -> None:
        """Puts what was there before back."""
        if self._before is _MISSING:
            delattr(self._owner, self._attribute)
        else:
            setattr(self._owner, self._attribute, self._before)


_MISSING = object()
_LOCK = threading.Lock()
_REPLACED: dict[tuple[int, str], _Replaced] = {}
_REFERENCES: dict[int, list[_Name]] = {}  # of Python functions that have a stand-in, by identity


@contextlib.contextmanager
def patched(owner: str, functions: Iterable[Any]) -> Generator[None]:
    """Puts the stand-ins in place.

    Args:
      owner: whose code is traced, for messages.
      functions: Python functions that JAX functions stand for.
    """
    with _LOCK:
        names = [*_NAMES, *(name for function in functions for name in _references(owner, function))]
        for name in names:
            key = id(name.owner), name.name
            replaced = _REPLACED.get(key) or _REPLACED.setdefault(key, _Replaced(name))
            replaced.num_traces += 1
    try:
        yield
    finally:
        with _LOCK:
            for name in names:
                replaced = _REPLACED[id(name.owner), name.name]
                replaced.num_traces -= 1
                if not replaced.num_traces:
                    _REPLACED.pop((id(name.owner), name.name)).put_back()


def _applying(_: Any) -> Any:
    def stand_in(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = current()
        if tracing is None:
            return _compat.apply_below(function)(*args, **kwargs)
        return apply(tracing, function, args, kwargs)

    return classmethod(stand_in)


def _looking_up(_: Any) -> Any:
    return apply_taken_before


def _recomputing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.utils.checkpoint.checkpoint`, which calls the function in autograd's backward once more."""

    @functools.wraps(original)
    def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tracing = current()
        if tracing is None:
            return original(function, *args, **kwargs)
        options = inspect.signature(original).parameters
        with tracing.recorder.recomputing():
            return function(*args, **{name: value for name, value in kwargs.items() if name not in options})

    return checkpoint


def _staying(original: Callable[..., Any]) -> Callable[..., Any]:
    def cuda(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return original(tensor, *args, **kwargs) if current() is None else tensor

    return cuda


def _detaching_in_place(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def detach_(tensor: torch.Tensor) -> torch.Tensor:
        tracing = current()
        if tracing is not None and tracing.recorder.follows_grad_mode:
            return mark_detached(original(tensor))
        if tracing is not None:
            tracing.recorder.stop_gradient(tracing.lower(tensor))
        return original(tensor)

    return detach_


def _detaching_data(original: Any) -> property:
    """`.data`, which is to torch's modes what autograd itself does with what it saves."""

    def data(tensor: torch.Tensor) -> torch.Tensor:
        tracing = current()
        if tracing is None:
            return original.__get__(tensor)
        if tracing.recorder.follows_grad_mode:
            return mark_detached(original.__get__(tensor), by_data=True)
        with tracing.recorder.stopping_gradients():
            return original.__get__(tensor)

    return property(data, original.__set__)


def _as_leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    copy = tensor.clone()
    return copy.requires_grad_() if requires_grad and not copy.requires_grad else copy


def _batch_norm(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        is_moving = module.training and module.track_running_stats and module.num_batches_tracked is not None
        if current() is None or module.momentum is not None or not is_moving:
            return original(module, x)
        return cumulative_batch_norm(module, x)

    return forward


def _detecting_causal(original: Callable[..., bool]) -> Callable[..., bool]:
    """Whether a mask is the causal one: without values it is used as any other, which means the same."""

    def detect(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        tracing = current()
        is_unknown = tracing is not None and is_causal is None and tracing.is_traced(mask)
        return not is_unknown and original(mask, is_causal, size)

    return detect


def _making_leaves(original: Callable[..., Any]) -> Callable[..., Any]:
    """What `torch.autograd.functional` begins with: it detaches what requires no gradient, as arguments say."""

    def making_leaves(inputs: Any, create_graph: bool, need_graph: bool) -> Any:
        tracing = current()
        if tracing is not None and tracing.recorder.follows_grad_mode and create_graph:
            return tuple(_as_leaf(x, need_graph) for x in inputs)
        return original(inputs, create_graph, need_graph)

    return making_leaves


def _grad_fn(original: Any) -> property:
    """`.grad_fn`, whose hooks autograd would call."""

    def grad_fn(tensor: torch.Tensor) -> Any:
        tracing, node = current(), original.__get__(tensor)
        is_followed = tracing is not None and tracing.recorder.follows_grad_mode
        if node is None or tracing is None or not is_followed or tracing.registers_on_nodes:
            return node
        return GradFn(tracing.owner, node)

    return property(grad_fn)


def _registering_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(tensor: torch.Tensor, hook: Any) -> Any:
        tracing = current()
        return original(tensor, hook) if tracing is None else register_hook(tracing, original, tensor, hook)

    return stand_in


def _running_script(original: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled TorchScript, whose own derivatives begin with tensors that it detaches."""

    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = current()
        if tracing is None or tracing.recorder.runs_script:
            return original(script, *args, **kwargs)
        if "aten::detach" in str(script.inlined_graph):
            raise TranslationError(
                f"{tracing.owner} calls {script.name}, TorchScript that detaches a tensor, which cannot be told from "
                f"what TorchScript detaches for itself. Detach in Python, or do not script it{source_line()}"
            )
        tracing.recorder.runs_script = True
        try:
            return original(script, *args, **kwargs)
        finally:
            tracing.recorder.runs_script = False

    return call


def _entering_hooks(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Hooks of saved tensors, which change gradients where they change values; torch's own do not."""

    def enter(hooks: Any) -> Any:
        tracing = current()
        module: str = getattr(hooks.pack_hook, "__module__", "")
        if tracing is not None and tracing.recorder.follows_grad_mode and module.partition(".")[0] != "torch":
            raise TranslationError(
                f"{tracing.owner} runs under saved_tensors_hooks, which torch's autograd calls and JAX does not. "
                f"Use jax.checkpoint with a policy around what is differentiated{source_line()}"
            )
        return original(hooks)

    return enter


def _enabling(original: Callable[[], bool]) -> Callable[[], bool]:
    def is_grad_enabled() -> bool:
        """To the user's code gradients are on in backward, where code asks whether it may be differentiated again."""
        tracing = current()
        asks = tracing is not None and tracing.is_differentiated and is_users(sys._getframe(1).f_code.co_filename)  # pyright: ignore[reportPrivateUsage]
        return asks or original()

    return is_grad_enabled


def _compiling(original: Callable[[], bool]) -> Callable[[], bool]:
    def is_compiling() -> bool:
        """To the user's code this is what it asks: it leaves out checks that need values, which are not there."""
        tracing = current()
        if tracing is None or not is_users(sys._getframe(1).f_code.co_filename):  # pyright: ignore[reportPrivateUsage]
            return original()
        return tracing.ask_whether_compiling()

    return is_compiling


def _seeding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def seeding(*args: Any, **kwargs: Any) -> Any:
        tracing = current()
        if tracing is None:
            return original(*args, **kwargs)
        tracing.recorder.is_seeded = True  # and nothing else: what is drawn afterwards is refused
        name = original.__name__
        return torch.initial_seed() if name == "seed" else torch.default_generator if name == "manual_seed" else None

    return seeding


class _Validating:
    """Whether distributions look at the values of their parameters: not while tracing."""

    def __init__(self, original: bool) -> None:
        self._original = original

    def __get__(self, instance: Any, owner: Any) -> bool:
        return self._original and current() is None


def _standing_for(function: Any) -> Callable[[Any], Any]:
    @functools.wraps(function)
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        tracing = current()
        replacement = None if tracing is None else tracing.replacements.functions.get(function)
        if tracing is None or replacement is None:
            return function(*args, **kwargs)
        return call_replacement(tracing, function, replacement, args, kwargs)

    return lambda _: stand_in


def _static(stand_in: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda original: staticmethod(stand_in(original))


def _references(owner: str, function: Any) -> list[_Name]:
    """Where a Python function is found by name: in modules, and in the class that it was defined in."""
    in_place = [name for name in _REFERENCES.get(id(function), []) if (id(name.owner), name.name) in _REPLACED]
    if in_place:
        return in_place
    owners: list[Any] = list(sys.modules.values())
    scope: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in getattr(function, "__qualname__", "").split(".")[:-1]:
        scope = getattr(scope, part, None)
        owners.append(scope)
    stand_in = _standing_for(function)
    names: list[_Name] = []
    for scope in owners:
        for name, value in list(getattr(scope, "__dict__", {}).items()):
            is_static = type(value) is staticmethod
            if (value.__func__ if is_static else value) is function:
                names.append(_Name(scope, name, _static(stand_in) if is_static else stand_in))
    if not names:
        raise TranslationError(
            f"{owner}: ops= names {function!r}, which is an attribute of no imported module (see sys.modules) or of "
            "its class, so that the calls of it cannot be found"
        )
    _REFERENCES[id(function)] = names
    return names


_NAMES = [
    _Name(_compat.APPLYING_CLASS, "apply", _applying),
    *(_Name(kind, "__call__", _running_script) for kind in _compat.SCRIPT_TYPES),
    _Name(_compat.FunctionalTensor, "cuda", _staying),  # torch's asks the driver first
    _Name(_compat.FunctionalTensor, "detach_", _detaching_in_place),
    _Name(_compat.FunctionalTensor, "data", _detaching_data),
    _Name(torch, "detach_", _detaching_in_place),
    _Name(_compat.FunctionalTensor, "grad_fn", _grad_fn),
    _Name(*_compat.MAKING_LEAVES, _making_leaves),
    _Name(*_compat.BATCH_NORM, _batch_norm),
    _Name(*_compat.DETECTING_CAUSAL, _detecting_causal),
    _Name(_compat.FunctionalTensor, "register_hook", _registering_hook),
    _Name(_compat.BackwardHook, "setup_input_hook", setting_up_inputs),
    _Name(_compat.BackwardHook, "setup_output_hook", setting_up_outputs),
    _Name(*_compat.HOOKS_OF_MODULE, choosing_hooks),
    _Name(torch, "is_grad_enabled", _enabling),
    _Name(torch.autograd.graph.saved_tensors_hooks, "__enter__", _entering_hooks),
    _Name(torch.compiler, "is_compiling", _compiling),
    _Name(torch.utils.checkpoint, "checkpoint", _recomputing),
    _Name(torch.distributions.Distribution, "_validate_args", _Validating),
    *(
        _Name(module, name, _seeding)
        for module in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ),
]
if _compat.HAS_COMPILED_APPLY:
    _NAMES.append(_Name(_compat.FunctionMeta, "__getattribute__", _looking_up))
