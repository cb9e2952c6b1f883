"""Plain JAX operations: their source, the types of their results, and whether they are linear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.fuzz.types import LARGEST, Shape, Type, all_batches, broadcast, demand, promoted


@dataclass(frozen=True)
class Primitive:
    """An operation: an expression of `{0}` and `{1}`, the type of its result, and whether it is linear."""

    source: str
    type_of: Callable[..., Type]
    is_linear: bool = False

    @property
    def arity(self) -> int:
        """The number of inputs."""
        return 2 if "{1}" in self.source else 1


def _unary(
    source: str,
    shape: Callable[[Type], Shape] = lambda x: x.shape,
    condition: Callable[[Type], bool] = lambda x: True,
    linear: bool = False,
) -> Primitive:
    """An operation of a floating-point value that preserves its dtype."""

    def type_of(x: Type) -> Type:
        demand(x.is_float and condition(x))
        return x.shaped(shape(x))

    return Primitive(source, type_of, linear)


def _cast(dtype: str) -> Primitive:
    def type_of(x: Type) -> Type:
        demand(x.is_float and x.dtype != dtype)
        return Type(x.shape, dtype, x.batches)

    return Primitive(f"{{0}}.astype(jnp.{dtype})", type_of)


def _product(x: Type, w: Type) -> Type:
    demand(x.rank == 2 and w.rank in (1, 2) and x.shape[1] == w.shape[0])
    return Type((x.shape[0], *w.shape[1:]), promoted(x, w), all_batches(x, w))


def _outer(x: Type, w: Type) -> Type:
    demand(x.rank == w.rank == 1 and x.size * w.size <= LARGEST)
    return Type((x.size, w.size), promoted(x, w), all_batches(x, w))


def _integers(k: Type) -> Type:
    demand(not k.is_float)
    return Type(k.shape, "float32", k.batches)


def _chosen(x: Type, k: Type) -> Type:
    demand(x.is_float and k.dtype == "int32" and x.rank > 0 and x.shape[0] > 0 and k.rank == 1)
    return Type((*k.shape, *x.shape[1:]), x.dtype, all_batches(x, k))


def _has_axis(x: Type) -> bool:
    return x.rank > 0


OPERATIONS = {
    "sin": _unary("jnp.sin({0})"),
    "tanh": _unary("jnp.tanh({0})"),
    "square": _unary("0.3 * {0} * {0}"),
    "half": _unary("0.5 * {0}", linear=True),
    "negate": _unary("-{0}", linear=True),
    "shift": _unary("{0} + 0.25"),
    "named": _unary('checkpoint_name(jnp.sin({0}), "named")'),
    "sum first": _unary("{0}.sum(0)", lambda x: x.shape[1:], _has_axis, linear=True),
    "mean last": _unary("{0}.mean(-1)", lambda x: x.shape[:-1], lambda x: x.rank > 0 and not x.is_empty, linear=True),
    "sum": _unary("0.5 * {0}.sum()", lambda x: (), linear=True),
    "flatten": _unary("{0}.reshape(-1)", lambda x: (x.size,), linear=True),
    "transpose": _unary("{0}.T", lambda x: x.shape[::-1], lambda x: x.rank > 1, linear=True),
    "flip": _unary("jnp.flip({0}, 0)", condition=_has_axis, linear=True),
    "cumsum": _unary("jnp.cumsum({0}, 0)", condition=_has_axis, linear=True),
    "new axis": _unary("{0}[None]", lambda x: (1, *x.shape), lambda x: x.rank < 3, linear=True),
    "double": _unary(
        "jnp.concatenate([{0}, 0.5 * {0}])", lambda x: (2 * x.shape[0], *x.shape[1:]),
        lambda x: x.rank > 0 and x.size <= LARGEST // 2, linear=True,
    ),
    "first rows": _unary(
        "{0}[:-1]", lambda x: (x.shape[0] - 1, *x.shape[1:]), lambda x: x.rank > 0 and x.shape[0] > 1, linear=True
    ),
    "add": Primitive("{0} + {1}", broadcast, True),
    "subtract": Primitive("{0} - 0.5 * {1}", broadcast, True),
    "multiply": Primitive("0.5 * {0} * {1}", broadcast),
    "where": Primitive("jnp.where({0} > 0.0123, {0}, {1})", broadcast),
    "matmul": Primitive("0.5 * {0} @ {1}", _product),
    "outer": Primitive("0.5 * jnp.outer({0}, {1})", _outer),
    "to bfloat16": _cast("bfloat16"),
    "to float32": _cast("float32"),
    "from integers": Primitive("0.5 * {0}.astype(jnp.float32)", _integers),
    "take": Primitive("jnp.take({0}, {1} % {0}.shape[0], axis=0)", _chosen),
}  # fmt: skip
