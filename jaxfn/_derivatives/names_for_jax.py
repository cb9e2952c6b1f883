"""What JAX is told of the functions of a rule, which it otherwise finds out at every call and with worse names."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from jaxfn._compat import state_debug_info
from jaxfn._derivatives.rule import Rule


class _Bound(inspect.BoundArguments):
    """Positional arguments, bound to `*args`."""

    def __init__(self, signature: inspect.Signature, args: tuple[Any, ...]) -> None:
        super().__init__(signature, OrderedDict(args=args))

    def apply_defaults(self) -> None:
        pass


class _Positional(inspect.Signature):
    """The signature `(*args)`."""

    def bind(self, *args: Any, **kwargs: Any) -> inspect.BoundArguments:
        return _Bound(self, args)


_POSITIONAL = _Positional([inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)])


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
    vars(primal)["__signature__"] = _POSITIONAL
    source = f"{name}{rule.call.methods.place}"
    state_debug_info(primal, source, rule.operand_names)
    for function in derived:
        state_debug_info(function, source, None)
