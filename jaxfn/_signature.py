"""The signature of `forward`, and the static part of the inputs of a call: their names and tree specs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from jaxfn._tree import ARRAY_SPEC, TreeSpec

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class InputNames(NamedTuple):
    """The names of the inputs of one call, and how `forward` takes them."""

    names: tuple[str, ...]  # in signature order; the items of `*args` are called `args[0]`, `args[1]`, ...
    num_positional: int  # how many `forward` takes by position; it takes the others by keyword
    num_passed: int  # one more than the index of the last input that the caller passed
    variadic: str | None = None  # the name of the `*args` parameter, whether or not it got items
    extra_keywords: tuple[str, ...] = ()  # the names in `**kwargs`

    def call(self, forward: Callable[..., Any], leading: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
        """Calls `forward` with the inputs, after the `leading` ones (the ctx, in combined style)."""
        if len(inputs) == self.num_positional:
            return forward(*leading, *inputs)
        keywords = dict(zip(self.names[self.num_positional :], inputs[self.num_positional :], strict=True))
        return forward(*leading, *inputs[: self.num_positional], **keywords)

    @property
    def variadic_items(self) -> list[str]:
        """The names of the items of `*args`."""
        return [name for name in self.names if name.startswith(f"{self.variadic}[")]

    def describe(self, index: int) -> str:
        """Returns an input as error messages name it."""
        return f"input {index} ({self.names[index]!r})"


class InputSpec:
    """The static part of the inputs of a call: their names and the tree spec of each."""

    def __init__(self, names: InputNames, trees: tuple[TreeSpec, ...]) -> None:
        self.names = names
        self.trees = trees
        self.are_refs = tuple(flag for tree in trees for flag in tree.are_refs)  # one per array leaf
        self.has_refs = any(self.are_refs)
        self.unperturbed = (False,) * len(self.are_refs)
        self.python_numbers = [tree.leaves[0] for tree in trees if tree.is_number]
        self.are_arrays = all(tree is ARRAY_SPEC for tree in trees)
        self._is_flat = all(tree.num_arrays == 1 for tree in trees)
        self.objects = [x for tree in trees for x in tree.objects]  # which may hold arrays
        self.mutable = [i for i, tree in enumerate(trees) if tree.is_mutable]

    def unflatten(self, arrays: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the inputs that have these array leaves."""
        if self.are_arrays:
            return tuple(arrays)
        remaining = iter(arrays)
        return tuple(tree.unflatten(remaining) for tree in self.trees)

    def needs_input_grad(self, perturbed: tuple[bool, ...]) -> tuple[bool, ...]:
        """Returns for each input whether some array leaf of it is perturbed."""
        if self._is_flat:
            return perturbed
        flags = iter(perturbed)
        return tuple(any(list(islice(flags, tree.num_arrays))) for tree in self.trees)

    def per_leaf(self) -> Iterator[int]:
        """Returns, for each array leaf, the index of its input."""
        return (i for i, tree in enumerate(self.trees) for _ in range(tree.num_arrays))

    def check_inputs_unchanged(
        self, name: str, inputs: Sequence[Any], arrays: Sequence[Any], returned: Sequence[Any]
    ) -> None:
        """Raises if `forward` has stored an array that it does not return in an object among its inputs, a copy."""
        for index in self.mutable:
            start = sum(tree.num_arrays for tree in self.trees[:index])
            tree = self.trees[index]
            path = tree.mutated_path(inputs[index], arrays[start : start + tree.num_arrays], returned)
            if path is not None:
                raise NotImplementedError(
                    f"{name}.forward changed {self.names.describe(index)}{path and ' at '}{path}. A Function "
                    "receives copies of objects that hold arrays, as under jax.jit and jax.grad, so its caller would "
                    "never see the change. Return the new state from forward, and write it back after the call."
                )


class ForwardSignature:
    """The parameters of a `forward`, without its ctx.

    `hint` returns a text that messages add if `forward` was perhaps meant to take no ctx.
    """

    def __init__(
        self, forward: Callable[..., Any], takes_ctx: bool, function_name: str, hint: Callable[[], str]
    ) -> None:
        self._function_name = function_name
        self._takes_ctx = takes_ctx
        self._separate_style_hint = hint
        self._of_forward = signature = inspect.signature(forward)
        parameters = list(signature.parameters.values())
        if takes_ctx:
            if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
                raise TypeError(
                    f"{function_name}.forward takes no ctx. Write forward(ctx, ...), or define "
                    f"setup_context(ctx, inputs, output) next to forward(...).{hint()}"
                )
            if parameters[0].kind in _POSITIONAL:
                parameters = parameters[1:]
        self.signature = signature.replace(parameters=parameters)
        positional = [p for p in parameters if p.kind in _POSITIONAL]
        self._defaults = tuple(p.default for p in positional)
        self._num_required = sum(p.default is p.empty for p in positional)
        # The usual call, plain positional arguments, needs no inspect.Signature.bind, which costs microseconds.
        self._is_plain = len(positional) == len(parameters)
        names = tuple(p.name for p in positional)
        self._names = [InputNames(names, len(names), num_passed) for num_passed in range(len(names) + 1)]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[InputNames, tuple[Any, ...]]:
        """Returns the names of a call's inputs, and the inputs in signature order with defaults filled in."""
        num_passed = len(args)
        if self._is_plain and not kwargs and self._num_required <= num_passed <= len(self._defaults):
            return self._names[num_passed], args + self._defaults[num_passed:]
        return self._bind_any(args, kwargs)

    def _bind_any(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[InputNames, tuple[Any, ...]]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._function_name}.apply{self.signature}: {error}{self._hint(args, kwargs)}") from None
        arguments = bound.arguments
        names: list[str] = []
        inputs: list[Any] = []
        num_positional = num_passed = 0
        variadic: str | None = None
        extra_keywords: tuple[str, ...] = ()
        for name, parameter in self.signature.parameters.items():
            kind = parameter.kind
            if kind is parameter.VAR_POSITIONAL:
                variadic = name
                items = arguments.get(name, ())
                names += [f"{name}[{i}]" for i in range(len(items))]
                inputs += items
            elif kind is parameter.VAR_KEYWORD:
                keywords = arguments.get(name, {})
                extra_keywords = tuple(keywords)
                names += keywords
                inputs += keywords.values()
            else:
                names.append(name)
                inputs.append(arguments.get(name, parameter.default))
            if kind in _POSITIONAL or kind is parameter.VAR_POSITIONAL:
                num_positional = len(inputs)
            if name in arguments:
                num_passed = len(inputs)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise TypeError(
                f"{self._function_name}.apply{self.signature}: {twice!r} names two inputs. Rename the parameter."
            )
        return InputNames(tuple(names), num_positional, num_passed, variadic, extra_keywords), tuple(inputs)

    def _hint(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Returns what is wrong with `forward` if the call itself seems right."""
        names = list(self._of_forward.parameters)
        if names[:1] == ["self"]:
            pattern = "forward(ctx, ...)" if self._takes_ctx else "forward(...)"
            return f". A Function has no instances: make forward a static method, {pattern}, without self."
        if self._takes_ctx and names[0] != "ctx" and fits(self._of_forward, args, kwargs):
            return (
                f". The first parameter of {self._function_name}.forward, {names[0]!r}, is taken for the ctx: write "
                f"forward(ctx, {names[0]}, ...), or define setup_context(ctx, inputs, output) next to it."
                f"{self._separate_style_hint()}"
            )
        return ""


def fits(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this signature can be called with these arguments."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
