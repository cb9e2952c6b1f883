"""Checks that `forward` of a torch Function is repeatable on the host, and ends on example values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_tree

from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.values.arrays import to_numpy
from jaxfn._tree import is_inexact

CHECKSUM_SIZE = 16


def observed_class(definition: Definition, checksums: list[torch.Tensor]) -> Any:
    """Returns a subclass of a torch Function that appends a checksum of ctx to a list."""
    function = definition.original

    def forward(*args: Any) -> Any:
        output = function.forward(*args)
        if not definition.has_setup_context:
            observe(args[0])
        return output

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        function.setup_context(ctx, inputs, output)
        observe(ctx)

    def observe(ctx: Any) -> None:
        checksums.append(_checksum(torch_tree.tree_leaves([ctx.to_save, vars(ctx)])))

    methods: dict[str, Any] = {"forward": forward}
    if definition.has_setup_context:
        methods["setup_context"] = setup_context
    return type(definition.name, (function,), {name: staticmethod(value) for name, value in methods.items()})


class LimitedCalls(TorchFunctionMode):
    """Raises an error after a number of calls of torch, in a loop that may not end."""

    def __init__(self, max_calls: int) -> None:
        super().__init__()
        self._max_calls = max_calls
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            raise RuntimeError(f"no end after {self._max_calls} calls of torch")
        return func(*args, **(kwargs or {}))


def _checksum(values: Sequence[Any]) -> torch.Tensor:
    """Returns numbers that are different for other numbers, tensors and NumPy arrays, however large they are."""
    sums = torch.zeros(CHECKSUM_SIZE, dtype=torch.float64)
    for i, value in enumerate(values):
        if isinstance(value, (int, float, complex, np.ndarray, np.generic)) and np.asarray(value).dtype.kind in "biufc":
            value = torch.from_numpy(np.array(value, np.complex128))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_quantized:
            numbers = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            numbers = numbers.detach().cpu().reshape(-1).double()
            sizes, weights = numbers.abs(), torch.linspace(1, 2, len(numbers), dtype=torch.float64)
            sums[i % CHECKSUM_SIZE] += numbers @ weights / (sizes.sum().item() or 1) + (sizes @ weights).log1p()
    return sums.float()


def is_close(result: torch.Tensor, expected: np.ndarray[Any, Any]) -> bool:
    """Whether two runs of `forward` returned equal values, up to the rounding of sums in another order."""
    values = to_numpy(result).astype(expected.dtype, copy=False)
    if values.shape != expected.shape or not is_inexact(expected.dtype):
        return np.array_equal(values, expected)
    first, second = values.astype(np.complex128), expected.astype(np.complex128)
    eps = float(jnp.finfo(expected.dtype).eps)
    tolerance = min(eps**0.5, 2 * eps + 1e-4)
    scale = np.abs(second[np.isfinite(second)]).max(initial=0)
    return np.allclose(first, second, tolerance, tolerance * scale, equal_nan=True)
