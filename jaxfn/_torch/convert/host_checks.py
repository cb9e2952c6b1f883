"""Checks of torch code that runs on the host: that `forward` is repeatable, and autograd knows what it computes.

torch differentiates `backward` by the graph of its operations, in which values that code outside torch computed are
constants, and intermediates that `forward` stored on ctx too. Such a second derivative would be wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as torch_tree

from jaxfn._torch._compat import TorchDispatchMode
from jaxfn._torch.convert.definition import Definition
from jaxfn._torch.values.arrays import to_numpy
from jaxfn._tree import is_inexact

# The functions by which Python code reads values of tensors that autograd does not follow.
_READS = ("item", "tolist", "numpy", "__array__", "__float__", "__complex__", "data_ptr", "__dlpack__")
# The operations whose results are zero, or any value, until an operation writes to them.
_ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like")
_FRACTIONS = (float, complex, np.ndarray, np.generic)
CHECKSUM_SIZE = 16


def observed_class(definition: Definition, order: int, checksums: list[torch.Tensor]) -> Any:
    """Returns a subclass of a torch Function that appends a checksum of ctx to a list.

    In a derivative of an order above 1, values that autograd takes for constants raise an error.
    """
    function, reads = definition.original, TorchCalls()
    versions: dict[int, int] = {}

    def observe(ctx: Any, inputs: Any, output: Any) -> None:
        values = torch_tree.tree_leaves([ctx.to_save, vars(ctx)])
        checksums.append(_checksum(values))
        # A mutated input is an intermediate, unless it is returned too.
        unchanged = (x for x in torch_tree.tree_leaves(inputs) if getattr(x, "_version", 0) == versions.get(id(x), 0))
        identities = {id(x) for x in (*unchanged, *torch_tree.tree_leaves(output))}
        for value in values if order > 1 else ():
            is_intermediate = _is_inexact_tensor(value) or (reads.has_read and isinstance(value, _FRACTIONS))
            if is_intermediate and id(value) not in identities:
                raise NotImplementedError(
                    f"{definition.name}.forward stores an intermediate on ctx, which is a constant to the second "
                    "derivative in torch. Save inputs or outputs, and compute the rest in backward"
                )

    def forward(*args: Any) -> Any:
        versions.update({id(x): x._version for x in torch_tree.tree_leaves(args) if isinstance(x, torch.Tensor)})
        with reads:
            output = function.forward(*args)
        if not definition.has_setup_context:
            observe(args[0], args[1:], output)
        return output

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        with reads:
            function.setup_context(ctx, inputs, output)
        observe(ctx, inputs, output)

    def backward(ctx: Any, *gradients: Any) -> Any:
        with TorchCalls() as reads, _OpaqueMemory(f"{definition.name}.backward") as memory:
            returned = method(ctx, *gradients)
        memory.check(torch_tree.tree_leaves(returned))
        if reads.has_read:
            raise NotImplementedError(
                f"{definition.name}.backward reads values of tensors as numbers or NumPy arrays, which are constants "
                "to the second derivative. Compute with tensors there"
            )
        if order > 2 and _applies_functions(returned, ctx):
            raise NotImplementedError(
                f"{definition.name}.backward applies a Function, and a third derivative would be wrong if that one "
                "stores an intermediate or computes outside torch. Compute with operations of torch there"
            )
        return returned

    method: Any = definition.backward
    methods: dict[str, Any] = {"forward": forward}
    if definition.has_setup_context:
        methods["setup_context"] = setup_context
    if order > 1:
        methods["vjp" if function.backward is torch.autograd.Function.backward else "backward"] = backward
    return type(definition.name, (function,), {name: staticmethod(value) for name, value in methods.items()})


def _applies_functions(returned: Any, ctx: Any) -> bool:
    """Whether the graph of what `backward` returned has a Function, other than that of its `ctx`."""
    nodes = [getattr(x, "grad_fn", None) for x in torch_tree.tree_leaves(returned)]
    seen: list[Any] = [None, ctx]
    while nodes:
        node: Any = nodes.pop()
        if not any(node is x for x in seen):
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
            seen.append(node)
            nodes += [x for x, _ in node.next_functions]
    return False


class TorchCalls(TorchFunctionMode):
    """Observes whether values of floating-point tensors leave torch, where autograd does not follow them.

    Raises an error after a number of calls of torch, in a loop that may not end.
    """

    def __init__(self, max_calls: int = sys.maxsize) -> None:
        super().__init__()
        self.has_read = False
        self._max_calls = max_calls
        self._num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_calls += 1
        if self._num_calls > self._max_calls:
            raise RuntimeError(f"no end after {self._max_calls} calls of torch")
        if getattr(func, "__name__", "") in _READS and _is_inexact_tensor(args[0]):
            self.has_read = True
        return func(*args, **(kwargs or {}))


class _OpaqueMemory(TorchDispatchMode):
    """Raises an error for values that code outside torch computed, in memory that no operation of torch wrote to."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where
        self._allocated: list[tuple[torch.Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, operands = func.overloadpacket.__name__, torch_tree.tree_leaves((args, kwargs))
        found = self._find(operands)
        is_alias = any(x.alias_info is not None for x in func._schema.returns)
        if torch.is_grad_enabled() and not is_alias:
            self.check(operands)
        result = func(*args, **(kwargs or {}))
        if name in _ALLOCATIONS or (is_alias and found):
            is_zero = "zeros" in name or any(is_zero for _, is_zero in found)
            self._allocated += [(x, is_zero) for x in torch_tree.tree_leaves(result) if _is_inexact_tensor(x)]
        return result

    def check(self, values: Sequence[Any]) -> None:
        """Raises an error if one of these has such values."""
        for x, is_zero in self._find(values):
            if x._version == 0 and not x.requires_grad and (x.any() if is_zero else x.numel()):
                raise NotImplementedError(
                    f"{self._where} computes outside torch, in compiled code, which is a constant to the second "
                    "derivative. Compute with operations of torch there, or in a Function with a backward"
                )

    def _find(self, values: Sequence[Any]) -> list[tuple[torch.Tensor, bool]]:
        return [entry for entry in self._allocated if any(entry[0] is value for value in values)]


def _is_inexact_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _checksum(values: Sequence[Any]) -> torch.Tensor:
    """Returns numbers that are different for other numbers, tensors and NumPy arrays, however large they are."""
    sums = torch.zeros(CHECKSUM_SIZE, dtype=torch.float64)
    for i, value in enumerate(values):
        if isinstance(value, (int, *_FRACTIONS)) and np.asarray(value).dtype.kind in "biufc":
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
