"""Whole numbers of 64 bits where JAX has 32, as two arrays of 32 bits each.

torch's whole numbers have 64 bits, and code relies on it: a spatial hash multiplies by large primes, takes the
exclusive or, and the remainder. Without x64 JAX's have 32. So what may need more is computed here, exactly; a
remainder, a comparison or a bit mask makes 32 bits of it again. Which numbers may need more is seen from the constants
in the code, for the values of tensors are not known: see `sizes`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array
from torch.fx import Node

from jaxfn._torch.operations import entry_name


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Wide:
    """A tensor of 64-bit whole numbers.

    Attributes:
      high: the upper halves, int32.
      low: the lower halves, uint32.
    """

    high: Array
    low: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return jnp.broadcast_shapes(self.high.shape, self.low.shape)


class CannotWidenError(Exception):
    """An operation that has no form for 64 bits."""


def lifted(x: Any) -> Wide:
    """A Python number, or an array of whole numbers, in 64 bits."""
    if isinstance(x, Wide):
        return x
    if isinstance(x, int):
        return Wide(jnp.asarray(_signed(x >> 32), np.int32), jnp.asarray(x & 0xFFFFFFFF, np.uint32))
    if isinstance(x, np.ndarray) and x.dtype == np.int64:
        return Wide(jnp.asarray((x >> 32).astype(np.int32)), jnp.asarray((x & 0xFFFFFFFF).astype(np.uint32)))
    if not hasattr(x, "dtype") or not (jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == np.bool_):
        raise CannotWidenError
    number = jnp.asarray(x).astype(np.int32)
    return Wide(number >> 31, number.astype(np.uint32))


def _signed(x: int) -> int:
    """The last 32 bits as a signed number."""
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def narrowed(x: Wide) -> Array:
    """The numbers in 32 bits, the nearest one of what does not fit."""
    number = x.low.astype(np.int32)
    ends = jnp.where(x.high < 0, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return jnp.where(x.high == number >> 31, number, ends)


def to_float(x: Wide) -> Array:
    """The numbers in single precision."""
    size = _absolute(x)
    value = size.high.astype(np.uint32).astype(np.float32) * 2.0**32 + size.low.astype(np.float32)
    return jnp.where(x.high < 0, -value, value)


# ---------------------------------------------------------------------------------------------------------- arithmetic


def _sum(x: Wide, y: Wide) -> Wide:
    low = x.low + y.low
    return Wide(x.high + y.high + (low < y.low), low)


def _negative(x: Wide) -> Wide:
    low = ~x.low + 1
    return Wide(~x.high + (low == 0), low)


def _absolute(x: Wide) -> Wide:
    return _chosen(x.high < 0, _negative(x), x)


def _product(x: Wide, y: Wide) -> Wide:
    """Of the lower halves by halves of those, whose products fit in 32 bits."""
    mask = np.uint32(0xFFFF)
    (x0, x1), (y0, y1) = ((z.low & mask, z.low >> 16) for z in (x, y))
    middle = x1 * y0 + (x0 * y0 >> 16)
    other = x0 * y1 + (middle & mask)
    carried = x1 * y1 + (middle >> 16) + (other >> 16)
    high = carried.astype(np.int32) + x.low.astype(np.int32) * y.high + x.high * y.low.astype(np.int32)
    return Wide(high, x.low * y.low)


def _chosen(condition: Array, x: Wide, y: Wide) -> Wide:
    return Wide(jnp.where(condition, x.high, y.high), jnp.where(condition, x.low, y.low))


def _is_less(x: Wide, y: Wide) -> Array:
    return (x.high < y.high) | ((x.high == y.high) & (x.low < y.low))


def _is_equal(x: Wide, y: Wide) -> Array:
    return (x.high == y.high) & (x.low == y.low)


def _bitwise(function: Callable[[Array, Array], Array]) -> Callable[[Wide, Wide], Wide]:
    return lambda x, y: Wide(function(x.high, y.high), function(x.low, y.low))


def _shifted_left(x: Wide, bits: Wide) -> Wide:
    """XLA gives 0 where it shifts by 32 bits or more, and a negative number counts as a large one."""
    n = narrowed(bits).astype(np.uint32)
    across = (x.low >> (32 - n)) | (x.low << (n - 32))
    return Wide((x.high.astype(np.uint32) << n | across).astype(np.int32), x.low << n)


def _shifted_right(x: Wide, bits: Wide) -> Wide:
    n = narrowed(bits)
    count = n.astype(np.uint32)
    near = x.low >> count | x.high.astype(np.uint32) << (32 - count)
    return Wide(x.high >> n, jnp.where(n < 32, near, (x.high >> jnp.maximum(n - 32, 0)).astype(np.uint32)))


def _divided(x: Wide, size: Array) -> tuple[Wide, Array]:
    """Quotient and remainder of numbers without a sign by one up to 2**31, digit by digit."""
    high, low = x.high.astype(np.uint32), x.low
    shape = jnp.broadcast_shapes(x.shape, size.shape)

    def digit(i: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, above, below = state
        place = (31 - i % 32).astype(np.uint32)
        rest = rest << 1 | (jnp.where(i < 32, high, low) >> place & 1)
        is_one = rest >= size
        rest = jnp.where(is_one, rest - size, rest)
        return rest, above << 1 | below >> 31, below << 1 | is_one

    zero = jnp.zeros(shape, np.uint32)
    rest, above, below = jax.lax.fori_loop(0, 64, digit, (zero, zero, zero))
    return Wide(above.astype(np.int32), below), rest


def _quotient(x: Wide, divisor: Any, *, floor: bool) -> tuple[Wide, Array]:
    """Quotient, rounded down or to zero, and remainder."""
    if isinstance(divisor, Wide) or (isinstance(divisor, int) and not -(2**31) <= divisor < 2**31):
        raise CannotWidenError
    n = jnp.asarray(divisor, np.int32)
    quotient, rest = _divided(_absolute(x), jnp.abs(n).astype(np.uint32))
    quotient = _chosen((x.high < 0) != (n < 0), _negative(quotient), quotient)
    rest = jnp.where(x.high < 0, -rest.astype(np.int32), rest.astype(np.int32))
    if not floor:
        return quotient, rest
    is_below = (rest != 0) & ((rest < 0) != (n < 0))
    return _chosen(is_below, _sum(quotient, lifted(-1)), quotient), jnp.where(is_below, rest + n, rest)


# ---------------------------------------------------------------------------------------------------------- operations


def _add(x: Any, y: Any, alpha: Any = 1) -> Wide:
    return _sum(lifted(x), lifted(y) if alpha == 1 else _product(lifted(y), lifted(alpha)))


def _sub(x: Any, y: Any, alpha: Any = 1) -> Wide:
    return _add(x, _negative(lifted(y)), alpha)


def _remainder(x: Any, y: Any) -> Array | Wide:
    if isinstance(y, int) and y > 0 and y & (y - 1) == 0:
        return _and(x, y - 1)
    return _quotient(lifted(x), y, floor=True)[1]


def _and(x: Any, y: Any) -> Array | Wide:
    """In 32 bits where the mask is a number that has no more."""
    both = _bitwise(jnp.bitwise_and)(lifted(x), lifted(y))
    return both.low.astype(np.int32) if isinstance(y, int) and 0 <= y < 2**31 else both


def _div(x: Any, y: Any, rounding_mode: str | None = None) -> Wide:
    if rounding_mode is None:
        raise CannotWidenError
    return _quotient(lifted(x), y, floor=rounding_mode == "floor")[0]


def _power(x: Any, exponent: Any) -> Wide:
    if not isinstance(exponent, int) or exponent < 1:
        raise CannotWidenError
    return functools.reduce(_product, [lifted(x)] * exponent)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Array | Wide:
    """In 32 bits where both bounds are numbers that have no more."""
    x = lifted(x)
    if low is not None:
        x = _chosen(_is_less(x, lifted(low)), lifted(low), x)
    if high is not None:
        x = _chosen(_is_less(lifted(high), x), lifted(high), x)
    return x.low.astype(np.int32) if _fits(low) and _fits(high) else x


def _fits(bound: Any) -> bool:
    return isinstance(bound, int) and abs(bound) <= LARGEST


def _rsub(x: Any, y: Any, alpha: Any = 1) -> Wide:
    return _sub(y, x, alpha)


def _fmod(x: Any, y: Any) -> Array:
    return _quotient(lifted(x), y, floor=False)[1]


def _floor_divide(x: Any, y: Any) -> Wide:
    return _div(x, y, "floor")


def _not(x: Wide) -> Wide:
    return Wide(~x.high, ~x.low)


def _clamp_max(x: Any, high: Any) -> Array | Wide:
    return _clamp(x, None, high)


def _where(condition: Array, x: Any, y: Any) -> Wide:
    return _chosen(condition, lifted(x), lifted(y))


def _masked_fill(x: Any, mask: Array, value: Any) -> Wide:
    return _chosen(mask, lifted(value), lifted(x))


def _lifting_one(function: Callable[[Wide], Wide]) -> Callable[[Any], Wide]:
    def apply_to_lifted(x: Any) -> Wide:
        return function(lifted(x))

    return apply_to_lifted


def _lifting_two(function: Callable[[Wide, Wide], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: function(lifted(x), lifted(y))


# What these return may need more bits than what they are given.
_GROWING = frozenset(("add", "sub", "rsub", "mul", "pow", "bitwise_left_shift", "__lshift__"))
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _lifting_two(_product),
    "pow": _power,
    "neg": _lifting_one(_negative),
    "abs": _lifting_one(_absolute),
    "remainder": _remainder,
    "fmod": _fmod,
    "floor_divide": _floor_divide,
    "div": _div,
    "bitwise_and": _and,
    "bitwise_or": _lifting_two(_bitwise(jnp.bitwise_or)),
    "bitwise_xor": _lifting_two(_bitwise(jnp.bitwise_xor)),
    "bitwise_not": _lifting_one(_not),
    "bitwise_left_shift": _lifting_two(_shifted_left),
    "__lshift__": _lifting_two(_shifted_left),
    "bitwise_right_shift": _lifting_two(_shifted_right),
    "__rshift__": _lifting_two(_shifted_right),
    "eq": _lifting_two(_is_equal),
    "ne": _lifting_two(lambda x, y: ~_is_equal(x, y)),
    "lt": _lifting_two(_is_less),
    "gt": _lifting_two(lambda x, y: _is_less(y, x)),
    "le": _lifting_two(lambda x, y: ~_is_less(y, x)),
    "ge": _lifting_two(lambda x, y: ~_is_less(x, y)),
    "maximum": _lifting_two(lambda x, y: _chosen(_is_less(x, y), y, x)),
    "minimum": _lifting_two(lambda x, y: _chosen(_is_less(x, y), x, y)),
    "clamp": _clamp,
    "clamp_min": _clamp,
    "clamp_max": _clamp_max,
    "where": _where,
    "masked_fill": _masked_fill,
}
# Elements that are moved, as they are: what holds for each half.
_MOVING = frozenset(
    """
    alias clone detach lift_fresh repeat t tril triu diagonal permute roll view _unsafe_view _reshape_alias expand
    transpose squeeze unsqueeze flip split_with_sizes split unsafe_split unbind select slice narrow unfold index
    _unsafe_index index_select gather take
    """.split()  # noqa: SIM905
)
# Likewise of several tensors: which arguments those are.
_JOINING = {
    "cat": (0,),
    "stack": (0,),
    "copy": (0, 1),
    "slice_scatter": (0, 1),
    "select_scatter": (0, 1),
    "diagonal_scatter": (0, 1),
    "index_put": (0, 2),
}
# Which arguments are indices of a tensor's elements. No tensor has places beyond 32 bits.
INDEX_ARGUMENT = {
    **dict.fromkeys(["index", "_unsafe_index", "index_put", "_unsafe_index_put", "take", "embedding", "put"], 1),
    "embedding_dense_backward": 1,
    **dict.fromkeys(["gather", "index_select", "scatter", "scatter_add", "scatter_reduce"], 2),
    **dict.fromkeys(["index_add", "index_copy", "index_fill", "index_reduce"], 2),
}


def is_wide(value: object) -> bool:
    """Whether it is a `Wide`."""
    return isinstance(value, Wide)


def has_wide(arguments: Any) -> bool:
    """Whether there are `Wide`s among the arguments of an operation."""
    return any(map(is_wide, jax.tree_util.tree_leaves(arguments, is_leaf=is_wide)))


def is_large(x: object) -> bool:
    """Whether it is a Python number that 32 bits do not hold."""
    return type(x) is int and not -(2**31) <= x < 2**31


def each_narrowed(arguments: Any, narrow: Callable[[Wide], Any] = narrowed) -> Any:
    """The arguments without `Wide`s."""

    def without_wide(x: Any) -> Any:
        return narrow(x) if isinstance(x, Wide) else x

    return jax.tree_util.tree_map(without_wide, arguments, is_leaf=is_wide)


def short_name(target: str) -> str:
    """An operation's name without namespace and overload, as the tables here have it."""
    return (entry_name(target) or target).split(".")[1] if "." in target else target


def call_wide(
    name: str, function: Callable[..., Any], arguments: Sequence[Any], options: Mapping[str, Any], dtype: Any
) -> Any:
    """What an operation returns for arguments of which some have 64 bits.

    Args:
      name: its short name.
      function: what stands for it in 32 bits.
      arguments: its arguments.
      options: likewise.
      dtype: the torch dtype of what it returns.

    Returns:
      An array, a `Wide`, or a list of those.

    Raises:
      CannotWidenError: it has no form for 64 bits.
    """
    arguments = list(arguments)
    if name in INDEX_ARGUMENT:
        arguments[INDEX_ARGUMENT[name]] = each_narrowed(arguments[INDEX_ARGUMENT[name]])
        if not has_wide(arguments):
            return function(*arguments, **options)
    if name == "_to_copy" and not dtype.is_floating_point:
        return _converted(arguments[0], dtype)
    if name in _MOVING or name in _JOINING:
        for place in _JOINING.get(name, ()):
            arguments[place] = _each_lifted(arguments[place])
        halves = (function(*each_narrowed(arguments, half), **options) for half in (_high, _low))
        return jax.tree_util.tree_map(Wide, *halves)
    if dtype.is_floating_point or dtype.is_complex:
        in_single = each_narrowed(arguments, to_float)
        return function(*[float(x) if is_large(x) else x for x in in_single], **options)
    if name not in _OPERATIONS:
        raise CannotWidenError
    return _OPERATIONS[name](*arguments, **options)


def _each_lifted(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return [lifted(part) for part in x]
    return lifted(x) if hasattr(x, "shape") else x


def _high(x: Wide) -> Array:
    return jnp.broadcast_to(x.high, x.shape)


def _low(x: Wide) -> Array:
    return jnp.broadcast_to(x.low, x.shape)


def _converted(x: Wide, dtype: torch.dtype) -> Any:
    """As another dtype of whole numbers, of which one with fewer bits takes the last ones."""
    if dtype == torch.bool:
        return (x.high != 0) | (x.low != 0)
    return x if dtype in (torch.int64, torch.uint64) else x.low.astype(np.int32)


# ------------------------------------------------------------------------------------------------ sizes

LARGEST = 2**31 - 1
# How large a number is taken to be that depends on the values of tensors: where it is computed in 64 bits as soon as it
# may not fit in 32, and where it is refused if it may not. Counts and places are rarely larger.
CAREFUL, USUAL = 2**20, 2**8


def sizes(steps: Sequence[Any], constants: Mapping[Node, int], unknown: int) -> dict[Node, int]:
    """How large the whole numbers get that an operation returns, as far as it can be seen from the code.

    Args:
      steps: nodes with their arguments, in order.
      constants: how large those are that are no inputs.
      unknown: how large a number counts that depends on values.
    """
    found = {node: max(size, unknown) for node, size in constants.items()}  # a tensor outside may get new values
    for step in steps:
        value = step.node.meta.get("val")
        results = value if isinstance(value, (tuple, list)) else [value]
        is_long = any(isinstance(result, torch.Tensor) and result.dtype == torch.int64 for result in results)
        if step.node.op == "call_function" and is_long:
            found[step.node] = _size(step, found, unknown)
    return found


_NATURAL = {torch.bool: 1, torch.uint8: 255, torch.int8: 128}


def _size(step: Any, found: Mapping[Node, int], unknown: int) -> int:
    def size_of(x: Any) -> int:
        if isinstance(x, int):
            return abs(x)
        if not isinstance(x, Node):
            return unknown
        value = x.meta.get("val")
        natural = _NATURAL.get(value.dtype, unknown) if isinstance(value, torch.Tensor) else unknown
        return found.get(x, natural)

    name, arguments = short_name(str(step.node.target)), step.arguments
    if step.node.target is operator.getitem:
        return size_of(arguments[0])
    sizes = [size_of(x) for x in arguments[:2]]
    first, second = (*sizes, 0, 0)[:2]
    number = arguments[1] if len(arguments) > 1 and isinstance(arguments[1], int) else None
    match name:
        case "mul":
            result = first * second
        case "add" | "sub" | "rsub":
            result = first + second * size_of(step.options.get("alpha", 1))
        case "pow":
            result = first ** min(abs(number), 64) if number is not None else unknown
        case "bitwise_left_shift" | "__lshift__":
            result = first << min(second, 64)
        case "bitwise_right_shift" | "__rshift__":
            result = first >> min(number or 0, 64)
        case "remainder" | "fmod" if number:
            result = abs(number)
        case "bitwise_and" if number is not None and number >= 0:
            result = number
        case "floor_divide" if number:
            result = first // abs(number) + 1
        case "bitwise_or" | "bitwise_xor":
            result = (1 << max(first, second).bit_length()) - 1
        case "clamp" if all(isinstance(x, int) for x in arguments[1:3]) and len(arguments) > 2:
            result = max(map(abs, arguments[1:3]))
        case "neg" | "abs" | "_to_copy" | "bitwise_not" | "remainder" | "floor_divide" | "clamp" | "clamp_min":
            result = first
        case _ if name in _MOVING:
            result = first
        case "where" | "cat" | "stack" | "maximum" | "minimum" | "masked_fill" | "copy" | "index_put":
            leaves = jax.tree_util.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, Node))
            result = max((size_of(x) for x in leaves if isinstance(x, Node)), default=unknown)
        case _:
            result = unknown
    return min(result, 2**63)


def may_grow(name: str) -> bool:
    """Whether what an operation returns may need more bits than what it is given."""
    return name in _GROWING


def has_form(name: str) -> bool:
    """Whether an operation takes whole numbers of 64 bits."""
    return name in _OPERATIONS
