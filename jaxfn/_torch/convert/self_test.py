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


class KnownAnswer(NamedTuple):
    """A computation, the array that it is applied to, and the result that it should return."""

    compute: Callable[[Any], Any]
    at: Any
    expected: Any


def _slope(code: Callable[[Any], Any], at: Any, expected: Any, *, is_in_forward: bool = False) -> KnownAnswer:
    """Differentiates what a snippet of torch code returns: in `backward`, or in `forward`, which saves it."""

    class SelfTest(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(code(x) if is_in_forward else x)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            (saved,) = ctx.saved_tensors
            return grad_outputs[0] * (saved if is_in_forward else code(saved))

    apply: Callable[[Any], Any] = convert_function_class(SelfTest, __name__, _CONFIG).apply

    def total(x: Any) -> Any:
        return apply(x).sum()

    def total_slope(x: Any) -> Any:
        return jax.grad(total)(x).sum()

    return KnownAnswer(jax.grad(total_slope), at, expected)


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
    y[1:].mul_(3)
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
        "a Function applied inside forward": _slope(_apply_round, X, three, is_in_forward=True),
        "a Function applied inside backward": _slope(_apply_round, X, three),
        "a Function applied by an `apply` looked up before": _slope(_round_by_name, X, three),
        "an in-place update": _slope(_update_in_place, X, [0, 6, 6], is_in_forward=True),
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
