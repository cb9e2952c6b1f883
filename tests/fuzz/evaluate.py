"""Runs a traced program with NumPy: compiling one takes longer than all the rest together.

Only the arithmetic is replaced: JAX and jaxfn have traced, differentiated and batched by then. What NumPy does not have
here is left to JAX, one operation at a time. A disagreement found so counts when the compiled program shows it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

Values = list[np.ndarray[Any, Any]]


def evaluate(function: Callable[..., Any], args: Sequence[Any]) -> Any | None:
    """What a function returns under jit, traced by JAX and run by NumPy; `None` where devices talk to each other."""
    traced = jax.jit(function).trace(*args)
    if _is_distributed(traced.jaxpr.jaxpr):
        return None
    with np.errstate(all="ignore"):
        outputs = _run(traced.jaxpr, [np.asarray(x) for x in jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), outputs)


def _is_distributed(jaxpr: Jaxpr) -> bool:
    return any(e.primitive.name == "shard_map" or any(map(_is_distributed, _inner(e))) for e in jaxpr.eqns)


def _inner(equation: Any) -> list[Jaxpr]:
    """The programs among an equation's parameters."""
    found: list[Jaxpr] = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else [value]:
            if isinstance(item, ClosedJaxpr):
                found.append(item.jaxpr)
            elif isinstance(item, Jaxpr):
                found.append(item)
    return found


def _run(program: ClosedJaxpr | Jaxpr, args: Sequence[Any]) -> Values:
    """The results of a jaxpr."""
    jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    values: dict[Any, Any] = {}
    values.update(zip(jaxpr.constvars, map(np.asarray, constants), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        outputs = _apply(equation, [read(atom) for atom in equation.invars])
        for variable, output in zip(equation.outvars, outputs, strict=True):
            shaped = np.asarray(output, variable.aval.dtype)
            assert shaped.shape == variable.aval.shape, (equation.primitive, shaped.shape, variable.aval)
            values[variable] = shaped
    return [read(atom) for atom in jaxpr.outvars]


def _apply(equation: Any, operands: list[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    if name in _NUMPY:
        return [_NUMPY[name](params, *map(_wide, operands))]
    if name in _STRUCTURED:
        return _STRUCTURED[name](params, operands)
    for key in ("jaxpr", "call_jaxpr", "call"):
        if isinstance(params.get(key), (ClosedJaxpr, Jaxpr)):
            return _run(params[key], operands)
    arrays = [jnp.asarray(x) for x in operands]
    if (equation.primitive.impl.__module__ or "").startswith("jaxfn"):
        return _run(jax.make_jaxpr(lambda *xs: equation.primitive.impl(*xs, **params))(*arrays), operands)
    results = equation.primitive.bind(*arrays, **params)
    return results if equation.primitive.multiple_results else [results]


def _wide(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """NumPy does not know bfloat16."""
    return x.astype(np.float32) if x.dtype == jnp.bfloat16 else x


def _broadcast_in_dim(params: Any, x: Any) -> Any:
    shape = [1] * len(params["shape"])
    for axis, size in zip(params["broadcast_dimensions"], x.shape, strict=True):
        shape[axis] = size
    return np.broadcast_to(x.reshape(shape), params["shape"])


def _dot_general(params: Any, x: Any, w: Any) -> Any:
    (x_contracted, w_contracted), (x_batch, w_batch) = params["dimension_numbers"]
    letters = iter("abcdefghijklmnopqrstuvwxyz")
    of_x, of_w = [next(letters) for _ in x.shape], [next(letters) for _ in w.shape]
    for i, j in zip((*x_contracted, *x_batch), (*w_contracted, *w_batch), strict=True):
        of_w[j] = of_x[i]
    batch = [of_x[i] for i in x_batch]
    free_x = [c for i, c in enumerate(of_x) if i not in (*x_contracted, *x_batch)]
    free_w = [c for j, c in enumerate(of_w) if j not in (*w_contracted, *w_batch)]
    return np.einsum(f"{''.join(of_x)},{''.join(of_w)}->{''.join(batch + free_x + free_w)}", x, w)


def _cumsum(params: Any, x: Any) -> Any:
    axis = params["axis"]
    return np.flip(np.cumsum(np.flip(x, axis), axis), axis) if params["reverse"] else np.cumsum(x, axis)


def _select(params: Any, which: Any, *cases: Any) -> Any:
    return np.choose(np.broadcast_to(which.astype(int), cases[0].shape), cases) if cases[0].size else cases[0]


def _slice(params: Any, x: Any) -> Any:
    strides = params["strides"] or (1,) * x.ndim
    return x[tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]


def _iota(params: Any) -> Any:
    shape, axis = params["shape"], params["dimension"]
    return np.broadcast_to(np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))]), shape)


def _logistic(params: Any, x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


_NUMPY: dict[str, Callable[..., Any]] = {
    "mul": lambda p, x, y: x * y,
    "add": lambda p, x, y: x + y,
    "add_any": lambda p, x, y: x + y,
    "sub": lambda p, x, y: x - y,
    "div": lambda p, x, y: x / y if x.dtype.kind == "f" else np.trunc(x / y),
    "max": lambda p, x, y: np.maximum(x, y),
    "min": lambda p, x, y: np.minimum(x, y),
    "neg": lambda p, x: -x,
    "abs": lambda p, x: np.abs(x),
    "sign": lambda p, x: np.sign(x),
    "sin": lambda p, x: np.sin(x),
    "cos": lambda p, x: np.cos(x),
    "tanh": lambda p, x: np.tanh(x),
    "exp": lambda p, x: np.exp(x),
    "rsqrt": lambda p, x: 1 / np.sqrt(x),
    "logistic": _logistic,
    "integer_pow": lambda p, x: x ** np.asarray(p["y"], x.dtype),
    "square": lambda p, x: x * x,
    "one_minus_square": lambda p, x: 1 - x * x,
    "round": lambda p, x: np.round(x),
    "gt": lambda p, x, y: x > y,
    "ge": lambda p, x, y: x >= y,
    "lt": lambda p, x, y: x < y,
    "eq": lambda p, x, y: x == y,
    "ne": lambda p, x, y: x != y,
    "select_n": _select,
    "convert_element_type": lambda p, x: x,
    "copy": lambda p, x: x,
    "name": lambda p, x: x,
    "stop_gradient": lambda p, x: x,
    "reduce_precision": lambda p, x: x,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "squeeze": lambda p, x: x.squeeze(p["dimensions"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": _slice,
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "iota": _iota,
    "reduce_sum": lambda p, x: x.sum(p["axes"], dtype=x.dtype),
    "reduce_max": lambda p, x: x.max(p["axes"]),
    "cumsum": _cumsum,
    "dot_general": _dot_general,
}


def _split(params: Any, operands: list[Any]) -> Sequence[Any]:
    return np.split(operands[0], np.cumsum(params["sizes"])[:-1], params["axis"])


def _cond(params: Any, operands: list[Any]) -> Sequence[Any]:
    index, *others = operands
    return _run(params["branches"][int(np.clip(index, 0, len(params["branches"]) - 1))], others)


def _while(params: Any, operands: list[Any]) -> Sequence[Any]:
    of_test = params["cond_nconsts"]
    of_body = of_test + params["body_nconsts"]
    state: Sequence[Any] = operands[of_body:]
    while _run(params["cond_jaxpr"], [*operands[:of_test], *state])[0]:
        state = _run(params["body_jaxpr"], [*operands[of_test:of_body], *state])
    return state


def _scan(params: Any, operands: list[Any]) -> Sequence[Any]:
    constants, carry, xs = _parts_of_scan(params, operands)
    length, program = params["length"], params["jaxpr"]
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    rows: dict[int, Values] = {}
    for i in order:
        results = _run(program, [*constants, *carry, *(x[i] for x in xs)])
        carry, rows[i] = results[: len(carry)], results[len(carry) :]
    stacked = [[rows[i][j] for i in range(length)] for j in range(len(program.out_avals) - len(carry))]
    avals = program.out_avals[len(carry) :]
    return [*carry, *(np.stack(ys) if ys else np.zeros((0, *a.shape)) for ys, a in zip(stacked, avals, strict=True))]


def _parts_of_scan(params: Any, operands: list[Any]) -> tuple[Values, Values, Values]:
    if "num_consts" in params:  # 0.10
        counts = params["num_consts"], params["num_carry"]
    else:
        constants, carry, _ = params["ft_in"].unpack()
        counts = len(constants), len(carry)
    start = sum(counts)
    return operands[: counts[0]], operands[counts[0] : start], operands[start:]


def _identity(params: Any, operands: list[Any]) -> Sequence[Any]:
    return operands


_STRUCTURED: dict[str, Callable[[Any, list[Any]], Sequence[Any]]] = {
    "split": _split,
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "reshard": _identity,
    "optimization_barrier": _identity,
}
