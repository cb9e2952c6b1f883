"""Which of JAX's mechanisms a Function's derivative goes by."""

from __future__ import annotations

from jaxfn._derivatives.both_modes import both_modes
from jaxfn._derivatives.reverse import reverse_mode
from jaxfn._derivatives.rule import Differentiable, Rule


def differentiable(rule: Rule) -> Differentiable:
    """The rule's function, differentiable in the modes that the Function has rules for."""
    return both_modes(rule) if rule.call.methods.has_forward_mode else reverse_mode(rule)
