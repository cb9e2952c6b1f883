"""Whether the installed torch does what tracing relies on: tiny Functions whose answers are known.

Much of what tracing is made of torch does not promise (see `_compat`). In a version that nobody tried it may be gone,
which is an error, or do something else without one: on torch 2.15 a Function applied inside another one's backward lost
its rule. So the first `from_torch` in a process runs these, and refuses where an answer differs. What passed is
remembered on disk, by versions.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfn._compat import compile_quickly
from jaxfn._torch.adopt.adopted import adopt
from jaxfn._torch.adopt.nested import NESTED
from jaxfn._torch.values.errors import TranslationError

OLDEST = (2, 8)

X = np.array([1.3, -2.6, 0.4], np.float32)
TIES = np.array([1.0, 1.0, 0.0, -1.0, 2.0, 2.0], np.float32)


class Answer(NamedTuple):
    """What a Function gives for an array, and what it ought to give."""

    found: Callable[[Any], Any]
    at: Any
    expected: Any


class Slope(NamedTuple):
    """What the backward of the identity computes with torch, and what its derivative at an array ought to be."""

    of_tensor: Callable[[Any], Any]
    at: Any
    expected: Any

    def found(self, at: Any) -> Any:
        """The derivative."""
        return _curvature(_with_backward(self.of_tensor), at)


def _all_of(slopes: Sequence[Slope]) -> Slope:
    """All of them in one Function, which is traced in a third of the time."""
    lengths = [len(slope.at) for slope in slopes]

    def of_tensor(x: Any) -> Any:
        parts = zip(slopes, x.split(lengths), strict=True)
        return torch.cat([slope.of_tensor(part).expand_as(part) for slope, part in parts])

    at, expected = ([np.asarray(slope[i], np.float32) for slope in slopes] for i in (1, 2))
    return Slope(of_tensor, np.concatenate(at), np.concatenate(expected))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 3


class _RoundBySuper(_Round):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        return super().apply(*args)


_round_taken_before: Callable[..., Any] = _Round.apply


def _apply_round(x: Any) -> Any:
    return _Round.apply(x)


def _apply_round_by_super(x: Any) -> Any:
    return _RoundBySuper.apply(x)


def _function(forward: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return adopt(type("Canary", (torch.autograd.Function,), body), {}, __name__, NESTED).apply


def _with_backward(slope: Callable[[Any], Any]) -> Callable[..., Any]:
    """A Function that is the identity, with this derivative."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    def backward(ctx: Any, g: Any) -> Any:
        return g * slope(*ctx.saved_tensors)

    return _function(forward, backward)


def _slope(function: Callable[..., Any], at: Any) -> Any:
    def total(x: Any) -> Any:
        return function(x).sum()

    return jax.grad(total)(at)


def _curvature(function: Callable[..., Any], at: Any) -> Any:
    def total(x: Any) -> Any:
        return _slope(function, x).sum()

    return jax.grad(total)(at)


def _saved_inside_forward(at: Any) -> Any:
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(_Round.apply(x))
        return x.clone()

    return _curvature(_function(forward, lambda ctx, g: g * ctx.saved_tensors[0]), at)


def _autograd_inside(x: Any) -> Any:
    with torch.enable_grad():
        z = x.detach().requires_grad_()
        return torch.autograd.grad((z**3).sum(), z, create_graph=True)[0]


def _written(x: Any) -> Any:
    y = x.clone()
    y.mul_(2)
    y[0] = 7
    y[1:].add_(1)
    return y


def _written_by_mask(x: Any) -> Any:
    y = x.clone()
    y[x < 0] = 5
    y[x > 1] *= 2
    return y


def _drawn(at: Any) -> Any:
    draw = _function(lambda ctx, x: torch.rand_like(x), lambda ctx, g: g)

    def drawn(key: Any) -> Any:
        return draw(at, key=key)

    # One draw for all, which is lowered once.
    first, again, other = jax.vmap(drawn)(jax.vmap(jax.random.key)(jnp.array([0, 0, 1])))
    is_unit = (first >= 0).all() & (first < 1).all()
    try:
        draw(at)
    except TranslationError:
        return jnp.stack([is_unit, (first == again).all(), (first != other).all()])
    return jnp.zeros(3, bool)


def _flags(at: Any) -> Any:
    function = _function(lambda ctx, x: x * (2 if ctx.needs_input_grad[0] else 3), lambda ctx, g: g)
    differentiated, _ = jax.vjp(function, at)
    return jnp.stack([function(at), differentiated])


def _at_ties(x: Any) -> Any:
    """Operations whose derivatives at ties are conventions, each with a weight of its own."""
    rows = x.reshape(2, 3)
    return sum(
        weight * term.sum()
        for weight, term in enumerate(
            (
                x.clamp(0, 1),
                x.clamp(min=-1),
                torch.clamp(x, x.flip(0) - 1, x.flip(0)),
                torch.maximum(x, x.flip(0)),
                x.max(),
                x.amax(),
                rows.max(1).values,
                rows.median(1).values,
                torch.nn.functional.max_pool1d(x[None, None], 3)[0],
                x.abs() + x.relu() + torch.nn.functional.hardtanh(x),
            ),
            1,
        )
    )


def _torchs_slope_at_ties() -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor(TIES, requires_grad=True)
        return torch.autograd.grad(_at_ties(x), x)[0].numpy()


def answers() -> dict[str, Answer | Slope]:
    """What is tried, by what it is called in the message."""

    def output(forward: Callable[[Any], Any], at: Any, expected: Any) -> Answer:
        def found(at: Any) -> Any:
            return _function(lambda ctx, x: forward(x), lambda ctx, g: g)(at)

        return Answer(found, at, expected)

    def slope(of_tensor: Callable[[Any], Any], at: Any, expected: Any) -> Slope:
        return Slope(of_tensor, at, expected)

    three = np.full(3, 3)
    return {
        "a Function applied inside forward": Answer(_saved_inside_forward, X, three),
        "a Function applied inside backward": slope(_apply_round, X, three),
        "a Function applied by super().apply": slope(_apply_round_by_super, X, three),
        "a Function applied by a name taken before": slope(_round_taken_before, X, three),
        "a write in place": output(_written, X, [7, -4.2, 1.8]),
        "a write by a mask": output(_written_by_mask, X, [2.6, 5, 0.4]),
        "autograd inside": slope(_autograd_inside, X, 6 * X),
        "a detached tensor": slope(lambda x: x * x.detach(), X, X),
        "a draw": Answer(_drawn, X, [True, True, True]),
        "ctx.needs_input_grad": Answer(_flags, X, [3 * X, 2 * X]),
        "derivatives at ties": slope(lambda x: _at_ties(x) / x.numel(), TIES, _torchs_slope_at_ties()),
        "a derivative of a derivative": slope(lambda x: x.sin(), X, np.cos(X)),
    }


def _differences() -> dict[str, str]:
    """What the installed torch does not do as it ought to, and how it differs."""
    asked = answers()
    slopes = {name: answer for name, answer in asked.items() if isinstance(answer, Slope)}
    others = {name: answer for name, answer in asked.items() if not isinstance(answer, Slope)}
    together = {"derivatives of derivatives": _all_of([*slopes.values()])} if slopes else {}
    differences = _tried({**others, **together})
    if together.keys() & differences.keys():
        one_by_one = _tried(slopes)
        if one_by_one:
            return {name: how for name, how in differences.items() if name not in together} | one_by_one
    return differences


def _tried(asked: Mapping[str, Answer | Slope]) -> dict[str, str]:
    """Which of these differ, and how."""
    differences: dict[str, str] = {}

    def program(arrays: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, answer in asked.items():
            try:
                found[name] = answer.found(arrays[name])
            except Exception as error:  # of any kind, as torch is not the one that is known
                differences[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return found

    arrays = {name: answer.at for name, answer in asked.items()}
    found = compile_quickly(jax.jit(program).lower(arrays))(arrays)
    for name, value in found.items():
        expected = np.asarray(asked[name].expected)
        if not np.allclose(value, expected, rtol=1e-5, atol=1e-6):
            differences[name] = f"{expected.tolist()} expected, {value.tolist()} found"
    return differences


_LOCK = threading.Lock()
_passed: list[str] = []


def check_torch() -> None:
    """Tries the installed torch, once in a process, and not again where it passed with the same versions.

    Raises:
      TranslationError: it is older than any that is supported, or does something else than it ought to.
    """
    with _LOCK:
        if _passed:
            return
        version = torch.__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise TranslationError(
                f"from_torch needs torch {'.'.join(map(str, OLDEST))} or newer, and this is {version}"
            )
        record = _record()
        if not record.exists():
            # In a thread of its own neither JAX nor torch is in the midst of anything.
            with ThreadPoolExecutor(1) as thread:
                found = thread.submit(_differences).result()
            differences = [f"{name} ({how})" for name, how in found.items()]
            if differences:
                raise TranslationError(
                    f"jaxfn.from_torch does not know torch {version}, on which this does not hold: "
                    f"{'; '.join(differences)}. Translated Functions might be wrong, so none is translated. Use a "
                    'version that jaxfn is tested on (pip install "jaxfn[torch]"), or a newer jaxfn'
                )
            _remember(record)
        _passed.append(version)


def _record() -> Path:
    """The file that stands for these versions having passed."""
    cache = os.environ.get("XDG_CACHE_HOME")
    folder = Path(cache) if cache else Path.home() / ".cache"
    versions = (torch.__version__, jax.__version__, np.__version__, sys.version, _source())
    return folder / "jaxfn" / f"torch-{hashlib.sha256(repr(versions).encode()).hexdigest()[:32]}"


def _source() -> str:
    """A digest of jaxfn itself."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[2].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _remember(record: Path) -> None:
    try:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(f"torch {torch.__version__} passed\n")
    except OSError:  # a home that cannot be written to: the next process tries again
        pass
