"""The entries of the table of rules, and how they bind the arguments of a call."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from jaxfn._port.source import rules
from jaxfn._port.source.observe import ObservedTensor
from jaxfn._port.source.spelling import select

_ENTRY = re.compile(r"^(?P<names>[^(\[]+)(?P<method>\[method\])?\((?P<parameters>.*?)\) => (?P<code>.*)$")
# The names that some functions of torch accept for NumPy's sake, or had in older versions.
_ALIASES = {"axis": "dim", "keepdims": "keepdim", "self": "input", "x": "input", "a": "input", "tensor": "input"}


class Argument(NamedTuple):
    """An argument of a call: its JAX code, its first observed value, and its syntax node."""

    text: str
    value: Any
    node: ast.expr

    @property
    def is_starred(self) -> bool:
        return isinstance(self.node, ast.Starred)


class TableEntry(NamedTuple):
    """An entry of the table.

    Attributes:
      is_method: Whether it only applies to the method of this name, and not to a function.
      plain: The JAX code.
      strict: The JAX code with torch's values and derivatives everywhere; equal to `plain` if that has them.
    """

    is_method: bool
    signature: inspect.Signature
    plain: str
    strict: str

    def bind(self, args: Sequence[Argument], keywords: Mapping[str, Argument]) -> dict[str, Any] | None:
        """Returns the arguments by parameter, lists for `*args`; `None` if the entry does not accept them."""
        names = self.signature.parameters
        renamed = {name if name in names else _ALIASES.get(name, name): value for name, value in keywords.items()}
        try:
            bound = self.signature.bind(*args, **renamed).arguments
        except TypeError:
            return None

        def is_accepted(name: str, parameter: inspect.Parameter) -> bool:
            if name not in bound:
                has_none = parameter.default in (None, parameter.empty)
                return has_none or _accepts(parameter.annotation, parameter.default)
            values = bound[name] if _is_list(bound[name]) else [bound[name]]
            return all(_accepts_argument(parameter.annotation, x) for x in values)

        return bound if all(is_accepted(*item) for item in names.items()) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple) and not isinstance(value, Argument)


def _accepts_argument(annotation: Any, argument: Argument) -> bool:
    """Whether a parameter accepts an argument. One with a literal type accepts the literal, and not a variable."""
    is_literal = isinstance(argument.node, (ast.Constant, ast.UnaryOp, ast.Tuple))
    return _accepts(annotation, argument.value) and (
        is_literal or annotation in _TYPES or not isinstance(annotation, str)
    )


def _accepts(annotation: Any, value: Any) -> bool:
    if annotation is inspect.Parameter.empty:
        return True
    try:
        literal = ast.literal_eval(annotation)
    except ValueError:
        return _TYPES[annotation](value)
    return type(literal) is type(value) and literal == value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ints(value: Any) -> bool:
    return _is_int(value) or value is None or (isinstance(value, (list, tuple)) and all(map(_is_int, value)))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, ObservedTensor)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "Tensor": _is_tensor,
    "floats": lambda x: isinstance(x, float) or (_is_tensor(x) and x.dtype.is_floating_point),
    "integers": lambda x: _is_tensor(x) and not (x.dtype.is_floating_point or x.dtype.is_complex),
    "number": lambda x: isinstance(x, (int, float, complex)),
    "int": _is_int,
    "ints": _is_ints,
    "bool": lambda x: isinstance(x, bool),
    "str": lambda x: isinstance(x, str),
    "list": lambda x: isinstance(x, list),
    "dtype": lambda x: isinstance(x, torch.dtype),
}


@cache
def table() -> Mapping[str, Sequence[TableEntry]]:
    """Returns the entries of the table by name."""
    entries: dict[str, list[TableEntry]] = {}
    for line in rules.TABLE.splitlines():
        if line:
            match = _ENTRY.match(re.sub(r"\s+", " ", line))
            assert match is not None, line
            signature, is_method = _signature(match["parameters"]), match["method"] is not None
            for name_and_spelling in match["names"].split():
                name, _, spelling = name_and_spelling.partition(":")
                code = match["code"].replace("NAME", spelling or re.sub(r"^(fft|linalg)_", "", name))
                plain, _, strict = code.partition(" => ")
                entries.setdefault(name, []).append(TableEntry(is_method, signature, plain, strict or plain))
    return entries


def _signature(parameters: str) -> inspect.Signature:
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\ndef f({parameters}): pass", names)
    return inspect.signature(names["f"])


def code_of(entry: TableEntry, bound: Mapping[str, Any], strict: bool) -> str:
    """Returns the entry's code for the arguments that a call passes, with fields for these."""
    passed = {name for name, value in bound.items() if _is_list(value) or not _is_none(value)}
    lists = {f"{name}_args" for name in passed}
    return select(entry.strict if strict else entry.plain, passed | lists | {"key", "dtype_of_result"})


def _is_none(argument: Argument) -> bool:
    """Whether an argument is a literal `None`, which is then left out of the code."""
    return isinstance(argument.node, ast.Constant) and argument.node.value is None
