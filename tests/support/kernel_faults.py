"""Kernels in plain jax.numpy, each a Function with a hand-written backward, and faults planted in them.

A fault is the kernel's source with one piece of text replaced.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxfn

CHECKS = (
    "outputs", "gradients", "vacuous", "determinism", "scales", "constants", "jit", "padding", "vmap", "undefined",
    "undifferentiated", "subsets", "sizes", "donation", "shard",
)  # fmt: skip


def all_but(*checks: str) -> list[str]:
    """The checks to skip, so that only these run in addition to those of outputs and gradients; others compile more."""
    return [check for check in CHECKS if check not in ("outputs", "gradients", *checks)]


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, "float32")


@dataclass(frozen=True)
class Kernel:
    """A kernel that is right.

    Attributes:
      source: of functions `forward` and `backward`, and of `vmap` if there is one.
      reference: what it should compute.
      inputs: what it is tried on.
    """

    source: str
    reference: Callable[..., Any]
    inputs: tuple[Any, ...]

    def made(self, old: str = "", new: str = "") -> Callable[..., Any]:
        """The kernel, with some text replaced."""
        assert not old or self.source.count(old) == 1, old
        names = {"jax": jax, "jnp": jnp, "np": np, "ctypes": ctypes, "jaxfn": jaxfn, "calls": [0.0]}
        exec(self.source.replace(old, new) if old else self.source, names)
        function = jaxfn.function(names["forward"])
        for method in ("setup_context", "backward", "vmap"):
            if method in names:
                getattr(function, method)(names[method])
        return function


def layer_norm(x, weight, bias):
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * weight + bias


LAYER_NORM = Kernel(
    """
def normalized(x):
    x = x.astype(jnp.float32)
    mean = jnp.mean(x, -1, keepdims=True)
    centred = x - mean
    inverse = jax.lax.rsqrt(jnp.mean(centred * centred, -1, keepdims=True) + 1e-5)
    return centred * inverse, inverse

def forward(ctx, x, weight, bias):
    ctx.save_for_backward(x, weight)
    y, _ = normalized(x)
    return (y * weight + bias).astype(x.dtype)

def backward(ctx, grad_output):
    x, weight = ctx.saved_tensors
    y, inverse = normalized(x)
    g = grad_output.astype(jnp.float32)
    scaled = g * weight
    first = jnp.mean(scaled, -1, keepdims=True)
    second = jnp.mean(scaled * y, -1, keepdims=True)
    grad_x = inverse * (scaled - first - second * y)
    grad_weight = jnp.sum(g * y, 0)
    grad_bias = jnp.sum(g, 0)
    return grad_x, grad_weight, grad_bias
""",
    layer_norm,
    (shape(6, 13), shape(13), shape(13)),
)


def moments(x, weight):
    mean = (x * weight).mean(0)
    return mean, ((x * weight - mean) ** 2).mean(0)


MOMENTS = Kernel(
    """
def forward(x, weight):
    y = x.astype(jnp.float32) * weight
    mean = y.mean(0)
    return mean.astype(x.dtype), ((y - mean) ** 2).mean(0).astype(x.dtype)

def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)

def backward(ctx, grad_mean, grad_variance):
    x, weight = ctx.saved_tensors
    y = x.astype(jnp.float32) * weight
    grad_y = 0.0
    if grad_mean is not None:
        grad_y = grad_y + jnp.broadcast_to(grad_mean / len(x), x.shape)
    if grad_variance is not None:
        grad_y = grad_y + 2 / len(x) * (y - y.mean(0)) * grad_variance
    grad_x = grad_y * weight if ctx.needs_input_grad[0] else None
    grad_weight = (grad_y * x).sum(0) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight

def vmap(info, in_dims, x, weight):
    x = x if in_dims[0] is None else jnp.moveaxis(x, in_dims[0], 0)
    weight = weight if in_dims[1] is None else jnp.moveaxis(weight, in_dims[1], 0)
    y = x * jnp.expand_dims(weight, -2)
    y = jnp.broadcast_to(y, (info.batch_size, *y.shape[-2:]))
    return (y.mean(1), y.var(1)), (0, 0)
""",
    moments,
    (shape(7, 5), shape(5)),
)

DOUBLED = Kernel(
    """
def forward(ctx, x):
    return 2 * x

def backward(ctx, grad_output):
    return 2 * grad_output
""",
    lambda x: 2 * x,
    (shape(5, 3),),
)

KERNELS = {
    "layer norm": LAYER_NORM,
    "moments": MOMENTS,
    "doubled": DOUBLED,
}

_READS_BEYOND = """
    if not isinstance(x, jax.core.Tracer):
        size = x.size + 1
        memory = (ctypes.c_char * (size * x.dtype.itemsize)).from_address(x.unsafe_buffer_pointer())
        return 2 * x + 0 * np.frombuffer(memory, x.dtype)[-1]
    return 2 * x"""
_WRITES = """
    if not isinstance(x, jax.core.Tracer):
        (ctypes.c_char * x.dtype.itemsize).from_address(x.unsafe_buffer_pointer())[:] = bytes(x.dtype.itemsize)
    return 2 * x"""
_COUNTS = """
    calls[0] += 1.0
    return 2 * x * calls[0]"""

# (kernel, what is replaced, by what, the check that must find it); more mistakes of formulas are in `pallas_faults`
FAULTS = [
    # Forward: the formula.
    ("layer norm", "y * weight + bias", "y * bias + weight", "outputs"),
    ("layer norm", "return (y * weight + bias)", "return 1.0001 * (y * weight + bias)", "outputs"),
    ("layer norm", "mean = jnp.mean(x, -1, keepdims=True)", "mean = jnp.mean(x[:, :-1], -1, keepdims=True)", "outputs"),
    ("layer norm", "x = x.astype(jnp.float32)", "x = x.astype(jnp.bfloat16)", "outputs"),
    ("moments", "mean = y.mean(0)\n", "mean = y.sum(0) / (len(x) - 1)\n", "outputs"),
    # Backward.
    ("layer norm", "scaled - first - second * y", "scaled - second * y", "gradients"),
    ("layer norm", "jnp.sum(g * y, 0)", "jnp.mean(g * y, 0)", "gradients"),
    ("layer norm", "jnp.sum(g, 0)", "jnp.sum(g.astype(jnp.bfloat16), 0)", "gradients"),
    ("layer norm", "return grad_x, grad_weight, grad_bias", "return grad_x, grad_bias, grad_weight", "gradients"),
    ("layer norm", "g = grad_output.astype(jnp.float32)", "g = jnp.ones(grad_output.shape)", "gradients"),
    ("moments", "2 / len(x) * (y", "2 * (y", "gradients"),
    # What shows in one circumstance only.
    ("layer norm", "jnp.sum(g, 0)", "g[:8].sum(0)", "sizes"),
    ("moments", "if grad_variance is not None:", "if grad_mean is not None:", "undefined"),
    ("moments", "if grad_mean is not None:", "if True:", "undefined"),
    ("moments", "if ctx.needs_input_grad[1] else None", "if ctx.needs_input_grad[0] else None", "subsets"),
    ("moments", "if ctx.needs_input_grad[0] else None", "* (1 + 0.1 * (not ctx.needs_input_grad[1]))", "subsets"),
    ("moments", "y.mean(1), y.var(1)", "y.mean(2)[:, :5], y.var(1)", "vmap"),
    ("moments", "y.mean(1), y.var(1)", "y.mean(1), y.var(1, ddof=1)", "vmap"),
    ("moments", "jnp.expand_dims(weight, -2)", "weight[..., None, :] if in_dims[1] is not None else 1.0", "vmap"),
    ("doubled", "return 2 * x", "return 2 * x * (1 + 1e-2 * np.random.default_rng().uniform())", "determinism"),
    ("doubled", "return 2 * grad_output", "calls[0] += 1.0; return calls[0] * grad_output", "determinism"),
    ("doubled", "\n    return 2 * x", _COUNTS, "determinism"),
    ("doubled", "\n    return 2 * x", _READS_BEYOND, "padding"),
    ("doubled", "\n    return 2 * x", _WRITES, "donation"),
    ("doubled", "2 * x", "2 * x if isinstance(x, jax.core.Tracer) else 3 * x", "jit"),
    ("doubled", "2 * x", "2 * x if any(ctx.needs_input_grad) else 3 * x", "undifferentiated"),
    ("doubled", "2 * x", "jnp.where(x == 0, jnp.nan, 2 * x)", "constants"),
    ("doubled", "2 * x", "jnp.where(jnp.abs(x) < 1e-4, 0.0, 2 * x)", "scales"),
    ("doubled", "2 * x", "2 * x.reshape(3, 5)", "outputs"),
    ("doubled", "2 * x", "x.undefined", "outputs"),
    ("doubled", "2 * grad_output", "grad_output.undefined", "gradients"),
]
