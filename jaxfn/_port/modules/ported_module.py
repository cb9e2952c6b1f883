"""The JAX side of the check of a whole port: what `load` returns, and one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_leaves, tree_map_with_path, tree_unflatten

from jaxfn._check.draws import draw
from jaxfn._check.staging import JaxprFunction, stage
from jaxfn._compat import dce_jaxpr, eqn_source_line, lower_jaxpr, record_source_lines
from jaxfn._jaxpr import all_eqns, needed_eqns, open_jaxpr
from jaxfn._parity.backends import draw_grad_outputs, output_leaves, torch_vjp
from jaxfn._parity.inputs import Array, Inputs
from jaxfn._port.modules.module_record import ModuleRecord
from jaxfn._port.modules.values import Values
from jaxfn._port.training.job_record import TrainingRecord
from jaxfn._tree import is_array_leaf, is_inexact, is_key

Load = Callable[[dict[str, Any]], Any]


class PortResults(NamedTuple):
    """Results of a port: outputs by index, new buffers by path, and gradients by name."""

    outputs: Any
    buffers: Any
    gradients: Any


class PortedModule:
    """A port after `load`: a JAX function of the arrays of a torch module and of its inputs.

    Args:
      function: the port, a function of parameters, buffers if it has them, and the inputs.
      load: returns the parameters and the buffers from torch's arrays by name.
      has_buffers: whether there are buffers; then the function returns (outputs, new buffers).
      record: what torch computed.

    Attributes:
      extra: the parameters that depend on none of torch's arrays, by path.
      buffer_sources: for each buffer, by path, the names of the arrays that it depends on.
      lost: the names of torch's parameters on which no parameter or buffer depends differentiably.
    """

    def __init__(
        self, function: Callable[..., Any], load: Load, has_buffers: bool, record: ModuleRecord | TrainingRecord
    ) -> None:
        self._check = "paritycheck" if isinstance(record, ModuleRecord) else "trainingcheck"
        self._function = function
        self._user_load = load
        self._has_buffers = has_buffers
        self._record = record
        self._inputs = Inputs(record.args)
        staged = self._stage_load()
        parameters, self.buffer_sources = _sources(staged, record.parameters | record.buffers)
        loaded, _ = staged(self._arrays(record.parameters))
        self.extra = {path: loaded[path] for path, names in parameters.items() if not names}
        self.extra = {path: x for path, x in self.extra.items() if is_inexact(x.dtype)}
        self.lost = self._lost(staged)

    def _arrays(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Returns all arrays of the module, with these parameters."""
        return {name: jnp.asarray(x) for name, x in (self._record.buffers | dict(parameters)).items()}

    def load(self, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Returns the parameters and the buffers of the port, from all arrays of torch."""
        tied = {alias: arrays[name] for alias, name in self._record.aliases.items()}
        loaded = self._user_load(arrays | tied)
        if not self._has_buffers:
            return loaded, ()
        if not _is_pair(loaded):
            kind = type(loaded).__name__
            raise TypeError(
                f"{self._check}: with has_buffers=True, `load` has to return (parameters, buffers), got {kind}"
            )
        return tuple(loaded)

    def _load_by_path(self, arrays: dict[str, Any]) -> list[dict[str, Any]]:
        return [arrays_by_path(tree) for tree in self.load(arrays)]

    def _stage_load(self) -> JaxprFunction:
        arrays = self._arrays(self._record.parameters)
        try:
            return stage(self._load_by_path, arrays)
        except Exception as error:  # any, as NumPy and other libraries raise their own for tracers
            self.load(arrays)  # raises again, unless tracers are the reason
            names = [name for name in arrays if not self._is_traceable(name)]
            which = ", ".join(names) if 0 < len(names) < len(arrays) else "its arrays"
            raise TypeError(
                f"{self._check}: `load` cannot be differentiated by {which}: it makes NumPy arrays or Python numbers "
                "of them, or sets them in an object that it did not create. Use methods of the arrays and jax.numpy."
            ) from error

    def _is_traceable(self, name: str) -> bool:
        """Whether `load` can be traced with one array that is traced, and others that are not."""
        arrays: dict[str, Any] = self._record.buffers | self._record.parameters

        def load_one(array: Any) -> list[dict[str, Any]]:
            return self._load_by_path(arrays | {name: array})

        try:
            stage(load_one, arrays[name])
        except Exception:
            return False
        return True

    def _lost(self, staged: JaxprFunction) -> list[str]:
        def differentiable(parameters: dict[str, Any]) -> list[Any]:
            return [x for x in tree_leaves(staged(self._arrays(parameters))) if is_inexact(x.dtype)]

        leaves, pullback = jax.vjp(differentiable, {k: jnp.asarray(x) for k, x in self._record.parameters.items()})
        (gradients,) = pullback([jnp.asarray(draw("loaded", i, x)) for i, x in enumerate(leaves)])
        return [name for name, gradient in gradients.items() if not gradient.any()]

    def expected_buffers(self, arrays: Mapping[str, Any]) -> dict[str, Array]:
        """Returns the buffers that the port has to return, by path, from torch's new arrays."""
        _, buffers = self._load_by_path(self._arrays(arrays))
        return {path: np.asarray(x) for path, x in buffers.items()}

    def call(self, parameters: Any, buffers: Any, *args: Any) -> tuple[Any, Any]:
        """Returns the outputs, or the loss, of the port, and its new buffers."""
        returned = self._function(parameters, *([buffers] if self._has_buffers else []), *args)
        if not self._has_buffers:
            return returned, buffers
        if not _is_pair(returned):
            what = "outputs" if self._check == "paritycheck" else "loss"
            raise TypeError(f"{self._check}: with has_buffers=True, the port has to return ({what}, new buffers)")
        return returned

    def _call(self, named: Any, extra: Any, values: Any) -> tuple[dict[int, Any], dict[str, Any]]:
        parameters, buffers = self.load(self._arrays(named))
        port = partial(self.call, _replaced(parameters, extra), buffers)
        outputs, new_buffers = self._inputs.call(port, jnp.asarray, values)
        return _outputs(outputs), self.returned_buffers(new_buffers)

    def returned_buffers(self, buffers: Any) -> dict[str, Any]:
        """Returns new buffers of the port by path; raises if they are not those that `load` returns."""
        by_path = arrays_by_path(buffers)
        if different := sorted(by_path.keys() ^ self.buffer_sources.keys()):
            raise ValueError(
                f"{self._check}: the port has to return the buffers that `load` returns, with new numbers. Only one of "
                f"them returns {', '.join(different)}"
            )
        return by_path

    def unreturned_buffers(
        self, before: Mapping[str, Array], after: Mapping[str, Array]
    ) -> tuple[list[str], list[str]]:
        """Returns the buffers that torch changes and the port has to return and does not, and notes of the others."""
        returned = set[str]().union(*self.buffer_sources.values())
        changed = [
            name
            for name, x in after.items()
            if name not in returned and not np.array_equal(x, before[name], equal_nan=is_inexact(x.dtype))
        ]
        missing = [name for name in changed if self._has_buffers and is_inexact(after[name].dtype)]
        others = [name for name in changed if name not in missing]
        return missing, [f"not compared: buffer {name}, which is not among the port's new buffers" for name in others]

    def _program(self, named: Any, extra: Any, values: Any) -> PortResults:
        def differentiable(named: Any, extra: Any, values: Any) -> Any:
            outputs, new_buffers = self._call(named, extra, values)
            chosen = {i: y for i, y in outputs.items() if is_inexact(y.dtype)}
            return chosen, (outputs, new_buffers)

        chosen, pullback, (outputs, new_buffers) = torch_vjp(differentiable, named, extra, values)
        of_named, of_extra, of_values = pullback(draw_grad_outputs(chosen))
        gradients = of_named | of_extra | dict(zip(self._inputs.names, of_values, strict=True))
        return PortResults(outputs, new_buffers, gradients)

    def evaluate(self, tolerance: Callable[[Any], float]) -> tuple[PortResults, Values, str]:
        """Returns what the port computes, its intermediate values, and where it computes in less than float64.

        Args:
          tolerance: returns the relative tolerance of a dtype.
        """
        named = {name: jnp.asarray(x) for name, x in self._record.parameters.items()}
        start = named, self.extra, list(map(jnp.asarray, self._inputs.values))
        with record_source_lines():
            closed, shape = jax.make_jaxpr(self._program, return_shape=True)(*start)
        jaxpr, consts = open_jaxpr(lower_jaxpr(closed))
        jaxpr = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # a module that `load` creates draws its parameters first
        computed = [(eqn, v.aval.dtype) for eqn in all_eqns(jaxpr) for v in eqn.outvars if hasattr(v.aval, "dtype")]
        values, coarse = Values(tolerance(np.float64)), ""
        found = [(tolerance(t), str(t), eqn) for eqn, t in computed if is_inexact(t) and tolerance(t) > values.rtol]
        if found:
            values.rtol, dtype, eqn = max(found, key=itemgetter(0))
            coarse = f"{dtype} ({eqn_source_line(eqn) or eqn.primitive.name})"
        results = values.evaluate(jaxpr, consts, tree_leaves(start))
        return tree_unflatten(jax.tree.structure(shape), [np.asarray(x) for x in results]), values, coarse


def _sources(staged: JaxprFunction, names: Mapping[str, Any]) -> list[dict[str, set[str]]]:
    """Returns for the parameters and the buffers, by path, the names of the arrays that each depends on."""
    arguments = dict(zip(sorted(names), staged.jaxpr.invars, strict=True))

    def sources(variable: Any) -> set[str]:
        _, needed = needed_eqns(staged.jaxpr, [variable])
        return {name for name, argument in arguments.items() if argument in needed}

    trees = tree_unflatten(staged.tree, staged.jaxpr.outvars)
    return [{path: sources(variable) for path, variable in tree.items()} for tree in trees]


def arrays_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree that have numbers."""
    leaves, _ = tree_flatten_with_path(tree)
    return {keystr(path): x for path, x in leaves if is_array_leaf(x) and not is_key(x)}


def _replaced(tree: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns a pytree with other arrays at some paths."""

    def new(path: Any, leaf: Any) -> Any:
        return arrays.get(keystr(path), leaf)

    return tree_map_with_path(new, tree)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _outputs(returned: Any) -> dict[int, Any]:
    return {i: jnp.asarray(y) for i, y in output_leaves(returned, "the port", is_array_leaf).items()}
