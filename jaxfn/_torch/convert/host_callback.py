"""Functions that cannot be traced, run by torch on the host: `from_torch(F, fallback="callback")`.

A host computation is a torch function of flat tensors: `F.apply`, or its gradient by `torch.autograd.grad`. Each is one
`jax.pure_callback`. Nothing is stored on the host between callbacks: the gradient runs `forward` again, with an equal
seed, and compares what it returns and stores on ctx with the first run. There is no second derivative: to torch, what
code outside it computes is constant there, and so are intermediates on ctx.
"""

from __future__ import annotations

import inspect
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer
from torch.utils import _pytree as torch_tree

from jaxfn._context import FunctionCtx, ctx_state
from jaxfn._mesh_types import pcast_like
from jaxfn._primitives import DeferredError, guard
from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.convert.function_class import FunctionAdapter, mutation_message
from jaxfn._torch.convert.host_checks import CHECKSUM_SIZE, LimitedCalls, is_close, observed_class
from jaxfn._torch.convert.traced_code import TensorSpec, missing_key_message, names_int64, tensor_spec
from jaxfn._torch.graph.source_lines import source_line
from jaxfn._torch.values.arrays import jax_dtype, to_numpy, to_torch, torch_dtype
from jaxfn._torch.values.errors import TranslationError
from jaxfn._torch.values.flatten import FlatTensors, Slot, flatten_tensors, slots, unflatten_tensors
from jaxfn._torch.values.trace_cache import IdentityKey, LRUCache, static_key, torch_settings
from jaxfn._tree import as_array, is_array_leaf, is_inexact

_MAX_HOST_CALLS = 256
_NUM_EXAMPLES = 4
# More calls of torch than these in `forward`, on example values, count as a loop that does not end.
_MAX_EXAMPLE_CALLS = 20_000
# torch's generator of random numbers belongs to the process.
_lock = threading.RLock()


class _Output(NamedTuple):
    """The type of a host computation's result: its template, and the specs of its tensors."""

    template: Any
    specs: list[TensorSpec]

    def __str__(self) -> str:
        shown = (f"{x.dtype}{list(x.shape)}" for x in self.specs[: len(slots(self.template))])
        return ", ".join(shown) or repr(self.template)


class HostForward:
    """`F.apply` for arguments of certain types. It returns the tensors of the output, and a checksum of ctx.

    Attributes:
      is_needed: Whether torch must run on the host, since `forward` or `backward` cannot be translated.
      output: The type of the result, once it is known. Every callback checks it.
      flags: Which inputs of `forward` need a gradient.
      requires_grad: Which tensors require a gradient.
      autocast: torch's autocast of the caller's thread.
    """

    def __init__(
        self, definition: Definition, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]
    ) -> None:
        self.definition = definition
        self.arguments = arguments
        self.input_specs = specs
        self.name = f"{definition.name}.forward"
        self.output: _Output | None = None
        self.is_needed = True
        self._example: _Output | None = None
        self.flags = flags
        args, kwargs = arguments
        of_tensors = [flag for x, flag in zip((*args, *kwargs.values()), flags, strict=True) for _ in slots(x)]
        pairs = zip(of_tensors, specs, strict=True)
        self.requires_grad = [flag and is_inexact(jax_dtype(x.dtype)) for flag, x in pairs]
        self.autocast = torch.get_autocast_dtype("cpu"), torch.is_autocast_enabled("cpu")

    def evaluate(self, tensors: Sequence[torch.Tensor], expected: Sequence[Any]) -> FlatTensors:
        """Computes the result of a callback."""
        return self._apply(tensors)

    def differentiable_results(self, tensors: Sequence[torch.Tensor], expected: Sequence[Any]) -> Sequence[Any]:
        """Computes results with autograd's graph, which must be as expected."""
        results = self._apply(tensors).leaves
        if len(results) != len(expected) or not all(map(is_close, results, expected)):
            raise TranslationError(
                f"{self.name} runs again for the gradient, on equal inputs, and returned something else, or stored "
                "something else on ctx. With fallback='callback' it may depend on its arguments and on torch's random "
                "numbers only"
            )
        return results

    def _apply(self, tensors: Sequence[torch.Tensor]) -> FlatTensors:
        checksums: list[torch.Tensor] = []
        # An input that is a leaf of autograd's graph could not be marked dirty.
        inputs = [x.clone() if x.requires_grad else x for x in tensors]
        args, kwargs = unflatten_tensors(self.arguments, inputs)
        if kwargs:  # torch's `apply` takes none.
            ctx = () if self.definition.has_setup_context else (None,)
            bound = inspect.signature(self.definition.original.forward).bind(*ctx, *args, **kwargs)
            bound.apply_defaults()
            args, kwargs = bound.args[len(ctx) :], bound.kwargs
        output = observed_class(self.definition, checksums).apply(*args, **kwargs)
        if any(x._version for x in inputs):
            warnings.warn(mutation_message(self.definition.name), stacklevel=2)
        leaves, template = flatten_tensors(output)
        return FlatTensors([*leaves, *checksums], template)

    def output_type(self) -> _Output:
        """Returns the type of the result, if it is not known by a call of `forward` on example values.

        The first counts that raises no error.
        """
        if self.output is not None:
            return self.output
        errors: list[Exception] = []
        while self._example is None and len(errors) < _NUM_EXAMPLES:
            found = self._example_output(len(errors))
            if isinstance(found, _Output):
                self._example = found
            else:
                errors.append(found)
        if self._example is not None:
            return self._example
        raise TranslationError(
            f"{self.name} cannot be traced, so JAX must know the types of its outputs before the callback runs under "
            f"jax.jit. On example values it raised {errors[0]!r}. If your calls return equal types for all values, "
            f"call {self.definition.call} once outside jax.jit with arguments of these types, which shows them"
        )

    def _example_output(self, i: int) -> _Output | Exception:
        try:
            with LimitedCalls(_MAX_EXAMPLE_CALLS):
                return _evaluate(self, [_example(spec, i) for spec in self.input_specs], (), np.zeros(2, np.uint32))[0]
        except Exception as error:
            return error


class HostGradient:
    """The gradient of `F.apply`, as a function of its tensors and of gradients of its results.

    Attributes:
      of: The `F.apply`.
      has_gradient: Which results have a gradient.
      output: The type of the gradients.
    """

    def __init__(self, of: HostForward, has_gradient: Sequence[bool], output: _Output) -> None:
        self.of = of
        self.definition, self.autocast = of.definition, of.autocast
        self.has_gradient = has_gradient
        self.output = output
        self.name = f"{of.definition.name}.backward"
        self.requires_grad = [*of.requires_grad, *[False] * sum(has_gradient)]

    def output_type(self) -> _Output:
        """Returns the type of the gradients."""
        return self.output

    def evaluate(self, tensors: Sequence[torch.Tensor], expected: Sequence[Any]) -> FlatTensors:
        """Computes the result of a callback."""
        num_inputs = len(self.of.input_specs)
        inputs, gradients = tensors[:num_inputs], tensors[num_inputs:]
        results = _where(self.has_gradient, self.of.differentiable_results(inputs, expected))
        in_graph = [(x, g.to(x.dtype)) for x, g in zip(results, gradients, strict=True) if x.requires_grad]
        wanted = _where(self.of.requires_grad, inputs)
        found: Sequence[Any] = [None] * len(wanted)
        if in_graph:
            outputs, matching = zip(*in_graph, strict=True)
            found = torch.autograd.grad(outputs, wanted, matching, allow_unused=True)
        pairs = zip(found, wanted, strict=True)
        return flatten_tensors([torch.zeros_like(x) if g is None else g for g, x in pairs])


_HostCode = HostForward | HostGradient


def _where(flags: Sequence[bool], values: Sequence[Any]) -> list[Any]:
    return [value for flag, value in zip(flags, values, strict=False) if flag]


def _evaluate(code: _HostCode, arrays: Any, expected: Any, seed: Any) -> tuple[_Output, list[np.ndarray[Any, Any]]]:
    """Runs a host computation on NumPy or concrete JAX arrays, with random numbers of a seed.

    If torch requires int64, int32 tensors are passed as int64, as in a trace.
    """
    # Converted before the lock is taken, since an array may wait for another callback.
    tensors, expected = [to_torch(x) for x in arrays], [np.asarray(x) for x in expected]
    number = None if seed is None else np.array(seed).view(np.uint64).item()
    with (
        _lock,
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", *code.autocast),
    ):
        try:
            result = _run(code, tensors, expected, number)
        except (TypeError, ValueError, RuntimeError, AssertionError, IndexError) as error:
            if not names_int64(error) or not any(x.dtype == torch.int32 for x in tensors):
                raise
            tensors = [x.long() if x.dtype == torch.int32 else x for x in tensors]
            result = _run(code, tensors, expected, number)
        output = _Output(result.template, [tensor_spec(x) for x in result.leaves])
        return output, [to_numpy(x) for x in result.leaves]


def _run(code: _HostCode, tensors: Any, expected: Sequence[Any], seed: int | None) -> FlatTensors:
    torch.default_generator.manual_seed(seed or 0)
    state = torch.get_rng_state()
    leaves = [x.clone().requires_grad_(flag) for x, flag in zip(tensors, code.requires_grad, strict=True)]
    result = code.evaluate(leaves, expected)
    if seed is None and not torch.equal(state, torch.get_rng_state()):
        raise TranslationError(missing_key_message(code.name, code.definition))
    return result


def _call(code: _HostCode, arrays: Sequence[Any], expected: Sequence[Any], key: Any) -> FlatTensors:
    """Runs a host computation on JAX arrays, by a callback if one is traced."""
    operands = list(arrays), list(expected), None if key is None else jax.random.bits(key, (2,), np.uint32)
    if not any(isinstance(x, Tracer) for x in jax.tree_util.tree_leaves(operands)):
        output, values = _evaluate(code, *operands)
        code.output = output
        results = [jnp.asarray(_cast(x, jax_dtype(s.dtype))) for x, s in zip(values, output.specs, strict=True)]
        return FlatTensors(results, output.template)
    output = code.output_type()
    types = [jax.ShapeDtypeStruct(x.shape, jax_dtype(x.dtype)) for x in output.specs]

    def callback(*operands: Any) -> list[Any]:
        try:
            actual, values = _evaluate(code, *operands)
            if actual != output:
                raise TranslationError(
                    f"the output is {actual} for these values, and was {output} for others. JAX must know shapes and "
                    "types before the callback runs: call it outside jax.jit"
                )
            return [_cast(x, t.dtype) for x, t in zip(values, types, strict=True)]
        except Exception as error:
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
            raise RuntimeError(f"{code.name}: {type(error).__name__}: {error}{source_line(frames)}") from error

    results = jax.pure_callback(callback, types, *operands, vmap_method="sequential")
    for operand in jax.tree_util.tree_leaves(operands):
        results = [pcast_like(x, jax.typeof(operand)) for x in results]
    return FlatTensors(results, output.template)


def _cast(values: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    cast = values.astype(dtype, copy=False)
    if dtype.kind in "iu" and not np.array_equal(cast, values):
        raise OverflowError("an output has integers that need 64 bits: jax.config.update('jax_enable_x64', True)")
    return cast


def _gradients(of: HostForward, arrays: Sequence[Any], expected: Any, key: Any, gradients: Sequence[Any]) -> list[Any]:
    """Returns the gradient of each of the arrays, `None` for those that need none."""
    has_gradient = [gradient is not None for gradient in gradients]
    if not any(of.requires_grad) or not any(has_gradient):
        return [None] * len(arrays)
    specs = [TensorSpec(x.shape, torch_dtype(x.dtype)) for x in _where(of.requires_grad, arrays)]
    code = HostGradient(of, has_gradient, _Output([Slot(i) for i in range(len(specs))], specs))
    sources = [*arrays, *expected, *_where(has_gradient, gradients)]
    *operands, key = jax.lax.stop_gradient([*sources, key])
    n = len(arrays)
    results = _call(code, [*operands[:n], *operands[n + len(expected) :]], operands[n : n + len(expected)], key).leaves
    error = DeferredError(
        TranslationError,
        f"{of.definition.name}: torch runs it on the host (fallback='callback'), where it is differentiated once. For "
        "second derivatives write what cannot be traced so that it can, or port the Function to JAX",
    )
    found = iter(guard(results, sources, error))
    return [next(found) if flag else None for flag in of.requires_grad]


class HostAdapter(FunctionAdapter):
    """The methods of a torch Function, which torch runs on the host if they cannot be traced."""

    uses_vmap = False  # `jax.vmap` of a callback is a loop.

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self._hosts = LRUCache[HostForward](_MAX_HOST_CALLS)

    def forward(self, ctx: FunctionCtx | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs `forward`, translated or on the host."""
        assert ctx is not None  # Without `vmap` there is no separate `setup_context`.
        state = ctx_state(ctx)
        others = {name: value for name, value in kwargs.items() if name != self.definition.key_name}
        arguments = flatten_tensors((args, others), is_array_leaf)
        arrays = [as_array(x) for x in arguments.leaves]
        flags = self._flags(state.names.names, state.needs_input_grad)
        host = self._find_host(arguments.template, [self._spec(x) for x in arrays], flags)
        if not host.is_needed:
            return super().forward(ctx, args, kwargs)
        key = kwargs[self.definition.key_name]
        results, template = _call(host, arrays, (), key)
        ctx.needs_input_grad  # noqa: B018 - jaxfn runs forward again where more inputs need a gradient
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*arrays, *results)
        vars(ctx).update(traced=host, template=template, key=key)
        return unflatten_tensors(template, results)

    def backward(self, ctx: Any, grad_outputs: Sequence[Any]) -> tuple[Any, ...]:
        """Runs `backward`, translated or on the host."""
        host = ctx.traced
        if not isinstance(host, HostForward):
            return super().backward(ctx, grad_outputs)
        names = ctx_state(ctx).names.names
        # `forward` has read the flags, so that it ran with these.
        assert self._flags(names, tuple(ctx.needs_input_grad)) == host.flags
        arrays, expected = ctx.saved_tensors[: len(host.input_specs)], ctx.saved_tensors[len(host.input_specs) :]
        found = _gradients(host, arrays, expected, ctx.key, self._of_tensors(ctx.template, grad_outputs))
        args, kwargs = host.arguments
        values = (*args, *kwargs.values())
        gradients = [unflatten_tensors(value, found) if slots(value) else None for value in values]
        return tuple(self._gradients_of_inputs(gradients, host.arguments, names))

    def jvp(self, ctx: Any, *tangents: Any) -> Any:
        """Runs `jvp`, which must be translated."""
        if isinstance(ctx.traced, HostForward):
            raise TranslationError(f"{self.definition.name}.jvp is not called on the host: use reverse mode")
        return super().jvp(ctx, *tangents)

    def _of_tensors(self, template: Any, grad_outputs: Sequence[Any]) -> list[Any]:
        """Returns the gradient of each tensor of an output, or `None`, from one for each output."""
        found: list[Any] = [None] * len(slots(template))
        outputs: tuple[Any, ...] = template if isinstance(template, tuple) else (template,)
        for i, (output, gradient) in enumerate(zip(outputs, grad_outputs, strict=True)):
            if isinstance(output, Slot):
                found[output.index] = gradient
            elif any(x is not None for x in jax.tree_util.tree_leaves(gradient)):
                raise TranslationError(
                    f"{self.definition.name}.forward returned tensors inside a {type(output).__name__} as output {i}, "
                    "which torch does not differentiate. Return a tuple of tensors"
                )
        return found

    def _find_host(self, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]) -> HostForward:
        """Returns the host computation for these arguments, which is not needed if they can be traced."""
        key = static_key(torch_tree.tree_map(_by_identity, arguments)), tuple(specs), torch_settings()
        hosts = self._hosts.values(key)
        host = next((x for x in hosts if x.flags == flags), None)
        if host is None:
            host = self._new_host(arguments, specs, flags)
            self._hosts.put(key, host)
        host.output = host.output or next((x.output for x in hosts if x.output is not None), None)
        return host

    def _new_host(self, arguments: Any, specs: Sequence[TensorSpec], flags: tuple[bool, ...]) -> HostForward:
        host = HostForward(self.definition, arguments, specs, flags)
        try:
            traced = self.trace_forward(arguments, specs, flags)
            output = flatten_tensors(traced.output, lambda leaf: isinstance(leaf, Slot))
            types = [traced.specs[slot.index]._replace(strides_source=None) for slot in output.leaves]
            host.output = _Output(output.template, [*types, TensorSpec((CHECKSUM_SIZE,), torch.float32)])
            backward = traced.full_backward()
            host.is_needed = bool(traced.unsupported or (backward is not None and backward.unsupported))
        except Exception:  # torch raises it again on the host, if it has another reason than the trace.
            pass
        return host


def _by_identity(leaf: Any) -> Any:
    """Returns a leaf of a template if it is compared by its value, and else a key that compares by identity."""
    try:
        static_key(leaf)
    except TypeError:
        return IdentityKey(leaf)
    return leaf


def _example(spec: TensorSpec, i: int) -> np.ndarray[Any, Any]:
    """Returns an array that is increasing, constant, decreasing or of both signs; integers, perhaps indices, are 0."""
    ramp = torch.linspace(0.1, 0.9, int(np.prod(spec.shape)))
    values = (ramp, torch.full_like(ramp, 0.5), ramp.flip(0), torch.sin(37 * ramp))[i]
    return to_numpy(values.reshape(spec.shape).to(spec.dtype))
