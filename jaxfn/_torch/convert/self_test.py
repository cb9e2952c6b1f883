"""The self-test of an installed torch that jaxfn was not tested on: small pieces of code whose answers are known.

Tracing relies on much that torch does not promise (see `_compat`). In an untested version some of it may be gone, which
is an error, or behave differently without one: on torch 2.15 a Function applied in the backward of another one lost its
rule. So the first `from_torch` call on an untested version runs these pieces of code, and raises if an answer differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import eval_context

from jaxfn._torch.convert.function_class import convert_function_class
from jaxfn._torch.convert.nested import NESTED_APPLY
from jaxfn._torch.trace.state import Replacements, TraceConfig
from jaxfn._torch.values.errors import TranslationError

# The minor versions that `.ci/run` tests, in order.
TESTED = ((2, 8), (2, 13), (2, 15))

X = np.array([1.3, -2.6, 0.4], np.float32)
TIES = np.array([1.0, 1.0, 0.0, -1.0, 2.0, 2.0], np.float32)

_CONFIG = TraceConfig(Replacements.of({}), NESTED_APPLY)

# A function of one tensor, to be run inside a Function.
CodeSnippet = Callable[[Any], Any]


class KnownAnswer(NamedTuple):
    """A computation, the array that it is applied to, and the result that it should return."""

    compute: Callable[[Any], Any]
    at: Any
    expected: Any


def _function(forward: Callable[[Any, Any], Any], backward: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Returns the `apply` of a translated Function with these methods."""
    body = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return convert_function_class(type("SelfTest", (torch.autograd.Function,), body), __name__, _CONFIG).apply


def _output(code: CodeSnippet, at: Any, expected: Any) -> KnownAnswer:
    """Runs a snippet in `forward`, whose output it is."""
    return KnownAnswer(_function(lambda ctx, x: code(x), lambda ctx, g: g), at, expected)


def _slope(code: CodeSnippet, at: Any, expected: Any) -> KnownAnswer:
    """Runs a snippet in `backward`, and differentiates what it returns."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x.clone()

    def backward(ctx: Any, g: Any) -> Any:
        return g * code(ctx.saved_tensors[0])

    return KnownAnswer(_second_derivative(_function(forward, backward)), at, expected)


def _slope_of_saved(code: CodeSnippet, at: Any, expected: Any) -> KnownAnswer:
    """Runs a snippet in `forward`, saves what it returns for `backward`, and differentiates it there."""

    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(code(x))
        return x.clone()

    def backward(ctx: Any, g: Any) -> Any:
        return g * ctx.saved_tensors[0]

    return KnownAnswer(_second_derivative(_function(forward, backward)), at, expected)


def _second_derivative(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def total(x: Any) -> Any:
        return function(x).sum()

    def total_slope(x: Any) -> Any:
        return jax.grad(total)(x).sum()

    return jax.grad(total_slope)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 3


_round_by_name: Callable[..., Any] = _Round.apply


def _apply_round(x: Any) -> Any:
    return _Round.apply(x)


def _update_in_place(x: Any) -> Any:
    y = x.clone()
    y.mul_(2)
    y[0] = 7
    y[1:].add_(1)
    return y


def _ties(x: Any) -> Any:
    """Returns a weighted sum of operations whose derivatives at ties are conventions, with distinct weights."""
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


def _torch_gradient_at_ties() -> Any:
    x = torch.tensor(TIES, requires_grad=True)
    return torch.autograd.grad(_ties(x), x)[0].numpy()


def known_answers() -> dict[str, KnownAnswer]:
    """Returns the known answers by their names in messages."""
    three = np.full(3, 3)
    return {
        "a Function applied inside forward": _slope_of_saved(_apply_round, X, three),
        "a Function applied inside backward": _slope(_apply_round, X, three),
        "a Function applied by an `apply` looked up before": _slope(_round_by_name, X, three),
        "an in-place update": _output(_update_in_place, X, [7, -4.2, 1.8]),
        "a detached tensor": _slope(lambda x: x * x.detach(), X, X),
        "derivatives at ties": _slope(lambda x: _ties(x).expand(6) / 6, TIES, _torch_gradient_at_ties()),
    }


def check_torch() -> None:
    """Checks the version of the installed torch, and runs the self-test if jaxfn was not tested on it.

    Raises:
      TranslationError: torch is older than the oldest tested version, or gives another answer than the known one.
    """
    version = str(torch.__version__)
    minor = tuple(map(int, version.split(".")[:2]))
    if minor < TESTED[0]:
        raise TranslationError(f"from_torch needs torch {_name(TESTED[0])} or newer, and this is {version}")
    if minor not in TESTED:
        _run_self_test(version)


@functools.cache
def _run_self_test(version: str) -> None:
    """Raises if an answer differs from the known one. Once they are right, later calls do nothing."""
    # JAX may be tracing the caller, and the caller may have switched torch's autograd off.
    with eval_context(), torch.inference_mode(False), torch.enable_grad():
        found = {name: _difference(answer) for name, answer in known_answers().items()}
    differences = [f"{name} ({difference})" for name, difference in found.items() if difference]
    if differences:
        *others, newest = map(_name, TESTED)
        raise TranslationError(
            f"jaxfn.from_torch was not tested on torch {version}, which differs from the tested versions in "
            f"{'; '.join(differences)}. Translated Functions could be wrong, so none is translated. Install torch "
            f"{', '.join(others)} or {newest}, or a newer jaxfn."
        )


def _difference(answer: KnownAnswer) -> str:
    """Returns how the result differs from the known one; "" if it does not."""
    expected = np.asarray(answer.expected)
    try:
        found = np.asarray(answer.compute(jnp.array(answer.at)))
    except Exception as error:  # of any type, as this torch is not known
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if np.allclose(found, expected, rtol=1e-5, atol=1e-6):
        return ""
    return f"{expected.tolist()} expected, {found.tolist()} found"


def _name(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
