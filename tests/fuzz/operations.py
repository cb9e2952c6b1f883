"""Plain JAX operations: their source, the types of their results, and whether they are linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.types import LARGEST, Type, all_batches, broadcast, demand, promoted


@dataclass(frozen=True)
class Primitive:
    """An operation: an expression of `{0}` and `{1}`, its number of inputs, its type, and whether it is linear."""

    source: str
    arity: int
    type_of: Callable[..., Type]
    is_linear: bool = False


def _same(x: Type) -> Type:
    demand(x.is_float)
    return x


def _without_first(x: Type) -> Type:
    demand(x.is_float)
    return x.without_axis(0)


def _without_last(x: Type) -> Type:
    demand(x.is_float and not x.is_empty)
    return x.without_axis(-1)


def _scalar(x: Type) -> Type:
    return _same(x).shaped(())


def _flat(x: Type) -> Type:
    return _same(x).shaped((x.size,))


def _transposed(x: Type) -> Type:
    demand(x.rank > 1)
    return _same(x).shaped(x.shape[::-1])


def _rolled(x: Type) -> Type:
    demand(x.rank > 0)
    return _same(x)


def _new_axis(x: Type) -> Type:
    demand(x.rank < 3)
    return _same(x).with_axis(0, 1)


def _doubled(x: Type) -> Type:
    demand(x.rank > 0 and x.size <= LARGEST // 2)
    return _same(x).shaped((2 * x.shape[0], *x.shape[1:]))


def _first_rows(x: Type) -> Type:
    demand(x.rank > 0 and x.shape[0] > 1)
    return _same(x).shaped((x.shape[0] - 1, *x.shape[1:]))


def _product(x: Type, w: Type) -> Type:
    demand(x.rank == 2 and w.rank in (1, 2) and x.shape[1] == w.shape[0])
    return Type((x.shape[0], *w.shape[1:]), promoted(x, w), all_batches(x, w))


def _outer(x: Type, w: Type) -> Type:
    demand(x.rank == w.rank == 1 and x.size * w.size <= LARGEST)
    return Type((x.size, w.size), promoted(x, w), all_batches(x, w))


def _cast(dtype: str) -> Callable[[Type], Type]:
    def cast(x: Type) -> Type:
        demand(x.is_float and x.dtype != dtype)
        return Type(x.shape, dtype, x.batches)

    return cast


def _integers(k: Type) -> Type:
    demand(not k.is_float)
    return Type(k.shape, "float32", k.batches)


def _chosen(x: Type, k: Type) -> Type:
    demand(x.is_float and k.dtype == "int32" and x.rank > 0 and x.shape[0] > 0 and k.rank == 1)
    return Type((*k.shape, *x.shape[1:]), x.dtype, all_batches(x, k))


OPERATIONS = {
    "sin": Primitive("jnp.sin({0})", 1, _same),
    "tanh": Primitive("jnp.tanh({0})", 1, _same),
    "square": Primitive("0.3 * {0} * {0}", 1, _same),
    "half": Primitive("0.5 * {0}", 1, _same, True),
    "negate": Primitive("-{0}", 1, _same, True),
    "shift": Primitive("{0} + 0.25", 1, _same),
    "named": Primitive('checkpoint_name(jnp.sin({0}), "kept")', 1, _same),
    "sum first": Primitive("{0}.sum(0)", 1, _without_first, True),
    "mean last": Primitive("{0}.mean(-1)", 1, _without_last, True),
    "sum": Primitive("0.5 * {0}.sum()", 1, _scalar, True),
    "flatten": Primitive("{0}.reshape(-1)", 1, _flat, True),
    "transpose": Primitive("{0}.T", 1, _transposed, True),
    "flip": Primitive("jnp.flip({0}, 0)", 1, _rolled, True),
    "cumsum": Primitive("jnp.cumsum({0}, 0)", 1, _rolled, True),
    "new axis": Primitive("{0}[None]", 1, _new_axis, True),
    "double": Primitive("jnp.concatenate([{0}, 0.5 * {0}])", 1, _doubled, True),
    "first rows": Primitive("{0}[:-1]", 1, _first_rows, True),
    "add": Primitive("{0} + {1}", 2, broadcast, True),
    "subtract": Primitive("{0} - 0.5 * {1}", 2, broadcast, True),
    "multiply": Primitive("0.5 * {0} * {1}", 2, broadcast),
    "where": Primitive("jnp.where({0} > 0.0123, {0}, {1})", 2, broadcast),
    "matmul": Primitive("0.5 * {0} @ {1}", 2, _product),
    "outer": Primitive("0.5 * jnp.outer({0}, {1})", 2, _outer),
    "to bfloat16": Primitive("{0}.astype(jnp.bfloat16)", 1, _cast("bfloat16")),
    "to float32": Primitive("{0}.astype(jnp.float32)", 1, _cast("float32")),
    "from integers": Primitive("0.5 * {0}.astype(jnp.float32)", 1, _integers),
    "take": Primitive("jnp.take({0}, {1} % {0}.shape[0], axis=0)", 2, _chosen),
}
