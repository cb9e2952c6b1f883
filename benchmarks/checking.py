"""Time and memory of gradcheck and gradgradcheck, compared with torch's and with JAX's `check_grads`.

Every run is in a separate process, so that nothing is compiled yet; JAX itself is warm. Compilation is included.
Reported is the median of five runs (of one, where that takes minutes), with the libraries taking turns. `check_grads`
compares one random direction, in reverse mode here; the others compare whole Jacobians.
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
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

import jaxfn
from benchmarks.functions import TORCH
from tests.support.libraries import Jax, Library, make_function, torch_library

_JAXFN, CHECK_GRADS = "jaxfn", "check_grads"
FORMS = (_JAXFN, CHECK_GRADS, TORCH)
_TINY = ((2, 3), (3, 2))
_LAYER = ((3, 4), (4, 2))


def _square(n: int) -> tuple[tuple[int, int], ...]:
    return ((n, n), (n, n))


@dataclass(frozen=True)
class Measurement:
    """A measurement.

    Attributes:
      name: its name in the tables.
      check: the name of the checking function.
      shapes: of the two matrices that go through tanh(c x @ w).
      warm_ups: how many checks on other values come first.
      unit: "seconds", or "bytes" for the peak memory of the process.
      target: the upper bound of jaxfn's number.
      ratio: by which factor jaxfn's number should be below torch's.
      check_grads: how many times that of `check_grads` jaxfn's number may be.
      functions: the number of new Functions, of which the median is taken; 0 for one Function.
      runs: the number of runs, of which the median is taken.
    """

    name: str
    check: str
    shapes: tuple[tuple[int, int], ...]
    warm_ups: int = 0
    unit: str = "seconds"
    target: float | None = None
    ratio: float | None = None
    check_grads: float | None = None
    functions: int = 0
    runs: int = 5


MEASUREMENTS = (
    Measurement("many small gradchecks, each", "gradcheck", _LAYER, warm_ups=3, functions=12, check_grads=7),
    Measurement("many small gradgradchecks, each", "gradgradcheck", _LAYER, warm_ups=3, functions=12, check_grads=4),
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


@dataclass(frozen=True)
class Result:
    """The results of a measurement in all libraries; `None` where it was not taken."""

    measurement: Measurement
    values: Mapping[str, float | None]

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; `None` if there is none, or nothing to compare with."""
        bound = self._bound
        return None if bound is None or (ours := self.values[_JAXFN]) is None else ours <= bound

    @property
    def _bound(self) -> float | None:
        """The upper bound of jaxfn's number; `None` if there is none, or nothing to compare with."""
        wanted, torchs, jaxs = self.measurement, self.values[TORCH], self.values[CHECK_GRADS]
        if wanted.ratio is not None:
            return None if torchs is None else torchs / wanted.ratio
        if wanted.check_grads is not None:
            return None if jaxs is None else jaxs * wanted.check_grads
        return wanted.target

    def line(self) -> str:
        """Formats the result as a line of text."""
        values = "".join(f"{_shown(self.values[form], self.measurement.unit):>12}" for form in FORMS)
        return f"  {self.measurement.name:<40}{values}"

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {**asdict(self.measurement), "values": dict(self.values), "target_met": self.is_met}


def run(has_torch: bool) -> Iterator[Result]:
    """Yields each result as it is measured."""
    for measurement in MEASUREMENTS:
        forms = [_JAXFN]
        forms += [CHECK_GRADS] if measurement.functions else []
        forms += [TORCH] if has_torch and measurement.name not in _NOT_IN_TORCH else []
        runs = [{form: _in_a_process(measurement, form) for form in forms} for _ in range(measurement.runs)]
        values = {form: statistics.median(run[form] for run in runs) for form in forms}
        yield Result(measurement, {**dict.fromkeys(FORMS), **values})


def header() -> str:
    """Returns the header of the results."""
    return f"{'checking tanh(c x @ w)':<42}" + "".join(f"{form:>12}" for form in FORMS)


def _in_a_process(measurement: Measurement, form: str) -> float:
    command = [sys.executable, "-m", "benchmarks.checking", measurement.name, form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{measurement.name} in {form} failed:\n{done.stderr}")
    return json.loads(done.stdout)


def _measure(measurement: Measurement, form: str) -> float:
    new = {_JAXFN: _jaxfn_check, CHECK_GRADS: _check_grads, TORCH: _torch_check}[form]
    generator = np.random.default_rng(0)
    check = new(measurement, 1.0)
    seconds: list[float] = []
    for i in range(measurement.warm_ups + max(measurement.functions, 1)):
        if measurement.functions:
            check = new(measurement, 1 + i / 64)
        inputs = [0.3 * generator.standard_normal(shape) for shape in measurement.shapes]
        begin = time.perf_counter()
        if not check(inputs):
            raise AssertionError("a right derivative was called wrong")
        seconds.append(time.perf_counter() - begin)
    return _peak_memory() if measurement.unit == "bytes" else statistics.median(seconds[measurement.warm_ups :])


def _peak_memory() -> float:
    """Returns the bytes of the peak, of this process alone: Linux adds its parent's to what `getrusage` returns."""
    status = Path("/proc/self/status")
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024.0 * int(line.split()[1])
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _layer(library: Library, factor: float) -> Callable[..., Any]:
    def backward(grad_output: Any, x: Any, w: Any, y: Any) -> Any:
        through = factor * grad_output * (1 - y * y)
        return through @ w.T, x.T @ through

    return make_function(
        library,
        lambda x, w: library.m.tanh(factor * (x @ w)),
        backward,
        lambda inputs, output: (*inputs, output),
    ).apply


def _jaxfn_check(measurement: Measurement, factor: float) -> Callable[[list[Any]], Any]:
    layer = _layer(Jax, factor)
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    check = getattr(jaxfn, measurement.check)  # the first use of the name imports its module, as `import torch` does
    return lambda inputs: check(layer, tuple(inputs))


def _check_grads(measurement: Measurement, factor: float) -> Callable[[list[Any]], Any]:
    layer, order = _layer(Jax, factor), 1 + (measurement.check == "gradgradcheck")
    jax.block_until_ready(jax.jit(jnp.sin)(1.0))

    def check(inputs: list[Any]) -> bool:
        with jax.enable_x64(True):
            check_grads(layer, tuple(inputs), order, modes=["rev"], atol=1e-3, rtol=1e-3)  # raises
        return True

    return check


def _torch_check(measurement: Measurement, factor: float) -> Callable[[list[Any]], Any]:
    import torch

    layer = _layer(torch_library(), factor)

    def check(inputs: list[Any]) -> Any:
        tensors = tuple(torch.tensor(x, requires_grad=True) for x in inputs)
        return getattr(torch.autograd, measurement.check)(layer, tensors)

    return check


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.0f} MB" if unit == "bytes" else f"{value:.3g} s"


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # otherwise compilations are read from disk
    print(json.dumps(_measure(next(m for m in MEASUREMENTS if m.name == sys.argv[1]), sys.argv[2])))
