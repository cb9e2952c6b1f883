"""The statement of user code that reads a value, found in the syntax tree of its file by the running instruction.

If one outcome of the condition of an `if` or an `assert` only raises or warns, the condition is a *check*: it decides
whether the code complains, and not what it computes.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from jaxfn._torch.graph.source_lines import is_user_code, running_frames

_Span = tuple[int, int, int, int]  # The first line and column, the last line and column.

# Instructions that convert the value of the one before to a bool, or jump by it.
_CONDITIONS = ("CACHE", "TO_BOOL", "COPY", "UNARY_NOT", "NOT_TAKEN", "EXTENDED_ARG", "POP_JUMP", "JUMP_IF")
# The code that runs user code in a trace.
_CALLERS = str(Path(__file__).parents[1] / "convert")
_RAISING_CONTEXTS = ("no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "autocast", "catch_warnings")
_WARNINGS = ("warn", "warning", "error", "info", "debug", "log", "print")


class Purpose(NamedTuple):
    """The purpose of a read.

    Attributes:
      kind: "check", "branch" or "loop"; `None` if it is not a condition.
      passing: The value with which a check does not complain; `None` if that does not follow from the statement, or if
        the code may handle the exception.
    """

    kind: str | None = None
    passing: bool | None = None


def running_purpose() -> Purpose:
    """Returns what the running line of user code reads a value for."""
    users: list[FrameType] = []
    for frame in running_frames():
        if frame.f_code.co_filename.startswith(_CALLERS):
            break
        users += [frame] if is_user_code(frame.f_code.co_filename) else []
    purpose = _purpose(users)
    return purpose._replace(passing=None) if any(map(_handles_exceptions, users)) else purpose


def _purpose(frames: Sequence[FrameType]) -> Purpose:
    """Returns what the innermost frame reads a value for; if it returns the value, what its caller does with it."""
    if not frames:
        return Purpose()
    span, path = _span(frames[0]), _path(frames[0])
    if any(isinstance(node, ast.IfExp) and _contains(node.test, span) for node in path):
        return Purpose("branch")
    match next((node for node in reversed(path) if isinstance(node, ast.stmt)), None):
        case ast.While(test=test) if _contains(test, span):
            return Purpose("loop")
        case ast.Assert(test=test) if _contains(test, span):
            return Purpose("check", _passing_value(test, True, span))
        case ast.If(test=test, body=body, orelse=orelse) if _contains(test, span):
            if not (_only_complains(body) or _only_complains(orelse)):
                return Purpose("branch")
            return Purpose("check", _passing_value(test, not _only_complains(body), span))
        case ast.Return(value=ast.expr() as value) if len(frames) > 1:
            purpose = _purpose(frames[1:])
            wanted = purpose.passing
            return purpose._replace(passing=None if wanted is None else _passing_value(value, wanted, span))
        case _:
            return Purpose()


def _passing_value(condition: ast.expr, wanted: bool, span: _Span) -> bool | None:
    """Returns the value of the part of a condition at `span` with which the condition is `wanted`, if it decides."""
    if _span_of(condition) == span:
        return wanted
    match condition:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _passing_value(operand, not wanted, span)
        case ast.BoolOp(values=values):
            return next((_passing_value(x, wanted, span) for x in values if _contains(x, span)), None)
        case ast.Call(func=ast.Name(id="bool"), args=[argument]):
            return _passing_value(argument, wanted, span)
        case _:
            return None


def _only_complains(body: Sequence[ast.stmt]) -> bool:
    """Whether statements always raise, or only warn and print."""
    if body and isinstance(body[-1], ast.Raise):
        leaves = (ast.Return, ast.Break, ast.Continue, ast.Try, ast.Yield)
        return not any(isinstance(node, leaves) for statement in body for node in ast.walk(statement))
    calls = [x.value for x in body if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call)]
    return len(calls) == len(body) > 0 and all(_name(call.func) in _WARNINGS for call in calls)


def _handles_exceptions(frame: FrameType) -> bool:
    """Whether a frame may handle an exception where it is running: inside `try`, or most `with` statements."""
    path = _path(frame)
    tries = [node for node in path if isinstance(node, (ast.Try, ast.TryStar))]
    return any(x in path for node in tries for x in node.body) or any(
        isinstance(node, ast.With) and not all(_raises(item.context_expr) for item in node.items) for node in path
    )


def _raises(context: ast.expr) -> bool:
    """Whether a context manager is known to raise the exceptions inside it again."""
    return isinstance(context, ast.Call) and _name(context.func) in _RAISING_CONTEXTS


def _name(function: ast.expr) -> str | None:
    """Returns the last part of a function's name."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _span(frame: FrameType) -> _Span:
    """Returns where the running instruction of a frame, or the one whose value it tests, is in the source."""
    code, index = frame.f_code, frame.f_lasti // 2
    while index and dis.opname[code.co_code[2 * index]].startswith(_CONDITIONS):
        index -= 1
    line, last_line, column, last_column = list(code.co_positions())[index]
    return line or 0, column or 0, last_line or 0, last_column or 0


def _path(frame: FrameType) -> list[ast.AST]:
    """Returns the nodes around the running instruction inside its function, the innermost last; none without source."""
    code = frame.f_code
    tree = _syntax_tree("".join(linecache.getlines(code.co_filename)))  # by text, as another file may have had the name
    path = [] if tree is None else list(_nodes_around(tree, _span(frame)))
    definitions = [i for i, node in enumerate(path) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    if not definitions:
        return []
    found = path[definitions[-1]]
    # The file may have changed since it was imported.
    line = min(_span_of(x)[0] for x in (found, *getattr(found, "decorator_list", [])))
    is_running = (getattr(found, "name", "<lambda>"), line) == (code.co_name, code.co_firstlineno)
    return path[definitions[-1] + 1 :] if is_running else []


def _nodes_around(node: ast.AST, span: _Span) -> Iterator[ast.AST]:
    """Yields the descendants of a node that contain a span, the outermost first."""
    for child in ast.iter_child_nodes(node):
        if not hasattr(child, "lineno"):
            yield from _nodes_around(child, span)
        elif _contains(child, span):
            yield child
            yield from _nodes_around(child, span)


@functools.lru_cache(maxsize=64)
def _syntax_tree(text: str) -> ast.AST | None:
    try:
        return ast.parse(text)
    except SyntaxError:
        return None


def _span_of(node: ast.AST) -> _Span:
    expression: ast.expr = node  # pyright: ignore[reportAssignmentType]
    # Columns of a syntax tree count bytes, as those of instructions do.
    return expression.lineno, expression.col_offset, expression.end_lineno or 0, expression.end_col_offset or 0


def _contains(node: ast.AST, span: _Span) -> bool:
    first, last = _span_of(node)[:2], _span_of(node)[2:]
    return first <= span[:2] and span[2:] <= last
