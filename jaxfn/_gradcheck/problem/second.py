"""The gradient of a function as another problem: a function of the inputs and of the gradients of the outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfn._check.arguments import as_double
from jaxfn._check.draws import draw
from jaxfn._check.modes import LeafFunction, restrict_outputs, reverse_derivative
from jaxfn._gradcheck.problem.derivatives import available, derive
from jaxfn._gradcheck.problem.problem import Leaf, Problem


def second_order(problem: Problem, grad_outputs: Any) -> Problem:
    """Returns the problem whose function is the first-order gradient.

    Raises:
      UnavailableError: the function has no gradient.
    """
    d = derive(problem, reverse=True, forward=False)
    available(d.reverse.rule)
    if not d.outputs:
        raise ValueError(f"{problem.name} has no floating or complex output with a derivative")
    names = [f"gradient of {leaf.name}" for leaf in problem.inputs]
    cotangents = [Leaf(f"grad_output of {leaf.name}", leaf.shape, leaf.dtype) for leaf in d.outputs]
    count = len(problem.inputs)

    def gradients(call: LeafFunction) -> LeafFunction:
        reverse = reverse_derivative(restrict_outputs(call, d.output_indices))

        def first_order(*values: Any) -> list[Any]:
            return reverse(values[:count], values[count:])[1]

        return first_order

    call = gradients(problem.call)
    target = call if problem.target is problem.call else gradients(problem.target)
    return replace(
        problem,
        call=call,
        target=target,
        reference=target if problem.reference is problem.target else gradients(problem.reference),
        inputs=(*problem.inputs, *cotangents),
        values=[*problem.values, *_cotangents(d.outputs, grad_outputs)],
        describe_outputs=lambda: [(name, leaf.dtype) for name, leaf in zip(names, problem.inputs, strict=True)],
        may_stop=False,  # a gradient without a derivative must be constant
    )


def _cotangents(outputs: Sequence[Leaf], grad_outputs: Any) -> list[Any]:
    if grad_outputs is None:
        return [jnp.asarray(draw("grad_output", i, leaf)) for i, leaf in enumerate(outputs)]
    arrays = [as_double(leaf) for leaf in jax.tree.leaves(grad_outputs)]
    shapes, expected = [a.shape for a in arrays], [leaf.shape for leaf in outputs]
    if shapes != expected:
        raise ValueError(
            f"grad_outputs has arrays of shapes {shapes}, but the differentiable outputs have {expected}: give one for "
            "each of them"
        )
    return [a.astype(leaf.dtype) for a, leaf in zip(arrays, outputs, strict=True)]
