"""Everything that uses unpromised parts of JAX, each with the versions on which it was checked.

No module of JAX is re-exported, and nothing is imported from `jax._src`. `tests/core/test_workarounds.py` reproduces
each defect of JAX that is worked around, and fails once JAX has fixed it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.extend.core import Primitive as Primitive
from jax.extend.core.primitives import add_jaxvals_p as add_jaxvals_p
from jax.extend.core.primitives import call_p as call_p
from jax.extend.core.primitives import closed_call_p as closed_call_p
from jax.extend.core.primitives import custom_jvp_call_p as custom_jvp_call_p
from jax.extend.core.primitives import custom_lin_p as custom_lin_p
from jax.extend.core.primitives import custom_vjp_call_p as custom_vjp_call_p
from jax.extend.core.primitives import jit_p as jit_p
from jax.extend.core.primitives import name_p as name_p
from jax.extend.core.primitives import random_bits_p as random_bits_p
from jax.extend.core.primitives import remat_p as remat_p
from jax.extend.core.primitives import threefry2x32_p as threefry2x32_p
from jax.extend.core.primitives import triangular_solve_p as triangular_solve_p
from jax.extend.core.primitives import tridiagonal_solve_p as tridiagonal_solve_p
from jax.extend.source_info_util import current_name_stack, register_exclusion, summarize, user_context
from jax.interpreters import ad, batching, mlir, partial_eval

# The lines of operations are those of the user's code, not of jaxfn's (0.10.0 to 0.12.0).
register_exclusion(os.path.dirname(__file__) + os.sep)


# Primitives


class VmapAxis:
    """One use of `jax.vmap`, as a batching rule sees it (0.10.0 to 0.12.0)."""

    def __init__(self, axis: Any) -> None:
        self._axis = axis
        self.size: int = axis.size

    @property
    def is_named(self) -> bool:
        """Whether collectives may use the axis by a name; an unnamed one has a plain object for its name."""
        return type(self._axis.name) is not object

    def to_axis_0(self, array: Any, dim: int | None) -> Any:
        """Moves the batch of an array to axis 0, or repeats an array that has none."""
        return batching.bdim_at_front(array, dim, self.size, self._axis.explicit_mesh_axis)

    def batched_aval(self, aval: Any) -> Any:
        """Returns a type with the batch at axis 0."""
        shape = (self.size, *aval.shape)
        if aval.sharding.mesh.empty:
            return aval.update(shape=shape)
        spec = jax.sharding.PartitionSpec(self._axis.explicit_mesh_axis, *aval.sharding.spec)
        return aval.update(shape=shape, sharding=aval.sharding.update(spec=spec))

    def vmap(self, function: Callable[..., Any], in_axes: Sequence[Any]) -> Callable[..., Any]:
        """Maps a function over this axis, with its name; results are batched at axis 0.

        If no argument is batched, the function is evaluated once with the name bound, and no result may be batched.
        """
        axis = self._axis
        is_batched = any(dim is not None for dim in jax.tree_util.tree_leaves(in_axes, is_leaf=lambda x: x is None))

        def with_dummy(_: Any, *args: Any) -> Any:
            return function(*args)

        mapped = jax.vmap(
            with_dummy,
            (0, *in_axes),
            0 if is_batched else None,
            axis_name=axis.name,
            axis_size=axis.size,
            spmd_axis_name=axis.spmd_name,
        )
        return functools.partial(mapped, None if is_batched else np.zeros(self.size, bool))


def new_owner() -> Jaxpr:
    """Returns an empty jaxpr, a param of an eqn with other params that JAX would not free with it (0.10.0 to 0.12.0).

    JAX caches the types of an eqn's results by its params, and drops an entry early only if a jaxpr among these is
    freed.
    """
    return copy.copy(_NO_EQNS)


_NO_EQNS = jax.make_jaxpr(lambda: ())().jaxpr


def make_primitive(
    name: str,
    *,
    evaluate: Callable[..., list[Any]],
    jvp: Callable[..., tuple[Sequence[Any], Sequence[Any]]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    avals: Callable[..., Sequence[Any]] | None = None,
    effects: Callable[..., Collection[Any]] | None = None,
    transpose: Callable[..., Sequence[Any]] | None = None,
    on_transpose_error: Callable[[Exception], None] | None = None,
    runs_user_code: bool = False,
) -> Primitive:
    """Makes a primitive with several results and the rules that jaxfn's own primitives need (0.10.0 to 0.12.0).

    In these rules a tangent or cotangent that is symbolically zero is `None`, as everywhere in jaxfn.

    Args:
      name: What jaxprs call it.
      evaluate: Returns the results. An identity also works on the values that lowering handles.
      jvp: `jvp(primals, tangents, **params)` returns the results and a tangent for each.
      batch: `batch(axis, operands, dims, **params)` returns the results and the axis of the batch in each. Called only
        where an operand is batched, or where collectives may use the axis by its name.
      avals: Returns the types of the results. Default: `evaluate`, for identities.
      effects: `effects(**params)` returns the effects of `evaluate`. Default: none.
      transpose: `transpose(cotangents, *operands, **params)`, with `None` for the linear operands, returns a cotangent
        for each operand.
      on_transpose_error: Called with an exception that `transpose` raises.
      runs_user_code: Whether `evaluate` is traced to be lowered, and may use the names of vmap axes. Otherwise it is an
        identity.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(evaluate)

    def abstract_eval(*operands: Any, **params: Any) -> tuple[Sequence[Any], set[Any]]:
        return (avals or evaluate)(*operands, **params), set(effects(**params) if effects else ())

    primitive.def_effectful_abstract_eval(abstract_eval)

    def lower(_ctx: Any, *operands: Any, **params: Any) -> list[Any]:
        return evaluate(*operands, **params)

    # Not cacheable: most eqns have different params, so that looking one up costs more than lowering it.
    lowering = mlir.lower_fun(evaluate, multiple_results=True) if runs_user_code else lower
    mlir.register_lowering(primitive, lowering, cacheable=False)

    def jvp_rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Sequence[Any], list[Any]]:
        results, result_tangents = jvp(primals, list(map(_nonzero, tangents)), **params)
        pairs = zip(results, result_tangents, strict=True)
        return results, [ad.Zero(jax.typeof(x).to_tangent_aval()) if t is None else t for x, t in pairs]

    ad.primitive_jvps[primitive] = jvp_rule

    def batch_rule(axis: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        use = VmapAxis(axis)
        # JAX calls the batching rule even when no operand is batched.
        if all(dim is None for dim in dims) and not (runs_user_code and use.is_named):
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        return batch(use, operands, dims, **params)

    batching.fancy_primitive_batchers[primitive] = batch_rule

    if transpose is not None:

        def transpose_rule(cotangents: Sequence[Any], *operands: Any, **params: Any) -> list[Any]:
            cts = [None if isinstance(ct, ad.Zero) else ct for ct in cotangents]
            known = [None if ad.is_undefined_primal(x) else x for x in operands]
            returned: Sequence[Any] = [None] * len(operands)
            if any(ct is not None for ct in cts):
                try:
                    returned = transpose(cts, *known, **params)
                except Exception as error:
                    if on_transpose_error is not None:
                        on_transpose_error(error)
                    raise
            pairs = zip(operands, returned, strict=True)
            return [
                (ad.Zero(x.aval.to_ct_aval()) if ct is None else ct) if ad.is_undefined_primal(x) else None
                for x, ct in pairs
            ]

        ad.primitive_transposes[primitive] = transpose_rule

    return primitive


def make_identity(name: str, batch: Callable[..., Any]) -> Primitive:
    """Makes a primitive that returns its first `num_arrays` operands, by default one, with their derivatives alone."""

    def evaluate(*operands: Any, num_arrays: int = 1, **_: Any) -> list[Any]:
        return list(operands[:num_arrays])

    def jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], Sequence[Any]]:
        results = primitive.bind(*primals, **params)
        return results, tangents[: len(results)]

    def transpose(cotangents: Sequence[Any], *operands: Any, **_: Any) -> list[Any]:
        # Where reverse mode transposes a `jvp`, the other operands may be linear too; they have no derivative.
        return [*cotangents, *[None] * (len(operands) - len(cotangents))]

    primitive = make_primitive(name, evaluate=evaluate, jvp=jvp, batch=batch, transpose=transpose)
    return primitive


@functools.cache
def callback_effects(ordered: bool) -> frozenset[Any]:
    """Returns the effects of `jax.debug.callback` (0.10.0 to 0.12.0). Their types are not public."""
    return frozenset(jax.make_jaxpr(lambda: jax.debug.callback(lambda: None, ordered=ordered))().effects)


def _nonzero(tangent: Any) -> Any:
    """Returns `None` for a tangent that is symbolically zero, or of an array that has no derivative."""
    return None if isinstance(tangent, ad.Zero) or getattr(tangent, "dtype", None) == jax.float0 else tangent


def has_transpose(primitive: Primitive) -> bool:
    """Whether JAX has a transposition rule for a primitive (0.10.0 to 0.12.0).

    The rules of primitives that accumulate in place, such as slices and `scan`, are in a table that is not public.
    """
    return primitive in ad.primitive_transposes


def zeros_of(aval: Any) -> jax.Array:
    """Returns zeros of an abstract value, with its sharding and varying axes (0.10.0 to 0.12.0)."""
    return ad.zeros_like_aval(aval)


def shape_struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns what `jax.make_jaxpr` and `jax.linear_transpose` take in place of an array of a type (0.10.0 to 0.12.0).

    Zeros would be computed, and outside `shard_map` they cannot have the type of an array inside.
    """
    sharding = None if aval.sharding.mesh.empty else aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, manual_axis_type=aval.manual_axis_type)


def dce_jaxpr(jaxpr: Any, used_outputs: Sequence[bool]) -> Any:
    """Returns a jaxpr with some of its outputs and all of its inputs, without dead code (0.10.0 to 0.12.0)."""
    return partial_eval.dce_jaxpr(jaxpr, list(used_outputs), instantiate=True)[0]


class _NoTraceback:
    """A substitute for a traceback that makes JAX take a new one for each operation."""

    def __bool__(self) -> bool:
        return False

    def as_python_traceback(self) -> None:
        return None


@contextlib.contextmanager
def record_source_lines() -> Generator[None]:
    """Records for operations inside their own lines of code, even in a custom derivative (0.10.0 to 0.12.0).

    JAX records for those of `fwd` and `bwd` the line of the call. Taking tracebacks costs time, so this is only for the
    inspection of a program.
    """
    with user_context(_NoTraceback()):  # type: ignore[arg-type]
        yield


def eqn_source_line(eqn: Any) -> str:
    """Returns the line of user code that an eqn comes from, as "file:line (function)" (0.10.0 to 0.12.0)."""
    return summarize(eqn.source_info)


def scan_sizes(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a scan eqn (0.10.0 to 0.12.0).

    0.12.0 has them as a tree instead of two numbers.
    """
    tree = eqn.params.get("ft_in")
    if tree is None:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = tree.update(range(len(eqn.invars))).unpack()
    return len(list(consts)), len(list(carry))


def varying_axes(aval: Any) -> frozenset[str]:
    """Returns the manual mesh axes that a value varies over inside `shard_map(check_vma=True)`.

    They are in `manual_axis_type` (0.10.0 to 0.12.0), which has replaced `.vma`.
    """
    manual = getattr(aval, "manual_axis_type", None)
    return frozenset() if manual is None else manual.varying


def make_jaxpr(function: Callable[..., Any], *args: Any) -> Any:
    """Returns the jaxpr of a function, with the jaxprs of all its eqns.

    With JAX_CUSTOM_VJP3 (0.12.0) a custom_vjp is one eqn at first, and only lowering shows the jaxpr inside.
    """
    return lower_jaxpr(jax.make_jaxpr(function)(*args))


def lower_jaxpr(jaxpr: Any) -> Any:
    """Returns a jaxpr with the jaxprs of all its eqns; lowering drops custom derivatives. See `make_jaxpr`."""
    lower = getattr(partial_eval, "lower_jaxpr2", None)
    return jaxpr if lower is None or not jaxpr.jaxpr.is_high else lower(jaxpr)


def inner_jaxpr(eqn: Any) -> Any:
    """Returns what an eqn "call_hi_primitive" computes, of JAX's experimental checkpoint or custom derivatives.

    These eqns have no jaxpr among their params (0.12.0).
    """
    return make_jaxpr(
        lambda *operands: eqn.primitive.bind(*operands, **eqn.params),
        *[zeros_of(operand.aval) for operand in eqn.invars],
    )


# What tools alone use


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


def is_plain_jit(eqn: Any) -> bool:
    """Whether a `jit` eqn has no shardings, layouts or compiler options."""
    params = eqn.params
    options = [*params["in_shardings"], *params["out_shardings"], *params["in_layouts"], *params["out_layouts"]]
    is_placed = any(x is not None and type(x).__name__ != "UnspecifiedValue" for x in options)  # 0.10.0 to 0.12.0
    return not (is_placed or params["compiler_options_kvs"])


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
