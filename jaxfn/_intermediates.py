"""The derivative of saved intermediates: that of forward's own operations, which run again to compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer, eval_jaxpr

from jaxfn._compat import dce_jaxpr, zeros_of
from jaxfn._diagnostics import NEEDS_VALUES
from jaxfn._forward_pass import ForwardPass
from jaxfn._jaxpr import same_program
from jaxfn._observe import active_monitor
from jaxfn._parts import run_on_parts
from jaxfn._primitives import LinearMap
from jaxfn._traces import CAN_READ_EQNS, innermost
from jaxfn._tree import as_array, is_inexact, replace_at


class Intermediates(LinearMap):
    """The derivative of saved intermediates.

    Args:
      forward_pass: The run of `forward` that saved them.
      tracers: The captured tracers.
      intermediates: The saved intermediates.
      perturbed: The indices of the arrays by which the derivative is, among the array leaves of the inputs and, after
        these, the values of captured tracers.
      treedef: The treedef of the residuals, which are `Residuals`.

    Attributes:
      indices: The indices of the intermediates that have a derivative.
    """

    def __init__(
        self,
        forward_pass: ForwardPass,
        tracers: Sequence[Any],
        intermediates: Sequence[Any],
        perturbed: list[int],
        treedef: Any,
    ) -> None:
        self._forward_pass = forward_pass
        self._tracers = tracers
        self._perturbed = perturbed
        self._treedef = treedef
        self.indices = [i for i, x in enumerate(intermediates) if is_inexact(x.dtype)]
        self.avals = [jax.typeof(intermediates[i]).to_tangent_aval() for i in self.indices]
        monitor = active_monitor()
        self._are_constants = monitor is not None and monitor.stops_intermediates

    def __repr__(self) -> str:
        return self._forward_pass.spec.name

    def apply(self, residuals: Sequence[Any], tangents: Sequence[Any]) -> list[jax.Array]:
        if self._are_constants:
            return list(map(zeros_of, self.avals))
        function, values = self._function(residuals)
        try:
            return list(jax.jvp(function, values, list(tangents))[1])
        except Exception as error:
            self._forward_pass.spec.methods.add_forward_hint(error)
            raise

    def transpose(self, residuals: Sequence[Any], cotangents: Sequence[jax.Array | None]) -> list[jax.Array | None]:
        if self._are_constants:
            return [None] * len(self._perturbed)
        function, values = self._function(residuals)
        cts = [zeros_of(aval) if ct is None else ct for ct, aval in zip(cotangents, self.avals, strict=True)]
        try:
            return list(jax.vjp(function, *values)[1](cts))
        except Exception as error:
            self._forward_pass.spec.methods.add_forward_hint(error)
            raise

    def pull(self, residuals: Sequence[Any], cotangents: Sequence[Any]) -> list[Any]:
        """Returns a cotangent for each input and each captured value, `None` for zero.

        Args:
          residuals: The arrays.
          cotangents: One for each intermediate, `None` for zero.
        """
        restored = jax.tree.unflatten(self._treedef, residuals[: self._treedef.num_leaves])
        zeros: list[Any] = [None] * (len(restored.inputs) + len(restored.captured))
        return replace_at(self._perturbed, zeros, self.transpose(residuals, [cotangents[i] for i in self.indices]))

    def _function(self, residuals: Sequence[Any]) -> tuple[Callable[..., list[Any]], list[Any]]:
        """Returns the intermediates as a function of the perturbed arrays, and those arrays."""
        if not CAN_READ_EQNS:
            raise NotImplementedError(_UNKNOWN.format(name=self._forward_pass.spec.name))
        if self._forward_pass.spec.inputs.has_refs:
            raise NotImplementedError(_WITH_REFS.format(name=self._forward_pass.spec.name))
        restored = jax.tree.unflatten(self._treedef, residuals[: self._treedef.num_leaves])
        arrays = [*restored.inputs, *restored.captured]
        compute = self._stage(arrays)

        def function(*values: Any) -> list[Any]:
            return compute(replace_at(self._perturbed, arrays, values))

        return function, [arrays[i] for i in self._perturbed]

    def _stage(self, arrays: Sequence[Any]) -> Callable[[Sequence[Any]], list[Any]]:
        """Returns what computes the intermediates again. Runs `forward` twice, and raises if the runs differ."""
        try:
            jaxpr, other = (jax.make_jaxpr(partial(self._run))(arrays) for _ in range(2))  # JAX caches one function
        except NEEDS_VALUES:
            values = [list(map(innermost, self._run(arrays))) for _ in range(2)]
            pairs = [(a, b) for a, b in zip(*values, strict=True) if not isinstance(a, Tracer)]
            if not all(np.array_equal(a, b, equal_nan=True) for a, b in pairs):
                raise self._changed() from None
            return self._run
        except jax.errors.UnexpectedTracerError as error:
            raise self._forward_pass.spec.methods.escaped_tracer_error("forward") from error
        if not same_program(jaxpr, other, compares_params=False):
            raise self._changed()
        needed, consts = dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars)), jaxpr.consts
        return lambda arrays: list(map(as_array, eval_jaxpr(needed, consts, *arrays)))

    def _run(self, arrays: Sequence[Any]) -> list[Any]:
        """Runs `forward`; returns its saved intermediates that have a derivative."""
        spec, flags, sources = self._forward_pass.spec, self._forward_pass.seen_flags, self._forward_pass.saved.sources
        has_hooks = any(source.is_packed for source in sources)
        forward_pass, results = run_on_parts(spec, arrays, self._tracers, flags, has_hooks, use_vmap=False)
        if forward_pass.saved.sources != sources:
            raise self._changed()
        return [results.intermediates[i] for i in self.indices]

    def _changed(self) -> Exception:
        return NotImplementedError(_CHANGED.format(name=self._forward_pass.spec.name))


_WITH_REFS = (
    "{name} takes a jax.Ref and saved an array that is neither an input nor an output, so it cannot be differentiated "
    "twice: forward would have to write twice. Save inputs or outputs instead."
)
_UNKNOWN = (
    "{name} saved an array that is neither an input nor an output, or that cannot be recognized as one in this version "
    "of JAX, so it cannot be differentiated twice. Use a version of JAX that jaxfn was tested on, or save inputs and "
    "outputs."
)
_CHANGED = (
    "{name}.forward was run again for a higher-order derivative, which goes through an array that it saved and that is "
    "neither an input nor an output, and returned different values: something that it captures changed between the "
    "runs (a counter, a stateful source of random numbers, NumPy's random state). Pass the random key, or what "
    "changes, as an argument."
)
