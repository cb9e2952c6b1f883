"""What the source text of user code says that running it does not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any


def place_of(function: Callable[..., Any]) -> str | None:
    """Where a function was written, "file:line"; `None` where it does not say."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def place_without_return(function: Callable[..., Any]) -> str | None:
    """The file and line of a function that has no return statement.

    Returns:
      "file:line"; `None` where there is a return statement, or no source text to tell.
    """
    place = place_of(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):  # a class with __call__, a built-in, an interpreter's prompt
        return None
    definition = tree.body[0] if tree.body else None
    if not isinstance(definition, ast.FunctionDef):  # a lambda always returns
        return None
    if any(isinstance(node, (ast.Return, ast.Raise)) for node in _statements(definition.body)):
        return None
    return place


def _statements(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All that is in these statements, less what is in functions and classes defined there."""
    pending: list[ast.AST] = list(body)
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
