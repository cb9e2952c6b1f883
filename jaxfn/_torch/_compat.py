"""Names of torch that it does not promise, each with the versions that it was checked on.

No other module uses such names. On an untested version `convert.self_test` tests what they do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Generator, Mapping
from typing import Any

import torch
import torch._library.autograd
import torch.library
import torch.utils.checkpoint
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

without_modes = _disable_current_modes  # Disables `TorchDispatchMode`s (2.8 to 2.15).

# Disables `__torch_function__` (2.8 to 2.15).
without_functions = torch._C.DisableTorchFunction  # pyright: ignore[reportPrivateUsage]

# The key of torch's FakeTensorMode, which runs below all other modes (2.8 to 2.15).
BELOW_FUNCTIONALIZATION = torch._C._TorchDispatchModeKey.FAKE  # pyright: ignore

# The Function that reentrant `torch.utils.checkpoint` applies to a function, a flag and inputs (2.8 to 2.15).
CheckpointFunction: Any = torch.utils.checkpoint.CheckpointFunction

# Called by `pack_padded_sequence` and `pad_packed_sequence` (2.8 to 2.15).
PACK = torch._VF._pack_padded_sequence  # pyright: ignore
PAD = torch._VF._pad_packed_sequence  # pyright: ignore

# The log of errors on fake tensors, which torch also raises (2.8 to 2.15).
FAKE_TENSOR_LOG = logging.getLogger("torch._subclasses.fake_tensor")

# A matrix product and a loss in one function (from 2.13).
LINEAR_CROSS_ENTROPY: Any = getattr(torch.nn.functional, "linear_cross_entropy", None)

SCRIPT_TYPES: tuple[Any, ...] = torch._C.ScriptFunction, torch._C.ScriptMethod  # pyright: ignore  # 2.8 to 2.15


def interpret_script(script: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Evaluates TorchScript without its executor, which uses its own derivatives after a few calls (2.13).

    Those start from detached tensors, and second derivatives traced through them are wrong.
    """
    values = [script.owner, *args] if isinstance(script, SCRIPT_TYPES[1]) else [*args]
    values += [kwargs.get(a.name, a.default_value) for a in script.schema.arguments[len(values) :]]
    return torch._C._jit_interpret_graph(script.inlined_graph, tuple(values))  # pyright: ignore


def script_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Returns the attributes that a TorchScript module stores outside Python; nothing for other modules (2.13)."""
    if not isinstance(module, torch.jit.ScriptModule):
        return {}
    script_module: Any = module._c
    names = torch._C.ConcreteModuleType.from_jit_type(script_module._type()).get_attributes()  # pyright: ignore
    return {name: script_module.getattr(name) for name in names}


# Reads the values of a transformer's mask to choose a kernel. Takes a mask, a flag and a size (2.8 to 2.15).
CAUSAL_MASK_DETECTION = torch.nn.modules.transformer, "_detect_is_causal_mask"

# Creates leaves from the inputs of `torch.autograd.functional`. Takes the inputs and two flags (2.8 to 2.15).
GRAD_PREPROCESS = torch.autograd.functional, "_grad_preprocess"

OPERATION_TYPES = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)  # pyright: ignore[reportPrivateUsage]


def find_operation(operation: Any) -> Any:
    """Returns an operation, or the one of a name, as an overload or packet; `None` for other values (2.8 to 2.15)."""
    found: Any = getattr(operation, "_opoverload", operation)
    if isinstance(found, str):
        names, found = found.replace("::", ".").split("."), torch.ops
        for name in names:
            try:
                found = getattr(found, name)
            except (AttributeError, RuntimeError):
                return None
    return found if isinstance(found, OPERATION_TYPES) else None


def is_composite(operation: Any) -> bool:
    """Whether torch decomposes all overloads of an operation before a trace sees it (2.8 to 2.15)."""
    found = find_operation(operation)
    if found is None:
        return False
    overloads = [getattr(found, name) for name in found.overloads()] if hasattr(found, "overloads") else [found]
    names = [overload.name() for overload in overloads]
    dispatcher: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    compiled = [
        name for name in names if dispatcher._dispatch_has_kernel(name)
    ]  # The others exist in TorchScript only.
    key = "CompositeImplicitAutograd"
    return bool(compiled) and all(dispatcher._dispatch_has_kernel_for_dispatch_key(name, key) for name in compiled)


# The module in which a custom operation looks up whether gradients are on and an argument requires one. Only then it
# applies the Function that torch created from the registered backward (2.13).
CUSTOM_OP_AUTOGRAD = torch._library.autograd, "_C"
any_requires_grad = torch._C._any_requires_grad  # pyright: ignore

# On 2.8 tracing such an operation fails in an assertion of torch. The versions in between were not tried.
_TRACES_CUSTOM_OP_AUTOGRAD = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)

_Key: Any = torch._C.DispatchKey  # pyright: ignore[reportPrivateUsage]
_DEFINITIONS: Mapping[str, Any] = torch._library.custom_ops.OPDEFS  # pyright: ignore  # of `custom_op`, 2.13


def is_custom(operation: Any) -> bool:
    """Whether an overload is from a library of the user or of a package, and not from torch (2.13)."""
    namespace = operation.namespace if hasattr(operation, "_schema") else "prim"
    return namespace not in ("aten", "prim", "prims") and "c10d" not in namespace


def _has_python_code(operation: Any, key: str) -> bool:
    """Whether `torch.library` has Python code of an overload for a dispatch key (2.13)."""
    name = operation._schema.name.replace("::", "/")
    overload = operation._schema.overload_name and f".{operation._schema.overload_name}"
    return f"{name}{overload}/{key}" in torch.library._impls  # pyright: ignore[reportPrivateUsage]


def python_kernel(operation: Any) -> Callable[..., Any] | None:
    """Returns the Python code that computes a custom operation; `None` if it is compiled (2.13).

    Only torch's dispatcher knows the code of an operation that was not created by `custom_op`. It is returned as a
    `partial`, which runs with all modes disabled.
    """
    definition = _DEFINITIONS.get(operation._schema.name)
    if definition is not None:
        return next(iter(definition._backend_fns.values()), definition._init_fn)
    keys = (_Key.CPU, _Key.CompositeExplicitAutograd, _Key.CUDA)  # The device does not matter in a trace.
    key = next((key for key in keys if _has_python_code(operation, key.name)), None)
    return None if key is None else functools.partial(operation._op_dk, key)


def has_registered_backward(operation: Any) -> bool:
    """Whether a backward of a custom operation is registered in Python (2.13)."""
    definition = _DEFINITIONS.get(operation._schema.name)
    if definition is not None:
        return definition._backward_fn is not None
    return any(_has_python_code(operation, key) for key in ("Autograd", "AutogradCPU"))


def is_traceable(operation: Any) -> bool:
    """Whether torch can trace a custom operation. Before 2.13 it cannot if torch created a Function for it."""
    return _TRACES_CUSTOM_OP_AUTOGRAD or not (
        operation._schema.name in _DEFINITIONS or has_registered_backward(operation)
    )


def has_cuda_only_backward(operation: Any) -> bool:
    """Whether a backward is registered in Python for CUDA only. Code is traced on a CPU (2.13)."""
    return _has_python_code(operation, "AutogradCUDA") and not has_registered_backward(operation)


@contextlib.contextmanager
def plain_torch() -> Generator[None]:
    """Inside, torch runs as if nothing were being traced (2.8 to 2.15)."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # pyright: ignore[reportPrivateUsage]
        yield


def is_accumulating() -> bool:
    """Whether autograd is accumulating a gradient into `.grad`, which it detaches (2.8 to 2.15)."""
    node: Any = torch._C._current_autograd_node()  # pyright: ignore
    return node is not None and node.name().endswith("AccumulateGrad")


def is_below_autograd() -> bool:
    """Whether autograd has passed the operation on: code called it, and not autograd itself (2.8 to 2.15)."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)  # pyright: ignore


def to_functional(tensor: torch.Tensor, mode: FunctionalTensorMode) -> FunctionalTensor:
    """Wraps a tensor so that `mode` sees its mutations (2.8 to 2.15)."""
    return FunctionalTensor(torch._to_functional_tensor(tensor), mode)  # pyright: ignore


def make_wrapper(kind: type[torch.Tensor], dtype: torch.dtype) -> Any:
    """Returns an empty tensor of a subclass, which implements all operations on it (2.8 to 2.15)."""
    return torch.Tensor._make_wrapper_subclass(kind, (0,), dtype=dtype)  # pyright: ignore


def storage_id(tensor: torch.Tensor) -> int | None:
    """Returns an identifier of a tensor's storage; `None` for a tensor without one (2.8 to 2.15)."""
    is_dense = tensor.layout is torch.strided and not isinstance(tensor, FakeTensor)
    return tensor.untyped_storage()._cdata if is_dense else None  # pyright: ignore[reportPrivateUsage]


@functools.cache
def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """Returns torch's decompositions of operations (2.8 to 2.15)."""
    return {**decomposition_table, **core_aten_decompositions()}


def decompose(operation: Any, args: Any, kwargs: Any) -> Any:
    """Decomposes an operation by its kernel; returns `NotImplemented` if torch has no decomposition (2.8 to 2.15)."""
    return operation.decompose(*args, **kwargs) if operation._can_decompose() else NotImplemented


def _fake_grouped_mm(
    a: torch.Tensor, b: torch.Tensor, offs: Any = None, bias: None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    groups = [offs.shape[0]] if a.dim() == 2 and b.dim() == 2 else [a.shape[0]] if a.dim() == 3 and b.dim() == 3 else []
    return a.new_empty([*groups, a.shape[-2], b.shape[-1]], dtype=out_dtype)


# Fake implementations of operations, where torch's support fewer dtypes than the operations: on 2.8 to 2.13 that of
# `grouped_mm` supports bfloat16 only.
FAKE_IMPLEMENTATIONS: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten._grouped_mm.default: _fake_grouped_mm  # pyright: ignore
}


_SingleLevelFunction: Any = torch.autograd.function._SingleLevelFunction  # pyright: ignore[reportPrivateUsage]

FunctionMeta: Any = torch.autograd.function.FunctionMeta  # 2.8 to 2.15

# Whether `Function.apply` is compiled code (from 2.15). Before, it is Python code that looks up the `apply` of
# `APPLY_CLASS`, even if `SomeFunction.apply` itself was looked up before the patch.
HAS_COMPILED_APPLY = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)

APPLY_CLASS: Any = torch.autograd.Function if HAS_COMPILED_APPLY else _SingleLevelFunction


with torch.inference_mode(False), torch.enable_grad():  # The importing code may be in other modes.
    _at_bound = torch.ones((), requires_grad=True)
    (_of_clamp,) = torch.autograd.grad(_at_bound.clamp(min=1.0), _at_bound)

# Whether `clamp` divides the derivative at a bound equally among the operands that are equal there (from 2.15).
CLAMP_SPLITS_TIES = _of_clamp.item() == 0

_factors = torch.ops.aten._linalg_solve_ex(torch.tensor([[2.0, 1.0], [0.0, 1.0]]), torch.ones(2))[1]

# Whether `linalg.solve` factors the transpose of a real contiguous matrix; its derivative uses the factors (on 2.8, no
# longer on 2.13).
SOLVE_FACTORS_TRANSPOSE = _factors[0, 1].item() == 0


# The attribute for which `isinstance(tensor, torch.nn.Parameter)` looks in a tensor of another class (2.13).
PARAMETER_FLAG = "_is_param"


def original_apply(function: Any) -> Any:
    """Returns torch's own `apply` of a Function, without patches (2.8 to 2.15)."""
    return super(_SingleLevelFunction, function).apply


def takes_boxed_gradients(function: Any) -> bool:
    """Whether `backward` takes its gradients as one list, which a Function can request (from 2.10)."""
    return getattr(function, "boxed_grads_call", False)


def saved_values(node: Any) -> list[Any]:
    """Returns the values that a node of autograd's graph has saved, if they still exist (2.8 to 2.15)."""
    saved: list[Any] = []
    for name in _saved_names(type(node)):
        with contextlib.suppress(RuntimeError):  # The value was freed, or mutated, which torch rejects in backward.
            value = getattr(node, name, None)
            saved += value if isinstance(value, (tuple, list)) else [value]
    return saved


@functools.cache
def _saved_names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_saved_") or name == "saved_tensors"]


_modules: Any = torch.nn.modules.module


def gradient_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls with a tensor's gradient (2.8 to 2.15)."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._backward_hooks  # pyright: ignore
    return [*(hooks or {}).values()]


def accumulation_hooks(tensor: torch.Tensor) -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls after it stored a tensor's `.grad` (2.8 to 2.15)."""
    hooks: dict[int, Callable[..., Any]] | None = tensor._post_accumulate_grad_hooks  # pyright: ignore
    return [*(hooks or {}).values()]


def global_hooks() -> list[Callable[..., Any]]:
    """Returns the hooks that torch calls for every module, also in its backward pass (2.8 to 2.15)."""
    forward = _modules._global_forward_pre_hooks, _modules._global_forward_hooks
    backward = _modules._global_backward_hooks, _modules._global_backward_pre_hooks
    return [hook for hooks in (*forward, *backward) for hook in hooks.values()]


def module_backward_hooks(module: Any) -> list[tuple[str, Callable[..., Any]]]:
    """Returns the backward hooks of a module's call, global ones too, each with the method that registered it.

    The methods and attributes were checked on 2.8 to 2.15.
    """
    is_full, is_full_for_all = module._is_full_backward_hook, _modules._global_is_full_backward_hook
    hooks: dict[str, Mapping[int, Callable[..., Any]]] = {
        "register_full_backward_pre_hook": module._backward_pre_hooks,
        "register_full_backward_hook" if is_full else "register_backward_hook": module._backward_hooks,
        "register_module_full_backward_pre_hook": _modules._global_backward_pre_hooks,
        "register_module_full_backward_hook"
        if is_full_for_all
        else "register_module_backward_hook": _modules._global_backward_hooks,
    }
    return [(method, hook) for method, registered in hooks.items() for hook in registered.values()]


def tensor_dicts(module: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the dicts of a module's own parameters and buffers (2.8 to 2.15)."""
    return module._parameters, module._buffers  # pyright: ignore


def scripted_function(value: Any) -> Any:
    """Returns the Python function that `torch.jit.script` compiled; other values unchanged.

    Private in torch: `_torchdynamo_inline` of a `ScriptFunction` (2.8 to 2.15).
    """
    return getattr(value, "_torchdynamo_inline", value) if isinstance(value, torch.jit.ScriptFunction) else value
