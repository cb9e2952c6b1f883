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
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from jaxfn._compat import compile_quickly, quick_key
from jaxfn._torch.adopt.adopted import adopt
from jaxfn._torch.adopt.function import adopted_function
from jaxfn._torch.adopt.nested import NESTED
from jaxfn._torch.trace.state import Replacements
from jaxfn._torch.values.errors import TranslationError

OLDEST = (2, 8)

X = np.array([1.3, -2.6, 0.4], np.float32)
TIES = np.array([1.0, 1.0, 0.0, -1.0, 2.0, 2.0], np.float32)


class Answer(NamedTuple):
    """What something gives for an array, and what it ought to give."""

    found: Callable[[Any], Any]
    at: Any
    expected: Any


class Snippet(NamedTuple):
    """What is a part of a Function's code, and what comes of it for an array.

    Attributes:
      place: "output" of forward; or "backward", where it is what backward computes, and "saved", what forward saves for
        it: then the derivative of that is asked for.
    """

    place: str
    of_tensor: Callable[[Any], Any]
    at: Any
    expected: Any


def _results(snippets: Mapping[str, Snippet]) -> dict[str, Any]:
    """What each of them gives, in one Function for outputs and one for derivatives: many would take thrice as long."""
    outputs = {name: snippet for name, snippet in snippets.items() if snippet.place == "output"}
    slopes = {name: snippet for name, snippet in snippets.items() if snippet.place != "output"}
    return (_outputs(outputs) if outputs else {}) | (_slopes(slopes) if slopes else {})


def _outputs(snippets: Mapping[str, Snippet]) -> dict[str, Any]:
    at, lengths = _arrays(snippets)

    def forward(ctx: Any, x: Any) -> Any:
        return (
            *(snippet.of_tensor(piece) for snippet, piece in zip(snippets.values(), x.split(lengths), strict=True)),
        )

    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return torch.cat(grad_outputs)

    return dict(zip(snippets, _function(forward, backward)(at), strict=True))


def _slopes(snippets: Mapping[str, Snippet]) -> dict[str, Any]:
    """Of the identity, with a backward of these."""
    at, lengths = _arrays(snippets)

    def forward(ctx: Any, x: Any) -> Any:
        pieces = zip(snippets.values(), x.split(lengths), strict=True)
        ctx.save_for_backward(x, *(snippet.of_tensor(piece) for snippet, piece in pieces if snippet.place == "saved"))
        return x.clone()

    def backward(ctx: Any, g: Any) -> Any:
        x, *saved = ctx.saved_tensors
        kept, pieces = iter(saved), zip(snippets.values(), x.split(lengths), strict=True)
        return g * torch.cat(
            [next(kept) if snippet.place == "saved" else snippet.of_tensor(y) for snippet, y in pieces]
        )

    function = _function(forward, backward)

    def total(x: Any) -> Any:
        return function(x).sum()

    def total_slope(x: Any) -> Any:
        return jax.grad(total)(x).sum()

    derivatives = jnp.split(jax.grad(total_slope)(at), np.cumsum(lengths)[:-1])
    return dict(zip(snippets, derivatives, strict=True))


def _arrays(snippets: Mapping[str, Snippet]) -> tuple[Any, list[int]]:
    """All arrays one after the other, and how long each is."""
    arrays = [np.asarray(snippet.at, np.float32) for snippet in snippets.values()]
    return jnp.array(np.concatenate(arrays)), [len(array) for array in arrays]


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
    first, again, other = jax.vmap(drawn)(jax.vmap(quick_key)(jnp.array([0, 0, 1])))
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


def _ties(x: Any) -> Any:
    """Operations whose derivatives at ties are conventions, each element with a weight of its own."""
    rows, other = x.reshape(2, 3), x.flip(0)
    values = torch.cat(
        (
            x.clamp(0, 1),
            x.clamp(min=-1),
            torch.clamp(x, other - 1, other),
            torch.maximum(x, other),
            x.max().reshape(1),
            x.amax(0, True),
            rows.max(1).values,
            rows.median(1).values,
            torch.nn.functional.max_pool1d(rows, 3)[:, 0],
            x.abs() + x.relu() + torch.nn.functional.hardtanh(x),
        )
    )
    return (values * torch.arange(1.0, len(values) + 1)).sum()


def _slope_of_whole(code: Callable[[Any], Any], at: Any) -> Any:
    return jax.grad(adopted_function(code, Replacements.of({}), NESTED))(jnp.array(at))


def _taken_before_in_a_module(at: Any) -> Any:
    return _slope_of_whole(lambda x: _round_taken_before(x).sum(), at)


def _torchs_slope_at_ties() -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.tensor(TIES, requires_grad=True)
        return torch.autograd.grad(_ties(x), x)[0].numpy()


def answers() -> dict[str, Answer | Snippet]:
    """What is tried, by what it is called in the message."""

    def output(of_tensor: Callable[[Any], Any], at: Any, expected: Any) -> Snippet:
        return Snippet("output", of_tensor, at, expected)

    def slope(of_tensor: Callable[[Any], Any], at: Any, expected: Any) -> Snippet:
        return Snippet("backward", of_tensor, at, expected)

    three = np.full(3, 3)
    return {
        "a Function applied inside forward": Snippet("saved", _apply_round, X, three),
        "a Function applied inside backward": slope(_apply_round, X, three),
        "a Function applied by super().apply": slope(_apply_round_by_super, X, three),
        "a Function applied by a name taken before": slope(_round_taken_before, X, three),
        "a write in place": output(_written, X, [7, -4.2, 1.8]),
        "a write by a mask": output(_written_by_mask, X, [2.6, 5, 0.4]),
        "autograd inside": slope(_autograd_inside, X, 6 * X),
        "a detached tensor": slope(lambda x: x * x.detach(), X, X),
        "a draw": Answer(_drawn, X, [True, True, True]),
        "ctx.needs_input_grad": Answer(_flags, X, [3 * X, 2 * X]),
        "in a module, a Function applied by a name taken before": Answer(_taken_before_in_a_module, X, three),
        "derivatives at ties": slope(lambda x: _ties(x).expand(6) / 6, TIES, _torchs_slope_at_ties()),
        "a derivative of a derivative": slope(lambda x: x.sin(), X, np.cos(X)),
    }


def _differences() -> dict[str, str]:
    """What the installed torch does not do as it ought to, and how it differs."""
    asked = answers()
    differences = _tried(asked)
    if not differences:
        return {}
    # Where one fails the others fail with it.
    return {name: how for name, answer in asked.items() for how in _tried({name: answer}).values()} or differences


def _tried(asked: Mapping[str, Answer | Snippet]) -> dict[str, str]:
    """Which of these differ, and how."""
    snippets = {name: answer for name, answer in asked.items() if isinstance(answer, Snippet)}
    failures: dict[str, str] = {}

    def program() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, answer in asked.items():
            if isinstance(answer, Answer):
                with _noted(name, failures):
                    found[name] = answer.found(jnp.array(answer.at))
        if snippets:
            with _noted(", ".join(snippets), failures):
                found |= _results(snippets)
        return found

    # The arrays are constants of the program, which XLA computes with instead of making machine code.
    found = compile_quickly(jax.jit(program).lower())()
    differences = failures
    for name, value in found.items():
        expected = np.asarray(asked[name].expected)
        if not np.allclose(value, expected, rtol=1e-5, atol=1e-6):
            differences[name] = f"{expected.tolist()} expected, {value.tolist()} found"
    return differences


@contextmanager
def _noted(name: str, failures: dict[str, str]) -> Generator[None]:
    """Makes a note of an error instead of raising it."""
    try:
        yield
    except Exception as error:  # of any kind, as torch is not the one that is known
        failures[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


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
