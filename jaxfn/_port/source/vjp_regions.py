"""Statements that autograd differentiates inside a function, which become a function for `jax.vjp`."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from jaxfn._port.source.source_file import FunctionNode, bound_names


class Region(NamedTuple):
    """The statements after the inputs got `requires_grad`, up to those that assign the outputs.

    Attributes:
      inputs: The variables by which they are differentiated.
      others: The other variables that they assign and later statements read.
      calls: The calls of `torch.autograd.grad`, or the one of `backward`.
      function: The name of the function that the statements become.
      vjp: The name of its derivative.
    """

    statements: Sequence[ast.stmt]
    inputs: Sequence[str]
    outputs: Sequence[str]
    others: Sequence[str]
    calls: Sequence[ast.Call]
    function: str
    vjp: str

    def head(self) -> str:
        """Returns the first line of the function."""
        return f"def {self.function}({', '.join(self.inputs)}):"

    def tail(self, vjp: str) -> list[str]:
        """Returns the last line of the function, indented, and the line that calls it; `vjp` is `jax.vjp`."""
        outputs, others = ", ".join(self.outputs), ", ".join(self.others)
        several = f"({outputs})" if len(self.outputs) > 1 else outputs
        call = f"{vjp}({self.function}, {', '.join(self.inputs)}"
        if not others:
            return [f"    return {outputs}", f"{several}, {self.vjp} = {call})"]
        return [f"    return {several}, ({others},)", f"{several}, {self.vjp}, ({others},) = {call}, has_aux=True)"]


def find_regions(node: FunctionNode, value: Callable[[ast.expr], Any]) -> list[Region]:
    """Returns the regions of a function; `value` returns the observed value of an expression."""
    if isinstance(node, ast.Lambda):
        return []
    calls = [n for n in ast.walk(node) if isinstance(n, ast.Call) and _differentiates(value(n.func))]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    by_outputs: dict[tuple[str, ...], list[ast.Call]] = {}
    for call in calls:
        by_outputs.setdefault(names_of(argument_of(call, 0, "outputs", "tensors")), []).append(call)
    flat = list(_statements(node.body))
    return [r for outputs, group in by_outputs.items() if (r := _region(node, flat, outputs, group)) is not None]


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
    node: ast.FunctionDef, flat: Sequence[ast.stmt], outputs: tuple[str, ...], calls: Sequence[ast.Call]
) -> Region | None:
    by_call = [_inputs(node, call) for call in calls]
    if not outputs or not all(by_call) or (len(calls) > 1 and any(map(is_backward, calls))):
        return None
    inputs = dict.fromkeys(name for names in by_call for name in names)
    end = next(i for i, s in enumerate(flat) if any(n in calls for n in ast.walk(s)))
    starts = [_last(flat[:end], lambda s, name=name: _requires_grad(s, name)) for name in inputs]
    ends = [_last(flat[:end], lambda s, name=name: name in bound_names(s)) for name in outputs]
    first, last = max(starts) + 1, max(ends)
    statements = flat[first : last + 1]
    if min(starts) < 0 or min(ends) < first:
        return None
    assigned = set().union(*map(bound_names, statements)) - inputs.keys() - {*outputs}
    later = {n.id for s in flat[last + 1 :] for n in ast.walk(s) if isinstance(n, ast.Name)}
    taken, name = bound_names(node), "_".join(outputs)
    function, vjp = (x + "_" * (x in taken) for x in (f"{name}_of_inputs", f"{name}_vjp"))
    return Region(statements, [*inputs], outputs, sorted(assigned & later), calls, function, vjp)


def _last(statements: Sequence[ast.stmt], condition: Callable[[ast.stmt], bool]) -> int:
    return max((i for i, s in enumerate(statements) if condition(s)), default=-1)


def _requires_grad(statement: ast.stmt, name: str) -> bool:
    """Whether a statement assigns a variable a tensor that requires a gradient, or has it require one."""
    text = ast.unparse(statement)
    is_about = name in bound_names(statement) or text.startswith(f"{name}.requires_grad")
    return is_about and "requires_grad" in text
