"""What JAX is told of the functions of a rule, which it otherwise finds out at every call and with worse names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxfn._compat import state_debug_info, state_positional
from jaxfn._derivatives.rule import Rule


def describe(rule: Rule, primal: Callable[..., Any], *derived: Callable[..., Any]) -> None:
    """Makes JAX's messages name the user's Function and its file in place of jaxfn's.

    And its parameters, which JAX's coming custom_vjp shows.

    Args:
      rule: whose functions these are.
      primal: a function of a `Site` and the rule's operands.
      *derived: what computes its derivative, whose arguments have no names.
    """
    name = rule.call.name
    primal.__name__ = primal.__qualname__ = name
    state_positional(primal)
    source = f"{name}{rule.call.methods.place}"
    state_debug_info(primal, source, rule.operand_names)
    for function in derived:
        state_debug_info(function, source, None)
