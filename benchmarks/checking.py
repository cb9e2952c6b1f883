"""Time and memory of gradcheck and gradgradcheck, compared with torch's, compilation included.

Every run is in a separate process, so that nothing is compiled yet; JAX itself is warm. Reported is the median of five
runs (of one, where that takes minutes), with the libraries taking turns.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn
from benchmarks.functions import TORCH

_JAXFN = "jaxfn"
_TINY = ((2, 3), (3, 2))


def _square(n: int) -> tuple[tuple[int, int], ...]:
    return ((n, n), (n, n))


@dataclass(frozen=True)
class Measurement:
    """A measurement.

    Attributes:
      name: its name in the tables.
      check: the name of the checking function.
      shapes: of the two matrices that go through tanh(x @ w).
      warm_ups: how many checks on other values come first.
      unit: "seconds", or "bytes" for the memory in addition to what the process had before.
      target: the upper bound of jaxfn's number.
      ratio: by which factor jaxfn's number should be below torch's.
      runs: the number of runs, of which the median is taken.
    """

    name: str
    check: str
    shapes: tuple[tuple[int, int], ...]
    warm_ups: int = 0
    unit: str = "seconds"
    target: float | None = None
    ratio: float | None = None
    runs: int = 5


MEASUREMENTS = (
    Measurement("gradcheck, 12 elements, first", "gradcheck", _TINY, target=0.5),
    Measurement("gradcheck, 12 elements, second", "gradcheck", _TINY, warm_ups=1, target=0.05),
    Measurement("gradcheck, 512 elements", "gradcheck", _square(16), ratio=1),
    Measurement("gradcheck, 8,192 elements", "gradcheck", _square(64), ratio=12),
    Measurement("gradgradcheck, 8,192 elements", "gradgradcheck", _square(64), ratio=5, runs=1),
    Measurement("gradcheck, 32,768 elements", "gradcheck", _square(128), target=10),
    Measurement("gradcheck, 32,768 elements, memory", "gradcheck", _square(128), unit="bytes", target=0.5e9),
)
# torch stores whole Jacobians: 8 GB and half an hour.
_NOT_IN_TORCH = frozenset(m.name for m in MEASUREMENTS if m.shapes == _square(128))
_SLOW = frozenset(m.name for m in MEASUREMENTS if m.shapes not in (_TINY, _square(16)))


@dataclass(frozen=True)
class Result:
    """The results of a measurement in both libraries; `None` where it was not taken."""

    measurement: Measurement
    values: Mapping[str, float | None]

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; `None` if there is none, or nothing to compare with."""
        ours, theirs, wanted = self.values[_JAXFN], self.values[TORCH], self.measurement
        if ours is None or (wanted.target is None and (wanted.ratio is None or theirs is None)):
            return None
        return ours <= wanted.target if wanted.target is not None else theirs / ours >= wanted.ratio

    def line(self) -> str:
        """Formats the result as a line of text."""
        ours, theirs = (_shown(self.values[form], self.measurement.unit) for form in (_JAXFN, TORCH))
        ratio = ""
        if None not in self.values.values():
            ratio = f"{self.values[TORCH] / self.values[_JAXFN]:6.1f}x"
        verdict = {None: "", True: "met", False: "NOT MET"}[self.is_met]
        return f"  {self.measurement.name:<40}{ours:>12}{theirs:>12}{ratio:>9}   {self._target()} {verdict}".rstrip()

    def _target(self) -> str:
        if self.measurement.target is not None:
            return f"<= {_shown(self.measurement.target, self.measurement.unit)}:"
        return "" if self.measurement.ratio is None else f">= {self.measurement.ratio:g}x:"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {**asdict(self.measurement), "values": dict(self.values), "target_met": self.is_met}


def run(has_torch: bool, quick: bool) -> Iterator[Result]:
    """Yields each result as it is measured, without the slow ones if `quick`."""
    for measurement in MEASUREMENTS:
        if quick and measurement.name in _SLOW:
            continue
        forms = [_JAXFN, *([TORCH] if has_torch and measurement.name not in _NOT_IN_TORCH else [])]
        runs = [{form: _in_a_process(measurement, form) for form in forms} for _ in range(measurement.runs)]
        values = {form: statistics.median(run[form] for run in runs) for form in forms}
        yield Result(measurement, {_JAXFN: None, TORCH: None, **values})


def header() -> str:
    """Returns the header of the results."""
    return f"{'checking tanh(x @ w)':<42}{_JAXFN:>12}{TORCH:>12}{'':>9}   target"


def _in_a_process(measurement: Measurement, form: str) -> float:
    command = [sys.executable, "-m", "benchmarks.checking", measurement.name, form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{measurement.name} in {form} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _measure(measurement: Measurement, form: str) -> float:
    check = _torch_check(measurement) if form == TORCH else _jaxfn_check(measurement)
    generator = np.random.default_rng(0)
    for _ in range(measurement.warm_ups):
        check([generator.standard_normal(shape) for shape in measurement.shapes])
    inputs = [generator.standard_normal(shape) for shape in measurement.shapes]
    memory, begin = _peak_memory(), time.perf_counter()
    if not check(inputs):
        raise AssertionError("a right derivative was called wrong")
    return float(_peak_memory() - memory) if measurement.unit == "bytes" else time.perf_counter() - begin


def _peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _jaxfn_check(measurement: Measurement) -> Callable[[list[Any]], Any]:
    @jaxfn.function
    def layer(ctx: Any, x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        ctx.save_for_backward(x, w, y)
        return y

    @layer.backward
    def _(ctx: Any, grad_output: Any) -> Any:
        x, w, y = ctx.saved_tensors
        through = grad_output * (1 - y * y)
        return through @ w.T, x.T @ through

    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    check = getattr(jaxfn, measurement.check)  # the first use of the name imports its module, as `import torch` does
    return lambda inputs: check(layer, tuple(inputs))


def _torch_check(measurement: Measurement) -> Callable[[list[Any]], Any]:
    import torch

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            y = torch.tanh(x @ w)
            ctx.save_for_backward(x, w, y)
            return y

        @staticmethod
        def backward(ctx, grad_output):
            x, w, y = ctx.saved_tensors
            through = grad_output * (1 - y * y)
            return through @ w.T, x.T @ through

    def check(inputs: list[Any]) -> Any:
        tensors = tuple(torch.tensor(x, requires_grad=True) for x in inputs)
        return getattr(torch.autograd, measurement.check)(Layer.apply, tensors)

    return check


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.0f} MB" if unit == "bytes" else f"{value:.3g} s"


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # otherwise compilations are read from disk
    print(json.dumps(_measure(next(m for m in MEASUREMENTS if m.name == sys.argv[1]), sys.argv[2])))
