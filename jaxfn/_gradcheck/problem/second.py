"""Second order: the gradient of a function as a function of its inputs and of the gradients of its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.problem.derivatives import available, derive, only, reverse_of
from jaxfn._gradcheck.problem.problem import Leaf, OfLeaves, Problem, as_double


def second_order(problem: Problem, grad_outputs: Any) -> Problem:
    """The problem whose function is the first-order gradient.

    Args:
      problem: the function.
      grad_outputs: an array for each differentiable output, or `None` for random ones.

    Raises:
      UnavailableError: the function has no gradient; the message says why.
    """
    d = derive(problem, reverse=True, forward=False, reference=False)
    available(d.reverse.rule)
    if not d.outputs:
        raise ValueError(f"{problem.name} has no floating or complex output with a derivative")
    names = [f"gradient of {leaf.name}" for leaf in problem.inputs]
    cotangents = [Leaf(f"grad_output of {leaf.name}", leaf.shape, leaf.dtype) for leaf in d.outputs]
    count = len(problem.inputs)

    def gradients(call: OfLeaves) -> OfLeaves:
        reverse = reverse_of(only(call, d.kept))

        def first_order(*values: Any) -> list[Any]:
            return reverse(values[:count], values[count:])[1]

        return first_order

    call = gradients(problem.call)
    measured = call if problem.measured is problem.call else gradients(problem.measured)
    return replace(
        problem,
        call=call,
        measured=measured,
        reference=measured if problem.reference is problem.measured else gradients(problem.reference),
        inputs=(*problem.inputs, *cotangents),
        values=[*problem.values, *_cotangents(d.outputs, grad_outputs)],
        describe_outputs=lambda: [(name, leaf.dtype) for name, leaf in zip(names, problem.inputs, strict=True)],
        may_stop=False,  # a gradient without a derivative must be constant
    )


def _cotangents(outputs: Sequence[Leaf], given: Any) -> list[Any]:
    if given is None:
        generator = np.random.default_rng(0)
        return [jnp.asarray(_uniform(generator, leaf)) for leaf in outputs]
    arrays = [as_double(leaf) for leaf in jax.tree.leaves(given)]
    shapes, wanted = [a.shape for a in arrays], [leaf.shape for leaf in outputs]
    if shapes != wanted:
        raise ValueError(
            f"grad_outputs has arrays of shapes {shapes}, but the differentiable outputs have {wanted}: give one for "
            "each of them"
        )
    return [a.astype(leaf.dtype) for a, leaf in zip(arrays, outputs, strict=True)]


def _uniform(generator: np.random.Generator, leaf: Leaf) -> Any:
    values = generator.uniform(-1, 1, leaf.shape)
    return values + 1j * generator.uniform(-1, 1, leaf.shape) if leaf.is_complex else values
