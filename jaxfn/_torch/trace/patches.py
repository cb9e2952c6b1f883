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
import types
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils import _pytree as torch_tree

from jaxfn._torch import _compat
from jaxfn._torch.graph.source_lines import is_users, source_line
from jaxfn._torch.trace.applications import apply, apply_taken_before
from jaxfn._torch.trace.inside import call_replacement
from jaxfn._torch.trace.interception import detach_in_place
from jaxfn._torch.trace.module_hooks import refuse_module_hooks
from jaxfn._torch.trace.nodes import GradFn
from jaxfn._torch.trace.silent import detach as mark_detached
from jaxfn._torch.trace.state import LEAF, THREAD, Tracing
from jaxfn._torch.trace.tensor_hooks import register_hook
from jaxfn._torch.values.errors import TranslationError

_MISSING = object()


class _Name:
    """An attribute, and its stand-in.

    Args:
      owner: whose attribute.
      name: what it is called.
      stand_in_of: what makes the stand-in of its value.
    """

    def __init__(self, owner: Any, name: str, stand_in_of: Callable[[Any], Any]) -> None:
        self.owner = owner
        self.name = name
        self._stand_in_of = stand_in_of
        self._original, self._stand_in = _MISSING, None

    def stand_in(self) -> Any:
        """The patch for the value; the same one in the next trace, unless the value has changed."""
        original = getattr(self.owner, self.name)
        if original is not self._original:
            self._original, self._stand_in = original, self._stand_in_of(original)
        return self._stand_in


_LOCK = threading.Lock()
_BEFORE: dict[tuple[int, str], Any] = {}  # what attributes were that have a stand-in, by the owner's identity and name
_NUM_TRACES = Counter[tuple[int, str]]()  # that need it
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
            _NUM_TRACES[key] += 1
            if key not in _BEFORE:
                _BEFORE[key] = vars(name.owner).get(name.name, _MISSING)
                setattr(name.owner, name.name, name.stand_in())
    try:
        yield
    finally:
        with _LOCK:
            for name in names:
                key = id(name.owner), name.name
                _NUM_TRACES[key] -= 1
                if _NUM_TRACES[key]:
                    continue
                before = _BEFORE.pop(key)
                if before is _MISSING:
                    delattr(name.owner, name.name)
                else:
                    setattr(name.owner, name.name, before)


def _answering(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that makes a patch, which calls `answer` inside a trace, and the original elsewhere.

    Args:
      answer: of the trace, the original and the arguments, whose names are torch's, or the user's.
    """

    def stand_in_of(original: Any) -> Any:
        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            tracing = THREAD.tracing
            return original(*args, **kwargs) if tracing is None else answer(tracing, original, *args, **kwargs)

        return stand_in

    return stand_in_of


def _answering_attribute(answer: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that patches an attribute of tensors; `answer` gets the trace, the getter, and the tensor."""
    stand_in_of = _answering(answer)
    return lambda original: property(stand_in_of(original.__get__), original.__set__)


def _applying(_: Any) -> Any:
    def stand_in(function: Any, *args: Any, **kwargs: Any) -> Any:
        tracing = THREAD.tracing
        if tracing is None:
            return _compat.apply_below(function)(*args, **kwargs)
        return apply(tracing, function, args, kwargs)

    return classmethod(stand_in)


def _looking_up(_: Any) -> Any:
    return apply_taken_before


def _recompute(
    tracing: Tracing, original: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """`torch.utils.checkpoint.checkpoint`, which calls the function in autograd's backward once more."""
    options = inspect.signature(original).parameters
    with tracing.recorder.recomputing():
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})


def _autograd_of_operations(original: Any) -> Any:
    """torch's module as custom operations see it, whose registered backward counts wherever an argument is traced."""

    def is_grad_enabled() -> bool:
        return THREAD.tracing is not None or original.is_grad_enabled()

    def requires_grad(*args: Any, **kwargs: Any) -> bool:
        is_traced = THREAD.tracing and any(map(THREAD.tracing.is_traced, torch_tree.tree_leaves((args, kwargs))))
        return is_traced or _compat.any_requires_grad(*args, **kwargs)

    changed = {"is_grad_enabled": is_grad_enabled, "_any_requires_grad": requires_grad}
    return types.SimpleNamespace(**(vars(original) | changed))


def _stay(tracing: Tracing, original: Any, tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
    return tensor


def _data(tracing: Tracing, original: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """`.data`, which is to torch's modes what autograd itself does with what it saves."""
    if tracing.recorder.follows_grad_mode:
        return mark_detached(original(tensor), by_data=True)
    with tracing.recorder.stopping_gradients():
        return original(tensor)


def _as_leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    copy = tensor.clone()
    return copy.requires_grad_() if requires_grad and not copy.requires_grad else copy


def _detect_causal(
    tracing: Tracing, original: Callable[..., bool], mask: Any, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether a mask is the causal one: without values it is used as any other, which means the same."""
    is_unknown = is_causal is None and tracing.is_traced(mask)
    return not is_unknown and original(mask, is_causal, size)


def _make_leaves(
    tracing: Tracing, original: Callable[..., Any], inputs: Any, create_graph: bool, need_graph: bool
) -> Any:
    """Implements the first step of `torch.autograd.functional`, which detaches what requires no gradient."""
    if tracing.recorder.follows_grad_mode and create_graph:
        return tuple(_as_leaf(x, need_graph) for x in inputs)
    return original(inputs, create_graph, need_graph)


def _grad_fn(tracing: Tracing, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """`.grad_fn`, whose hooks autograd would call."""
    node = None if LEAF in vars(tensor) else original(tensor)
    if node is None and _is_users_asking() and tracing.recorder.input_index(tracing.lower(tensor)) is None:
        tracing.may_require_grad(tensor)
    if node is None or not tracing.recorder.follows_grad_mode:
        return node
    return GradFn(tracing.owner, node)


def _attribute(tracing: Tracing, original: Callable[..., Any], module: torch.nn.Module, name: str) -> Any:
    if name != "__dict__" or _is_users_asking():
        tracing.first_access.setdefault((id(module), name), "read")
    return original(module, name)


def _set_attribute(
    tracing: Tracing, original: Callable[..., None], module: torch.nn.Module, name: str, value: Any
) -> None:
    tracing.first_access.setdefault((id(module), name), "set")
    original(module, name, value)


def _run_script(tracing: Tracing, original: Callable[..., Any], script: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _compat.interpret_script(script, args, kwargs)


def _requires_grad(tracing: Tracing, original: Callable[..., bool], tensor: torch.Tensor) -> bool:
    """`.requires_grad`: of an input what `ctx.needs_input_grad` says, of others whether there may be a derivative."""
    of_input = tracing.requires_grad(tensor)
    if of_input is not None:
        return of_input
    return original(tensor) or (_is_users_asking() and tracing.may_require_grad(tensor))


def _enter_hooks(tracing: Tracing, original: Callable[[Any], Any], hooks: Any) -> Any:
    """Hooks of saved tensors, which change gradients where they change values; torch's own do not."""
    module: str = getattr(hooks.pack_hook, "__module__", "")
    if tracing.recorder.follows_grad_mode and module.partition(".")[0] != "torch":
        raise TranslationError(
            f"{tracing.owner} runs under saved_tensors_hooks, which torch's autograd calls and JAX does not. "
            f"Use jax.checkpoint with a policy around what is differentiated{source_line()}"
        )
    return original(hooks)


def _is_users_asking() -> bool:
    """Whether it is the user's code that has called the stand-in whose answer calls this, also code without a file."""
    filename = sys._getframe(3).f_code.co_filename  # pyright: ignore[reportPrivateUsage]
    return filename.startswith("<") or is_users(filename)


def _is_grad_enabled(tracing: Tracing, original: Callable[[], bool]) -> bool:
    """Whether gradients are on; to the user's code they are in backward, which may be differentiated again."""
    return (tracing.is_differentiated and _is_users_asking()) or original()


def _is_compiling(tracing: Tracing, original: Callable[[], bool]) -> bool:
    """Whether torch compiles; to the user's code it does, so that it leaves out checks that need values."""
    return tracing.ask_whether_compiling() if _is_users_asking() else original()


def _seed(tracing: Tracing, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    tracing.recorder.is_seeded = True  # and nothing else: what is drawn afterwards is refused
    name = original.__name__
    return torch.initial_seed() if name == "seed" else torch.default_generator if name == "manual_seed" else None


class _Validating:
    """Whether distributions look at the values of their parameters: not while tracing."""

    def __init__(self, original: bool) -> None:
        self._original = original

    def __get__(self, instance: Any, owner: Any) -> bool:
        return self._original and THREAD.tracing is None


def _standing_for(function: Any) -> Callable[[Any], Any]:
    def call(tracing: Tracing, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        replacement = tracing.config.replacements.functions.get(function)
        if replacement is None:
            return function(*args, **kwargs)
        return call_replacement(tracing, function, replacement, args, kwargs)

    stand_in = _answering(call)(function)
    return lambda _: stand_in


def _static(stand_in: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda original: staticmethod(stand_in(original))


def _references(owner: str, function: Any) -> list[_Name]:
    """Returns the names by which a Python function is found: in modules, and in the class that defines it."""
    in_place = [name for name in _REFERENCES.get(id(function), []) if (id(name.owner), name.name) in _BEFORE]
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
    *(_Name(kind, "__call__", _answering(_run_script)) for kind in _compat.SCRIPT_TYPES),
    _Name(_compat.FunctionalTensor, "cuda", _answering(_stay)),  # torch's asks the driver first
    _Name(_compat.FunctionalTensor, "detach_", _answering(detach_in_place)),
    _Name(_compat.FunctionalTensor, "data", _answering_attribute(_data)),
    _Name(torch, "detach_", _answering(detach_in_place)),
    _Name(_compat.FunctionalTensor, "requires_grad", _answering_attribute(_requires_grad)),
    _Name(_compat.FunctionalTensor, "grad_fn", _answering_attribute(_grad_fn)),
    _Name(*_compat.MAKING_LEAVES, _answering(_make_leaves)),
    _Name(*_compat.AUTOGRAD_OF_OPERATIONS, _autograd_of_operations),
    _Name(*_compat.DETECTING_CAUSAL, _answering(_detect_causal)),
    _Name(_compat.FunctionalTensor, "register_hook", _answering(register_hook)),
    _Name(torch.nn.Module, "_get_backward_hooks", _answering(refuse_module_hooks)),
    _Name(torch.nn.Module, "_get_backward_pre_hooks", _answering(refuse_module_hooks)),
    _Name(torch.nn.Module, "__getattribute__", _answering(_attribute)),
    _Name(torch.nn.Module, "__setattr__", _answering(_set_attribute)),
    _Name(torch, "is_grad_enabled", _answering(_is_grad_enabled)),
    _Name(torch.autograd.graph.saved_tensors_hooks, "__enter__", _answering(_enter_hooks)),
    _Name(torch.compiler, "is_compiling", _answering(_is_compiling)),
    _Name(torch.utils.checkpoint, "checkpoint", _answering(_recompute)),
    _Name(torch.distributions.Distribution, "_validate_args", _Validating),
    *(
        _Name(module, name, _answering(_seed))
        for module in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ),
]
if _compat.HAS_COMPILED_APPLY:
    _NAMES.append(_Name(_compat.FunctionMeta, "__getattribute__", _looking_up))
