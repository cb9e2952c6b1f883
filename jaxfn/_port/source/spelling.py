"""Templates of JAX code, and the texts that are spliced into them and into the user's code."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress


class NoRuleError(Exception):
    """A part of the code cannot be rewritten. The caller adds the line."""


class ReadsValuesError(NoRuleError):
    """A part of the code needs the values of tensors, which they have outside `jax.jit` only."""


def parse_expression(text: str) -> ast.expr:
    """Parses an expression or index, which may span lines."""
    expression = ast.parse(f"_[\n{text}\n]", mode="eval").body
    assert isinstance(expression, ast.Subscript)
    return expression.slice


def grouped(before: str, text: str, after: str) -> str:
    """Returns the text of an expression, in parentheses if code with it would mean something else without them."""
    parsed: list[str | None] = [None, None]
    for i, part in enumerate((text, f"({text})")):
        with suppress(SyntaxError):
            parsed[i] = ast.dump(parse_expression(f"{before}{part}{after}"))
    bare, with_parentheses = parsed
    return text if bare == with_parentheses or with_parentheses is None else f"({text})"


def as_operand(text: str) -> str:
    """Returns the text of an expression to which an attribute or an index can be added."""
    return grouped("", text, ".x")


_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_OPTIONAL = re.compile(r"(?:, )?(?:\w+=)?\{(\w+)\?\}")


def fields(template: str) -> list[str]:
    """Returns the names of the arguments in a template."""
    return [match[1] for match in _FIELD.finditer(template)]


def select(template: str, passed: set[str]) -> str:
    """Returns a template without the optional arguments, and with the defaults, that a call does not pass.

    `sum({x}, axis={dim?})` has an optional argument, and `{dim:-1}` a default; that of `{dtype:result}` is the dtype
    that torch returned.
    """

    def optional(match: re.Match[str]) -> str:
        return match[0].replace("?}", "}") if match[1] in passed else ""

    def default(match: re.Match[str]) -> str:
        if match[2] is None or match[1] in passed:
            return "{" + match[1] + "}"
        return "{dtype_of_result}" if match[2] == "result" else match[2]

    return _FIELD.sub(default, re.sub(r"([(\[]), ", r"\1", _OPTIONAL.sub(optional, template)))


def fill(template: str, arguments: Mapping[str, str]) -> str:
    """Returns a template, after `select`, with the texts of its arguments."""
    done = ""
    while (match := _FIELD.search(template)) is not None:
        done, template = done + template[: match.start()], template[match.end() :]
        text = arguments[match[1]]
        # A field is an expression in Python's grammar, a set, so that a partly filled template can be parsed.
        text = text if match[1].endswith("_args") else grouped(done, text, template)
        done += text if _is_complete(f"{done}{text}{template}") else f"({text})"
    return done + template


def _is_complete(text: str) -> bool:
    """Whether an expression is one also without brackets around it, although it may span lines."""
    try:
        ast.parse(text, mode="eval")
    except SyntaxError:
        return False
    return True
