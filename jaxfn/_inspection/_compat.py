"""Unpromised parts of JAX that only jaxfn's tools use, each with the versions on which it was checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Sequence
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.extend.core.primitives import random_bits_p, threefry2x32_p
from jax.extend.source_info_util import current_name_stack, user_context

__all__ = ["random_bits_p", "threefry2x32_p"]


def eval_eqn(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Evaluates one eqn of a jaxpr as `jax.core.eval_jaxpr` does, which takes whole jaxprs only (0.10.0 to 0.12.0)."""
    with eqn_scope(eqn):
        results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(eqn.params))
    return results if eqn.primitive.multiple_results else [results]


@contextlib.contextmanager
def eqn_scope(eqn: Any) -> Generator[None]:
    """Gives operations inside the names, the source line and the settings of an eqn (0.10.0 to 0.12.0)."""
    source = eqn.source_info
    names = current_name_stack() + source.name_stack
    with user_context(source.traceback, name_stack=names), eqn.ctx.manager:
        yield


def keeps_constants_apart() -> bool:
    """Whether JAX passes a program's constants to its executable at every call (an option, off in 0.10.0 to 0.12.0).

    Otherwise they are part of the lowered program.
    """
    return bool(getattr(jax.config, "jax_use_simplified_jaxpr_constants", False))


def jit_options(eqn: Any) -> dict[str, Any]:
    """Returns the options of a `jit` eqn, for a function that returns a pair (0.10.0 to 0.12.0).

    Donations are omitted: JAX compiles a staged jaxpr as a whole, and may read a donated array again.

    Args:
      eqn: A `jit` eqn.

    Returns:
      Keyword arguments of `jax.jit`, for a function of the eqn's operands. Its first result is a tuple of the eqn's
      results; nothing is known of the second.
    """
    params = eqn.params

    def placed(shardings: Sequence[Any], layouts: Sequence[Any]) -> tuple[Any, ...]:
        pairs = zip(shardings, layouts, strict=True)
        return tuple(sharding if layout is None else Format(layout, sharding) for sharding, layout in pairs)

    return {
        "in_shardings": placed(params["in_shardings"], params["in_layouts"]),
        "out_shardings": (placed(params["out_shardings"], params["out_layouts"]), None),
        "keep_unused": params["keep_unused"],
        "inline": params["inline"],
        "compiler_options": dict(params["compiler_options_kvs"]) or None,
    }


def is_plain_jit(eqn: Any) -> bool:
    """Whether a `jit` eqn has no shardings, layouts or compiler options."""
    params = eqn.params
    options = [*params["in_shardings"], *params["out_shardings"], *params["in_layouts"], *params["out_layouts"]]
    is_placed = any(x is not None and type(x).__name__ != "UnspecifiedValue" for x in options)  # 0.10.0 to 0.12.0
    return not (is_placed or params["compiler_options_kvs"])


def platforms_of_branches(eqn: Any) -> Sequence[tuple[str, ...] | None] | None:
    """Returns the platforms of each branch of a `cond` eqn, `None` for a default branch (0.10.0 to 0.12.0).

    `None` for a `cond` that does not choose by the platform.
    """
    return eqn.params.get("branches_platforms")


def manual_axes(eqn: Any) -> frozenset[str]:
    """Returns the mesh axes of a `shard_map` eqn that are manual inside (0.10.0, and under another name 0.12.0)."""
    params = eqn.params
    return params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]


_JAX_FOLDER = os.path.join(os.path.dirname(jax.__file__), "")


def is_code_of_jax(jaxpr: Any) -> bool:
    """Whether the function that was traced to a jaxpr is one of JAX's own (0.10.0 to 0.12.0)."""
    return (getattr(jaxpr, "jaxpr", jaxpr).debug_info.func_filename or "").startswith(_JAX_FOLDER)


# XLA's own names, not promised to stay: no optimization, one module on the CPU, and no fusing of loops there. 0.10.0 to
# 0.10.2 know all three, 0.12.0 the first two.
_SHORT: dict[str, Any] = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
_QUICK: list[dict[str, Any]] = [
    {**_SHORT, "xla_cpu_use_fusion_emitters": False},
    _SHORT,
    {"xla_backend_optimization_level": 0},
    {},
]


def compile_quickly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles in a third of the usual time, for programs that run for less time than optimizing them takes."""
    for options in list(_QUICK[:-1]):
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:  # an option that this XLA does not know
            with contextlib.suppress(ValueError):  # another thread may have removed it meanwhile
                _QUICK.remove(options)
    return lowered.compile()


def compile_as_written(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program so that each operation is rounded to its dtype; otherwise XLA may skip that between two."""
    try:
        return lowered.compile(compiler_options={"xla_allow_excess_precision": False})  # 0.10.0 and 0.12.0 know it
    except jax.errors.JaxRuntimeError:
        return lowered.compile()
