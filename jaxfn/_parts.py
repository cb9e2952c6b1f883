"""One call on parts of arrays: `forward`, `backward` and `jvp`, partitioned by the sharding rule of the Function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax

from jaxfn._forward_pass import CallResults, CallSpec, Differentiation, ForwardPass, Residuals, run_forward
from jaxfn._jaxpr import needed_eqns
from jaxfn._observe import OBSERVATION, Observation
from jaxfn._partition import Compute, FactorAxes, Layout, is_partitioned, num_parts, partition, trace_whole
from jaxfn._sharding_rule import BoundRule, Factors
from jaxfn._tree import as_array, replace_at

RuleCall: TypeAlias = "Callable[[Differentiation, Sequence[Any], Sequence[Any]], Sequence[Any]]"


def is_call_partitioned(spec: CallSpec, arrays: Sequence[Any]) -> bool:
    """Whether a call of a Function with a sharding rule is partitioned."""
    return spec.axes is None and not spec.inputs.has_refs and is_partitioned(arrays)


def run_on_parts(
    spec: CallSpec,
    arrays: Sequence[Any],
    tracers: Sequence[Any],
    flags: tuple[bool, ...],
    has_hooks: bool = False,
    use_vmap: bool = True,
) -> tuple[ForwardPass, CallResults]:
    """Runs `forward` of a Function with a sharding rule, as `run_forward` does."""
    sharding_rule = spec.methods.sharding_rule
    if sharding_rule is None or not is_call_partitioned(spec, arrays):
        return run_forward(spec, arrays, tracers, flags, has_hooks, use_vmap)
    arrays = list(map(as_array, arrays))
    passes: list[ForwardPass] = []

    def compute(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
        forward_pass, results = run_forward(
            CallSpec(spec.methods, spec.inputs, axes), arrays, tracers, flags, has_hooks, use_vmap
        )
        passes.append(forward_pass)
        return [*results.outputs, *results.intermediates]

    jaxpr = trace_whole(compute, arrays)
    whole = passes[-1]
    rule = sharding_rule.bind(spec.name, spec.inputs, whole.input_avals, whole.output_avals)
    operands = [*rule.inputs, *_not_split(arrays[len(flags) :])]
    rule = rule._replace(intermediates=_factors_of_intermediates(rule, whole, compute, operands, arrays, jaxpr))
    names = [*rule.labels[len(flags) :], *(f"saved array {name}" for name in whole.intermediate_names())]
    layout = Layout(spec.name, operands, [*rule.outputs, *rule.intermediates], rule.reduced, rule.labels, names)
    values = partition(compute, layout, arrays)
    results = CallResults(values[: len(rule.outputs)], values[len(rule.outputs) :])
    avals = [list(map(jax.typeof, own)) for own in (arrays[: len(flags)], results.outputs)]
    return whole._replace(spec=spec, rule=rule, input_avals=avals[0], output_avals=avals[1]), results


def _not_split(arrays: Sequence[Any]) -> list[Factors]:
    """Returns the factors of captured values."""
    return [("",) * len(x.shape) for x in arrays]


def _factors_of_intermediates(
    rule: BoundRule, whole: ForwardPass, compute: Compute, operands: list[Factors], arrays: Sequence[Any], jaxpr: Any
) -> list[Factors]:
    """Returns the factors of each saved intermediate. Raises if one lacks a factor of which the rule says nothing."""
    count = len(rule.outputs)
    names, declared = whole.intermediate_names(), whole.saved.declared_factors()
    found: list[Factors] = []
    by_size: Sequence[Factors] = []
    if len(declared) < len(names):
        by_size = _follow_sizes(rule, compute, operands, arrays, jaxpr.out_avals)[count:]
    for i, (name, aval, var) in enumerate(
        zip(names, jaxpr.out_avals[count:], jaxpr.jaxpr.outvars[count:], strict=True)
    ):
        factors = rule.declared(declared[i], aval.shape, name) if i in declared else by_size[i]
        _, needed = needed_eqns(jaxpr.jaxpr, [var])
        used = [fs for x, fs in zip(jaxpr.jaxpr.invars, operands, strict=True) if x in needed]
        said = {*factors, *rule.reduced, *rule.manual}
        unsaid = [f for f in rule.factors() if f not in said and any(f in fs for fs in used)]
        if unsaid:
            raise ValueError(
                f"{rule.name}.forward saves an array, {name}, of shape {tuple(aval.shape)}, that depends on factor "
                f"{unsaid[0]!r} and has no dimension whose size follows that factor's, so that parts have different "
                f"ones. Save inputs or outputs instead, or what has that dimension (ctx.save_for_backward(..., "
                f"factors=...) says which one it is), or write {unsaid[0]!r} into need_replication_factors."
            )
        found.append(factors)
    return found


_PRIMES = 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37


def _follow_sizes(
    rule: BoundRule, compute: Compute, operands: list[Factors], arrays: Sequence[Any], avals: Sequence[Any]
) -> list[Factors]:
    """Returns the factors of each result: those by whose sizes its own grow, in a computation of larger arrays."""
    scale = dict(zip(rule.factors(), _PRIMES, strict=False))
    larger = [
        jax.ShapeDtypeStruct([n * scale.get(f, 1) for n, f in zip(x.shape, fs, strict=True)], x.dtype)
        for x, fs in zip(arrays, operands, strict=True)
    ]
    try:
        scaled = trace_whole(compute, larger).out_avals
    except Exception as error:
        raise ValueError(
            f"{rule.name}.forward cannot be traced with larger sizes of {', '.join(scale)}, to see which dimensions of "
            "the saved arrays follow them. Write ctx.save_for_backward(..., factors=...) for each saved array that is "
            "neither an input nor an output."
        ) from error
    factors = {number: factor for factor, number in scale.items()}
    return [
        tuple(factors.get(m // n, "") if n and m % n == 0 else "" for n, m in zip(x.shape, y.shape, strict=True))
        for x, y in zip(avals, scaled, strict=True)
    ]


def differentiate_on_parts(
    function: RuleCall,
    method: str,
    derivative: Differentiation,
    residuals: Sequence[Any],
    vectors: Sequence[Any],
) -> list[jax.Array | None]:
    """Calls a function of a derivative, residuals and cotangents or tangents on the part of each device.

    `method`, "backward" or "jvp", says what it takes and returns; `None` is zero.
    """
    forward_pass, rule = derivative.forward_pass, derivative.forward_pass.rule
    assert rule is not None
    restored: Residuals = jax.tree.unflatten(derivative.treedef, residuals[: derivative.treedef.num_leaves])
    if OBSERVATION.value in (Observation.RESIDUALS, Observation.VALUES):
        restored = derivative.label_saved(method, restored)
    saved = restored.saved if derivative.packed is None else derivative.packed.unpack(restored.saved)
    leaves, treedef = jax.tree.flatten(Residuals(list(saved), restored.captured, []))
    present = [i for i, x in enumerate(vectors) if x is not None]
    returned: list[int] = []
    is_backward, methods = method == "backward", forward_pass.spec.methods
    taken, given = (rule.outputs, rule.inputs) if is_backward else (rule.inputs, rule.outputs)
    num_inputs = len(rule.inputs)

    def compute(axes: FactorAxes, arrays: Sequence[Any]) -> list[Any]:
        own = list(arrays[len(leaves) :])
        if is_backward and not methods.has_backward:
            # What `jvp` makes equal on all parts is one result: each part has its share in the cotangent.
            shares = [num_parts(axes, rule.manual.difference(taken[i])) for i in present]
            own = [x / n if n > 1 else x for x, n in zip(own, shares, strict=True)]
        on_part = _derivative_on_part(derivative, axes, restored.captured, treedef)
        results = function(on_part, arrays[: len(leaves)], replace_at(present, [None] * len(vectors), own))
        returned[:] = [i for i, x in enumerate(results) if x is not None]
        return [results[i] for i in returned]

    arrays = list(map(as_array, [*leaves, *(vectors[i] for i in present)]))
    if not arrays:
        return [None] * len(given)
    trace_whole(compute, arrays)
    sources = [rule.of(source.kind, source.idx) for source in forward_pass.saved.sources]
    names = rule.labels[:num_inputs] if is_backward else rule.labels[num_inputs:]
    layout = Layout(
        f"{rule.name}.{method}",
        [*sources, *_not_split(restored.captured), *(taken[i] for i in present)],
        [given[i] for i in returned],
        # The transpose of `backward` sums too, over all parts that have the same output.
        rule.reduced if methods.has_jvp and not is_backward else rule.factors(),
        result_labels=[f"{'gradient' if is_backward else 'tangent'} of {names[i]}" for i in returned],
        like=list(zip(rule.inputs, forward_pass.input_avals, strict=True)),
    )
    return replace_at(returned, [None] * len(given), partition(compute, layout, arrays) if returned else [])


def _derivative_on_part(
    derivative: Differentiation, axes: FactorAxes, captured: Sequence[Any], treedef: Any
) -> Differentiation:
    """Returns a derivative of `forward` on a part of the inputs."""
    whole, passes = derivative.forward_pass, list[ForwardPass]()
    assert whole.rule is not None
    spec, has_hooks = CallSpec(whole.spec.methods, whole.spec.inputs, axes), derivative.packed is not None

    def forward(arrays: Sequence[Any]) -> None:
        passes.append(run_forward(spec, arrays, derivative.tracers, whole.seen_flags, has_hooks)[0])

    inputs = [
        jax.ShapeDtypeStruct([n // num_parts(axes, [f]) for f, n in zip(fs, aval.shape, strict=True)], aval.dtype)
        for fs, aval in zip(whole.rule.inputs, whole.input_avals, strict=True)
    ]
    jax.eval_shape(forward, [*inputs, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in captured)])
    return Differentiation(passes[-1], derivative.tracers, derivative.flags, derivative.perturbed, None, treedef)
