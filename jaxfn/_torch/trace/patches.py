"""Patches of torch names that no torch mode intercepts, applied while any thread traces.

Names are looked up in modules and classes, which all threads share. So a patched name checks whether its own thread is
tracing, and calls the original if not. Traces of several threads overlap: a name is patched when the first trace
begins, and restored when the last one ends. Only that happens under a lock.
"""

from __future__ import annotations

import builtins
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
from jaxfn._torch.graph.source_lines import is_user_code, source_line
from jaxfn._torch.trace import tensor_types
from jaxfn._torch.trace.autograd_nodes import GradFn
from jaxfn._torch.trace.detach import mark_detached
from jaxfn._torch.trace.function_apply import apply_in_trace, look_up_attribute
from jaxfn._torch.trace.hooks import check_no_backward_hooks, register_hook
from jaxfn._torch.trace.interception import detach_in_place, read_values, return_tensor
from jaxfn._torch.trace.jax_function_node import call_replacement
from jaxfn._torch.trace.state import ACTIVE, LEAF, TraceState
from jaxfn._torch.values.errors import TranslationError

_MISSING = object()


class _Patch:
    """A patch of an attribute of a module or class: `make_patch` returns the patched value for the original one."""

    def __init__(self, namespace: Any, name: str, make_patch: Callable[[Any], Any]) -> None:
        self.namespace = namespace
        self.name = name
        self._make_patch = make_patch
        self._original, self._patched = _MISSING, None

    def make(self) -> Any:
        """Returns the patched value. It is cached for later traces, until the original value changes."""
        original = getattr(self.namespace, self.name)
        if original is not self._original:
            self._original, self._patched = original, self._make_patch(original)
        return self._patched


_LOCK = threading.Lock()
# The original values and the number of users of patched attributes, by the namespace's identity and the name.
_ORIGINALS: dict[tuple[int, str], Any] = {}
_NUM_USERS = Counter[tuple[int, str]]()
_FUNCTION_PATCHES: dict[int, list[_Patch]] = {}  # Patches of replaced Python functions, by the function's identity.


@contextlib.contextmanager
def patching(name: str, functions: Iterable[Any]) -> Generator[None]:
    """Applies the patches, among them those of the Python functions that JAX functions replace."""
    with _LOCK:
        patches = [*_PATCHES, *(patch for function in functions for patch in _patches_of_function(name, function))]
        for patch in patches:
            key = id(patch.namespace), patch.name
            _NUM_USERS[key] += 1
            if key not in _ORIGINALS:
                _ORIGINALS[key] = vars(patch.namespace).get(patch.name, _MISSING)
                setattr(patch.namespace, patch.name, patch.make())
    try:
        yield
    finally:
        with _LOCK:
            for patch in patches:
                key = id(patch.namespace), patch.name
                _NUM_USERS[key] -= 1
                if _NUM_USERS[key]:
                    continue
                before = _ORIGINALS.pop(key)
                if before is _MISSING:
                    delattr(patch.namespace, patch.name)
                else:
                    setattr(patch.namespace, patch.name, before)


def _dispatching(handler: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that creates a patch, which calls `handler` inside a trace and the original elsewhere.

    `handler` takes the trace, the original, and the arguments.
    """

    def make_patch(original: Any) -> Any:
        @functools.wraps(original)
        def patch(*args: Any, **kwargs: Any) -> Any:
            state = ACTIVE.state
            return original(*args, **kwargs) if state is None else handler(state, original, *args, **kwargs)

        return patch

    return make_patch


def _dispatching_property(handler: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns a function that patches an attribute of tensors; `handler` takes the trace, the getter and the tensor."""
    make_patch = _dispatching(handler)
    return lambda original: property(make_patch(original.__get__), original.__set__)


def _patch_apply(_: Any) -> Any:
    def patch(function: Any, *args: Any, **kwargs: Any) -> Any:
        state = ACTIVE.state
        if state is None:
            return _compat.original_apply(function)(*args, **kwargs)
        return apply_in_trace(state, function, args, kwargs)

    return classmethod(patch)


def _recompute(
    state: TraceState, original: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Implements `torch.utils.checkpoint.checkpoint`: marks what the function records to be recomputed."""
    options = inspect.signature(original).parameters
    with state.recorder.recomputing():
        return function(*args, **{name: value for name, value in kwargs.items() if name not in options})


def _patch_custom_op_autograd(original: Any) -> Any:
    """Returns torch's module as custom operations see it: they use a registered backward for traced arguments."""

    def is_grad_enabled() -> bool:
        return ACTIVE.state is not None or original.is_grad_enabled()

    def requires_grad(*args: Any, **kwargs: Any) -> bool:
        is_traced = ACTIVE.state and any(map(ACTIVE.state.is_traced, torch_tree.tree_leaves((args, kwargs))))
        return is_traced or _compat.any_requires_grad(*args, **kwargs)

    changed = {"is_grad_enabled": is_grad_enabled, "_any_requires_grad": requires_grad}
    return types.SimpleNamespace(**(vars(original) | changed))


def _get_data(state: TraceState, original: Callable[..., torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Implements `.data`, which torch modes cannot distinguish from autograd's own accesses to saved tensors."""
    if state.recorder.follows_grad_mode:
        return mark_detached(original(tensor), by_data=True)
    with state.recorder.stopping_gradients():
        return original(tensor)


def _to_list(state: TraceState, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Implements `tolist()`, which torch would split into reads of single elements."""
    return read_values(state, torch.Tensor.tolist, tensor)


def _make_leaf(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    copy = tensor.clone()
    return copy.requires_grad_() if requires_grad and not copy.requires_grad else copy


def _detect_causal(
    state: TraceState, original: Callable[..., bool], mask: Any, is_causal: bool | None = None, size: int | None = None
) -> bool:
    """Whether a mask is the causal one. A traced mask has no values, and is used as a general mask."""
    is_unknown = is_causal is None and state.is_traced(mask)
    return not is_unknown and original(mask, is_causal, size)


def _preprocess_grad_inputs(
    state: TraceState, original: Callable[..., Any], inputs: Any, create_graph: bool, need_graph: bool
) -> Any:
    """Implements the first step of `torch.autograd.functional`, which detaches inputs that require no gradient."""
    if state.recorder.follows_grad_mode and create_graph:
        return tuple(_make_leaf(x, need_graph) for x in inputs)
    return original(inputs, create_graph, need_graph)


def _get_grad_fn(state: TraceState, original: Callable[..., Any], tensor: torch.Tensor) -> Any:
    """Implements `.grad_fn`; a node that rejects hooks, which torch's autograd would call."""
    node = None if LEAF in vars(tensor) else original(tensor)
    if node is None and _is_called_by_user() and state.recorder.input_index(state.lower(tensor)) is None:
        state.may_require_grad(tensor)
    if node is None or not state.recorder.follows_grad_mode:
        return node
    return GradFn(state.name, node)


def _get_attribute(state: TraceState, original: Callable[..., Any], module: torch.nn.Module, name: str) -> Any:
    if name != "__dict__" or _is_called_by_user():
        state.first_access.setdefault((id(module), name), "read")
    return original(module, name)


def _set_attribute(
    state: TraceState, original: Callable[..., None], module: torch.nn.Module, name: str, value: Any
) -> None:
    state.first_access.setdefault((id(module), name), "set")
    original(module, name, value)


def _run_script(state: TraceState, original: Callable[..., Any], script: Any, /, *args: Any, **kwargs: Any) -> Any:
    return _compat.interpret_script(script, args, kwargs)


def _get_requires_grad(state: TraceState, original: Callable[..., bool], tensor: torch.Tensor) -> bool:
    """Implements `.requires_grad`: `ctx.needs_input_grad` for inputs, else whether there may be a derivative."""
    of_input = state.requires_grad(tensor)
    if of_input is not None:
        return of_input
    return original(tensor) or (_is_called_by_user() and state.may_require_grad(tensor))


def _enter_saved_tensors_hooks(state: TraceState, original: Callable[[Any], Any], hooks: Any) -> Any:
    """Implements `saved_tensors_hooks`. Raises for the user's, which may change gradients; torch's own do not."""
    module: str = getattr(hooks.pack_hook, "__module__", "")
    if state.recorder.follows_grad_mode and module.partition(".")[0] != "torch":
        raise TranslationError(
            f"{state.name} runs under saved_tensors_hooks, which torch's autograd calls and JAX does not. "
            f"Use jax.checkpoint with a policy around the differentiated function{source_line()}"
        )
    return original(hooks)


def _is_called_by_user() -> bool:
    """Whether the user's code (or code without a file) called the patched name whose handler calls this function."""
    frame: Any = sys._getframe(3)  # pyright: ignore[reportPrivateUsage]
    if frame.f_code.co_filename == tensor_types.__file__:  # Its patch of attribute access called the patched property.
        frame = frame.f_back
    filename: str = frame.f_code.co_filename
    return filename.startswith("<") or is_user_code(filename)


def _is_grad_enabled(state: TraceState, original: Callable[[], bool]) -> bool:
    """Implements `torch.is_grad_enabled`: True for user code in backward, which may be differentiated again."""
    if state.is_differentiated and _is_called_by_user():
        state.reads_grad_mode = True
        return True
    return original()


def _is_compiling(state: TraceState, original: Callable[[], bool]) -> bool:
    """Implements `torch.compiler.is_compiling`: usually True for user code, so that it skips data-dependent checks."""
    return state.is_compiling() if _is_called_by_user() else original()


def _seed(state: TraceState, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    state.recorder.is_seeded = True  # Later draws raise.
    name = original.__name__
    return torch.initial_seed() if name == "seed" else torch.default_generator if name == "manual_seed" else None


class _ValidateArgs:
    """The flag that makes distributions check the values of their parameters: False while tracing."""

    def __init__(self, original: bool) -> None:
        self._original = original

    def __get__(self, instance: Any, namespace: Any) -> bool:
        return self._original and ACTIVE.state is None


def _patch_replaced_function(function: Any) -> Callable[[Any], Any]:
    def call(state: TraceState, original: Any, /, *args: Any, **kwargs: Any) -> Any:
        replacement = state.config.replacements.functions.get(function)
        if replacement is None:
            return function(*args, **kwargs)
        return call_replacement(state, function, replacement, args, kwargs)

    patch = _dispatching(call)(function)
    return lambda _: patch


def _patch_staticmethod(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda original: staticmethod(patch(original))


def _patches_of_function(code: str, function: Any) -> list[_Patch]:
    """Returns the patches of all names of a Python function: in modules, and in the class that defines it."""
    active = [
        patch for patch in _FUNCTION_PATCHES.get(id(function), []) if (id(patch.namespace), patch.name) in _ORIGINALS
    ]
    if active:
        return active
    namespaces: list[Any] = list(sys.modules.values())
    scope: Any = sys.modules.get(getattr(function, "__module__", ""))
    for part in getattr(function, "__qualname__", "").split(".")[:-1]:
        scope = getattr(scope, part, None)
        namespaces.append(scope)
    patch = _patch_replaced_function(function)
    patches: list[_Patch] = []
    for scope in namespaces:
        for name, value in list(getattr(scope, "__dict__", {}).items()):
            is_static = type(value) is staticmethod
            if (value.__func__ if is_static else value) is function:
                patches.append(_Patch(scope, name, _patch_staticmethod(patch) if is_static else patch))
    if not patches:
        raise TranslationError(
            f"{code}: ops= names {function!r}, which is not an attribute of an imported module (see sys.modules) or "
            "of its class, so its calls cannot be intercepted"
        )
    _FUNCTION_PATCHES[id(function)] = patches
    return patches


_PATCHES = [
    _Patch(builtins, "type", lambda _: tensor_types.Type),
    _Patch(builtins, "id", tensor_types.patch_id),
    _Patch(_compat.FunctionalTensor, "__getattribute__", tensor_types.patch_getattribute),
    _Patch(_compat.FunctionalTensor, "__hash__", _dispatching(tensor_types.hash_tensor)),
    *(
        _Patch(torch.overrides, name, _dispatching(tensor_types.has_torch_function))
        for name in ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    ),
    _Patch(_compat.APPLY_CLASS, "apply", _patch_apply),
    *(_Patch(kind, "__call__", _dispatching(_run_script)) for kind in _compat.SCRIPT_TYPES),
    _Patch(_compat.FunctionalTensor, "cuda", _dispatching(return_tensor)),  # torch's method initializes CUDA first.
    _Patch(_compat.FunctionalTensor, "tolist", _dispatching(_to_list)),
    _Patch(_compat.FunctionalTensor, "detach_", _dispatching(detach_in_place)),
    _Patch(_compat.FunctionalTensor, "data", _dispatching_property(_get_data)),
    _Patch(torch, "detach_", _dispatching(detach_in_place)),
    _Patch(_compat.FunctionalTensor, "requires_grad", _dispatching_property(_get_requires_grad)),
    _Patch(_compat.FunctionalTensor, "grad_fn", _dispatching_property(_get_grad_fn)),
    _Patch(*_compat.GRAD_PREPROCESS, _dispatching(_preprocess_grad_inputs)),
    _Patch(*_compat.CUSTOM_OP_AUTOGRAD, _patch_custom_op_autograd),
    _Patch(*_compat.CAUSAL_MASK_DETECTION, _dispatching(_detect_causal)),
    _Patch(_compat.FunctionalTensor, "register_hook", _dispatching(register_hook)),
    _Patch(torch.nn.Module, "_get_backward_hooks", _dispatching(check_no_backward_hooks)),
    _Patch(torch.nn.Module, "_get_backward_pre_hooks", _dispatching(check_no_backward_hooks)),
    _Patch(torch.nn.Module, "__getattribute__", _dispatching(_get_attribute)),
    _Patch(torch.nn.Module, "__setattr__", _dispatching(_set_attribute)),
    _Patch(torch, "is_grad_enabled", _dispatching(_is_grad_enabled)),
    _Patch(torch.autograd.graph.saved_tensors_hooks, "__enter__", _dispatching(_enter_saved_tensors_hooks)),
    _Patch(torch.compiler, "is_compiling", _dispatching(_is_compiling)),
    _Patch(torch.utils.checkpoint, "checkpoint", _dispatching(_recompute)),
    _Patch(torch.distributions.Distribution, "_validate_args", _ValidateArgs),
    *(
        _Patch(module, name, _dispatching(_seed))
        for module in (torch, torch.random)
        for name in ("manual_seed", "seed", "set_rng_state")
    ),
]
if _compat.HAS_COMPILED_APPLY:
    _PATCHES.append(_Patch(_compat.FunctionMeta, "__getattribute__", lambda _: look_up_attribute))
