"""Row K1: faults in the forwards and backwards of kernels are found, each by the check that is about it."""

from __future__ import annotations

from itertools import count

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfn import kernelcheck
from jaxfn._kernelcheck.arguments import kernel_arguments
from jaxfn._kernelcheck.comparison import Float64Reference, KernelComparison
from tests.support.checking import rule
from tests.support.kernel_faults import FAULTS, KERNELS, all_but, shape
from tests.support.marks import cells, row

NAMED = {f"{fault[0]}: {fault[1].strip()} -> {fault[2].strip()}": fault for fault in FAULTS}
# The first fault of the quick kernels for each check.
QUICK = {check: name for name, (kernel, *_, check) in reversed(NAMED.items()) if kernel in ("moments", "doubled")}


@row("K1")
@cells("fault", [*QUICK.values()], NAMED)
def test_a_fault_is_found(fault):
    kernel, old, new, check = NAMED[fault]
    made = KERNELS[kernel]
    skip = all_but(check)
    report = kernelcheck(made.made(old, new), made.reference, made.inputs, skip=skip, raise_exception=False)
    assert check in report.failed_checks


@row("K1")
@cells("kernel, seed", [("moments", 0), ("doubled", 1)], KERNELS, range(3))
def test_no_fault_is_found_where_there_is_none(kernel, seed):
    made = KERNELS[kernel]
    assert kernelcheck(made.made(), made.reference, made.inputs, seed=seed)


def masked_scores(factor):
    bias = jnp.where(jnp.tril(jnp.ones((16, 16), bool)), 0.0, -1e9)
    kernel = rule(
        lambda ctx, q, k: (ctx.save_for_backward(q, k), factor * (q @ k.T) + bias.astype(q.dtype))[1],
        lambda ctx, g: (g @ ctx.saved_tensors[1], g.T @ ctx.saved_tensors[0]),
    )
    return kernel, lambda q, k: q @ k.T + bias.astype(q.dtype)


@row("K1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 1.05, 1.5])
def test_a_large_number_does_not_hide_errors_of_the_others(factor, dtype):
    """An additive mask of -1e9 has errors of 30."""
    report = kernelcheck(
        *masked_scores(factor), (shape(16, 8), shape(16, 8)), dtypes=[dtype], skip=all_but(), raise_exception=False
    )
    assert bool(report) == (factor == 1.0)
    assert report.failed_checks in ([], ["outputs"])


@row("K1b")
def test_nothing_else_is_checked_after_wrong_plain_results():
    made = KERNELS["doubled"]
    report = kernelcheck(
        made.made("2 * grad_output", "3 * grad_output"), made.reference, made.inputs, raise_exception=False
    )
    assert report.checks == ["outputs", "gradients", "determinism"] and report.failed_checks == ["gradients"]
    assert {failure.dtype for failure in report.failures} == {"float32"}
    text = str(report)
    assert "gradients: gradient of input 0 ('x') in float32: 120 of 120 entries have an error larger" in text


@row("K1")
def test_large_arrays_have_fewer_samples():
    generator = np.random.default_rng(0)
    for size, draws in ((100, 8), (512, 2)):
        arguments = kernel_arguments(jnp.sin, shape(size, size), None, generator)
        exact = Float64Reference(jnp.sin, arguments)
        assert KernelComparison(jnp.sin, jnp.sin, arguments, jnp.float32, 8, 2.0, generator, exact).draws == draws


def raising(calls):
    raise ValueError(f"call {next(calls)} has values")


@row("K1b")
def test_errors_of_the_kernel_name_file_and_line():
    calls = count()

    def doubled(x):
        if not isinstance(x, jax.core.Tracer):
            raising(calls)
        return 2 * x

    kernel = rule(lambda ctx, x: doubled(x), lambda ctx, g: 2 * g)
    report = kernelcheck(kernel, lambda x: 2 * x, shape(3), raise_exception=False)
    assert report.failed_checks == ["determinism"]
    line = raising.__code__.co_firstlineno + 1
    for number, failure in enumerate(report.failures):
        assert failure.message == f"it raised ValueError: call {number} has values ({__file__}:{line})"
        assert failure.message in str(report)
