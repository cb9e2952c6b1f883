"""Whether a Function computes on parts what its sharding rule says: on one device, where `jax.vmap` maps the parts.

For each factor the arrays are split; `forward`, `backward` and `jvp` run on each part, as on a device, with the name of
the mapped axis as `ctx.mesh_axes(factor)`; and the results, combined as the rule says, must be those of the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._check.closeness import agree, rounding_of_terms
from jaxfn._compat import compile_quickly
from jaxfn._partition import RECORD, Compute, Layout, PartitionRecord, on_part
from jaxfn._sharding_rule import Factors
from jaxfn._tree import is_inexact

_AXIS = "parts"
_MANY_ROUNDINGS = 10


def sharding_rule_problems(run: Callable[[], Any]) -> list[str]:
    """Returns what is wrong with the sharding rules of Functions, from what a program calls with concrete arrays."""
    record = PartitionRecord()
    with RECORD(record):
        run()
    found = (list(_problems(*computation)) for computation in record.computations)
    return next(filter(None, found), [])  # later ones may be wrong because this one is


def _problems(compute: Compute, layout: Layout, arrays: Sequence[Any], whole: Sequence[Any]) -> Iterator[str]:
    """Yields for each factor what is wrong with the first result of the parts that is not that of the whole."""
    for factor in filter(None, dict.fromkeys(chain(*layout.operands))):
        operands = list(zip(arrays, layout.operands, strict=True))
        size = next(x.shape[fs.index(factor)] for x, fs in operands if factor in fs)
        count = next((n for n in range(2, size + 1) if not size % n), 0)
        if not count:
            continue
        in_axes = [0 if factor in fs else None for fs in layout.operands]
        mapped = jax.vmap(partial(compute, {factor: (_AXIS,)}), [in_axes], axis_name=_AXIS, axis_size=count)
        split = [_split(x, fs, factor, count) for x, fs in operands]
        start = f"{layout.name}: factor {factor!r} of the sharding rule:"
        try:
            with on_part():
                results = compile_quickly(jax.jit(mapped).lower(split))(split)
        except Exception as error:  # user code for arrays of other sizes may raise anything
            yield f"{start} on a part it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return
        for index, (parts, y) in enumerate(zip(results, whole, strict=True)):
            problem = _problem(np.asarray(parts), y, factor, layout.results[index], factor in layout.summed)
            if problem:
                yield f"{start} {layout.result_labels[index]} {problem}"
                break


def _split(array: Any, factors: Factors, factor: str, count: int) -> Any:
    return jnp.stack(jnp.split(array, count, factors.index(factor))) if factor in factors else array


def _problem(parts: Any, whole: Any, factor: str, factors: Factors, is_summed: bool) -> str:
    """Returns what is wrong with a result of the parts, which are stacked; "" if nothing is."""
    if factor in factors:
        combined = np.concatenate(list(parts), factors.index(factor))
        text = ", concatenated, is not that of the whole"
        fix = f"Write need_replication_factors=({factor!r},), or the right factors=... of ctx.save_for_backward."
    elif not is_summed:
        combined, text = parts, " is not the same on all parts and the whole, as manual_factors says"
        fix = (
            f"Communicate over ctx.mesh_axes({factor!r}), or write reduction_factors=({factor!r},) to add up the parts."
        )
    else:
        combined, text = parts.sum(0), ", added up, is not that of the whole"
        fix = f"Write need_replication_factors=({factor!r},), or manual_factors and communicate."
        if _is_close(parts, whole):
            fix = "Each part has the whole already: return the contribution of one part, or write manual_factors."
    is_right = _is_close(combined, whole)
    return "" if is_right else f"(factors {' '.join(f or '_' for f in factors) or 'none'}) of the parts{text}. {fix}"


def _is_close(a: Any, b: Any) -> bool:
    """Whether arrays are equal to another up to rounding, which is that of numbers of about the same magnitude."""
    if a.shape[-b.ndim :] != b.shape if b.ndim else False:
        return False
    if not is_inexact(b.dtype):
        return bool((np.asarray(a) == np.asarray(b)).all())
    eps = float(jnp.finfo(b.dtype).eps)
    a, b = (np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(b) else np.float64) for x in (a, b))
    return bool(agree(a, b, rounding_of_terms(b, _MANY_ROUNDINGS * eps**0.5, _MANY_ROUNDINGS * eps)).all())
