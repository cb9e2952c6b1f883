"""The JAX names that are not part of plain `jax` and `jax.numpy`, in one place.

Every entry says which versions it was checked on. Nothing here reaches into `jax._src`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Format
from jax.extend.core import Primitive, Var, get_opaque_trace_state
from jax.extend.source_info_util import current_name_stack, register_exclusion, summarize, user_context
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.ref import AbstractRef

__all__ = [
    "AbstractRef",
    "Primitive",
    "SymbolicZero",
    "Var",
    "ad",
    "batched_aval",
    "batching",
    "carry_out",
    "compile_as_written",
    "compile_quickly",
    "cotangent_sharding",
    "current_trace",
    "equation_of",
    "has_tangent",
    "in_front",
    "is_plain_jit",
    "is_ref",
    "is_reverse_only",
    "is_variable",
    "jaxprs_of",
    "jit_options",
    "keeps_constants_apart",
    "line_of",
    "lowered_jaxpr",
    "make_jaxpr",
    "manual_axes",
    "manual_axes_here",
    "memory_space",
    "mlir",
    "named_as",
    "open_jaxpr",
    "opened",
    "own_lines",
    "partial_eval",
    "platforms_of_branches",
    "quick_key",
    "scan_sizes",
    "stages_constants",
    "used_operands",
    "variable_of",
    "varying_axes",
    "while_sizes",
    "without_tangent",
    "without_unused",
    "zeros_of",
]


# Operations come from the user's lines of code, not from jaxfn's (0.10.0 to 0.12.0).
register_exclusion(os.path.dirname(__file__) + os.sep)


def current_trace() -> object:
    """Something that is equal wherever JAX is tracing, or not tracing, the same in this thread (0.10.0 to 0.12.0)."""
    return get_opaque_trace_state()


with jax.ensure_compile_time_eval():
    # Taken here, inside ensure_compile_time_eval, so that importing jaxfn under a trace is harmless.
    _EAGER = current_trace()


def is_eager() -> bool:
    """Whether nothing is being traced or differentiated in this thread (0.10.0 to 0.12.0)."""
    return current_trace() == _EAGER


def stages_constants() -> bool:
    """Whether operations on constants are being traced: under `jit`, and not under `grad` alone."""
    return not is_eager() and isinstance(jax.lax.full((), 0), Tracer)


def is_ref(value: Any) -> bool:
    """Whether an array leaf is a mutable reference, concrete or traced (0.10.0 to 0.12.0)."""
    return isinstance(jax.typeof(value), AbstractRef)  # quicker than isinstance(value, jax.Ref)


def in_front(array: Any, dim: Any, axis: Any) -> Any:
    """An array that `jax.vmap` maps, or does not map, with the batch at axis 0 (0.10.0 to 0.12.0)."""
    return batching.bdim_at_front(array, dim, axis.size, axis.explicit_mesh_axis)


def batched_aval(aval: Any, axis: Any) -> Any:
    """A type with the batch at axis 0 (0.10.0 to 0.12.0)."""
    shape = (axis.size, *aval.shape)
    if aval.sharding.mesh.empty:
        return aval.update(shape=shape)
    spec = jax.sharding.PartitionSpec(axis.explicit_mesh_axis, *aval.sharding.spec)
    return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))


def has_tangent(value: Any) -> bool:
    """Whether an array is traced by a derivative, the innermost of what traces it (0.10.0 to 0.12.0)."""
    return isinstance(value, Tracer) and hasattr(value, "tangent")


def without_tangent(tracer: Tracer) -> tuple[Any, int]:
    """What is under tracers of derivatives, and how many of them have a tangent (0.10.0 to 0.12.0).

    `jax.lax.stop_gradient` gives the same array, at the cost of a whole linearization.
    """
    value: Any = tracer
    order = 0
    while isinstance(value, Tracer) and hasattr(value, "tangent"):
        order += not isinstance(value.tangent, ad.Zero) and jnp.issubdtype(value.dtype, jnp.inexact)
        value = value.primal
    return value, order


def equation_of(tracer: Any) -> tuple[Any, Sequence[Any]] | None:
    """The equation that made a value of a program being written down, and its operands (0.10.0 to 0.12.0).

    Returns:
      The equation, with `primitive`, `params` and `outvars`, and its operands as tracers; `None` for an argument of the
      program or a constant, of which `Tracer.full_lower` gives the value.
    """
    equation = tracer.parent
    return None if equation is None else (equation, equation.in_tracers)


def used_operands(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The operands that the results of an equation depend on, as far as that is seen.

    A call with a custom derivative may have operands that only its derivative uses (0.10.0 to 0.12.0 keep what it
    computes as `call_jaxpr`).
    """
    body = equation.params.get("call_jaxpr")
    inner = getattr(body, "jaxpr", None)
    if inner is None or len(inner.invars) != len(operands):
        return list(operands)
    used = partial_eval.dce_jaxpr(inner, [True] * len(inner.outvars))[1]
    return [x for x, is_used in zip(operands, used, strict=True) if is_used]


def without_unused(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """A jaxpr with some of its results, and none of the equations that only the others need (0.10.0 to 0.12.0).

    It has all arguments still.
    """
    return partial_eval.dce_jaxpr(jaxpr, list(wanted), instantiate=True)[0]


def keeps_constants_apart() -> bool:
    """Whether JAX hands a program's constants to its executable at every call (an option, off in 0.10.0 to 0.12.0).

    Otherwise they are part of the lowered program.
    """
    return bool(getattr(jax.config, "jax_use_simplified_jaxpr_constants", False))


def variable_of(tracer: Any) -> int:
    """The identity of the variable that a value of a program being written down is (0.10.0 to 0.12.0)."""
    return id(tracer.val)


def carry_out(equation: Any, operands: Sequence[Any], *, is_of_jaxpr: bool) -> Sequence[Any]:
    """The results of one equation, with its names and the line of its source (0.10.0 to 0.12.0).

    As `jax.core.eval_jaxpr` computes them, which takes whole jaxprs only.

    Args:
      equation: the equation.
      operands: its operands.
      is_of_jaxpr: whether it is of a jaxpr, whose names begin anew, and not of the program being written down.
    """
    with named_as(equation, is_of_jaxpr=is_of_jaxpr):
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
    return results if equation.primitive.multiple_results else [results]


@contextlib.contextmanager
def named_as(equation: Any, *, is_of_jaxpr: bool) -> Generator[None]:
    """Gives what is computed inside the names, the line of source, and the settings of an equation; see `carry_out`."""
    source = equation.source_info
    names = current_name_stack() + source.name_stack if is_of_jaxpr else source.name_stack
    with user_context(source.traceback, name_stack=names), equation.ctx.manager:
        yield


class _NoTraceback:
    """In the place of a traceback: JAX takes a new one for each operation then."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        return None


@contextlib.contextmanager
def own_lines() -> Generator[None]:
    """Operations inside come from their own lines of code, even in a custom derivative (0.10.0 to 0.12.0).

    JAX says that those of `fwd` and `bwd` come from where the function was called. Taking tracebacks costs time, so
    this is for a look at a program only.
    """
    with user_context(_NoTraceback()):  # type: ignore[arg-type]
        yield


def line_of(equation: Any) -> str:
    """The line of the user's code that an equation comes from, as "file:line (function)" (0.10.0 to 0.12.0)."""
    return summarize(equation.source_info)


def scan_sizes(equation: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many its carry (0.10.0 to 0.12.0).

    0.12.0 has them as a tree of its own instead of two numbers.
    """
    tree = equation.params.get("ft_in")
    if tree is None:
        return equation.params["num_consts"], equation.params["num_carry"]
    consts, carry, _ = tree.update(range(len(equation.invars))).unpack()
    return len(list(consts)), len(list(carry))


def while_sizes(equation: Any) -> tuple[int, int]:
    """How many operands of a while loop are constants of its condition, and how many of its body (0.10.0 to 0.12.0)."""
    return equation.params["cond_nconsts"], equation.params["body_nconsts"]


def jaxprs_of(equation: Any) -> list[Any]:
    """The jaxprs among the parameters of an equation, open and closed ones (0.10.0 to 0.12.0)."""
    leaves = jax.tree_util.tree_leaves(list(equation.params.values()), is_leaf=_is_jaxpr)
    return list(filter(_is_jaxpr, leaves))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def jit_options(equation: Any) -> dict[str, Any]:
    """What `jax.jit` was told of a function, to tell it so again of one that returns a pair (0.10.0 to 0.12.0).

    Donations are left out: in a program that is written down, what was donated may be read again, since JAX compiles
    it as a whole.

    Args:
      equation: an equation of `jax.jit`.

    Returns:
      Arguments of `jax.jit`, for a function of the equation's operands. Its first result is a tuple of the equation's
      results; of the second nothing is said.
    """
    params = equation.params

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


def is_plain_jit(equation: Any) -> bool:
    """Whether `jax.jit` was told nothing of where a function's arrays lie, and nothing of how to compile it."""
    params = equation.params
    told = [*params["in_shardings"], *params["out_shardings"], *params["in_layouts"], *params["out_layouts"]]
    is_placed = any(x is not None and type(x).__name__ != "UnspecifiedValue" for x in told)  # 0.10.0 to 0.12.0
    return not (is_placed or params["compiler_options_kvs"])


def platforms_of_branches(equation: Any) -> Sequence[tuple[str, ...] | None] | None:
    """For each branch of a `cond`, the platforms that it is for, `None` for all others (0.10.0 to 0.12.0).

    `None` for a `cond` that does not choose by the platform.
    """
    return equation.params.get("branches_platforms")


def manual_axes(equation: Any) -> frozenset[str]:
    """The mesh axes of a `shard_map` equation that are manual in its body (0.10.0, and under another name 0.12.0)."""
    params = equation.params
    return params["manual_axes"] if "manual_axes" in params else params["newly_manual_axes"]


def manual_axes_here() -> Sequence[str]:
    """The mesh axes that are manual here, as they are inside `shard_map` (0.10.0 to 0.12.0)."""
    return jax.sharding.get_abstract_mesh().manual_axes


def is_variable(atom: Any) -> bool:
    """Whether an operand or a result in a jaxpr is a variable, and not a literal (0.10.0 to 0.12.0)."""
    return not hasattr(atom, "val")


def open_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """A jaxpr without its constants, and those (0.10.0 to 0.12.0, where closed jaxprs are jaxprs too)."""
    consts = list(getattr(jaxpr, "consts", ()))
    return getattr(jaxpr, "jaxpr", jaxpr), consts


def varying_axes(aval: Any) -> frozenset[str]:
    """The manual mesh axes that a value varies over inside `shard_map(check_vma=True)`.

    0.10.0 to 0.12.0 keep them in `manual_axis_type`; the older `.vma` is gone at both ends.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def cotangent_sharding(aval: Any) -> Any:
    """How the cotangent of a value lies on explicit mesh axes (0.10.0 to 0.12.0).

    As the value does, but for axes that the value is reduced over, and its cotangent is not yet, or the other way.
    """
    return aval.to_ct_aval().sharding


def zeros_of(aval: Any) -> jax.Array:
    """Zeros of an abstract value, with its sharding and varying axes (0.10.0 to 0.12.0)."""
    return ad.zeros_like_aval(aval)


def memory_space(array: Any) -> Any:
    """Which `jax.memory.Space` an array, traced or not, or a variable of a jaxpr is in (0.10.0 to 0.12.0)."""
    aval: Any = array.aval if isinstance(array, Var) else jax.typeof(array)
    return aval.memory_space


def is_reverse_only(equation: Any) -> bool:
    """Whether an equation stands for the tangents of a `jax.custom_vjp`, which nothing can compute.

    Tracing `jax.jvp` of one leaves such an equation, and only running it raises (0.10.0 to 0.12.0).
    """
    return equation.primitive.name == "custom_lin"


def make_jaxpr(function: Callable[..., Any], *args: Any) -> Any:
    """The jaxpr of a function, with all that it consists of.

    With JAX_CUSTOM_VJP3 (0.12.0) a custom_vjp is one equation first, which is looked into by lowering.
    """
    return lowered_jaxpr(jax.make_jaxpr(function)(*args))


def lowered_jaxpr(jaxpr: Any) -> Any:
    """A jaxpr with all that it consists of, which has no custom derivatives then; see `make_jaxpr`."""
    lower = getattr(partial_eval, "lower_jaxpr2", None)
    return jaxpr if lower is None or not jaxpr.jaxpr.is_high else lower(jaxpr)


def opened(equation: Any) -> Any:
    """What an equation of JAX's coming checkpoint and custom derivatives computes, as a jaxpr; `None` for others.

    Those do not have one among their parameters (0.12.0).
    """
    if equation.primitive.name != "call_hi_primitive":
        return None
    return make_jaxpr(
        lambda *operands: equation.primitive.bind(*operands, **equation.params),
        *[zeros_of(operand.aval) for operand in equation.invars],
    )


# XLA's own names, not promised to stay: no optimization, and no fusing of loops on the CPU. 0.10.0 to 0.10.2 know both,
# 0.12.0 the first.
_QUICK: list[dict[str, Any]] = [
    {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False},
    {"xla_backend_optimization_level": 0},
    {},
]


def compile_quickly(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program that runs for less time than optimizing it takes: in a third of the usual time."""
    for options in list(_QUICK[:-1]):
        try:
            return lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError:  # an option that this XLA does not know
            with contextlib.suppress(ValueError):  # another thread may have removed it meanwhile
                _QUICK.remove(options)
    return lowered.compile()


def compile_as_written(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a program so that each operation is rounded to its dtype; XLA leaves that out between two otherwise."""
    try:
        return lowered.compile(compiler_options={"xla_allow_excess_precision": False})  # 0.10.0 and 0.12.0 know it
    except jax.errors.JaxRuntimeError:
        return lowered.compile()


def quick_key(seed: Any) -> jax.Array:
    """A random key whose numbers are good for nothing but to be told apart: a tenth of JAX's time to compile.

    `jax.extend.random` is not promised (0.10.0 and 0.12.0 have it).
    """
    return jax.random.key(seed, impl=_quick_generator())


@functools.cache
def _quick_generator() -> Any:
    from jax.extend.random import define_prng_impl

    def bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
        places = jax.lax.iota(np.uint32, math.prod(shape)).reshape(shape) + 1
        return (places * np.uint32(0x9E3779B1) + key[0] * np.uint32(0x85EBCA6B)).astype(f"uint{width}")

    def split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return bits(key, 32, (*shape, 1))

    def fold_in(key: jax.Array, data: int) -> jax.Array:
        return key + jnp.asarray(data, np.uint32)

    return define_prng_impl(
        key_shape=(1,),
        seed=lambda seed: seed.astype(np.uint32).reshape(1),
        split=split,
        random_bits=bits,
        fold_in=fold_in,
        name="jaxfn_quick",
        tag="quick",
    )
