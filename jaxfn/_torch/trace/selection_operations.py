"""Operations on `x[mask]` with a traced mask."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as torch_tree

from jaxfn._torch.trace.selection import Selection, raise_unsupported
from jaxfn._torch.trace.state import TraceState

# Elementwise functions. (In-place forms are listed without their trailing underscore.)
_ELEMENTWISE = """
    abs absolute acos acosh add addcdiv addcmul and angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin
    asinh atan atan2 atanh bfloat16 bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
    bitwise_xor bool byte ceil celu char clamp clamp_max clamp_min clip clone conj contiguous copy copysign cos cosh
    cpu cuda deg2rad detach digamma div divide double elu eq erf erfc erfinv exp exp2 expm1 fill float float_power
    floor floor_divide floordiv fmax fmin fmod frac full_like gcd ge gelu greater greater_equal gt half hardshrink
    hardsigmoid hardswish hardtanh heaviside hypot i0 i0e i1 i1e iadd iand idiv ifloordiv igamma igammac imod imul
    int invert ior ipow isfinite isinf isnan isneginf isposinf isreal isub itruediv ixor lcm ldexp le leaky_relu
    lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or
    logical_xor logit logsigmoid long lshift lt masked_fill maximum minimum mish mod mul multiply nan_to_num ndtr
    ndtri ne neg negative nextafter not_equal ones_like or pos positive pow rad2deg radd rand rdiv real reciprocal
    relu relu6 remainder requires_grad rfloordiv rint rmod rmul ror round rpow rshift rsqrt rsub rtruediv rxor selu
    sgn short sigmoid sign signbit silu sin sinc sinh softplus softshrink softsign sqrt square sub subtract tan tanh
    tanhshrink threshold to true_divide truediv trunc type type_as where xlog1py xlogy xor zero zeros_like
"""
# Attributes of a selection that do not depend on its length.
_METADATA = "dtype device is_cuda is_floating_point is_complex is_sparse requires_grad layout"


def select(state: TraceState, tensor: torch.Tensor, mask: torch.Tensor) -> Selection:
    """Returns `tensor[mask]`."""
    full = torch.where(_expand_mask(mask, tensor), tensor, torch.ones_like(tensor))
    return Selection.from_parts(full, mask, state.recorder)


def assign(state: TraceState, tensor: torch.Tensor, mask: torch.Tensor, selection: Selection) -> None:
    """Implements `tensor[mask] = selection`."""
    if not state.is_same_computation(mask, selection.mask):
        raise_unsupported(state.recorder, "an assignment to another mask")
    tensor.copy_(torch.where(_expand_mask(mask, tensor), selection.full, tensor))


def call_with_selections(state: TraceState, func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a torch function that has selections among its arguments."""
    name = _function_name(func)
    if name in _METADATA.split():
        return func(*[x.full if isinstance(x, Selection) else x for x in args], **kwargs)
    if name == "sum" and len(args) == 1 and kwargs.keys() <= {"dtype"}:
        selection = args[0]
        return func(selection.full.masked_fill(~_expand_mask(selection.mask, selection.full), 0), **kwargs)
    if name not in _ELEMENTWISE.split():
        raise_unsupported(state.recorder, f"`{name}`")
    operands = [x for x in torch_tree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    first = next(x for x in operands if isinstance(x, Selection))
    rest = first.full.dim() - first.mask.dim()
    for operand in operands:
        if isinstance(operand, Selection):
            if not state.is_same_computation(operand.mask, first.mask):
                raise_unsupported(state.recorder, f"`{name}` with a selection by another mask")
        elif operand.dim() > rest:
            raise_unsupported(
                state.recorder,
                f"`{name}` with a tensor of shape {tuple(operand.shape)}, one entry for each selected element",
            )
    full = func(*torch_tree.tree_map(_full, args), **torch_tree.tree_map(_full, kwargs))
    if isinstance(args[0], Selection) and full is args[0].full:  # In place
        return args[0]
    return Selection.from_parts(full, first.mask, state.recorder) if isinstance(full, torch.Tensor) else full


def _full(value: Any) -> Any:
    return value.full if isinstance(value, Selection) else value


def _function_name(func: Any) -> str:
    if getattr(func, "__name__", "") == "__get__":  # of a property
        return func.__self__.__name__
    name: str = func.__name__
    return name[2:-2] if name.startswith("__") else name.removesuffix("_")


def _expand_mask(mask: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Appends axes of length 1 to a mask, up to the dimensions of `tensor`."""
    return mask.to(torch.bool).reshape(tuple(mask.shape) + (1,) * (tensor.dim() - mask.dim()))
