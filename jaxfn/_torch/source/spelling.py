"""Templates of JAX code: arguments that are spliced in, with parentheses where operators need them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Mapping


class NoRuleError(Exception):
    """A part of the code cannot be rewritten. The caller adds the line."""


# From the loosest to the tightest binding of operators.
_COMPARISON, _ATOM = 6, 16
_BINARY: dict[type[ast.operator], int] = {
    ast.BitOr: 7,
    ast.BitXor: 8,
    ast.BitAnd: 9,
    **dict.fromkeys([ast.LShift, ast.RShift], 10),
    **dict.fromkeys([ast.Add, ast.Sub], 11),
    **dict.fromkeys([ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.MatMult], 12),
    ast.Pow: 14,
}
_UNARY = 13


def precedence(node: ast.AST) -> int:
    """Returns how tightly an expression binds: an operand needs parentheses if it binds less than its operator."""
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)]
    if isinstance(node, ast.UnaryOp):
        return 5 if isinstance(node.op, ast.Not) else _UNARY
    if isinstance(node, ast.BoolOp):
        return 4 if isinstance(node.op, ast.And) else 3
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        return _ATOM - 1  # `1.shape` is not an expression.
    if isinstance(node, ast.Tuple):
        return 0
    loose: dict[type[ast.AST], int] = {
        ast.Compare: _COMPARISON,
        ast.IfExp: 2,
        ast.Lambda: 1,
        ast.NamedExpr: 0,
        ast.Starred: 0,
        ast.Await: 15,
    }
    return loose.get(type(node), _ATOM)


def required(parent: ast.AST | None, child: ast.AST) -> int:
    """Returns how tightly an expression has to bind in this position of `parent`, to need no parentheses."""
    if isinstance(parent, ast.BinOp):
        level, is_right = precedence(parent), child is parent.right
        return level + (is_right != isinstance(parent.op, ast.Pow)) - (is_right and isinstance(parent.op, ast.Pow))
    if isinstance(parent, (ast.UnaryOp, ast.BoolOp)):
        return precedence(parent) + isinstance(parent, ast.BoolOp)
    if isinstance(parent, ast.Compare):
        return _COMPARISON + 1
    if isinstance(parent, ast.Attribute) or (isinstance(parent, ast.Subscript) and child is parent.value):
        return _ATOM
    if isinstance(parent, ast.Call) and child is parent.func:
        return _ATOM
    if isinstance(parent, ast.Starred):
        return _BINARY[ast.BitOr]
    if isinstance(parent, ast.IfExp):
        return 2 if child is parent.orelse else 3
    is_index = isinstance(parent, ast.Subscript) and not isinstance(child, ast.Starred)
    return 0 if parent is None or is_index or isinstance(parent, ast.stmt) else 1


def parse_expression(text: str) -> ast.expr:
    """Parses an expression, which may span lines."""
    return ast.parse(f"(\n{text}\n)", mode="eval").body


def parenthesize(text: str, parent: ast.AST | None, child: ast.AST) -> str:
    """Returns the text of an expression, in parentheses if it needs them in place of `child`."""
    stripped = text.strip()
    node = parse_expression(stripped)
    if stripped.startswith("(") and node.lineno >= 2 and (node.col_offset or node.lineno > 2):
        return text  # It has parentheses. (A tuple's are part of it.)
    if stripped.startswith("(") and isinstance(node, ast.Tuple) and node.lineno == 2:
        return text
    return f"({text})" if precedence(node) < required(parent, child) else text


def as_operand(text: str) -> str:
    """Returns the text of an expression to which an attribute or an index can be added."""
    parent = ast.parse("x.y", mode="eval").body
    return parenthesize(text, parent, next(ast.iter_child_nodes(parent)))


_OPTIONAL = re.compile(r"\[\[(.*?)\]\]")
_FIELD = re.compile(r"\{(\w+)(?::([^}]*))?\}")


def fields(template: str) -> list[str]:
    """Returns the names of the arguments in a template."""
    return [match[1] for match in _FIELD.finditer(template)]


def select(template: str, passed: set[str]) -> str:
    """Returns a template without the optional parts, and with the defaults, of arguments that are not passed.

    A part in double brackets, as in `sum({x}[[, axis={dim}]])`, is optional, and `{dim:-1}` has a default; that of
    `{dtype:result}` is the dtype that torch returned.
    """

    def optional(match: re.Match[str]) -> str:
        return match[1] if passed.issuperset(fields(match[1])) else ""

    def default(match: re.Match[str]) -> str:
        if match[2] is None or match[1] in passed:
            return "{" + match[1] + "}"
        return "{dtype_of_result}" if match[2] == "result" else match[2]

    return _FIELD.sub(default, re.sub(r"([(\[]), ", r"\1", _OPTIONAL.sub(optional, template)))


def fill(template: str, arguments: Mapping[str, str]) -> str:
    """Returns a template, after `select`, with the texts of its arguments."""
    names = {f"_field_{name}_": name for name in fields(template)}
    marked = _FIELD.sub(lambda match: f"_field_{match[1]}_", template)
    tree = ast.parse(marked, mode="eval").body
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    pieces: list[str] = []
    end = 0
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in names]
    for node in sorted(found, key=lambda node: node.col_offset):
        text = arguments[names[node.id]]
        is_list = names[node.id].endswith("_args")  # Several arguments of a call.
        pieces += [marked[end : node.col_offset], text if is_list else parenthesize(text, parents.get(node), node)]
        end = node.col_offset + len(node.id)
    return "".join((*pieces, marked[end:]))


_WIDTH = 120


def wrap(line: str) -> str:
    """Breaks a line of code that is too long, inside its longest brackets."""
    if len(line) <= _WIDTH:
        return line
    brackets = _brackets(line)
    if not brackets:
        return line
    start, end, commas = max(brackets, key=lambda bracket: bracket[1] - bracket[0])
    indent = line[: len(line) - len(line.lstrip())]
    inner = line[start + 1 : end]
    new = f"{indent}    {inner},"
    if len(new) > _WIDTH or not commas:
        ends = [*commas, end]
        starts = [start + 1, *(comma + 1 for comma in commas)]
        items = [line[a:b].strip() for a, b in zip(starts, ends, strict=True)]
        mark = "," if commas or line[start - 1 : start].isidentifier() else ""
        new = "\n".join(wrap(f"{indent}    {item}{mark}") for item in items if item)
    return f"{line[: start + 1]}\n{new}\n{wrap(indent + line[end:])}"


def _brackets(line: str) -> list[tuple[int, int, list[int]]]:
    """Returns the outermost brackets of a line: start, end, and the commas between them."""
    found: list[tuple[int, int, list[int]]] = []
    opened: list[int] = []
    commas: list[int] = []
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            column = token.start[1] + len(line) - len(line.lstrip())
            if token.string in "([{" and token.type == tokenize.OP:
                opened.append(column)
                commas = commas if len(opened) > 1 else []
            elif token.string in ")]}" and token.type == tokenize.OP and opened:
                start = opened.pop()
                if not opened:
                    found.append((start, column, commas))
            elif token.string == "," and len(opened) == 1:
                commas.append(column)
    except tokenize.TokenError:  # Brackets that other lines close.
        pass
    return found
