"""The JAX side of the check of a whole port: its parameters, one evaluation, and steps of gradient descent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from jaxfn._check.draws import draw
from jaxfn._compat import eqn_source_line, lower_jaxpr, record_source_lines
from jaxfn._jaxpr import all_eqns, open_jaxpr
from jaxfn._parity.backends import output_leaves
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._parity.module_record import LEARNING_RATE
from jaxfn._parity.values import Values
from jaxfn._tree import is_array_leaf, is_inexact, is_key


class ParameterTree:
    """A pytree of parameters or buffers: its leaves with numbers, as float64 or in their dtypes, and all the rest.

    Attributes:
      paths: the paths of the leaves.
      arrays: their numbers.
    """

    def __init__(self, tree: Any, in_double: bool) -> None:
        found, self._treedef = tree_flatten_with_path(tree)
        self._leaves = [leaf for _, leaf in found]
        self._indices = [i for i, leaf in enumerate(self._leaves) if is_array_leaf(leaf) and not is_key(leaf)]
        self.paths = [keystr(found[i][0]) for i in self._indices]
        self.arrays: list[Array] = [np.asarray(self._leaves[i]) for i in self._indices]
        if in_double:
            self.arrays = [x.astype(np.result_type(x, np.float64)) if is_inexact(x.dtype) else x for x in self.arrays]

    def unflatten(self, arrays: Sequence[Any]) -> Any:
        """Returns the pytree with other numbers."""
        leaves = list(self._leaves)
        for i, array in zip(self._indices, arrays, strict=True):
            leaves[i] = array
        return tree_unflatten(self._treedef, leaves)

    def arrays_of(self, tree: Any) -> list[Any]:
        """Returns the numbers of another pytree of this structure."""
        leaves = tree_leaves(tree)
        if len(leaves) != len(self._leaves):
            raise ValueError(
                f"paritycheck: the port returned buffers with {len(leaves)} leaves, expected the {len(self._leaves)} "
                "of `buffers`. Return (outputs, buffers)."
            )
        return [leaves[i] for i in self._indices]


class PortedModule:
    """A JAX function of parameters, and buffers.

    Args:
      function: the function.
      parameters, buffers: its first arguments; without buffers, the function returns its outputs alone.
      inputs: the other arguments.
    """

    def __init__(self, function: Callable[..., Any], parameters: ParameterTree, buffers: Any, inputs: Inputs) -> None:
        self._function = function
        self._parameters = parameters
        self._buffers: ParameterTree | None = buffers
        self._inputs = inputs
        self.trainable = [i for i, x in enumerate(parameters.arrays) if is_inexact(x.dtype)]

    def _forward(
        self, trained: Sequence[Any], buffers: Sequence[Any], values: Sequence[Any]
    ) -> tuple[dict[int, Any], list[Any]]:
        arrays: list[Any] = list(map(jnp.asarray, self._parameters.arrays))
        for i, array in zip(self.trainable, trained, strict=True):
            arrays[i] = array
        first = [self._parameters.unflatten(arrays)]
        first += [] if self._buffers is None else [self._buffers.unflatten(buffers)]
        returned = self._inputs.call(lambda *args: self._function(*first, *args), jnp.asarray, values)
        if self._buffers is None:
            return _outputs(returned), []
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError("paritycheck: with `buffers`, the port has to return (outputs, buffers).")
        return _outputs(returned[0]), self._buffers.arrays_of(returned[1])

    def _program(self, trained: Sequence[Any], buffers: Sequence[Any], values: Sequence[Any]) -> Any:
        """Returns outputs, new buffers, and gradients of parameters and inputs."""

        def differentiable(trained: Any, values: Any) -> Any:
            outputs, new_buffers = self._forward(trained, buffers, values)
            chosen = {i: y for i, y in outputs.items() if is_inexact(y.dtype)}
            return chosen, (outputs, new_buffers)

        chosen, pullback, (outputs, new_buffers) = jax.vjp(differentiable, trained, values, has_aux=True)
        cotangents = {i: jnp.conj(draw("grad_output", i, y)) for i, y in chosen.items()}
        of_parameters, of_inputs = pullback(cotangents)
        return outputs, new_buffers, jax.tree.map(jnp.conj, of_parameters), jax.tree.map(jnp.conj, of_inputs)

    def _start(self) -> tuple[list[Any], list[Any], list[Any]]:
        trained = [jnp.asarray(self._parameters.arrays[i]) for i in self.trainable]
        buffers = [] if self._buffers is None else list(map(jnp.asarray, self._buffers.arrays))
        return trained, buffers, list(map(jnp.asarray, self._inputs.values))

    def evaluate(self, tolerance: Callable[[Any], float]) -> tuple[Any, Values, str]:
        """Returns what the port computes, its intermediate values, and where it computes in less than float64.

        Args:
          tolerance: returns the relative tolerance of a dtype.
        """
        start = self._start()
        with record_source_lines():
            closed, shape = jax.make_jaxpr(self._program, return_shape=True)(*start)
        jaxpr, consts = open_jaxpr(lower_jaxpr(closed))
        computed = [(eqn, v.aval.dtype) for eqn in all_eqns(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")]
        coarsest = max(((tolerance(t), str(t), eqn) for eqn, t in computed if is_inexact(t)), key=itemgetter(0))
        rtol, coarse = max(coarsest[0], tolerance(np.float64)), ""
        if rtol > tolerance(np.float64):
            coarse = f"{coarsest[1]} ({eqn_source_line(coarsest[2]) or coarsest[2].primitive.name})"
        values = Values(len(start[0]), rtol)
        arguments = tree_leaves(start)
        results = values.evaluate(jaxpr, consts, arguments)
        return tree_unflatten(jax.tree.structure(shape), [np.asarray(x) for x in results]), values, coarse

    def descend(self, updated: Sequence[int], steps: int) -> tuple[list[Any], list[Any]]:
        """Returns all parameters and the buffers after steps of gradient descent on some of the parameters."""
        trained, buffers, values = self._start()
        run = jax.jit(self._program)
        for _ in range(steps):
            _, buffers, gradients, _ = run(trained, buffers, values)
            trained = [
                p - LEARNING_RATE * g if i in updated else p
                for i, p, g in zip(self.trainable, trained, gradients, strict=True)
            ]
        arrays = list(self._parameters.arrays)
        for i, array in zip(self.trainable, trained, strict=True):
            arrays[i] = np.asarray(array)
        return arrays, list(map(np.asarray, buffers))


def _outputs(returned: Any) -> dict[int, Any]:
    return {i: jnp.asarray(y) for i, y in output_leaves(returned, "the port", is_array_leaf).items()}
