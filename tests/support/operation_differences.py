"""Differences of translations from torch, and operations without a translation: every case, with its reason."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

VALUES = "torch's Python reads the tensor's values, so it cannot be traced"
SIZES = "the size of a result depends on values, and JAX compiles for known sizes"
COMPILED = "compiled code without a formula in core ATen, rare inside Functions"
SPARSE = "JAX arrays are dense"
RARE = "no published program uses it; `ops=` names a JAX function"

_SPECIAL = """
airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 erfcx modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
scaled_modified_bessel_k1 chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v
chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
shifted_chebyshev_polynomial_w
"""
_READ_VALUES = """
allclose cov equal istft item narrow nn.functional.gaussian_nll_loss nn.functional.one_hot tensor_split
"""
_SIZED_BY_VALUES = "argwhere bincount combinations masked_select nonzero unique unique_consecutive"
_SPARSE = "sparse.mm.reduce sparse.sampled_addmm to_sparse"
_JITERATOR = "2inputs_2outputs 4inputs_with_extra_args binary binary_return_by_ref unary"

_RARE = """
special_zeta.default special_zeta.self_scalar special_zeta.other_scalar histogram.bin_ct
_fused_moving_avg_obs_fq_helper_functional.default histogram.bins_tensor _histogramdd_bin_edges.default
_histogramdd_from_bin_cts.default _histogramdd_from_bin_tensors.default fractional_max_pool2d.default
fractional_max_pool3d.default rrelu_with_noise_functional.default ormqr.default linalg_householder_product.default
_trilinear.default mode.default nonzero_static.default multilabel_margin_loss_forward.default
"""

# Operations that stay without an entry.
NOT_TRANSLATED = {
    "aten._segment_reduce_backward.default": COMPILED,
    "aten.hash_tensor.default": COMPILED,
    "aten.linalg_ldl_factor_ex.default": "JAX has no LDL factorization",
    "aten.linalg_ldl_solve.default": "JAX has no LDL factorization",
    "aten.resize.default": "JAX arrays have no memory to look into",
    "aten.segment_reduce.default": COMPILED,
    "torch_nn._linear_cross_entropy_batch_chunked.default": COMPILED,
    "torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default": COMPILED,
    **{f"aten.special_{name}.default": "JAX has no counterpart" for name in _SPECIAL.split()},
    **{f"aten.{name}": RARE for name in _RARE.split()},
}

# What raises while torch traces, by torch's own name of the sample set.
NOT_TRACED = {
    **dict.fromkeys(_READ_VALUES.split(), VALUES),
    "nn.functional.embedding_bag": "with `scale_grad_by_freq` torch divides by how often another row is there",
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), RARE),
    "chalf": "JAX has no half-precision complex numbers",
    **dict.fromkeys(_SIZED_BY_VALUES.split(), SIZES),
    **dict.fromkeys(_SPARSE.split(), SPARSE),
    "repeat_interleave": f"with a tensor of counts {SIZES}",
}

# What torch itself does not run on a CPU.
FAILS_IN_TORCH = {f"jiterator_{name}": "compiles CUDA code" for name in _JITERATOR.split()}
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "CPU"):  # 2.8
    _FORMS = ("rows", "columns", "inner", "batched")
    FAILS_IN_TORCH |= {f"grouped_mm.{name}": "is for CUDA alone" for name in _FORMS}

# Samples of which torch's results are not to be compared with, by name and dtype.
TORCH_IS_WRONG = {("matrix_exp", "bfloat16"): "torch's are nan in half precision, where the numbers are below 100"}

# Results that agree only after this, which is applied to both.
DIFFERENT = {
    "argsort": (lambda order: torch.sort(order.flatten())[0], "equal elements may come in any order in torch"),
    "kthvalue": (lambda results: results[0], "any of equal elements may be named in torch"),
    "logaddexp": (torch.exp, "a complex logarithm has several values"),
    "logcumsumexp": (torch.exp, "a complex logarithm has several values"),
    "sort": (lambda results: results[0], "equal elements may come in any order in torch"),
    "topk": (lambda results: results[0], "equal elements may come in any order in torch"),
}

# Relative and absolute tolerances that are wider than the usual ones, in single precision.
TOLERANCES = {
    "matrix_exp": (2e-3, "numbers to 1e3 that cancel; both are as far from the double-precision result"),
    **{f"polygamma.polygamma_n_{n}": (2e-2, "next to poles") for n in range(5)},
    "special.polygamma.special_polygamma_n_0": (2e-2, "next to poles"),
}

# Operations whose derivative is not torch's. The first and the last are documented as wrong in torch, or are wrong.
DERIVATIVE_DIFFERENT = {
    "as_strided_scatter": "torch gives a gradient to elements that are overwritten",
    "linalg.eigh": "the derivative depends on the signs of the eigenvectors, which are not unique",
    "linalg.pinv.hermitian": "torch's sample is not Hermitian, and its derivative takes it as it is",
    "index_reduce.prod": "JAX has no derivative of a product over elements of one index, and raises",
    "scatter_reduce.prod": "JAX has no derivative of a product over elements of one index, and raises",
    **{
        f"nn.functional.max_unpool{n}d": "of several elements written to one index, torch gives each the gradient; "
        "here it goes to the one that remains"
        for n in (1, 2, 3)
    },
}
