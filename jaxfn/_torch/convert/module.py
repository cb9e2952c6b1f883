"""Conversion of a module to a pure function of its parameters, its buffers and its arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import jax
import numpy as np
import torch

from jaxfn._torch._compat import (
    FunctionalTensor,
    accumulation_hooks,
    gradient_hooks,
    plain_torch,
    script_attributes,
    storage_id,
    tensor_dicts,
)
from jaxfn._torch.convert.definition import TorchCode
from jaxfn._torch.convert.explain import Conversion, Explanation
from jaxfn._torch.convert.torch_callable import TorchCallable, TracedCallable
from jaxfn._torch.graph.recorder import ExternalTensors, Recorder, has_nonstandard_strides
from jaxfn._torch.trace.detach import forbid_mutation
from jaxfn._torch.trace.hooks import apply_hook
from jaxfn._torch.trace.leaks import storage_extent
from jaxfn._torch.trace.state import ModuleTensors, OwnTensor, TraceConfig, TraceState, active_trace
from jaxfn._torch.values.arrays import to_jax, to_torch
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.trace_cache import IdentityKey, plain_attributes
from jaxfn._traces import staging_trace

# A module contains other tensors while one thread traces it. Meanwhile no other thread may use it, or a module that
# shares submodules with it.
_LOCK = threading.RLock()

Arrays = dict[str, jax.Array]
_Tensors = dict[str, torch.Tensor]


class ConvertedModule:
    """A torch module on JAX, in the mode (train or eval) that it had when it was converted.

    While a call is traced, once for its shapes, no other thread may use the torch module itself.

    Attributes:
      torch_module: The module itself.
    """

    __module__ = "jaxfn"

    __slots__ = ("__weakref__", "_callable", "_converted_by_mode", "_modes", "_warned", "torch_module")

    torch_module: torch.nn.Module

    def __init__(self, module: torch.nn.Module, config: TraceConfig) -> None:
        name = type(module).__name__
        lazy = [key for key, x in _tensors(module).items() if torch.nn.parameter.is_lazy(x)]
        if lazy:
            raise TranslationError(f"{name}: {', '.join(lazy)} has no shape yet. Call the module once in torch first")
        parameters = inspect.signature(module.forward).parameters
        code = TorchCode(name, config, parameters, "net.apply")
        object.__setattr__(self, "torch_module", module)
        object.__setattr__(self, "_callable", TorchCallable(code, self._call_module))
        object.__setattr__(self, "_modes", _modes(module))
        object.__setattr__(self, "_converted_by_mode", {})
        object.__setattr__(self, "_warned", set())

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a converted module is immutable: cannot set {name}. Use load, or torch_module")

    if not TYPE_CHECKING:  # Type checkers report names that do not exist.

        def __getattr__(self, name: str) -> Any:
            hint = f". Use {_HINTS[name]}" if name in _HINTS else ""
            if not hint and name != "torch_module" and hasattr(self.torch_module, name):
                hint = f"; the torch module has: net.torch_module.{name}"
            raise AttributeError(f"a converted module has no attribute {name!r}{hint}", name=name, obj=self)

    def __repr__(self) -> str:
        mode = "train" if self._modes[""] else "eval"
        return f"<jaxfn module in {mode} mode, converted from {self.torch_module!r}>"

    @property
    def _jaxfn_conversion(self) -> Conversion:
        return Conversion(self.torch_module, self.apply, self._callable.code.key_name, self._explain)

    @property
    def _jaxfn_of_arguments(self) -> Callable[..., Any]:
        """The module as a pure function of the arguments alone, for the checks."""

        def call(*args: Any, **kwargs: Any) -> Any:
            return self.apply(self.parameters, self.buffers, *args, **kwargs)[0]

        call.__name__ = call.__qualname__ = self._callable.code.name
        return call

    @property
    def parameters(self) -> Arrays:
        """The tensors that require a gradient, as new JAX arrays by their names in `state_dict`; a tied one once."""
        with _LOCK:
            return {name: to_jax(x) for name, x in self.torch_module.named_parameters() if x.requires_grad}

    @property
    def buffers(self) -> Arrays:
        """The buffers, and the parameters that require no gradient, as new JAX arrays by name."""
        with _LOCK:
            trainable = [name for name, x in self.torch_module.named_parameters() if x.requires_grad]
            return {name: to_jax(x) for name, x in _tensors(self.torch_module).items() if name not in trainable}

    def as_train(self) -> ConvertedModule:
        """Returns the module in train mode, around the same torch module, whose own mode does not change.

        Raises:
          TranslationError: A submodule overrides `train`, and changes more than modes.

        Torch counterpart: `Module.train`, which changes the module itself.
        """
        return self._in_mode(True)

    def as_eval(self) -> ConvertedModule:
        """Returns the module in eval mode; see `as_train`."""
        return self._in_mode(False)

    def _in_mode(self, is_training: bool) -> ConvertedModule:
        with _LOCK:
            if is_training not in self._converted_by_mode:
                net = ConvertedModule(self.torch_module, self._callable.code.config)
                object.__setattr__(net, "_modes", net._modes_after_train(is_training))
                object.__setattr__(net, "_converted_by_mode", self._converted_by_mode)
                self._converted_by_mode[is_training] = net
            return self._converted_by_mode[is_training]

    def apply(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Any, Arrays]:
        """Calls the module as a pure function.

        Args:
          parameters: Arrays by name, as in the attribute `parameters`.
          buffers: Arrays by name, as in the attribute `buffers`. Each name must be in exactly one of the two dicts.
          *args: Arguments of the module's `forward`, with arrays in place of tensors.
          **kwargs: Keyword arguments of `forward`, and `key`: a JAX random key, if the module draws random numbers.
            (`jax_key`, if `forward` itself has a parameter `key`.)

        Returns:
          The output, and the buffers after the call. Containers of output tensors that JAX knows (tuples, lists, dicts)
          stay. Any other object becomes a dict of its tensors, by name.

        Raises:
          TypeError: A parameter or buffer is missing, has another shape, or does not exist in the module.
          TranslationError: The code cannot run on JAX unchanged. The message names the operation or the line.

        Torch counterpart: `torch.func.functional_call`, which does not return the buffers.
        """
        traced, arrays, key = self._trace_call(parameters, buffers, args, kwargs)
        _check_parameters_unchanged(self._callable.code.name, traced.mutated_parameters)
        output, new_buffers = traced.run(arrays, key)
        return output, {**dict(buffers), **new_buffers}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the output for the parameters and buffers that the torch module has now.

        Raises:
          TypeError: JAX is tracing a program that it keeps (in `jit`, `scan`, `checkpoint`). Call `apply` there.
        """
        if staging_trace() is not None:
            raise TypeError(
                f"{self._callable.code.name}: called inside jax.jit, scan or checkpoint, a converted module would make "
                "its parameters constants, which are out of date after net.load. Call net.apply(parameters, buffers, "
                "...), and pass both as arguments: jax.jit(net.apply)(net.parameters, net.buffers, ...)"
            )
        traced, arrays, key = self._trace_call(self.parameters, self.buffers, args, kwargs)
        return traced.run(arrays, key)[0]

    def _trace_call(
        self, parameters: Mapping[str, Any], buffers: Mapping[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[TracedCallable, Sequence[Any], Any]:
        """Returns the trace of a call, the arrays in its arguments, and the random key."""
        key = kwargs.pop(self._callable.code.key_name, None)
        # Sorted by name, as JAX flattens dicts, so that calls inside and outside `jax.jit` share a trace.
        with _LOCK:
            self._check_mode()
            self._check(parameters, buffers)
            arguments = (dict(sorted(parameters.items())), dict(sorted(buffers.items())), args, kwargs)
            traced, arrays = self._callable.trace(arguments, 1, functools.partial(_state_key, self.torch_module))
        return traced, arrays, key

    def load(self, parameters: Mapping[str, Any], buffers: Mapping[str, Any] | None = None) -> None:
        """Writes arrays into the torch module's parameters and buffers. Other parameters and buffers do not change.

        Args:
          parameters: Arrays by name.
          buffers: Arrays by name. Default: none.

        Raises:
          TypeError: A name does not exist in the module, or an array has another shape.

        Torch counterpart: `Module.load_state_dict`.
        """
        arrays = {**parameters, **(buffers or {})}
        with _LOCK, torch.no_grad():
            tensors = _tensors(self.torch_module)
            self._check_known(arrays, tensors)
            for name, array in arrays.items():
                if _is_materialized_later(tensors[name], array):
                    tensors[name].data = tensors[name].new_empty(array.shape)
                tensors[name].copy_(to_torch(array))

    def _explain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Explanation:
        kwargs.pop(self._callable.code.key_name, None)
        with _LOCK:
            self._check_mode()
            return self._callable.explain((self.parameters, self.buffers, args, kwargs), 1)

    def _call_module(self, parameters: _Tensors, buffers: _Tensors, args: Any, kwargs: Any) -> tuple[Any, _Tensors]:
        """Calls the module with these tensors; also returns its buffers afterwards."""
        module, state = self.torch_module, active_trace()
        _check_hooks(module)
        tensors, own_tensors = {**parameters, **buffers}, _tensors(module)
        for name, own in own_tensors.items():
            for hook in reversed(gradient_hooks(own)):  # torch calls the one registered last first.
                tensors[name] = apply_hook(state, tensors[name], hook)
        for name, own in own_tensors.items():
            _check_subclass(self._callable.code.name, name, type(own))
            OwnTensor(own).represent_by(tensors[name])
        with plain_torch():
            strided = [name for name, own in own_tensors.items() if has_nonstandard_strides(own)]
            names = {storage_id(own): name for name, own in own_tensors.items() if storage_id(own) is not None}
        for name in strided:
            state.recorder.record_strides(state.lower(tensors[name]), repr(name))
        gradient_source = f"a gradient, whose strides may come from {strided[0]!r}," if strided else None
        state.recorder.externals = ExternalTensors(
            names, gradient_strides_source=gradient_source, backward_guard=self._backward_guard
        )
        _forbid_aliased_mutations(state.recorder, tensors, own_tensors)
        state.module_names = {id(part): name for name, part in _parts(module).items()}
        state.module_tensors = ModuleTensors(tensors, self._reparametrize_locked)
        parameter_nodes = {name: state.recorder.node(state.lower(tensors[name])) for name in parameters}
        with self._reparametrize(tensors):
            before = _attribute_keys(module)
            output = module(*args, **kwargs)
            state.check_attributes()
            self._check_state(state, before)
            state.mutated_parameters = [
                name
                for name, node in parameter_nodes.items()
                if not _is_unchanged(state, _current_tensor(module, name), node)
            ]
            for who, name, node in state.backward_reads:
                if not _is_unchanged(state, _current_tensor(module, name), node):
                    raise TranslationError(
                        f"{who} reads {name} of the module, which forward mutates afterwards. torch reads the new "
                        "value, and JAX the old one. Mutate it before the call, or save the value that backward needs"
                    )
            return output, {name: _current_tensor(module, name) for name in buffers}

    def _check_state(self, state: TraceState, before: Mapping[str, Any]) -> None:
        """Raises if forward reads a tensor attribute and then replaces it; warns if it changes others.

        An attribute that forward sets before it reads it only passes a value on inside the call, and is not state.
        """
        code, values, recorder = self._callable.code.name, _state_by_name(self.torch_module), state.recorder
        constants = {_TensorKey(id(x), has_nonstandard_strides(x)): x for x in recorder.constants.values()}
        parts = {id(part): part for part in _parts(self.torch_module).values()}
        passed_on = {
            f"the attribute {name} of {state.describe_module(parts[key])}"
            for (key, name), access in state.first_access.items()
            if access == "set" and key in parts and (key, "__dict__") not in state.first_access
        }
        lost_attributes: list[str] = []
        for name, old in _changes(self.torch_module, before).items():
            if name in passed_on:
                continue
            new, keys = values.get(name), jax.tree_util.tree_leaves(old, is_leaf=lambda x: isinstance(x, _TensorKey))
            is_constant = isinstance(new, torch.Tensor) and not state.is_traced(new)
            read = [constants[key] for key in keys if key in constants]
            if is_constant and read:
                with plain_torch():  # `x = x.to(device)` replaces a tensor by an equal one.
                    read = [x for x in read if not torch.equal(x, state.lower(new))]
            if read:
                raise TranslationError(
                    f"{code} reads {name} in forward, and then replaces it. torch uses the new tensor in the next "
                    "call; on JAX every call would start with the old one. Register it in __init__ by "
                    "`self.register_buffer(name, tensor)`, so that net.apply returns it among the buffers"
                )
            if name.startswith("the attribute") and name not in self._warned:
                is_lost = recorder.reads_external_values if isinstance(old, _TensorKey) else not is_constant
                lost_attributes += [name] if is_lost else []
        if lost_attributes:
            self._warned.update(lost_attributes)
            warnings.warn(
                f"{code} changes {', '.join(lost_attributes)} in forward. On JAX the change is lost: every call "
                "starts with the torch module's attributes. Use a buffer (`self.register_buffer(name, tensor)`) for "
                "state that lasts: net.apply returns it",
                stacklevel=2,
            )

    def _modes_after_train(self, mode: bool) -> dict[str, bool]:
        """Returns the modes of the submodules after `train(mode)`, which runs while the module holds meta tensors."""
        module = self.torch_module
        with self._reparametrize({name: x.detach().to("meta") for name, x in _tensors(module).items()}):
            before = _attribute_keys(module)
            module.train(mode)
            changed = [name for name in _changes(module, before) if not name.startswith("the attribute training of")]
            if changed:
                raise TranslationError(
                    f"{self._callable.code.name}.train({mode}) changes {', '.join(changed)}, and not only the mode. "
                    "Call it in torch, and convert the module again by `from_torch(module)`"
                )
            return _modes(module)

    @contextlib.contextmanager
    def _reparametrize(self, tensors: Mapping[str, torch.Tensor]) -> Generator[None]:
        """Replaces the module's tensors by others, and sets its mode; restores all attributes."""
        own = _tensors(self.torch_module)
        replaced = {id(own[name]): tensor for name, tensor in tensors.items()}
        parts = _parts(self.torch_module)
        before = [(part, _copy_attributes(vars(part)), script_attributes(part)) for part in parts.values()]
        try:
            for path, part in parts.items():
                for tensors_by_name in tensor_dicts(part):
                    for name, tensor in tensors_by_name.items():
                        if id(tensor) in replaced:
                            tensors_by_name[name] = replaced[id(tensor)]
                part.training = self._modes.get(path, part.training)
            for _, attributes, _ in before:
                _replace_tensors(attributes, replaced)
            yield
        finally:
            for part, attributes, script in before:
                _restore(vars(part), attributes)
                for name, value in script.items():
                    setattr(part, name, value)

    @contextlib.contextmanager
    def _reparametrize_locked(self, tensors: Mapping[str, torch.Tensor]) -> Generator[None]:
        """Enters `_reparametrize`, in one thread at a time."""
        with _LOCK, self._reparametrize(tensors):
            yield

    @contextlib.contextmanager
    def _backward_guard(self, who: str) -> Generator[None]:
        """Raises if the code inside changes an attribute of the module or stores a `.grad`; restores the module."""
        module, state = self.torch_module, active_trace()
        # A lifted Function itself collects the `.grad` of the module's tensors.
        tensors = [(name, x) for name, x in _tensors(module).items() if x.is_leaf and state.module_tensors is None]
        gradients = [x.grad for _, x in tensors]
        with self._reparametrize_locked({}):
            before = _attribute_keys(module)
            yield
            written = [*_changes(module, before)]
        for (name, x), gradient in zip(tensors, gradients, strict=True):
            if x.grad is not None and x.grad is not gradient:
                x.grad = gradient
                written.append(f"the .grad of {name}")
        if written:
            raise TranslationError(
                f"{who} mutates {', '.join(written)}. On JAX the change would be lost: backward is traced once, and "
                "net.apply has already returned. Mutate it in forward, or use the gradients that jax.grad returns"
            )

    def _check_mode(self) -> None:
        """Raises if the torch module's mode has changed since it was converted."""
        if self in self._converted_by_mode.values():
            return
        for path, is_training in _modes(self.torch_module).items():
            converted_mode = self._modes.get(path, is_training)
            if converted_mode != is_training:
                was, now = (("eval", "train")[mode] for mode in (converted_mode, is_training))
                raise TranslationError(
                    f"{self._callable.code.name}: {path or 'the module'} was in {was} mode when it was converted, and "
                    f"is in {now} mode now. Calls that are already compiled would not see that. Use net.as_{now}() "
                    "for the module in that mode, which shares the parameters, or convert it again"
                )

    def _check(self, parameters: Mapping[str, Any], buffers: Mapping[str, Any]) -> None:
        tensors = _tensors(self.torch_module)
        name = self._callable.code.name
        if not (hasattr(parameters, "keys") and hasattr(buffers, "keys")):
            types_passed = f"{type(parameters).__name__} and {type(buffers).__name__}"
            raise TypeError(
                f"{name}: expected two dicts and the arguments of forward, output, buffers = "
                f"net.apply(net.parameters, net.buffers, ...), got {types_passed}"
            )
        missing = [key for key in tensors if key not in parameters and key not in buffers]
        if missing:
            raise TypeError(
                f"{name}: missing arrays for the parameters or buffers {', '.join(missing)}. Call "
                "net.apply(net.parameters, net.buffers, ...)"
            )
        twice = [key for key in parameters if key in buffers]
        if twice:
            raise TypeError(f"{name}: {', '.join(twice)} is in both the parameters and the buffers. Pass a name once")
        self._check_known({**parameters, **buffers}, tensors)

    def _check_known(self, arrays: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
        name = self._callable.code.name
        unknown = [key for key in arrays if key not in tensors]
        if unknown:
            raise TypeError(f"{name} has no parameter or buffer {', '.join(map(repr, unknown))}: it has {[*tensors]}")
        for key, array in arrays.items():
            if tuple(array.shape) != tuple(tensors[key].shape) and not _is_materialized_later(tensors[key], array):
                raise TypeError(
                    f"{name}: expected an array of shape {tuple(tensors[key].shape)} for {key}, got shape "
                    f"{tuple(array.shape)}"
                )


# What to use in place of attributes of `torch.nn.Module`, and of one that flax has.
_HINTS = dict.fromkeys(("train", "eval"), "net.as_train() and net.as_eval(), which return the module in that mode") | {
    **dict.fromkeys(
        ("state_dict", "named_parameters", "named_buffers", "params"), "the dicts net.parameters and net.buffers"
    ),
    **dict.fromkeys(("to", "cuda", "cpu", "double", "half"), "jax.device_put, or a cast, of what net.apply takes"),
    "explain": "jaxfn.explain(net, *args)",
    "load_state_dict": "net.load(parameters, buffers)",
    "forward": "net.apply(parameters, buffers, ...)",
    "zero_grad": "jax.grad of a function that calls net.apply, which returns new gradients",
}


def _tensors(module: torch.nn.Module) -> _Tensors:
    """Returns a module's parameters and buffers by name; a tied one once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _current_tensor(module: torch.nn.Module, name: str) -> Any:
    """Returns the current tensor of a parameter or buffer."""
    path, _, own_name = name.rpartition(".")
    part = functools.reduce(getattr, path.split("."), module) if path else module  # TorchScript has no get_submodule
    return next((x for tensors in tensor_dicts(part) for key, x in tensors.items() if key == own_name), None)


def _is_unchanged(state: TraceState, value: Any, node: torch.fx.Node) -> bool:
    """Whether a parameter's value at the end of the call equals its value at the start, as far as the graph shows."""
    if not isinstance(value, torch.Tensor):
        return False
    return state.recorder.has_same_values(state.recorder.node(state.lower(value)), node)


def _check_parameters_unchanged(code: str, mutated: Sequence[str]) -> None:
    if mutated:
        names, first = ", ".join(mutated), mutated[0]
        raise TranslationError(
            f"{code} mutates {names} in forward, and net.apply returns no parameters, so the update "
            "would be lost. Pass it to net.apply among the buffers, which are returned (parameters with "
            f"`requires_grad_(False)` are among them already): net.apply({{...}}, {{**buffers, {first!r}: array}}, "
            "...). Or update the arrays outside the module, for example after the optimizer's step"
        )


def _is_materialized_later(tensor: torch.Tensor, array: Any) -> bool:
    """Whether a buffer is empty until the code has seen its first argument, like the state of a spiking neuron."""
    return not isinstance(tensor, torch.nn.Parameter) and 0 in (tensor.numel(), array.size)


def _check_subclass(code: str, name: str, kind: type[torch.Tensor]) -> None:
    """Raises for a tensor of a class that redefines methods of `torch.Tensor`, which traced tensors do not have."""
    parts = [x for x in kind.__mro__ if x.__module__.partition(".")[0] not in ("torch", "builtins")]
    redefined = {name for part in parts for name in vars(part) if hasattr(torch.Tensor, name)} - _HARMLESS
    if redefined:
        raise TranslationError(
            f"{code}: {name} is a {kind.__name__}, which redefines {min(redefined)} of torch.Tensor. A traced tensor "
            "has torch's. Store a plain torch.nn.Parameter, and call a function for what the class does"
        )


# What a subclass of `torch.Tensor` may redefine without an effect on what code computes; 3.13 and 3.14 add names.
_HARMLESS = frozenset(
    """__annotate_func__ __annotations__ __annotations_cache__ __deepcopy__ __dict__ __doc__
    __firstlineno__ __format__ __getstate__ __init__ __init_subclass__ __module__ __new__
    __qualname__ __reduce_ex__ __repr__ __setstate__ __slots__ __static_attributes__ __str__
    __type_params__ __weakref__ cpu cuda to""".split()  # noqa: SIM905
)


def _check_hooks(module: torch.nn.Module) -> None:
    """Raises if a tensor has hooks that only torch's autograd calls."""
    code = type(module).__name__
    for name, tensor in _tensors(module).items():
        if accumulation_hooks(tensor):
            raise TranslationError(
                f"{code}: {name} has a hook that torch calls after it stored `.grad`, and JAX has no `.grad`. Remove "
                "it, or use `register_hook`"
            )


def _forbid_aliased_mutations(recorder: Recorder, tensors: _Tensors, own: _Tensors) -> None:
    """Forbids mutation of tensors that share storage in the module, since on JAX they do not."""
    last_end, last = (None, 0), ""
    for name in sorted(own, key=lambda name: (storage_id(own[name]) or 0, own[name].data_ptr())):
        x = own[name]
        storage, begin, size = storage_id(x), x.data_ptr(), storage_extent(x) * x.element_size()
        if storage is not None and storage == last_end[0] and begin < last_end[1]:
            for aliased in (name, last):
                forbid_mutation(recorder, tensors[aliased], f"{name} shares the storage of {last}")
        last_end, last = (storage, begin + size), name


def _modes(module: torch.nn.Module) -> dict[str, bool]:
    """Returns whether each part of a module is in train mode."""
    return {path: part.training for path, part in module.named_modules()}


_MISSING = object()


def _copy_attributes(value: Any, enclosing: tuple[int, ...] = ()) -> Any:
    """Copies containers and plain objects recursively; other values, and the originals, by reference."""
    fields, enclosing = _fields(value, enclosing), (*enclosing, id(value))
    if fields is not None:
        return _Container(value, fields, {name: _copy_attributes(item, enclosing) for name, item in fields.items()})
    if type(value) in (dict, OrderedDict):
        return _Container(value, value, {name: _copy_attributes(item, enclosing) for name, item in value.items()})
    return (
        _Container(value, value, [_copy_attributes(x, enclosing) for x in value])
        if type(value) in (list, set)
        else value
    )


def _has_fields(value: Any, enclosing: tuple[int, ...]) -> bool:
    """Whether a value may be a plain object, such as a configuration, down to depth 4."""
    others = type, types.FunctionType, types.ModuleType, torch.nn.Module, torch.Tensor
    return not isinstance(value, others) and id(value) not in enclosing and len(enclosing) < 5


def _fields(value: Any, enclosing: tuple[int, ...]) -> dict[str, Any] | None:
    """Returns the attributes of a plain object; `None` for other objects and below depth 4."""
    return getattr(value, "__dict__", None) if _has_fields(value, enclosing) else None


def _replace_tensors(saved: _Container, replaced: Mapping[int, torch.Tensor]) -> None:
    """Replaces tensors by others in a container, recursively."""
    if saved.original is not saved.container:
        return
    for key, part in saved.parts.items() if isinstance(saved.parts, dict) else enumerate(saved.parts):
        if isinstance(part, _Container):
            _replace_tensors(part, replaced)
        elif id(part) in replaced and not isinstance(saved.container, set):
            saved.container[key] = replaced[id(part)]
    if isinstance(saved.container, list) or not any(id(x) in replaced for x in saved.container):
        return
    if isinstance(saved.container, set):
        items: Any = [replaced.get(id(x), x) for x in saved.container]
    else:
        items = [(replaced.get(id(x), x), value) for x, value in saved.container.items()]
    saved.container.clear()
    saved.container.update(items)


class _Container(NamedTuple):
    """A container or plain object, and a copy of its items or attributes.

    Attributes:
      original: The container or object.
      container: The container, or the object's `__dict__`.
      parts: The copied items.
    """

    original: Any
    container: Any
    parts: Any


def _restore(container: Any, saved: _Container) -> Any:
    """Restores the items of a container."""

    def original(part: Any) -> Any:
        return _restore(part.container, part) if isinstance(part, _Container) else part

    if isinstance(saved.parts, dict):
        parts = {key: original(part) for key, part in cast(dict[Any, Any], saved.parts).items()}
    else:
        parts = [original(part) for part in saved.parts]
    container.clear()
    (container.extend if isinstance(container, list) else container.update)(parts)
    return saved.original


def _parts(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns a module and all modules that it reaches by attributes, by name.

    torch does not register those in lists, dicts and plain objects, so they are in no `named_modules()`.
    """
    parts = list(module.named_modules())
    known = {id(part) for _, part in parts}
    for path, part in parts:  # The list grows.
        for name, value in vars(part).items():
            if name in ("_modules", "_parameters", "_buffers"):
                continue
            for inner_path, inner in _modules_in(value, f"{path}.{name}" if path else name):
                new = [(p, x) for p, x in inner.named_modules(prefix=inner_path) if id(x) not in known]
                known |= {id(x) for _, x in new}
                parts += new
    return dict(parts)


def _modules_in(value: Any, path: str, enclosing: tuple[int, ...] = ()) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yields the modules in containers and plain objects, recursively, with their names."""
    if isinstance(value, torch.nn.Module):
        yield path, value
        return
    if isinstance(value, (*_BY_VALUE, torch.Tensor, np.ndarray)) or id(value) in enclosing:
        return
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = cast(dict[Any, Any], value).items()
    elif isinstance(value, (list, tuple, set)):
        items = enumerate(cast(Iterable[Any], value))
    elif (fields := _fields(value, enclosing)) is not None:
        items = fields.items()
    for name, item in items:
        yield from _modules_in(item, f"{path}[{name!r}]", (*enclosing, id(value)))


def _state_key(module: torch.nn.Module) -> tuple[Any, ...]:
    """Returns a key of a module's attributes except tensors: modes, numbers and strings by value, objects by
    identity.
    """
    return tuple(
        (IdentityKey(part), *map(_attribute_key, _attributes(part).items())) for part in _parts(module).values()
    )


def _attributes(part: torch.nn.Module) -> dict[str, Any]:
    script = script_attributes(part)
    # Attributes of other types are new objects on every access.
    return vars(part) | {name: x for name, x in script.items() if isinstance(x, (*_BY_VALUE, tuple, list, dict))}


_BY_VALUE = (bool, int, float, complex, str, bytes, type(None))


def _state_by_name(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module and its submodules by their names in messages, and its tensors' identities."""
    found: dict[str, Any] = {}
    for path, part in _parts(module).items():
        where = f"of {path or 'the module'} ({type(part).__name__})"
        attributes = {**_attributes(part), "_parameters": None, "_buffers": None}
        found |= {f"the attribute {name} {where}": value for name, value in attributes.items()}
        found |= {
            f"{name} {where}": id(x) for tensors_by_name in tensor_dicts(part) for name, x in tensors_by_name.items()
        }
    return found


def _attribute_keys(module: torch.nn.Module) -> dict[str, Any]:
    """Returns a key for each attribute of `_state_by_name`."""
    return {name: _attribute_key(value) for name, value in _state_by_name(module).items()}


def _changes(module: torch.nn.Module, before: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the earlier keys of the attributes that have changed."""
    names = {**before, **(after := _attribute_keys(module))}
    return {name: before.get(name) for name in names if before.get(name, _MISSING) != after.get(name, _MISSING)}


class _TensorKey(NamedTuple):
    """A tensor's identity, and whether it has nonstandard strides."""

    identity: int
    has_nonstandard_strides: bool


def _attribute_key(value: Any, enclosing: tuple[int, ...] = ()) -> Any:
    """Returns the key of an attribute; `enclosing` are the objects and tensors around it, whose depth is limited."""
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # tells -0.0 from 0.0
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, (tuple, list, deque)):
        return type(value), *(_attribute_key(item, enclosing) for item in cast(list[Any], value))
    if isinstance(value, set):
        return set, *sorted((_attribute_key(item, enclosing) for item in cast(set[Any], value)), key=hash)
    if isinstance(value, weakref.ref):  # Its target is compared where another attribute holds it.
        return weakref.ref
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    fields = cast(dict[Any, Any], value) if isinstance(value, dict) else _fields(value, enclosing)
    if fields is None and _has_fields(value, enclosing):
        fields = plain_attributes(value)  # of an object with `__slots__`
    if fields is not None:
        own, inside = (dict, enclosing) if isinstance(value, dict) else (IdentityKey(value), (*enclosing, id(value)))
        return own, *((_attribute_key(name), _attribute_key(x, inside)) for name, x in fields.items())
    if not isinstance(value, torch.Tensor):
        return IdentityKey(value)
    if value.grad_fn is not None:  # A weight that a hook makes, for example: every forward computes it again.
        return "computed", value.shape
    key = _TensorKey(id(value), has_nonstandard_strides(value))
    attributes = {} if isinstance(value, FunctionalTensor) or id(value) in enclosing else vars(value)
    return (key, _attribute_key(attributes, (*enclosing, id(value)))) if attributes else key
