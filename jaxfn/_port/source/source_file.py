"""Source files of the user's code: definitions in them, and the positions of syntax nodes in their text."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import CodeType
from typing import Any

from jaxfn._torch.values.errors import TranslationError

# The offsets of the first byte of a node, and of the byte after its last one, in the file.
Span = tuple[int, int]
FunctionNode = ast.FunctionDef | ast.Lambda
Definition = ast.FunctionDef | ast.ClassDef
Node = ast.expr | ast.stmt | ast.keyword | ast.arg | ast.alias


class SourceFile:
    """The text of a Python file and its syntax tree.

    Attributes:
      path: The file's path.
      text: Its text as bytes, which the positions count.
    """

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text.encode()
        self.tree = ast.parse(text)
        self._line_starts = [0]
        for line in self.text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    def span(self, node: Node) -> Span:
        """Returns the position of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_starts[node.lineno - 1] + node.col_offset
        return start, self._line_starts[node.end_lineno - 1] + node.end_col_offset

    def line_span(self, first: int, last: int) -> Span:
        """Returns the position of the lines from `first` to `last`."""
        return self._line_starts[first - 1], self._line_starts[last]

    def lines_span(self, node: Node) -> Span:
        """Returns the position of a node's lines."""
        assert node.end_lineno is not None
        return self.line_span(node.lineno, node.end_lineno)

    def edited(self, span: Span, edits: Mapping[Span, str]) -> str:
        """Returns a part of the text with parts of it replaced."""
        position, end = span
        pieces: list[str] = []
        for (start, stop), text in sorted(edits.items()):
            if start >= position:  # It is not inside a part that was replaced as a whole.
                pieces += [self.slice((position, start)), text]
                position = stop
        return "".join((*pieces, self.slice((position, end))))

    def slice(self, span: Span) -> str:
        """Returns the text between two positions."""
        return self.text[slice(*span)].decode()

    def segment(self, node: Node) -> str:
        """Returns the text of a node."""
        return self.slice(self.span(node))

    def locates_values(self, node: ast.JoinedStr) -> bool:
        """Whether the values of an f-string are at their positions: before Python 3.12, ast may return others."""
        values = [x.value for x in formatted_values(node)]
        with suppress(SyntaxError, IndexError, UnicodeDecodeError):
            parsed = [ast.parse(f"({self.segment(n)})", mode="eval").body for n in values]
            return list(map(ast.dump, parsed)) == list(map(ast.dump, values))
        return False

    def line(self, node: Node) -> str:
        """Returns the line of a node as part of a message."""
        text = self.slice(self.line_span(node.lineno, node.lineno)).strip()
        return f'\n  File "{self.path}", line {node.lineno}\n    {text}'

    def function(self, code: CodeType) -> FunctionNode | None:
        """Returns the definition of a function with this code; `None` if there is none, or more than one."""
        found: list[FunctionNode] = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.Lambda))
            and getattr(node, "name", "<lambda>") == code.co_name
            and min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))]) == code.co_firstlineno
        ]
        if len(found) > 1:  # Lambdas of one line.
            positions = [(line, column) for line, _, column, _ in code.co_positions() if column and line]
            found = [n for n in found if isinstance(n, ast.Lambda) and (n.body.lineno, n.body.col_offset) in positions]
        return found[0] if len(found) == 1 else None

    def enclosing_class(self, node: ast.AST) -> ast.ClassDef | None:
        """Returns the class whose method a definition is."""
        parent = self.parents.get(node)
        while isinstance(parent, (ast.If, ast.Try, ast.With)):
            parent = self.parents.get(parent)
        return parent if isinstance(parent, ast.ClassDef) else None


# Packages whose functions accept tensors and JAX arrays.
SHARED_PACKAGES = frozenset({"einops"})


def is_importable(module: str) -> bool:
    """Whether the written module may import a module."""
    package = module.partition(".")[0]
    return package in sys.stdlib_module_names or package in {"numpy", "jax", "jaxfn", *SHARED_PACKAGES}


class SourceFiles:
    """The files that have been read."""

    def __init__(self) -> None:
        self._files: dict[str, SourceFile] = {}

    def of(self, definition: Callable[..., Any]) -> SourceFile:
        """Returns the file that defines a function or class.

        Raises:
          TranslationError: The source is not available.
        """
        code = getattr(definition, "__code__", None)
        path = code.co_filename if code is not None else sys.modules[definition.__module__].__file__ or ""
        if path not in self._files:
            try:
                lines, _ = inspect.findsource(definition)
                self._files[path] = SourceFile(path, "".join(lines))
            except (OSError, TypeError, SyntaxError) as error:
                name = definition.__qualname__
                raise TranslationError(
                    f"the source of {name} is not available ({error}), so it cannot be rewritten"
                ) from error
        return self._files[path]


def formatted_values(node: ast.JoinedStr) -> list[ast.FormattedValue]:
    """Returns the values in an f-string, and those in their formats."""
    return [n for n in ast.walk(node) if isinstance(n, ast.FormattedValue)]


# Methods and functions of torch whose result shares the memory of the tensor.
VIEWS = frozenset(
    {"contiguous", "detach", "diagonal", "flatten", "narrow", "permute", "ravel", "reshape", "reshape_as", "select"}
    | {"squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze", "view", "view_as"}
)


def viewed(node: ast.AST) -> ast.expr | None:
    """Returns the tensor of which an expression such as `x[i]` or `x.view(-1)` is a view; `None` if it is none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in VIEWS:
        is_function = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch" and node.args
        return node.args[0] if is_function else node.func.value
    if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        return node.value
    return None


def viewed_name(node: ast.expr) -> ast.Name | None:
    """Returns the variable that an expression such as `x` or `x.view(-1)[i]` is a view of."""
    while (base := viewed(node)) is not None:
        node = base
    return node if isinstance(node, ast.Name) else None


def views_in(node: ast.AST) -> dict[str, tuple[ast.expr, ast.Name]]:
    """Returns the variables of a function that are assigned once, a view: the view, and the variable that it is of."""
    updates = [n.target for n in ast.walk(node) if isinstance(n, ast.AugAssign)]
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
    stores = [n.id for n in names if n not in updates]
    stores += [n.arg for n in ast.walk(node) if isinstance(n, ast.arg)]
    found: dict[str, tuple[ast.expr, ast.Name]] = {}
    for s in ast.walk(node):
        target = s.targets[0] if isinstance(s, ast.Assign) and len(s.targets) == 1 else None
        if isinstance(s, ast.Assign) and isinstance(target, ast.Name) and stores.count(target.id) == 1:
            name = viewed_name(s.value)
            if name is None or name is s.value:
                continue
            root = name.id
            while root in found:
                root = found[root][1].id
            if root != target.id:  # As in `x = x.detach()`.
                found[target.id] = s.value, name
    return found


def root_name(node: ast.expr) -> ast.Name | None:
    """Returns the variable that an expression such as `x`, `x[i]` or `x.data` is part of."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node if isinstance(node, ast.Name) else None


def bound_names(node: ast.AST) -> set[str]:
    """Returns the names that a function's code binds: parameters and assigned variables, without nested functions."""
    names: set[str] = set()
    pending = list(ast.iter_child_nodes(node))
    while pending:
        child = pending.pop()
        if isinstance(child, ast.arg):
            names.add(child.arg)
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            names.add(child.name)
            continue
        elif isinstance(child, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            continue
        elif isinstance(child, ast.Name) and not isinstance(child.ctx, ast.Load):
            names.add(child.id)
        pending += ast.iter_child_nodes(child)
    return names
