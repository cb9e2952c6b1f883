"""Tools for jaxprs: what an eqn runs, evaluation, dependence, identities.

# Note: the functions

    subjaxprs           the jaxprs that an eqn runs, and how their variables are bound to the eqn's
    all_eqns            every eqn of a jaxpr and of the jaxprs in it
    eval_jaxpr_with     the outputs, with a function that evaluates each eqn
    needed_eqns         the eqns and the variables that outputs depend on
    same_program        whether two jaxprs compute the same
    unchanged_operand   the operand that an eqn returns unchanged; ArrayIdentity: which arrays are one by such eqns

Tables hold a primitive by its identity, or by its name where no public module of JAX has it (0.10.0 to 0.12.0).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.ref import AbstractRef

from jaxfn._compat import (
    Primitive,
    call_p,
    closed_call_p,
    custom_jvp_call_p,
    custom_vjp_call_p,
    inner_jaxpr,
    jit_p,
    lower_jaxpr,
    name_p,
    remat_p,
    scan_sizes,
)
from jaxfn._traces import producer, variable, without_vmaps

_V = TypeVar("_V")


def is_variable(atom: Any) -> bool:
    """Whether an operand or an output in a jaxpr is a variable, and not a literal."""
    return not hasattr(atom, "val")


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a jaxpr without its consts, and the consts. In 0.12.0 closed jaxprs are jaxprs too."""
    return getattr(jaxpr, "jaxpr", jaxpr), list(getattr(jaxpr, "consts", ()))


def primitives(names: str) -> frozenset[Primitive | str]:
    """Returns primitives by name: `jax.lax.add_p` for "add", and the name itself where `jax.lax` has no such one."""
    return frozenset(getattr(jax.lax, f"{name}_p", name) for name in names.split())


def is_any_of(eqn: Any, primitives: Collection[Primitive | str]) -> bool:
    """Whether the primitive of an eqn, or its name, is among `primitives`."""
    return eqn.primitive in primitives or eqn.primitive.name in primitives


def lookup(table: Mapping[Primitive | str, _V], eqn: Any) -> _V | None:
    """Returns the entry of a table for the primitive of an eqn, or for its name; `None` if there is none."""
    return table.get(eqn.primitive, table.get(eqn.primitive.name))


def flat_params(eqn: Any) -> list[Any]:
    """Returns the params of an eqn, with the items of tuples and lists one by one."""
    values = eqn.params.values()
    return [item for value in values for item in (value if isinstance(value, (tuple, list)) else (value,))]


def jaxprs_in_params(eqn: Any) -> list[Any]:
    """Returns the jaxprs among the params of an eqn, open and closed ones."""
    return [item for item in flat_params(eqn) if hasattr(item, "eqns")]


def all_eqns(jaxpr: Any) -> Iterator[Any]:
    """Yields the eqns of a jaxpr, each followed by those of the jaxprs among its params."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn):
            yield from all_eqns(inner)


class SubJaxpr(NamedTuple):
    """A jaxpr that an eqn runs.

    Attributes:
      jaxpr, consts: the jaxpr, and its consts.
      operands: for each of its inputs, the index of the eqn's operand that it is, or is a part of.
      results: for each of its outputs, the index of the eqn's result that it becomes, or becomes a part of; `None` for
        an output that stays inside (the condition of a loop).
      kind: "jit", "scan", "while", "cond", "checkpoint", "shard_map", or "call".
      num_consts: in a loop, how many inputs come before the carry.
      carried: in a loop, pairs of the index of an output and of the input that it is in the next step.
      length: the number of steps: 1 except in loops, `None` where it is not known.
      is_reversed: whether a scan starts at the end of its arrays.
    """

    jaxpr: Any
    consts: Sequence[Any]
    operands: Sequence[int]
    results: Sequence[int | None]
    kind: str
    num_consts: int = 0
    carried: Sequence[tuple[int, int]] = ()
    length: int | None = 1
    is_reversed: bool = False


def subjaxprs(eqn: Any) -> list[SubJaxpr]:
    """Returns the jaxprs that an eqn runs, in order; none for an operation."""
    rule = lookup(subjaxpr_rules, eqn)
    return [] if rule is None else rule(eqn)


def _subjaxpr(jaxpr: Any, eqn: Any, kind: str, operands: Sequence[int]) -> SubJaxpr:
    return SubJaxpr(*open_jaxpr(jaxpr), operands, range(len(eqn.outvars)), kind)


def _call(eqn: Any, kind: str, param: str) -> list[SubJaxpr]:
    jaxpr = eqn.params.get(param)
    return [] if jaxpr is None else [_subjaxpr(jaxpr, eqn, kind, range(len(eqn.invars)))]


def _scan(eqn: Any) -> list[SubJaxpr]:
    params, (num_consts, num_carry) = eqn.params, scan_sizes(eqn)
    (body,) = _call(eqn, "scan", "jaxpr")
    carried = [(i, num_consts + i) for i in range(num_carry)]
    length, is_reversed = params["length"], params["reverse"]
    return [body._replace(num_consts=num_consts, carried=carried, length=length, is_reversed=is_reversed)]


def _while(eqn: Any) -> list[SubJaxpr]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = range(num_cond + num_body, len(eqn.invars))
    cond = _subjaxpr(eqn.params["cond_jaxpr"], eqn, "while", [*range(num_cond), *carry])
    body = _subjaxpr(eqn.params["body_jaxpr"], eqn, "while", range(num_cond, len(eqn.invars)))
    carried = [(i, num_body + i) for i in range(len(carry))]
    return [
        cond._replace(results=[None], num_consts=num_cond, length=None),
        body._replace(num_consts=num_body, carried=carried, length=None),
    ]


def _cond(eqn: Any) -> list[SubJaxpr]:
    return [_subjaxpr(branch, eqn, "cond", range(1, len(eqn.invars))) for branch in eqn.params["branches"]]


# By the object that an eqn's params hold: a solver, or a linear map.
_traced: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def _linear_solve(eqn: Any) -> list[SubJaxpr]:
    """Returns the solver's jaxpr; the eqn's other jaxprs are only used for derivatives."""
    solver, lengths = eqn.params["jaxprs"].solve, eqn.params["const_lengths"]
    lowered = _traced.get(solver) or lower_jaxpr(solver)
    if lowered is not solver:  # JAX's experimental implementations do not lower it together with the outer jaxpr
        _traced[solver] = lowered
    first = lengths.matvec + lengths.vecmat
    right_sides = range(sum(lengths), len(eqn.invars))
    return [_subjaxpr(lowered, eqn, "call", [*range(first, first + lengths.solve), *right_sides])]


def traced_impl(eqn: Any, param: str) -> list[SubJaxpr]:
    """Returns the jaxpr of a primitive's impl, traced once for each object that is the value of `param`."""
    key = eqn.params[param]
    if key not in _traced:
        types = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
        try:
            _traced[key] = jax.make_jaxpr(partial(eqn.primitive.impl, **eqn.params))(*types)
        except NameError:  # an axis of a mesh, or of a vmap, that is not bound here
            return []
    return [_subjaxpr(_traced[key], eqn, "call", range(len(eqn.invars)))]


# jaxfn's primitives add their own rules where they are defined.
subjaxpr_rules: dict[Primitive | str, Callable[[Any], list[SubJaxpr]]] = {
    jax.lax.scan_p: _scan,
    jax.lax.while_p: _while,
    jax.lax.cond_p: _cond,
    jax.lax.linear_solve_p: _linear_solve,
    jit_p: partial(_call, kind="jit", param="jaxpr"),
    remat_p: partial(_call, kind="checkpoint", param="jaxpr"),
    **dict.fromkeys(
        (custom_jvp_call_p, custom_vjp_call_p, call_p, closed_call_p), partial(_call, kind="call", param="call_jaxpr")
    ),
    "shard_map": partial(_call, kind="shard_map", param="jaxpr"),
    "custom_vmap_call": partial(_call, kind="call", param="call"),
    "composite": partial(_call, kind="call", param="jaxpr"),
    "call_hi_primitive": lambda eqn: [_subjaxpr(inner_jaxpr(eqn), eqn, "call", range(len(eqn.invars)))],
}


def eval_jaxpr_with(
    eval_eqn: Callable[[int, Any, list[Any]], Sequence[Any]],
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    read_literal: Callable[[Any], Any] = attrgetter("val"),
) -> list[Any]:
    """Returns the outputs of a jaxpr, for values of any kind: arrays, or abstract ones.

    Args:
      eval_eqn: returns the results of an eqn, from its index, the eqn and its operands.
      jaxpr, consts, args: the jaxpr, its consts and its arguments.
      read_literal: returns the value of a literal.
    """
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return env[atom] if is_variable(atom) else read_literal(atom)

    for index, eqn in enumerate(jaxpr.eqns):
        results = eval_eqn(index, eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def needed_eqns(jaxpr: Any, outputs: Sequence[Any]) -> tuple[list[Any], set[Any]]:
    """Returns the eqns that some outputs of a jaxpr depend on, in order, and all variables that they depend on.

    JAX's own dead code elimination also retains every eqn with an effect.
    """
    needed = set(filter(is_variable, outputs))
    eqns: list[Any] = []
    for eqn in reversed(jaxpr.eqns):
        if not needed.isdisjoint(eqn.outvars) or any(
            is_variable(v) and v in needed and isinstance(v.aval, AbstractRef) for v in eqn.invars
        ):
            eqns.append(eqn)
            needed |= {v for v in (eqn.invars[i] for i in _needed_operands(eqn)) if is_variable(v)}
    return eqns[::-1], needed


def _needed_operands(eqn: Any, results: Collection[int] | None = None) -> Sequence[int]:
    """Returns which operands some results of an eqn depend on, by default all. A rule may have others for itself."""
    inner = subjaxprs(eqn)
    if eqn.effects or len(inner) != 1 or inner[0].carried:
        return range(len(eqn.invars))
    outvars = [v for i, v in enumerate(inner[0].jaxpr.outvars) if results is None or i in results]
    _, needed = needed_eqns(inner[0].jaxpr, outvars)
    return [i for v, i in zip(inner[0].jaxpr.invars, inner[0].operands, strict=True) if v in needed]


# Primitives whose results are their operands, one by one. Those of jaxfn are added where they are defined.
identity_primitives: set[Primitive | str] = {jax.lax.stop_gradient_p, name_p}
# Calls that return an operand unchanged if the called function does. JAX's experimental implementations of checkpoint,
# checkpoint_name and custom_vjp stage "call_hi_primitive", which lowers to one of the two before it.
_TRANSPARENT_CALLS = {remat_p, custom_jvp_call_p, custom_vjp_call_p, call_p, closed_call_p, "call_hi_primitive"}


def unchanged_operand(eqn: Any, result: int) -> int | None:
    """Returns the index of the operand that an eqn returns unchanged as one of its results; `None` if there is none.

    Such an eqn is that of a function which returns a concrete array itself. `jax.jit` and
    `jax.lax.optimization_barrier` return new arrays, so theirs do not count.
    """
    if is_any_of(eqn, identity_primitives):
        return result
    if eqn.primitive is jax.lax.device_put_p:
        is_moved = eqn.params["devices"][result] is not None
        return None if is_moved or eqn.params["copy_semantics"][result].name != "REUSE_INPUT" else result
    if not is_any_of(eqn, _TRANSPARENT_CALLS):
        return None
    jaxpr = subjaxprs(eqn)[0].jaxpr
    producers = {v: (inner_eqn, i) for inner_eqn in jaxpr.eqns for i, v in enumerate(inner_eqn.outvars)}
    atom = jaxpr.outvars[result]
    while is_variable(atom) and atom in producers:
        inner_eqn, i = producers[atom]
        operand = unchanged_operand(inner_eqn, i)
        if operand is None:
            return None
        atom = inner_eqn.invars[operand]
    return next((i for i, v in enumerate(jaxpr.invars) if v is atom), None)


# The params of these primitives hold AD and batching rules, which do not matter once a jaxpr is differentiated.
HAVE_RULES = frozenset({custom_vjp_call_p, custom_jvp_call_p})


def same_program(a: Any, b: Any, compares_params: bool = True) -> bool:
    """Whether two jaxprs, params or constants, or tuples of these, are surely equal in what they compute.

    Without `compares_params`, params that are not jaxprs do not count, as each trace may create other callbacks.
    """
    if a is b or isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    if hasattr(a, "eqns") and hasattr(b, "eqns"):
        (first, consts), (second, others) = open_jaxpr(a), open_jaxpr(b)
        return same_program(consts, others, compares_params) and _same_eqns(first, second, compares_params)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        a, b = ([*params.items()] for params in (a, b))
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(partial(same_program, compares_params=compares_params), a, b))
    if isinstance(a, (int, float, complex)):  # also JAX's, with a dtype
        return repr(a) == repr(b)  # 0.0 and -0.0 differ
    if not hasattr(a, "dtype"):
        return bool(a == b)
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if jnp.issubdtype(a.dtype, jax.dtypes.extended):
        with jax.ensure_compile_time_eval():
            a, b = jax.random.key_data(a), jax.random.key_data(b)
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()  # jax.numpy would compile a program


def _same_eqns(first: Any, second: Any, compares_params: bool) -> bool:
    """Whether two jaxprs have equal operations on corresponding variables."""
    counterparts: dict[Any, Any] = {}

    def bind(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
        counterparts.update(zip(ours, theirs, strict=False))
        return [v.aval for v in ours] == [v.aval for v in theirs]

    def same_atom(a: Any, b: Any) -> bool:
        if is_variable(a):
            return counterparts[a] is b
        return not is_variable(b) and a.aval == b.aval and same_program(a.val, b.val)

    def same_eqn(a: Any, b: Any) -> bool:
        if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
            return False
        has_rules = a.primitive in HAVE_RULES or not compares_params
        ours, theirs = (jaxprs_in_params(e) if has_rules else e.params for e in (a, b))
        is_same = all(map(same_atom, a.invars, b.invars)) and bind(a.outvars, b.outvars)
        return is_same and same_program(ours, theirs, compares_params)

    return (
        bind([*first.constvars, *first.invars], [*second.constvars, *second.invars])
        and len(first.eqns) == len(second.eqns)
        and all(map(same_eqn, first.eqns, second.eqns))
        and len(first.outvars) == len(second.outvars)
        and all(map(same_atom, first.outvars, second.outvars))
    )


class ArrayIdentity:
    """The identity of arrays as objects, or as values of the jaxpr being traced up to eqns that change nothing.

    A function such as `jax.lax.stop_gradient` returns a concrete array itself, but for a staged one it returns another
    tracer, which counts as identical to its operand.

    Args:
      inputs: Arrays that are not followed back to the eqns that produced them.
    """

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = {variable(without_vmaps(x)[0]) for x in inputs}

    def key(self, array: Any) -> Hashable:
        """Returns a key that is equal for identical arrays."""
        array, axes = without_vmaps(array)
        while (found := variable(array)) is not None and found not in self._inputs:
            made = producer(array)
            operand = None if made is None else unchanged_operand(*made)
            if made is None or operand is None:
                break
            array = made[0].invars[operand]
        return id(array) if found is None else found, frozenset(axes.items())


def checkpoint_name_of(array: Any) -> str | None:
    """Returns the name that `jax.ad_checkpoint.checkpoint_name` gave to an array of the jaxpr being traced."""
    made = producer(without_vmaps(array)[0])
    return made[0].params["name"] if made is not None and made[0].primitive is name_p else None


def shares_batch(result: Any, inputs: Sequence[Any]) -> bool:
    """Whether under every `jax.vmap`, now and later, an array surely has the batch if an input has it."""
    result, axes = without_vmaps(result)
    inner, all_axes = zip(*map(without_vmaps, inputs), strict=True)
    if any(own.keys() - axes.keys() for own in all_axes):
        return False
    if not any(isinstance(x, Tracer) for x in (result, *inner)):
        return True
    sources = set(map(variable, inner))
    return None not in sources and _depends_on_all(result, sources)


def _depends_on_all(result: Any, sources: Collection[Any]) -> bool:
    missing, seen, pending = set(sources), set[Any](), [result]
    while pending and missing:
        array = pending.pop()
        own = variable(array)
        if own is None or own in seen:
            continue
        seen.add(own)
        missing.discard(own)
        made = producer(array)
        if made is not None:
            eqn, index = made
            if eqn.effects:  # the sum over a vmapped axis has no batch
                return False
            pending += [eqn.invars[i] for i in _needed_operands(eqn, [index])]
    return not missing
