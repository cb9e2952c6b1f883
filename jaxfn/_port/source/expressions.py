"""Rewrites expressions for JAX: calls of torch, in-place updates, and what contains them."""

from __future__ import annotations

import ast
import copy
import re
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch

from jaxfn._port.source import rules
from jaxfn._port.source.observe import ObservedRun, ObservedTensor, is_function_class
from jaxfn._port.source.source_file import (
    FunctionNode,
    SourceFile,
    Span,
    bound_names,
    formatted_values,
    root_name,
    viewed,
    viewed_name,
    views_in,
)
from jaxfn._port.source.spelling import (
    NoRuleError,
    ReadsValuesError,
    as_operand,
    fields,
    fill,
    grouped,
    parse_expression,
    select,
)
from jaxfn._port.source.table import Argument, TableEntry, code_of, table
from jaxfn._port.source.typecheck import TemplateCheck, dtype_text
from jaxfn._port.source.vjp_regions import Region, argument_of, find_regions, gradient_of, is_backward, names_of

Site = tuple[str, Span]
_AUGMENTED: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "subtract",
    ast.Mult: "multiply",
    ast.Div: "divide",
}
# The positions of the named results of torch functions.
_RESULT_FIELDS = {
    "min": 0,
    "max": 1,
    "values": 0,
    "indices": 1,
    "sign": 0,
    "LU": 0,
    "pivots": 1,
    "logabsdet": 1,
    "eigenvalues": 0,
    "eigenvectors": 1,
}
_SAVED = ("saved_variables", "saved_for_forward")  # other names of `saved_tensors`
_SELECTS = "a mask selects elements, whose number depends on values; use torch.where"
_READS_VALUE = "the value of a tensor is read. Use torch.where, or pass the number as an argument"
_STATIC_ATTRIBUTES = frozenset({"shape", "ndim", "dtype", "size"})


class ReadsVariableError(Exception):
    """The value of a constant tensor is read, so that a NumPy array has to be assigned to its variable."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


@dataclass
class RewriteOptions:
    """The options, and the shared results, of rewriting the functions of a module.

    Attributes:
      strict: The calls that get the strict spelling; all calls if it is `None`.
      names: The names, in the written module, of `jax`, `jnp`, `lax`, `np`, `jaxfn` and the helpers; others than usual
        where the user's code has these names.
      alternatives: Finds the calls that have a strict spelling (set by the rewriting).
      draws: The code of functions that draw random numbers.
      compares_values: Whether JAX code with other values than those that were observed raises an error.
      reads_values: Whether the code may read the values of tensors, so that it runs outside `jax.jit` only.
    """

    observation: ObservedRun
    strict: Collection[Site] | None = frozenset()
    names: Mapping[str, str] = field(default_factory=dict)
    alternatives: dict[Site, None] = field(default_factory=dict)
    draws: Collection[CodeType] = ()
    compares_values: bool = False
    reads_values: bool = False

    def spell(self, code: str) -> str:
        """Replaces names of modules and helpers by those of the written module."""
        for name, new in self.names.items():
            if name != new:
                code = re.sub(rf"(?<![\w.]){name}\b", new, code)
        return code


class InPlaceCall(NamedTuple):
    """A call that updates a tensor in place.

    Attributes:
      name: The name of the function that computes the new value.
      target: The updated expression.
    """

    name: str
    target: ast.expr
    arguments: Sequence[ast.expr]
    keywords: Sequence[ast.keyword]


class ExpressionRewriter:
    """Rewrites the expressions of one function.

    Attributes:
      draws: Whether it draws random numbers.
      edits: The replaced parts of the file's text, by position.
    """

    def __init__(
        self, file: SourceFile, node: FunctionNode, options: RewriteOptions, in_numpy: Collection[str]
    ) -> None:
        self.draws = False
        self._file = file
        self._options = options
        self._numpy_variables = in_numpy
        self._node = node
        self._variables = [bound_names(node)]
        self._nonlocals: set[str] = set()  # of the function inside a function that is rewritten
        self._before: list[str] = []
        self._conditional = 0
        self._regions = find_regions(node, self._value)
        self._masks: dict[str, ast.expr | None] = {}
        self._assigned = {x.id: y for n in ast.walk(node) for x, y in assignments(n) if isinstance(x, ast.Name)}
        self.edits: dict[Span, str] = {}
        self._check = TemplateCheck(options.compares_values)

    # Errors and observations

    def _location(self, node: ast.stmt | ast.expr) -> str:
        return f"{self._file.path.rpartition('/')[2]}, line {node.lineno}"

    def _values(self, node: ast.expr) -> list[Any]:
        if isinstance(node, ast.Constant):
            return [node.value]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            return [ast.literal_eval(node)]
        observation, key = self._options.observation, (self._file.path, self._file.span(node))
        return observation.values.get(key) or observation.in_double.get(key, [])

    def _value(self, node: ast.expr) -> Any:
        values = self._values(node)
        return values[0] if values else None

    def _value_in_double(self, node: ast.expr) -> Any:
        """Returns the value of an expression where the inputs are in double precision."""
        values = self._options.observation.in_double.get((self._file.path, self._file.span(node)))
        return values[0] if values else self._value(node)

    def _is_tensor(self, node: ast.expr) -> bool:
        return any(isinstance(value, ObservedTensor) for value in self._values(node))

    def _is_variable(self, name: str) -> bool:
        return any(name in names for names in self._variables)

    # In-place updates

    def _update(self, call: ast.Call) -> str:
        """Returns the value of a call that updates a tensor in place, after the statement that stores it."""
        updated = self._updated(call)
        assert updated is not None
        text = self._apply(call, updated.name, updated.arguments, updated.keywords)
        target = updated.target
        while isinstance(target, ast.Call) and (inner := self._updated(target)) is not None:
            target = inner.target
        is_part = isinstance(target, (ast.Name, ast.Attribute)) and root_name(target) is not None
        if not is_part and self._is_fresh(target):
            return text  # Nothing else has the tensor.
        if not isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)) and viewed_name(target) is None:
            raise NoRuleError(
                f"{self._file.segment(target)} is updated in place, and shares memory with another tensor"
            )
        if self._conditional:
            raise NoRuleError("a tensor is updated in place in a part of an expression; use a separate statement")
        self._before += self._store(target, text)
        return self._render(target)

    def _is_fresh(self, node: ast.expr) -> bool:
        values = self._values(node)
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.value, ast.Call):
            results = [x for x in self._values(node.value) if isinstance(x, tuple)]
            values = [x for result in results for x in result] or values  # `max(x, dim=0).values`
        return bool(values) and all(isinstance(x, ObservedTensor) and x.is_fresh for x in values)

    def _updated(self, call: ast.Call) -> InPlaceCall | None:
        """Returns what a call updates in place; `None` if it updates nothing."""
        if not self._is_torch_call(call):
            return None
        name, arguments = self._callee(call)
        keywords = {x.arg: x for x in call.keywords}
        if "out" in keywords:
            rest = [x for x in call.keywords if x.arg != "out"]
            return InPlaceCall(name, keywords["out"].value, arguments, rest)
        inplace = keywords.get("inplace")
        is_inplace = inplace is not None and self._value(inplace.value) is True
        has_suffix = name.endswith("_") and not name.endswith("__") and name not in table()
        if not is_inplace and not has_suffix:
            return None
        target = arguments[0] if arguments else keywords["input"].value
        return InPlaceCall(name.removesuffix("_"), target, arguments, call.keywords)

    def _store(self, target: ast.expr, text: str) -> list[str]:
        """Returns the statements that give an expression a new value, and the variables of which it is a view."""
        base = viewed(target)
        if base is not None and self._is_tensor(base):
            return self._store(base, self._viewed_value(target, base, text))
        if not isinstance(target, (ast.Name, ast.Attribute, ast.Subscript)):
            raise NoRuleError(f"{self._file.segment(target)} is updated in place")
        if isinstance(target, ast.Name) and target.id not in self._variables[-1] and self._is_variable(target.id):
            self._nonlocals.add(target.id)
        name = target.id if isinstance(target, ast.Name) else self._render(target)
        return [f"{name} = {text}", *self._write_back(target)]

    def _viewed_value(self, view: ast.expr, base: ast.expr, text: str) -> str:
        """Returns the new value of the tensor that is updated through a view; `text` is that of the view."""
        x, new = as_operand(self._render(base)), as_operand(text)
        if isinstance(view, ast.Subscript):
            return f"{x}.at[{self._index(view)}].set({text})"
        if not isinstance(view, ast.Call):  # x.data
            return text
        name, (_, *nodes) = self._callee(view)
        arguments = [self._argument(node).text for node in nodes]
        joined = ", ".join(arguments)
        codes = {
            "t": f"{new}.T",
            "detach": text,
            "contiguous": text,
            "permute": f"{new}.transpose(np.argsort(({joined},)))",
        }
        if name in ("transpose", "swapaxes", "swapdims"):
            codes[name] = f"{new}.swapaxes({joined})"
        elif name == "narrow" and len(arguments) == 3:
            codes[name] = f"lax.dynamic_update_slice_in_dim({x}, {text}, {arguments[1]}, {arguments[0]})"
        elif name == "select" and len(arguments) == 2:
            codes[name] = f"at_index({x}, {joined}).set({text})"
        elif name == "diagonal" and not arguments and self._value(base).ndim == 2:
            codes[name] = f"jnp.fill_diagonal({x}, {text}, inplace=False)"
        elif name in ("flatten", "ravel", "reshape", "reshape_as", "squeeze", "unsqueeze", "view", "view_as"):
            codes[name] = f"{new}.reshape({x}.shape)"
        dims = {self._value(x.value) for x in view.keywords if x.arg in ("dim1", "dim2")}
        if name == "diagonal" and len(view.keywords) == 2 and dims == {-1, -2} and not arguments:
            axis = f"np.arange(min({x}.shape[-2:]))"
            return self._options.spell(f"{x}.at[..., {axis}, {axis}].set({text})")
        if view.keywords or name not in codes:
            raise NoRuleError(f"a tensor is updated in place through {name}")
        return self._options.spell(codes[name])

    def _write_back(self, target: ast.expr) -> list[str]:
        """Returns the statements for the variables of which an updated variable is a view, if they are read later."""
        views = views_in(self._node)
        view, name = views.get(getattr(target, "id", ""), (None, None))
        base = viewed(view) if view is not None else None
        if not isinstance(target, ast.Name) or view is None or base is None or self._is_fresh(view):
            return []
        if not self._is_tensor(base):  # A tuple is rarely read again; if it is, the proof fails.
            return []
        names = {target.id}
        while name is not None:
            names.add(name.id)
            _, name = views.get(name.id, (None, None))
        nodes = list(ast.walk(self._node))
        in_loop = any(isinstance(n, (ast.For, ast.While)) and target in ast.walk(n) for n in nodes)
        is_read = any(isinstance(n, ast.Name) and n.id in names and n.lineno > target.lineno for n in nodes)
        return self._store(base, self._viewed_value(view, base, target.id)) if in_loop or is_read else []

    def _writes_tensor(self, target: ast.Subscript | ast.Attribute) -> bool:
        return self._is_tensor(target.value) and (isinstance(target, ast.Subscript) or target.attr == "data")

    def _set(self, target: ast.Subscript | ast.Attribute, value: ast.expr, op: ast.operator | None) -> list[str]:
        """Returns the statements for `target = value` or, with an operator, `target += value`."""
        if isinstance(target, ast.Attribute):
            text = self._render(value) if op is None else self._operation(target.value, op, self._render(value))
            return self._store(target.value, text)
        base = target.value
        self._stale(base)
        observed = self._value(base)
        mask = self._value(target.slice)
        new = self._value(value)
        if isinstance(mask, ObservedTensor) and mask.dtype == torch.bool:
            num_more = observed.ndim - mask.ndim
            fits = not isinstance(new, ObservedTensor) or new.ndim <= num_more or self._mask_of(value)
            if fits or not (mask.is_constant or self._options.reads_values):
                return self._set_mask(target, value, op, num_more, bool(fits))
        text = self._render(value)
        base_text = as_operand(self._render(base))
        index = self._index(target)
        if isinstance(new, ObservedTensor) and new.dtype != observed.dtype:
            text = f"{as_operand(text)}.astype({base_text}.dtype)"
        verb = "set"
        if op is not None:
            indices = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
            is_basic = not any(self._is_tensor(x) or isinstance(self._value(x), list) for x in indices)
            verb = _AUGMENTED.get(type(op), "") if is_basic else ""
            if not verb:  # An element that is selected twice is updated once.
                verb, text = "set", self._operation(target, op, text)
        return self._store(base, f"{base_text}.at[{index}].{verb}({text})")

    def _operation(self, target: ast.expr, op: ast.operator, value: str) -> str:
        return fill(operator_template(op), {"x": self._render(target), "y": value})

    def _set_mask(
        self, target: ast.Subscript, value: ast.expr, op: ast.operator | None, num_more: int, fits: bool
    ) -> list[str]:
        if not fits:
            raise ReadsValuesError("elements that a mask selects are set to a tensor; use torch.where")
        mask_text, base = self._mask(target.slice, num_more), self._render(target.value)
        x, new = self._value(target.value), self._value(value)
        text = self._render(value)
        if op is not None:
            text = self._operation(target.value, op, text)
        value_dtype = new.dtype if isinstance(new, ObservedTensor) else type(new)
        fits = value_dtype in (x.dtype, int, bool) or (value_dtype is float and x.dtype.is_floating_point)
        text = text if fits else self._options.spell(f"jnp.asarray({text}, {base}.dtype)")
        return self._store(target.value, self._options.spell(f"jnp.where({mask_text}, {text}, {base})"))

    # Expressions

    def _render(self, node: ast.expr) -> str:
        """Returns the new text of an expression."""
        if isinstance(node, ast.Constant):
            return self._file.segment(node)
        if self._is_instrumented(node) and not self._values(node):
            return self._options.spell("not_reached") + f'("{self._location(node)}")'
        rule: Callable[..., str | None] | None = getattr(self, f"_render_{type(node).__name__.lower()}", None)
        text = rule(node) if rule is not None else None
        text = self._splice(node) if text is None else text
        if isinstance(node, (ast.Call, ast.Subscript)) and isinstance(value := self._value(node), np.generic):
            # Python's number, which does not promote arrays, as NumPy's does not in torch.
            is_python = callee_name(self._file.parents[node]) in ("int", "float", "bool")
            return text if is_python else f"{type(value.item()).__name__}({text})"
        return text

    def _selected(self, node: ast.Subscript) -> str:
        """Returns the tensor that a mask selects elements of, whose other elements are not used.

        In the strict spelling they are 1, at which functions and their derivatives are finite.
        """
        text, mask = self._render(node.value), self._mask(node.slice, self._value(node).ndim - 1)
        return self._options.spell(f"jnp.where({mask}, {text}, 1)") if self._strict(node) else text

    def _mask_of(self, node: ast.expr) -> ast.expr | None:
        """Returns the mask that selects the elements with which an expression is computed; `None` without one.

        The conversion, with which the module is compared, accepts elementwise functions of them, and sums.
        """
        if isinstance(node, ast.Subscript) and self._selects(node):
            return node.slice
        if isinstance(node, ast.Name):
            if (value := self._assigned.pop(node.id, None)) is not None:
                self._masks[node.id] = self._mask_of(value)
            return self._masks.get(node.id)
        parts = () if callee_name(node) == "sum" else _parts(node)
        return next(filter(None, map(self._mask_of, parts)), None)

    def _selects(self, node: ast.Subscript) -> bool:
        """Whether an expression is `x[mask]` with a mask that depends on values."""
        if self._options.reads_values:
            return False
        mask = self._value(node.slice) if self._is_tensor(node.value) else None
        return isinstance(mask, ObservedTensor) and mask.dtype == torch.bool and not mask.is_constant

    def _call_sum(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str | None:
        """Returns the sum of the elements that a mask selects."""
        mask = self._mask_of(args[0].node)
        if mask is None or args[1:] or named:
            return None
        text = f"{as_operand(args[0].text)}.sum(where={self._mask(mask, args[0].value.ndim - 1)})"
        cast = self._cast(call, "{x}.sum()", {"x": args[0]})
        return text if cast is None else f"{text}.astype({cast})"

    def _mask(self, node: ast.expr, num_more: int) -> str:
        """Returns a mask with more axes."""
        text = self._render(node)
        return f"{as_operand(text)}[...{', None' * num_more}]" if num_more else text

    def _strict(self, node: ast.expr, has_both: bool = True) -> bool:
        """Whether an expression gets the strict spelling; records that it has both."""
        site = self._file.path, self._file.span(node)
        if has_both:
            self._options.alternatives[site] = None
        return self._options.strict is None or site in self._options.strict

    def _is_instrumented(self, node: ast.expr) -> bool:
        kinds = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
        is_read = isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        return is_read and isinstance(node, (*kinds, ast.IfExp, ast.List, ast.Tuple, ast.Dict, ast.ListComp))

    def _splice(self, node: ast.expr, texts: Mapping[ast.expr, str] | None = None) -> str:
        """Returns the text of an expression with that of its parts replaced, by `texts` if they are passed."""
        start, end = self._file.span(node)
        pieces: list[str] = []
        is_conditional = isinstance(node, (ast.IfExp, ast.BoolOp, ast.ListComp, ast.GeneratorExp, ast.Lambda))
        self._conditional += is_conditional
        targets = [
            n for x in ast.iter_child_nodes(node) if isinstance(x, ast.comprehension) for n in ast.walk(x.target)
        ]
        names = {n.id for n in targets if isinstance(n, ast.Name)}
        self._variables.append(names | (bound_names(node) if isinstance(node, ast.Lambda) else set()))
        for child in sorted(_parts(node), key=self._file.span):
            child_start, child_end = self._file.span(child)
            text = self._render(child) if texts is None else texts[child]
            if text != self._file.segment(child):
                before = "".join((*pieces, self._file.slice((start, child_start))))
                text = grouped(before, text, self._file.slice((child_end, end)))
            pieces += [self._file.slice((start, child_start)), text]
            start = child_end
        self._conditional -= is_conditional
        self._variables.pop()
        return "".join((*pieces, self._file.slice((start, end))))

    def _stale(self, node: ast.expr) -> None:
        message = self._options.observation.stale.get((self._file.path, self._file.span(node)))
        if message is not None:
            raise NoRuleError(message)

    def _render_name(self, node: ast.Name) -> str | None:
        self._stale(node)
        if isinstance(node.ctx, ast.Load) and not self._is_variable(node.id):
            return self._object(node, self._value(node))
        return None

    def _render_joinedstr(self, node: ast.JoinedStr) -> str:
        """Returns an f-string, with other quotes if they are needed for new values."""
        written, old = copy.deepcopy(node), self._file.segment(node)
        is_new = False
        for x, new in zip(formatted_values(node), formatted_values(written), strict=True):
            if self._file.locates_values(node) and self._values(x.value):
                text = self._render(x.value)
                is_new = is_new or text != self._file.segment(x.value)
                new.value = parse_expression(text)
        return ast.unparse(written) if is_new else old

    def _object(self, node: ast.expr, value: Any) -> str | None:
        """Returns the text of a global object of torch; `None` if it is not torch's."""
        is_apply = is_function_class(getattr(value, "__self__", None))
        if is_torchs(value) and callable(value) and not (is_apply or isinstance(value, (type, torch.dtype))):
            return self._function(node, value.__name__)
        if isinstance(value, torch.dtype):
            return self._options.spell(dtype_text(value))
        if value is torch.Tensor:
            return self._options.spell("jax.Array")
        if isinstance(value, ObservedTensor):  # A constant of the written module, in NumPy.
            return self._options.spell(f"jnp.asarray({self._file.segment(node)})")
        if is_function_class(value) and value.__module__.startswith("torch."):
            raise NoRuleError(f"{self._file.segment(node)} has no rule")
        return None

    def _function(self, node: ast.expr, name: str) -> str:
        """Returns a function that the code uses as a value."""
        entries = [x for x in table().get(name, ()) if not x.is_method]
        if not entries:
            raise NoRuleError(f"{name} has no rule")
        plain, strict, parameters = entries[0].plain, entries[0].strict, entries[0].signature.parameters
        code = strict if self._strict(node, plain != strict) else plain
        bare = re.fullmatch(r"([\w.]+)\((\{\w+\}(?:, \{\w+\})*)\)", code)
        if bare is not None and fields(bare[2]) == [*parameters]:
            return self._options.spell(bare[1])
        passed = {name for name, x in parameters.items() if x.default is x.empty}
        code = self._options.spell(select(code, passed))
        return f"(lambda {', '.join(passed)}: {fill(code, {name: name for name in passed})})"

    def _render_attribute(self, node: ast.Attribute) -> str | None:
        if not isinstance(node.ctx, ast.Load):
            return None
        base, value = self._value(node.value), self._value(node)
        root = root_name(node)
        is_global = root is not None and not self._is_variable(root.id)
        if isinstance(base, ObservedTensor):
            return self._tensor_attribute(node)
        if isinstance(base, tuple) and node.attr in _RESULT_FIELDS:
            return _result(self._render(node.value), _RESULT_FIELDS[node.attr])
        if isinstance(base, torch.autograd.function.FunctionCtx) and node.attr in _SAVED:
            return f"{self._render(node.value)}.saved_tensors"
        if isinstance(base, (torch.finfo, torch.iinfo)):
            return f"{'float' if isinstance(base, torch.finfo) else 'int'}({self._splice(node)})"
        if isinstance(base, torch.device):
            return repr(value)
        if isinstance(base, torch.dtype) and node.attr == "is_floating_point":
            return self._options.spell(f"jnp.issubdtype({self._render(node.value)}, jnp.floating)")
        is_torch = isinstance(base, types.ModuleType) and base.__name__.partition(".")[0] == "torch"
        if is_torch and isinstance(value, (int, float)):
            return self._options.spell(f"jnp.{node.attr}")
        return self._object(node, value) if is_global or isinstance(base, type) else None

    def _tensor_attribute(self, node: ast.Attribute) -> str | None:
        if node.attr == "requires_grad":
            return self._requires_grad(node)
        inputs = {name for r in self._regions if is_backward(r.calls[0]) for name in r.inputs}
        if node.attr == "grad" and isinstance(node.value, ast.Name) and node.value.id in inputs:
            return gradient_of(node.value.id)
        if node.attr in rules.ATTRIBUTES:
            plain, _, strict = rules.ATTRIBUTES[node.attr].partition(" => ")
            code = strict if strict and self._strict(node) else plain
            return fill(self._options.spell(code), {"input": self._render(node.value)})
        if node.attr not in rules.SHARED_ATTRIBUTES:
            raise NoRuleError(f"the attribute {node.attr} of a tensor has no rule")
        return None

    def _requires_grad(self, node: ast.Attribute) -> str:
        """Returns whether a tensor requires a gradient: an element of `ctx.needs_input_grad` that always was equal."""
        if not any(self._values(node)):
            return "False"
        needs = self._options.observation.needs.get((self._file.path, self._file.span(node)), [])
        for text in needs[0][1] if needs else ():
            if all(flags.get(text) == value for value, flags in needs):
                return text
        if all(self._values(node)):
            return "True"
        raise NoRuleError("whether this tensor requires a gradient depends on the call; use ctx.needs_input_grad")

    def _render_subscript(self, node: ast.Subscript) -> str | None:
        base = self._value(node.value)
        is_call = isinstance(base, tuple) and isinstance(node.value, ast.Call)
        if is_call and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, int):
            return _result(self._render(node.value), node.slice.value)
        if not isinstance(base, ObservedTensor):
            return None
        if self._selects(node):
            return self._selected(node)
        return f"{as_operand(self._render(node.value))}[{self._index(node)}]"

    def _index(self, node: ast.Subscript) -> str:
        """Returns the indices of a tensor."""
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for index in indices:
            value = self._value(index) if not isinstance(index, ast.Slice) else None
            is_mask = isinstance(value, ObservedTensor) and value.dtype == torch.bool and not value.is_constant
            if is_mask and not self._options.reads_values:
                raise ReadsValuesError(_SELECTS)
        texts = {index: self._one_index(index) for index in indices}
        if not isinstance(node.slice, ast.Tuple):
            return texts[node.slice]
        has_parentheses = self._file.span(node.slice)[0] < self._file.span(indices[0])[0]
        text = self._splice(node.slice, texts)
        return text[1:-1] if has_parentheses else text

    def _one_index(self, index: ast.expr) -> str:
        value = None if isinstance(index, ast.Slice) else self._value(index)
        if isinstance(value, ObservedTensor) and value.dtype == torch.bool and value.is_constant:
            return self._in_numpy(index)
        text = self._render(index)
        return self._options.spell(f"np.array({text})") if isinstance(value, (list, range)) else text

    def _checked_splice(self, node: ast.expr) -> str:
        """Returns the text of an operator expression on tensors, with a cast where JAX has another dtype."""
        parts = {f"p{i}": part for i, part in enumerate(_parts(node))}
        template = self._splice(node, {part: f"{{{name}}}" for name, part in parts.items()})
        arguments = {name: Argument("", self._value(part), part) for name, part in parts.items()}
        cast = self._cast(node, template, arguments)
        text = self._splice(node)
        return text if cast is None else f"({text}).astype({cast})"

    def _cast(self, node: ast.expr, template: str, arguments: Mapping[str, Any]) -> str | None:
        """Returns the dtype to which JAX's result has to be cast, as text; `None` if it is torch's.

        That is checked for the first observation in single precision, and for the first one in double precision.
        """
        found: list[tuple[dict[str, Any], ObservedTensor]] = []
        is_observed = (self._file.path, self._file.span(node)) in self._options.observation.in_double
        for value in (self._value, self._value_in_double) if is_observed else (self._value,):
            values = _values(arguments, value)
            if isinstance(expected := value(node), ObservedTensor):
                found.append((values | {"dtype_of_result": expected.dtype}, expected))
        if not any(self._check.cast(template, values, expected) for values, expected in found):
            return None
        for name, argument in arguments.items():
            operands = [(values.get(name), expected) for values, expected in found]
            is_typed = all(isinstance(x, ObservedTensor) and x.dtype == expected.dtype for x, expected in operands)
            if is_typed and isinstance(argument, Argument) and isinstance(argument.node, ast.Name):
                return f"{argument.node.id}.dtype"
        return self._options.spell(dtype_text(found[0][1].dtype))

    def _render_binop(self, node: ast.BinOp) -> str | None:
        return self._checked_splice(node) if isinstance(self._value(node), ObservedTensor) else None

    _render_unaryop = _render_binop

    def _render_compare(self, node: ast.Compare) -> str | None:
        is_of_devices = any(isinstance(self._value(x), torch.device) for x in (node.left, *node.comparators))
        return repr(self._value(node)) if is_of_devices else None

    def _render_call(self, node: ast.Call) -> str | None:
        function = self._value(node.func)
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and len(node.args) == 2:
            return self._isinstance(node)
        if isinstance(function, torch.nn.Module):
            raise NoRuleError("a torch.nn.Module is called. Pass its tensors, and call torch.nn.functional")
        if self._updated(node) is not None:
            return self._update(node)
        if self._is_torch_call(node):
            if isinstance(self._bound_self(node), torch.autograd.function.FunctionCtx):
                return None
            if getattr(function, "__name__", "") == "apply" and is_function_class(self._bound_self(node)):
                return None
            name, arguments = self._callee(node)
            return self._apply(node, name, arguments, node.keywords)
        root = root_name(node.func)
        is_local = root is not None and self._is_variable(root.id) and isinstance(node.func, ast.Name)
        if not is_local and code_of_function(function) in self._options.draws:
            self.draws = True
            text = self._splice(node)
            has_comma = text[:-1].rstrip().endswith((",", "("))
            return f"{text[:-1].rstrip()}{'' if has_comma else ', '}keys=keys)"
        if function is str and node.args and isinstance(self._value(node.args[0]), torch.dtype):
            return self._options.spell(f'"torch." + jnp.dtype({self._render(node.args[0])}).name')
        tensors = [x for x in node.args if self._is_tensor(x)]
        if tensors and function in (int, float) and self._options.reads_values:  # JAX's tracers have no `__float__`.
            return f"{self._file.segment(node.func)}({as_operand(self._render(tensors[0]))}.item())"
        if tensors and function in (int, float, bool, list) and self._is_constant(tensors[0]):
            return f"{self._file.segment(node.func)}({self._in_numpy(tensors[0])})"
        return None

    def _is_constant(self, node: ast.expr) -> bool:
        values = self._values(node)
        return bool(values) and all(isinstance(x, ObservedTensor) and x.is_constant for x in values)

    def _in_numpy(self, node: ast.expr) -> str:
        """Returns a tensor that depends on no input as a NumPy array, whose values are known while JAX traces."""
        text = self._render(node)
        tensors = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and self._is_tensor(n)}
        parsed = parse_expression(text)
        static = [n.value for n in ast.walk(parsed) if isinstance(n, ast.Attribute) and n.attr in _STATIC_ATTRIBUTES]
        for n in ast.walk(parsed):
            if isinstance(n, ast.Name) and n.id in tensors - {*self._numpy_variables} and n not in static:
                raise ReadsVariableError(n.id)
        if re.search(r"(?<![\w.])(lax|jax|bfloat16)\b|\.at\[", text):
            raise ReadsValuesError(_READS_VALUE)
        return re.sub(r"(?<![\w.])jnp\b", self._options.names.get("np", "np"), text)

    def _isinstance(self, node: ast.Call) -> str | None:
        kind = self._value(node.args[1])
        kinds: tuple[Any, ...] = kind if isinstance(kind, tuple) else (kind,)
        if not any(isinstance(x, type) and x.__module__.partition(".")[0] == "torch" for x in kinds):
            return None
        if kinds[1:] or not issubclass(kinds[0], torch.Tensor):
            raise NoRuleError(f"isinstance with {self._file.segment(node.args[1])} has no rule")
        return self._options.spell(f"isinstance({self._render(node.args[0])}, jax.Array)")

    # Calls of torch

    def _bound_self(self, call: ast.Call) -> Any:
        return getattr(self._value(call.func), "__self__", None)

    def _is_torch_call(self, call: ast.Call) -> bool:
        """Whether a call is one of a tensor's method, or of a torch function by its name."""
        if isinstance(call.func, ast.Attribute) and self._is_tensor(call.func.value):
            return True
        root = root_name(call.func)
        is_variable = root is not None and self._is_variable(root.id)
        is_method = self._bound_self(call) is not None and not isinstance(self._bound_self(call), types.ModuleType)
        is_named = root is not None and (is_method or not is_variable)
        return is_torchs(self._value(call.func)) and (is_named or self._is_sample(call))

    def _is_sample(self, call: ast.Call) -> bool:
        """Whether a call is `torch.distributions.Bernoulli(probs).sample()`."""
        return isinstance(self._bound_self(call), torch.distributions.Bernoulli) and callee_name(call) == "sample"

    def _callee(self, call: ast.Call) -> tuple[str, list[ast.expr]]:
        """Returns the name of a torch function, and its positional arguments."""
        if self._is_sample(call) and isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call):
            made = call.func.value
            return "sample", [*made.args, *(x.value for x in made.keywords if x.arg == "probs")]
        if isinstance(call.func, ast.Attribute) and self._is_tensor(call.func.value):
            return call.func.attr, [call.func.value, *call.args]
        function = self._value(call.func)
        return getattr(function, "__name__", self._file.segment(call.func)), list(call.args)

    def _argument(self, node: ast.expr) -> Argument:
        if isinstance(node, ast.Starred):
            return Argument("*" + self._render(node.value), self._value(node.value), node)
        text, value = self._render(node), self._value(node)
        is_dims = isinstance(value, list) and value and all(isinstance(x, int) for x in value)
        if is_dims and isinstance(node, ast.List):
            text = f"({text[1:-1]}{',' * (len(value) == 1)})"
        return Argument(text, value, node)

    def _apply(
        self,
        call: ast.Call,
        name: str,
        arguments: Sequence[ast.expr],
        keywords: Sequence[ast.keyword],
    ) -> str:
        """Returns a torch call in JAX."""
        special: Callable[..., str | None] | None = getattr(self, f"_call_{name}", None)
        positional = [x for x in arguments if not isinstance(self._value(x), (torch.device, torch.memory_format))]
        if name in ("to", "cuda"):
            positional = [x for i, x in enumerate(positional) if not i or not isinstance(self._value(x), (str, bool))]
        args = [self._argument(x) for x in positional]
        named = {x.arg: self._argument(x.value) for x in keywords if x.arg not in rules.IGNORED | {None, "out"}}
        if any(x.arg is None for x in keywords):
            raise NoRuleError(f"{name} is called with **keywords")
        if special is not None and (text := special(call, args, named)) is not None:
            return text
        entries = table().get(name) or table().get(re.sub("^(_|special_)", "", name), ())
        is_method = isinstance(call.func, ast.Attribute) and self._is_tensor(call.func.value)
        problem = f"{name} has no rule" if not entries else f"{name} has no rule for these arguments"
        for entry in entries:
            bound = (
                entry.bind(args, {str(k): v for k, v in named.items()}) if is_method or not entry.is_method else None
            )
            if bound is None:
                continue
            try:
                return self._spell_entry(call, entry, bound)
            except NoRuleError as error:
                problem = f"{name}: {error}"
        raise NoRuleError(problem + ". Write it with other torch functions")

    def _spell_entry(self, call: ast.Call, entry: TableEntry, bound: Mapping[str, Any]) -> str:
        plain_code, strict_code = (code_of(entry, bound, is_strict) for is_strict in (False, True))
        strict = self._strict(call, plain_code != strict_code)
        problem: Exception | None = None
        for code in [strict_code] if strict else dict.fromkeys([plain_code, strict_code]):
            texts, values = _texts(bound), _values(bound, self._value)
            if not {*fields(code)} <= texts.keys() | {"key", "dtype_of_result"}:
                continue
            observed = self._value(call)
            tensor = observed[0] if isinstance(observed, (tuple, list)) and observed else observed
            if isinstance(tensor, ObservedTensor):
                texts["dtype_of_result"] = self._options.spell(dtype_text(tensor.dtype))
                values["dtype_of_result"] = tensor.dtype
            try:
                self._check.shape(code, values, observed)
                cast = self._cast(call, code, bound)
            except NoRuleError as error:
                problem = error
                continue
            if "{key}" in code:
                self.draws, texts["key"] = True, "next(keys)"
            text = fill(self._options.spell(code), texts)
            if cast is None:
                return text
            return f"{as_operand(text)}.astype({cast})"
        raise NoRuleError(str(problem))

    def _call_grad(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str | None:
        """Returns the derivatives of the statements that computed the outputs."""
        if self._value(call.func) is torch.func.grad:
            return None
        region = next((r for r in self._regions if call in r.calls), None)
        if region is None:
            raise NoRuleError(
                "it is not clear what autograd differentiates; write `x = x.detach().requires_grad_()`, then the "
                "statements that compute y, then `torch.autograd.grad(y, x, grad_output)`"
            )
        pulled = self._pulled(call, region)
        names = names_of((args[1] if len(args) > 1 else named["inputs"]).node)
        if [*names] == [*region.inputs]:
            return pulled
        elements = [f"{pulled}[{region.inputs.index(name)}]" for name in names]
        return f"({', '.join(elements)}{',' * (len(elements) == 1)})"

    _call_backward = _call_grad

    def _pulled(self, call: ast.Call, region: Region) -> str:
        """Returns the gradients of a region, a tuple."""
        if not region.statements:
            if self._conditional or region.value is None:
                raise NoRuleError("a derivative in a part of an expression has no rule; use a separate statement")
            tail = region.tail(self._options.spell("jax.vjp"), self._render(region.value))
            self._before += [region.head(), *tail]
        weights = argument_of(call, 1 if is_backward(call) else 2, "grad_outputs", "gradient", "grad_tensors")
        if weights is None:
            return self._options.spell(f"{region.vjp}(jnp.ones_like({region.outputs[0]}))")
        text, is_single = self._render(weights), len(region.outputs) == 1
        if is_single == isinstance(weights, (ast.Tuple, ast.List)):
            text = f"{as_operand(text)}[0]" if is_single else f"tuple({text})"
        return f"{region.vjp}({text})"

    def _call_item(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str:
        """Returns a call that reads values."""
        reads_values, name = self._options.reads_values, callee_name(call)
        if not reads_values and not self._is_constant(args[0].node):
            raise ReadsValuesError(_READS_VALUE)
        text = args[0].text if reads_values else self._in_numpy(args[0].node)
        if name not in ("nonzero", "argwhere"):
            return f"{as_operand(text)}.{name}()"
        function = "nonzero" if "as_tuple" in named and named["as_tuple"].value else "argwhere"
        return self._options.spell(f"{'jnp' if reads_values else 'np'}.{function}({text})")

    _call_tolist = _call_nonzero = _call_argwhere = _call_item

    def _call_numpy(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str:
        """Returns the values as a NumPy array."""
        if not self._options.reads_values:
            raise ReadsValuesError(_READS_VALUE)
        return self._options.spell(f"np.asarray({args[0].text})")

    def _call_unique(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str:
        """Returns the distinct elements, in order, whose number depends on values."""
        if not self._options.reads_values:
            raise ReadsValuesError(_READS_VALUE)
        options = {"axis" if name == "dim" else name: x.text for name, x in named.items() if name != "sorted"}
        options |= {"equal_nan": "False"} if args[0].value.dtype.is_floating_point else {}
        return self._options.spell(f"jnp.unique({', '.join([args[0].text, *map('='.join, options.items())])})")

    def _call_masked_select(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str:
        """Returns the elements that a mask selects."""
        if not self._options.reads_values:
            raise ReadsValuesError(_SELECTS)
        x, mask = (*args, *(named[name] for name in ("input", "mask") if name in named))
        if x.value.shape != mask.value.shape:
            raise NoRuleError("masked_select of another shape than the mask's has no rule; write x[mask]")
        return f"{as_operand(x.text)}[{mask.text}]"

    def _call_is_grad_enabled(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str:
        """Returns whether autograd records where the first derivative is computed."""
        parent: Any = call
        while (parent := self._file.parents.get(parent)) is not None:
            items = parent.items if isinstance(parent, ast.With) else []
            modes = [
                x.context_expr for x in items if callee_name(x.context_expr) in ("set_grad_enabled", "inference_mode")
            ]
            if any(not isinstance(x, ast.Constant) for mode in modes for x in getattr(mode, "args", ())):
                raise NoRuleError("whether autograd records depends on an argument")
        return repr(self._value(call))

    def _call_numel(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str | None:
        """Returns the number of elements of a shape, which is a tuple on JAX."""
        shape = call.func.value if isinstance(call.func, ast.Attribute) else call
        is_shape = isinstance(self._value(shape), torch.Size)
        return self._options.spell(f"int(np.prod({self._render(shape)}))") if is_shape else None

    def _call_detach(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str | None:
        """Returns the tensor itself where autograd, and so `jax.vjp`, differentiates by the variable that gets it."""
        statement: ast.AST = call
        while isinstance(statement, ast.expr):
            statement = self._file.parents[statement]
        targets = {x.id for x, _ in assignments(statement) if isinstance(x, ast.Name)}
        return args[0].text if targets & {x for r in self._regions for x in r.inputs} else None

    _call_Variable = _call_detach  # noqa: N815

    def _call_type(self, call: ast.Call, args: list[Argument], named: Mapping[Any, Argument]) -> str | None:
        """Returns `y.type(name)`, where the name is one of torch for a tensor type, or a variable with `x.type()`."""
        if len(args) == 1 or not isinstance(args[1].value, str):
            return None
        dtype = torch.empty(0).type(args[1].value).dtype
        is_literal = isinstance(args[1].node, ast.Constant)
        text = self._options.spell(dtype_text(dtype)) if is_literal else args[1].text
        return f"{as_operand(args[0].text)}.astype({text})"


def code_of_function(value: Any) -> CodeType | None:
    """Returns the code of a Python function or method; `None` if it is something else."""
    return getattr(getattr(value, "__func__", value), "__code__", None)


def is_torchs(function: Any) -> bool:
    """Whether a callable is torch's."""
    if isinstance(function, (types.ModuleType, ObservedTensor, str, int, float)) or function is None:
        return False
    module = getattr(function, "__module__", None) or ""
    owner = type(getattr(function, "__self__", None)).__module__
    is_builtin = isinstance(function, types.BuiltinFunctionType)
    return module.partition(".")[0] == "torch" or (is_builtin and owner.partition(".")[0] == "torch")


def operator_template(op: ast.operator) -> str:
    """Returns the template of a binary operator's expression."""
    return ast.unparse(ast.BinOp(ast.Set([ast.Name("x")]), op, ast.Set([ast.Name("y")])))


def elements(text: str) -> list[str]:
    """Returns the texts of the elements if an expression is a tuple in parentheses."""
    parsed = parse_expression(text)
    wrapped = f"_[\n{text}\n]"
    nodes = parsed.elts if isinstance(parsed, ast.Tuple) else []
    return [ast.get_source_segment(wrapped, node) or "" for node in nodes]


def check_result(text: str) -> None:
    """Raises an error for a result of a torch function that JAX's functions do not compute."""
    if text == "None":
        raise NoRuleError("the second result of this function has no rule")


def _result(text: str, index: int) -> str:
    """Returns one result of a function that has several."""
    results = elements(text)
    if not results:
        return f"{as_operand(text)}[{index}]"
    check_result(results[index])
    return results[index]


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the targets of an assignment with their values; for `x, y = a, b`, x with a, and y with b."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield target, value


def callee_name(node: ast.AST) -> str:
    function = node.func if isinstance(node, ast.Call) else node
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(bound: Mapping[str, Any]) -> dict[str, str]:
    """Returns the texts of the arguments of an entry; several ones, of `*args`, as a tuple and with commas."""
    texts: dict[str, str] = {}
    for name, argument in bound.items():
        if isinstance(argument, Argument):
            is_axes = isinstance(argument.value, list) and not isinstance(argument.node, ast.List) and name == "dim"
            texts[name] = f"tuple({argument.text})" if is_axes else argument.text
            continue
        items: tuple[Argument, ...] = argument
        texts[f"{name}_args"] = ", ".join(x.text for x in items)
        texts[name] = f"({texts[f'{name}_args']}{',' * (len(items) == 1)})"
        if _is_sequence(items):
            texts[name] = items[0].text.removeprefix("*")
    return texts


def _values(bound: Mapping[str, Any], value: Callable[[ast.expr], Any]) -> dict[str, Any]:
    """Returns the values of the arguments of an entry, by a function of their nodes."""

    def value_of(x: Argument) -> Any:
        return value(x.node.value if isinstance(x.node, ast.Starred) else x.node)

    values: dict[str, Any] = {}
    for name, argument in bound.items():
        if isinstance(argument, Argument):
            observed = value_of(argument)
            values[name] = tuple(observed) if isinstance(observed, list) and name in ("dim", "dims") else observed
        else:
            several = [value_of(x) if x.is_starred or _is_sequence(argument) else [value_of(x)] for x in argument]
            values[name] = values[f"{name}_args"] = tuple(x for part in several for x in part)
    return values


def _is_sequence(items: Sequence[Argument]) -> bool:
    """Whether the arguments for `*args` are one sequence."""
    return len(items) == 1 and isinstance(items[0].value, (tuple, list))


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the expressions that are directly inside a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, (ast.keyword, ast.comprehension)):
            yield from _parts(child)
