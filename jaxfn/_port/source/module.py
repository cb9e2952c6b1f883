"""Assembles the written module: imports, constants, helpers, and the rewritten definitions, each once."""

from __future__ import annotations

import ast
import builtins
import collections
import enum
import importlib.util
import inspect
import itertools
import json
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jaxfn._port.source import helpers
from jaxfn._port.source.expressions import (
    ReadsVariableError,
    RewriteOptions,
    Site,
    callee_name,
    code_of_function,
    is_torchs,
)
from jaxfn._port.source.observe import (
    Cached,
    ObservedRun,
    ObservedTensor,
    is_function_class,
    is_user_class,
    is_user_function,
)
from jaxfn._port.source.rewrite import FunctionRewriter, jax_annotation
from jaxfn._port.source.source_file import (
    SHARED_PACKAGES,
    FunctionNode,
    SourceFile,
    Span,
    bound_names,
    is_importable,
)
from jaxfn._port.source.table import table
from jaxfn._port.source.typecheck import dtype_text
from jaxfn._torch import ties
from jaxfn._torch._compat import scripted_function
from jaxfn._torch.values.errors import TranslationError

_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "lax": "from jax import lax",
    "jaxfn": "import jaxfn",
    "itertools": "import itertools",
}
# Decorators of torch without an effect on JAX.
_REMOVED_DECORATORS = frozenset(
    {"no_grad", "enable_grad", "custom_fwd", "custom_bwd", "compile", "ignore", "unused", "disable", "allow_in_graph"}
)
_TORCH_FOLDER = os.path.join(os.path.dirname(torch.__file__), "")
_KEPT_DECORATORS = frozenset({"staticmethod", "classmethod"})
_Definition = ast.FunctionDef | ast.ClassDef | ast.Assign
_DERIVATIVES = ("backward", "vjp", "jvp")
# Folded into the key of a call to derive the key of its backward, as in converted Functions.
_BACKWARD_KEY_DATA = 0x6261636B
# Larger tensors are to be passed as arguments.
_MAX_CONSTANT = 256
_HELPERS = {
    value.__name__: value
    for module in (ties, helpers)
    for value in vars(module).values()
    if inspect.isfunction(value) and value.__module__ == module.__name__
}


class Module(NamedTuple):
    """A written module.

    Attributes:
      text: Its text.
      alternatives: The calls that have a strict spelling.
      draws: Whether the function takes a random key.
    """

    text: str
    alternatives: tuple[Site, ...]
    draws: bool


def write_module(
    function: Any,
    observation: ObservedRun,
    strict: Collection[Site] | None,
    arguments: Sequence[Any],
    once_differentiable: bool,
    note: str,
    compares_values: bool = False,
    reads_values: bool = False,
) -> Module:
    """Writes the module that defines `function`, and the functions among `arguments`, for JAX.

    Args:
      function: A Function class or a Python function.
      observation: What was observed of it.
      strict: The calls that get the strict spelling; all if it is `None`.
      arguments: The static arguments of the examples.
      once_differentiable: Whether second derivatives are to raise.
      note: A sentence for the docstring of the module, if it is not empty.
      compares_values: Whether a line whose JAX code has other values than those that were observed raises an error.
      reads_values: Whether the code may read the values of tensors, so that it runs outside `jax.jit` only.
    """
    names = _free_names(observation)
    options = RewriteOptions(observation, strict, names, compares_values=compares_values, reads_values=reads_values)
    options.draws = drawing_functions(observation)
    writer = _Writer(options, function, once_differentiable, note)
    try:
        for x in (function, *(x for x in arguments if is_user_function(x) or is_function_class(x))):
            writer.add(x)
        return Module(writer.module_text(), tuple(options.alternatives), writer.draws)
    except SyntaxError as error:
        raise TranslationError(f"the source of {function.__name__} cannot be rewritten: {error}") from error


def _free_names(observation: ObservedRun) -> dict[str, str]:
    """Returns names for modules and helpers that the user's code does not use for something else."""
    taken: set[str] = set()
    for file, node in observation.functions.values():
        for n in ast.walk(node):
            if isinstance(n, (ast.arg, ast.FunctionDef)):
                taken.add(n.arg if isinstance(n, ast.arg) else n.name)
            elif isinstance(n, ast.Name):
                values = observation.values.get((file.path, file.span(n)), [None])
                if not isinstance(values[0], types.ModuleType) and not is_torchs(values[0]):
                    taken.add(n.id)
    return {name: f"{name}_" if name in taken else name for name in (*_IMPORTS, *_HELPERS)}


def drawing_functions(observation: ObservedRun) -> set[CodeType]:
    """Returns the code of the functions that draw random numbers, or call others that do."""
    found: set[CodeType] = set()

    def draws(file: SourceFile, call: ast.Call) -> bool:
        value = observation.values.get((file.path, file.span(call.func)), [None])[0]
        entries = table().get(callee_name(call).removesuffix("_"), ())
        return code_of_function(value) in found or (is_torchs(value) and any("{key}" in x.plain for x in entries))

    while True:
        new = {
            code
            for code, (file, node) in observation.functions.items()
            if code not in found and any(draws(file, n) for n in ast.walk(node) if isinstance(n, ast.Call))
        }
        if not new:
            return found
        found |= new


class _Writer:
    """Collects definitions, each after those that it uses.

    Attributes:
      draws: Whether the function draws random numbers.
    """

    def __init__(self, options: RewriteOptions, main: Any, once_differentiable: bool, note: str) -> None:
        self.draws = False
        self._note = note
        self._once_differentiable = once_differentiable
        self.options = options
        self._main = main
        self._spelled = {new: name for name, new in options.names.items()}
        self._helpers: dict[str, str] = {}
        self._parts: dict[str, str] = {}
        self._aliases: dict[str, list[str]] = {}  # By the name of the definition, which may not be complete.
        self._constants: dict[str, str] = {}
        self._objects: dict[str, Any] = {}
        self._imports: set[str] = set()
        self._draws: frozenset[str] = frozenset()  # The functions of a definition that draw.

    def add(self, value: Any) -> str:
        """Adds the definition of a function or class, after those that it uses, and returns its name."""
        try:
            file, node = self._definition(value)
        except TranslationError:
            if not isinstance(value, type) or not issubclass(value, tuple):
                raise
            return self._add_tuple(value)
        old = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else node.name
        name, is_new = self._reserve(old, value, value.__module__)
        if not is_new:
            return name
        if isinstance(node, ast.ClassDef):
            edits = self._class_edits(value, file, node)
        elif isinstance(node, ast.FunctionDef):
            edits = self._edits(file, node, value)
        else:
            edits = self._lambda_edits(file, node)
        text = _edited(file, node, edits)
        draws, self._draws = self._draws, frozenset()
        if draws and is_function_class(value) and value is not self._main:
            raise TranslationError(f"the source cannot be rewritten: {name} draws random numbers, and is not applied")
        if draws:
            text, self.draws = _with_key(text, draws, value is self._main, self.options), True
        text = self._with_names(text, _scope(value) | _imported(node, value), file, name)
        self._parts[name] = re.sub(rf"(?m)^((?:def|class)\s+|){old}\b", rf"\1{name}", text, count=1)
        return name

    def _add_tuple(self, kind: Any) -> str:
        """Adds a class of named tuples that no class statement defines, by its fields."""
        name, is_new = self._reserve(kind.__name__, kind, kind.__module__)
        if is_new:
            classes: dict[str, Any] = {}
            defaults = _literal(name, tuple(kind._field_defaults.values()), name, classes)
            text = f'{name} = collections.namedtuple("{name}", {json.dumps(kind._fields)}, defaults={defaults})'
            scope = {**classes, "collections": collections}
            self._parts[name] = self._with_names(text.replace(", defaults=()", ""), scope, SourceFile("", ""), name)
        return name

    def _reserve(self, name: str, value: Any, module: str) -> tuple[str, bool]:
        """Returns the name of an object of a module, and whether it had none so far.

        An object that shares its name with one of another module gets the name of its module as a prefix.
        """
        prefixed = f"{module.rpartition('.')[2]}_{name.lstrip('_')}"
        for candidate in itertools.chain((name, prefixed), (f"{prefixed}_{i}" for i in itertools.count(2))):
            if candidate not in self._objects and candidate not in self._spelled:
                self._objects[candidate] = value
                return candidate, True
            if candidate in self._objects and _is_same(self._objects[candidate], value):
                return candidate, False
        raise AssertionError

    def _definition(self, value: Any) -> tuple[SourceFile, _Definition]:
        function = next(iter(_functions(value)), None)
        file = self.options.observation.files.of(function or value)
        node: Any
        if function is None:  # A class without methods.
            classes = [n for n in ast.walk(file.tree) if isinstance(n, ast.ClassDef) and n.name == value.__name__]
            node = classes[0] if len(classes) == 1 else None
        else:
            node = file.function(function.__code__)
        while isinstance(value, type) and node is not None:
            if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                break
            node = file.parents.get(node)
        if isinstance(node, ast.Lambda):
            node = file.parents[node]
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            return file, node
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            raise TranslationError(
                f"the source of {value.__name__} cannot be rewritten: it is not a def statement, and has no name"
            )
        return file, node

    def _attribute_edits(self, value: type, file: SourceFile, statement: ast.stmt) -> dict[Span, str]:
        """Returns the edits of an attribute of a class that is a tensor, or something else of torch."""
        target = statement.targets[0] if isinstance(statement, ast.Assign) else getattr(statement, "target", None)
        if not isinstance(statement, (ast.Assign, ast.AnnAssign)) or not isinstance(target, ast.Name):
            return {}
        edits: dict[Span, str] = {}
        defaults = vars(value) | getattr(value, "_field_defaults", {})
        if isinstance(x := defaults.get(target.id), (torch.Tensor, torch.dtype)) and statement.value is not None:
            edits[file.span(statement.value)] = self.options.spell(_literal(target.id, x, value.__name__, {}))
        if isinstance(statement, ast.AnnAssign):
            text = jax_annotation(statement.annotation, self.options)
            edits[file.span(statement.annotation)] = text or "object"
        return edits

    def _lambda_edits(self, file: SourceFile, statement: ast.stmt) -> dict[Span, str]:
        """Returns the edits of the lambdas in an assignment."""
        edits: dict[Span, str] = {}
        for node in ast.walk(statement) if isinstance(statement, ast.Assign) else ():
            if isinstance(node, ast.Lambda):
                edits |= self._rewritten(file, node).edits
        return edits

    def _edits(self, file: SourceFile, node: ast.FunctionDef, function: Any) -> dict[Span, str]:
        """Returns the edits of a function."""
        rewriter = self._rewritten(file, node)
        if rewriter.draws:
            self._draws |= {node.name}
        edits = _decorator_edits(file, node, self.options, function)
        parameters = inspect.signature(function).parameters.values() if callable(function) else ()
        defaults = [*node.args.defaults, *node.args.kw_defaults]
        values = [x.default for x in parameters if x.default is not x.empty or x.kind is x.KEYWORD_ONLY]
        for default, value in zip(defaults, values, strict=False):
            if default is not None and isinstance(value, (torch.Tensor, torch.dtype)):
                edits[file.span(default)] = self.options.spell(_literal(node.name, value, node.name, {}))
        return rewriter.edits | edits

    def _rewritten(self, file: SourceFile, node: FunctionNode) -> FunctionRewriter:
        in_numpy: frozenset[str] = frozenset()
        while True:
            rewriter = FunctionRewriter(file, node, self.options, in_numpy)
            try:
                rewriter.run()
            except ReadsVariableError as error:
                in_numpy |= {error.name}
                continue
            if rewriter.draws and isinstance(node, ast.Lambda):
                raise TranslationError(
                    f"the source cannot be rewritten: a lambda draws random numbers. Write a def{file.line(node)}"
                )
            return rewriter

    def _class_edits(self, value: type, file: SourceFile, node: ast.ClassDef) -> dict[Span, str]:
        edits: dict[Span, str] = {}
        for base, base_node in zip(value.__bases__, node.bases, strict=False):
            if is_function_class(base) and base.__module__.startswith("torch."):
                edits[file.span(base_node)] = f"{self.options.names['jaxfn']}.Function"
        for method in node.body:
            if not isinstance(method, ast.FunctionDef):
                edits |= self._lambda_edits(file, method) | self._attribute_edits(value, file, method)
                continue
            attribute = vars(value).get(method.name)
            edits |= self._edits(file, method, getattr(attribute, "__func__", attribute))
            decorators = [ast.unparse(d).rpartition(".")[2] for d in method.decorator_list]
            is_main = value is self._main and method.name in ("backward", "vjp")
            if is_main and self._once_differentiable and "once_differentiable" not in decorators:
                start, indent = file.line_span(method.lineno, method.lineno)[0], " " * method.col_offset
                edits[start, start] = f"{indent}@{self.options.names['jaxfn']}.once_differentiable\n"
        assigned = bound_names(node)
        read = {
            n.attr
            for _, f in self.options.observation.functions.values()
            for n in ast.walk(f)
            if isinstance(n, ast.Attribute)
        }
        for name, x in vars(value).items():
            if isinstance(x, torch.Tensor) and name in read - assigned:  # It was set after the class was defined.
                start = file.line_span(node.body[0].lineno, node.body[0].lineno)[0]
                text = f"{' ' * node.body[0].col_offset}{name} = {_literal(name, x, value.__name__, {})}\n"
                edits[start, start] = edits.get((start, start), "") + self.options.spell(text)
        for decorator in node.decorator_list if is_function_class(value) else ():
            assert decorator.end_lineno is not None  # The class that it returned is the one that is rewritten.
            edits[file.line_span(decorator.lineno, decorator.end_lineno)] = ""
        return edits

    def _with_names(self, text: str, scope: Mapping[str, Any], file: SourceFile, where: str) -> str:
        """Adds everything that the global names in a text denote, and returns the text with the names of that here."""
        written, edits = SourceFile("", text), dict[Span, str]()
        for node in _global_names(written):
            name, spelled = node.id, self._spelled.get(node.id)
            if spelled in _IMPORTS:
                self._imports.add(_aliased(_IMPORTS[spelled], spelled, name))
            elif spelled in _HELPERS and spelled not in self._helpers:
                helper = _HELPERS[spelled]
                self._helpers[spelled] = self.options.spell(inspect.getsource(helper).rstrip())
                self._with_names(self._helpers[spelled], helper.__globals__, file, spelled)
            elif spelled is not None:
                continue
            elif name in scope:
                found = _denoted(written, node, scope[name])
                new = self._add_value(found, file, where)
                if new != written.segment(found.node):
                    edits[written.span(found.node)] = new
            elif name in typing.__all__:
                self._imports.add(f"from typing import {name}")
            elif name not in self._objects and not hasattr(builtins, name):
                raise TranslationError(f"the source of {where} cannot be rewritten: {name} is not defined")
        return written.edited((0, len(written.text)), edits)

    def _add_value(self, found: _Denoted, file: SourceFile, where: str) -> str:
        """Adds what an expression denotes, and returns its text in the written module."""
        name, value = found.name, scripted_function(found.value)
        module = getattr(value, "__module__", None) or ""
        package = module.partition(".")[0]
        is_standard = package in (sys.stdlib_module_names - {"builtins", "__main__"})
        own_name = getattr(value, "__name__", "")
        is_shared = package in SHARED_PACKAGES and hasattr(sys.modules[package], own_name)
        if isinstance(value, types.ModuleType):
            if not is_importable(value.__name__):
                raise TranslationError(
                    f"the source of {where} cannot be rewritten: it uses the module {value.__name__}"
                )
            self._imports.add(f"import {value.__name__}" + f" as {name}" * (name != value.__name__))
        elif is_user_function(inspect.unwrap(value)) or is_user_class(value):
            return self._alias(found, self.add(value))
        elif getattr(value, "__name__", "") == "apply" and is_function_class(getattr(value, "__self__", None)):
            return self._alias(found, f"{self.add(value.__self__)}.apply")
        elif is_standard and hasattr(sys.modules[module], name):
            self._imports.add(f"from {module} import {name}")
        elif is_shared:
            self._imports.add(f"from {package} import {own_name}" + f" as {name}" * (name != own_name))
        else:
            name, is_new = self._reserve(name, value, found.module or Path(file.path).stem)
            if is_new:
                text, classes = _constant_text(name, found, file, where)
                text = self._with_names(text, classes, file, where)
                (self._parts if classes else self._constants)[name] = text
        return name

    def _alias(self, found: _Denoted, text: str) -> str:
        """Returns the name of a definition in other code, `text` if that is its own or belongs to another object."""
        if found.module or found.name == text:
            return text
        if found.name not in self._objects and found.name not in self._spelled:
            self._objects[found.name] = found.value
            self._aliases.setdefault(text.removesuffix(".apply"), []).append(f"{found.name} = {text}")
        return found.name if _is_same(self._objects.get(found.name), found.value) else text

    def module_text(self) -> str:
        """Returns the text of the module."""
        head = [_header(self._main, self._note), _sorted_imports(self._imports)]
        head += ["\n".join(self._constants.values())] if self._constants else []
        copied = [self._helpers[name] for name in _HELPERS if name in self._helpers]
        parts = [part for name, text in self._parts.items() for part in (text, *self._aliases.get(name, ()))]
        return "\n\n\n".join(["\n\n".join(head), *copied, *parts]) + "\n"


def _functions(value: Any) -> list[Any]:
    """Returns a function, or the Python functions that a class itself defines."""
    attributes = list(vars(value).values()) if isinstance(value, type) else [value]
    functions = [inspect.unwrap(getattr(x, "__func__", x)) for x in attributes if not isinstance(x, type)]
    # A named tuple has methods that Python generates in other modules.
    return [x for x in functions if is_user_function(x) and x.__module__ == value.__module__]


def _scope(value: Any) -> dict[str, Any]:
    """Returns the objects that global names and those of closures denote in the code of a function or class."""
    scope = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in _functions(value):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        scope |= function.__globals__ | {name: cell.cell_contents for name, cell in cells}
    return scope


def _imported(node: ast.AST, value: Any) -> dict[str, Any]:
    """Returns the objects that the imports inside a definition bind, of modules that have been imported."""
    package = getattr(sys.modules.get(value.__module__), "__package__", None)
    scope: dict[str, Any] = {}
    for n in ast.walk(node):
        if isinstance(n, ast.Import):
            for x in n.names:
                path = x.name if x.asname else x.name.partition(".")[0]
                if path in sys.modules:
                    scope[x.asname or path] = sys.modules[path]
        elif isinstance(n, ast.ImportFrom):
            path = importlib.util.resolve_name(f"{'.' * n.level}{n.module or ''}", package)
            module = sys.modules.get(path)
            scope |= {x.asname or x.name: getattr(module, x.name) for x in n.names if hasattr(module, x.name)}
    return scope


def _is_same(x: Any, y: Any) -> bool:
    """Whether two objects that have one name are one object, or equal constants."""
    y = scripted_function(y)
    is_constant = isinstance(x, (bool, int, float, complex, str, tuple, list, dict, torch.dtype))
    if is_constant:
        return type(x) is type(y) and x == y
    return getattr(x, "__self__", x) is getattr(y, "__self__", y)


def _is_unchanged(function: Any) -> bool:
    """Whether decorators left a function as it is, or those of torch wrapped it."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not getattr(getattr(function, "__code__", None), "co_filename", "").startswith(_TORCH_FOLDER):
            return False
        function = inner
    return True


def _keeps_cache(file: SourceFile, node: ast.FunctionDef, options: RewriteOptions) -> bool:
    """Whether a function with a cache returns Python's values, not tensors, which JAX may trace."""
    returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value is not None]
    values = [x for n in returns for x in options.observation.values.get((file.path, file.span(n)), [])]
    leaves = jax.tree_util.tree_leaves(tuple(values), is_leaf=lambda x: isinstance(x, (list, dict)))
    if any(not isinstance(x, (bool, int, float, complex, str, torch.dtype, ObservedTensor)) for x in leaves):
        raise TranslationError(
            f"the source cannot be rewritten: the cache of {node.name} has objects that may change{file.line(node)}"
        )
    return not any(isinstance(x, ObservedTensor) for x in leaves)


def _decorator_edits(
    file: SourceFile, node: ast.FunctionDef, options: RewriteOptions, function: Any
) -> dict[Span, str]:
    """Returns the edits of decorators; those that did not change the function are removed."""
    edits: dict[Span, str] = {}
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        assert decorator.end_lineno is not None
        is_cache = isinstance(function, Cached) and name in ("cache", "lru_cache")
        if name == "once_differentiable":
            edits[file.span(decorator)] = f"{options.names['jaxfn']}.once_differentiable"
        elif name in _KEPT_DECORATORS or (is_cache and _keeps_cache(file, node, options)):
            continue
        elif is_cache or _is_unchanged(function) or name in _REMOVED_DECORATORS or node.name == "symbolic":
            edits[file.line_span(decorator.lineno, decorator.end_lineno)] = ""
        else:
            line = file.line(decorator)
            raise TranslationError(f"the source cannot be rewritten: the decorator {name} has no rule{line}")
    return edits


def _edited(file: SourceFile, node: _Definition, edits: dict[Span, str]) -> str:
    """Returns the text of a definition with parts replaced, without its indentation."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    start = file.line_span(first, first)[0]
    return textwrap.dedent(file.edited((start, file.span(node)[1]), edits)).rstrip()


def _with_key(text: str, draws: frozenset[str], is_main: bool, options: RewriteOptions) -> str:
    """Adds a random key to the inputs of a Function or a function, or a sequence of keys to those of a helper."""
    file = SourceFile("", text)
    definition = file.tree.body[0]
    assert isinstance(definition, (ast.FunctionDef, ast.ClassDef))
    body = definition.body if isinstance(definition, ast.ClassDef) else [definition]
    functions = {n.name: n for n in body if isinstance(n, ast.FunctionDef)}
    if {"key", "keys"} & set().union(*map(bound_names, functions.values())):
        raise TranslationError(
            "the source cannot be rewritten: it draws random numbers and has a variable `key` or `keys`. Rename it"
        )
    edits: dict[Span, str] = {}
    for name in draws - {"forward", *_DERIVATIVES} if isinstance(definition, ast.ClassDef) or not is_main else ():
        edits |= _parameter(file, functions[name], "keys")
    if not is_main:
        return _edited(file, definition, edits)
    forward = functions["forward"] if isinstance(definition, ast.ClassDef) else definition
    assert isinstance(forward, ast.FunctionDef)
    edits |= _parameter(file, forward, "key=None")
    assignment = options.spell("keys = (jax.random.fold_in(key, i) for i in itertools.count())")
    lines: dict[str, list[str]] = {}
    if forward.name in draws:
        lines[forward.name] = [assignment]
    derivatives = draws & {*_DERIVATIVES}
    if isinstance(definition, ast.ClassDef):
        if (setup := functions.get("setup_context")) is not None:
            ctx, inputs = (x.arg for x in setup.args.args[:2])
            lines["setup_context"] = [f"*{inputs}, {f'{ctx}.key' if derivatives else '_'} = {inputs}"]
        elif derivatives:
            lines.setdefault("forward", []).insert(0, f"{forward.args.args[0].arg}.key = key")
        for name in derivatives:
            key = f"key = jax.random.fold_in({functions[name].args.args[0].arg}.key, 0x{_BACKWARD_KEY_DATA:X})"
            lines[name] = [options.spell(key), assignment]
        for value in [*_returned(functions.get("backward")), *_returned(functions.get("vjp"))]:
            _, end = file.span(value.elts[-1] if isinstance(value, ast.Tuple) else value)
            edits[end, end] = ", None"  # The gradient of the key.
    for name, new in lines.items():
        first = functions[name].body[ast.get_docstring(functions[name]) is not None]
        start, _ = file.span(first)
        edits[start, start] = "".join(f"{line}\n{' ' * first.col_offset}" for line in new)
    return _edited(file, definition, edits)


def _parameter(file: SourceFile, node: ast.FunctionDef, text: str) -> dict[Span, str]:
    """Returns the edit that adds a keyword-only parameter to a function."""
    arguments = node.args
    parameters = [*arguments.args, *arguments.kwonlyargs, *filter(None, [arguments.vararg])]
    nodes = [*parameters, *arguments.defaults, *(x for x in arguments.kw_defaults if x is not None)]
    is_keyword_only = bool(arguments.kwonlyargs) or arguments.vararg is not None
    if not nodes:
        end = file.text.index(b"(", file.span(node)[0]) + 1
        return {(end, end): f"*, {text}"}
    end = max(file.span(x)[1] for x in nodes)
    return {(end, end): f", {text}" if is_keyword_only else f", *, {text}"}


def _returned(node: ast.AST | None) -> Iterator[ast.expr]:
    """Yields the values that a function returns."""
    for child in () if node is None else ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value is not None:
            yield child.value
        elif not isinstance(child, (ast.FunctionDef, ast.Lambda)):
            yield from _returned(child)


def _global_names(file: SourceFile) -> list[ast.Name]:
    """Returns the reads of names of its module in a definition, breadth-first."""
    names = [n for n in ast.walk(file.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    return [n for n in names if not any(n.id in bound for bound in _enclosing_names(file, n))]


def _enclosing_names(file: SourceFile, node: ast.expr) -> Iterator[set[str]]:
    """Yields the names that each of the scopes around an expression binds."""
    child: ast.AST = node
    in_function = False
    while not isinstance(parent := file.parents[child], ast.Module):
        if isinstance(parent, (ast.FunctionDef, ast.Lambda)):
            is_body = child in parent.body if isinstance(parent, ast.FunctionDef) else child is parent.body
            aliases = {(n.asname or n.name).partition(".")[0] for n in ast.walk(parent) if isinstance(n, ast.alias)}
            yield bound_names(parent) | aliases if is_body else set()
            in_function = in_function or is_body
        elif isinstance(parent, ast.ClassDef):
            yield bound_names(parent) if child in parent.body and not in_function else set()
        elif isinstance(parent, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            stored = [n for x in parent.generators for n in ast.walk(x.target)]
            yield {n.id for n in stored if isinstance(n, ast.Name)}
        child = parent


class _Denoted(NamedTuple):
    """The object that `f` or `module.f` denotes, for modules that the written one does not import.

    Attributes:
      module: The name of the module, if the expression names it.
    """

    node: ast.Name | ast.Attribute
    name: str
    value: Any
    module: str


def _denoted(file: SourceFile, node: ast.Name, value: Any) -> _Denoted:
    found = _Denoted(node, node.id, value, "")
    while isinstance(module := found.value, types.ModuleType) and not is_importable(module.__name__):
        parent = file.parents[found.node]
        if not isinstance(parent, ast.Attribute) or not hasattr(module, parent.attr):
            break
        found = _Denoted(parent, parent.attr, getattr(module, parent.attr), module.__name__)
    return found


def _constant_text(name: str, found: _Denoted, file: SourceFile, where: str) -> tuple[str, dict[str, Any]]:
    """Returns the assignment of a constant, that of the user's file if it has a literal, and the classes in it."""
    for statement in file.tree.body if name == found.name and not found.module else ():
        if isinstance(statement, ast.Assign) and [ast.unparse(t) for t in statement.targets] == [name]:
            try:
                if ast.literal_eval(statement.value) == found.value:
                    assert statement.end_lineno is not None
                    return file.slice(file.line_span(statement.lineno, statement.end_lineno)).rstrip(), {}
            except ValueError:
                break
    classes: dict[str, Any] = {}
    kind = type(found.value)
    if is_user_class(kind) and hasattr(found.value, "__dict__") and _fields(found.value) is None:
        # The constructor ran before torch code was observed.
        state = _keywords(name, vars(found.value), where, classes)
        classes[kind.__name__] = kind
        return f"{name} = object.__new__({kind.__name__})\nvars({name}).update({state})", classes
    return f"{name} = {_literal(name, found.value, where, classes)}", classes


def _literal(name: str, value: Any, where: str, classes: dict[str, Any]) -> str:
    """Returns a constant as code, and adds the classes that it names to `classes`."""
    if isinstance(value, torch.dtype):
        return dtype_text(value)
    if isinstance(value, torch.Tensor) and value.numel() <= _MAX_CONSTANT and not value.requires_grad:
        return _array_text(value)
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if value is None or isinstance(value, (bool, int, float, complex)):
        return repr(value)
    if isinstance(value, types.SimpleNamespace):
        classes["types"] = types
        return f"types.SimpleNamespace({_keywords(name, vars(value), where, classes)})"
    if (arguments := _fields(value)) is not None:
        classes[type(value).__name__] = type(value)
        return f"{type(value).__name__}({_keywords(name, arguments, where, classes)})"
    if isinstance(value, (tuple, list)):
        items = ", ".join(_literal(name, x, where, classes) for x in value)
        return f"({items}{',' * (len(value) == 1)})" if isinstance(value, tuple) else f"[{items}]"
    if isinstance(value, dict):
        items = [(_key(k, classes), _literal(name, v, where, classes)) for k, v in value.items()]
        return f"{{{', '.join(f'{key}: {item}' for key, item in items)}}}"
    kind = type(value).__name__ + (f" of {value.numel()} elements" if isinstance(value, torch.Tensor) else "")
    raise TranslationError(
        f"the source of {where} cannot be rewritten: {name} is a {kind} outside the function. Pass it as an argument"
    )


def _keywords(name: str, values: Mapping[str, Any], where: str, classes: dict[str, Any]) -> str:
    return ", ".join(f"{key}={_literal(name, value, where, classes)}" for key, value in values.items())


def _fields(value: Any) -> dict[str, Any] | None:
    """Returns the arguments by which a named tuple or dataclass of the user's is created; `None` for another object."""
    kind: Any = type(value)
    if is_user_class(kind) and isinstance(value, tuple) and hasattr(value, "_asdict"):
        return kind._asdict(value)
    if is_user_class(kind) and is_dataclass(value) and not is_user_function(kind.__init__):
        names = [x.name for x in fields(value) if x.init]
        return {name: getattr(value, name) for name in names} if {*names} == {*vars(value)} else None
    return None


def _array_text(value: torch.Tensor) -> str:
    """Returns a tensor as a NumPy array."""
    name = str(value.dtype).removeprefix("torch.")
    array = value.detach().cpu().resolve_conj().resolve_neg()
    array = (array.float() if value.dtype == torch.bfloat16 else array).numpy()
    text = np.array2string(array, separator=",", threshold=array.size + 1, floatmode="unique")
    text = re.sub(r"\.(?!\d)", ".0", re.sub(r"\s+", "", text)).replace(",", ", ")
    numbers = re.sub(r"(nan|inf)", r"np.\1", text)
    dtype = {"bfloat16": "jnp.bfloat16", "bool": "bool"}.get(name, f"np.{name}")
    return f"np.array({numbers}, {dtype})"


def _key(value: Any, classes: dict[str, Any]) -> str:
    if isinstance(value, enum.Enum) and is_user_class(type(value)):
        classes[type(value).__name__] = type(value)
        return f"{type(value).__name__}({value.value!r})"
    return f"jnp.dtype({dtype_text(value)})" if isinstance(value, torch.dtype) else repr(value)


def _aliased(line: str, name: str, new: str) -> str:
    return line if name == new else f"{line.removesuffix(f' as {name}')} as {new}"


def _sorted_imports(lines: Collection[str]) -> str:
    """Sorts imports as isort does: the standard library, other packages, jaxfn."""
    packages = {line: line.split()[1].partition(".")[0] for line in lines}
    sections: list[list[str]] = [[], [], []]
    for line in sorted(lines, key=lambda line: (line.startswith("from"), line.split()[1], line)):
        package = packages[line]
        sections[0 if package in sys.stdlib_module_names else 2 if package == "jaxfn" else 1].append(line)
    return "\n\n".join("\n".join(section) for section in sections if section)


def _header(function: Any, note: str) -> str:
    """Returns the docstring of the module."""
    name = f"{function.__module__}.{function.__qualname__}"
    texts = [f"{name}, rewritten for JAX by jaxfn. The license of the original applies.", note]
    lines = ["\n".join(textwrap.wrap(text, 116, break_long_words=False)) for text in texts if text]
    return f'"""{lines[0]}"""' if len(lines) == 1 and "\n" not in lines[0] else '"""' + "\n\n".join(lines) + '\n"""'
