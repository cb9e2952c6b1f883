"""`find_nan`: finds the operation in which a NaN or an infinity first appears.

# Note: the search

The jaxpr is evaluated once, eqn by eqn, and each value that is not finite is passed on with its origin:

    def loss(x):              a = log(x)         -inf, from a finite x: the origin
                              b = a * 0          nan, from an a that is -inf: the origin of a
                              return b.sum()     nan, from a b that is nan: the origin of b

Of several origins the earliest is passed on, and reported. If a result is NaN, infinite results do not count: they may
be intended. A literal infinity (an attention mask, say) is not an origin, but a NaN computed from it is. An infinity
that reaches no result, as in `where(x == 0, 0, 1 / x)`, is not reported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ref import AbstractRef

from jaxfn._check.arguments import as_function, noting_packed_arguments
from jaxfn._compat import eqn_source_line, lower_jaxpr
from jaxfn._inspection.interpreter import EqnInterpreter
from jaxfn._jaxpr import all_eqns, open_jaxpr
from jaxfn._observe import OBSERVATION, Label, Observation, label_p, named_line
from jaxfn._reports import Report, public
from jaxfn._torch.values.arrays import with_arrays
from jaxfn._tree import TreeSpec, flatten, is_inexact, is_traced, leaves_with_path


@public
@dataclass(frozen=True, repr=False)
class NanOrigin(Report):
    """The origin of a NaN or an infinity. Prints as text; false, as every report of something wrong.

    Attributes:
      function: the name of the Function in which it first appears, or `None` for code outside Functions.
      method: the method of that Function: "forward", "backward", "jvp" or "vmap".
      array: the first array of that method with it: "output 0", "saved y", "gradient of x"; "" if it reaches none.
      number: "nan", "inf" or "-inf".
      operation: the name of the JAX operation that computed it; "argument" if it was passed in.
      shape, index: the shape of the operation's result, and the index of its first such number.
      line: the line of code, "file:line (function)"; "" for JAX's own code.
      enclosing: the control flow around it, the outermost first: "scan: step 3 of 10", "while: step 3",
        "cond: branch 1", "checkpoint". Steps are counted from 0, as in the stacked arrays.
    """

    function: str | None
    method: str | None
    array: str
    number: str
    operation: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    line: str
    enclosing: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """The text."""
        return [str(self)]

    def __str__(self) -> str:
        where = f"{self.function}.{self.method}" if self.function else "code outside any Function"
        reached = f" ({self.array})" if self.array else ""
        if self.operation == "argument":
            return f"{self.number} is in {self.array}, at index {self.index} of shape {self.shape}"
        if self.operation == "shard_map":
            where = f"a shard_map that is called in {where}"
        lines = [
            f"{self.number} first appears in {where}{reached}",
            f"  computed by {self.operation}, at index {self.index} of shape {self.shape}",
        ]
        lines += [f"  {self.line}"] * bool(self.line)
        lines += [f"  in {around}" for around in self.enclosing]
        lines += [_SHARD_MAP_HINT] * (self.operation == "shard_map")
        return "\n".join(lines)


_SHARD_MAP_HINT = (
    "  find_nan does not search inside shard_map: "
    "call it on the function that shard_map maps, with the arguments of one device"
)


def find_nan(f: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NanOrigin | None:
    """Finds where a NaN or an infinity first appears: in which Function, method and line of code.

    The function is traced, with everything that it calls, and evaluated once. Only a NaN or an infinity that reaches a
    result, or an array that passes between JAX and a Function, is reported: of a NaN if a result has one. A `shard_map`
    counts as one operation: there is no search inside it.

    Args:
      f: A function of arrays, jitted or not. Pass `jax.value_and_grad(loss)` to search the backward pass too.
      *args: The arguments of `f`.
      **kwargs: The keyword arguments of `f`.

    Returns:
      A `NanOrigin`, or `None` if all results are finite. `print` it for a report.

    Raises:
      TypeError: The arguments are traced.
      NotImplementedError: `f` uses a `jax.Ref`.

    Examples:
      >>> import jax, jax.numpy as jnp, jaxfn
      >>> @jaxfn.function
      ... def root(ctx, x):
      ...     y = jnp.sqrt(x)
      ...     ctx.save_for_backward(y)
      ...     return y
      >>> @root.backward
      ... def _(ctx, grad_output):
      ...     (y,) = ctx.saved_tensors
      ...     return grad_output / (2 * y)
      >>> origin = jaxfn.find_nan(jax.grad(lambda x: root(x).sum()), jnp.array([4.0, 0.0]))
      >>> print(origin)  # doctest: +ELLIPSIS
      inf first appears in root.backward (gradient of x)
        computed by div, at index (1,) of shape (2,)
      ...
      >>> print(origin.function, origin.method, origin.array)
      root backward gradient of x

    Torch counterpart: `torch.autograd.set_detect_anomaly`.
    JAX counterpart: `jax.debug_nans`.
    """
    f = as_function(f, "find_nan")
    args, kwargs = with_arrays((args, kwargs))
    with noting_packed_arguments("find_nan", args):
        origin = _find(f, args, kwargs)
    if origin is None or origin.function is not None:
        return origin
    # A Python number is static, and a Function that is called with numbers alone has no labels: trace them.
    try:
        traced = _find(f, *jax.tree.map(_as_array_if_number, (args, kwargs)))
    except Exception:  # the function needs their values
        return origin
    return origin if traced is None or traced.function is None else traced


def _as_array_if_number(leaf: Any) -> Any:
    return jnp.asarray(leaf) if type(leaf) in (int, float, complex) else leaf


def _find(f: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> NanOrigin | None:
    """Searches with Python numbers as static arguments; see `find_nan`."""
    arrays, tree = flatten((args, kwargs))
    if any(map(is_traced, arrays)):
        raise TypeError(
            "find_nan evaluates the function, so its arguments cannot be traced (inside jit). Call it outside."
        )

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = tree.unflatten(iter(arrays))
        return jax.tree_util.tree_leaves(f(*args, **kwargs))

    with OBSERVATION(Observation.VALUES):
        jaxpr, consts = open_jaxpr(lower_jaxpr(jax.make_jaxpr(flat)(*arrays)))
        if any(map(_touches_ref, all_eqns(jaxpr))):
            raise NotImplementedError("find_nan does not support a jax.Ref. Return the value instead.")
        return _Search(jaxpr, consts, arrays, _argument_names(tree, len(arrays))).origin()


def _touches_ref(eqn: Any) -> bool:
    return any(isinstance(atom.aval, AbstractRef) for atom in [*eqn.invars, *eqn.outvars])


def _argument_names(tree: TreeSpec, num_arrays: int) -> list[str]:
    """Returns the names of the array leaves of (args, kwargs)."""
    paths = leaves_with_path(tree.unflatten_gradient(iter(range(num_arrays))))
    return [("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in paths]


class _NonFinite(NamedTuple):
    """The first NaN of an array, or else its first infinity: "nan", "inf" or "-inf", and where it is."""

    kind: str
    shape: tuple[int, ...]
    indices: tuple[int, ...]


def _first_non_finite(value: Any) -> _NonFinite | None:
    if not np.size(value) or not is_inexact(jax.typeof(value).dtype) or bool(_is_finite(value)):
        return None
    value = np.asarray(value)
    nans = np.isnan(value)
    index = tuple(np.argwhere(nans if nans.any() else ~np.isfinite(value))[0])
    kind = "nan" if np.isnan(value[index]) else "inf" if value[index].real > 0 else "-inf"
    return _NonFinite(kind, value.shape, tuple(map(int, index)))


@jax.jit
def _is_finite(value: Any) -> Any:
    return jnp.isfinite(value).all()


class _Origin(NamedTuple):
    """The origin of a value: an eqn that was evaluated, in other eqns; or a NaN that was passed in, by its name."""

    order: float
    bad: _NonFinite
    name: str = ""
    eqn: Any = None
    enclosing: Sequence[tuple[Any, str]] = ()


class _Value(NamedTuple):
    array: Any
    bad: _NonFinite | None = None
    origin: _Origin | None = None  # an infinity that is passed in or a literal has none

    @property
    def kind(self) -> str:
        return "" if self.bad is None else self.bad.kind


class _Search(EqnInterpreter):
    """An evaluation that passes on with each value that is not finite its earliest origin."""

    def __init__(self, jaxpr: Any, consts: Sequence[Any], arrays: Sequence[Any], names: Sequence[str]) -> None:
        self._num_evaluated = 0
        self._constants: dict[int, _Value] = {}  # by the id of the array
        self._labelled: list[tuple[int, Label, _Value]] = []
        orders = range(-len(arrays), 0)
        super().__init__(jaxpr, consts, list(map(self._passed_in, arrays, names, orders)))

    def _passed_in(self, array: Any, name: str, order: float) -> _Value:
        bad = _first_non_finite(array)
        return _Value(array, bad, _Origin(order, bad, name) if bad is not None and bad.kind == "nan" else None)

    def constant(self, array: Any) -> _Value:
        if id(array) not in self._constants:
            self._constants[id(array)] = self._passed_in(array, "a constant of the program", math.inf)
        return self._constants[id(array)]

    def array(self, value: _Value) -> Any:
        return value.array

    def moved(self, array: Any, sources: Sequence[_Value]) -> _Value:
        return self._computed(array, sources, None)

    def operation(self, eqn: Any, operands: Sequence[_Value]) -> list[_Value]:
        arrays = super().operation(eqn, [x.array for x in operands])
        self._num_evaluated += 1
        values = [self._computed(x, operands, eqn) for x in arrays]
        if eqn.primitive is label_p:
            self._labelled += [(self._num_evaluated, *pair) for pair in zip(eqn.params["labels"], values, strict=True)]
        return values

    def _computed(self, array: Any, operands: Sequence[_Value], eqn: Any) -> _Value:
        """Returns the value of an array that was computed from others, by an eqn or by moving them."""
        bad = _first_non_finite(array)
        if bad is None:
            return _Value(array)
        if eqn is not None and eqn.primitive is jax.lax.select_n_p:
            which = np.asarray(operands[0].array)
            operands = [operands[1 + int(which[bad.indices] if which.ndim else which)]]
        sources = [x for x in operands if x.kind]
        nans = [x for x in sources if x.kind == bad.kind == "nan"]
        origins = [x.origin for x in nans or sources if x.origin is not None]
        if eqn is not None and (not sources or (bad.kind == "nan" and not nans)):
            origins.append(_Origin(self._num_evaluated, bad, "", eqn, tuple(self.enclosing)))
        return _Value(array, bad, min(origins, key=lambda origin: origin.order, default=None))

    def origin(self) -> NanOrigin | None:
        """Returns the earliest origin that reaches a result, or else an array that a Function takes or returns."""
        nans = [x for x in self.results if x.kind == "nan"]  # otherwise, an infinite result may be intended
        for values in (nans or self.results, *([x] for _, _, x in self._labelled)):
            # An infinity does not come from a NaN in a constant.
            origins = [x.origin for x in values if x.origin and (x.origin.order < math.inf or x.kind == "nan")]
            if origins:
                return self._described(min(origins, key=lambda origin: origin.order))
        return None

    def _described(self, origin: _Origin) -> NanOrigin:
        kind, shape, index = origin.bad
        if origin.eqn is None:
            return NanOrigin(None, None, origin.name, kind, "argument", shape, index, "", ())
        eqns = [*(eqn for eqn, _ in origin.enclosing), origin.eqn]
        names = "/".join(str(eqn.source_info.name_stack) for eqn in eqns)
        lines = filter(None, map(eqn_source_line, reversed(eqns)))  # JAX's own code has no line
        methods = re.findall(r"([^/()]+)\.(forward|backward|jvp|vmap)\b", names)
        known = {label.function for _, label, _ in self._labelled}  # other names come from jax.named_scope
        function, method = next((m for m in reversed(methods) if m[0] in known), (None, None))
        return NanOrigin(
            function,
            method,
            self._array_of(origin, function, method),
            kind,
            origin.eqn.primitive.name,
            shape,
            index,
            named_line(names) or next(lines, ""),
            tuple(description for _, description in origin.enclosing if description),
        )

    def _array_of(self, origin: _Origin, function: str | None, method: str | None) -> str:
        """Returns the name of the method's first value that is not finite, after the origin."""
        for order, label, value in self._labelled:
            is_of_method = (label.function, label.method) == (function, method) and label.role in _ROLES
            if order > origin.order and is_of_method and value.kind:
                return _ROLES[label.role].format(name=label.name)
        return ""


# Descriptions of the results of a method, by the role of their labels.
_ROLES = {
    "output": "output {name}",
    "saved": "saved {name}",
    "gradient": "gradient of {name}",
    "tangent": "tangent of output {name}",
}
