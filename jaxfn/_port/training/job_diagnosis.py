"""Descriptions of the first deviation of a training job, as text; "" where nothing is known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path, tree_unflatten

from jaxfn._check.staging import stage
from jaxfn._jaxpr import needed_eqns
from jaxfn._parity.inputs import Array
from jaxfn._port.training.job_record import TrainingStep

_CLOSE = 1e-6  # the relative error of a number that counts as explained
_UNEXPLAINED = 3e-3  # the part of the difference of two arrays that an explanation may leave
_SENSITIVE = 0.1  # relative to the largest effect of an epsilon
_SPREAD = 0.2


@dataclass(frozen=True)
class Evidence:
    """A step that deviates.

    Attributes:
      name: the name of the parameter, or of the term of the loss; "" of what belongs to all parameters.
      step: what torch computed.
      ours, expected: the numbers or arrays that deviate.
      gradients: all gradients of the port.
      is_frozen: whether torch has frozen the parameter.
      before: the parameter, or the port's buffer, before the step.
      state: of the optimizer's state, torch's array before the step.
      batch: of losses and gradients, a batch for which they deviate.
      terms: the function that returns the terms of the port's loss for a batch.
    """

    name: str
    step: TrainingStep
    ours: Array
    expected: Array
    gradients: Mapping[str, Array]
    is_frozen: bool
    before: Array
    state: Array | None
    batch: Any
    terms: Callable[[Any], Any]


def looks_like(stage: str, evidence: Evidence) -> str:
    """Returns what a deviation looks like."""
    return _DESCRIBE[stage](evidence) if stage in _DESCRIBE else ""


def _loss(found: Evidence) -> str:
    ours, expected = float(found.ours), float(found.expected)
    leaves = tree_flatten_with_path(found.batch)
    texts = [text for text, factor in _factors([x for _, x in leaves[0]]) if _is_close(ours, factor * expected)]
    if texts:
        is_one_of_several = len(texts) > 1 and " one over " in texts[0]
        return f"{ours / expected:.4g} times torch's: {'such as ' if is_one_of_several else ''}{texts[0]}"
    if text := _use_of_batch(found):
        return text
    for path, changed, text in _changed_batches(leaves):
        if _is_close(float(found.terms(changed)[found.name]), expected):
            return f"it agrees with {path} of the batch {text}"
    return ""


def _use_of_batch(found: Evidence) -> str:
    """Says whether the port draws random numbers, or does not use an array of the batch."""
    staged = stage(found.terms, found.batch)
    if any(eqn.primitive.name.startswith(("random_", "threefry")) for eqn in staged.eqns):
        return "the port draws random numbers, as dropout does"
    _, needed = needed_eqns(staged.jaxpr, staged.jaxpr.outvars)
    paths = [keystr(path) for path, _ in tree_flatten_with_path(found.batch)[0]]
    unused = [path for path, v in zip(paths, staged.jaxpr.invars, strict=True) if v not in needed]
    return f"the port does not use {', '.join(unused)} of the batch" if unused else ""


def _factors(arrays: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields factors of a loss, with what they mean."""
    yield "the sign", -1.0
    masks: list[float] = []
    sizes: list[float] = []
    for array in map(np.asarray, arrays):
        sizes += [*np.cumprod(array.shape), *array.shape]
        if array.ndim > 1:  # a loss of the next words has one less than there are
            sizes.append(array.shape[0] * (array.shape[1] - 1))
        if np.isin(array, (0, 1)).all():
            masks.append(array.sum())
        elif array.dtype.kind == "i":
            masks.append((array >= 0).sum())  # Losses ignore negative labels.
    numbers = [float(n) for n in dict.fromkeys(masks + sizes) if n > 1]
    for n in numbers:
        yield f"a sum where torch has a mean over {n:g}", n
        yield f"a mean over {n:g} where torch has a sum", 1 / n
    for n in numbers:
        for m in numbers:
            if n != m:
                yield f"a mean over {m:g} where torch has one over {n:g}", n / m


def _changed_batches(leaves: Any) -> Iterator[tuple[str, Any, str]]:
    paths, tree = leaves
    values = [x for _, x in paths]

    def with_value(i: int, value: Any) -> Any:
        return tree_unflatten(tree, [*values[:i], jnp.asarray(value), *values[i + 1 :]])

    for i, (path, value) in enumerate(paths):
        array = np.asarray(value)
        for axis in range(array.ndim) if array.dtype.kind in "iu" else ():
            for shift in (1, -1):
                yield keystr(path), with_value(i, np.roll(array, shift, axis)), f"shifted by {shift} along axis {axis}"
        if array.dtype.kind == "b" or (array.ndim and np.isin(array, (0, 1)).all()):
            yield keystr(path), with_value(i, np.ones_like(array)), "all ones: a mask that is ignored"
            yield keystr(path), with_value(i, 1 - array if array.dtype.kind != "b" else ~array), "inverted"


def _gradient(found: Evidence) -> str:
    if found.is_frozen:
        return "a frozen parameter that is trained"
    if not found.ours.any():
        return "zero in the port: stop_gradient, or a constant"
    factor = _factor(found.ours, found.expected)
    known = found.step.gradients
    wrong = [name for name, x in known.items() if np.linalg.norm(found.gradients[name] - x) > _CLOSE * found.step.norm]
    factors = [_factor(found.gradients[name], known[name]) for name in wrong if not _is_single(known[name])]
    if factor is not None and factors and all(x == factor for x in factors):
        return f"{factor:.4g} times torch's, while the losses agree"
    return _use_of_batch(found) or (
        "the losses agree: something is constant in one library (stop_gradient, detach) that the other differentiates, "
        "or they agree for these parameters alone"
    )


def _clipping(found: Evidence) -> str:
    norms = ["does not clip" if np.isinf(norm) else f"clips to {norm:.3g}" for norm in (found.ours, found.expected)]
    return f"the port {norms[0]}, torch {norms[1]}"


def _state(found: Evidence) -> str:
    if not found.name:
        return "the optimizer counts other steps"
    if _is_single(found.expected):
        return ""
    factor = _factor(found.ours, found.expected)
    if factor is not None:
        return f"{factor:.4g} times torch's: another decay rate of the average, or a sum of accumulated gradients"
    difference = found.ours - found.expected
    if found.state is not None and (rate := _multiple(difference, found.state)) is not None:
        return f"it differs by {rate:.4g} times its last value: another decay rate of the average"
    if (decay := _multiple(difference, found.before)) is not None:
        return (
            f"it differs by {decay:.4g} times the parameter: weight decay, in one library a part of the gradient "
            "(optax.add_decayed_weights before the optimizer), in the other not (optax.adamw)"
        )
    return ""


def _change(found: Evidence) -> str:
    if found.is_frozen:
        return "a frozen parameter that is trained or decays"
    if _is_single(found.expected):
        return ""
    factor = _factor(found.ours, found.expected)
    if factor is not None:
        return (
            f"its change is {factor:.6g} times torch's: another learning rate, schedule or bias correction, or its "
            "update is clipped in one library"
        )
    if (decay := _multiple(found.ours - found.expected, found.before)) is not None:
        return (
            f"its change differs by {decay:.4g} times the parameter: weight decay (`weight_decay` and `mask` of optax)"
        )
    return _epsilon(found)


def _buffer(found: Evidence) -> str:
    before = 1.0 * found.before  # of booleans, NumPy computes no differences
    ours, expected = found.ours - before, found.expected - before
    if not ours.any() or not expected.any():
        return f"{'torch' if ours.any() else 'the port'} does not change it"
    factor = None if _is_single(expected) else _factor(ours, expected)
    return "" if factor is None else f"its change is {factor:.4g} times torch's: another momentum (1 - that of flax)"


def _epsilon(found: Evidence) -> str:
    """Returns the epsilon that explains a first step, by the sizes of gradients where it matters most."""
    size = abs(found.step.gradients[found.name])
    with np.errstate(all="ignore"):
        ratio = abs(found.expected / found.ours)
        for text, epsilon in (
            ("", (ratio - 1) * size),
            (" inside the root (`eps_root`, or `eps_in_sqrt`, of optax)", (ratio**2 - 1) * size**2),
        ):
            known = epsilon[abs(ratio - 1) > _SENSITIVE * np.nanmax(abs(ratio - 1))]
            if known.size > 1 and np.ptp(known) < _SPREAD * abs(known).max():
                return f"another epsilon{text}, larger by about {np.median(known):.1g} for the unaveraged gradient"
    order = np.argsort(size, axis=None)
    errors = np.ravel(abs(found.ours - found.expected))[order][np.ravel(size)[order] > _CLOSE * size.max(initial=0)]
    if errors.size > 1 and (np.diff(errors) <= _SPREAD * errors[:-1]).all():
        return "it differs more where the gradient is smaller: another epsilon"
    return ""


def _is_single(array: Array) -> bool:
    """Whether an array has one number that is not zero: any other number is a multiple of it."""
    return np.count_nonzero(array) == 1


def _factor(ours: Array, expected: Array) -> float | None:
    """Returns the constant factor between two arrays, if there is one."""
    multiple, (_, rest) = _multiple(ours - expected, expected), fit(ours, expected)
    return None if multiple is None or rest > _UNEXPLAINED * np.linalg.norm(ours) else float(f"{1 + multiple:.7g}")


def _multiple(difference: Array, basis: Array) -> float | None:
    """Returns the multiple of an array that is nearly a difference, if there is one."""
    multiple, rest = fit(difference, basis)
    return multiple if rest < _UNEXPLAINED * np.linalg.norm(difference) else None


def fit(array: Array, basis: Array) -> tuple[float, float]:
    """Returns the factor with which `basis` is nearest to an array, and the distance."""
    size = float(np.vdot(basis, basis).real)
    factor = float(np.vdot(basis, array).real) / size if size else 0.0
    return factor, float(np.linalg.norm(array - factor * basis))


_DESCRIBE: dict[str, Callable[[Evidence], str]] = {
    "loss": _loss,
    "gradient": _gradient,
    "clipping": _clipping,
    "optimizer": _state,
    "parameters": _change,
    "buffers": _buffer,
}


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * abs(b)
