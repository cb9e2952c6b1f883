"""The kernels of `examples/kernels` compared with plain JAX: memory, and on an accelerator time.

Memory is that of a compiled value and gradient, and of the residuals between both. On a CPU Pallas interprets kernels:
they are not timed, and the interpreter's copies of whole arrays count as the kernel's memory.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import Samples, interleaved, medians, summary
from benchmarks.steps import peak_memory

KERNEL, PLAIN = "kernel", "plain JAX"
_FOLDER = Path(__file__).parents[1] / "examples" / "kernels"
_SAVED, _PEAK, _TIME = "saved for backward", "memory of a gradient", "a gradient"


@dataclass(frozen=True)
class Workload:
    """A kernel and its arguments.

    Attributes:
      name: its name in the tables.
      module: the example's file.
      function: its name in the module; the plain implementation is `plain`.
      shapes: of the floating arguments.
      num_labels: the number of integer labels after them, below the size of the second argument.
      options: keyword arguments.
    """

    name: str
    module: str
    function: str
    shapes: tuple[tuple[int, ...], ...]
    num_labels: int = 0
    options: Mapping[str, Any] | None = None

    def forms(self) -> dict[str, Callable[..., jax.Array]]:
        """Returns the kernel and its plain implementation."""
        module = example(self.module)
        functions = {KERNEL: getattr(module, self.function), PLAIN: module.plain}
        return {form: partial(function, **self.options or {}) for form, function in functions.items()}

    def args(self, dtype: Any) -> list[jax.Array]:
        """Returns random arguments."""
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        floats = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, self.shapes, strict=True)]
        if not self.num_labels:
            return floats
        return [*floats, jax.random.randint(jax.random.key(1), (self.num_labels,), 0, self.shapes[1][0])]


_HEADS = ((16, 2048, 64),) * 3
WORKLOADS = (
    Workload("layer norm, 8,192 rows of 1,024", "layer_norm", "layer_norm", ((8192, 1024), (1024,), (1024,))),
    Workload(
        "cross entropy, 4,096 rows, 32,000 words", "cross_entropy", "cross_entropy", ((4096, 256), (32000, 256)), 4096
    ),
    Workload("attention, 16 heads of 2,048", "flash_attention", "flash_attention", _HEADS),
    Workload(
        "causal attention, 16 heads of 2,048", "flash_attention", "flash_attention", _HEADS, options={"causal": True}
    ),
)


@dataclass(frozen=True)
class Result:
    """One measurement of a workload in both forms: samples, in bytes or in seconds."""

    workload: str
    dtype: str
    measurement: str
    samples: Samples

    def line(self) -> str:
        """Formats the result as a line of the table."""
        is_time = self.measurement == _TIME
        each = medians(self.samples)
        cells = [f"{v * 1e3:,.3f} ms" if is_time else f"{v / 2**20:,.1f} MiB" for v in each.values()]
        ratio = each[KERNEL] / each[PLAIN]
        what = f"{self.workload}, {self.dtype}: {self.measurement}"
        return what.ljust(72) + "".join(cell.rjust(16) for cell in cells) + f"   {ratio:.3f}x"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {
            "kernel": self.workload,
            "dtype": self.dtype,
            "measurement": self.measurement,
            "unit": "seconds" if self.measurement == _TIME else "bytes",
            **summary(self.samples),
        }


def header() -> str:
    """Returns the header of the table."""
    how = "interpreted, so not timed" if jax.default_backend() == "cpu" else f"on {jax.devices()[0].device_kind}"
    return f"kernels of examples/kernels, {how}\n" + " " * 72 + KERNEL.rjust(16) + PLAIN.rjust(16)


def run(rounds: int) -> Iterator[Result]:
    """Yields each measurement as it is taken."""
    comparison = example("comparison")
    for workload in WORKLOADS:
        forms = workload.forms()
        for dtype in ("float32", "bfloat16"):
            args = workload.args(dtype)
            saved = {form: [float(comparison.residual_bytes(f, args))] for form, f in forms.items()}
            yield Result(workload.name, dtype, _SAVED, saved)
            compiled = {form: jax.jit(comparison.step(f)).lower(*args).compile() for form, f in forms.items()}
            peaks = {form: peak_memory(executable) for form, executable in compiled.items()}
            if None not in peaks.values():
                yield Result(workload.name, dtype, _PEAK, {form: [float(peak or 0)] for form, peak in peaks.items()})
            if jax.default_backend() != "cpu":
                _check_same(compiled, args)
                calls = {form: partial(_wait, executable, args) for form, executable in compiled.items()}
                yield Result(workload.name, dtype, _TIME, interleaved(calls, rounds))


def example(name: str) -> ModuleType:
    """Imports an example; the kernels import helpers from their folder."""
    if str(_FOLDER) not in sys.path:
        sys.path.append(str(_FOLDER))
    return importlib.import_module(name)


def _wait(executable: Callable[..., Any], args: list[jax.Array]) -> Any:
    return jax.block_until_ready(executable(*args))


def _check_same(compiled: Mapping[str, Callable[..., Any]], args: list[jax.Array]) -> None:
    """Fails if the results differ, with a loose tolerance: then a comparison of times would be meaningless."""
    for ours, theirs in zip(compiled[KERNEL](*args), compiled[PLAIN](*args), strict=True):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.max(jnp.abs(ours - theirs)) <= 0.05 * jnp.max(jnp.abs(theirs))
