"""Rewrites the definition of a function for JAX: only the parts that call torch, or update tensors in place, change."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from jaxfn._torch.source import rules
from jaxfn._torch.source.expressions import ExpressionRewriter, RewriteOptions, callee_name
from jaxfn._torch.source.observe import ObservedTensor
from jaxfn._torch.source.source_file import FunctionNode, SourceFile, Span, bound_names
from jaxfn._torch.source.spelling import NoRuleError, fill
from jaxfn._torch.source.typecheck import OtherValuesError
from jaxfn._torch.source.vjp_regions import Region, find_regions, gradient_of

Site = tuple[str, Span]


_NO_BODY = (ast.Raise, ast.Pass, ast.Break, ast.Continue)


class FunctionRewriter(ExpressionRewriter):
    """Rewrites one function, with the functions defined inside it.

    Attributes:
      edits: The replaced parts of the file's text, by position.
      num_draws: The number of random draws.
    """

    def __init__(
        self, file: SourceFile, node: FunctionNode, options: RewriteOptions, may_draw: bool, in_numpy: Collection[str]
    ) -> None:
        super().__init__(file, node, options, may_draw, in_numpy)
        self.edits: dict[Span, str] = {}
        self._regions = find_regions(node, self._value)

    def run(self) -> None:
        """Fills `edits`.

        Raises:
          TranslationError: A statement cannot be rewritten.
        """
        node = self._node
        if isinstance(node, ast.Lambda):
            self._replace_expression(node.body)
            return
        self._signature(node)
        self._block(node.body)

    def reject(self, reason: str) -> None:
        """Replaces the body of a function that did not run."""
        node = self._node
        assert isinstance(node, ast.FunctionDef)
        self._signature(node)
        body = node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body
        line = f"{self._file.path.rpartition('/')[2]}, line {node.lineno}"
        span = self._file.span(body[0])[0], self._file.span(body[-1])[1]
        self.edits[span] = f'raise NotImplementedError("{reason} {line}")'

    def _ran(self, statement: ast.stmt) -> bool:
        start, _ = self._file.span(statement)
        return (self._file.path, start) in self._options.observation.statements

    # Statements

    def _block(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            is_declaration = isinstance(statement, (ast.Global, ast.Nonlocal))
            if is_docstring or is_declaration or self._ran(statement):
                region = next((r for r in self._regions if statement in r.statements), None)
                if region is None:
                    self._statement(statement)
                else:
                    self._in_region(region, statement)
            elif not isinstance(statement, _NO_BODY) or self._mentions_torch(statement):
                start, end = self._file.span(statement)[0], self._file.span(body[-1])[1]
                self.edits[start, end] = self._not_reached(statement)
                return

    def _in_region(self, region: Region, s: ast.stmt) -> None:
        """Rewrites a statement as one of the function that `jax.vjp` differentiates."""
        base = " " * (s.col_offset - self._removed_indent)
        self._removed_indent -= 4
        self._statement(s)
        self._removed_indent += 4
        assert s.end_lineno is not None
        strings = [n for n in ast.walk(s) if isinstance(n, ast.Constant) and n.end_lineno != n.lineno]
        for line in range(s.lineno, s.end_lineno + 1):
            if not any(n.lineno < line <= (n.end_lineno or 0) for n in strings):
                start, end = self._file.line_span(line, line)
                indent = next((k for k, text in self.edits.items() if k[0] == start and not text), (start, start))
                self.edits[indent] = "    " if indent[1] < end else ""  # Not of a line that was removed.
                if s is region.statements[0] and line == s.lineno:
                    self.edits[indent] = f"{base}{region.head()}\n{self.edits[indent]}"
        if s is region.statements[-1]:
            _, end = self._file.line_span(s.end_lineno, s.end_lineno)
            lines = region.tail(self._options.spell("jax.vjp"))
            self.edits[end, end] = "".join(f"{base}{line}\n" for line in lines)

    def _not_reached(self, statement: ast.stmt) -> str:
        line = f"{self._file.path.rpartition('/')[2]}, line {statement.lineno}"
        return f'raise NotImplementedError("no example reached {line}")'

    def _mentions_torch(self, node: ast.AST) -> bool:
        names = {"torch", "Tensor", "F"}
        return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))

    def _statement(self, s: ast.stmt) -> None:
        self._before, self._after = [], []
        try:
            method: Callable[[Any], None] | None = getattr(self, f"_{type(s).__name__.lower()}", None)
            if method is None:
                raise NoRuleError(f"a statement of this kind ({type(s).__name__}) has no rule")
            method(s)
        except (NoRuleError, OtherValuesError) as error:
            self._error(s, str(error))

    def _replace(self, s: ast.stmt, *lines: str) -> None:
        """Replaces a statement by lines, between those of updates inside it and of variables that share its memory."""
        new = [*self._before, *lines, *self._after]
        if not new:
            self._remove(s)
            return
        indent = " " * (s.col_offset - self._removed_indent)
        self.edits[self._file.span(s)] = f"\n{indent}".join(new)

    def _remove(self, s: ast.stmt) -> None:
        parent = self._file.parents[s]
        body = next(b for b in (getattr(parent, f, []) for f in ("body", "orelse", "finalbody")) if s in b)
        if len(body) == 1:
            self.edits[self._file.span(s)] = "pass"
        else:
            assert s.end_lineno is not None
            start, end = self._file.line_span(s.lineno, s.end_lineno)
            self.edits = {k: text for k, text in self.edits.items() if not start <= k[0] < end}
            self.edits[start, end] = ""

    def _replace_expression(self, node: ast.expr | None) -> None:
        """Rewrites an expression of a statement that is not replaced as a whole."""
        if node is None:
            return
        text = self._render(node)
        if self._before:
            raise NoRuleError("a tensor is updated in place inside this statement; update it in a statement alone")
        if text != self._file.segment(node):
            self.edits[self._file.span(node)] = text

    def _simple(self, s: ast.stmt, value: ast.expr | None, text: str = "") -> None:
        """Rewrites the value of a statement, which follows in-place updates inside it."""
        if value is None:
            return
        text = text or self._render(value)
        targets = s.targets if isinstance(s, ast.Assign) else []
        if [text] == [x.id for x in targets if isinstance(x, ast.Name)] and len(targets) == 1 and not self._before:
            self._remove(s)
        elif self._before:
            segment = self._file.segment(s)
            start = self._file.span(value)[0] - self._file.span(s)[0]
            self._replace(s, segment.encode()[:start].decode() + text)
        elif text != self._file.segment(value):
            self.edits[self._file.span(value)] = text

    def _return(self, s: ast.Return) -> None:
        self._simple(s, s.value)

    def _expr(self, s: ast.Expr) -> None:
        call = s.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name == "mark_dirty" and isinstance(self._bound_self(call), torch.autograd.function.FunctionCtx):
                self._remove(s)  # An input that is updated gets a new value; the old one does not change.
                return
            if (region := next((r for r in self._regions if call in r.calls), None)) is not None:
                names = ", ".join(map(gradient_of, region.inputs))
                names = names if len(region.inputs) > 1 else f"({names},)"
                self._replace(s, f"{names} = {self._pulled(call, region)}")
                return
            if name in rules.DROPPED_STATEMENTS and self._is_torch_call(call):
                self._remove(s)
                return
            if name == "_assert" and self._is_torch_call(call):
                condition, message = (self._render(x) for x in call.args)
                self._replace(s, f"assert {condition}, {message}")
                return
            update = self._update(call)
            if update is not None:
                target, text = update
                self._replace(s, *([] if target is None else [self._store(target, text)]))
                return
        if not isinstance(call, ast.Constant):
            self._simple(s, call)

    def _assign(self, s: ast.Assign) -> None:
        (target, *others) = s.targets
        is_flag = isinstance(target, ast.Attribute) and target.attr == "requires_grad" and self._is_tensor(target.value)
        if is_flag or isinstance(self._value(s.value), torch.device):
            self._remove(s)
            return
        if not others and isinstance(target, (ast.Subscript, ast.Attribute)) and self._writes_tensor(target):
            self._replace(s, self._set(target, s.value, None))
            return
        if not others and isinstance(target, ast.Tuple) and isinstance(s.value, ast.Call):
            elements = self._pair(s.value)
            if elements is not None and len(elements) == len(target.elts) and not self._before:
                self._assign_elements(s, target.elts, elements)
                return
        update = self._update(s.value) if isinstance(s.value, ast.Call) else None
        if update is not None and update[0] is not None and all(isinstance(x, ast.Name) for x in s.targets):
            stored, text = update[0], update[1]
            names = [self._file.segment(x) for x in s.targets]
            if isinstance(stored, ast.Name):
                chain = dict.fromkeys([*names, stored.id])
                self._write_back(stored)
                self._replace(s, " = ".join((*chain, text)))
            else:
                self._replace(s, self._store(stored, text), f"{' = '.join(names)} = {self._render(stored)}")
            return
        if update is not None and update[0] is None:
            self._simple(s, s.value, update[1])
            return
        if isinstance(target, ast.Name) and target.id in self._numpy_variables and self._is_constant(s.value):
            self.edits[self._file.span(s.value)] = self._in_numpy(s.value)
            return
        for x in s.targets:
            self._target(x)
        self._simple(s, s.value)

    def _assign_elements(self, s: ast.Assign, targets: Sequence[ast.expr], elements: Sequence[str]) -> None:
        """Assigns results of a function one by one, without those that the code does not read."""
        read = {n.id for n in ast.walk(self._node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        used = [
            (self._file.segment(target), element)
            for target, element in zip(targets, elements, strict=True)
            if not isinstance(target, ast.Name) or target.id in read
        ]
        if any(element == "None" for _, element in used):
            raise NoRuleError("the second result of this function has no rule")
        if used:
            self._replace(s, f"{', '.join(name for name, _ in used)} = {', '.join(element for _, element in used)}")
        else:
            self._remove(s)

    def _annassign(self, s: ast.AnnAssign) -> None:
        new = self._annotation(s.annotation)
        name = self._file.segment(s.target)
        if s.value is None:
            self._remove(s)
        elif new is None:
            self._replace(s, f"{name} = {self._render(s.value)}")
        else:
            self._replace(s, f"{name}: {new} = {self._render(s.value)}")

    def _augassign(self, s: ast.AugAssign) -> None:
        target = s.target
        if isinstance(target, (ast.Subscript, ast.Attribute)) and self._writes_tensor(target):
            self._replace(s, self._set(target, s.value, s.op))
            return
        before = self._values(target)
        self._stale(target)
        if before and isinstance(before[0], ObservedTensor) and isinstance(target, ast.Name):
            if not self._is_variable(target.id):
                raise NoRuleError(f"{target.id} belongs to an enclosing scope and is updated in place")
            self._write_back(target)
            value = self._render(s.value)
            operation = ast.BinOp(ast.Name("x", ast.Load()), s.op, ast.Name("y", ast.Load()))
            template = ast.unparse(operation).replace("x", "{x}").replace("y", "{y}")
            values = [(f(target), f(s.value)) for f in (self._value, self._value_in_double)]
            text = fill(template, {"x": target.id, "y": value})
            has_cast = any(
                isinstance(x, ObservedTensor) and self._check.cast(template, {"x": x, "y": y}, x) for x, y in values
            )
            if has_cast or self._after:
                self._replace(s, f"{target.id} = " + (f"({text}).astype({target.id}.dtype)" if has_cast else text))
                return
        self._target(target)
        self._simple(s, s.value)

    def _target(self, target: ast.expr) -> None:
        """Rewrites the indices of an assigned element of a list or dict."""
        for node in ast.walk(target):
            if isinstance(node, ast.Subscript):
                self._replace_expression(node.slice)

    def _assert(self, s: ast.Assert) -> None:
        self._branch(s.test)

    def _raise(self, s: ast.Raise) -> None:
        if self._mentions_torch(s):
            raise NoRuleError("this error mentions torch")

    def _branch(self, test: ast.expr) -> None:
        parts = [test.operand] if isinstance(test, ast.UnaryOp) else getattr(test, "values", [test])
        for part in parts:
            if self._is_tensor(part):
                raise NoRuleError("a branch depends on the value of a tensor; use torch.where")
        self._replace_expression(test)

    def _if(self, s: ast.If) -> None:
        self._branch(s.test)
        self._block(s.body)
        if len(s.orelse) == 1 and isinstance(s.orelse[0], ast.If) and not self._ran(s.orelse[0]):
            start, end = self._file.span(s.orelse[0])
            if self._file.slice((start, start + 4)) == "elif":
                column = s.body[0].col_offset if s.body[0].lineno != s.lineno else s.col_offset + 4
                inner = " " * (column - self._removed_indent)
                self.edits[start, end] = f"else:\n{inner}{self._not_reached(s.orelse[0])}"
                return
        self._block(s.orelse)

    def _while(self, s: ast.While) -> None:
        self._branch(s.test)
        self._in_loop(s)

    def _for(self, s: ast.For) -> None:
        self._replace_expression(s.iter)
        self._in_loop(s)

    def _in_loop(self, s: ast.For | ast.While) -> None:
        self._loops += 1
        self._block(s.body)
        self._loops -= 1
        self._block(s.orelse)

    def _try(self, s: ast.Try) -> None:
        self._block(s.body)
        for handler in s.handlers:
            self._block(handler.body)
        self._block(s.orelse)
        self._block(s.finalbody)

    def _with(self, s: ast.With) -> None:
        names = {callee_name(item.context_expr) for item in s.items}
        modes = {"no_grad", "enable_grad", "set_grad_enabled", "autocast", "device", "device_of", "inference_mode"}
        if not names <= modes or any(item.optional_vars is not None for item in s.items):
            raise NoRuleError(f"`with {', '.join(sorted(names))}` has no rule")
        depth = self._dedent(s)
        self._removed_indent += depth
        self._block(s.body)
        self._removed_indent -= depth

    def _dedent(self, s: ast.With) -> int:
        """Removes the line of a `with` statement, and the indentation of its body, which is returned."""
        first, last = s.body[0], s.body[-1]
        if first.lineno == s.lineno:
            raise NoRuleError("write the body of `with` on separate lines")
        assert last.end_lineno is not None
        header_end = self._file.line_span(first.lineno, first.lineno)[0]
        strings = [n for n in ast.walk(s) if isinstance(n, ast.Constant) and n.end_lineno != n.lineno]
        between = self._file.slice((self._file.line_span(s.lineno, s.lineno)[0], header_end))
        comment = between.rstrip("\n").rpartition("#")[2] if "#" in between else None
        head = "" if comment is None else f"{' ' * s.col_offset}#{comment}\n"
        header = self._file.line_span(s.lineno, s.lineno)[0]
        # Around it, an outer `with` may have removed the indentation of these lines.
        self.edits = {k: text for k, text in self.edits.items() if not header <= k[0] < header_end}
        self.edits[header, header_end] = head[self._removed_indent :]
        removed = {k[0]: k for k, text in self.edits.items() if not text}
        depth = first.col_offset - s.col_offset
        for line in range(first.lineno, last.end_lineno + 1):
            start, end = self._file.line_span(line, line)
            inside_string = any(n.lineno < line <= (n.end_lineno or 0) for n in strings)
            if not inside_string and self._file.slice((start, end))[:depth].isspace() and end - start > depth:
                before = removed.get(start, (start, start))
                self.edits.pop(before, None)
                self.edits[start, before[1] + depth] = ""
        return depth

    def _import(self, s: ast.Import) -> None:
        if any(alias.name.partition(".")[0] == "torch" for alias in s.names):
            self._remove(s)

    def _importfrom(self, s: ast.ImportFrom) -> None:
        if (s.module or "").partition(".")[0] == "torch":
            self._remove(s)

    def _delete(self, s: ast.Delete) -> None:
        pass

    def _pass(self, s: ast.stmt) -> None:
        pass

    _break = _continue = _nonlocal = _pass

    def _global(self, s: ast.Global) -> None:
        raise NoRuleError("the function assigns global variables")

    def _functiondef(self, s: ast.FunctionDef) -> None:
        if s.decorator_list:
            raise NoRuleError("a function inside a function has decorators")
        self._variables.append(bound_names(s))
        self._loops += 1  # It may be called more than once, so that it cannot draw.
        self._signature(s)
        self._block(s.body)
        self._loops -= 1
        self._variables.pop()

    def _signature(self, node: ast.FunctionDef) -> None:
        """Rewrites annotations and default values."""
        arguments = node.args
        found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for x in found:
            if x is None or x.annotation is None:
                continue
            new = self._annotation(x.annotation)
            start, end = self._file.span(x)
            self.edits[start, end] = x.arg if new is None else f"{x.arg}: {new}"
        if node.returns is not None:
            new = self._annotation(node.returns)
            start, end = self._file.span(node.returns)
            arrow = self._file.text.rindex(b"->", 0, start)
            while new is None and self._file.text[arrow - 1 : arrow].isspace():
                arrow -= 1
            self.edits[arrow, end] = "" if new is None else f"-> {new}"
        for default in (*arguments.defaults, *arguments.kw_defaults):
            if default is not None and self._mentions_torch(default):
                raise NoRuleError(f"the default value {self._file.segment(default)} mentions torch")

    def _annotation(self, node: ast.expr) -> str | None:
        """Returns a type annotation for JAX; `None` if it has none."""
        text = ast.unparse(node)
        text = re.sub(r"(?<![\w.])((torch\.)?Tensor|torch\.(Float|Long|Int|Bool|Double)Tensor)\b", "jax.Array", text)
        text = re.sub(r"(?<![\w.])((torch\.autograd\.)?function\.)?FunctionCtx\b", "jaxfn.FunctionCtx", text)
        try:
            names = {n.id for n in ast.walk(ast.parse(text, mode="eval")) if isinstance(n, ast.Name)}
        except SyntaxError:
            return None
        builtin = {"int", "float", "bool", "str", "tuple", "list", "dict", "object", "type", "complex", "None"}
        typing = {"Any", "Callable", "Optional", "Union", "Sequence", "Tuple", "List", "Dict", "Iterable"}
        has_string = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in ast.walk(node))
        return self._options.spell(text) if names <= builtin | typing | {"jax", "jaxfn"} and not has_string else None
