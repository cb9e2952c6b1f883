"""`find_nan`: finds the operation in which a NaN or an infinity first appears.

# Note: the search

The jaxpr is evaluated once, eqn by eqn, and values that are not finite are recorded (see `EqnInterpreter`). Then, from
a result that is not finite, the search goes back through values that are not finite:

    def loss(x):              a = log(x)         -inf, from a finite x: the origin
                              b = a * 0          nan, from an a that is -inf: go on to a
                              return b.sum()     nan, from a b that is nan: go on to b

Of all origins that are found so, the earliest in program order is reported. If a result is NaN, infinite results are
not searched: they may be intended. A literal infinity (an attention mask, say) is not an origin, but a NaN computed
from it is. An infinity that reaches no result, as in `where(x == 0, 0, 1 / x)`, is
not reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ref import AbstractRef

from jaxfn._compat import eqn_source_line, lower_jaxpr
from jaxfn._inspection.harvest import Path, any_eqn
from jaxfn._inspection.interpreter import EqnInterpreter, Frame, NonFiniteValue, first_non_finite
from jaxfn._jaxpr import SubJaxpr, is_variable, open_jaxpr
from jaxfn._observe import OBSERVATION, Observation, label_p, named_line
from jaxfn._tree import TreeSpec, flatten, is_traced, leaves_with_path


@dataclass(frozen=True)
class NanOrigin:
    """The origin of a NaN or an infinity; its `str` is a report.

    Attributes:
      function: the name of the Function in which it first appears, or `None` for code outside Functions.
      method: the method of that Function: "forward", "backward", "jvp" or "vmap".
      array: the first array of that method with it: "output 0", "saved y", "gradient of x"; "" if it reaches none.
      kind: "nan", "inf" or "-inf".
      operation: the name of the JAX operation that computed it; "argument" if it was passed in.
      shape, index: the shape of the operation's result, and the index of its first such number.
      line: the line of code, "file:line (function)"; "" for JAX's own code.
      enclosing: the control flow around it, the outermost first: "scan: step 3 of 10", "while: step 3",
        "cond: branch 1", "checkpoint". Steps are counted from 0, as in the stacked arrays.
    """

    function: str | None
    method: str | None
    array: str
    kind: str
    operation: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    line: str
    enclosing: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.function}.{self.method}" if self.function else "code outside any Function"
        reached = f" ({self.array})" if self.array else ""
        if self.operation == "argument":
            return f"{self.kind} is in {self.array}, at index {self.index} of shape {self.shape}"
        if self.operation == "shard_map":
            where = f"a shard_map that is called in {where}"
        lines = [
            f"{self.kind} first appears in {where}{reached}",
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


def find_nan(f: Callable[..., Any], *args: Any, **kwargs: Any) -> NanOrigin | None:
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
    """
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
        if any_eqn(jaxpr, _touches_ref):
            raise NotImplementedError("find_nan does not support a jax.Ref. Return the value instead.")
        interpreter = EqnInterpreter(jaxpr, consts, arrays)
    return _Search(jaxpr, interpreter, _argument_names(tree, len(arrays))).origin()


def _touches_ref(eqn: Any) -> bool:
    return any(isinstance(atom.aval, AbstractRef) for atom in [*eqn.invars, *eqn.outvars])


def _argument_names(tree: TreeSpec, num_arrays: int) -> list[str]:
    """Returns the names of the array leaves of (args, kwargs)."""
    paths = leaves_with_path(tree.unflatten_gradient(iter(range(num_arrays))))
    return [("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in paths]


class _Origin(NamedTuple):
    """The origin of a non-finite value: an eqn of a frame and one of its results, or an argument."""

    order: tuple[int, ...]
    frame: Frame
    number: int
    result: int


class _Search:
    """The search for an origin in an evaluated jaxpr, whose arguments have these names."""

    def __init__(self, jaxpr: Any, interpreter: EqnInterpreter, names: Sequence[str]) -> None:
        self._whole = Frame(jaxpr, (), (), None)
        self._interpreter = interpreter
        self._names = names
        self._producers: dict[int, dict[Any, tuple[int, int]]] = {}

    def origin(self) -> NanOrigin | None:
        """Returns the earliest origin that reaches a result, or else an array that a Function takes or returns."""
        jaxpr = self._whole.jaxpr
        bad = [v for v in jaxpr.outvars if self._is_bad(self._whole, v)]
        nans = [v for v in bad if self._kind(self._whole, v) == "nan"]  # an infinite result may be intended
        starts = [(self._whole, nans or bad)]
        starts += [(frame, [frame.jaxpr.eqns[number].outvars[index]]) for frame, number, index in self._bad_labels()]
        origins = (self._origin_of(frame, variables) for frame, variables in starts)
        return next((origin for origin in origins if origin is not None), None)

    def _origin_of(self, frame: Frame, variables: Sequence[Any]) -> NanOrigin | None:
        """Returns the earliest origin of some variables; `None` for infinities that were passed in or are literals."""
        first: _Origin | None = None
        seen: set[tuple[Path, tuple[int, ...], Any]] = set()
        starts = [(frame, v) for v in variables]
        waiting = list(starts)
        while waiting:
            frame, variable = waiting.pop()
            key = (frame.path, frame.steps, variable)
            if key in seen:
                continue
            seen.add(key)
            origin, before = self._step_back(frame, variable)
            waiting += before
            if origin is not None and (first is None or origin.order < first.order):
                first = origin
        if first is None and not any(self._kind(*start) == "nan" for start in starts):
            return None
        return self._passed_in(first) if first is None or first.number < 0 else self._described(first)

    def _passed_in(self, origin: _Origin | None) -> NanOrigin:
        """Describes a NaN in an argument, or without an origin in a constant."""
        constants = [v for v in self._whole.jaxpr.constvars if self._kind(self._whole, v) == "nan"]
        if origin is not None:
            name, variable = self._names[origin.result], self._whole.jaxpr.invars[origin.result]
        else:
            name, variable = "a constant of the program", next(iter(constants), None)
        value = NonFiniteValue("nan", (), ()) if variable is None else self._recorded(self._whole, variable)
        return NanOrigin(None, None, name, *value.as_fields("argument"), "", ())

    def _recorded(self, frame: Frame, variable: Any) -> NonFiniteValue:
        return self._interpreter.non_finite[frame.path, frame.steps, variable]

    def _kind(self, frame: Frame, atom: Any) -> str | None:
        """Returns "nan", "inf" or "-inf" for a value that is not finite."""
        if not is_variable(atom):
            value = first_non_finite(atom.val)
        else:
            value = self._interpreter.non_finite.get((frame.path, frame.steps, atom))
        return None if value is None else value.kind

    def _is_bad(self, frame: Frame, atom: Any) -> bool:
        return is_variable(atom) and self._kind(frame, atom) is not None

    def _producers_in(self, frame: Frame) -> dict[Any, tuple[int, int]]:
        """Returns, for each variable of a jaxpr, the index of the eqn that computes it and of its result."""
        if id(frame.jaxpr) not in self._producers:
            self._producers[id(frame.jaxpr)] = {
                v: (n, i) for n, eqn in enumerate(frame.jaxpr.eqns) for i, v in enumerate(eqn.outvars)
            }
        return self._producers[id(frame.jaxpr)]

    def _step_back(self, frame: Frame, variable: Any) -> tuple[_Origin | None, list[tuple[Frame, Any]]]:
        """Returns the origin of a non-finite variable, if that is here, and the variables from which to go on."""
        producer = self._producers_in(frame).get(variable)
        if producer is None:
            return self._step_out(frame, variable)
        number, result = producer
        inner = [(f, v) for f, v in self._inside(frame, number, result) if self._is_bad(f, v)]
        if inner:
            return None, inner
        operands = frame.jaxpr.eqns[number].invars
        selected = self._interpreter.selected.get((frame.path, frame.steps, variable))
        if selected is not None:
            operands = [operands[selected]]
        kinds = {self._kind(frame, atom) for atom in operands} - {None}
        is_nan = self._kind(frame, variable) == "nan"
        is_origin = not kinds or (is_nan and "nan" not in kinds)
        origin = _Origin((*frame.order, number), frame, number, result) if is_origin else None
        followed = {"nan"} if is_nan and "nan" in kinds else kinds
        return origin, [(frame, x) for x in operands if is_variable(x) and self._kind(frame, x) in followed]

    def _step_out(self, frame: Frame, variable: Any) -> tuple[_Origin | None, list[tuple[Frame, Any]]]:
        """Steps from an input of a jaxpr to the operand of its eqn, or to the previous step; see `_step_back`."""
        index = next((i for i, v in enumerate(frame.jaxpr.invars) if v is variable), None)
        if index is None:
            return None, []
        if frame.outer is None:
            return (_Origin((-1, index), frame, -1, index) if self._kind(frame, variable) == "nan" else None), []
        outer, number, sub = frame.outer
        eqn = outer.jaxpr.eqns[number]
        for result, argument in sub.carried:
            if argument == index and frame.step > 0:
                before = frame._replace(steps=(*outer.steps, frame.step - 1))
                return None, [(before, frame.jaxpr.outvars[result])]
        atom = eqn.invars[sub.operands[index]]
        return None, [(outer, atom)] if self._is_bad(outer, atom) else []

    def _inside(self, frame: Frame, number: int, result: int) -> Iterator[tuple[Frame, Any]]:
        """Yields the variables, in the sub-jaxprs that an eqn runs, that become one of its results."""
        for inner in self._interpreter.frames_inside(frame, number):
            sub = inner.outer[2]  # type: ignore[index]
            for index, becomes in enumerate(sub.results):
                is_carry = any(index == carried for carried, _ in sub.carried)
                if becomes == result and (not is_carry or inner.is_last):
                    yield inner, inner.jaxpr.outvars[index]

    def _bad_labels(self) -> Iterator[tuple[Frame, int, int]]:
        """Returns the labelled values that are not finite, in program order, as frame, eqn index and output index."""
        found = sorted(self._labels(self._whole), key=lambda label: (*label[0].order, label[1]))
        return (label for label in found if self._is_bad(label[0], label[0].jaxpr.eqns[label[1]].outvars[label[2]]))

    def _labels(self, frame: Frame) -> Iterator[tuple[Frame, int, int]]:
        for number, eqn in enumerate(frame.jaxpr.eqns):
            if eqn.primitive is label_p:
                yield from ((frame, number, i) for i in range(eqn.params["num_arrays"]))
            for inner in self._interpreter.frames_inside(frame, number):
                yield from self._labels(inner)

    def _described(self, origin: _Origin) -> NanOrigin:
        frame, eqn = origin.frame, origin.frame.jaxpr.eqns[origin.number]
        value = self._recorded(frame, eqn.outvars[origin.result])
        eqns, enclosing = [eqn], []
        outer = frame
        while outer.outer is not None:
            around, number, sub = outer.outer
            eqns.insert(0, around.jaxpr.eqns[number])
            enclosing[:0] = _around(outer, sub)
            outer = around
        names = [str(e.source_info.name_stack) for e in eqns]
        lines = filter(None, map(eqn_source_line, reversed(eqns)))  # JAX's own code has no line
        methods = re.findall(r"([^/()]+)\.(forward|backward|jvp|vmap)\b", "/".join(names))
        known = self._functions()  # other names come from jax.named_scope
        function, method = next((m for m in reversed(methods) if m[0] in known), (None, None))
        return NanOrigin(
            function,
            method,
            self._array_of(origin, function, method),
            *value.as_fields(eqn.primitive.name),
            named_line("/".join(names)) or next(lines, ""),
            tuple(enclosing),
        )

    def _functions(self) -> set[str]:
        """The names of the Functions in the program."""
        marks = (frame.jaxpr.eqns[number] for frame, number, _ in self._labels(self._whole))
        return {label.function for mark in marks for label in mark.params["labels"] if label is not None}

    def _array_of(self, origin: _Origin, function: str | None, method: str | None) -> str:
        """Returns the name of the method's first value that is not finite, after the origin."""
        for frame, number, index in self._bad_labels():
            label = frame.jaxpr.eqns[number].params["labels"][index]
            is_after = (*frame.order, number) > origin.order
            if (
                label is not None
                and is_after
                and label.function == function
                and label.method == method
                and label.role in _ROLES
            ):
                return _ROLES[label.role].format(name=label.name)
        return ""


# Descriptions of the results of a method, by the role of their labels.
_ROLES = {
    "output": "output {name}",
    "saved": "saved {name}",
    "gradient": "gradient of {name}",
    "tangent": "tangent of output {name}",
}


def _around(frame: Frame, sub: SubJaxpr) -> list[str]:
    if sub.kind == "scan":
        length: Any = sub.length
        return [f"scan: step {length - 1 - frame.step if sub.is_reversed else frame.step} of {length}"]
    if sub.kind == "while":
        return [f"while: step {frame.step}"]
    if sub.kind == "cond":
        return [f"cond: branch {frame.path[-1]}"]
    return [sub.kind] if sub.kind == "checkpoint" else []
