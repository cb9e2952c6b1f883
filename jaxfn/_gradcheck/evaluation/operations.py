"""Evaluation of small staged functions, operation by operation.

XLA takes 30 to 100 ms to compile the program of a check, but a compiled operation runs in microseconds. So operations
that several checks have in common are compiled one by one, and each is used by all later checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from jaxfn._compat import compile_quickly, custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p
from jaxfn._gradcheck.problem.staging import LAX_PRIMITIVES, JaxprFunction, computed_bytes
from jaxfn._jaxpr import flat_params, identity_primitives, is_any_of, is_variable, subjaxpr_rules, subjaxprs

_MAX_CACHED = 4096
_MAX_BYTES = 4 << 20  # A larger function runs faster as one program.
_MIN_BATCH = 32  # Batches are padded to this size, or a larger power of two, so that they share operations.
# An operation is compiled for the third program that needs it, or if a program needs only so many new ones.
_NUM_PROGRAMS = 3
_FEW_OPERATIONS = 2

# Calls of a jaxpr, whose rules no longer matter.
_CALLS = frozenset({jit_p, remat_p, custom_jvp_call_p, custom_vjp_call_p})
_OPERATIONS = LAX_PRIMITIVES - subjaxpr_rules.keys() - {jax.lax.device_put_p, jax.lax.sharding_constraint_p}


class UnsuitableError(Exception):
    """Functions that cannot be evaluated operation by operation, or for which that takes longer than one program."""


def by_operations(functions: Any, batch_size: int) -> Any:
    """Returns functions that evaluate staged functions operation by operation.

    Each of their arguments, and each of their results, either has a batch at axis 0 or not.

    Args:
      functions: a pytree of `JaxprFunction`s.
      batch_size: the largest size of a batch.

    Raises:
      UnsuitableError: they contain other primitives than JAX's operations, or are large, or have many new operations.
    """
    size = max(_MIN_BATCH, 1 << (batch_size - 1).bit_length())
    staged: list[JaxprFunction] = jax.tree.leaves(functions, is_leaf=_is_staged)
    if any(not _is_staged(f) or _bytes(f) * size > _MAX_BYTES for f in staged):
        raise UnsuitableError
    every = [_OperationSequence(f, size) for f in staged]
    missing = {operation for s in every for operation in s.operations if operation.executable is None}
    program = hash(tuple(s.key for s in every))
    for operation in missing:
        operation.programs.add(program)
    if sum(len(operation.programs) < _NUM_PROGRAMS for operation in missing) > _FEW_OPERATIONS:
        raise UnsuitableError
    return jax.tree.unflatten(jax.tree.structure(functions, is_leaf=_is_staged), every)


def _is_staged(value: object) -> bool:
    return isinstance(value, JaxprFunction)


def _bytes(function: JaxprFunction) -> int:
    return computed_bytes(function.eqns) + sum(c.size * c.dtype.itemsize for c in function.constants)


class _CompiledOperation:
    """An operation on operands of fixed types, some of which are batched."""

    def __init__(self, eqn: Any, is_batched: Sequence[bool], size: int) -> None:
        self.programs: set[int] = set()  # the hashes of those that needed it before it was compiled
        self.executable: Any = None
        self._primitive, self._params = eqn.primitive, eqn.params
        self._axes = [0 if batched else None for batched in is_batched]
        shapes = [(size, *v.aval.shape) if b else v.aval.shape for v, b in zip(eqn.invars, is_batched, strict=True)]
        self._types = [jax.ShapeDtypeStruct(s, v.aval.dtype) for s, v in zip(shapes, eqn.invars, strict=True)]

    def __call__(self, *operands: Any) -> Sequence[Any]:
        if self.executable is None:
            function = jax.vmap(self._bind, self._axes) if 0 in self._axes else self._bind
            self.executable = compile_quickly(jax.jit(function, keep_unused=True).lower(*self._types))
        return self.executable(*operands)

    def _bind(self, *operands: Any) -> Sequence[Any]:
        results = self._primitive.bind(*operands, **self._params)
        return results if self._primitive.multiple_results else [results]


_operations: OrderedDict[Hashable, _CompiledOperation] = OrderedDict()
_lock = Lock()


def _find_operation(eqn: Any, is_batched: Sequence[bool], size: int) -> _CompiledOperation:
    """Returns the operation of an eqn, one object for all eqns that compute equal results."""
    runs_python = any(callable(param) and not isinstance(param, type) for param in flat_params(eqn))
    if eqn.primitive not in _OPERATIONS or eqn.effects or runs_python:
        raise UnsuitableError
    types = [(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    config: Any = jax.config
    # Some params are equal, but differ in their texts: 0.0 and -0.0, 1 and True.
    key = eqn.primitive, *eqn.params.items(), str(eqn.params), *types, *is_batched, size, config.jax_default_device
    try:
        with _lock:
            operation = _operations.setdefault(key, _CompiledOperation(eqn, is_batched, size))
            _operations.move_to_end(key)
            while len(_operations) > _MAX_CACHED:
                _operations.popitem(last=False)
    except TypeError as error:  # a param cannot be hashed
        raise UnsuitableError from error
    return operation


class _Value(NamedTuple):
    """A value of a sequence: its position, and whether it is batched."""

    position: int
    is_batched: bool


class _OperationSequence:
    """A staged function as a sequence of operations, for batches of one size."""

    def __init__(self, function: JaxprFunction, size: int) -> None:
        self._size = size
        self._function = function
        self._values: list[Any] = []  # arguments, constants, and results, which are `None` until they are computed
        self._steps: list[tuple[_CompiledOperation, list[int], list[int]]] = []
        args = [self._add(None, is_batched=True) for _ in function.jaxpr.invars]
        self._results = self._add_jaxpr(function.jaxpr, function.constants, args)

    @property
    def operations(self) -> list[_CompiledOperation]:
        return [operation for operation, _, _ in self._steps]

    @property
    def key(self) -> Hashable:
        """A value that is equal for equal computations."""
        steps = [(id(operation), *operands) for operation, operands, _ in self._steps]
        constants = [value.tobytes() for value in self._values if value is not None]
        return *steps, *constants, *(r.position for r in self._results)

    def __call__(self, *args: Any) -> Any:
        leaves = list(map(np.asarray, tree_leaves(args)))
        ranks = [len(v.aval.shape) for v in self._function.jaxpr.invars]
        lengths = {len(leaf) for leaf, rank in zip(leaves, ranks, strict=True) if leaf.ndim > rank}
        padded = [self._padded(leaf, rank) for leaf, rank in zip(leaves, ranks, strict=True)]
        values = [*padded, *self._values[len(leaves) :]]
        for operation, operands, results in self._steps:
            computed = operation(*[values[i] for i in operands])
            for i, value in zip(results, computed, strict=True):
                values[i] = value
        items = slice(max(lengths)) if lengths else 0
        results = [self._with_batch(np.asarray(values[r.position]), r.is_batched)[items] for r in self._results]
        return tree_unflatten(self._function.tree, results)

    def _padded(self, array: Any, rank: int) -> Any:
        """Returns an array with a batch of the whole size, whose last items repeat the last one."""
        array = array if array.ndim > rank else array[None]
        return np.concatenate([array, np.broadcast_to(array[-1:], (self._size - len(array), *array.shape[1:]))])

    def _with_batch(self, array: Any, is_batched: bool) -> Any:
        return array if is_batched else np.broadcast_to(array, (self._size, *array.shape))

    def _add(self, value: Any, *, is_batched: bool) -> _Value:
        self._values.append(value)
        return _Value(len(self._values) - 1, is_batched)

    def _add_constant(self, value: Any, aval: Any) -> _Value:
        if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
            raise UnsuitableError
        return self._add(np.asarray(value, aval.dtype), is_batched=False)

    def _add_jaxpr(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[_Value]) -> list[_Value]:
        """Adds the operations of a jaxpr, and returns its results."""
        constants = [self._add_constant(c, v.aval) for c, v in zip(consts, jaxpr.constvars, strict=True)]
        variables = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *args], strict=True))

        def read(atom: Any) -> _Value:
            return variables[atom] if is_variable(atom) else self._add_constant(atom.val, atom.aval)

        for eqn in jaxpr.eqns:
            variables.update(zip(eqn.outvars, self._add_eqn(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, jaxpr.outvars))

    def _add_eqn(self, eqn: Any, operands: Sequence[_Value]) -> Sequence[_Value]:
        if is_any_of(eqn, identity_primitives):
            return operands[: len(eqn.outvars)]
        if eqn.primitive in _CALLS:
            (inner,) = subjaxprs(eqn)
            return self._add_jaxpr(inner.jaxpr, inner.consts, [operands[i] for i in inner.operands])
        is_batched = [operand.is_batched for operand in operands]
        operation = _find_operation(eqn, is_batched, self._size)
        results = [self._add(None, is_batched=any(is_batched)) for _ in eqn.outvars]
        self._steps.append((operation, [x.position for x in operands], [r.position for r in results]))
        return results
