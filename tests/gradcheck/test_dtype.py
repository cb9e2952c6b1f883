"""Rows G1 and G3: functions that cannot run in double precision are checked in their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import jaxfn
from jaxfn import GradcheckError, gradcheck, gradgradcheck
from tests.support.checking import normal
from tests.support.marks import cells, row


def by_pallas(kernel, *arrays):
    """A kernel whose output is float32, whatever goes in; its integers have JAX's default dtype."""

    def body(*refs):
        index = jax.lax.div(pl.program_id(0) + jnp.arange(1)[0], jnp.int32(1))
        refs[-1][...] = kernel(*(ref[...] for ref in refs[:-1])) + 0 * index.astype(jnp.float32)

    like = arrays[0]
    shape = jax.ShapeDtypeStruct(like.shape, jnp.float32)
    return pl.pallas_call(body, grid=(1,), out_shape=shape, interpret=True)(*arrays)


def cube(factor=3.0):
    @jaxfn.function
    def cube(ctx, x):
        ctx.save_for_backward(x)
        return by_pallas(lambda x: x * x * x, x)

    @cube.backward
    def _(ctx, g):
        (x,) = ctx.saved_tensors
        return by_pallas(lambda x, g: factor * x * x * g, x, g)

    return cube


def plain(x):
    return x**3


@row("G1", "G3")
@cells("fast_mode", [False], [False, True])
def test_a_pallas_kernel_is_checked_in_float32(fast_mode):
    with pytest.raises(Exception, match="dtype"):
        gradcheck(cube(), normal(5))  # in float64
    options = {"dtype": "float32", "surrogate": plain, "fast_mode": fast_mode, "return_report": True}
    report = gradcheck(cube(), normal(5), **options)
    assert report
    assert "computed in float32, with tolerances for that (atol 3.5e-06, rtol 0.00035)" in report.notes[0]
    report = gradcheck(cube(3.003), normal(5), **options)
    assert report.mismatches[0].kind == "a constant factor: 1.001 times what it should be"
    assert all(entry.numeric is None for entry in report.mismatches[0].entries)


@row("G3")
@pytest.mark.parametrize("dtype, wrong, times", [("float32", 2.002, "1.001 times"), (jnp.float16, 4.0, "2 times")])
def test_without_surrogate_autodiff_of_forward_is_the_reference(dtype, wrong, times):
    def square(factor):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return (x * x).astype(jnp.float32)

        function = jaxfn.function(forward)
        function.backward(lambda ctx, g: factor * ctx.saved_tensors[0] * g)
        return function

    for check in (gradcheck, gradgradcheck):
        assert check(square(2.0), normal(4, 3), dtype=dtype)
        with pytest.raises(GradcheckError, match=times):
            check(square(wrong), normal(4, 3), dtype=dtype)


@row("G3")
def test_the_function_sees_arrays_of_the_dtype_without_x64():
    seen = set()

    @jaxfn.function
    def double(ctx, x, table):
        seen.add(("forward", *(str(a.dtype) for a in (x, table, jnp.arange(2)))))
        return x * 2

    @double.backward
    def _(ctx, g):
        seen.add(("backward", *(str(a.dtype) for a in (g, jnp.arange(2)))))
        return g * 2, None

    assert gradcheck(double, (normal(3), np.ones(2)), argnums=0, dtype="bfloat16", surrogate=lambda x, table: 2 * x)
    assert seen == {("forward", "bfloat16", "bfloat16", "int32"), ("backward", "bfloat16", "int32")}


@row("G1", "G3")
def test_small_checks_run_in_the_dtype_too():
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        return x * 2, y * 3

    def backward(ctx, g, h):
        return None if g is None else 2 * g, 3 * h if h is not None else jnp.ones(3)

    undefined = jaxfn.function(forward)
    undefined.backward(backward)
    with pytest.raises(GradcheckError, match="does not treat an undefined cotangent of output 1 as zeros"):
        gradcheck(undefined, (normal(3), normal(3)), dtype="float32", surrogate=lambda x, y: (2 * x, 3 * y))


@row("G3")
def test_chosen_tolerances_mean_what_they_say():
    assert gradcheck(cube(3.003), normal(5), dtype="float32", surrogate=plain, rtol=2e-3)
    with pytest.raises(GradcheckError):
        gradcheck(cube(), normal(5), dtype="float32", surrogate=plain, atol=0.0, rtol=1e-9)


@row("G3")
@pytest.mark.parametrize(
    "function, options, message",
    [
        (cube(), {"dtype": "float32"}, "autodiff in float64, which is not possible for cube.*Give surrogate="),
        (
            cube(),
            {"dtype": "float32", "surrogate": plain, "reference": "finite_differences"},
            "no finite differences",
        ),
        (cube(), {"dtype": "float64", "surrogate": plain}, "below float64"),
        (plain, {"dtype": "float32"}, "it has no rule"),
    ],
    ids=["no surrogate", "finite differences", "float64", "no rule"],
)
def test_options_that_raise(function, options, message):
    with pytest.raises(ValueError, match=message):
        gradcheck(function, normal(5), **options)
