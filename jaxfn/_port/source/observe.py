"""Observation of torch code while it runs: the values of its expressions, the statements that ran, in-place updates.

The code of each of the user's functions is replaced by an instrumented copy while the example runs.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_tree

from jaxfn._port.source.source_file import (
    SHARED_PACKAGES,
    FunctionNode,
    SourceFile,
    SourceFiles,
    Span,
    bound_names,
    root_name,
    viewed_name,
    views_in,
)
from jaxfn._torch._compat import scripted_function
from jaxfn._torch.graph.source_lines import is_user_code
from jaxfn._torch.values.errors import TranslationError

METHODS = ("forward", "backward", "vjp", "setup_context", "jvp", "vmap")

_HOOKS = "_jaxfn_observation"
_FRAME = "_jaxfn_frame"
_CONSTANT = "_jaxfn_is_constant"
# The number of observed values of an expression that are stored, and of those with copies of tensors.
_MAX_VALUES, _MAX_COPIES = 64, 2
_CODE_LOCK = threading.RLock()
Cached = type(functools.cache(len))  # a function with `functools.lru_cache`


@dataclass(frozen=True)
class ObservedTensor:
    """A tensor at the time when an expression had it as its value.

    Attributes:
      is_constant: Whether it depends on no argument.
      is_fresh: Whether it shares its storage with no tensor that was observed before the expression was evaluated.
      value: A copy of its values, for the first observations of an expression.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    is_constant: bool
    is_fresh: bool
    value: torch.Tensor | None

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass
class ObservedRun:
    """Observations of the user's functions.

    Attributes:
      values: The values of each expression, by file and position, with `ObservedTensor`s for tensors.
      in_double: Those where the inputs were in double precision.
      statements: The file and position of each statement that ran.
      functions: The file and definition of each function that was instrumented.
      stale: The reads of variables whose memory was updated through another variable, each with a message.
      needs: The values of each `x.requires_grad`, each with the elements of `ctx.needs_input_grad`, by expression.
    """

    files: SourceFiles = field(default_factory=SourceFiles)
    values: dict[tuple[str, Span], list[Any]] = field(default_factory=dict)
    in_double: dict[tuple[str, Span], list[Any]] = field(default_factory=dict)
    statements: set[tuple[str, int]] = field(default_factory=set)
    functions: dict[CodeType, tuple[SourceFile, FunctionNode]] = field(default_factory=dict)
    stale: dict[tuple[str, Span], str] = field(default_factory=dict)
    needs: dict[tuple[str, Span], list[tuple[bool, dict[str, bool]]]] = field(default_factory=dict)


def observe(function: Any, run: Callable[[], None], run_in_double: Callable[[], None]) -> ObservedRun:
    """Calls functions that call `function` (a Function class or a Python function), and returns what was observed."""
    with _CODE_LOCK:
        hooks = _Instrumentation()
        try:
            hooks.instrument(function)
            with hooks:
                run()
                hooks.values = hooks.observation.in_double
                run_in_double()
        finally:
            hooks.restore()
        return hooks.observation


def is_user_function(value: Any) -> bool:
    """Whether a value is a Python function of the user's code."""
    if not isinstance(value, FunctionType) or (value.__module__ or "").partition(".")[0] in SHARED_PACKAGES:
        return False
    path = value.__code__.co_filename
    is_interactive = path.startswith("<") and bool(linecache.getlines(path, value.__globals__))
    return is_interactive or is_user_code(path)


def is_function_class(value: Any) -> bool:
    """Whether a value is a torch Function class."""
    return isinstance(value, type) and issubclass(value, torch.autograd.Function)


def is_user_class(value: Any) -> bool:
    """Whether a value is a torch Function class, or another class of the user's code."""
    if not isinstance(value, type) or is_function_class(value):
        return isinstance(value, type)
    path = getattr(sys.modules.get(value.__module__), "__file__", None)
    return path is not None and is_user_code(path)


def methods_of(function: type) -> Iterable[FunctionType]:
    """Yields the Python functions of a class and its bases."""
    for base in function.__mro__:
        for attribute in list(vars(base).values()):
            method = getattr(attribute, "__func__", attribute)
            if isinstance(method, FunctionType) and is_user_function(inspect.unwrap(method)):
                yield inspect.unwrap(method)


class _Instrumentation(TorchFunctionMode):
    """The functions that instrumented code calls. As a mode, it sees in-place updates and constant tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.observation = ObservedRun()
        self.values = self.observation.values
        self._spans: list[tuple[str, Span]] = []
        self._old_code: list[tuple[FunctionType, CodeType]] = []
        self._globals: list[dict[str, Any]] = []
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []
        self._updates: dict[int, int] = {}
        self._bindings: dict[tuple[object, str], tuple[Any, int | None]] = {}
        self._new_names: dict[object, tuple[str, ...]] = {}
        self._storages: dict[int, tuple[int, Any]] = {}  # Numbered. They stay alive, so that addresses are unique.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [x for x in torch_tree.tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        versions = [_version(x) for x in tensors]
        returned = func(*args, **(kwargs or {}))
        updated = [x for x, version in zip(tensors, versions, strict=True) if _version(x) != version]
        for tensor in updated:
            self._updates[self._address(tensor)] = self._num_updates(tensor) + 1
        if all(_CONSTANT in vars(x) for x in tensors):
            for x in torch_tree.tree_leaves(returned):
                if isinstance(x, torch.Tensor):
                    vars(x)[_CONSTANT] = True
        else:
            for tensor in updated:
                vars(tensor).pop(_CONSTANT, None)
        return returned

    # Called by instrumented code

    def num_storages(self) -> int:
        """Returns the number of storages that were observed so far."""
        return len(self._storages)

    def result(self, index: int, num_storages: int, value: Any) -> Any:
        """Records the value of an expression before which that many storages were observed, and returns it."""
        seen = self.values.setdefault(self._spans[index], [])
        if len(seen) < _MAX_VALUES:
            seen.append(self._describe(value, len(seen) < _MAX_COPIES, num_storages))
        self.instrument(value)
        return value

    def value(self, index: int, value: Any) -> Any:
        """Records the value of a variable or an attribute, and returns it."""
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, torch.Tensor):
                self._address(x)
        return self.result(index, len(self._storages), value)

    def requires_grad(self, index: int, value: bool, variables: Mapping[str, Any]) -> bool:
        """Records and returns the value of `x.requires_grad`."""
        flags: dict[str, bool] = {
            f"{name}.needs_input_grad[{i}]": flag
            for name, ctx in variables.items()
            for i, flag in enumerate(getattr(ctx, "needs_input_grad", ()) if isinstance(ctx, FunctionCtx) else ())
        }
        self.observation.needs.setdefault(self._spans[index], []).append((value, flags))
        return self.value(index, value)

    def load(self, index: int, frame: object, name: str, value: Any) -> Any:
        """Records a variable's value, and whether its memory was updated after the variable was assigned."""
        if isinstance(value, torch.Tensor):
            tensor, num_updates = self._bindings.get((frame, name), (None, None))
            if tensor is not value:
                self._bind(frame, name, value)
            elif num_updates != self._num_updates(value):
                self.observation.stale[self._spans[index]] = (
                    f"{name} is read after an in-place update, through another variable, of memory that they share. "
                    "JAX arrays share none. Update a copy, `tensor.clone()`, or use the variable that was updated"
                )
        return self.value(index, value)

    def enter(self, parameters: Mapping[str, Any]) -> object:
        """Returns a new identity for a call of a function, with the parameters as its variables."""
        frame = object()
        self._new_names[frame] = tuple(parameters)
        return frame

    def ran(self, index: int, frame: object, names: tuple[str, ...], variables: Mapping[str, Any]) -> None:
        """Records that a statement runs, which gives `names` new values, as the one before it has done."""
        path, (start, _) = self._spans[index]
        self.observation.statements.add((path, start))
        for name in self._new_names.get(frame, ()):
            self._bind(frame, name, variables.get(name))
        self._new_names[frame] = names

    def _bind(self, frame: object, name: str, value: Any) -> None:
        self._bindings[frame, name] = value, self._num_updates(value) if isinstance(value, torch.Tensor) else None

    def _num_updates(self, tensor: torch.Tensor) -> int:
        return self._updates.get(self._address(tensor), 0)

    def _address(self, tensor: torch.Tensor) -> int:
        """Returns the address of a tensor's storage, which other tensors may share, or of the tensor without one."""
        address, owner = 0, None
        with torch.DisableTorchFunction(), suppress(RuntimeError, NotImplementedError):
            owner = tensor.untyped_storage()
            address = owner.data_ptr()
        if not address:
            address, owner = -id(tensor), tensor
        self._storages.setdefault(address, (len(self._storages), owner))
        return address

    def _describe(self, value: Any, with_copy: bool, num_known: int) -> Any:
        if isinstance(value, torch.Tensor):
            is_fresh = self._storages[self._address(value)][0] >= num_known
            with torch.DisableTorchFunction(), torch.no_grad():
                try:
                    copied = value.detach().clone() if with_copy else None
                except RuntimeError:  # A functorch level has ended.
                    copied = None
                return ObservedTensor(value.dtype, tuple(value.shape), _CONSTANT in vars(value), is_fresh, copied)
        if isinstance(value, (list, tuple)):
            items = [self._describe(x, with_copy, num_known) for x in value]
            return items if isinstance(value, list) else value if type(value) is torch.Size else tuple(items)
        if type(value) is dict:
            return {name: self._describe(x, with_copy, num_known) for name, x in value.items()}
        return value

    # Instrumentation

    def instrument(self, value: Any) -> None:
        """Instruments the code of a function or a class of the user's, if that is what `value` is."""
        if isinstance(value, (BuiltinFunctionType, MethodType)) and is_function_class(value.__self__):
            value = value.__self__  # `apply`, or another method of a Function class.
        elif isinstance(value, MethodType):
            value = value.__func__
        if isinstance(value, type):
            for method in methods_of(value):
                self._instrument_function(method)
        elif isinstance(value, FunctionType):
            self._instrument_function(inspect.unwrap(value))

    def _instrument_function(self, function: Any) -> None:
        if not is_user_function(function) or function.__code__ in self.observation.functions:
            return
        if any(function is old for old, _ in self._old_code):
            return
        file = self.observation.files.of(function)
        node = file.function(function.__code__)
        if node is None:
            return
        self.observation.functions[function.__code__] = file, node
        code = _compile(_Instrument(self, file).function(node), function, file.path)
        self._old_code.append((function, function.__code__))
        self._globals.append(function.__globals__)
        function.__globals__[_HOOKS] = self
        function.__code__ = code
        for name in function.__code__.co_names:  # Compiled code and cached results cannot be observed; Python code can.
            value = function.__globals__.get(name)
            python_function = value.__wrapped__ if isinstance(value, Cached) else scripted_function(value)
            if python_function is not value:
                self._replaced.append((function.__globals__, name, value))
                function.__globals__[name] = python_function

    def index(self, path: str, span: Span) -> int:
        """Returns the number by which instrumented code names a position."""
        self._spans.append((path, span))
        return len(self._spans) - 1

    def restore(self) -> None:
        """Gives all functions their own code again."""
        for function, code in self._old_code:
            function.__code__ = code
        for names, name, value in self._replaced:
            names[name] = value
        for names in self._globals:
            names.pop(_HOOKS, None)


def _version(tensor: torch.Tensor) -> int:
    with torch.DisableTorchFunction():
        return 0 if tensor.is_inference() else tensor._version


def _compile(node: FunctionNode, function: FunctionType, path: str) -> CodeType:
    """Compiles an instrumented definition to code that can replace that of `function`."""
    old, name = function.__code__, "_jaxfn_inner"
    if isinstance(node, ast.FunctionDef):
        node.name = name  # Not its own name, which would become a variable of the closure in a recursive function.
    body: ast.stmt = node if isinstance(node, ast.FunctionDef) else ast.Assign([ast.Name(name, ast.Store())], node)
    free = [ast.arg(x) for x in old.co_freevars]
    outer = ast.FunctionDef("outer", ast.arguments([], free, None, [], [], None, []), [body], [])
    if "type_params" in ast.FunctionDef._fields:  # Python 3.12 and newer.
        outer.type_params = []  # pyright: ignore[reportAttributeAccessIssue]
    compiled = compile(ast.fix_missing_locations(ast.Module([outer], [])), path, "exec")
    (outer_code,) = (x for x in compiled.co_consts if isinstance(x, CodeType))
    for code in outer_code.co_consts:
        if isinstance(code, CodeType) and code.co_name in (name, "<lambda>") and code.co_freevars == old.co_freevars:
            return code.replace(co_name=old.co_name, co_qualname=old.co_qualname)
    raise TranslationError(f"{function.__qualname__} cannot be observed: its closure cannot be copied")


class _Instrument(ast.NodeTransformer):
    """Adds calls of the hooks to a function's definition."""

    def __init__(self, hooks: _Instrumentation, file: SourceFile) -> None:
        self._hooks = hooks
        self._file = file
        self._private = "__"  # the beginning of private names, as Python changes it in the class
        self._variables: set[str] = set()
        self._views: dict[str | None, str] = {}
        self._inner: dict[str, set[str]] = {}  # The variables that functions inside the function update, by their name.

    def function(self, node: FunctionNode) -> FunctionNode:
        owner = self._file.enclosing_class(node)
        self._private = f"_{owner.name.lstrip('_')}__" if owner is not None else "__"
        new = copy.deepcopy(node)
        if isinstance(new, ast.FunctionDef):
            new.decorator_list = []
        return self.visit(new)

    def _call(self, hook: str, *arguments: ast.expr) -> ast.Call:
        function = ast.Attribute(ast.Name(_HOOKS, ast.Load()), hook, ast.Load())
        return ast.Call(function, list(arguments), [])

    def _index(self, node: Any) -> ast.Constant:
        return ast.Constant(self._hooks.index(self._file.path, self._file.span(node)))

    def _expression(self, node: ast.AST) -> Any:
        if not isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            return self.generic_visit(node)
        index, is_new = self._index(node), not isinstance(node, ast.Attribute)
        visited: Any = self.generic_visit(node)
        before = [self._call("num_storages")] if is_new else []
        return ast.copy_location(self._call("result" if is_new else "value", index, *before, visited), node)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if not node.attr.endswith("__"):  # The copy is compiled outside the class.
            node.attr = re.sub("^__", self._private, node.attr)
        visited = self._expression(node)
        if node.attr == "requires_grad" and isinstance(visited, ast.Call):
            return ast.copy_location(self._call("requires_grad", *visited.args, _locals()), node)
        return visited

    visit_Subscript = visit_Call = visit_BinOp = visit_UnaryOp = _expression  # noqa: N815
    visit_BoolOp = visit_Compare = visit_IfExp = visit_List = visit_Tuple = visit_Dict = _expression  # noqa: N815
    visit_ListComp = _expression  # noqa: N815

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load):
            return node
        if node.id not in self._variables:
            return ast.copy_location(self._call("value", self._index(node), node), node)
        frame = ast.Name(_FRAME, ast.Load())
        return ast.copy_location(self._call("load", self._index(node), frame, ast.Constant(node.id), node), node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> Any:
        return self.generic_visit(node) if self._file.locates_values(node) else node

    def visit_Lambda(self, node: ast.Lambda) -> Any:
        outer, self._variables = self._variables, set()
        node.body = self.visit(node.body)
        self._variables = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        outer = self._variables, self._views, self._inner
        undeclared = {name for n in ast.walk(node) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
        self._variables = bound_names(node) - undeclared
        self._views = {name: view.id for name, (_, view) in views_in(node).items()}
        functions = [n for n in ast.walk(node) if isinstance(n, ast.FunctionDef) and n is not node]
        self._inner = {n.name: {*updated_names(n, self._variables - bound_names(n))} for n in functions}
        first: ast.stmt = ast.Assign([ast.Name(_FRAME, ast.Store())], self._call("enter", _locals()))
        node.body = [first, *self._statements(node.body)]
        self._variables, self._views, self._inner = outer
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return node

    def _statements(self, body: list[ast.stmt]) -> list[ast.stmt]:
        new: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, (ast.Global, ast.Nonlocal)):
                new.append(statement)
                continue
            names: list[ast.expr] = [ast.Constant(name) for name in self._new_values(statement)]
            arguments = self._index(statement), ast.Name(_FRAME, ast.Load()), ast.Tuple(names, ast.Load()), _locals()
            new.append(ast.copy_location(ast.Expr(self._call("ran", *arguments)), statement))
            if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
                read = ast.copy_location(ast.Name(statement.target.id, ast.Load()), statement.target)
                new.append(ast.copy_location(ast.Expr(self.visit(read)), statement))
            new.append(self._statement(statement))
        return new

    def _new_values(self, statement: ast.stmt) -> list[str]:
        """Returns the variables that a statement, without those inside it, assigns or updates in place."""
        parts = [x for x in ast.iter_child_nodes(statement) if not isinstance(x, (ast.stmt, ast.excepthandler))]
        names: set[str] = set()
        called = {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}
        updated = [x for part in parts for x in updated_names(part, self._variables)]
        updated += [x for function, inner in self._inner.items() if function in called for x in inner]
        for updated_name in updated:
            name: str | None = updated_name
            while name is not None:  # The written code updates the variable of which it is a view, too.
                names.add(name)
                name = self._views.get(name)
        return sorted(names & self._variables)

    def _statement(self, statement: ast.stmt) -> ast.stmt:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            return self.visit(statement)
        for name, value in ast.iter_fields(statement):
            if name in ("body", "orelse", "finalbody"):
                setattr(statement, name, self._statements(value))
            elif name == "handlers":
                for handler in value:
                    handler.body = self._statements(handler.body)
            elif name == "annotation":
                continue
            elif isinstance(value, ast.expr):
                setattr(statement, name, self.visit(value))
            elif isinstance(value, list):
                nodes = (ast.expr, ast.keyword, ast.withitem)
                setattr(statement, name, [self.visit(x) if isinstance(x, nodes) else x for x in value])
        return statement


def _locals() -> ast.expr:
    return ast.Call(ast.Name("locals", ast.Load()), [], [])


def updated_names(node: ast.AST, variables: set[str]) -> Iterator[str]:
    """Yields the variables among some that the code of a node assigns or updates in place, by their names alone."""
    for n in ast.walk(node):
        if isinstance(n, ast.Call):
            nodes = _updated_by(n)
        else:
            nodes = [n] if isinstance(getattr(n, "ctx", None), ast.Store) else []
        roots = [root_name(x) or viewed_name(x) for x in nodes if isinstance(x, ast.expr)]
        yield from [root.id for root in roots if root is not None and root.id in variables][:1]


def _updated_by(call: ast.Call) -> list[ast.expr | None]:
    """Returns what a call such as `x.add_(1)` or `relu(x, inplace=True)` may update, the likeliest first."""
    function, keywords = call.func, {keyword.arg: keyword.value for keyword in call.keywords}
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if not (name.endswith("_") and not name.endswith("__")) and not {"inplace", "out"} & {*keywords}:
        return []
    return [keywords.get("out"), getattr(function, "value", None), *call.args[:1], keywords.get("input")]
