"""`linear`: a linear function of tangents that does not say how it is computed.

Evaluated or differentiated it calls `push`, transposed it calls `pull`. In reverse mode it is transposed away and
nothing of it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfn._compat import Batch, Primitive, ad, batching, mlir, zeros_of
from jaxfn._primitives.linearity import is_zero
from jaxfn._primitives.summing import NOT_MAPPED, example_of
from jaxfn._values.arrays import as_array, is_staged, is_traced
from jaxfn._values.varying import widened

Cotangents = Sequence[jax.Array | None]


class Linear:
    """A linear function of tangents that depends on residuals, and its transpose.

    Attributes:
      avals: the types of its results.
    """

    avals: list[Any]

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        """Tangents of the outputs from tangents of the inputs."""
        raise NotImplementedError

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        """Cotangents of the inputs from cotangents of the outputs; `None` is zero."""
        raise NotImplementedError

    def is_of_unbatched(self, result: int, batch: Batch) -> bool:
        """Whether a result is the tangent of an output that JAX has been told does not depend on a batch."""
        raise NotImplementedError


class _SomeResults(Linear):
    """Some results of a linear function."""

    def __init__(self, linear: Linear, results: list[int]) -> None:
        self._linear = linear
        self._results = results
        self.avals = [linear.avals[i] for i in results]

    def __repr__(self) -> str:
        return repr(self._linear)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        pushed = self._linear.push(residuals, tangents)
        return [pushed[i] for i in self._results]

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        given = dict(zip(self._results, cotangents, strict=True))
        return self._linear.pull(residuals, [given.get(i) for i in range(len(self._linear.avals))])

    def is_of_unbatched(self, result: int, batch: Batch) -> bool:
        return self._linear.is_of_unbatched(self._results[result], batch)


class _Unbatched(_SomeResults):
    """The results that depend on no batch; of the tangents that have one it is given an example.

    Args:
      linear: the whole function.
      results: which of its results these are.
      examples: which tangents are examples, so that their cotangents can only be zero.
    """

    def __init__(self, linear: Linear, results: list[int], examples: list[int]) -> None:
        super().__init__(linear, results)
        self._examples = examples

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        pull = super().pull
        given = [i for i, ct in enumerate(cotangents) if ct is not None]

        def pulled_to_examples(*values: Any) -> list[Any]:
            cts: list[Any] = [None] * len(cotangents)
            for i, value in zip(given, values, strict=True):
                cts[i] = value
            pulled = pull(residuals, cts)
            return [pulled[i] for i in self._examples if pulled[i] is not None]

        if not is_zero(pulled_to_examples, [zeros_of(self.avals[i]) for i in given]):
            raise NotImplementedError(NOT_MAPPED.format(name=self))
        pulled = pull(residuals, cotangents)
        return [None if i in self._examples else ct for i, ct in enumerate(pulled)]


class _Batched(Linear):
    """A linear function over a batch: every tangent has the batch at axis 0, each residual at its own axis or none."""

    def __init__(self, linear: Linear, axis: Any, residual_dims: list[int | None], avals: list[Any]) -> None:
        self._linear = linear
        self._axis = axis
        self._residual_dims = residual_dims
        self.avals = avals

    def __repr__(self) -> str:
        return repr(self._linear)

    def push(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        return self._mapped(self._linear.push)(list(residuals), list(tangents))

    def pull(self, residuals: Sequence[Any], cotangents: Cotangents) -> list[jax.Array | None]:
        return self._mapped(self._linear.pull)(list(residuals), list(cotangents))

    def is_of_unbatched(self, result: int, batch: Batch) -> bool:
        return self._linear.is_of_unbatched(result, batch)

    def _mapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _vmap(function, self._axis, (self._residual_dims, 0))


def _vmap(function: Callable[..., Any], axis: Any, in_axes: Any) -> Callable[..., Any]:
    return jax.vmap(function, in_axes=in_axes, axis_name=axis.name, axis_size=axis.size, spmd_axis_name=axis.spmd_name)


linear_p = Primitive("linear")
linear_p.multiple_results = True


def applied(linear: Linear, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[Any]:
    """What the function gives for these tangents, in one equation."""
    return linear_p.bind(*residuals, *tangents, linear=linear, num_residuals=len(residuals))


def _linear_impl(*operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    arrays = [as_array(x) for x in operands]  # scalars may have become literals
    tangents = linear.push(arrays[:num_residuals], arrays[num_residuals:])
    return [widened(t, aval) for t, aval in zip(tangents, linear.avals, strict=True)]


def _linear_abstract(*operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    return linear.avals


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, linear: Linear, num_residuals: int) -> Any:
    outputs = linear_p.bind(*primals, linear=linear, num_residuals=num_residuals)
    moving = [i for i, t in enumerate(tangents) if not isinstance(t, ad.Zero)]

    def function(*values: Any) -> list[Any]:
        operands = list(primals)
        for i, value in zip(moving, values, strict=True):
            operands[i] = value
        return _linear_impl(*operands, linear=linear, num_residuals=num_residuals)

    return outputs, jax.jvp(function, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


def _linear_transpose(cotangents: Sequence[Any], *operands: Any, linear: Linear, num_residuals: int) -> list[Any]:
    residuals, tangents = [as_array(x) for x in operands[:num_residuals]], operands[num_residuals:]
    given = [None if isinstance(ct, ad.Zero) else as_array(ct) for ct in cotangents]
    zeros = [ad.Zero(t.aval) for t in tangents]
    if all(ct is None for ct in given):
        return [None] * num_residuals + zeros
    pulled = linear.pull(residuals, given)
    return [None] * num_residuals + [zero if ct is None else ct for zero, ct in zip(zeros, pulled, strict=True)]


def _linear_batch(
    axis: Any, operands: Sequence[Any], dims: Sequence[Any], *, linear: Linear, num_residuals: int
) -> Any:
    """Results that depend on no batch have none.

    # Note: the transpose of what has no batch

    For `y, z = sin(x), cos(w)` over three rows of `x` and one `w`, JAX's rule for the primal says that `z` has no
    batch, so its tangent must have none either. Were it computed for each row, as that of `y` is, the transpose would
    sum the same cotangent of `z` over three rows: a gradient three times too large, in silence. So what has no batch is
    a linear function of its own, from the tangents that have none.
    """
    residuals, tangents = list(operands[:num_residuals]), list(operands[num_residuals:])
    residual_dims, tangent_dims = list(dims[:num_residuals]), list(dims[num_residuals:])
    if all(d is None for d in dims):  # JAX asks even so
        return applied(linear, residuals, tangents), [None] * len(linear.avals)
    depends, avals = _batched_results(linear, axis, operands, dims, num_residuals)
    with_batch = [i for i, is_batched in enumerate(depends) if is_batched]
    without_batch = [i for i, is_batched in enumerate(depends) if not is_batched]
    if any(linear.is_of_unbatched(i, Batch(axis)) for i in with_batch):
        raise NotImplementedError(NOT_MAPPED.format(name=linear))
    results: dict[int, Any] = {}
    if with_batch:
        part = _SomeResults(linear, with_batch) if without_batch else linear
        moved = [batching.bdim_at_front(t, d, axis.size) for t, d in zip(tangents, tangent_dims, strict=True)]
        batched = _Batched(part, axis, residual_dims, [avals[i] for i in with_batch])
        results |= zip(with_batch, applied(batched, residuals, moved), strict=True)
    if without_batch:
        unbatched = _Unbatched(linear, without_batch, [i for i, d in enumerate(tangent_dims) if d is not None])
        examples = [example_of(x, d) for x, d in zip(operands, dims, strict=True)]
        bound = applied(unbatched, examples[:num_residuals], examples[num_residuals:])
        results |= zip(without_batch, bound, strict=True)
    return [results[i] for i in range(len(depends))], [0 if is_batched else None for is_batched in depends]


def _batched_results(
    linear: Linear, axis: Any, operands: Sequence[Any], dims: Sequence[Any], num_residuals: int
) -> tuple[list[bool], list[Any]]:
    """For each result, whether it depends on the batch, and its type with the batch at axis 0."""
    depends = [True] * len(linear.avals)

    def push(*operands: Any) -> list[Any]:
        try:
            results = linear.push(operands[:num_residuals], operands[num_residuals:])
        except RuntimeError:  # such as user code that cannot be transposed, which reverse mode does without
            if any(d is None for d in dims):
                raise
            return [zeros_of(aval) for aval in linear.avals]
        depends[:] = [is_traced(x) and not is_staged(x) for x in results]
        return results

    program = jax.make_jaxpr(_vmap(push, axis, tuple(dims)))(*operands)
    return depends, list(program.out_avals)


linear_p.def_impl(_linear_impl)
linear_p.def_abstract_eval(_linear_abstract)
mlir.register_lowering(linear_p, mlir.lower_fun(_linear_impl, multiple_results=True), cacheable=False)
ad.primitive_jvps[linear_p] = _linear_jvp
ad.primitive_transposes[linear_p] = _linear_transpose
batching.fancy_primitive_batchers[linear_p] = _linear_batch
