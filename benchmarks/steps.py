"""Measurements of one jitted training step: tracing, lowering, compiling, running, memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.measure import Samples, interleaved, no_collection, seconds, shuffled

Step = Callable[[Any, Any], Any]
Executables = dict[str, list[Any]]

STAGES = ("trace", "lower", "compile")


def build(new_step: Callable[[], Step], args: tuple[Any, Any], compiles: bool) -> tuple[dict[str, float], Any]:
    """Returns the seconds of each stage of building a new step, and the executable if it `compiles`."""
    jitted = jax.jit(new_step())
    results: list[Any] = []
    times = {"trace": seconds(lambda: results.append(jitted.trace(*args)))}
    times["lower"] = seconds(lambda: results.append(results[-1].lower()))
    if compiles:
        times["compile"] = seconds(lambda: results.append(results[-1].compile()))
    return times, results[-1] if compiles else None


def build_all(
    new_steps: Mapping[str, Callable[[], Step]], args: tuple[Any, Any], rounds: int, compiles: int
) -> tuple[dict[str, Samples], Executables]:
    """Returns the stages' seconds over `rounds`, the first few of which compile too, and all executables.

    Every step is a new function, so JAX traces it; the caches of a Function and of `jax.numpy` stay.
    """
    stages: dict[str, Samples] = {stage: {name: [] for name in new_steps} for stage in STAGES}
    executables: Executables = {name: [] for name in new_steps}
    for new_step in new_steps.values():
        build(new_step, args, compiles=False)  # warms up
    for i in range(rounds):
        for name in shuffled(new_steps, i):
            with no_collection():
                times, executable = build(new_steps[name], args, compiles=i < compiles)
            for stage, value in times.items():
                stages[stage][name].append(value)
            if executable is not None:
                executables[name].append(executable)
    return stages, executables


def run_all(executables: Executables, args: tuple[Any, Any], rounds: int) -> Samples:
    """Returns the seconds of a compiled step, over all executables of each implementation.

    Two executables of one program may differ in speed, by the location of their buffers, so several are measured.
    """
    count = min(map(len, executables.values()))
    calls = {(i, name): _waiting(compiled[i], args) for i in range(count) for name, compiled in executables.items()}
    samples: Samples = {name: [] for name in executables}
    for (_, name), values in interleaved(calls, rounds).items():
        samples[name] += values
    return samples


def _waiting(executable: Any, args: tuple[Any, Any]) -> Callable[[], Any]:
    return lambda: jax.block_until_ready(executable(*args))


def peak_memory(executable: Any) -> int | None:
    """Returns the bytes of arguments, outputs and temporaries together; `None` if the backend does not report them.

    XLA's own `peak_memory_in_bytes` excludes the temporaries on CPU (jaxlib 0.10.2).
    """
    try:
        stats = executable.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError):
        return None
    if stats is None:
        return None
    whole = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
    return whole - stats.alias_size_in_bytes
