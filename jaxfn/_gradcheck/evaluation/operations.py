"""Evaluation of small staged functions, operation by operation.

XLA takes 30 to 100 ms to compile the program of a check, but a compiled operation runs in microseconds. So operations
are compiled one by one, and each is used by all later checks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from jaxfn._check.staging import LAX_PRIMITIVES, JaxprFunction, computed_bytes
from jaxfn._compat import compile_quickly, custom_jvp_call_p, custom_vjp_call_p, jit_p, remat_p
from jaxfn._jaxpr import eval_jaxpr_with, flat_params, identity_primitives, is_any_of, subjaxpr_rules, subjaxprs

_MAX_CACHED = 1024
_MAX_BYTES = 4 << 20  # A larger function runs faster as one program.
_MIN_BATCH = 32  # Batches are padded to this size, or a larger power of two, so that they share operations.
_MAX_OPERATIONS = 200  # Compiling more takes longer than compiling one program.

# Calls of a jaxpr, whose rules no longer matter.
_CALLS = frozenset({jit_p, remat_p, custom_jvp_call_p, custom_vjp_call_p})
# Without those that move arrays to devices, and those that draw other numbers in a batch.
_OPERATIONS = (
    LAX_PRIMITIVES
    - subjaxpr_rules.keys()
    - {jax.lax.device_put_p, jax.lax.sharding_constraint_p, jax.lax.rng_bit_generator_p, jax.lax.rng_uniform_p}
)


class UnsuitableError(Exception):
    """Functions that cannot be evaluated operation by operation, or for which that takes longer than one program."""


def by_operations(functions: Any, batch_size: int) -> Any:
    """Returns functions that evaluate staged functions operation by operation.

    Each of their arguments, and so each of their results, may have a batch at axis 0.

    Raises:
      UnsuitableError: they contain other primitives than JAX's operations, or are large, or have many operations.
    """
    size = max(_MIN_BATCH, 1 << (batch_size - 1).bit_length())
    staged, tree = jax.tree.flatten(functions, is_leaf=lambda f: isinstance(f, JaxprFunction))
    if any(computed_bytes(f.eqns) * size + sum(c.nbytes for c in f.constants) > _MAX_BYTES for f in staged):
        raise UnsuitableError
    found = [_ByOperations(f, size) for f in staged]
    if len({operation for f in found for operation in f.operations.values()}) > _MAX_OPERATIONS:
        raise UnsuitableError
    return jax.tree.unflatten(tree, found)


class _ByOperations:
    """A staged function, evaluated operation by operation for batches of one size."""

    def __init__(self, function: JaxprFunction, size: int) -> None:
        self.operations: dict[Hashable, _CompiledOperation] = {}  # by eqn and which operands are batched
        self._function, self._size = function, size

        def find(eqn: Any, is_batched: Sequence[bool]) -> Sequence[bool]:
            self.operations[id(eqn), *is_batched] = _find_operation(eqn, is_batched, size)
            return [any(is_batched)] * len(eqn.outvars)

        def constant(value: Any, aval: Any) -> bool:
            if jnp.issubdtype(aval.dtype, jax.dtypes.extended):
                raise UnsuitableError
            return False

        _evaluate(find, constant, function.jaxpr, function.constants, [True] * len(function.jaxpr.invars))

    def __call__(self, *args: Any) -> Any:
        leaves, jaxpr = list(map(np.asarray, tree_leaves(args))), self._function.jaxpr
        pairs = list(zip(leaves, jaxpr.invars, strict=True))
        lengths = [len(leaf) for leaf, v in pairs if _is_batched(leaf, v)]
        batches = [self._padded(leaf if _is_batched(leaf, v) else leaf[None]) for leaf, v in pairs]
        results = _evaluate(
            self._apply, lambda x, aval: np.asarray(x, aval.dtype), jaxpr, self._function.constants, batches
        )
        items = slice(max(lengths)) if lengths else 0
        arrays = [
            (x if _is_batched(x, v) else np.broadcast_to(x, (self._size, *x.shape)))[items]
            for x, v in zip(map(np.asarray, results), jaxpr.outvars, strict=True)
        ]
        return tree_unflatten(self._function.tree, arrays)

    def _apply(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return self.operations[id(eqn), *map(_is_batched, operands, eqn.invars)](*operands)

    def _padded(self, batch: Any) -> Any:
        """Returns a batch of the whole size, whose last items repeat the last one."""
        return np.concatenate([batch, np.broadcast_to(batch[-1:], (self._size - len(batch), *batch.shape[1:]))])


def _is_batched(array: Any, atom: Any) -> bool:
    return array.ndim > len(atom.aval.shape)


def _evaluate(
    evaluate: Callable[[Any, Sequence[Any]], Sequence[Any]],
    constant: Callable[[Any, Any], Any],
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
) -> list[Any]:
    """Returns the outputs of a jaxpr, whose calls are inlined."""

    def eval_eqn(_: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if is_any_of(eqn, identity_primitives):
            return operands[: len(eqn.outvars)]
        if eqn.primitive in _CALLS:
            (inner,) = subjaxprs(eqn)
            return _evaluate(evaluate, constant, inner.jaxpr, inner.consts, [operands[i] for i in inner.operands])
        return evaluate(eqn, operands)

    constants = [constant(c, v.aval) for c, v in zip(consts, jaxpr.constvars, strict=True)]
    return eval_jaxpr_with(eval_eqn, jaxpr, constants, args, lambda atom: constant(atom.val, atom.aval))


class _CompiledOperation:
    """An operation on operands of fixed types, some of which are batched, compiled when it is first called."""

    def __init__(self, eqn: Any, is_batched: Sequence[bool], size: int) -> None:
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


_cache: OrderedDict[Hashable, _CompiledOperation] = OrderedDict()
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
    with _lock:
        operation = _cache.get(key) or _cache.setdefault(key, _CompiledOperation(eqn, is_batched, size))
        _cache.move_to_end(key)
        while len(_cache) > _MAX_CACHED:
            _cache.popitem(last=False)
    return operation
