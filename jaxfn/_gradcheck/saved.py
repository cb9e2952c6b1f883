"""Search for a saved array that makes a wrong rule right if it replaces another one, or a term if it is scaled.

# Note: how a rule runs with other saved arrays

With `Observation.VALUES`, the staged rule labels what `forward` takes and returns, and the saved arrays that `backward`
or `jvp` reads. Evaluated again, the latter labels return other arrays:

    forward    y = sigmoid(x)                 labels: input x, output 0
    backward   g * y * (1 - y), with x for y  label: saved_tensors[0], which returns output 0

Inputs may be equal, zero or one at the checked point, so everything has to be right at a second, random point too.

If no saved array does, each operand of an addition in the rule is scaled, by the factor that its results along one
vector ask for: the rule of x² + sin(x) may have x in place of 2x.

There are about as many replacements as pairs of saved arrays. They are evaluated along one vector, in batches, as one
function of the operands that change. Only those few that are right there, at both points, are compared as a
rule is. The search evaluates at most a few times as many vectors as the check.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from jax.tree_util import tree_leaves, tree_unflatten

from jaxfn._check.draws import random_generator
from jaxfn._check.staging import JaxprFunction, bytes_per_call, stage
from jaxfn._compat import eqn_source_line, eval_eqn, is_plain_jit, jit_p
from jaxfn._gradcheck.compare import Comparison, Reference
from jaxfn._gradcheck.evaluation.batches import BATCH_BYTES
from jaxfn._gradcheck.evaluation.vectors import Arrays, Vectors, random_vectors
from jaxfn._gradcheck.problem.derivatives import ADMode, available
from jaxfn._gradcheck.problem.problem import Leaf
from jaxfn._gradcheck.tolerance import ATOL, RTOL
from jaxfn._jaxpr import eval_jaxpr_with, is_any_of, primitives, subjaxprs
from jaxfn._observe import OBSERVATION, Label, Observation, label_p
from jaxfn._tree import is_inexact

_MAX_EXPLANATIONS = 3
_MAX_COMPARED = 8  # replacements that are compared as a rule is
_FACTOR = 5  # how many times as many vectors as the check the search may evaluate
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


# Returns what takes the place of an operand, from all that was evaluated so far.
_Find = Callable[[_Key, Sequence[_Evaluated]], Any]


def explain_by_saved(comparison: Comparison, reference: Reference) -> tuple[str | None, str | None]:
    """Returns which change alone makes all derivatives of a mode right: of a saved array, or of a factor of a term.

    Returns:
      The explanation, or `None`; and a note if the search was stopped.
    """
    d, evaluator, mode = comparison.derivatives, comparison.evaluator, reference.mode
    if not d.is_traced:
        return None, None
    points, vectors = (evaluator.xs, _second_point(evaluator.xs)), random_vectors(mode.seed_leaves, 0)
    at_points = [replace(comparison, evaluator=evaluator.at(xs)) for xs in points]

    def is_right(replacements: _Replacements) -> bool:
        derivative = stage(partial(_results, rule, replacements), points[0], vectors)
        return not any(there.blocks(replace(reference, derivative=derivative)) for there in at_points)

    def search(
        candidates: Sequence[tuple[str, _Replacements]], variants: _Variants
    ) -> tuple[list[tuple[str, _Replacements]], bool]:
        """Returns the candidates that are right, and whether there were too many to compare."""
        are_right = variants.are_right([replacements for _, replacements in candidates])
        found = [candidate for candidate, right in zip(candidates, are_right, strict=True) if right]
        return [found for found in found[:_MAX_COMPARED] if is_right(found[1])], len(found) > _MAX_COMPARED

    try:
        with OBSERVATION(Observation.VALUES):
            rule = stage(mode.derivative_of(d.call), points[0], vectors)
            evaluated = [_evaluate(rule, _own, xs, vectors)[1] for xs in points]
        limit = _limit(rule, comparison, mode)
        make = partial(_Variants, rule, evaluated, at_points, reference, vectors)
        every = list(_candidates(evaluated[1]))
        candidates = every[:limit]
        right, is_cut = search(candidates, make({target for _, replaced in candidates for target in replaced}))
        # A swap explains no more than the half of it that suffices.
        texts = [text for text, replaced in right if not any(other.items() < replaced.items() for _, other in right)]
        if is_cut or len(every) > limit:
            what = f"wrong saved tensor stopped after {len(candidates)} of {len(every)} replacements"
        else:
            what, terms = "", {key: text for text, key in _terms(evaluated[1])}
            if not texts and 2 * len(terms) <= limit:
                variants = make(terms)
                scaled = [
                    (text, {key: factor}) for (key, text), factor in zip(terms.items(), variants.factors(), strict=True)
                ]
                right, is_cut = search(scaled, variants)
                texts = [
                    f"a wrong factor of one term: {mode.method} is right with {factor:.6g} times the {text}"
                    for text, replaced in right
                    for factor in replaced.values()
                ]
            what = "wrong factor of a term stopped" if not texts and (is_cut or 2 * len(terms) > limit) else ""
    except Exception:  # the user's code, traced again or run for other arrays, must not hide the report
        return None, None
    if 0 < len(texts) <= _MAX_EXPLANATIONS:
        return " or ".join(texts), None
    return None, f"the search for a {what}" if what else None


def _limit(rule: JaxprFunction, comparison: Comparison, mode: ADMode) -> int:
    """Returns the largest number of replacements: more only if one batch holds them."""
    vectors_of_check = sum(
        basis.size for leaves in (mode.seed_leaves, mode.result_leaves) for basis in comparison.bases(leaves)
    )
    return max(_FACTOR * vectors_of_check, BATCH_BYTES // max(bytes_per_call(rule), 1))


class _Variants:
    """A rule along one vector, at several points, as one function of some of its operands.

    Args:
      rule: the rule.
      evaluated: its `label` eqns and additions, at each point.
      at_points: the comparisons at the points.
      reference: what decides.
      vectors: the vector.
      targets: the operands.
    """

    def __init__(
        self,
        rule: JaxprFunction,
        evaluated: Sequence[Sequence[_Evaluated]],
        at_points: Sequence[Comparison],
        reference: Reference,
        vectors: Arrays,
        targets: Collection[_Key],
    ) -> None:
        self._targets = sorted(targets)
        self._evaluated, self._at_points, self._vectors = evaluated, at_points, vectors
        self._mode, self._by_autodiff = reference.mode, reference.is_autodiff
        operands = [_own(key, evaluated[0]) for key in self._targets]
        self._leaves = (*self._mode.seed_leaves, *(Leaf("", x.shape, x.dtype) for x in operands))

        def with_operands(xs: Arrays, arrays: Arrays) -> tuple[Arrays, Arrays]:
            given = dict(zip(self._targets, arrays[len(vectors) :], strict=True))

            def find(key: _Key, eqns: Sequence[_Evaluated]) -> Any:
                return given[key] if key in given else _own(key, eqns)

            (outputs, results), _ = _evaluate(rule, find, xs, arrays[: len(vectors)])
            return outputs, [*outputs, *results]

        self._staged = stage(with_operands, at_points[0].evaluator.xs, [*vectors, *operands])

    def _along(self, point: int, replacements: Sequence[_Replacements]) -> tuple[Arrays, Arrays, Arrays]:
        """Returns outputs, results and expected results; first those of the rule, then with each replacement."""
        comparison, eqns, mode = self._at_points[point], self._evaluated[point], self._mode
        every: Sequence[_Replacements] = [{}, *replacements]

        def arrays_of(numbers: Any) -> Arrays:
            seeds = [np.broadcast_to(v, (len(numbers), *v.shape)) for v in self._vectors]
            rows = [[_replaced(every[number], key, eqns) for key in self._targets] for number in numbers]
            return [*seeds, *map(np.stack, zip(*rows, strict=True))]

        batch = Vectors(self._leaves, tuple(range(len(self._leaves))), len(every), arrays_of)
        (values,) = comparison.evaluator.along([self._staged], batch)
        count = len(mode.result_leaves)
        outputs, results = values[:-count], values[-count:]
        if self._by_autodiff:
            reference = available(mode.reference)(comparison.evaluator.xs, self._vectors)[1]
            return outputs, results, list(map(np.ravel, reference))
        expected, directions = _difference(comparison, mode, self._vectors)
        if not mode.is_forward:
            results = [np.sum(list(map(_inner_products, results, directions)), 0)]
        return outputs, results, expected

    def are_right(self, replacements: Sequence[_Replacements]) -> Any:
        """Returns which of the replacements make the rule right at all points."""
        tolerance = replace(self._at_points[0].tolerance, atol=_COARSER * ATOL, rtol=_COARSER * RTOL)
        are_right = np.ones(len(replacements), bool)
        for point in range(len(self._at_points)) if replacements else ():
            outputs, results, expected = self._along(point, replacements)
            # The checked function must not change: it may itself read what was saved.
            for value, right in zip([*outputs, *results], [*(y[0] for y in outputs), *expected], strict=True):
                are_right &= tolerance.agreement(value[1:], right).reshape(len(replacements), -1).all(1)
        return are_right

    def factors(self) -> list[float]:
        """Returns for each operand the factor with which the rule may be right; 1 if it has no effect."""
        if not self._targets:
            return []
        _, results, expected = self._along(0, [{key: 2.0} for key in self._targets])
        pairs = list(zip(results, expected, strict=True))
        terms = [(values[1:] - values[0]).reshape(len(self._targets), -1) for values, _ in pairs]
        size: Any = sum((abs(term) ** 2).sum(1) for term in terms)
        wanted = sum(
            _inner_products(term, np.asarray(right - values[0]))
            for term, (values, right) in zip(terms, pairs, strict=True)
        )
        return (1 + np.divide(wanted, size, where=size > 0, out=np.zeros(len(self._targets)))).tolist()


def _difference(comparison: Comparison, mode: ADMode, vectors: Arrays) -> tuple[Arrays, Arrays]:
    """Returns finite differences: the results of forward mode, or their inner product with the cotangents.

    The second item is the direction, in which they are taken.
    """
    d = comparison.derivatives
    directions = vectors if mode.is_forward else random_vectors(d.inputs, 1)
    along = Vectors(d.inputs, tuple(range(len(d.inputs))), 1, lambda _: [v[None] for v in directions])
    columns = [y[0] for y in comparison.columns(along)[0]]
    if mode.is_forward:
        return columns, directions
    return [np.sum(list(map(_inner_products, columns, vectors)), 0)], directions


def _inner_products(arrays: Any, vector: Any) -> Any:
    """Returns the real inner products of a vector with one or with several others."""
    return (arrays.conj() @ vector.ravel()).real


def _second_point(xs: Sequence[Any]) -> Arrays:
    """Returns other inputs: random factors make equal ones differ, and none is zero."""
    generator = random_generator("second point")
    sizes = [generator.uniform(0.01, 0.1, np.shape(x)) for x in xs]
    return [x * (1 - size) + (x == 0) * size for x, size in zip(map(np.asarray, xs), sizes, strict=True)]


def _own(key: _Key, eqns: Sequence[_Evaluated]) -> Any:
    number, index = key
    return eqns[number].arrays[index]


def _replaced(replacements: _Replacements, key: _Key, eqns: Sequence[_Evaluated]) -> Any:
    other = replacements.get(key, key)
    return _own(other, eqns) if isinstance(other, tuple) else other * _own(key, eqns)


def _results(rule: JaxprFunction, replacements: _Replacements, *args: Any) -> Any:
    return _evaluate(rule, partial(_replaced, replacements), *args)[0]


def _evaluate(rule: JaxprFunction, find: _Find, *args: Any) -> tuple[Any, list[_Evaluated]]:
    """Returns the results of a rule with other operands, and its `label` eqns and additions."""
    evaluated: list[_Evaluated] = []

    def evaluate(_: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive is label_p or is_any_of(eqn, _ADDITIONS):
            number = len(evaluated)
            evaluated.append(_Evaluated(eqn, eqn.params.get("labels", ()), operands))
            operands = [find((number, i), evaluated) for i in range(len(operands))]
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
        if reads and n > reads[0] and not labels and _is_value(arrays[0]):
            for i, text in enumerate(("first", "second")):
                yield f"{text} term at {eqn_source_line(eqn)}", (n, i)


def _is_read(eqn: _Evaluated) -> bool:
    return bool(eqn.labels) and eqn.labels[0].role == "saved" and eqn.labels[0].method != "forward"


def _candidates(eqns: Sequence[_Evaluated]) -> Iterator[tuple[str, _Replacements]]:
    """Yields explanations, as text and as the replacements that have to make the rule right."""
    label = {(n, i): label for n, eqn in enumerate(eqns) for i, label in enumerate(eqn.labels)}
    arrays = {
        (n, i): np.asarray(x)
        for n, eqn in enumerate(eqns)
        for i, x in enumerate(eqn.arrays)
        if eqn.labels and _is_value(x)
    }
    kind = {key: (x.shape, x.dtype) for key, x in arrays.items()}
    value = {key: hash(x.tobytes()) for key, x in arrays.items()}

    def name(key: _Key) -> str:
        return label[key].name if label[key].role == "saved" else f"{label[key].role} {label[key].name}"

    reads = [n for n, eqn in enumerate(eqns) if _is_read(eqn)]
    for function, method in {eqns[n].labels[0][:2]: None for n in reads}:
        calls = [n for n in reads if eqns[n].labels[0][:2] == (function, method)]
        if len({eqns[n].labels for n in calls}) > 1:
            continue
        saved = [(n, i) for n, i in arrays if n == calls[0]]
        forward = [key for key in arrays if label[key][:2] == (function, "forward") and label[key].role != "saved"]
        if len({n for n, i in forward if label[n, i].role == "output"}) > 1:  # which call do they belong to?
            forward = []
        where = f"{function}.{method} is right with"
        for a in saved:
            known = {value[a]}
            for b in [*saved, *forward]:
                if kind[a] == kind[b] and value[b] not in known:
                    known.add(value[b])
                    replacements = {(n, a[1]): (n, b[1]) if b in saved else b for n in calls}
                    yield f"a wrong saved tensor: {where} {name(b)} instead of {name(a)}", replacements
        for a, b in combinations(saved, 2):
            if kind[a] == kind[b] and value[a] != value[b]:
                replacements = {(n, i): (n, j) for n in calls for i, j in ((a[1], b[1]), (b[1], a[1]))}
                yield f"swapped saved tensors: {where} {name(a)} and {name(b)} swapped", replacements


def _is_value(array: Any) -> bool:
    return is_inexact(array.dtype)
