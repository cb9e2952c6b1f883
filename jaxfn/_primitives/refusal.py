"""Derivatives that cannot be had: an error where one is used, and none where it is only computed and dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jaxfn._compat import Primitive, ad, batching, mlir


class Refusal:
    """What is raised, compared by identity.

    Args:
      error: the kind of exception.
      message: its text.
    """

    def __init__(self, error: type[Exception], message: str) -> None:
        self.error = error
        self.message = message

    def refuse(self) -> NoReturn:
        """Raises it."""
        raise self.error(self.message)


refused_p = Primitive("refused")


def refused_tangent(aval: Any, tangents: Sequence[Any], refusal: Refusal) -> Any:
    """A tangent that depends on these tangents, and raises where it is evaluated or transposed.

    In reverse mode JAX drops it where nothing uses it, as under `stop_gradient`.

    Args:
      aval: its type.
      tangents: what it depends on; one at least.
      refusal: what is raised.
    """
    return refused_p.bind(*tangents, aval=aval, refusal=refusal)


def _refused_impl(*_: Any, aval: Any, refusal: Refusal) -> Any:
    refusal.refuse()


def _refused_lowering(ctx: Any, *_: Any, aval: Any, refusal: Refusal) -> Any:
    refusal.refuse()


def _refused_abstract(*_: Any, aval: Any, refusal: Refusal) -> Any:
    return aval


def _refused_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, aval: Any, refusal: Refusal) -> Any:
    present = [t for t in tangents if not isinstance(t, ad.Zero)]
    return refused_tangent(aval, primals, refusal), refused_tangent(aval, present, refusal)


def _refused_transpose(cotangent: Any, *operands: Any, aval: Any, refusal: Refusal) -> Any:
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands]
    refusal.refuse()


def _refused_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, aval: Any, refusal: Refusal) -> Any:
    if all(d is None for d in dims):  # JAX asks even so
        return refused_tangent(aval, operands, refusal), None
    return refused_tangent(aval.update(shape=(axis.size, *aval.shape)), operands, refusal), 0


refused_p.def_impl(_refused_impl)
refused_p.def_abstract_eval(_refused_abstract)
mlir.register_lowering(refused_p, _refused_lowering, cacheable=False)
ad.primitive_jvps[refused_p] = _refused_jvp
ad.primitive_transposes[refused_p] = _refused_transpose
batching.fancy_primitive_batchers[refused_p] = _refused_batch
