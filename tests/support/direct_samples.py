"""Calls of the operations that torch's own samples do not reach."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

aten = torch.ops.aten


def numbers(*shape: int, dtype: Any = torch.float64) -> Any:
    """Distinct numbers between -2 and 2 in no order."""
    count = torch.Size(shape).numel()
    spread = torch.remainder(torch.arange(count, dtype=torch.float64) * 0.6180339887498949, 1) * 4 - 2
    return spread.reshape(shape).to(dtype)


single = functools.partial(numbers, dtype=torch.float32)


def ends(*numbers: int) -> Any:
    """Returns the ends of groups."""
    return torch.tensor(numbers, dtype=torch.int32)


def upsampled(name: str, axes: int) -> tuple[Callable[..., Any], list[Any]]:
    """Interpolation of `axes` axes to another size, and its derivative."""

    def call(x: Any, gradient: Any) -> Any:
        size, scales = [4, 7, 3][:axes], [None] * axes
        forward = getattr(aten, name)(x, size, *scales)
        return forward, getattr(aten, f"{name}_backward")(gradient, size, list(x.shape), *scales)

    return call, [numbers(2, 3, *[3, 4, 5][:axes]), numbers(2, 3, *[4, 7, 3][:axes])]


def padded(name: str, axes: int) -> tuple[Callable[..., Any], list[Any]]:
    """Padding of `axes` axes, and its derivative."""

    def call(x: Any, gradient: Any) -> Any:
        pads = [1, 2] * axes
        return getattr(aten, name)(x, pads), getattr(aten, f"{name}_backward")(gradient, x, pads)

    return call, [numbers(2, 3, *[4] * axes), numbers(2, 3, *[7] * axes)]


def _created(x: Any) -> Any:
    """New tensors that are large enough to be created in the graph."""
    return [
        x[0, 0] + tensor
        for tensor in (
            aten.arange.default(5000),
            aten.arange.start(-3, 5000),
            aten.arange.start_step(0.5, 2000, 0.25),
            aten.eye(70),
            aten.eye(70, 80),
            aten.full([70, 80], 0.3),
            aten.ones([70, 80]),
            aten.zeros([70, 80]),
            aten.tril_indices(100, 90, 3),
            aten.triu_indices(100, 90, -3),
        )
    ]


def _empty(x: Any) -> Any:
    """New tensors of any numbers."""
    return [
        x[0, 0] + tensor
        for tensor in (
            aten.empty([70, 80]),
            aten.empty_permuted([70, 80], [1, 0]),
            aten.empty_strided([70, 80], [1, 70]),
        )
    ]


def _attention_backward(query: Any, key: Any, value: Any) -> Any:
    """The gradients of attention with a mask."""
    mask = numbers(5, 7) > -1
    output, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask.to(query.dtype))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output.cos(), query, key, value, output, sums, 0.0, False, attn_mask=mask.to(query.dtype)
    )


def _weight_norm(v: Any, g: Any, gradient: Any) -> Any:
    """Weights with these norms, and the gradients."""
    weight, norms = aten._weight_norm_interface(v, g, 2)
    return weight, norms, aten._weight_norm_interface_backward(gradient, v, g, norms, 2)


X = numbers(3, 4)
K = torch.tensor([[5, -3, 0], [2, 7, -8]])

# Well-conditioned, and not symmetric.
A = numbers(3, 3) + 4 * torch.eye(3)

DIRECT: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "__lshift__": (lambda x: aten.__lshift__.Scalar(x, 2), [K]),
    "__rshift__": (lambda x: aten.__rshift__.Scalar(x, 1), [K]),
    "_linalg_det": (aten._linalg_det.default, [A]),
    "_linalg_slogdet": (aten._linalg_slogdet.default, [A]),
    "_linalg_solve_ex": (
        lambda a: [*aten._linalg_solve_ex(a, a[0]), *aten._linalg_solve_ex(a.t(), a, left=False)],
        [A],
    ),
    "_linalg_det.complex": (aten._linalg_det.default, [torch.complex(A, A.t())]),
    "_linalg_eigvals": (aten._linalg_eigvals.default, [torch.diag(torch.tensor([3.0, -1.0, 2.0]))]),
    "_native_batch_norm_legit.no_stats": (
        lambda x, w, b: aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
        [numbers(4, 3, 5), numbers(3), numbers(3)],
    ),
    "_native_batch_norm_legit_no_training": (
        lambda x, w, b, m, v: aten._native_batch_norm_legit_no_training.default(x, w, b, m, v, 0.1, 1e-5)[0],
        [numbers(4, 3, 5), numbers(3), numbers(3), numbers(3), numbers(3).abs() + 0.5],
    ),
    "_neg_view": (aten._neg_view.default, [X]),
    "_reshape_alias": (lambda x: aten._reshape_alias.default(x, [2, 6], [6, 1]), [X]),
    "bernoulli.p": (lambda x: aten.bernoulli.p(x, 0.3), [X]),
    "bernoulli_.float": (lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5), [X]),
    "bernoulli.Tensor": (lambda x, p: aten.bernoulli.Tensor(x, p), [X, X.abs() / 2]),
    "created": (_created, [X]),
    "detach": (lambda x: x + K.double().detach()[0, 0], [X]),
    "empty": (_empty, [X]),
    "fake_quantize_per_tensor": (
        lambda x: aten.fake_quantize_per_tensor_affine_cachemask.default(x, 0.3, 1, -4, 3),
        [X],
    ),
    "fake_quantize_per_tensor_by_tensors": (
        lambda x, s, z, e: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default(x, s, z, e, -4, 3),
        [X, torch.tensor([0.3]), torch.tensor([1], dtype=torch.int32), torch.tensor([1])],
    ),
    "fake_quantize_per_tensor_switched_off": (
        lambda x, s, z, e: aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default(x, s, z, e, -4, 3),
        [X, torch.tensor([0.3]), torch.tensor([1], dtype=torch.int32), torch.tensor([0])],
    ),
    "fake_quantize_per_channel": (
        lambda x, s, z: aten.fake_quantize_per_channel_affine_cachemask.default(x, s, z, 1, -4, 3),
        [X, torch.tensor([0.3, 0.5, 0.7, 1.1]), torch.tensor([0, 1, -1, 2], dtype=torch.int32)],
    ),
    "grouped_mm.rows": (aten._grouped_mm.default, [single(8, 4), single(3, 4, 8), ends(2, 2, 8)]),
    "grouped_mm.columns": (aten._grouped_mm.default, [single(3, 8, 4), single(4, 8), ends(1, 3, 8)]),
    "grouped_mm.inner": (aten._grouped_mm.default, [single(4, 8), single(8, 4), ends(3, 3, 6)]),
    "grouped_mm.batched": (aten._grouped_mm.default, [single(3, 5, 4), single(3, 4, 8)]),
    "median.dim": (lambda x: aten.median.dim(x, 1, True), [X]),
    "native_dropout": (lambda x: aten.native_dropout.default(x, 0.3, True), [X]),
    "native_group_norm_backward": (
        lambda g, x, m, r, w: aten.native_group_norm_backward.default(g, x, m, r, w, 2, 4, 5, 2, [True] * 3),
        [numbers(2, 4, 5), numbers(2, 4, 5) + 1, numbers(2, 2), numbers(2, 2).abs() + 0.5, numbers(4)],
    ),
    "native_layer_norm_backward": (
        lambda g, x, m, r, w: aten.native_layer_norm_backward.default(g, x, [5], m, r, w, w, [True] * 3),
        [numbers(2, 4, 5), numbers(2, 4, 5) + 1, numbers(2, 4, 1), numbers(2, 4, 1).abs() + 0.5, numbers(5)],
    ),
    "normal.Tensor_float": (lambda x: aten.normal.Tensor_float(x, 2.0), [X]),
    "normal.float_Tensor": (lambda x: aten.normal.float_Tensor(2.0, x.abs()), [X]),
    "rand": (lambda: aten.rand.default([3, 4]), []),
    "rand_like": (aten.rand_like.default, [X]),
    "convert_element_type": (lambda x: torch.ops.prims.convert_element_type.default(x, torch.float32), [X]),
    "embedding_renorm": (
        lambda w, i: aten.embedding_renorm.default(w, i, 1.0, 2.0),
        [numbers(5, 3), torch.tensor([[0, 2], [2, 4]])],
    ),
    "randint.low": (lambda: aten.randint.low(-3, 5, [3, 4]), []),
    "randint_like.low_dtype": (lambda x: aten.randint_like.low_dtype(x, -3, 5), [X]),
    "randperm": (lambda: aten.randperm.default(7), []),
    "repeat_interleave": (lambda n: aten.repeat_interleave.Tensor(n, output_size=9), [torch.tensor([2, 0, 4, 3])]),
    "scaled_dot_product_backward": (
        _attention_backward,
        [numbers(2, 3, 5, 4), numbers(2, 3, 7, 4), numbers(2, 3, 7, 4)],
    ),
    "weight_norm_interface": (
        _weight_norm,
        [numbers(5, 3, 2), numbers(1, 1, 2).abs() + 0.5, numbers(5, 3, 2)],
    ),
    "reflection_pad2d": padded("reflection_pad2d", 2),
    "reflection_pad3d": padded("reflection_pad3d", 3),
    "replication_pad3d": padded("replication_pad3d", 3),
    "sort.stable": (lambda x: aten.sort.stable(x, stable=True, dim=1, descending=True), [K]),
    "view.dtype": (lambda x: (aten.view.dtype(x, torch.float32), aten.view.dtype(x, torch.int64)), [X]),
    **{
        name: upsampled(name, int(name[-2]))
        for name in (
            "_upsample_nearest_exact2d",
            "_upsample_nearest_exact3d",
            "upsample_nearest2d",
            "upsample_nearest3d",
        )
    },
}
