"""Row H2: every operation of the table next to torch, on torch's own samples.

One sample of each operation and dtype: float32, float64 and int64, with `--all` seven dtypes, and derivatives of all
operations. More samples with JAXFN_SAMPLES=4, all of them with JAXFN_SAMPLES=all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.support.marks import row, slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("double_precision")

from jaxfn._torch.graph.interpreter import TranslatedGraph  # noqa: E402
from jaxfn._torch.operations import TABLE  # noqa: E402
from jaxfn._torch.values.arrays import to_jax, to_torch  # noqa: E402
from jaxfn._torch.values.errors import TranslationError  # noqa: E402
from tests.support.direct_samples import DIRECT  # noqa: E402
from tests.support.operation_differences import (  # noqa: E402
    DERIVATIVE_DIFFERENT,
    DIFFERENT,
    FAILS_IN_TORCH,
    NOT_TRACED,
    NOT_TRANSLATED,
    TOLERANCES,
    TORCH_IS_WRONG,
)
from tests.support.operation_samples import (  # noqa: E402
    OPERATIONS,
    OTHER_DTYPES,
    USUAL_DTYPES,
    Sample,
    cotangent,
    differentiable_sample,
    pytree,
    quiet,
    sample,
    samples,
    samples_with_derivative,
)

# Compiling takes most of the time, and these programs run once.
QUICK = {"xla_backend_optimization_level": 0}

# Operations whose derivative leaves backward operations in the graph where autograd runs inside it.
BACKWARD = """
cdist _upsample_bilinear2d_aa grid_sampler_2d grid_sampler_3d log_softmax masked_scatter native_layer_norm sgn softmax
nn.functional.adaptive_avg_pool2d nn.functional.adaptive_avg_pool3d nn.functional.adaptive_max_pool2d
nn.functional.adaptive_max_pool3d nn.functional.avg_pool2d nn.functional.avg_pool3d nn.functional.conv1d
nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
nn.functional.embedding nn.functional.hardshrink nn.functional.interpolate.bicubic
nn.functional.interpolate.bilinear nn.functional.interpolate.linear nn.functional.interpolate.nearest
nn.functional.interpolate.nearest-exact nn.functional.interpolate.trilinear nn.functional.max_pool2d
nn.functional.max_pool3d nn.functional.pad.reflect nn.functional.pad.replicate nn.functional.pad.replicate_negative
nn.functional.pdist nn.functional.softshrink nn.functional.unfold linalg.det linalg.slogdet linalg.solve linalg.inv
"""

# Operations of every kind whose derivative is compared without `--all`.
OFTEN_DIFFERENTIATED = """
addbmm remainder std_mean cholesky masked_fill masked_scatter sort scatter index_reduce.mean as_strided renorm
native_layer_norm _batch_norm_with_update nn.functional.adaptive_max_pool3d nn.functional.conv3d
nn.functional.conv_transpose2d nn.functional.interpolate.bicubic nn.functional.pad.circular nn.functional.max_pool1d
nn.functional.embedding nn.functional.triplet_margin_loss nn.functional.gelu grid_sampler_2d linalg.eig linalg.qr
linalg.solve_ex linalg.norm.subgradients_at_zero masked.median masked.log_softmax special.log_ndtr fft.hfftn
"""


def run_all(samples: Sequence[Sample]) -> list[Any]:
    """The results of several samples, compiled together."""

    def everything(arrays: Any) -> Any:
        key = jax.random.key(0)
        return [TranslatedGraph(s.recorded).run(inputs, key=key) for s, inputs in zip(samples, arrays, strict=True)]

    arrays = [[to_jax(tensor) for tensor in s.tensors] for s in samples]
    return jax.jit(everything, compiler_options=QUICK)(arrays)


def leaves_of(results: Any) -> list[Any]:
    """Results as torch has them."""
    leaves = jax.tree_util.tree_leaves(results, is_leaf=lambda x: x is None)
    return [to_torch(x) if isinstance(x, jax.Array) else x for x in leaves]


def compare(name: str, tested: Sample, results: Any) -> None:
    """Asserts equal shapes and dtypes, and equal values where they are defined."""
    if name in FAILS_IN_TORCH:
        return
    with quiet():
        expected = tested.function(*(tensor.clone() for tensor in tested.tensors))
    wanted, tree = pytree.tree_flatten(expected)
    got = leaves_of(results)
    assert len(got) == len(wanted)
    for w, g in zip(wanted, got, strict=True):
        # Numbers that are not tensors, such as sizes, become arrays under jit.
        assert (g.shape, g.dtype) == (w.shape, w.dtype) if torch.is_tensor(w) else g == w
    is_random = any(TABLE[entry].draws for entry in tested.entries) or "empty" in name
    if is_random or (name, tested.dtype) in TORCH_IS_WRONG:
        return
    # What torch's own tests do to results that are not unique, such as the signs of eigenvectors.
    process = DIFFERENT[name][0] if name in DIFFERENT else tested.process
    if process is not None:
        wanted = pytree.tree_leaves(process(expected))
        got = pytree.tree_leaves(process(pytree.tree_unflatten(got, tree)))
    usual = 1e-7 if "float64" in tested.label else 2e-5
    tolerance = max(usual, TOLERANCES.get(name, (0.0, ""))[0] * ("float64" not in tested.label))
    exact = in_single_precision(tested, process) if tested.label.startswith("bfloat16") else {}
    for number, (w, g) in enumerate(zip(wanted, got, strict=True)):
        if torch.is_tensor(w):
            relative, absolute = tolerance, tolerance
            if w.dtype == torch.bfloat16:
                # To the last bit, or as close to the result in single precision as torch is.
                relative, absolute = 2.0**-7, farthest(w, exact.get(number))
            torch.testing.assert_close(
                g,
                w.resolve_conj(),
                rtol=relative,
                atol=absolute,
                equal_nan=True,
                check_stride=False,
                msg=lambda text: f"{name}, {tested.label}, result {number}: {text}",
            )


def in_single_precision(tested: Sample, process: Callable[[Any], Any] | None) -> dict[int, Any]:
    """Returns, by index, torch's results in single precision for the half-precision tensors of a sample."""
    tensors = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone() for tensor in tested.tensors]
    with quiet():
        try:
            results = tested.function(*tensors)
        except RuntimeError:  # where one of the dtypes is named in the call
            return {}
    return dict(enumerate(pytree.tree_leaves(process(results) if process else results)))


def farthest(result: Any, exact: Any) -> float:
    """Returns the largest difference of torch's results in half and in single precision; 0 if unknown."""
    if not torch.is_tensor(exact) or exact.shape != result.shape:
        return 0.0
    distances = (result.float() - exact.float()).abs()
    return 1.01 * float(distances[distances.isfinite()].amax()) if distances.isfinite().any() else 0.0


def check(name: str, samples: Sequence[Sample]) -> None:
    """Asserts that translated operations match torch, and that the others are listed."""
    for s in samples:
        unlisted = [operation for operation in s.missing if operation not in NOT_TRANSLATED]
        assert not unlisted or name in NOT_TRACED, f"{name}, {s.label}: {unlisted}"
        if s.error is not None and name not in FAILS_IN_TORCH:
            assert name in NOT_TRACED and isinstance(s.error, TranslationError), f"{name}, {s.label}: {s.error!r}"
    translated = [s for s in samples if s.is_translated]
    for start in range(0, len(translated), 16):
        group = translated[start : start + 16]
        for s, results in zip(group, run_all(group), strict=True):
            compare(name, s, results)


@row("H2")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_matches_torch(name: str) -> None:
    check(name, samples(name, USUAL_DTYPES))


@row("H2")
@slow
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_of_another_dtype_matches_torch(name: str) -> None:
    check(name, samples(name, OTHER_DTYPES))


@row("H2")
@pytest.mark.parametrize("name", BACKWARD.split())
def test_backward_operation_matches_torch(name: str) -> None:
    check(name, samples_with_derivative(name))


@row("H2")
@pytest.mark.parametrize("name", DIRECT)
def test_direct_sample_matches_torch(name: str) -> None:
    check(name, [sample("float64 0", *DIRECT[name])])


@row("H2")
@slow
def test_every_entry_has_a_sample() -> None:
    groups = [
        *(samples(name, dtypes) for name in OPERATIONS for dtypes in (USUAL_DTYPES, OTHER_DTYPES)),
        *([sample("float64 0", *DIRECT[name])] for name in DIRECT),
        *(samples_with_derivative(name) for name in BACKWARD.split()),
    ]
    assert set(TABLE) == set().union(*(s.entries for group in groups for s in group if s.is_translated))


DERIVATIVES = [
    pytest.param(name, dtype, id=f"{name}-{dtype}".replace("torch.", ""), marks=marks)
    for name, op in OPERATIONS.items()
    for dtype in (torch.float64, torch.bfloat16)
    for marks in [() if name in OFTEN_DIFFERENTIATED.split() and dtype == torch.float64 else slow]
    if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu") and name not in NOT_TRACED
]


def torch_gradients(tested: Sample, tensors: Sequence[Any], flags: Sequence[bool]) -> tuple[list[int], Any, Any]:
    """Returns the results that torch differentiates, their cotangents, and the gradients for the flagged tensors."""
    tensors = [t.clone().requires_grad_(flag) for t, flag in zip(tensors, flags, strict=True)]
    with quiet():
        outputs = pytree.tree_leaves(tested.function(*(t.clone() for t in tensors)))
        selected = [i for i, x in enumerate(outputs) if torch.is_tensor(x) and x.requires_grad]
        varied = [t for t in tensors if t.requires_grad]
        if not selected or not varied or any(outputs[i].is_complex() for i in selected):
            return [], [], []
        cotangents = [cotangent(outputs[i]) for i in selected]
        found = torch.autograd.grad([outputs[i] for i in selected], varied, cotangents, allow_unused=True)
    zeros = (torch.zeros_like(t) if g is None else g for g, t in zip(found, varied, strict=True))
    return selected, cotangents, [g.resolve_conj() for g in zeros]


@row("H2")
@pytest.mark.parametrize(("name", "dtype"), DERIVATIVES)
def test_derivative_of_the_translation_matches_torch(name: str, dtype: Any) -> None:
    """JAX's derivative of the translated forward, next to torch's own."""
    tested, flags = differentiable_sample(name, dtype)
    is_random = any(TABLE[entry].draws for entry in tested.entries)
    if name in DERIVATIVE_DIFFERENT or not tested.is_translated or is_random or (name, tested.dtype) in TORCH_IS_WRONG:
        return
    selected, cotangents, wanted = torch_gradients(tested, tested.tensors, flags)
    if not selected:
        return
    varied = [i for i, flag in enumerate(flags) if flag]

    def pulled(arrays: Any, cotangents: Any) -> Any:
        def forward(*inputs: Any) -> Any:
            filled = list(arrays)
            for index, array in zip(varied, inputs, strict=True):
                filled[index] = array
            leaves = jax.tree_util.tree_leaves(
                TranslatedGraph(tested.recorded).run(filled), is_leaf=lambda x: x is None
            )
            return [leaves[i] for i in selected]

        return jax.vjp(forward, *(arrays[i] for i in varied))[1](cotangents)

    arrays = [to_jax(tensor) for tensor in tested.tensors]
    got = jax.jit(pulled, compiler_options=QUICK)(arrays, [to_jax(c) for c in cotangents])
    exact: Any = [None] * len(wanted)
    if dtype == torch.bfloat16:
        singles = [t.float() if t.dtype == dtype else t for t in tested.tensors]
        with contextlib.suppress(RuntimeError):  # where one of the dtypes is named in the call
            exact = torch_gradients(tested, singles, flags)[2]
    for w, g, e in zip(wanted, got, exact, strict=True):
        relative, absolute = (2.0**-6, 2 * farthest(w, e)) if dtype == torch.bfloat16 else (1e-6, 1e-6)
        torch.testing.assert_close(
            to_torch(jnp.conj(g)).to(w.dtype), w, rtol=relative, atol=absolute, equal_nan=True, check_stride=False
        )
