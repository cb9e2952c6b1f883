"""Binding a call's arguments to the parameters of `forward`, and naming them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Form(NamedTuple):
    """How the arguments of one call are arranged.

    Attributes:
      names: one per input, in signature order; the items of `*args` are called `args[0]`, `args[1]`, ...
      num_positional: how many of the inputs `forward` takes by position; the others it takes by keyword.
      num_given: one more than the index of the last input that the caller wrote out.
      variadic: the name of the `*args` parameter, whether or not it got items.
    """

    names: tuple[str, ...]
    num_positional: int
    num_given: int
    variadic: str | None = None

    def call(self, forward: Callable[..., Any], leading: tuple[Any, ...], inputs: Sequence[Any]) -> Any:
        """Calls `forward` with the inputs, after the `leading` ones (the ctx, in combined style)."""
        if len(inputs) == self.num_positional:
            return forward(*leading, *inputs)
        keywords = dict(zip(self.names[self.num_positional :], inputs[self.num_positional :], strict=True))
        return forward(*leading, *inputs[: self.num_positional], **keywords)

    def describe(self, index: int) -> str:
        """An input as error messages name it."""
        return f"input {index} ({self.names[index]!r})"


class Parameters:
    """The parameters of a `forward`, without its ctx.

    Args:
      forward: the user's function.
      takes_ctx: whether its first parameter is the ctx.
      owner: the Function's name, for messages.
    """

    def __init__(self, forward: Callable[..., Any], takes_ctx: bool, owner: str) -> None:
        self._owner = owner
        self._takes_ctx = takes_ctx
        self._of_forward = signature = inspect.signature(forward)
        parameters = list(signature.parameters.values())
        if takes_ctx:
            if not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
                raise TypeError(
                    f"{owner}.forward takes no ctx. Write forward(ctx, ...), or define "
                    "setup_context(ctx, inputs, output) beside forward(...)."
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
        self._forms = [Form(names, len(names), given) for given in range(len(names) + 1)]

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form, tuple[Any, ...]]:
        """The inputs of a call in signature order, defaults filled in, and their `Form`."""
        given = len(args)
        if self._is_plain and not kwargs and self._num_required <= given <= len(self._defaults):
            return self._forms[given], args + self._defaults[given:]
        return self._bind_any(args, kwargs)

    def _bind_any(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Form, tuple[Any, ...]]:
        try:
            bound = self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._owner}.apply{self.signature}: {error}{self._cure(args, kwargs)}") from None
        names: list[str] = []
        inputs: list[Any] = []
        num_positional = num_given = 0
        variadic: str | None = None
        for name, parameter in self.signature.parameters.items():
            written = name in bound.arguments
            value = bound.arguments.get(name, parameter.default)
            if parameter.kind is parameter.VAR_POSITIONAL:
                variadic = name
                values = value if written else ()
                names += [f"{name}[{i}]" for i in range(len(values))]
                inputs += values
                num_positional = len(inputs)
            elif parameter.kind is parameter.VAR_KEYWORD:
                items = value if written else {}
                names += items
                inputs += items.values()
            else:
                names.append(name)
                inputs.append(value)
                if parameter.kind in _POSITIONAL:
                    num_positional = len(inputs)
            if written:
                num_given = len(inputs)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise TypeError(f"{self._owner}.apply{self.signature}: {twice!r} names two inputs. Rename the parameter.")
        return Form(tuple(names), num_positional, num_given, variadic), tuple(inputs)

    def _cure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What is wrong with `forward`, where the call seems right."""
        names = list(self._of_forward.parameters)
        if names[:1] == ["self"]:
            pattern = "forward(ctx, ...)" if self._takes_ctx else "forward(...)"
            return f". A Function has no instances: make forward a static method, {pattern}, without self."
        if self._takes_ctx and names[0] != "ctx" and fits(self._of_forward, args, kwargs):
            return (
                f". The first parameter of {self._owner}.forward, {names[0]!r}, is taken for the ctx: write "
                f"forward(ctx, {names[0]}, ...), or define setup_context(ctx, inputs, output) beside it."
            )
        return ""


def fits(signature: inspect.Signature, args: Sequence[object], kwargs: Mapping[str, Any]) -> bool:
    """Whether something of this signature can be called so."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
