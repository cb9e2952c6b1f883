"""Search for a saved array that makes a wrong rule right if it replaces another one, or a term if it is scaled.

# Note: how a rule runs with other saved arrays

With `Observation.VALUES`, the staged rule labels what `forward` takes and returns, and the saved arrays that `backward`
or `jvp` reads. Evaluated again, the latter labels return other arrays:

    forward    y = sigmoid(x)                 labels: input x, output 0
    backward   g * y * (1 - y), with x for y  label: saved_tensors[0], which returns output 0

Inputs may be equal, zero or one at the checked point, so everything has to be right at a second, random point too.

If no saved array does, each operand of an addition in the rule is scaled, by the factor that its results along one
vector ask for: the rule of x² + sin(x) may have x in place of 2x.

There are about as many replacements as pairs of saved arrays. Most are refuted by the rule's results along one vector,
for which nothing is staged or compiled. The search stops when it has taken several times as long as the check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from jaxfn._check.draws import random_generator
from jaxfn._check.staging import JaxprFunction, stage
from jaxfn._compat import eqn_source_line, eval_eqn, is_plain_jit, jit_p
from jaxfn._gradcheck.compare import Comparison
from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator
from jaxfn._gradcheck.evaluation.execution import ExecutionMode
from jaxfn._gradcheck.evaluation.vectors import Arrays, Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, available
from jaxfn._gradcheck.projections import Projections
from jaxfn._gradcheck.tolerance import ATOL, RTOL
from jaxfn._jaxpr import eval_jaxpr_with, is_any_of, primitives, subjaxprs
from jaxfn._observe import OBSERVATION, Label, Observation, label_p
from jaxfn._tree import is_inexact

_MAX_EXPLANATIONS = 3
_FACTOR = 5  # how many times as long as the check the search may take
_LEAST_SECONDS = 0.5
_COARSER = 1e3  # factor of the tolerance along one vector, where nothing tells what is rounding
_INLINED = (["jit"], ["call"], ["checkpoint"])
_ADDITIONS = primitives("add sub add_any")

_Key = tuple[int, int]  # of an operand: the number of its `label` eqn or addition, as evaluated, and its index
_Replacements = Mapping[_Key, _Key | float]  # by another one, or by a multiple of itself


class _Evaluated(NamedTuple):
    """A `label` eqn, or an addition, as it was evaluated."""

    eqn: Any
    labels: tuple[Label, ...]  # none of an addition
    arrays: Sequence[Any]


def explain_by_saved(
    comparison: Comparison, mode: ADMode, *, by_autodiff: bool, is_fast: bool, seconds: float
) -> tuple[str | None, str | None]:
    """Returns which change alone makes all derivatives of a mode right: of a saved array, or of a factor of a term.

    Returns:
      The explanation, or `None`; and a note if the search was stopped.
    """
    deadline = perf_counter() + max(_FACTOR * seconds, _LEAST_SECONDS)
    d, evaluator = comparison.derivatives, comparison.evaluator
    if not d.is_traced:
        return None, None
    points, vectors = (evaluator.xs, _second_point(evaluator.xs)), random_vectors(mode.seed_leaves, 0)
    try:
        with OBSERVATION(Observation.VALUES):
            rule = stage(mode.derivative_of(d.call), points[0], vectors)
            eqns = _evaluate(rule, {}, points[1], vectors)[1]
            candidates = list(_candidates(eqns))
        refuted, factor = _along_one_vector(comparison, mode, rule, points[0], vectors, by_autodiff=by_autodiff)
    except Exception:  # the user's code, traced again or at another point, must not hide the report
        return None, None
    at_points = [replace(comparison, evaluator=evaluator.at(xs)) for xs in points]
    methods: list[Comparison | Projections] = [Projections(_uncompiled(c)) for c in at_points]
    methods += [] if is_fast else at_points

    derivatives: list[JaxprFunction] = []  # evaluators identify a function by its id, so all of these have to live

    def is_right(replacements: _Replacements) -> bool:
        derivative = stage(lambda *args: _evaluate(rule, replacements, *args)[0], points[0], vectors)
        derivatives.append(derivative)
        try:
            outputs = (f(points[0], vectors)[0] for f in (rule, derivative))
            if not all(map(comparison.tolerance.agrees, *outputs)):  # the checked function itself reads what was saved
                return False
            other = replace(mode, rule=derivative)
            return not any(
                m.with_autodiff(other) if by_autodiff else m.with_differences(other, derivative) for m in methods
            )
        except Exception:  # a Python callback may raise for other arrays
            return False

    right: list[tuple[str, _Replacements]] = []
    for i, (text, replacements) in enumerate(candidates):
        if perf_counter() > deadline:
            return None, f"the search for a wrong saved tensor stopped after {i} of {len(candidates)} replacements"
        if not refuted(replacements) and is_right(replacements):
            right.append((text, replacements))
    # A swap explains no more than the half of it that suffices.
    texts = [text for text, replaced in right if not any(other.items() < replaced.items() for _, other in right)]
    for text, key in [] if texts else _terms(eqns):
        if perf_counter() > deadline:
            return None, "the search for a wrong factor of a term stopped"
        scale = factor(key)
        if scale is not None and not refuted({key: scale}) and is_right({key: scale}):
            texts.append(f"a wrong factor of one term: {mode.method} is right with {scale:.6g} times the {text}")
    return " or ".join(texts) if 0 < len(texts) <= _MAX_EXPLANATIONS else None, None


def _along_one_vector(
    comparison: Comparison, mode: ADMode, rule: JaxprFunction, xs: Arrays, vectors: Arrays, *, by_autodiff: bool
) -> tuple[Callable[[_Replacements], bool], Callable[[_Key], float | None]]:
    """Returns two functions that compare a rule's results along one vector.

    The first returns whether replacements are known not to make the rule right, the second the factor of a term with
    which it may be.
    """
    tolerance = replace(comparison.tolerance, atol=_COARSER * ATOL, rtol=_COARSER * RTOL)
    outputs = list(map(np.asarray, rule(xs, vectors)[0]))
    d = comparison.derivatives
    directions = vectors if mode.is_forward else random_vectors(d.inputs, 1)
    if by_autodiff:
        expected: Any = list(map(np.asarray, available(mode.reference)(xs, vectors)[1]))
    else:
        along = Vectors(d.inputs, tuple(range(len(d.inputs))), 1, lambda _: [v[None] for v in directions])
        expected = [y.reshape(leaf.shape) for y, leaf in zip(comparison.columns(along)[0], d.outputs, strict=True)]
        if not mode.is_forward:
            expected = [_inner_product(vectors, expected)]

    def evaluate(replacements: _Replacements) -> tuple[list[Any], list[Any]] | None:
        try:
            own, results = _evaluate(rule, replacements, xs, vectors)[0]
        except Exception:  # a Python callback may raise for other arrays
            return None
        if not (by_autodiff or mode.is_forward):
            results = [_inner_product(results, directions)]
        return list(map(np.asarray, own)), list(map(np.asarray, results))

    def refuted(replacements: _Replacements) -> bool:
        found = evaluate(replacements)
        if found is None:
            return True
        pairs = [*zip(found[0], outputs, strict=True), *zip(found[1], expected, strict=True)]
        return not all(tolerance.agrees(a, b) for a, b in pairs)

    def factor(key: _Key) -> float | None:
        once, twice = evaluate({}), evaluate({key: 2.0})
        if once is None or twice is None:
            return None
        term = [b - a for a, b in zip(once[1], twice[1], strict=True)]
        missing = [y - a for a, y in zip(once[1], expected, strict=True)]
        size = float(_inner_product(term, term))
        return 1 + float(_inner_product(term, missing)) / size if size else None

    return refuted, factor


def _inner_product(a: Sequence[Any], b: Sequence[Any]) -> Any:
    return np.asarray(sum(np.vdot(x, y).real for x, y in zip(a, b, strict=True)))


def _second_point(xs: Sequence[Any]) -> Arrays:
    """Returns other inputs: random factors make equal ones differ, and none is zero."""
    generator = random_generator("second point")
    sizes = [generator.uniform(0.01, 0.1, np.shape(x)) for x in xs]
    return [x * (1 - size) + (x == 0) * size for x, size in zip(map(np.asarray, xs), sizes, strict=True)]


def _uncompiled(comparison: Comparison) -> Comparison:
    """Returns a comparison that compiles nothing, for many functions along few vectors."""
    e = comparison.evaluator
    return replace(comparison, evaluator=BatchedEvaluator(ExecutionMode.PYTHON_LOOP, e.xs, e.max_memory, e.progress))


def _evaluate(rule: JaxprFunction, replacements: _Replacements, *args: Any) -> tuple[Any, list[_Evaluated]]:
    """Returns the results of a rule with replacements, and its `label` eqns and additions."""
    evaluated: list[_Evaluated] = []

    def replaced(key: _Key) -> Any:
        other = replacements.get(key, key)
        (n, i), factor = (other, None) if isinstance(other, tuple) else (key, other)
        return evaluated[n].arrays[i] if factor is None else evaluated[n].arrays[i] * factor

    def evaluate(_: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is label_p or is_any_of(eqn, _ADDITIONS):
            number = len(evaluated)
            evaluated.append(_Evaluated(eqn, eqn.params.get("labels", ()), operands))
            operands = [replaced((number, i)) for i in range(len(operands))]
            return operands if eqn.primitive is label_p else eval_eqn(eqn, operands)
        inner = subjaxprs(eqn)
        if [sub.kind for sub in inner] not in _INLINED or (eqn.primitive is jit_p and not is_plain_jit(eqn)):
            return eval_eqn(eqn, operands)
        return eval_jaxpr_with(evaluate, inner[0].jaxpr, inner[0].consts, [operands[i] for i in inner[0].operands])

    results = eval_jaxpr_with(evaluate, rule.jaxpr, rule.constants, tree_leaves(args))
    return tree_unflatten(rule.tree, results), evaluated


def _terms(eqns: Sequence[_Evaluated]) -> Iterator[tuple[str, _Key]]:
    """Yields the operands of additions after the first read of saved arrays: those of the rule, not of `forward`."""
    reads = [n for n, eqn in enumerate(eqns) if _is_read(eqn)]
    for n, (eqn, labels, arrays) in enumerate(eqns):
        if reads and n > reads[0] and not labels and is_inexact(arrays[0].dtype):
            for i, text in enumerate(("first", "second")):
                yield f"{text} term at {eqn_source_line(eqn)}", (n, i)


def _is_read(eqn: _Evaluated) -> bool:
    return bool(eqn.labels) and eqn.labels[0].role == "saved" and eqn.labels[0].method != "forward"


def _candidates(eqns: Sequence[_Evaluated]) -> Iterator[tuple[str, _Replacements]]:
    """Yields explanations, as text and as the replacements that have to make the rule right."""
    label = {(n, i): label for n, eqn in enumerate(eqns) for i, label in enumerate(eqn.labels)}

    def differ(a: _Key, b: _Key) -> bool:
        """Whether arrays of one shape and dtype have different values."""
        x, y = (eqns[n].arrays[i] for n, i in (a, b))
        return (x.shape, x.dtype) == (y.shape, y.dtype) and is_inexact(x.dtype) and not np.array_equal(x, y)

    def name(key: _Key) -> str:
        return label[key].name if label[key].role == "saved" else f"{label[key].role} {label[key].name}"

    reads = [n for n, eqn in enumerate(eqns) if _is_read(eqn)]
    for function, method in {eqns[n].labels[0][:2]: None for n in reads}:
        calls = [n for n in reads if eqns[n].labels[0][:2] == (function, method)]
        if len({eqns[n].labels for n in calls}) > 1:
            continue
        saved = [(calls[0], i) for i in range(len(eqns[calls[0]].labels))]
        forward = [key for key, own in label.items() if own[:2] == (function, "forward") and own.role != "saved"]
        if len({n for n, i in forward if label[n, i].role == "output"}) > 1:  # which call do they belong to?
            forward = []
        where = f"{function}.{method} is right with"
        for a in saved:
            known = [a]
            for b in [*saved, *forward]:
                if all(differ(x, b) for x in known):
                    known.append(b)
                    replacements = {(n, a[1]): (n, b[1]) if b in saved else b for n in calls}
                    yield f"a wrong saved tensor: {where} {name(b)} instead of {name(a)}", replacements
        for a, b in combinations(saved, 2):
            if differ(a, b):
                replacements = {(n, i): (n, j) for n in calls for i, j in ((a[1], b[1]), (b[1], a[1]))}
                yield f"swapped saved tensors: {where} {name(a)} and {name(b)} swapped", replacements
