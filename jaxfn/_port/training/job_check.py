"""The check of a ported training job, step by step.

# Note: what is compared

Each step begins with torch's parameters and buffers, as `load` returns them, so that a step does not carry on the
rounding of those before it; the state of the port's optimizer is its own. What belongs to the port's parameters
(gradients, moments, the change of a step) is pulled back through `load`, which gives it torch's names and layouts, also
of fused parameters:

    load: {"q": (4, 4), "k": (4, 4)} -> qk (8, 4)      moment of qk (8, 4) -> {"q": (4, 4), "k": (4, 4)}

An entry of a step is allowed the relative error that its gradients have had, as optimizers divide by their size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import tree_flatten_with_path, tree_leaves, tree_map, tree_map_with_path

from jaxfn._check.staging import stage
from jaxfn._parity.backends import function_name
from jaxfn._parity.comparison import errors, noise_of_zero, rounding
from jaxfn._parity.inputs import Array
from jaxfn._port.modules.ported_module import Load, PortedModule, arrays_by_path
from jaxfn._port.training.job_diagnosis import Evidence, fit, looks_like
from jaxfn._port.training.job_record import TORCH_EPSILON, TrainingRecord, TrainingStep, terms_of
from jaxfn._port.training.job_report import STAGES, TrainingcheckReport, TrainingcheckRow
from jaxfn._tree import is_array_leaf, is_inexact

_GROWTH = 100  # of the relative error of a gradient, on its way through an optimizer
_ULPS = 8  # of a parameter, the error of the difference of two
_MAX_RELATIVE = 1e6
_COARSE = 1e-4  # the relative precision of results by which the norm to which a port clips is found
_LARGER = 100  # than torch's norm is the largest to which a port is found to clip

Arrays = dict[str, Any]


class _Result(NamedTuple):
    """A row, the ratio of its error to its tolerance, what to explain it from, and its rank in its stage."""

    row: TrainingcheckRow
    excess: float
    evidence: Callable[[], Evidence] | None = None
    rank: int = 0

    @property
    def is_wrong(self) -> bool:
        return self.row.verdict != "equal"

    @property
    def order(self) -> tuple[int, int, int, float]:
        """The first deviation is that of the first step, there of the first stage, and of its worst array."""
        return self.row.step, STAGES.index(self.row.stage), self.rank, -self.excess


class _Layouts:
    """The port's parameters, and arrays of their layouts, from torch's and back; compiled once.

    Args:
      port: the port.
    """

    def __init__(self, port: PortedModule) -> None:
        self.load = jax.jit(port.load)
        self._port = port
        self._named, self._expected = jax.jit(self._pull_back), jax.jit(self._push_and_pull_back)

    def _loading(self, before: Arrays) -> tuple[Callable[[Arrays], Any], Arrays]:
        inexact = {name: x for name, x in before.items() if is_inexact(x.dtype)}
        return lambda some: self._port.load(before | some)[0], inexact

    def _pull_back(self, before: Arrays, tree: Any) -> Arrays:
        parameters, pullback = jax.vjp(*self._loading(before))
        return pullback(tree_map(_with_dtype_of, parameters, tree))[0]

    def _push_and_pull_back(self, before: Arrays, arrays: Arrays) -> Arrays:
        loading, inexact = self._loading(before)
        tangents = {name: jnp.asarray(arrays.get(name, jnp.zeros_like(x)), x.dtype) for name, x in inexact.items()}
        return self._pull_back(before, jax.jvp(loading, (inexact,), (tangents,))[1])

    def named(self, before: Arrays, tree: Any) -> dict[str, Array]:
        """Returns arrays of the port's parameters under torch's names, in its layouts."""
        return jax.tree.map(np.asarray, self._named(before, tree))

    def expected(self, before: Arrays, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Returns what `named` returns if the port's parameters have these arrays of torch."""
        return jax.tree.map(np.asarray, self._expected(before, arrays))


class _PortStep:
    """The port before a step, with torch's arrays.

    Attributes:
      number: the index of the step.
      before: torch's arrays by name.
      parameters, buffers: those of the port.
      named, expected: see `_Layouts`.
    """

    def __init__(self, layouts: _Layouts, before: Arrays, number: int) -> None:
        self.number, self.before = number, before
        arrays = _to_jax(before)
        self.parameters, self.buffers = layouts.load(arrays)
        self.named = partial(layouts.named, arrays)
        self.expected = partial(layouts.expected, arrays)


class TrainingCheck:
    """The check of a port.

    Args:
      loss: the port, a function of parameters, buffers if it has them, and a batch.
      record: what torch computed.
      load: returns the parameters and the buffers from torch's arrays by name.
      has_buffers: whether there are buffers; then the port returns (loss, new buffers).
      optimizer: an optimizer with optax's methods `init` and `update`.
      versions: the versions of torch and NumPy.
      rtol, atol: the tolerances that the caller passed.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        record: TrainingRecord,
        load: Load,
        has_buffers: bool,
        optimizer: Any,
        versions: dict[str, str],
        rtol: float | None,
        atol: float | None,
    ) -> None:
        self._record, self._optimizer, self._has_buffers = record, optimizer, has_buffers
        self._port = PortedModule(loss, load, has_buffers, record)
        self._layouts = _Layouts(self._port)
        self._tolerances = rtol, atol
        self._report = TrainingcheckReport(
            record.name, record.optimizer, function_name(loss), versions | {"jax": jax.__version__}
        )
        self._results: dict[tuple[str, str], _Result] = {}
        self._relative: dict[str, Any] = {}  # the largest relative error that a gradient has had, for each entry
        self._sizes: dict[tuple[str, str], float] = {}  # the largest entry that an array has had: averages may cancel
        self._gradient, self._update = jax.jit(self._gradient_of), jax.jit(optimizer.update)
        self._eps = float(jnp.finfo(np.float64 if record.is_double else np.float32).eps)

    def run(self) -> TrainingcheckReport:
        """Compares the steps until one deviates."""
        record, report = self._record, self._report
        report.notes += record.notes
        before = record.parameters | record.buffers
        port = _PortStep(self._layouts, before, 0)
        state = jax.jit(self._optimizer.init)(port.parameters)
        state = tree_map(_with_long_count, state) if record.is_double else state
        self._find_rounding(port, state)
        for number, step in enumerate(record.steps):
            batches = record.batches[number * record.accumulate :][: record.accumulate]
            port = _PortStep(self._layouts, before, number)
            state = self._compare(port, step, list(map(_to_jax, batches)), state)
            report.steps = number + 1
            if any(result.is_wrong for (stage, _), result in self._results.items() if stage != "optimizer"):
                break
            before = before | step.parameters | step.buffers
        self._conclude()
        return report

    def _conclude(self) -> None:
        report, wrong = self._report, [result for result in self._results.values() if result.is_wrong]
        if wrong and all(result.row.stage == "optimizer" for result in wrong):
            names = ", ".join(result.row.name for result in wrong)
            report.notes.append(f"not found in the port's optimizer, without effect on the parameters: {names}")
            for result in wrong:
                del self._results[result.row.stage, result.row.name]
        elif wrong:
            # A wrong loss, gradient or buffer does not come from an optimizer's array of an earlier step.
            first = min((r for r in wrong if r.row.stage != "optimizer"), key=lambda result: result.order)
            if first.row.stage in ("clipping", "parameters"):
                first = min(wrong, key=lambda result: result.order)
            report.step, report.stage, report.name = first.row.step, first.row.stage, first.row.name
            report.looks_like = self._explain(first, wrong)
        report.rows = sorted((r.row for r in self._results.values()), key=lambda row: STAGES.index(row.stage))

    def _explain(self, first: _Result, wrong: Sequence[_Result]) -> str:
        """Returns what a deviation looks like, or where one number says nothing, what another array looks like."""
        alike = [result for result in wrong if result.order[:3] == first.order[:3] and result is not first]
        for result in [first, *sorted(alike, key=lambda result: result.order)]:
            if result.evidence and (text := looks_like(result.row.stage, result.evidence())):
                return text if result is first else f"{result.row.name}: {text}"
        return ""

    def _gradient_of(self, parameters: Any, buffers: Any, batch: Any) -> tuple[Any, Arrays, Any]:
        """Returns the gradient of the port, the terms of its loss, and new buffers."""

        def total(parameters: Any) -> Any:
            terms, new = self._terms(parameters, buffers, batch)
            return sum(terms.values()), (terms, new)

        gradient, (terms, new) = jax.grad(total, has_aux=True)(parameters)
        return gradient, terms, new

    def _terms(self, parameters: Any, buffers: Any, batch: Any) -> tuple[Arrays, Any]:
        loss, new = self._port.call(parameters, buffers, batch)
        return {name: jnp.asarray(term) for name, term in terms_of(loss, "the port").items()}, new

    def _find_rounding(self, port: _PortStep, state: Any) -> None:
        record, parameters = self._record, port.parameters
        gradient = self._gradient_of, parameters, port.buffers, _to_jax(record.batches[0])
        programs = gradient, (self._optimizer.update, parameters, state, parameters)
        least = np.dtype(np.float64 if record.is_double else np.float32)
        found = [stage(*program).dtypes_from_inputs() | {least} for program in programs]
        self._usual, of_optimizer = (max(map(rounding, dtypes)) for dtypes in found)
        self._usual_of_optimizer = max(self._usual, of_optimizer)
        dtype = max(set[Any]().union(*found), key=rounding)
        if record.is_double and self._usual_of_optimizer > rounding(np.float64):
            self._report.notes.append(
                f"compared with the tolerance of {dtype}, in which the port computes with arguments of float64: a "
                "mistake as small as a wrong epsilon may not show"
            )

    def _compare(self, port: _PortStep, step: TrainingStep, batches: Sequence[Any], state: Any) -> Any:
        """Compares a step; returns the state of the optimizer after it."""
        gradients: list[Any] = []
        buffers = port.buffers
        for batch, expected in zip(batches, step.terms, strict=True):
            gradient, terms, buffers = self._gradient(port.parameters, buffers, batch)
            self._check_terms(port, step, batch, terms, expected)
            gradients.append(gradient)
        gradient = _mean(gradients)
        # As torch clips it: an optimizer that clips like optax, without torch's epsilon, does not change it again.
        clipped = _mean([gradient], step.clipping(self._record.max_norm))
        updates, after = self._update(clipped, state, port.parameters)
        named, changes = port.named(gradient), port.named(updates)
        self._check_gradients(port, step, batches[0], named, changes)
        self._check_extra(port, gradient, updates)
        results = self._of_optimizer(port, step, named, changes, after)
        limit = self._record.max_norm
        if any(result.is_wrong for result in results) or (limit is not None and not port.number):
            norm = self._clipping_norm(gradient, step.norm, state, port.parameters)
            expected = np.inf if limit is None else limit
            evidence = partial(self._evidence, port, step, batches[0], "", named, norm, expected)
            noise = 2 * _COARSE * (step.norm if limit is None else limit)
            if norm is not None:
                self._keep(self._result("clipping", "norm", port.number, norm, expected, noise, evidence))
        for result in results:
            self._keep(result)
        self._check_buffers(port, step, buffers)
        return after

    def _clipping_norm(self, gradient: Any, norm: float, state: Any, parameters: Any) -> float | None:
        """Returns the norm to which the port clips a gradient of this norm; infinite if it does not.

        What a clipping optimizer does is the same for larger gradients. One that does the same for all sizes, as
        sign SGD, does not show whether it clips: then it returns `None`.
        """
        limit = (self._record.max_norm or norm) / norm if norm else 1.0
        below, above = _COARSE * min(1.0, limit), max(1.0, limit * (_LARGER if self._record.max_norm else 1.0))

        def outcome(factor: float) -> list[Any]:
            return list(map(np.asarray, tree_leaves(self._update(_mean([gradient], factor), state, parameters))))

        whole = outcome(above)

        def is_same(factor: float) -> bool:
            return all(
                np.allclose(a, b, rtol=0, atol=_COARSE * float(np.max(abs(a), initial=0.0)))
                for a, b in zip(whole, outcome(factor), strict=True)
            )

        if not is_same(2.0 * above):
            return np.inf
        if is_same(below):
            return None
        while above - below > _COARSE / 2 * above:
            middle = (below + above) / 2
            below, above = (below, middle) if is_same(middle) else (middle, above)
        return above * norm

    def _result(
        self, stage: str, name: str, number: int, ours: Any, expected: Any, noise: Any = 0.0, evidence: Any = None
    ) -> _Result:
        """Compares arrays."""
        row = TrainingcheckRow(stage, name, number)
        if np.shape(ours) != np.shape(expected):
            return _Result(replace(row, verdict=f"shape {np.shape(ours)}"), np.inf)
        arrays = np.asarray(ours), np.asarray(expected)
        usual = self._usual_of_optimizer if stage in ("optimizer", "parameters") else self._usual
        found = errors(*arrays, usual, *self._tolerances, noise)
        for worst in found.worst:
            row.error, row.tolerance = worst.error, worst.allowed
        row.verdict = "differs" if found.num_wrong else "equal"
        ratio = row.error / row.tolerance if row.tolerance else np.inf
        return _Result(row, ratio if row.error else 0.0, evidence)

    def _keep(self, result: _Result) -> None:
        """Keeps the first deviation of an array, or the step that is nearest to one."""
        known = self._results.get(key := (result.row.stage, result.row.name))
        if known is None or (not known.is_wrong and result.excess > known.excess):
            self._results[key] = result

    def _evidence(
        self,
        port: _PortStep,
        step: TrainingStep,
        batch: Any,
        name: str,
        gradients: Any,
        ours: Any,
        expected: Any,
        key: str = "",
        before: Any = None,
    ) -> Evidence:
        def terms(batch: Any) -> Any:
            return self._terms(port.parameters, port.buffers, batch)[0]

        before = np.asarray(port.before.get(name, 0.0) if before is None else before)
        is_frozen = name in self._record.frozen
        last = self._record.steps[port.number - 1].state.get(key) if port.number else None
        state = None if last is None else port.expected(last)[name]
        ours, expected = np.asarray(ours), np.asarray(expected)
        return Evidence(name, step, ours, expected, gradients, is_frozen, before, state, batch, terms)

    def _check_terms(
        self, port: _PortStep, step: TrainingStep, batch: Any, ours: Arrays, expected: dict[str, float]
    ) -> None:
        # What may cancel in a loss is of the size of its derivative by the logarithms of the parameters.
        sizes = [float(np.sum(abs(g * port.before[name]))) for name, g in step.gradients.items()]
        noise = self._usual * sum(sizes) * self._record.accumulate
        for name in {**expected, **ours}:
            if name in ours and name in expected:
                evidence = partial(self._evidence, port, step, batch, name, {}, ours[name], expected[name])
                torch = np.array(expected[name])
                self._keep(self._result("loss", name, port.number, ours[name], torch, noise, evidence))
            else:
                verdict = "extra" if name in ours else "missing"
                self._keep(_Result(TrainingcheckRow("loss", name, port.number, verdict=verdict), np.inf))

    def _check_gradients(
        self, port: _PortStep, step: TrainingStep, batch: Any, ours: dict[str, Array], changes: dict[str, Array]
    ) -> None:
        noise = noise_of_zero(step.gradients.values(), self._usual)
        expected = step.gradients | {
            name: np.zeros_like(ours[name]) for name in self._record.frozen if name in ours and changes[name].any()
        }
        for name, gradient in expected.items():
            evidence = partial(self._evidence, port, step, batch, name, ours, ours[name], gradient)
            result = self._result("gradient", name, port.number, ours[name], gradient, noise, evidence)
            if name in self._port.lost and gradient.any():
                result = _Result(replace(result.row, verdict="missing"), np.inf)
            self._keep(result)
            error = abs(ours[name] - gradient)
            tiny = np.finfo(gradient.dtype).tiny
            relative = error / np.maximum(np.maximum(abs(gradient), error / _MAX_RELATIVE), tiny)
            if step.clipped:
                epsilon = TORCH_EPSILON / step.norm
                relative = relative + epsilon * (2 + epsilon) / _GROWTH  # that of the squares of gradients
            self._relative[name] = np.maximum(self._relative.get(name, 0.0), relative)
            is_zero, is_finite = (abs(gradient) <= noise).all(), np.isfinite(gradient).all()
            if gradient.size and name not in self._record.frozen and (is_zero or not is_finite):
                what = "zero" if is_zero else "not finite"
                self._note(f"{what} in torch is the gradient of {name}: mistakes in how it is trained may not show")

    def _check_extra(self, port: _PortStep, gradient: Any, updates: Any) -> None:
        """Finds parameters of the port that torch does not have, and that are trained."""
        gradients, changes = arrays_by_path(gradient), arrays_by_path(updates)
        for path in self._port.extra:
            if np.any(gradients[path]) and np.any(changes[path]):
                row = TrainingcheckRow("gradient", f"the port's {path}", port.number, verdict="extra")
                self._keep(_Result(row, np.inf))

    def _of_optimizer(
        self, port: _PortStep, step: TrainingStep, gradients: Any, changes: dict[str, Array], state: Any
    ) -> list[_Result]:
        """Returns the comparisons of an optimizer's state and of the changes of the parameters."""
        number, relative = port.number, self._relative
        groups, counts = _arrays_of_state(port.parameters, state)
        results: list[_Result] = []

        def compare(stage: str, name: str, ours: Any, expected: Any, noise: Any = 0.0, key: str = "") -> _Result:
            size = max(self._sizes.get((key, name), 0.0), float(np.max(abs(expected), initial=0.0)))
            self._sizes[key, name] = size
            noise = noise + _GROWTH * relative.get(name, 0.0) * size
            evidence = partial(self._evidence, port, step, None, name, gradients, ours, expected, key)
            return self._result(stage, f"{key} of {name}" if key else name, number, ours, expected, noise, evidence)

        for rank, (key, arrays) in enumerate(step.state.items()):
            expected = port.expected(arrays)
            candidates = [
                [compare("optimizer", name, ours[name], expected[name], key=key) for name in arrays]
                for ours in map(port.named, groups)
            ]
            results += [result._replace(rank=rank) for result in min(candidates, key=_unlikeness, default=[])]
        if step.count >= 0 and counts:
            nearest = min(counts, key=lambda count: abs(count - step.count))
            both = np.array(nearest), np.array(step.count)
            evidence = partial(self._evidence, port, step, None, "", gradients, *both)
            results.append(self._result("optimizer", "step", number, *both, evidence=evidence))
        torch = {name: x - port.before[name] for name, x in step.parameters.items()}
        expected = port.expected(torch)
        for name in [*step.parameters, *self._record.frozen]:
            if name in changes and name not in self._port.lost:
                rounding = _ULPS * self._eps * abs(port.before[name])
                results.append(compare("parameters", name, changes[name], expected[name], rounding))
        return results

    def _check_buffers(self, port: _PortStep, step: TrainingStep, buffers: Any) -> None:
        after = step.parameters | step.buffers
        if self._has_buffers:
            ours, before = self._port.returned_buffers(buffers), arrays_by_path(port.buffers)
            expected = self._port.expected_buffers(after)
            for path, names in self._port.buffer_sources.items():
                if names:
                    what, both = ", ".join(sorted(names)), (ours[path], expected[path])
                    evidence = partial(self._evidence, port, step, None, what, {}, *both, before=before[path])
                    self._keep(self._result("buffers", what, port.number, *both, evidence=evidence))
        missing, notes = self._port.unreturned_buffers(port.before, step.buffers)
        for name in missing:
            self._keep(_Result(TrainingcheckRow("buffers", name, port.number, verdict="missing"), np.inf))
        for note in notes:
            self._note(note)

    def _note(self, text: str) -> None:
        if text not in self._report.notes:
            self._report.notes.append(text)


def _unlikeness(results: Sequence[_Result]) -> tuple[int, float]:
    """Returns how many arrays are wrong, and how far they are from being proportional to the right ones."""
    found = [result.evidence() for result in results if result.is_wrong and result.evidence]
    distances = [fit(e.ours, e.expected)[1] / (np.linalg.norm(e.ours) or 1.0) for e in found]
    return len(found), float(sum(distances))


@jax.jit
def _mean(trees: Sequence[Any], factor: float = 1.0) -> Any:
    return tree_map(lambda *leaves: sum(leaves) * (factor / len(leaves)), *trees)


def _to_jax(tree: Any) -> Any:
    def converted(leaf: Any) -> Any:
        return jnp.asarray(leaf) if is_array_leaf(leaf) else leaf

    return tree_map(converted, tree)


def _with_long_count(leaf: Any) -> Any:
    """Returns a count with 64 bits: of one with 32 bits, JAX computes the fractions that schedules take in float32."""
    is_count = is_array_leaf(leaf) and leaf.dtype == np.int32 and leaf.shape == ()
    return leaf.astype(np.int64) if is_count else leaf


def _with_dtype_of(like: Any, array: Any) -> Any:
    return jnp.asarray(array, like.dtype)


def _arrays_of_state(parameters: Any, state: Any) -> tuple[list[Any], list[int]]:
    """Returns the arrays of an optimizer's state that belong to parameters, as trees of these, and its counts."""
    of_parameters, _ = tree_flatten_with_path(parameters)
    groups: dict[Any, dict[Any, Any]] = {}
    counts: list[int] = []
    for path, leaf in tree_flatten_with_path(state)[0]:
        if is_array_leaf(leaf) and not is_inexact(leaf.dtype) and leaf.shape == ():
            counts.append(int(leaf))
        for own, parameter in of_parameters:
            start = len(path) - len(own)
            if start >= 0 and path[start:] == own and np.shape(leaf) == parameter.shape and is_inexact(leaf.dtype):
                groups.setdefault(path[:start], {})[own] = leaf

    def as_tree(arrays: dict[Any, Any]) -> Any:
        def of_parameter(path: Any, parameter: Any) -> Any:
            return arrays.get(path, np.zeros_like(parameter))

        return tree_map_with_path(of_parameter, parameters)

    # Transformations of some parameters each, as those of `optax.multi_transform`, have the array of one name together.
    merged: list[tuple[Any, dict[Any, Any]]] = []
    for path, arrays in groups.items():
        rest = (others for name, others in merged if name == path[-1:] and not others.keys() & arrays.keys())
        if (others := next(rest, None)) is not None:
            others.update(arrays)
        else:
            merged.append((path[-1:], arrays))
    return [as_tree(arrays) for _, arrays in merged], counts
