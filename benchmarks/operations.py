"""Processor time of translated torch operations, forward and with their gradient, next to torch and plain JAX.

Plain JAX is the obvious formulation. On a CPU several of these operations are translated to a faster one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxfn
from benchmarks.measure import Samples, interleaved, medians, summary

TRANSLATED, PLAIN, TORCH = FORMS = ("from_torch", "plain JAX", "torch")
_FORWARD, _GRADIENT = "forward", "with gradient"


@dataclass(frozen=True)
class Workload:
    """An operation in torch and in plain JAX.

    Attributes:
      name: the printed name.
      in_torch: the operation, from `torch.nn.functional` and the arguments.
      in_jax: the operation in plain JAX.
      shapes: the shapes of the arguments.
    """

    name: str
    in_torch: Callable[..., Any]
    in_jax: Callable[..., jax.Array]
    shapes: tuple[tuple[int, ...], ...]

    def args(self) -> list[np.ndarray]:
        """Returns random arguments."""
        generator = np.random.default_rng(0)
        return [generator.standard_normal(shape).astype(np.float32) for shape in self.shapes]


def _convolution(stride: int, padding: int, groups: int, x: jax.Array, w: jax.Array) -> jax.Array:
    axes = x.ndim - 2
    return lax.conv_general_dilated(x, w, [stride] * axes, [(padding, padding)] * axes, feature_group_count=groups)


def _transposed(stride: int, padding: int, x: jax.Array, w: jax.Array) -> jax.Array:
    axes, pad = x.ndim - 2, w.shape[-1] - 1 - padding
    kernel = jnp.flip(jnp.swapaxes(w, 0, 1), range(2, x.ndim))
    return lax.conv_general_dilated(x, kernel, [1] * axes, [(pad, pad)] * axes, [stride] * axes)


def _mean_of_windows(size: int, stride: int, padding: int, x: jax.Array) -> jax.Array:
    axes = x.ndim - 2
    window, strides = ((1, 1, *[value] * axes) for value in (size, stride))
    pads = [(0, 0), (0, 0), *[(padding, padding)] * axes]
    return lax.reduce_window(x, np.float32(0), lax.add, window, strides, pads) / size**axes


def _mean_of_adaptive_windows(count: int, x: jax.Array) -> jax.Array:
    for axis in range(2, x.ndim):
        n = x.shape[axis]
        slices = [lax.slice_in_dim(x, i * n // count, -(-(i + 1) * n // count), axis=axis) for i in range(count)]
        x = jnp.concatenate([part.mean(axis, keepdims=True) for part in slices], axis)
    return x


def _windows(size: int, step: int, x: jax.Array) -> jax.Array:
    return x[..., np.arange(0, x.shape[-1] - size + 1, step)[:, None] + np.arange(size)]


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, epsilon=1e-5) * weight + bias


WORKLOADS = (
    Workload(
        "avg_pool2d, 11", lambda nn, x: nn.avg_pool2d(x, 11), partial(_mean_of_windows, 11, 11, 0), ((8, 32, 66, 66),)
    ),
    Workload(
        "avg_pool3d, 3, stride 2",
        lambda nn, x: nn.avg_pool3d(x, 3, 2, 1),
        partial(_mean_of_windows, 3, 2, 1),
        ((2, 16, 24, 32, 32),),
    ),
    Workload(
        "adaptive_avg_pool2d, 5",
        lambda nn, x: nn.adaptive_avg_pool2d(x, 5),
        partial(_mean_of_adaptive_windows, 5),
        ((8, 32, 56, 56),),
    ),
    Workload(
        "conv2d, 1x1",
        lambda nn, x, w: nn.conv2d(x, w),
        partial(_convolution, 1, 0, 1),
        ((8, 64, 28, 28), (128, 64, 1, 1)),
    ),
    Workload(
        "conv2d, 3x3",
        lambda nn, x, w: nn.conv2d(x, w, padding=1),
        partial(_convolution, 1, 1, 1),
        ((8, 32, 32, 32), (64, 32, 3, 3)),
    ),
    Workload(
        "conv2d, 4 groups",
        lambda nn, x, w: nn.conv2d(x, w, padding=1, groups=4),
        partial(_convolution, 1, 1, 4),
        ((8, 64, 32, 32), (64, 16, 3, 3)),
    ),
    Workload(
        "conv2d, 32 groups",
        lambda nn, x, w: nn.conv2d(x, w, padding=1, groups=32),
        partial(_convolution, 1, 1, 32),
        ((8, 128, 28, 28), (128, 4, 3, 3)),
    ),
    Workload(
        "conv2d, depthwise",
        lambda nn, x, w: nn.conv2d(x, w, padding=1, groups=96),
        partial(_convolution, 1, 1, 96),
        ((8, 96, 28, 28), (96, 1, 3, 3)),
    ),
    Workload(
        "conv3d, 3x3x3",
        lambda nn, x, w: nn.conv3d(x, w, padding=1),
        partial(_convolution, 1, 1, 1),
        ((2, 16, 16, 24, 24), (32, 16, 3, 3, 3)),
    ),
    Workload(
        "conv_transpose2d, stride 2",
        lambda nn, x, w: nn.conv_transpose2d(x, w, stride=2, padding=1),
        partial(_transposed, 2, 1),
        ((8, 32, 16, 16), (32, 32, 4, 4)),
    ),
    Workload(
        "conv_transpose3d, stride 2",
        lambda nn, x, w: nn.conv_transpose3d(x, w, stride=2, padding=1),
        partial(_transposed, 2, 1),
        ((2, 16, 8, 12, 12), (16, 16, 4, 4, 4)),
    ),
    Workload(
        "layer_norm, 36,864",
        lambda nn, x, w, b: nn.layer_norm(x, w.shape, w, b),
        _layer_norm,
        ((16, 36864), (36864,), (36864,)),
    ),
    Workload(
        "interpolate, linear",
        lambda nn, x: nn.interpolate(x, 1024, mode="linear"),
        lambda x: jax.image.resize(x, (*x.shape[:2], 1024), "linear"),
        ((8, 64, 512),),
    ),
    Workload(
        "index_select",
        lambda nn, x: x.roll(3, 1).index_select(1, _indices(x)),
        lambda x: jnp.take(jnp.roll(x, 3, 1), np.arange(512) * 7 % 256, 1),
        ((1000, 256),),
    ),
    Workload("sort", lambda nn, x: x.sort(-1)[0], lambda x: jnp.sort(x, -1), ((1000, 256),)),
    Workload("topk, 50 of 32,000", lambda nn, x: x.topk(50)[0], lambda x: lax.top_k(x, 50)[0], ((8, 32000),)),
    Workload("median", lambda nn, x: x.median(-1)[0], lambda x: jnp.sort(x, -1)[:, 499], ((64, 1000),)),
    Workload("unfold", lambda nn, x: x.unfold(-1, 16, 8).clone(), partial(_windows, 16, 8), ((512, 1024),)),
    Workload("cumsum", lambda nn, x: x.cumsum(-1), lambda x: jnp.cumsum(x, -1), ((1000, 256),)),
    Workload("cumprod", lambda nn, x: x.cumprod(0), lambda x: jnp.cumprod(x, 0), ((256, 1000),)),
    Workload("cummax", lambda nn, x: x.cummax(-1)[0], lambda x: lax.cummax(x, axis=1), ((1000, 256),)),
)


def _indices(x: Any) -> Any:
    import torch

    return torch.arange(512) * 7 % x.shape[1]


@dataclass(frozen=True)
class Result:
    """One measurement of an operation in every form: seconds."""

    operation: str
    measurement: str
    samples: Samples

    def line(self) -> str:
        """Formats the result as a line of the table."""
        each = medians(self.samples)
        cells = "".join(f"{each[form] * 1e3:,.2f} ms".rjust(14) for form in FORMS)
        ratios = (each[TRANSLATED] / each[form] for form in (PLAIN, TORCH))
        return f"  {self.operation + ': ' + self.measurement:<44}{cells}" + "".join(f"{r:8.2f}x" for r in ratios)

    def as_json(self) -> dict[str, Any]:
        """Returns the fields that are saved."""
        return {
            "operation": self.operation,
            "measurement": self.measurement,
            "unit": "seconds",
            **summary(self.samples),
        }


def header() -> str:
    """Returns the header of the table."""
    forms = "".join(form.rjust(14) for form in FORMS)
    return f"{'operations, processor time':<46}{forms}   over plain JAX and torch"


def run(rounds: int) -> Iterator[Result]:
    """Yields each measurement as it is taken; nothing without torch. torch has one thread: waiting ones would count."""
    try:
        import torch
    except ModuleNotFoundError:
        print("operations: torch is not installed, and skipped")
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for workload in WORKLOADS:
            for measurement, calls in _calls(workload, torch).items():
                yield Result(workload.name, measurement, interleaved(calls, rounds, clock=time.process_time))
    finally:
        torch.set_num_threads(threads)


def _calls(workload: Workload, torch: ModuleType) -> dict[str, Mapping[str, Callable[[], Any]]]:
    """Returns the calls of every form, by measurement."""
    in_torch = partial(workload.in_torch, torch.nn.functional)
    args = workload.args()
    tensors = [torch.tensor(x, requires_grad=True) for x in args]
    cotangent = np.random.default_rng(1).standard_normal(in_torch(*tensors).shape).astype(np.float32)
    forward: dict[str, Callable[[], Any]] = {}
    gradient: dict[str, Callable[[], Any]] = {}
    for form, f in ((TRANSLATED, jaxfn.from_torch(in_torch)), (PLAIN, workload.in_jax)):
        compute = jax.jit(f)
        pull = jax.jit(lambda cotangent, *args, f=f: jax.vjp(f, *args)[1](cotangent))
        arrays, ct = [*map(jnp.asarray, args)], jnp.asarray(cotangent)
        forward[form] = lambda compute=compute, arrays=arrays: jax.block_until_ready(compute(*arrays))
        gradient[form] = lambda pull=pull, ct=ct, arrays=arrays: jax.block_until_ready(pull(ct, *arrays))
    detached, ct = [x.detach() for x in tensors], torch.tensor(cotangent)
    forward[TORCH] = lambda: in_torch(*detached)
    gradient[TORCH] = lambda: torch.autograd.grad(in_torch(*tensors), tensors, ct)
    for calls in (forward, gradient):
        _check_close({form: call() for form, call in calls.items()})
    return {_FORWARD: forward, _GRADIENT: gradient}


def _check_close(results: Mapping[str, Any]) -> None:
    """Fails if the forms compute different results, since their times could not be compared."""
    expected = jax.tree.leaves(results[TORCH])
    for form in (TRANSLATED, PLAIN):
        for x, wanted in zip(jax.tree.leaves(results[form]), expected, strict=True):
            scale = max(1.0, float(abs(wanted).max()))
            np.testing.assert_allclose(x, wanted, rtol=0.02, atol=0.02 * scale, err_msg=form)
