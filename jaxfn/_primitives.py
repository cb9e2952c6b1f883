"""The primitives by which jaxfn decides what JAX's transformations see of a Function.

    inputs --stop--> forward --> outputs --attach(outputs, res, inputs)--> the caller's outputs

`stop` has no derivative, so that nothing differentiates the operations of `forward`, which may have none (a kernel).
`attach` gives the outputs the Function's own rule. Both are identities and lower to nothing. The rule is called where
something differentiates, and attaches itself again for an enclosing differentiation, so that derivatives of all orders
work in one way. It returns a `linear_map`, which forward mode evaluates and reverse mode transposes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxfn._compat import PartialEvaluation, VmapAxis, make_primitive, without_tangent
from jaxfn._diagnostics import hide_own_frames
from jaxfn._jaxpr import identity_primitives, subjaxpr_rules, traced_impl
from jaxfn._mesh_types import pcast_like
from jaxfn._tree import as_array, is_inexact


class DeferredError:
    """An error that is raised where a derivative is used, not where it is only computed and dropped.

    Args:
      error: The class of the exception.
      message: Its text, or what returns it.
    """

    def __init__(self, error: type[Exception], message: str | Callable[[], str]) -> None:
        self._error = error
        self._message = message

    def throw(self) -> NoReturn:
        """Raises the error."""
        raise self._error(self._message if isinstance(self._message, str) else self._message())


def error_tangent(aval: Any, tangents: Sequence[Any], error: DeferredError) -> Any:
    """Returns a tangent that depends on others and raises where it is evaluated or transposed.

    Reverse mode drops it where nothing uses it, as under `stop_gradient`.

    Args:
      aval: The type of the tangent.
      tangents: The tangents that it depends on, at least one.
      error: The error that it raises.
    """
    return _error_tangent_p.bind(*tangents, aval=aval, error=error)[0]


def _evaluate_error(*_: Any, aval: Any, error: DeferredError) -> list[Any]:
    error.throw()


def _error_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, aval: Any, error: DeferredError) -> Any:
    nonzero = [t for t in tangents if t is not None]
    return [error_tangent(aval, primals, error)], [error_tangent(aval, nonzero, error)]


def _batch_error(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, aval: Any, error: DeferredError
) -> Any:
    return [error_tangent(axis.batched_aval(aval), operands, error)], [0]


def _transpose_error(cotangents: Sequence[Any], *operands: Any, aval: Any, error: DeferredError) -> list[Any]:
    error.throw()


def _error_avals(*_: Any, aval: Any, error: DeferredError) -> list[Any]:
    return [aval]


_error_tangent_p = make_primitive(
    "error_tangent",
    evaluate=_evaluate_error,
    avals=_error_avals,
    jvp=_error_jvp,
    batch=_batch_error,
    transpose=_transpose_error,
    lower_as_function=True,
)


def stop(arrays: Sequence[Any]) -> list[Any]:
    """Returns the arrays without their derivative: `jax.lax.stop_gradient` in one eqn.

    Concrete ones are returned unchanged.
    """
    values = [without_tangent(x) for x in arrays]
    return stop_p.bind(*values) if any(isinstance(x, Tracer) for x in values) else values


def _evaluate_stop(*operands: Any) -> list[Any]:
    return list(operands)


def _stop_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[None]]:
    return stop_p.bind(*primals), [None] * len(primals)  # again, for enclosing differentiations


def _linearize_stop(
    primals: Sequence[Any], perturbed: Sequence[bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[None]]]:
    return stop_p.bind(*primals), lambda tangents: [None] * len(tangents)


def _batch_stop(axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
    return stop_p.bind(*operands), dims


def _transpose_stop(cotangents: Sequence[Any], *operands: Any) -> Sequence[Any]:
    return cotangents


def _drop_from_stop(used: Sequence[bool], num_operands: int) -> tuple[Sequence[bool], Sequence[bool], dict[str, Any]]:
    return used, used, {}


def _stop_partially(use: PartialEvaluation, operands: Sequence[Any]) -> list[Any]:
    """Binds the operands that have a value apart from the others, so that results computed from them alone have one."""
    results = list(operands)
    for has_value in (True, False):
        indices = [i for i, x in enumerate(operands) if use.has_value(x) == has_value]
        for i, x in zip(indices, use.bind([operands[i] for i in indices]) if indices else (), strict=True):
            results[i] = x
    return results


stop_p = make_primitive(
    "stop",
    evaluate=_evaluate_stop,
    jvp=_stop_jvp,
    linearize=_linearize_stop,
    batch=_batch_stop,
    transpose=_transpose_stop,
    drop_results=_drop_from_stop,
    evaluate_partially=_stop_partially,
)


class Rule:
    """The derivative of arrays with respect to the inputs from which they were computed."""

    def __call__(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the outputs, attached for an enclosing differentiation, and a tangent for each, `None` for zero.

        Args:
          outputs: The arrays.
          res: The residuals of the rule other than outputs and inputs.
          inputs: The arrays from which the outputs were computed.
          tangents: One for each input, `None` for zero.
        """
        raise NotImplementedError

    def transpose(
        self, cotangents: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any]
    ) -> Sequence[jax.Array | None]:
        """Returns a cotangent for each input where the outputs are linear in them, for `jax.linear_transpose`.

        Args:
          cotangents: One for each output, `None` for zero.
          res: As above, `None` for those that depend on the inputs.
          inputs: `None` for those without a value, with respect to which JAX transposes.
        """
        raise NotImplementedError

    @property
    def is_transposable(self) -> bool:
        """Whether `transpose` may be called."""
        return False

    @property
    def saves_inputs(self) -> bool:
        """Whether the inputs are residuals anyway."""
        return False

    def saves_outputs(self, output_avals: Sequence[Any], res_avals: Sequence[Any], input_avals: Sequence[Any]) -> bool:
        """Whether `jax.checkpoint` must save the outputs instead of computing them again."""
        return False

    def without_outputs(self, used: Sequence[bool]) -> tuple[Rule, Sequence[bool]]:
        """Returns the rule without the unused outputs, and whether each output stays because it is used or needed."""
        return self, [True] * len(used)


class LinearizingRule(Rule):
    """A rule whose tangents are one linear map of the inputs' tangents."""

    def linearize(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], perturbed: Sequence[bool]
    ) -> tuple[Sequence[Any], LinearMap, Sequence[Any]]:
        """Returns the outputs, attached for an enclosing differentiation, the linear map, and its residuals.

        Args:
          outputs, res, inputs: As above.
          perturbed: Which inputs have a tangent.
        """
        raise NotImplementedError

    def __call__(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        perturbed = [t is not None for t in tangents]
        attached, linear_map, residuals = self.linearize(outputs, res, inputs, perturbed)
        return attached, bind_linear_map(linear_map, residuals, list(compress(tangents, perturbed)))


def attach(
    outputs: Sequence[Any],
    res: Sequence[Any],
    inputs: Sequence[Any],
    rule: Rule | DeferredError,
    captured: DeferredError | None = None,
) -> list[Any]:
    """Returns the outputs with the derivative of `rule` with respect to the inputs.

    Args:
      outputs: Arrays of floating or complex dtype. A derivative that they have already can only be with respect to
        values that `forward` captured.
      res: The residuals of the rule other than outputs and inputs.
      inputs: The arrays with respect to which the rule differentiates.
      rule: The derivative, or the error if there is none.
      captured: Raised where the derivative that `outputs` have already is used. `None`: it is added.
    """
    return attach_p.bind(*outputs, *res, *inputs, spec=_AttachSpec(rule, len(outputs), len(res), captured))


@dataclass(frozen=True, eq=False)
class _AttachSpec:
    """The params of one `attach` eqn; compared by identity, so that JAX hashes it fast."""

    rule: Rule | DeferredError
    num_outs: int
    num_res: int
    captured: DeferredError | None

    def split(self, operands: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """Splits the operands into outputs, residuals and inputs."""
        first_input = self.num_outs + self.num_res
        return operands[: self.num_outs], operands[self.num_outs : first_input], operands[first_input:]


def _evaluate_attach(*operands: Any, spec: _AttachSpec) -> list[Any]:
    return list(operands[: spec.num_outs])


def _attach_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, spec: _AttachSpec
) -> tuple[Sequence[Any], Sequence[Any]]:
    rule, captured = spec.rule, spec.captured
    outputs, res, inputs = spec.split(primals)
    own, _, input_tangents = spec.split(tangents)
    input_tangents = [
        t if is_inexact(jax.typeof(x).dtype) else None for x, t in zip(inputs, input_tangents, strict=True)
    ]
    nonzero = [t for t in input_tangents if t is not None]
    if nonzero and not isinstance(rule, DeferredError):
        attached, by_rule = rule(outputs, res, inputs, input_tangents)
    else:
        attached = attach_p.bind(*primals, spec=spec)
        by_rule = [None] * spec.num_outs
        if nonzero and isinstance(rule, DeferredError):
            by_rule = [_error_of(x, nonzero, rule) for x in outputs]
    if captured is not None:
        own = [None if t is None else _error_of(x, [t], captured) for x, t in zip(outputs, own, strict=True)]
    return attached, list(map(_sum, by_rule, own))


def _linearize_attach(
    primals: Sequence[Any], perturbed: Sequence[bool], *, spec: _AttachSpec
) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Sequence[Any]]] | None:
    """Returns the outputs, and the function that gives their tangents; `None` in cases that `_attach_jvp` handles."""
    outputs, res, inputs = spec.split(primals)
    own, _, flags = spec.split(perturbed)
    flags = [flag and is_inexact(jax.typeof(x).dtype) for x, flag in zip(inputs, flags, strict=True)]
    if not isinstance(spec.rule, LinearizingRule) or any(own) or not any(flags):
        return None
    attached, linear_map, residuals = spec.rule.linearize(outputs, res, inputs, flags)

    def push(tangents: Sequence[Any]) -> list[Any]:
        return bind_linear_map(linear_map, residuals, list(compress(spec.split(tangents)[2], flags)))

    return attached, push


def _error_of(primal: Any, tangents: Sequence[Any], error: DeferredError) -> Any:
    aval = jax.typeof(primal).to_tangent_aval()
    return error_tangent(aval, tangents, error) if is_inexact(aval.dtype) else None


def _sum(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else a + b


class _BatchedRule(Rule):
    """A rule over a vmap axis: all outputs are batched at axis 0, or none is; residuals and inputs at any axis."""

    def __init__(
        self,
        rule: Rule,
        axis: VmapAxis,
        out_axis: int | None,
        res_dims: list[int | None],
        input_dims: list[int | None],
    ) -> None:
        self._rule = rule
        self._axis = axis
        self._out_axis = out_axis
        self._res_dims = res_dims
        self._input_dims = input_dims

    def __call__(
        self, outputs: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any], tangents: Sequence[Any]
    ) -> tuple[Sequence[Any], Sequence[Any]]:
        def rule(outputs: Any, res: Any, inputs: Any, tangents: Any) -> Any:
            attached, pushed = self._rule(outputs, res, inputs, tangents)
            return list(attached), list(pushed)

        in_axes = (self._out_axis, self._res_dims, self._input_dims, _where_present(tangents, self._input_dims))
        return self._axis.vmap(rule, in_axes)(list(outputs), list(res), list(inputs), list(tangents))

    def transpose(
        self, cotangents: Sequence[Any], res: Sequence[Any], inputs: Sequence[Any]
    ) -> Sequence[jax.Array | None]:
        def transpose(cotangents: Any, res: Any, inputs: Any) -> list[Any]:
            return list(self._rule.transpose(cotangents, res, inputs))

        cotangent_dims = _where_present(cotangents, [self._out_axis] * len(cotangents))
        in_axes = (
            cotangent_dims,
            _where_present(res, self._res_dims),
            _where_present(inputs, self._input_dims),
        )
        pulled = self._axis.vmap(transpose, in_axes)(list(cotangents), list(res), list(inputs))
        return [
            ct if ct is None or self._out_axis is None else ct.sum(0) if dim is None else jnp.moveaxis(ct, 0, dim)
            for ct, dim in zip(pulled, self._input_dims, strict=True)
        ]

    @property
    def is_transposable(self) -> bool:
        return self._rule.is_transposable

    @property
    def saves_inputs(self) -> bool:
        return self._rule.saves_inputs

    def saves_outputs(self, output_avals: Sequence[Any], res_avals: Sequence[Any], input_avals: Sequence[Any]) -> bool:
        avals = (
            _without_batch(output_avals, [self._out_axis] * len(output_avals)),
            _without_batch(res_avals, self._res_dims),
            _without_batch(input_avals, self._input_dims),
        )
        answers: list[bool] = []
        self._axis.vmap(lambda: answers.append(self._rule.saves_outputs(*avals)), ())()  # binds the name of the axis
        return answers[0]

    def without_outputs(self, used: Sequence[bool]) -> tuple[Rule, Sequence[bool]]:
        rule, stay = self._rule.without_outputs(used)
        return _BatchedRule(rule, self._axis, self._out_axis, self._res_dims, self._input_dims), stay


def _where_present(values: Sequence[Any], dims: Sequence[int | None]) -> list[int | None]:
    return [None if x is None else dim for x, dim in zip(values, dims, strict=True)]


def _without_batch(avals: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
    return [
        aval if dim is None else aval.update(shape=(*aval.shape[:dim], *aval.shape[dim + 1 :]))
        for aval, dim in zip(avals, dims, strict=True)
    ]


def _batch_attach(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, spec: _AttachSpec
) -> tuple[list[Any], list[int | None]]:
    """Batches all outputs if any operand is batched.

    # Note: why all of them

    JAX sums the cotangent of an unbatched output over the batch before it calls a rule, so that per-element gradients
    would be lost. And if a program is batched before it is differentiated, which outputs are batched must not depend on
    whether it is differentiated.
    """
    outputs, res, inputs = spec.split(operands)
    output_dims, res_dims, input_dims = spec.split(dims)
    out_axis = None if all(d is None for d in dims) else 0
    if out_axis == 0:
        outputs = [axis.to_axis_0(x, d) for x, d in zip(outputs, output_dims, strict=True)]
    rule = spec.rule
    if not isinstance(rule, DeferredError):
        rule = _BatchedRule(rule, axis, out_axis, list(res_dims), list(input_dims))
    return attach(outputs, res, inputs, rule, spec.captured), [out_axis] * spec.num_outs


def _transpose_attach(cotangents: Sequence[Any], *operands: Any, spec: _AttachSpec) -> list[Any]:
    """Transposes the rule. The outputs, and so the operations of `forward`, get a cotangent only if it is an error."""
    _, res, inputs = spec.split(operands)
    if isinstance(spec.rule, DeferredError):
        if any(x is None for x in inputs):
            spec.rule.throw()
        nonzero = [i for i, ct in enumerate(cotangents) if ct is not None]
        guarded = attach([cotangents[i] for i in nonzero], (), inputs, spec.rule)
        pulled = dict(zip(nonzero, guarded, strict=True))
        return [pulled.get(i) for i in range(spec.num_outs)] + [None] * (spec.num_res + len(inputs))
    return [None] * (spec.num_outs + spec.num_res) + list(spec.rule.transpose(cotangents, res, inputs))


def _attach_partially(use: PartialEvaluation, operands: Sequence[Any], *, spec: _AttachSpec) -> list[Any]:
    """Encloses the operations of `forward` in one eqn, since JAX may be unable to transpose them.

    No cotangent reaches that eqn: `_transpose_attach` transposes the rule instead.
    """
    outputs, res, inputs = spec.split(operands)
    if isinstance(spec.rule, Rule) and spec.rule.is_transposable and not all(map(use.has_value, inputs)):
        operands = [*use.enclose([*outputs, *res], after=stop_p), *inputs]
    return use.bind(operands, spec=spec)


def _partial_eval_attach(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    """Lets `jax.checkpoint` save an array that its policy saves inside `forward` in attached form.

    Computing this identity again would save the inputs as well, although the saved array replaces them, unless the rule
    saves them anyway. JAX has already asked the policy about the operation that computed the array.
    """
    spec: _AttachSpec = eqn.params["spec"]
    rule, num_outs = spec.rule, spec.num_outs
    unavailable = [v for v, is_available in zip(eqn.invars, available_in, strict=True) if not is_available]
    if any(unknowns_in):
        return None, eqn, [True] * num_outs, [True] * num_outs, unavailable
    saves_inputs = False
    if isinstance(rule, Rule):
        if rule.saves_outputs(*spec.split([v.aval for v in eqn.invars])):
            return eqn, None, [False] * num_outs, [False] * num_outs, []
        saves_inputs = rule.saves_inputs
    available_outs, _, available_inputs = spec.split(available_in)
    if all(available_outs) or (saves_inputs and all(available_inputs)):
        return eqn, eqn, [False] * num_outs, [True] * num_outs, unavailable
    return eqn, None, [False] * num_outs, [False] * num_outs, []


def _drop_from_attach(
    used: Sequence[bool], num_operands: int, *, spec: _AttachSpec
) -> tuple[Sequence[bool], Sequence[bool], dict[str, Any]]:
    rule, stay = (spec.rule, used) if isinstance(spec.rule, DeferredError) else spec.rule.without_outputs(used)
    others = [True] * (num_operands - spec.num_outs)
    return stay, [*stay, *others], {"spec": _AttachSpec(rule, sum(stay), spec.num_res, spec.captured)}


attach_p = make_primitive(
    "attach",
    evaluate=_evaluate_attach,
    jvp=_attach_jvp,
    linearize=_linearize_attach,
    batch=_batch_attach,
    transpose=_transpose_attach,
    may_use_axis_names=True,
    drop_results=_drop_from_attach,
    evaluate_partially=_attach_partially,
    partial_eval_in_checkpoint=_partial_eval_attach,
)


class LinearMap:
    """A linear function of tangents that depends on residuals, and its transpose."""

    @property
    def avals(self) -> Sequence[Any]:
        """The types of its results."""
        raise NotImplementedError

    @property
    def is_reverse_only(self) -> bool:
        """Whether `apply` raises."""
        return False

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Returns tangents of the outputs for tangents of the inputs."""
        raise NotImplementedError

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        """Returns cotangents of the inputs for cotangents of the outputs; `None` is zero."""
        raise NotImplementedError


class _BatchedLinearMap(LinearMap):
    """A linear map over a vmap axis: all tangents are batched at axis 0, or none is; residuals at any axis."""

    def __init__(
        self, linear_map: LinearMap, axis: VmapAxis, residual_dims: Sequence[int | None], out_axis: int | None
    ) -> None:
        self._linear_map = linear_map
        self._axis = axis
        self._in_axes = (list(residual_dims), out_axis)

    @property
    def avals(self) -> Sequence[Any]:
        avals = self._linear_map.avals
        return avals if self._in_axes[1] is None else list(map(self._axis.batched_aval, avals))

    @property
    def is_reverse_only(self) -> bool:
        return self._linear_map.is_reverse_only

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return self._axis.vmap(self._linear_map.apply, self._in_axes)(list(residuals), list(tangents))

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        return self._axis.vmap(self._linear_map.transpose, self._in_axes)(list(residuals), list(cotangents))


def bind_linear_map(linear_map: LinearMap, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """Applies a linear map to tangents, as one eqn that JAX may transpose."""
    return linear_map_p.bind(*residuals, *tangents, linear_map=linear_map, num_res=len(residuals))


def _evaluate_linear_map(*operands: Any, linear_map: LinearMap, num_res: int) -> list[Any]:
    arrays = [as_array(x) for x in operands]  # scalars may have become literals
    results = linear_map.apply(arrays[:num_res], arrays[num_res:])
    return [pcast_like(t, aval) for t, aval in zip(results, linear_map.avals, strict=True)]


def _linear_map_jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, linear_map: LinearMap, num_res: int
) -> tuple[list[Any], Sequence[Any]]:
    results = linear_map_p.bind(*primals, linear_map=linear_map, num_res=num_res)
    perturbed = [i for i, t in enumerate(tangents) if t is not None]

    def evaluate(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(perturbed, values, strict=True):
            operands[i] = value
        return _evaluate_linear_map(*operands, linear_map=linear_map, num_res=num_res)

    return results, jax.jvp(evaluate, [primals[i] for i in perturbed], [tangents[i] for i in perturbed])[1]


def _transpose_linear_map(
    cotangents: Sequence[Any], *operands: Any, linear_map: LinearMap, num_res: int
) -> list[jax.Array | None]:
    residuals = [as_array(x) for x in operands[:num_res]]
    pulled = linear_map.transpose(residuals, [None if ct is None else as_array(ct) for ct in cotangents])
    return [*[None] * num_res, *pulled]


def _batch_linear_map(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any], *, linear_map: LinearMap, num_res: int
) -> tuple[list[Any], list[int | None]]:
    out_axis = None if all(d is None for d in dims) else 0
    tangents = operands[num_res:]
    if out_axis == 0:
        # In reverse, so that the transposed program sums over the batch in the order of the inputs.
        tangents = [axis.to_axis_0(t, d) for t, d in reversed(list(zip(tangents, dims[num_res:], strict=True)))][::-1]
    batched = _BatchedLinearMap(linear_map, axis, dims[:num_res], out_axis)
    return bind_linear_map(batched, operands[:num_res], tangents), [out_axis] * len(batched.avals)


def _linear_map_avals(*_: Any, linear_map: LinearMap, num_res: int) -> Sequence[Any]:
    return linear_map.avals


linear_map_p = make_primitive(
    "linear_map",
    evaluate=_evaluate_linear_map,
    avals=_linear_map_avals,
    jvp=_linear_map_jvp,
    batch=_batch_linear_map,
    transpose=_transpose_linear_map,
    on_transpose_error=hide_own_frames,
    may_use_axis_names=True,
    lower_as_function=True,
)


identity_primitives.update({stop_p, attach_p})
subjaxpr_rules[linear_map_p] = partial(traced_impl, param="linear_map")


def drop_tangent_unless(array: Any, perturbed_by: Any) -> Any:
    """Returns the array; its tangent is symbolically zero wherever that of `perturbed_by` is.

    A `jax.custom_vjp` gives a derivative to all that it returns as soon as one of its inputs is differentiated.
    `jax.checkpoint` saves the result, so that the operations that compute it are in the program once.
    """
    return drop_tangent_unless_p.bind(array, perturbed_by)[0]


def _drop_tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return drop_tangent_unless_p.bind(*primals), [None if tangents[1] is None else tangents[0]]


def _partial_eval_drop_tangent(
    _policy: Any, unknowns_in: Sequence[bool], available_in: Sequence[bool], eqn: Any
) -> tuple[Any, Any, Sequence[bool], Sequence[bool], list[Any]]:
    if not any(unknowns_in):
        return eqn, None, [False], [False], []
    unavailable = [v for v, is_available in zip(eqn.invars, available_in, strict=True) if not is_available]
    return None, eqn, [True], [True], unavailable


def _evaluate_drop_tangent(array: Any, perturbed_by: Any) -> list[Any]:
    return [array]


def _batch_drop_tangent(
    axis: VmapAxis, operands: Sequence[Any], dims: Sequence[Any]
) -> tuple[list[Any], Sequence[Any]]:
    return drop_tangent_unless_p.bind(*operands), dims[:1]


drop_tangent_unless_p = make_primitive(
    "drop_tangent_unless",
    evaluate=_evaluate_drop_tangent,
    jvp=_drop_tangent_jvp,
    batch=_batch_drop_tangent,
    partial_eval_in_checkpoint=_partial_eval_drop_tangent,
)
