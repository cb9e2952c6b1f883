"""What the first deviation of a training job looks like, in words; "" where nothing is known."""

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
from jaxfn._parity.job_record import TrainingStep

_CLOSE = 1e-6  # the relative error of a number that counts as explained
_SENSITIVE = 0.1  # relative to the largest effect of an epsilon
_SPREAD = 0.2
_IGNORED = -100  # the label that torch's losses ignore


@dataclass(frozen=True)
class Evidence:
    """A step that deviates.

    Attributes:
      name: the name of the parameter, or of the term of the loss; "" of what belongs to all parameters.
      step: what torch computed.
      ours, expected: the numbers or arrays that deviate.
      gradients: all gradients of the port.
      is_frozen: whether torch has frozen the parameter.
      before: the parameter before the step.
      batch, terms: the batch whose loss deviates, and what returns the terms of the port's loss for a batch.
    """

    name: str
    step: TrainingStep
    ours: Array
    expected: Array
    gradients: Mapping[str, Array]
    is_frozen: bool
    before: Array
    batch: Any = None
    terms: Callable[[Any], Any] | None = None


def looks_like(stage: str, evidence: Evidence) -> str:
    """Returns what a deviation looks like."""
    return _DESCRIBE[stage](evidence) if stage in _DESCRIBE else ""


def _loss(found: Evidence) -> str:
    assert found.terms is not None
    ours, expected = float(found.ours), float(found.expected)
    leaves = tree_flatten_with_path(found.batch)
    staged = stage(found.terms, found.batch)
    if any(eqn.primitive.name.startswith(("random_", "threefry")) for eqn in staged.eqns):
        return "the port draws random numbers, as dropout does"
    for text, factor in _factors([x for _, x in leaves[0]]):
        if _is_close(ours, factor * expected):
            return f"{ours / expected:.4g} times torch's: {text}"
    _, needed = needed_eqns(staged.jaxpr, staged.jaxpr.outvars)
    unused = [keystr(p) for (p, _), v in zip(leaves[0], staged.jaxpr.invars, strict=True) if v not in needed]
    if unused:
        return f"the port does not use {', '.join(unused)} of the batch"
    for path, changed, text in _changed_batches(leaves):
        if _is_close(float(found.terms(changed)[found.name]), expected):
            return f"it agrees with {path} of the batch {text}"
    return ""


def _factors(arrays: Sequence[Any]) -> Iterator[tuple[str, float]]:
    """Yields factors of a loss, with what they mean."""
    yield "the sign", -1.0
    counts: dict[float, None] = {}
    for array in map(np.asarray, arrays):
        counts |= dict.fromkeys([float(n) for n in np.cumprod(array.shape)] + [float(n) for n in array.shape])
        if array.dtype.kind in "bi":
            counts |= dict.fromkeys([float(array.sum()), float((array != _IGNORED).sum())])
        elif np.isin(array, (0, 1)).all():
            counts[float(array.sum())] = None
    numbers = [n for n in counts if n > 1]
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
    if factor is not None and all(
        _factor(found.gradients[name], g) in (None, factor) for name, g in found.step.gradients.items()
    ):
        return f"{factor:.4g} times torch's, while the losses agree"
    return (
        "the losses agree: something is constant in one library (stop_gradient, detach) that the other differentiates"
    )


def _clipping(found: Evidence) -> str:
    norms = ["does not clip" if np.isinf(norm) else f"clips to {norm:.3g}" for norm in (found.ours, found.expected)]
    return f"the port {norms[0]}, torch {norms[1]}"


def _state(found: Evidence) -> str:
    if not found.name:
        return "the optimizer counts other steps"
    factor = _factor(found.ours, found.expected)
    return "" if factor is None else f"{factor:.4g} times torch's: another decay rate of the average"


def _change(found: Evidence) -> str:
    if found.is_frozen:
        return "a frozen parameter that is trained or decays"
    factor = _factor(found.ours, found.expected)
    if factor is not None:
        return f"its change is {factor:.4g} times torch's: another learning rate, schedule or bias correction"
    decay, rest = fit(found.ours - found.expected, found.before)
    if rest <= _CLOSE * np.linalg.norm(found.ours):
        return f"its change differs by {decay:.4g} times the parameter: weight decay"
    return _epsilon(found)


def _epsilon(found: Evidence) -> str:
    """Returns the epsilon that explains a first step, by the sizes of gradients where it matters most."""
    size = abs(found.step.gradients[found.name])
    with np.errstate(all="ignore"):
        ratio = abs(found.expected / found.ours)
        for text, epsilon in (("", (ratio - 1) * size), (" inside the root", (ratio**2 - 1) * size**2)):
            known = epsilon[abs(ratio - 1) > _SENSITIVE * np.nanmax(abs(ratio - 1))]
            if known.size and np.ptp(known) < _SPREAD * abs(known).max():
                return f"another epsilon{text}, larger by about {np.median(known):.1g} for the unaveraged gradient"
    return ""


def _factor(ours: Array, expected: Array) -> float | None:
    """Returns the constant factor between two arrays, if there is one."""
    factor, rest = fit(ours, expected)
    return float(f"{factor:.6g}") if rest <= _CLOSE * np.linalg.norm(ours) and ours.any() else None


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
}


def _is_close(a: float, b: float) -> bool:
    return abs(a - b) <= _CLOSE * abs(b)
