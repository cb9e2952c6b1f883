"""`EqnInterpreter`: evaluates a jaxpr eqn by eqn.

Loops are evaluated step by step, and of a `cond` only the branch that is taken. XLA would need minutes to compile a
program that returns some thousand values, but has compiled single operations before. A `shard_map` counts as a single
operation and is compiled as a whole, as JAX rejects a custom_vjp inside an eager one (0.10.0 to 0.12.0).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._compat import eqn_scope, eval_eqn
from jaxfn._jaxpr import SubJaxpr, eval_jaxpr_with, subjaxprs

Visit = Callable[[Any, Sequence[Any], Sequence[Any]], None]


class EqnInterpreter:
    """One evaluation of a jaxpr. A subclass may have other values than arrays.

    Args:
      jaxpr, consts: the jaxpr and its constants.
      arguments: the values of its arguments.
      visit: called with each eqn, its operands and its results.

    Attributes:
      enclosing: the eqns that run the jaxpr being evaluated, the outermost first, each with a description.
      results: the values of the outputs.
    """

    def __init__(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any], visit: Visit | None = None) -> None:
        self.enclosing: list[tuple[Any, str]] = []
        self._visit = visit
        self._shard_maps: dict[int, Callable[..., Sequence[Any]]] = {}  # compiled, by the id of their eqn
        self.results = self._run(jaxpr, consts, arguments)

    def constant(self, array: Any) -> Any:
        """Returns the value of a constant or a literal."""
        return array

    def array(self, value: Any) -> Any:
        """Returns the array of a value."""
        return value

    def moved(self, array: Any, sources: Sequence[Any]) -> Any:
        """Returns the value of an array that consists of parts of others."""
        return array

    def operation(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns the results of an eqn that is evaluated as a whole."""
        if eqn.primitive.name != "shard_map":
            return eval_eqn(eqn, operands)
        if id(eqn) not in self._shard_maps:  # an enclosing loop evaluates the eqn at every step
            self._shard_maps[id(eqn)] = jax.jit(partial(_eval, eqn))
        return self._shard_maps[id(eqn)](*operands)

    def _run(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        def evaluate(_: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
            inner = subjaxprs(eqn)
            if inner and inner[0].kind != "shard_map":
                with eqn_scope(eqn):
                    results = self._run_subjaxprs(eqn, inner, operands)
            else:
                results = self.operation(eqn, operands)
            if self._visit is not None:
                self._visit(eqn, operands, results)
            return results

        values = list(map(self.constant, consts))
        return eval_jaxpr_with(evaluate, jaxpr, values, arguments, lambda literal: self.constant(literal.val))

    def _run_subjaxprs(self, eqn: Any, inner: list[SubJaxpr], operands: list[Any]) -> Sequence[Any]:
        sub = inner[0]
        if sub.kind == "scan":
            return self._run_scan(eqn, sub, operands)
        if sub.kind == "while":
            return self._run_while(eqn, inner, operands)
        description = "checkpoint" if sub.kind == "checkpoint" else ""
        if sub.kind == "cond":
            taken = int(self.array(operands[0]))
            sub, description = inner[taken], f"cond: branch {taken}"
        return self._run_sub(eqn, sub, [operands[i] for i in sub.operands], description)

    def _run_sub(self, eqn: Any, sub: SubJaxpr, operands: Sequence[Any], description: str) -> list[Any]:
        self.enclosing.append((eqn, description))
        results = self._run(sub.jaxpr, sub.consts, operands)
        self.enclosing.pop()
        return results

    def _run_scan(self, eqn: Any, sub: SubJaxpr, operands: list[Any]) -> list[Any]:
        length: Any = sub.length
        num_carry = len(sub.carried)
        consts, carry, xs = _split(operands, sub.num_consts, num_carry)
        stacked: list[list[Any]] = []
        for step in range(length):
            index = length - 1 - step if sub.is_reversed else step
            slices = [self.moved(jax.lax.index_in_dim(self.array(x), index, keepdims=False), [x]) for x in xs]
            results = self._run_sub(eqn, sub, [*consts, *carry, *slices], f"scan: step {index} of {length}")
            carry = results[:num_carry]
            stacked.append(results[num_carry:])
        if not length:
            return [*carry, *(self.constant(jnp.zeros(v.aval.shape, v.aval.dtype)) for v in eqn.outvars[num_carry:])]
        columns = zip(*(stacked[::-1] if sub.is_reversed else stacked), strict=True)
        return [*carry, *(self.moved(jnp.stack(list(map(self.array, column))), column) for column in columns)]

    def _run_while(self, eqn: Any, inner: list[SubJaxpr], operands: list[Any]) -> Sequence[Any]:
        cond, body = inner
        of_cond, of_body, carry = _split(operands, cond.num_consts, body.num_consts)
        step = 0
        while bool(self.array(self._run_sub(eqn, cond, [*of_cond, *carry], f"while: step {step}")[0])):
            carry = self._run_sub(eqn, body, [*of_body, *carry], f"while: step {step}")
            step += 1
        return carry


def _eval(eqn: Any, *operands: Any) -> list[Any]:
    return list(eval_eqn(eqn, operands))


def _split(operands: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Splits operands into the first ones, the next ones, and the rest."""
    return operands[:first], operands[first : first + second], operands[first + second :]
