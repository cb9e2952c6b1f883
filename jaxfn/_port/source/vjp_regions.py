"""Statements that autograd differentiates inside a function, which become a function for `jax.vjp`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from jaxfn._port.source.source_file import FunctionNode, bound_names

_COMPOUND = (ast.If, ast.For, ast.While, ast.Try)


class Region(NamedTuple):
    """The statements after the inputs got `requires_grad`, or their values, up to those that assign the outputs.

    Attributes:
      inputs: The variables by which they are differentiated.
      others: The other variables that they assign and later statements read.
      changed: The variables from before that they assign and read.
      calls: The calls of `torch.autograd.grad`, or the one of `backward`.
      function: The name of the function that the statements become.
      vjp: The name of its derivative.
      value: The output, if it is an expression in the call, and no variable.
    """

    statements: Sequence[ast.stmt]
    inputs: Sequence[str]
    outputs: Sequence[str]
    others: Sequence[str]
    changed: Sequence[str]
    calls: Sequence[ast.Call]
    function: str
    vjp: str
    value: ast.expr | None = None

    def head(self) -> str:
        """Returns the first line of the function."""
        parameters = [*self.inputs, *(f"{name}={name}" for name in self.changed)]
        return f"def {self.function}({', '.join(parameters)}):"

    def tail(self, vjp: str, value: str | None) -> list[str]:
        """Returns the last line of the function, indented, and the line that calls it.

        Args:
          vjp: `jax.vjp`, as it is spelled.
          value: The text of the output that is an expression.
        """
        outputs, others = ", ".join(self.outputs), ", ".join(self.others)
        returned = outputs if value is None else f"({value})" if "\n" in value else value
        several = f"({outputs})" if len(self.outputs) > 1 else outputs
        call = f"{vjp}({self.function}, {', '.join(self.inputs)}"
        if not others:
            return [f"    return {returned}", f"{several}, {self.vjp} = {call})"]
        returned = several if value is None else value
        return [f"    return {returned}, ({others},)", f"{several}, {self.vjp}, ({others},) = {call}, has_aux=True)"]


def find_regions(node: FunctionNode, value: Callable[[ast.expr], Any]) -> list[Region]:
    """Returns the regions of a function; `value` returns the observed value of an expression."""
    if isinstance(node, ast.Lambda):
        return []
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and _differentiates(value(n.func))]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    by_outputs: dict[Any, list[ast.Call]] = {}
    for call in calls:
        by_outputs.setdefault(names_of(_outputs(call)) or call, []).append(call)
    flat = list(_statements(node.body))
    regions: list[Region] = []
    for outputs, group in by_outputs.items():
        region = _region(node, flat, outputs, group)
        if region is not None and not any(_overlap(region, other) for other in regions):
            regions.append(region)
    return regions


def _overlap(region: Region, other: Region) -> bool:
    """Whether a statement belongs to both regions, or one differentiates the derivative that another returns."""
    inside = {n for s in region.statements for n in ast.walk(s)}
    return any(s in inside for s in other.statements) or any(call in inside for call in other.calls)


def _outputs(call: ast.Call) -> ast.expr | None:
    return argument_of(call, 0, "outputs", "tensors")


def names_of(node: ast.expr | None) -> tuple[str, ...]:
    """Returns the variables of an expression such as `x` or `(x, y)`; none for another one."""
    nodes = node.elts if isinstance(node, (ast.Tuple, ast.List)) else [node]
    names = tuple(n.id for n in nodes if isinstance(n, ast.Name))
    return names if len(names) == len(nodes) else ()


def gradient_of(name: str) -> str:
    """Returns the variable for the gradient that `backward` stores."""
    return f"{name}_grad"


def argument_of(call: ast.Call, position: int, *names: str) -> ast.expr | None:
    """Returns an argument of `torch.autograd.grad`, `torch.autograd.backward` or `y.backward`; `None` without it."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    is_method = is_backward(call) and not ast.unparse(call.func).endswith("autograd.backward")
    passed = [call.func.value, *call.args] if is_method and isinstance(call.func, ast.Attribute) else call.args
    return passed[position] if len(passed) > position else next((named[x] for x in names if x in named), None)


def is_backward(call: ast.Call) -> bool:
    """Whether a call that differentiates stores gradients, as `y.backward()`, and does not return them."""
    return isinstance(call.func, ast.Attribute) and call.func.attr == "backward"


def _differentiates(function: Any) -> bool:
    is_tensors = isinstance(getattr(function, "__self__", None), torch.Tensor) and function.__name__ == "backward"
    return is_tensors or function in (torch.autograd.grad, torch.autograd.backward)


def _inputs(node: ast.FunctionDef, call: ast.Call) -> tuple[str, ...]:
    """Returns the variables by which a call differentiates: for `backward`, those whose `grad` the code reads."""
    if not is_backward(call):
        return names_of(argument_of(call, 1, "inputs"))
    reads = [n.value for n in ast.walk(node) if isinstance(n, ast.Attribute) and n.attr == "grad"]
    return tuple(dict.fromkeys(x.id for x in reads if isinstance(x, ast.Name)))


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields statements, with those of `with` blocks in place of the blocks."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _region(
    node: ast.FunctionDef, flat: Sequence[ast.stmt], outputs: tuple[str, ...] | ast.Call, calls: Sequence[ast.Call]
) -> Region | None:
    by_call = [_inputs(node, call) for call in calls]
    if not all(by_call) or (len(calls) > 1 and any(map(is_backward, calls))):
        return None
    inputs = dict.fromkeys(name for names in by_call for name in names)
    parameters = {n.arg for n in ast.walk(node.args) if isinstance(n, ast.arg)}
    end = next(i for i, s in enumerate(flat) if any(n in calls for n in ast.walk(s)))
    starts = [_start(flat[:end], name) for name in inputs]
    if any(i < 0 and x not in parameters for i, x in zip(starts, inputs, strict=True)):
        return None
    first, last, value, taken = max(starts) + 1, end - 1, None, bound_names(node)
    if isinstance(outputs, ast.Call):
        value = _outputs(outputs)
        if value is None or isinstance(value, (ast.Tuple, ast.List)):
            return None
        outputs = ("output" + "_" * ("output" in taken),)
    else:
        ends = [_last(flat[:end], lambda s, name=name: name in bound_names(s)) for name in outputs]
        last = max(ends)
        if min(ends) < first:
            return None
    statements = flat[first : last + 1]
    bound = set[str]().union(*map(bound_names, statements))
    known = bound | inputs.keys() | ({*outputs} if value is None else set())
    if isinstance(flat[end], _COMPOUND) and known & bound_names(flat[end]):
        return None  # Other statements inside it, before or after the call, change what is differentiated.
    assigned = bound - inputs.keys() - {*outputs}
    inside = set() if value is None else {*ast.walk(value)}
    later = {n.id for s in flat[last + 1 :] for n in ast.walk(s) if isinstance(n, ast.Name) and n not in inside}
    name = "_".join(outputs)
    function, vjp = (x + "_" * (x in taken) for x in (f"{name}_of_inputs", f"{name}_vjp"))
    before = parameters.union(*map(bound_names, flat[:first]))
    nodes = [n for s in statements for n in ast.walk(s)]
    read = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    read |= {n.target.id for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    changed = sorted(assigned & before & read)
    return Region(statements, [*inputs], outputs, sorted(assigned & later), changed, calls, function, vjp, value)


def _last(statements: Sequence[ast.stmt], condition: Callable[[ast.stmt], bool]) -> int:
    return max((i for i, s in enumerate(statements) if condition(s)), default=-1)


def _start(statements: Sequence[ast.stmt], name: str) -> int:
    """Returns the last statement that assigns a variable, or has it require a gradient."""
    return _last(statements, lambda s: _requires_grad(s, name) or name in bound_names(s))


def _requires_grad(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a variable a tensor that requires a gradient, or has it require one."""
    text = ast.unparse(statement)
    is_about = name in bound_names(statement) or text.startswith(f"{name}.requires_grad")
    return is_about and "requires_grad" in text
