"""The arguments and outputs of a checked function: their array leaves, and the names of these in reports."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import not_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_map_with_path

from jaxfn._function import Function, show_signature
from jaxfn._torch import runs_on_jax
from jaxfn._torch.values.arrays import with_arrays
from jaxfn._tree import TreeSpec, double, flatten, is_array_leaf, is_inexact, is_none, leaves_with_path


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call."""

    spec: TreeSpec  # everything except their arrays
    is_value: Sequence[bool]  # for each array, whether it can be differentiated
    values: Sequence[Any]  # the arrays that can be differentiated
    others: Sequence[Any]  # the other arrays: integers, booleans, keys
    names: Sequence[str]  # the names of the values in reports
    owners: Sequence[int]  # the positions of the arguments that contain the values
    chosen: frozenset[int]  # the positions of the arguments to be differentiated

    @cached_property
    def differentiated(self) -> list[int]:
        """The indices of the values that are differentiated."""
        return [i for i, owner in enumerate(self.owners) if owner in self.chosen]

    def call(self, function: Callable[..., Any], values: Sequence[Any], others: Sequence[Any] | None = None) -> Any:
        """Calls a function with other values, and with other arrays in place of `others`."""
        remaining = {True: iter(values), False: iter(self.others if others is None else others)}
        return function(*self.spec.unflatten(next(remaining[is_value]) for is_value in self.is_value))


def as_function(func: Any, check: str) -> Callable[..., Any]:
    """Returns the function that a check is called with: of a Function class its `apply`, of a module its pure function.

    Raises:
      TypeError: `func` is torch code, or cannot be called.
    """
    if isinstance(func, type) and issubclass(func, Function):
        return func.apply
    if is_torch_code(func):
        owner, name = getattr(func, "__self__", None), getattr(func, "__name__", type(func).__name__)
        name = f"{owner.__name__}.{name}" if isinstance(owner, type) else name
        raise TypeError(
            f"{check} takes a JAX function, and {name} is torch code. Convert it with jaxfn.from_torch({name}), or "
            f"compare a port with it by jaxfn.paritycheck(port, {name}, inputs)."
        )
    if not callable(func):
        raise TypeError(f"{check} takes a Function class or a function, and its arguments; got {func!r} first")
    return getattr(func, "_jaxfn_of_arguments", func)


def is_torch_code(func: Any) -> bool:
    """Whether a function is torch's, or a class, or that of an instance or a method, is derived from one of torch."""
    if runs_on_jax(func):
        return False
    owner = getattr(func, "__self__", func)
    bases = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    return any(
        str(code.__module__).partition(".")[0] == "torch" for code in (func, *bases) if hasattr(code, "__module__")
    )


@contextmanager
def noting_packed_arguments(tool: str, args: tuple[Any, ...]) -> Generator[None]:
    """Adds a note to errors of a tool that takes `*args` if the only one is a tuple, as checks take arguments."""
    try:
        yield
    except Exception as error:
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            error.add_note(f"{tool} takes arguments one by one: {tool}(f, *inputs).")
        raise


def require_numbers(check: str, *, can_be_zero: bool = False, **options: float | None) -> None:
    """Raises a `ValueError` unless the options are `None`, or finite and positive (or zero)."""
    for name, number in options.items():
        if number is not None and not (math.isfinite(number) and (number > 0 or (can_be_zero and number == 0))):
            raise ValueError(f"{check}: {name}={number!r}, expected a finite number {'>=' if can_be_zero else '>'} 0")


def as_arguments(inputs: Any) -> tuple[Any, ...]:
    """Returns the arguments that `inputs` holds: a tuple or a list of them, or the only one; arrays for tensors."""
    return with_arrays(tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,))


def flatten_arguments(
    function: Callable[..., Any] | None,
    inputs: Any,
    argnums: int | Sequence[int] | None,
    convert: Callable[[str, Any, bool], Any],
) -> Arguments:
    """Flattens the arguments of a function.

    Args:
      function: the function, whose signature has the names of the arguments. Default: names by number alone.
      inputs: a tuple or a list of the arguments, or the only one.
      argnums: the positions of the arguments to be differentiated. Default: all.
      convert: converts a leaf, from its name, the leaf, and whether its argument is to be differentiated.
    """
    args = as_arguments(inputs)
    chosen = _chosen_arguments(argnums, len(args))
    argument_names = _argument_names(function, args)

    def name(path: Any) -> str:
        return argument_names[path[0].idx] + keystr(path[1:])

    def converted(path: Any, leaf: Any) -> Any:
        return convert(name(path), leaf, path[0].idx in chosen)

    args = tree_map_with_path(converted, args, is_leaf=is_none)
    arrays, spec = flatten(args)
    paths = [path for path, leaf in leaves_with_path(args, is_none) if is_array_leaf(leaf)]
    is_value = [is_inexact(array.dtype) for array in arrays]
    others = list(compress(arrays, map(not_, is_value)))
    values, paths = (list(compress(items, is_value)) for items in (arrays, paths))
    return Arguments(spec, is_value, values, others, list(map(name, paths)), [path[0].idx for path in paths], chosen)


def output_arrays(returned: Any) -> list[tuple[str, Any]]:
    """Returns the arrays and floating-point or complex numbers that a function returned, with their names in reports.

    These are `output 0` and so on for the items of a tuple or list, and `output 0` for anything else.
    """
    found: list[tuple[str, Any]] = []
    for path, leaf in leaves_with_path(returned):
        if is_array_leaf(leaf) or type(leaf) in (float, complex):
            position = 0
            if isinstance(returned, (tuple, list)):
                key, *path = path
                position = getattr(key, "idx", getattr(key, "name", key))  # the name in a namedtuple
            found.append((f"output {position}{keystr(tuple(path))}", leaf))
    return found


def parse_example(text: str, seed: int) -> tuple[Any, ...]:
    """Returns the arguments that a text describes, as `float32[3,4], int64[4] < 3, "mean"`.

    `dtype[sizes]` is a random array, an integer one below the number after `<` (default: 2); anything else is a
    literal of Python.

    Raises:
      ValueError: The text is not of this form.
    """
    generator = np.random.default_rng(seed)

    def value(node: ast.expr) -> Any:
        limit = 2
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt):
            node, limit = node.left, ast.literal_eval(node.comparators[0])
        if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
            try:
                return ast.literal_eval(node)
            except ValueError:
                raise ValueError(f"{ast.unparse(node)} is neither dtype[sizes] nor a Python value") from None
        shape = ast.literal_eval(node.slice)
        shape = shape if isinstance(shape, tuple) else (shape,)
        dtype = jnp.dtype(node.value.id)
        if dtype.kind in "iub":
            return np.asarray(generator.integers(0, limit, shape)).astype(dtype)
        parts = generator.standard_normal((2, *shape))
        return (parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]).astype(dtype)

    try:
        filled = re.sub(r"\[\s*\]", "[()]", text)  # The sizes of an array without dimensions.
        (expression,) = ast.parse(f"({filled},)" if text.strip() else "()").body
        assert isinstance(expression, ast.Expr) and isinstance(expression.value, ast.Tuple)
        return tuple(map(value, expression.value.elts))
    except (SyntaxError, TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{text!r} is not a list of arguments, as in 'float32[3,4], 2': {error}") from error


def function_name(func: Callable[..., Any]) -> str:
    """Returns the name of a function in reports."""
    return getattr(func, "__qualname__", None) or getattr(func, "__name__", None) or type(func).__name__


def as_double(array: Any) -> jax.Array:
    """Returns an inexact array in double precision (in single precision without x64), any other unchanged."""
    array = jnp.asarray(array)
    return array.astype(jax.dtypes.canonicalize_dtype(double(array.dtype))) if is_inexact(array.dtype) else array


def _chosen_arguments(argnums: int | Sequence[int] | None, count: int) -> frozenset[int]:
    """Returns the positions of the arguments that `argnums` names, or of all."""
    if argnums is None:
        return frozenset(range(count))
    wanted = [argnums] if isinstance(argnums, int) else list(argnums)
    for argnum in wanted:
        if not -count <= argnum < count:
            raise ValueError(f"argnums names argument {argnum}, but there are {count} inputs")
    return frozenset(argnum % count for argnum in wanted)


def _argument_names(func: Callable[..., Any] | None, args: Sequence[Any]) -> list[str]:
    """Returns `input 0 ('x')` and so on, with the names in the function's signature if it has one."""
    numbered = [f"input {i}" for i in range(len(args))]
    if func is None:
        return numbered
    show_signature(func)
    try:
        signature = inspect.signature(func)
        bound = signature.bind(*args).arguments
    except (TypeError, ValueError):
        return numbered
    names: list[str] = []
    for name in bound:
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{i}]" for i in range(len(bound[name]))]
        else:
            names.append(name)
    return [f"input {i} ({name!r})" for i, name in enumerate(names)]
