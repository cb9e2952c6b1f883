"""Row H2: an operation that is repeated in a trace, with a difference that its result's shape or dtype depends on."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import row

torch = pytest.importorskip("torch")
pytestmark = row("H2")

import jaxfn  # noqa: E402

X = torch.arange(12.0).reshape(3, 4) / 7 - 0.5
INTEGERS = torch.arange(12).reshape(3, 4).int()


def by_number(x: Any, integers: Any) -> Any:
    return [integers * number for number in (1, 1.0, True, -2, 1j)]


def by_default_dtype(x: Any, integers: Any) -> Any:
    before = integers / 2
    torch.set_default_dtype(torch.float16)
    try:
        return before, integers / 2
    finally:
        torch.set_default_dtype(torch.float32)


def by_autocast(x: Any, integers: Any) -> Any:
    products = [x @ x.mT]
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            products.append(x @ x.mT)
    return *products, x @ x.mT


def by_strides(x: Any, integers: Any) -> Any:
    square = x[:, :3]
    parts = [square, square.mT, square.contiguous(), square.mT.contiguous(), x.clone()[:, 1:]]
    likes = [torch.exp(part) for part in parts]
    strides = [like.stride() for like in likes]
    offsets = [part.storage_offset() for part in parts]
    return [like * stride[0] + offset for like, stride, offset in zip(likes, strides, offsets, strict=True)]


def by_storage(x: Any, integers: Any) -> Any:
    """Reads equal tensors by strides, with other elements of their storage around them."""
    return [part.as_strided((2, 2), (1, 2)) for part in (x.flatten()[:4], x.flatten()[:4].clone(), x.flatten()[4:8])]


def by_argument(x: Any, integers: Any) -> Any:
    dtypes = [x.sum(dtype=dtype) for dtype in (None, torch.float16, torch.float32)]
    parts = [*x.split(2), *x.split([1, 2]), *x.split(2, 1), *x.unbind(1), *x[:2].split(1)]
    return *dtypes, *parts, x.sum(0), x.sum(1), x.sum((0, 1)), x.sum(0, keepdim=True), x.amax(0), x.amax(1)


def by_outputs(x: Any, integers: Any) -> Any:
    """The gradients of one operation, of which some are left out."""
    weight, results = x[None, :, :3], []
    for wanted in ((True, True, False), (True, False, False), (False, True, True)):
        results += torch.ops.aten.convolution_backward(
            x[None, :1, :2].contiguous(), x[None], weight, [1], [1], [0], [1], False, [0], 1, wanted
        )
    return [x if result is None else result for result in results]


def complex_numbers(x: Any, integers: Any) -> Any:
    z = torch.complex(x, x.flip(0))
    conjugates = [z.conj(), z.conj().resolve_conj(), z.conj() * z, (z.conj() * 2).imag, z.conj().imag, z.imag]
    spectra = [torch.fft.fft(z), torch.fft.fft(z.conj()), torch.fft.rfft(x), torch.view_as_real(z * z), z.abs()]
    return *conjugates, *spectra, torch.exp(z), torch.exp(z.conj()), torch.exp(z.conj().imag), torch.exp(z.imag)


PROGRAMS = (
    *(by_number, by_default_dtype, by_autocast, by_strides, by_storage, by_argument, by_outputs),
    complex_numbers,
)


def check(program: Any) -> None:
    expected = jax.tree.leaves(list(program(X, INTEGERS)))
    got = jaxfn.from_torch(program)(jnp.asarray(X.numpy()), jnp.asarray(INTEGERS.numpy()))
    for in_jax, in_torch in zip(jax.tree.leaves(got), expected, strict=True):
        assert str(in_jax.dtype) == str(in_torch.dtype).removeprefix("torch.")
        dtype = "complex64" if in_torch.is_complex() else "float32"
        in_torch = in_torch.resolve_conj().resolve_neg().to(getattr(torch, dtype))
        np.testing.assert_allclose(np.asarray(in_jax).astype(dtype), in_torch, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_an_operation_is_repeated_with(program: Any) -> None:
    check(program)


def test_complex_operations_are_inferred_in_several_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, [complex_numbers] * 8))
