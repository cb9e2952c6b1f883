"""Writes and proves the source of a torch Function, or of a Python function of tensors, for JAX."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._port.source.module import Module, drawing_functions, write_module
from jaxfn._port.source.observe import ObservedRun, ObservedTensor, is_function_class, observe
from jaxfn._port.source.prove import Difference, Proof, in_double, make_groups
from jaxfn._port.source.samples import Example, other_sizes, subsets
from jaxfn._port.source.spelling import ReadsValuesError
from jaxfn._port.source.typecheck import OtherValuesError
from jaxfn._torch.values.errors import DataDependentError, TranslationError

# More calls with strict spellings than these are not tried one by one.
_MAX_ALTERNATIVES = 12


def write_source(
    function: Any,
    oracle: Callable[..., Any],
    key_name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    examples: Sequence[Sequence[Any]],
) -> str:
    """Returns the text of a module that defines a Function or function for JAX, compared with its conversion.

    Args:
      function: The torch Function class, or the Python function.
      oracle: Its conversion, a function of arrays.
      key_name: The name of the parameter of the conversion that takes a random key.
      args: The arguments of a call.
      kwargs: The keyword arguments of that call.
      examples: The arguments of more calls.

    Raises:
      TranslationError: A statement has no rule, or the results differ.
    """
    flat = [Example.of(args, kwargs), *(Example.of(tuple(example), {}) for example in examples)]
    try:
        return _write_source(function, oracle, key_name, flat, reads_values=False)
    except TranslationError as error:
        if not isinstance(error, DataDependentError) and not isinstance(error.__cause__, ReadsValuesError):
            raise
    try:
        return _write_source(function, oracle, key_name, flat, reads_values=True)
    finally:
        jax.clear_caches()


def _write_source(
    function: Any, oracle: Callable[..., Any], key_name: str, flat: list[Example], reads_values: bool
) -> str:
    """Returns the text of the module, of code that may read the values of tensors or not."""
    is_class = is_function_class(function)
    call = function.apply if is_class else function
    flat = [x if _is_valid(call, x) else x.map(_as_int64, x.arrays) for x in flat]
    flat = [x if _is_valid(call, x) else _with_fewer_gradients(call, x) for x in flat]
    sizes = [x for example in flat for x in other_sizes(example, lambda x: _is_valid(call, x))]
    methods = ["jvp"] if reads_values else ["jvp", "vmap"]  # All of a batch would have to have the same values.
    methods = [x for x in methods if is_class and _accepts(partial(_run_method, function, x, flat[0]))]
    run_in_double = partial(_run_in_double, function, methods, flat)
    run_all = partial(_run_all, function, methods, flat, sizes)
    observation = observe(function, run_all, run_in_double)
    if is_class and not _ran_each_backward(observation):
        run_all = partial(run_all, is_inside=True)
        observation = observe(function, run_all, run_in_double)
    statics = [x for example in flat for i, x in enumerate(example.leaves) if i not in example.arrays]
    groups = list(make_groups(flat, sizes, reads_values))
    constants = _constants(observation, statics)
    rounds = any(map(_is_single, observation.in_double.values()))
    is_valid = partial(_is_valid, call)
    torch_code = None if drawing_functions(observation) else call
    proof = Proof(oracle, torch_code, function.__name__, key_name, constants, is_valid, methods, rounds, reads_values)
    order = proof.order(groups[0])
    if order < 1:
        _check_order(function, proof, groups[0], order)
    if reads_values:  # which choose other branches at other samples
        sizes += [sample for group in groups for _, sample in proof.samples_of(group) if not group.x64]
        observation = observe(function, run_all, run_in_double)

    has_sizes = any(x.leaves[i].ndim for x in flat for i in x.arrays)
    without = ", ".join(map(str, flat[0].without_gradient))
    notes = {
        "It was compared with torch at the example's sizes alone, since torch accepts no others.": (
            has_sizes and not sizes
        ),
        "It reads the values of arrays, and so it runs outside `jax.jit` only.": reads_values,
        f"For a gradient with respect to input {without} it raises an error.": bool(without),
    }
    note = " ".join(text for text, applies in notes.items() if applies)

    def write(strict: Any, highest: int) -> tuple[Module, Difference | None]:
        # Derivatives that cannot be compared, or that differ, raise.
        is_once = is_class and highest == 1
        text = f"{note} Its second derivatives raise an error: they may differ." if is_once and order == 2 else note
        module = write_module(function, observation, strict, statics, is_once, text.strip(), reads_values=reads_values)
        return module, proof.first_difference(module, groups, highest)

    difference: Difference | None = None
    for highest in (2, 1)[2 - order :] if order > 0 else (order,):
        module, difference = write((), highest)
        if difference is None:
            return module.text
        module, difference = write(None, highest)
        if difference is None:
            return _with_fewest_strict(module, partial(write, highest=highest))
        if not is_class or difference.quantity < 2:
            break
    assert difference is not None
    message = _message(function, difference)
    if difference.reads_values:
        raise TranslationError(message) from ReadsValuesError()
    line = _line(function, difference, lambda x: _run(call, x, x.differentiable), statics, reads_values)
    raise TranslationError(message + line)


def _check_order(function: Any, proof: Proof, group: Any, order: int) -> None:
    """Raises the error of the conversion, unless the Function has no derivative."""
    error = proof.oracle_error(group, order + 1)
    base: Any = torch.autograd.Function
    has_backward = not is_function_class(function) or function.backward is not base.backward
    if error is not None and (order < 0 or (has_backward and isinstance(error, TranslationError))):
        raise error


def _with_fewest_strict(module: Module, write: Callable[[Any], tuple[Module, Difference | None]]) -> str:
    """Replaces strict spellings by plain ones, one by one, as long as the results agree."""
    strict = list(module.alternatives)
    for site in strict[:_MAX_ALTERNATIVES]:
        fewer = [x for x in strict if x != site]
        candidate, difference = write(fewer)
        if difference is None:
            module, strict = candidate, fewer
    return module.text


def _message(function: Any, difference: Difference) -> str:
    what = ("outputs", "gradients", "second derivatives")[difference.quantity]
    name = function.__name__
    return (
        f"{name}: the rewritten source has other {what} than the converted Function, for {difference.group.what}: "
        f"{difference.text}. Use jaxfn.from_torch({name}), or write the Function for JAX and compare it by "
        "jaxfn.paritycheck"
    )


def _line(
    function: Any,
    difference: Difference,
    run: Callable[[Example], None],
    statics: Sequence[Any],
    reads_values: bool,
) -> str:
    """Returns the line of torch code whose JAX code has other values for a sample, as part of a message."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.enable_grad():
            warnings.simplefilter("ignore")
            observation = observe(function, lambda: run(difference.sample), lambda: None)
        write_module(function, observation, None, statics, False, "", compares_values=True, reads_values=reads_values)
    except TranslationError as error:
        is_found = isinstance(error.__context__, OtherValuesError)
        return "\n" + str(error).removeprefix("the source cannot be rewritten: ") if is_found else ""
    except Exception:  # torch and the code may raise anything for the sample. Then the message has no line.
        return ""
    return ""


def _as_int64(x: Any) -> Any:
    """Returns int64 for int32, which represents it without x64."""
    return x.astype(np.int64) if x.dtype == np.int32 else x


def _with_fewer_gradients(call: Callable[..., Any], example: Example) -> Example:
    """Returns the example without gradients for which the code raises an error, if it raises none for the others."""
    for wanted in sorted(subsets(example.inexact), key=len, reverse=True):
        fewer = example._replace(without_gradient=tuple(i for i in example.inexact if i not in wanted))
        if wanted and _is_valid(call, fewer):
            return fewer
    return example


def _is_valid(call: Callable[..., Any], example: Example) -> bool:
    return _accepts(lambda: _run(call, example, example.differentiable))


def _accepts(run: Callable[[], None]) -> bool:
    """Whether a run raises nothing."""
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(), torch.enable_grad():
            warnings.simplefilter("ignore")  # Forward mode compiles TorchScript, which is deprecated.
            run()
    except Exception:  # torch and the code raise anything for arguments that do not fit.
        return False
    return True


def _ran_each_backward(observation: ObservedRun) -> bool:
    """Whether torch ran the `backward` of each Function; not of those that `forward` applies, without gradients."""
    defs = [(file, x) for file, x in observation.functions.values() if not isinstance(x, ast.Lambda)]
    backwards = [(file, x) for file, x in defs if x.name == "backward"]
    return all((file.path, file.span(x.body[0])[0]) in observation.statements for file, x in backwards)


def _run_all(
    function: Any,
    methods: Sequence[str],
    examples: Sequence[Example],
    sizes: Sequence[Example],
    is_inside: bool = False,
) -> None:
    """Runs everything that the observation needs: each example, with each set of inputs that need gradients.

    With `is_inside`, also the gradients of what `forward` computes, on which second derivatives in JAX depend.
    """
    call = function.apply if is_function_class(function) else function
    with warnings.catch_warnings(), torch.random.fork_rng(), torch.enable_grad():
        warnings.simplefilter("ignore")
        for example in examples:
            _run_with_subsets(call, example)
            for method in methods:
                _run_method(function, method, example)
        for example in sizes:
            _run_with_subsets(call, example)
        for example in examples if is_inside else ():
            with suppress(Exception):  # The code may update its inputs in place.
                _run(partial(_call_forward, function), example, example.differentiable)


def _run_with_subsets(call: Callable[..., Any], example: Example) -> None:
    """Calls a function with each set of inputs that need gradients. Not all code accepts each."""
    for wanted in subsets(example.inexact):
        with suppress(*([] if [*wanted] == example.differentiable else [Exception])):
            _run(call, example, wanted)


def _call_forward(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` as a Python function, which autograd differentiates."""
    base: Any = torch.autograd.Function
    ctx: Any = torch.autograd.function.FunctionCtx()
    ctx.needs_input_grad = tuple(isinstance(x, torch.Tensor) and x.requires_grad for x in args)
    contexts = [ctx] if function.setup_context is base.setup_context else []
    return function.forward(*contexts, *args, **kwargs)


def _run_in_double(function: Any, methods: Sequence[str], examples: Sequence[Example]) -> None:
    """Runs the examples in double precision, if the code accepts it."""
    for example in examples:
        with suppress(Exception):
            _run_all(function, methods, [example.map(in_double, example.inexact)], [])


def _is_single(values: Sequence[Any]) -> bool:
    """Whether some of the observed values have single precision, or less."""
    dtypes = {x.dtype for x in values if isinstance(x, ObservedTensor)}
    return any((dtype.is_floating_point or dtype.is_complex) and torch.finfo(dtype).eps > 1e-9 for dtype in dtypes)


def _run(call: Callable[..., Any], example: Example, wanted: Sequence[int]) -> None:
    """Calls a function, and differentiates all of its outputs, and each of them."""
    args, kwargs, inputs = example.in_torch(wanted)
    outputs = _differentiable(call(*args, **kwargs))
    if not inputs or not outputs:
        return
    for chosen in [outputs, *([[x] for x in outputs] if len(outputs) > 1 else [])]:
        torch.autograd.grad(chosen, inputs, [torch.ones_like(x) for x in chosen], retain_graph=True, allow_unused=True)
    with suppress(RuntimeError):  # Second derivatives, which not all code has.
        weights = [torch.full_like(x, 0.5).requires_grad_() for x in outputs]  # `backward` may treat 1 in another way.
        found = torch.autograd.grad(outputs, inputs, weights, create_graph=True, allow_unused=True)
        sums = [x.abs().sum() for x in _differentiable(found)]
        if sums:
            torch.autograd.grad(sums, [*inputs, *weights], allow_unused=True)


def _differentiable(returned: Any) -> list[torch.Tensor]:
    leaves = torch_tree.tree_leaves(returned)
    return [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]


def _run_method(function: Any, method: str, example: Example) -> None:
    """Runs `jvp` or `vmap` of a Function. Raises if the Function does not define it."""
    base: Any = torch.autograd.Function
    args, kwargs, _ = example.in_torch(())
    if getattr(function, method) is getattr(base, method):
        raise NotImplementedError(method)
    if method == "jvp":
        with torch.autograd.forward_ad.dual_level():
            make_dual: Any = torch.autograd.forward_ad.make_dual
            tangents = [make_dual(x, torch.ones_like(x)) if _is_floating(x) else x for x in args]
            function.apply(*tangents, **kwargs)
    else:
        dims = tuple(0 if isinstance(x, torch.Tensor) else None for x in args)
        batched = [torch.stack([x, x]) if isinstance(x, torch.Tensor) else x for x in args]
        torch.vmap(function.apply, dims)(*batched)


def _is_floating(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def _constants(observation: ObservedRun, statics: Sequence[Any]) -> list[float]:
    """Returns numbers at which the code may have ties or bounds: those that occur in it."""
    nodes = [n for _, node in observation.functions.values() for n in ast.walk(node)]
    found = [*(n.value for n in nodes if isinstance(n, ast.Constant)), *statics]
    numbers = {float(x) for x in found if isinstance(x, (int, float)) and abs(x) < 1e4}
    return sorted({0.0, 0.5, 1.0, *map(abs, numbers)})[:24]
