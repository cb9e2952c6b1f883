"""`python -m benchmarks.translated`: torch Functions converted by `from_torch`, compared with jaxfn Functions.

Measures compiled training steps, and the first call, in which torch traces and jaxfn translates. Needs torch.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxfn
from benchmarks import networks
from benchmarks.environment import environment
from benchmarks.functions import HAND_WRITTEN, in_jaxfn, in_torch
from benchmarks.measure import interleaved, settle
from benchmarks.suite import check_same

_ROUNDS = 40
_TARGET = 1.05

# Functions, and the network that is built with each.
_FUNCTIONS: dict[str, tuple[str, Callable[..., networks.Forward], Callable[[], tuple[Any, Any]]]] = {
    "relu": ("Relu", networks.activation_mlp, networks.mlp_args),
    "swish": ("Swish", networks.activation_mlp, networks.mlp_args),
    "straight-through": ("StraightThrough", networks.activation_mlp, networks.mlp_args),
    "linear": ("Linear", networks.linear_mlp, networks.mlp_args),
    "swish, bare calls": ("Swish", networks.chain, networks.chain_args),
}


def main() -> None:
    print(", ".join(f"{name} {value}" for name, value in environment().items() if value is not None))
    _warm_torch_up()
    settle()
    met = 0
    for name, (attribute, network, make_args) in _FUNCTIONS.items():
        args = make_args()
        adopted = jaxfn.from_torch(getattr(in_torch, attribute))
        first = _first_call(adopted.apply, network, args)
        forms = {"translated": adopted.apply, HAND_WRITTEN: getattr(in_jaxfn, attribute).apply}
        steps = {form: _compiled(f, network, args) for form, f in forms.items()}
        check_same(steps)
        samples = interleaved(steps, _ROUNDS)
        translated, native = (statistics.median(samples[form]) for form in ("translated", HAND_WRITTEN))
        ratio = translated / native
        met += ratio <= _TARGET
        print(
            f"{name:20} native {native * 1e3:6.2f} ms   translated {translated * 1e3:6.2f} ms  {ratio:5.3f}x   "
            f"first call {first * 1e3:5.0f} ms more"
        )
    print(f"translated <= {_TARGET:.2f} x native: met in {met} of {len(_FUNCTIONS)}")


def _warm_torch_up() -> None:
    """Warms torch up: it imports many modules at the first trace of a process, which is measured separately."""
    begin = time.perf_counter()
    jax.grad(lambda x: jaxfn.from_torch(in_torch.Relu).apply(x).sum())(jnp.ones(3))
    print(f"first trace of all, torch's own loading included: {time.perf_counter() - begin:.1f} s")


def _first_call(f: Callable[..., Any], network: Callable[..., networks.Forward], args: tuple[Any, Any]) -> float:
    """Returns the seconds of a step's first trace, minus those of a later one."""
    seconds: list[float] = []
    for _ in range(2):
        begin = time.perf_counter()
        jax.jit(networks.train_step(network(f))).trace(*args)
        seconds.append(time.perf_counter() - begin)
    return seconds[0] - seconds[1]


def _compiled(
    f: Callable[..., Any], network: Callable[..., networks.Forward], args: tuple[Any, Any]
) -> Callable[[], Any]:
    step = jax.jit(networks.train_step(network(f))).lower(*args).compile()
    return lambda: jax.block_until_ready(step(*args))


if __name__ == "__main__":
    main()
