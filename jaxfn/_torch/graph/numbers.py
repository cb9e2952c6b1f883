"""Numbers that Python code computes from traced tensors, without reads of their values.

`tensor.item()` returns a `TracedNumber`, and so do arithmetic operators on these. Each is a node of the graph, computed
in 64 bits, as in Python, without a derivative. As symbolic numbers of torch they may be arguments of its operations.
Whatever needs the number itself (`float(n)`, `f"{n}"`, `n > 1`) reads it; see `reads`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Node

from jaxfn._torch.graph.targets import JaxCall


class NumberRecorder(Protocol):
    """The part of a recorder that records numbers."""

    def record_number(self, target: JaxCall, operands: Sequence[Any], largest: int) -> Node: ...

    def read_condition(self, target: JaxCall, operands: Sequence[Any]) -> bool: ...


class TracedNumber:
    """A number that depends on the values of traced tensors.

    Args:
      recorder: The recorder of the trace.
      result: The node of the graph that computes it.
      largest: The largest value of an integer; the smallest is `-largest - 1`. 0 for a float.
      compute: Computes it in Python from the values of `operands`.
      operands: Numbers, traced or not.

    Attributes:
      kind: The type that Python code sees.
      is_read: Whether its value was read.
    """

    kind: ClassVar[type] = float

    def __init__(
        self,
        recorder: NumberRecorder,
        result: Node,
        largest: int,
        compute: Callable[..., Any],
        operands: Sequence[Any] = (),
    ) -> None:
        self.recorder = recorder
        self.result = result
        self.largest = largest
        self.is_read = False
        self._value: Any = None
        self._compute = compute
        self._operands = operands

    def read(self) -> Any:
        """Returns the value, computed by Python from the values of the tensors that it depends on."""
        pending = [self]
        while pending:
            number = pending[-1]
            unread = [x for x in number._operands if isinstance(x, TracedNumber) and not x.is_read]
            pending += unread
            if not unread:
                if not number.is_read:
                    number._value = number._compute(*map(read_number, number._operands))
                    number.is_read = True
                pending.pop()
        return self._value

    # torch's compiled code takes a symbolic number's `node`, and calls its methods (2.8 to 2.15).

    @property
    def node(self) -> TracedNumber:
        return self

    def is_float(self) -> bool:
        return self.kind is float

    def is_int(self) -> bool:
        return self.kind is int

    def is_bool(self) -> bool:
        return False

    is_nested_int = is_bool

    def guard_float(self, file: str, line: int) -> Any:
        return self.read()

    guard_int = guard_float

    def maybe_as_int(self) -> None:
        return None

    # Methods of Python's numbers; `_make_class` adds the others.

    def __bool__(self) -> bool:
        return _apply("ne", self, 0)

    def __pos__(self) -> TracedNumber:
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.read(), dtype)

    def __copy__(self) -> TracedNumber:
        return self

    def __deepcopy__(self, memo: object) -> TracedNumber:
        return self


def read_number(value: Any) -> Any:
    """Returns the value of a traced number; another value unchanged."""
    return value.read() if isinstance(value, TracedNumber) else value


def map_numbers(function: Callable[[TracedNumber], Any], value: Any) -> Any:
    """Applies a function to the traced numbers in arguments, in which torch may have wrapped them again."""
    if isinstance(value, (torch.SymFloat, torch.SymInt)):
        return function(value.node)
    if type(value) in (tuple, list, torch.Size):
        parts = [map_numbers(function, part) for part in value]
        return parts if type(value) is list else tuple(parts)
    if type(value) is dict:
        return {name: map_numbers(function, part) for name, part in value.items()}
    if type(value) is slice:
        return slice(*(map_numbers(function, part) for part in (value.start, value.stop, value.step)))
    return value


def numbers_in(value: Any) -> list[TracedNumber]:
    """Returns the traced numbers in arguments."""
    found: list[TracedNumber] = []
    map_numbers(found.append, value)
    return found


# ------------------------------------------------------------------------------------------------ tensors and numbers

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COUNTS = ("aten.count_nonzero", "aten.argmax", "aten.argmin")


def item(recorder: NumberRecorder, tensor: Node, read: Callable[[], Any]) -> TracedNumber | None:
    """Returns the only element of a tensor, by its node; `None` if its dtype has no traced numbers."""
    dtype: torch.dtype = tensor.meta["val"].dtype
    if dtype.is_floating_point:
        return _CLASSES[float](recorder, recorder.record_number(_ITEM[float], (tensor,), 0), 0, read)
    if dtype not in _INTEGERS:
        return None
    largest = torch.iinfo(dtype).max
    name, operands = str(tensor.target).rpartition(".")[0], [x.meta["val"] for x in tensor.all_input_nodes]
    if name in _COUNTS or (name == "aten.sum" and operands[0].dtype == torch.bool):
        largest = operands[0].numel()
    return _CLASSES[int](recorder, recorder.record_number(_ITEM[int], (tensor,), largest), largest, read)


def _make_item(kind: Any) -> JaxCall:
    def convert(x: jax.Array) -> jax.Array:
        # A Python type as dtype gives an array of weak type, as a Python number is.
        return lax.convert_element_type(lax.stop_gradient(x).reshape(()), kind)

    return JaxCall(convert, "item")


_ITEM = {kind: _make_item(kind) for kind in (float, int)}


def to_operand(value: jax.Array, node: Node) -> jax.Array:
    """Returns a number as an operand of other operations: with x64 off in 32 bits, if it fits."""
    is_float = jnp.issubdtype(value.dtype, np.floating)
    is_wide = not is_float and node.meta["largest_number"] >= 2**31
    if jax.dtypes.canonicalize_dtype(np.int64) == np.int64 or value.dtype == np.bool_ or is_wide:
        return value
    with jax.enable_x64(True):
        narrow = lax.convert_element_type(value, np.float32 if is_float else np.int32)
    return lax.convert_element_type(narrow, float if is_float else int)


# Operations whose implementations take traced numbers as they take Python numbers: those that wrap integers around, as
# torch does; those for which torch checks that an integer fits; and those that are right for floating-point results.
_WRAPPING = frozenset(("add", "sub", "rsub", "mul"))
_CHECKING = frozenset(
    "eq ne lt le gt ge masked_fill fill full full_like new_full clamp clamp_min clamp_max".split()  # noqa: SIM905
)
_OF_FLOATS = frozenset(
    """
    div floor_divide remainder fmod pow lerp addcmul addcdiv leaky_relu elu hardtanh threshold hardshrink softshrink
    softplus
    """.split()  # noqa: SIM905
)
_OPERATIONS = _WRAPPING | _CHECKING | _OF_FLOATS
# Their other names in Python.
_SYNONYMS = frozenset(
    "subtract multiply divide true_divide greater less where tensor as_tensor asarray".split()  # noqa: SIM905
)


def is_operand(number: TracedNumber, operation: Any, result: Any) -> bool:
    """Whether an operation with this result takes a traced number, and needs no value of it."""
    name = str(operation).split(".")[1]
    if not isinstance(result, torch.Tensor) or name not in _OPERATIONS:
        return False
    dtype = result.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if number.kind is float or dtype == torch.bool or name in _OF_FLOATS:
        return dtype == torch.bool
    return name in _WRAPPING or number.largest <= torch.iinfo(dtype).max


def prepare_numbers(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reads the traced numbers among the arguments of a torch function, except floats, and integers that are operands.

    Other integers may be lengths, dimensions or indices. If the function is `None`, all numbers are read.
    """

    def prepare(value: Any) -> Any:
        return value if isinstance(value, TracedNumber) and takes_integers else map_numbers(read_other, value)

    def read_other(number: TracedNumber) -> Any:
        return number if number.kind is float and function is not None else number.read()

    name = getattr(function, "__name__", "").strip("_")
    takes_integers = any(part in _OPERATIONS | _SYNONYMS for part in (name, name[1:]))
    return tuple(map(prepare, args)), {name: prepare(value) for name, value in kwargs.items()}


# ------------------------------------------------------------------------------------------------ operators

_ARITHMETIC = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "truediv": jnp.true_divide,
    "pow": jnp.power,
    "neg": jnp.negative,
    "abs": jnp.abs,
}
_COMPARISONS = {
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
    "eq": jnp.equal,
    "ne": jnp.not_equal,
}
_CALLS = {name: JaxCall(function, name) for name, function in (_ARITHMETIC | _COMPARISONS).items()}


def _apply(name: str, *operands: Any) -> Any:
    """Applies a function of the module `operator`: to the values, where 64 bits may give another result."""
    compute, kind = getattr(operator, name), int
    if name == "truediv" or any(isinstance(x, float) for x in operands):
        kind = float
    largest = _largest_result(name, kind, operands)
    if largest is None:
        return compute(*map(read_number, operands))
    recorder = next(x.recorder for x in operands if isinstance(x, TracedNumber))
    values = [x.result if isinstance(x, TracedNumber) else kind(x) for x in operands]
    if name in _COMPARISONS:
        return recorder.read_condition(_CALLS[name], values)
    result = recorder.record_number(_CALLS[name], values, largest)
    return _CLASSES[kind](recorder, result, largest, compute, operands)


def _largest_result(name: str, kind: type, operands: Sequence[Any]) -> int | None:
    """Returns a bound of an operation's result, as `TracedNumber.largest`; `None` if 64 bits may give another one."""
    constants = [x for x in operands if not isinstance(x, TracedNumber)]
    bounds = [x.largest + 1 if isinstance(x, TracedNumber) else 0 if isinstance(x, float) else abs(x) for x in operands]
    if name in _COMPARISONS:  # Those of integers are exact, and so are those of floats with integers up to 2**53.
        is_exact = all(-(2**63) <= x < 2**63 for x in constants) if kind is int else max(bounds) <= 2**53
        return 0 if is_exact else None
    if kind is float:
        is_complex = name == "pow" and not isinstance(operands[0], TracedNumber) and operands[0] < 0
        return 0 if max(bounds) < 2**1000 and not is_complex else None
    match name:
        case "add" | "sub":
            largest = sum(bounds)
        case "mul":
            largest = bounds[0] * bounds[1]
        case "neg" | "abs":
            largest = bounds[0]
        case _:
            return None
    return largest if largest < 2**63 else None


def _operator(name: str, is_reflected: bool = False) -> Callable[..., Any]:
    def apply(*operands: Any) -> Any:
        ordered = operands[::-1] if is_reflected else operands
        if any(isinstance(x, complex) for x in operands):
            return getattr(operator, name)(*map(read_number, ordered))
        if not all(isinstance(x, (int, float)) for x in operands):
            return NotImplemented  # Python calls the method of the other operand, such as a tensor.
        return _apply(name, *ordered)

    return apply


def _method(name: str) -> Callable[..., Any]:
    def read_first(self: TracedNumber, *args: Any) -> Any:
        return getattr(self.read(), name)(*map(read_number, args))

    return read_first


def _attribute(name: str) -> property:
    return property(lambda self: getattr(self.read(), name))


def _make_class(base: type, kind: type) -> type[TracedNumber]:
    """Returns the class of numbers that Python code sees as a `kind`: operators are traced, other methods read."""
    of_objects = {*dir(object)} - {"__repr__", "__str__", "__format__", "__hash__", "__reduce_ex__"}
    body: dict[str, Any] = {"kind": kind, "__class__": property(lambda self: kind)}  # For `isinstance(n, float)`.
    for name in {*dir(kind)} - of_objects - {*vars(TracedNumber)}:
        body[name] = _method(name) if callable(getattr(kind, name)) else _attribute(name)
    for name in _CALLS:
        body[f"__{name}__"] = _operator(name)
        if name in _ARITHMETIC and name not in ("neg", "abs"):
            body[f"__r{name}__"] = _operator(name, is_reflected=True)
    return type(f"Traced{kind.__name__.title()}", (TracedNumber, base), body)


_CLASSES = {float: _make_class(torch.SymFloat, float), int: _make_class(torch.SymInt, int)}
