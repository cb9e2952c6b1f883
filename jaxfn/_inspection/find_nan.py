"""`find_nan`: the first place where a NaN or an infinity appears.

# Note: from a NaN back to where it began

The program is run once, one operation after the other, and what is not finite is noted (see `EqnInterpreter`). Then,
from a result that is not finite, one goes back through what is not finite:

    def loss(x):              a = log(x)         -inf, of a finite x: here it began
                              b = a * 0          nan, of an a that is -inf: go on to a
                              return b.sum()     nan, of a b that is nan: go on to b

and of all beginnings that are found so, the first in the order of the program is told. An infinity that is written in
the program (as a mask) is no beginning, but a NaN that it leads to is. An infinity that nothing comes of, as in
`where(x == 0, 0, 1 / x)`, is not told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxfn._compat import AbstractRef, eqn_source_line, lower_jaxpr
from jaxfn._inspection.harvest import Path
from jaxfn._inspection.interpreter import EqnInterpreter, Frame, NonFiniteValue, first_non_finite
from jaxfn._jaxpr import SubJaxpr, any_eqn, is_variable, open_jaxpr
from jaxfn._observe import OBSERVATION, Observation, label_p, named_line
from jaxfn._tree import TreeSpec, flatten, is_traced, leaves_with_path


@dataclass(frozen=True)
class NanOrigin:
    """The origin of a NaN or an infinity.

    Attributes:
      function: the Function in which it does, or `None` for code outside of Functions.
      method: which of its methods: "forward", "backward", "jvp" or "vmap".
      value: what of that first has it: "output 0", "saved y", "gradient of x"; "" where it has reached none of these.
      number: "nan", "inf" or "-inf".
      operation: what made it, as JAX calls that; "argument" where it was passed in.
      shape, index: of the operation's result, and of its first number of the kind.
      line: the line of code, "file:line (function)"; "" where only JAX's own code is on the way.
      inside: what it lies in, from outside: "scan: step 3 of 10", "while: step 3", "cond: branch 1", "checkpoint".
        Steps are counted from 0, as in the stacked arrays.
    """

    function: str | None
    method: str | None
    value: str
    number: str
    operation: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    line: str
    inside: tuple[str, ...]

    def __str__(self) -> str:
        where = f"{self.function}.{self.method}" if self.function else "code outside of any Function"
        reached = f" ({self.value})" if self.value else ""
        if self.operation == "argument":
            return f"{self.number} is in {self.value}, at index {self.index} of shape {self.shape}"
        if self.operation == "shard_map":
            where = f"a shard_map that is called in {where}"
        lines = [
            f"{self.number} begins in {where}{reached}",
            f"  {self.operation} gave it first, at index {self.index} of shape {self.shape}",
        ]
        lines += [f"  {self.line}"] * bool(self.line)
        lines += [f"  in {around}" for around in self.inside]
        lines += [_SHARD_MAP_HINT] * (self.operation == "shard_map")
        return "\n".join(lines)


_SHARD_MAP_HINT = (
    "  find_nan does not search inside shard_map: "
    "call it on the function that shard_map maps, with the arguments of one device"
)


def find_nan(f: Callable[..., Any], *args: Any, **kwargs: Any) -> NanOrigin | None:
    """Finds, and prints, where a NaN or an infinity begins: in which Function, which of its methods, which line.

    The function is traced, with everything that it calls, and run once; nothing is left in other programs. What leads
    to no NaN and no infinity in a result, or in what passes between JAX and a Function, is not told. A `shard_map`
    counts as one operation: there is no search inside it.

    Args:
      f: a function of arrays, jitted or not; `jax.value_and_grad(loss)`, to look into backward passes too.
      *args, **kwargs: its arguments.

    Returns:
      What was found, or `None`.

    Raises:
      TypeError: the arguments are traced.
      NotImplementedError: the function uses a `jax.Ref`.

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
      >>> found = jaxfn.find_nan(jax.grad(lambda x: root(x).sum()), jnp.array([4.0, 0.0]))  # doctest: +ELLIPSIS
      inf begins in root.backward (gradient of x)
        div gave it first, at index (1,) of shape (2,)
      ...
      >>> print(found.function, found.method, found.value)
      root backward gradient of x

    Torch counterpart: `torch.autograd.set_detect_anomaly`.
    """
    arrays, tree = flatten((args, kwargs))
    if any(map(is_traced, arrays)):
        raise TypeError("find_nan runs the function, so it cannot be called where JAX traces the arguments (jit).")

    def flat(*arrays: Any) -> list[Any]:
        args, kwargs = tree.unflatten(iter(arrays))
        return jax.tree_util.tree_leaves(f(*args, **kwargs))

    with OBSERVATION(Observation.VALUES):
        jaxpr, consts = open_jaxpr(lower_jaxpr(jax.make_jaxpr(flat)(*arrays)))
        if any_eqn(jaxpr, _touches_ref):
            raise NotImplementedError("find_nan cannot follow what is written to a jax.Ref. Return the value instead.")
        interpreter = EqnInterpreter(jaxpr, consts, arrays)
    found = _Search(jaxpr, interpreter, _argument_names(tree, len(arrays))).found()
    if found is not None:
        print(found)
    return found


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
    """The way back from what is not finite in a run of a program, whose arguments have these names."""

    def __init__(self, jaxpr: Any, interpreter: EqnInterpreter, names: Sequence[str]) -> None:
        self._whole = Frame(jaxpr, (), (), None)
        self._interpreter = interpreter
        self._names = names
        self._producers: dict[int, dict[Any, tuple[int, int]]] = {}

    def found(self) -> NanOrigin | None:
        """The first beginning of those that lead to results, or else to values that a Function gives or is given."""
        jaxpr = self._whole.jaxpr
        bad = [v for v in jaxpr.outvars if self._is_bad(self._whole, v)]
        if bad:
            return self._origin_of(self._whole, bad)
        for frame, number, place in self._bad_marks():
            told = self._origin_of(frame, [frame.jaxpr.eqns[number].outvars[place]])
            if told.operation != "argument" or told.number == "nan":  # an infinity begins nowhere, as that of a mask
                return told
        return None

    def _origin_of(self, frame: Frame, variables: Sequence[Any]) -> NanOrigin:
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
        if first is None:  # an infinity that was passed in, or something that is written in the program
            return self._argument_origin(is_nan=any(self._number(*start) == "nan" for start in starts))
        return self._argument_origin(first.result) if first.number < 0 else self._described(first)

    def _argument_origin(self, place: int | None = None, is_nan: bool = False) -> NanOrigin:
        invars = self._whole.jaxpr.invars
        bad = [i for i, v in enumerate(invars) if self._is_bad(self._whole, v)]
        if place is None and (is_nan or not bad):
            number = "nan" if is_nan else "inf"
            return NanOrigin(None, None, "a constant of the program", number, "argument", (), (), "", ())
        place = bad[0] if place is None else place
        noted = self._noted(self._whole, invars[place])
        return NanOrigin(None, None, self._names[place], *noted.as_fields("argument"), "", ())

    def _noted(self, frame: Frame, variable: Any) -> NonFiniteValue:
        return self._interpreter.noted[frame.path, frame.steps, variable]

    def _number(self, frame: Frame, atom: Any) -> str | None:
        """Returns "nan" or the infinity that a value has; `None` if it is finite."""
        if not is_variable(atom):
            noted = first_non_finite(atom.val)
        else:
            noted = self._interpreter.noted.get((frame.path, frame.steps, atom))
        return None if noted is None else noted.number

    def _is_bad(self, frame: Frame, atom: Any) -> bool:
        return is_variable(atom) and self._number(frame, atom) is not None

    def _producers_in(self, frame: Frame) -> dict[Any, tuple[int, int]]:
        """Returns, for each variable of a jaxpr, the index of the eqn that computes it and of its result."""
        if id(frame.jaxpr) not in self._producers:
            self._producers[id(frame.jaxpr)] = {
                v: (n, i) for n, eqn in enumerate(frame.jaxpr.eqns) for i, v in enumerate(eqn.outvars)
            }
        return self._producers[id(frame.jaxpr)]

    def _step_back(self, frame: Frame, variable: Any) -> tuple[_Origin | None, list[tuple[Frame, Any]]]:
        """Whether what is not finite in a variable begins there, and in which other variables it was before."""
        made = self._producers_in(frame).get(variable)
        if made is None:
            return self._step_out(frame, variable)
        number, result = made
        inner = [(f, v) for f, v in self._inside(frame, number, result) if self._is_bad(f, v)]
        if inner:
            return None, inner
        operands = frame.jaxpr.eqns[number].invars
        selected = self._interpreter.selected.get((frame.path, frame.steps, variable))
        if selected is not None:
            operands = [operands[selected]]
        numbers = {self._number(frame, atom) for atom in operands} - {None}
        is_nan = self._number(frame, variable) == "nan"
        begins = not numbers or (is_nan and "nan" not in numbers)
        origin = _Origin((*frame.order, number), frame, number, result) if begins else None
        wanted = {"nan"} if is_nan and "nan" in numbers else numbers  # a nan comes of a nan, if there is one
        return origin, [(frame, x) for x in operands if is_variable(x) and self._number(frame, x) in wanted]

    def _step_out(self, frame: Frame, variable: Any) -> tuple[_Origin | None, list[tuple[Frame, Any]]]:
        """Steps from an input of a jaxpr to what it is outside, or in the step before; see `_step_back`."""
        place = next((i for i, v in enumerate(frame.jaxpr.invars) if v is variable), None)
        if place is None:
            return None, []
        if frame.outer is None:
            return (_Origin((-1, place), frame, -1, place) if self._number(frame, variable) == "nan" else None), []
        outer, number, sub = frame.outer
        eqn = outer.jaxpr.eqns[number]
        for result, argument in sub.carried:
            if argument == place and frame.step > 0:
                before = frame._replace(steps=(*outer.steps, frame.step - 1))
                return None, [(before, frame.jaxpr.outvars[result])]
        atom = eqn.invars[sub.operands[place]]
        return None, [(outer, atom)] if self._is_bad(outer, atom) else []

    def _inside(self, frame: Frame, number: int, result: int) -> Iterator[tuple[Frame, Any]]:
        """Yields the variables, in the sub-jaxprs that an eqn runs, that become one of its results."""
        for inner in self._interpreter.frames_inside(frame, number):
            sub = inner.outer[2]  # type: ignore[index]
            for place, becomes in enumerate(sub.results):
                is_carry = any(place == carried for carried, _ in sub.carried)
                if becomes == result and (not is_carry or inner.is_last):
                    yield inner, inner.jaxpr.outvars[place]

    def _bad_marks(self) -> Iterator[tuple[Frame, int, int]]:
        """The marked values that are not finite, in the order of the program: frame, number and place."""
        found = sorted(self._marks(self._whole), key=lambda mark: (*mark[0].order, mark[1]))
        return (mark for mark in found if self._is_bad(mark[0], mark[0].jaxpr.eqns[mark[1]].outvars[mark[2]]))

    def _marks(self, frame: Frame) -> Iterator[tuple[Frame, int, int]]:
        for number, eqn in enumerate(frame.jaxpr.eqns):
            if eqn.primitive is label_p:
                yield from ((frame, number, i) for i in range(eqn.params["num_arrays"]))
            for inner in self._interpreter.frames_inside(frame, number):
                yield from self._marks(inner)

    def _described(self, origin: _Origin) -> NanOrigin:
        frame, eqn = origin.frame, origin.frame.jaxpr.eqns[origin.number]
        noted = self._noted(frame, eqn.outvars[origin.result])
        eqns, inside = [eqn], []
        outer = frame
        while outer.outer is not None:
            around, place, sub = outer.outer
            eqns.insert(0, around.jaxpr.eqns[place])
            inside[:0] = _around(outer, sub)
            outer = around
        names = [str(e.source_info.name_stack) for e in eqns]
        lines = filter(None, map(eqn_source_line, reversed(eqns)))  # JAX's own code, as that of a solver, has none
        methods = re.findall(r"([^/()]+)\.(forward|backward|jvp|vmap)\b", "/".join(names))
        known = self._functions()  # others are names that somebody gave by jax.named_scope
        function, method = next((m for m in reversed(methods) if m[0] in known), (None, None))
        return NanOrigin(
            function,
            method,
            self._value_of(origin, function, method),
            *noted.as_fields(eqn.primitive.name),
            named_line("/".join(names)) or next(lines, ""),
            tuple(inside),
        )

    def _functions(self) -> set[str]:
        """The names of the Functions in the program."""
        marks = (frame.jaxpr.eqns[number] for frame, number, _ in self._marks(self._whole))
        return {label.function for mark in marks for label in mark.params["labels"] if label is not None}

    def _value_of(self, origin: _Origin, function: str | None, method: str | None) -> str:
        """Returns the name of the method's first value that is not finite, after the origin."""
        for frame, number, place in self._bad_marks():
            label = frame.jaxpr.eqns[number].params["labels"][place]
            is_after = (*frame.order, number) > origin.order
            if (
                label is not None
                and is_after
                and label.function == function
                and label.method == method
                and label.role in _MADE
            ):
                return _MADE[label.role].format(name=label.name)
        return ""


# What a method makes, as it is told.
_MADE = {
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
