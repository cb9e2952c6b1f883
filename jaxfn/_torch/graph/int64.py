"""torch's int64 where JAX's integers have 32 bits.

Code relies on 64 bits: a spatial hash, for example, multiplies by large primes. With x64 off, operations that may need
more than 32 bits are evaluated under `jax.enable_x64`, and the graph's outputs are cast back to int32. The values of
tensors are unknown, so `magnitude_bounds` infers from the constants in the code which operations may need 64 bits.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.fx import Node

from jaxfn._torch.operations import entry_name

LARGEST = 2**31 - 1


def is_int64(value: object) -> bool:
    """Whether a value is an array of int64."""
    return isinstance(value, jax.Array) and value.dtype == np.int64


def has_int64(arguments: Any) -> bool:
    """Whether an operation has int64 arrays among its arguments although x64 is off."""
    is_off = jax.dtypes.canonicalize_dtype(np.int64) != np.int64
    return is_off and any(map(is_int64, jax.tree_util.tree_leaves(arguments)))


def to_int64(arguments: Any) -> Any:
    """Casts int32 arrays to int64; call it under `jax.enable_x64`."""

    def cast(x: Any) -> Any:
        return x.astype(np.int64) if isinstance(x, jax.Array) and x.dtype == np.int32 else x

    return jax.tree_util.tree_map(cast, arguments)


def saturate_to_int32(arguments: Any) -> Any:
    """Casts int64 arrays to int32, and takes the nearest number for one that does not fit."""

    def saturate(x: Any) -> Any:
        return jnp.clip(x, -LARGEST - 1, LARGEST).astype(np.int32) if is_int64(x) else x

    with jax.enable_x64(True):
        return jax.tree_util.tree_map(saturate, arguments)


def is_large(x: object) -> bool:
    """Whether a value is a Python integer that does not fit in 32 bits."""
    return type(x) is int and not -(2**31) <= x < 2**31


def short_name(target: str) -> str:
    """Returns an operation's name without its namespace and overload."""
    return (entry_name(target) or target).split(".")[1] if "." in target else target


# Operations whose results may need more bits than their operands.
_GROWING = frozenset(("add", "sub", "rsub", "mul", "pow", "bitwise_left_shift", "__lshift__"))
# Operations that move elements.
_DATA_MOVEMENT = frozenset(
    """
    alias clone detach lift_fresh repeat t tril triu diagonal permute roll view _unsafe_view _reshape_alias expand
    transpose squeeze unsqueeze flip split_with_sizes split unsafe_split unbind select slice narrow unfold index
    _unsafe_index index_select gather take
    """.split()  # noqa: SIM905
)
# Operations that choose between elements of several operands.
_SELECTION = frozenset(("where", "cat", "stack", "maximum", "minimum", "masked_fill", "copy", "index_put"))
# Assumed magnitudes of numbers that depend on the values of tensors: the first decides what is computed in 64 bits, the
# second what is rejected because it may not fit in 32. Counts and indices are rarely larger.
CONSERVATIVE, TYPICAL = 2**20, 2**8


def magnitude_bounds(steps: Sequence[Any], constants: Mapping[Node, int], unknown: int) -> dict[Node, int]:
    """Bounds the magnitude of the integers that each operation returns, as far as the code alone tells.

    Args:
      steps: nodes with their arguments, in order.
      constants: the bounds of the constants.
      unknown: the bound of numbers that depend on the values of tensors.
    """
    found = {node: max(bound, unknown) for node, bound in constants.items()}  # a captured tensor may change
    for step in steps:
        value = step.node.meta.get("val")
        results = value if isinstance(value, (tuple, list)) else [value]
        is_long = any(isinstance(result, torch.Tensor) and result.dtype == torch.int64 for result in results)
        if step.node.op == "call_function" and is_long:
            found[step.node] = _magnitude_bound(step, found, unknown)
    return found


_NATURAL = {torch.bool: 1, torch.uint8: 255, torch.int8: 128}


def _magnitude_bound(step: Any, found: Mapping[Node, int], unknown: int) -> int:
    def bound_of(x: Any) -> int:
        if isinstance(x, int):
            return abs(x)
        if not isinstance(x, Node):
            return unknown
        value = x.meta.get("val")
        natural = _NATURAL.get(value.dtype, unknown) if isinstance(value, torch.Tensor) else unknown
        return found.get(x, natural)

    name, arguments = short_name(str(step.node.target)), step.arguments
    if step.node.target is operator.getitem:
        return bound_of(arguments[0])
    bounds = [bound_of(x) for x in arguments[:2]]
    first, second = (*bounds, 0, 0)[:2]
    number = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else None
    match name:
        case "mul":
            result = first * second
        case "add" | "sub" | "rsub":
            result = first + second * bound_of(step.options.get("alpha", 1))
        case "pow":
            result = first ** min(abs(number), 64) if number is not None else unknown
        case "bitwise_left_shift" | "__lshift__":
            result = first << min(second, 64)
        case "bitwise_right_shift" | "__rshift__":
            result = first >> min(number or 0, 64)
        case "remainder":
            result = second
        case "fmod":
            result = min(first, second)
        case "bitwise_and" if number is not None and number >= 0:
            result = number
        case "floor_divide" if number:
            result = first // abs(number) + 1
        case "bitwise_or" | "bitwise_xor":
            result = (1 << max(first, second).bit_length()) - 1
        case "clamp" if all(isinstance(x, int) for x in arguments[1:3]) and len(arguments) > 2:
            result = max(map(abs, arguments[1:3]))
        case "neg" | "abs" | "_to_copy" | "bitwise_not" | "floor_divide" | "clamp" | "clamp_min":
            result = first
        case _ if name in _DATA_MOVEMENT:
            result = first
        case _:
            leaves = jax.tree_util.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, Node))
            bound = max((bound_of(x) for x in leaves if isinstance(x, Node)), default=unknown)
            result = bound if name in _SELECTION or bound > LARGEST else unknown
    return min(result, 2**63)


def may_grow(name: str) -> bool:
    """Whether results of an operation may need more bits than its operands."""
    return name in _GROWING
