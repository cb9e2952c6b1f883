"""The kernels of `examples/kernels` as modules, with small blocks, or with one piece of text replaced."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

FOLDER = Path(__file__).parents[2] / "examples" / "kernels"
# So that small arrays have several blocks.
SMALL = {
    "layer_norm": ("ENTRIES = 8192", "ENTRIES = 256"),
    "cross_entropy": ("ROWS, WORDS, ENTRIES = 64, 128, 16384", "ROWS, WORDS, ENTRIES = 16, 16, 256"),
    "flash_attention": ("BLOCK = 64", "BLOCK = 16"),
}
Change = tuple[str, str, str]  # the file, the text, what stands there instead


def load(name: str, *changes: Change) -> ModuleType:
    """Imports the module, and what it imports of its folder, again."""
    before = dict(sys.modules)
    try:
        for file in ("blocks", "comparison", name):
            path = FOLDER / f"{file}.py"
            source = path.read_text()
            for _, old, new in (change for change in changes if change[0] == file):
                assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {path.name}"
                source = source.replace(old, new)
            module = ModuleType(file)
            module.__file__ = str(path)
            sys.modules[file] = module
            exec(compile(source, path, "exec"), module.__dict__)
        return module
    finally:
        for file in {"blocks", "comparison", name} - before.keys():
            del sys.modules[file]
        sys.modules.update(before)


def small(name: str, *changes: Change) -> ModuleType:
    """The module with small blocks."""
    return load(name, (name, *SMALL[name]), *changes)


@dataclass(frozen=True)
class Kernel:
    """One of the kernels, and what it takes.

    Attributes:
      module: the example's file.
      function: what is called in it.
      shapes: of the floating arguments for (rows, columns, width).
      mapped: axes for `jax.vmap`, one list for each case.
      split: how `shard_map` splits arguments over devices, and the output.
      labels: whether it takes labels after them, one for each row, below the number of columns.
      options: keywords.
    """

    module: str
    function: str
    shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]]
    mapped: Sequence[Sequence[int | None]]
    split: tuple[Sequence[P], P]
    labels: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "_".join([self.function, *self.options])

    def of(self, module: ModuleType) -> Callable[..., jax.Array]:
        return functools.partial(getattr(module, self.function), **self.options)

    def plain(self, module: ModuleType) -> Callable[..., jax.Array]:
        return functools.partial(module.plain, **self.options)

    def args(self, rows: int, columns: int, width: int, dtype: Any = np.float32, seed: int = 0) -> list[np.ndarray]:
        generator = np.random.default_rng(seed)
        floats = [generator.standard_normal(shape).astype(dtype) for shape in self.shapes(rows, columns, width)]
        labels = generator.integers(0, columns, rows, dtype=np.int32)
        labels[1::5] = -100
        return [*floats, labels] if self.labels else floats


ROWS, WHOLE = P("d"), P()
LAYER_NORM = Kernel(
    "layer_norm",
    "layer_norm",
    lambda rows, columns, width: [(rows, columns), (columns,), (columns,)],
    [(0, None, None), (1, None, 0), (2, 1, None), (None, 0, None), (None, None, 0)],
    ((ROWS, WHOLE, WHOLE), ROWS),
)
CROSS_ENTROPY = Kernel(
    "cross_entropy",
    "cross_entropy",
    lambda rows, columns, width: [(rows, width), (columns, width)],
    [(0, None, None), (1, None, 0), (2, 1, 1), (None, 0, None), (None, None, 0)],
    ((ROWS, WHOLE, ROWS), ROWS),
    labels=True,
)
ATTENTION = Kernel(
    "flash_attention",
    "flash_attention",
    lambda rows, columns, width: [(8, rows, width), (8, columns, width), (8, columns, width + 2)],
    [(0, None, None), (1, 2, 3), (None, 0, 1), (None, None, 0)],
    ((ROWS,) * 3, ROWS),
)
CAUSAL = Kernel(
    "flash_attention", "flash_attention", ATTENTION.shapes, ATTENTION.mapped, ATTENTION.split, options={"causal": True}
)
KERNELS = (LAYER_NORM, CROSS_ENTROPY, ATTENTION, CAUSAL)


def value_and_gradients(function: Callable[..., jax.Array], args: Sequence[Any]) -> list[jax.Array]:
    """Returns the value and the gradients for one cotangent with distinct entries."""
    value, pullback = jax.vjp(function, *args)
    cotangent = jnp.cos(jnp.arange(value.size)).reshape(value.shape)
    gradients = pullback(cotangent.astype(value.dtype))
    return [value, *(g for g in gradients if jnp.issubdtype(g.dtype, jnp.floating))]


def expected(plain: Callable[..., jax.Array], args: Sequence[Any]) -> list[np.ndarray]:
    """Returns the results of plain JAX in double precision."""
    with jax.enable_x64(True):
        wide = [jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else jnp.asarray(x) for x in args]
        return [np.asarray(x) for x in jax.jit(lambda *args: value_and_gradients(plain, args))(*wide)]
