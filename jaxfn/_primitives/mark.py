"""`mark`: an identity that says in a program what its operands are.

It is bound only while somebody looks for it; see `jaxfn._observation`. It lowers to nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from jaxfn._compat import Primitive, ad, batching, mlir

mark_p = Primitive("mark")
mark_p.multiple_results = True


def mark(arrays: Sequence[Any], labels: Sequence[Hashable]) -> list[Any]:
    """The arrays, each with its label."""
    return mark_p.bind(*arrays, labels=tuple(labels), num_arrays=len(arrays)) if arrays else []


def mark_beside(arrays: Sequence[Any], noted: Sequence[Any], labels: Sequence[Hashable]) -> list[Any]:
    """The arrays, which hold in the program what is noted beside them: it is there wherever one of them is used.

    Args:
      arrays: what is returned.
      noted: other arrays.
      labels: one for each of those.
    """
    return mark_p.bind(*arrays, *noted, labels=(*[None] * len(arrays), *labels), num_arrays=len(arrays))


def _mark_impl(*operands: Any, labels: Sequence[Hashable], num_arrays: int) -> list[Any]:
    return list(operands[:num_arrays])


def _mark_lowering(ctx: Any, *operands: Any, labels: Sequence[Hashable], num_arrays: int) -> list[Any]:
    return list(operands[:num_arrays])


def _mark_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, labels: Any, num_arrays: int) -> Any:
    return mark_p.bind(*primals, labels=labels, num_arrays=num_arrays), list(tangents[:num_arrays])


def _mark_batch(axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, labels: Any, num_arrays: int) -> Any:
    noted = [
        x if d is None else batching.bdim_at_front(x, d, axis.size)
        for x, d in zip(operands[num_arrays:], dims[num_arrays:], strict=True)
    ]
    arrays = operands[:num_arrays]
    return mark_p.bind(*arrays, *noted, labels=labels, num_arrays=num_arrays), dims[:num_arrays]


def _mark_transpose(cotangents: Sequence[Any], *operands: Any, labels: Any, num_arrays: int) -> list[Any]:
    """Where reverse mode transposes a `jvp`, its tangents have no values: what is noted of them is left out."""
    noted = [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in operands[num_arrays:]]
    return [ct if ad.is_undefined_primal(x) else None for ct, x in zip(cotangents, operands, strict=False)] + noted


mark_p.def_impl(_mark_impl)
mark_p.def_abstract_eval(_mark_impl)
mlir.register_lowering(mark_p, _mark_lowering, cacheable=False)
ad.primitive_jvps[mark_p] = _mark_jvp
ad.primitive_transposes[mark_p] = _mark_transpose
batching.fancy_primitive_batchers[mark_p] = _mark_batch
