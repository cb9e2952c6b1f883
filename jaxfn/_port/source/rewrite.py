"""Rewrites the definition of a function for JAX: only the parts that call torch, or update tensors in place, change."""

from __future__ import annotations

import ast
import builtins
import contextlib
import itertools
import re
import typing
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxfn._port.source import rules
from jaxfn._port.source.expressions import (
    ExpressionRewriter,
    RewriteOptions,
    assignments,
    check_result,
    elements,
    operator_template,
)
from jaxfn._port.source.observe import ObservedTensor
from jaxfn._port.source.source_file import Span, bound_names, is_importable, root_name
from jaxfn._port.source.spelling import NoRuleError, ReadsValuesError, as_operand, fill
from jaxfn._port.source.table import Argument
from jaxfn._port.source.typecheck import OtherValuesError
from jaxfn._port.source.vjp_regions import Region, gradient_of
from jaxfn._torch.values.errors import TranslationError

# Contexts without an effect on JAX.
_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode)
_MODES = (
    *_GRAD_MODES,
    torch.autocast,
    torch.device,
    torch.cuda.device,
    torch.cuda.device_of,
    torch.cuda.StreamContext,
    torch.autograd.profiler.record_function,
    contextlib.nullcontext,
)
_NO_BODY = (ast.Raise, ast.Pass, ast.Break, ast.Continue)


def _is_plain(statement: ast.stmt) -> bool:
    """Whether a statement that did not run means the same for JAX: without a value, or one that only branches use."""
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
        is_flag = isinstance(statement.value.value, (bool, str, type(None)))
        return is_flag and all(isinstance(x, ast.Attribute) for x in statement.targets)
    return isinstance(statement, _NO_BODY)


def _catches_all(handler: ast.ExceptHandler) -> bool:
    """Whether a handler catches `NotImplementedError`."""
    names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type is not None else set()
    return handler.type is None or bool(names & {"BaseException", "Exception", "RuntimeError", "NotImplementedError"})


class FunctionRewriter(ExpressionRewriter):
    """Rewrites one function, with the functions defined inside it."""

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
            elif not _is_plain(statement) or self._mentions_torch(statement):
                start, end = self._file.span(statement)[0], self._file.span(body[-1])[1]
                self.edits[start, end] = self._not_reached(statement)
                return

    def _in_region(self, region: Region, s: ast.stmt) -> None:
        """Rewrites a statement as one of the function that `jax.vjp` differentiates."""
        self._statement(s)
        indent = " " * s.col_offset
        span = self._file.lines_span(s)
        text = re.sub(r"(?m)^(?=.)", "    ", self._take(span))
        if s is region.statements[0]:
            text = f"{indent}{region.head()}\n{text}"
        if s is region.statements[-1]:
            value = None if region.value is None else self._render(region.value)
            text += "".join(f"{indent}{line}\n" for line in region.tail(self._options.spell("jax.vjp"), value))
        self.edits[span] = text

    def _take(self, span: Span) -> str:
        """Returns the new text of a part of the file; its edits are removed."""
        inside = {k: text for k, text in self.edits.items() if span[0] <= k[0] < span[1]}
        self.edits = {k: text for k, text in self.edits.items() if k not in inside}
        return self._file.edited(span, inside)

    def _not_reached(self, statement: ast.stmt) -> str:
        child: Any = statement
        while (parent := self._file.parents.get(child)) is not None and child is not self._node:
            if isinstance(parent, ast.Try) and child in parent.body and any(map(_catches_all, parent.handlers)):
                raise TranslationError(
                    f"the source cannot be rewritten: no example reached this line, and `except` would catch the error "
                    f"that says so. Pass an example that reaches it{self._file.line(statement)}"
                )
            child = parent
        return f'raise NotImplementedError("no example reached {self._location(statement)}")'

    def _mentions_torch(self, node: ast.AST) -> bool:
        names = {"torch", "Tensor", "F"}
        return any(isinstance(n, ast.Name) and n.id in names for n in ast.walk(node))

    def _statement(self, s: ast.stmt) -> None:
        self._before = []
        try:
            method: Callable[[Any], None] | None = getattr(self, f"_{type(s).__name__.lower()}", None)
            if method is None:
                raise NoRuleError(f"a statement of this kind ({type(s).__name__}) has no rule")
            method(s)
        except (NoRuleError, OtherValuesError) as error:
            line = self._file.line(s)
            raise TranslationError(f"the source cannot be rewritten: {error}{line}") from error

    def _replace(self, s: ast.stmt, *lines: str) -> None:
        """Replaces a statement by lines, preceded by those of in-place updates inside it."""
        new = [*self._before, *lines]
        if not new:
            self._remove(s)
            return
        self.edits[self._file.span(s)] = f"\n{' ' * s.col_offset}".join(new)

    def _remove(self, s: ast.stmt) -> None:
        parent = self._file.parents[s]
        body = next(b for b in (getattr(parent, f, []) for f in ("body", "orelse", "finalbody")) if s in b)
        if len(body) == 1:
            self.edits[self._file.span(s)] = "pass"
        else:
            span = self._file.lines_span(s)
            self._take(span)
            self.edits[span] = ""

    def _replace_expression(self, node: ast.expr | None) -> None:
        """Rewrites an expression of a statement that is not replaced as a whole."""
        if node is None:
            return
        text = self._render(node)
        if self._before:
            raise NoRuleError("a tensor is updated in place inside this statement; update it in a statement alone")
        if text != self._file.segment(node):
            self.edits[self._file.span(node)] = text

    def _simple(self, s: ast.stmt, value: ast.expr | None) -> None:
        """Rewrites the value of a statement, which follows in-place updates inside it."""
        if value is None:
            return
        text = self._render(value)
        targets = s.targets if isinstance(s, ast.Assign) else []
        target = targets[0] if len(targets) == 1 else None
        is_update = isinstance(s, ast.Expr) and isinstance(value, ast.Call) and self._updated(value) is not None
        results = elements(text) if isinstance(target, ast.Tuple) and isinstance(value, ast.Call) else []
        if is_update or (isinstance(target, ast.Name) and text == target.id):
            self._replace(s)
        elif isinstance(target, ast.Tuple) and len(results) == len(target.elts):
            self._assign_elements(s, target.elts, results)
        elif self._before:
            start = self._file.span(s)[0]
            self._replace(s, self._file.slice((start, self._file.span(value)[0])) + text)
        elif text != self._file.segment(value):
            self.edits[self._file.span(value)] = text

    def _return(self, s: ast.Return) -> None:
        self._simple(s, s.value)

    def _expr(self, s: ast.Expr) -> None:
        call = s.value
        if isinstance(call, ast.Call):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
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
        if not isinstance(call, ast.Constant):
            self._simple(s, call)

    def _assign(self, s: ast.Assign) -> None:
        (target, *others) = s.targets
        is_flag = isinstance(target, ast.Attribute) and target.attr == "requires_grad" and self._is_tensor(target.value)
        if is_flag or isinstance(self._value(s.value), torch.device):
            self._remove(s)
            return
        if not others and isinstance(target, (ast.Subscript, ast.Attribute)) and self._writes_tensor(target):
            self._replace(s, *self._set(target, s.value, None))
            return
        pairs = list(assignments(s))
        if len(pairs) > 1 and any(isinstance(x, ast.Subscript) and self._writes_tensor(x) for x, _ in pairs):
            self._assign_in_order(s, pairs)
            return
        if isinstance(target, ast.Name) and target.id in self._numpy_variables and self._is_constant(s.value):
            self.edits[self._file.span(s.value)] = self._in_numpy(s.value)
            return
        parts = [x for x in ast.walk(target) if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store)]
        written = [x for x in parts if self._writes_tensor(x)]
        if written and isinstance(target, (ast.Tuple, ast.List)) and not others:
            self._assign_parts(s, target, written)
            return
        for x in s.targets:
            self._target(x)
        self._simple(s, s.value)

    def _assign_parts(self, s: ast.Assign, target: ast.expr, parts: Sequence[ast.Subscript]) -> None:
        """Rewrites `x[i], y = f()`, by variables for the elements of tensors, which are stored afterwards."""
        free = (name for i in itertools.count() if not self._is_variable(name := f"element{i}"))
        names = {part: next(free) for part in parts}
        value = self._render(s.value)
        lines: list[str] = []
        for part, name in names.items():
            if part is parts[0] or not isinstance(part.value, ast.Name):
                self._stale(part.value)
            base = part.value.id if isinstance(part.value, ast.Name) else as_operand(self._render(part.value))
            lines += self._store(part.value, f"{base}.at[{self._index(part)}].set({name})")
        edits = {self._file.span(part): name for part, name in names.items()}
        self._replace(s, f"{self._file.edited(self._file.span(target), edits)} = {value}", *lines)

    def _assign_in_order(self, s: ast.Assign, pairs: Sequence[tuple[ast.expr, ast.expr]]) -> None:
        """Rewrites `x[i], y = a, b` as several statements."""
        lines: list[str] = []
        assigned: set[str] = set()
        for target, value in pairs:
            read = {n.id for n in ast.walk(value) if isinstance(n, ast.Name)}
            if read & assigned or not isinstance(target, (ast.Name, ast.Subscript)):
                raise NoRuleError("an assignment to several targets has no rule; write several statements")
            name = root_name(target)
            assigned |= {name.id} if name is not None else set()
            if isinstance(target, ast.Subscript) and self._writes_tensor(target):
                lines += self._set(target, value, None)
            else:
                lines.append(f"{self._render(target)} = {self._render(value)}")
        self._replace(s, *lines)

    def _assign_elements(self, s: ast.stmt, targets: Sequence[ast.expr], results: Sequence[str]) -> None:
        """Assigns results of a function one by one, without those that the code does not read."""
        read = {n.id for n in ast.walk(self._node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        pairs = zip(targets, results, strict=True)
        used = [(self._file.segment(x), text) for x, text in pairs if not isinstance(x, ast.Name) or x.id in read]
        for _, text in used:
            check_result(text)
        left, right = (", ".join(texts) for texts in zip(*used, strict=True)) if used else ("", "")
        self._replace(s, *([f"{left} = {right}"] if used else []))

    def _annassign(self, s: ast.AnnAssign) -> None:
        if s.value is None:
            self._remove(s)
            return
        new = jax_annotation(s.annotation, self._options)
        span = self._file.span(s.target)[1], self._file.span(s.annotation)[1]
        self.edits[span] = "" if new is None else f": {new}"
        self._replace_expression(s.value)

    def _augassign(self, s: ast.AugAssign) -> None:
        target = s.target
        if isinstance(target, (ast.Subscript, ast.Attribute)) and self._writes_tensor(target):
            self._replace(s, *self._set(target, s.value, s.op))
            return
        before = self._values(target)
        self._stale(target)
        if before and isinstance(before[0], ObservedTensor) and isinstance(target, ast.Name):
            template = operator_template(s.op)
            operands = {"x": Argument("", before[0], target), "y": Argument("", self._value(s.value), s.value)}
            dtype = self._cast(target, template, operands)
            if dtype is not None or self._write_back(target):
                text = fill(template, {"x": target.id, "y": self._render(s.value)})
                self._replace(s, *self._store(target, text if dtype is None else f"({text}).astype({dtype})"))
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
            if self._is_tensor(part) and not self._options.reads_values:
                raise ReadsValuesError("a branch depends on the value of a tensor; use torch.where")
        self._replace_expression(test)

    def _if(self, s: ast.If) -> None:
        self._branch(s.test)
        self._block(s.body)
        if len(s.orelse) == 1 and isinstance(s.orelse[0], ast.If) and not self._ran(s.orelse[0]):
            start, end = self._file.span(s.orelse[0])
            if self._file.slice((start, start + 4)) == "elif":
                self.edits[start, end] = f"else:\n{' ' * s.col_offset}    {self._not_reached(s.orelse[0])}"
                return
        self._block(s.orelse)

    def _while(self, s: ast.While) -> None:
        self._branch(s.test)
        self._try(s)

    def _for(self, s: ast.For) -> None:
        self._replace_expression(s.iter)
        self._try(s)

    def _try(self, s: ast.Try | ast.For | ast.While) -> None:
        handlers = [handler.body for handler in s.handlers] if isinstance(s, ast.Try) else []
        for body in (s.body, *handlers, s.orelse, getattr(s, "finalbody", [])):
            self._block(body)

    def _with(self, s: ast.With) -> None:
        contexts = [self._values(item.context_expr) for item in s.items]
        if all(isinstance(x, warnings.catch_warnings) for values in contexts for x in values):
            self._block(s.body)
            return
        for item, values in zip(s.items, contexts, strict=True):
            call = item.context_expr
            arguments = [*call.args, *(x.value for x in call.keywords)] if isinstance(call, ast.Call) else []
            has_flag = any(isinstance(self._value(x), bool) and not isinstance(x, ast.Constant) for x in arguments)
            is_grad_mode = all(isinstance(x, _GRAD_MODES) for x in values)
            is_known = all(isinstance(x, _MODES) for x in values) and (is_grad_mode or not has_flag)
            if not is_known or item.optional_vars is not None:
                raise NoRuleError(f"`with {self._file.segment(call)}` has no rule")
        first, last = s.body[0], s.body[-1]
        if first.lineno == s.lineno:
            raise NoRuleError("write the body of `with` on separate lines")
        self._block(s.body)
        start, body = (self._file.lines_span(x)[0] for x in (s, first))
        end = self._file.lines_span(last)[1]
        # The line of `with` is removed, except for a comment, and with it the indentation.
        head, _, comment = self._file.slice((start, body)).rstrip("\n").rpartition("#")
        text = re.sub(rf"(?m)^ {{{first.col_offset - s.col_offset}}}", "", self._take((body, end)))
        self.edits[start, end] = (f"{' ' * s.col_offset}#{comment}\n" if head else "") + text

    def _import(self, s: ast.Import | ast.ImportFrom) -> None:
        module = (s.module or "") if isinstance(s, ast.ImportFrom) else s.names[0].name
        if getattr(s, "level", 0) or not is_importable(module):
            self._remove(s)

    _importfrom = _import

    def _pass(self, s: ast.stmt) -> None:
        pass

    _break = _continue = _nonlocal = _delete = _pass

    def _global(self, s: ast.Global) -> None:
        raise NoRuleError("the function assigns global variables")

    def _functiondef(self, s: ast.FunctionDef) -> None:
        if s.decorator_list:
            raise NoRuleError("a function inside a function has decorators")
        outer, self._nonlocals = self._nonlocals, set()
        self._variables.append(bound_names(s))
        self._signature(s)
        self._block(s.body)
        self._variables.pop()
        in_regions = {n.id for r in self._regions for x in r.statements for n in ast.walk(x) if isinstance(n, ast.Name)}
        if self._nonlocals and s.name in in_regions:
            raise NoRuleError(f"{s.name}, which is differentiated, updates variables of another function in place")
        if self._nonlocals:
            first = s.body[ast.get_docstring(s) is not None]
            start, _ = self._file.lines_span(first)
            line = f"{' ' * first.col_offset}nonlocal {', '.join(sorted(self._nonlocals))}\n"
            self.edits[start, start] = line + self.edits.get((start, start), "")
        self._nonlocals = outer | {name for name in self._nonlocals if name not in self._variables[-1]}

    def _signature(self, node: ast.FunctionDef) -> None:
        """Rewrites annotations."""
        arguments = node.args
        found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for x in found:
            if x is None or x.annotation is None:
                continue
            new = jax_annotation(x.annotation, self._options)
            start, end = self._file.span(x)
            self.edits[start, end] = x.arg if new is None else f"{x.arg}: {new}"
        if node.returns is not None:
            new = jax_annotation(node.returns, self._options)
            start, end = self._file.span(node.returns)
            arrow = self._file.text.rindex(b"->", 0, start)
            while new is None and self._file.text[arrow - 1 : arrow].isspace():
                arrow -= 1
            self.edits[arrow, end] = "" if new is None else f"-> {new}"


def jax_annotation(node: ast.expr, options: RewriteOptions) -> str | None:
    """Returns a type annotation for JAX; `None` if it has none."""
    text = re.sub(r"(?<![\w.])(torch\.)?(Float|Long|Int|Bool|Double)?Tensor\b", "jax.Array", ast.unparse(node))
    text = re.sub(r"(?<![\w.])((torch\.autograd\.)?function\.)?FunctionCtx\b", "jaxfn.FunctionCtx", text)
    nodes = list(ast.walk(ast.parse(text, mode="eval")))
    names = {n.id for n in nodes if isinstance(n, ast.Name)}
    has_string = any(isinstance(n, ast.Constant) and isinstance(n.value, str) for n in nodes)
    is_known = names <= {"jax", "jaxfn", *dir(builtins), *typing.__all__} and not has_string
    return options.spell(text) if is_known else None
