"""kernelcheck judges the kernels of `examples/kernels`: right ones pass, and whatever is wrong with one is found."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

import jaxfn
from tests.support.kernel_examples import ATTENTION, CAUSAL, KERNELS, LAYER_NORM, small
from tests.support.marks import lane_cases, row, slow
from tests.support.pallas_faults import FAULTS, found_by, inputs

# (rows, columns, width), beside the sizes that kernelcheck tries by itself.
SIZES = [(2, 5, 3), (16, 32, 16), (33, 31, 5), (50, 20, 17)]
# Checks that compile programs of their own. Each kernel and each size has each of them once.
TURNS = ["sizes", "subsets", "donation", "undifferentiated"]
OF_FORTY = [fault for fault in FAULTS if not fault.check][::40]
QUICK = OF_FORTY[::3]
# Each takes seconds. `python -m tests.support.pallas_faults` tries all, and says which check has found which.
TRIED = [fault for i, fault in enumerate(FAULTS) if i % 12 == 0 or fault in OF_FORTY]


@row("K1")
@pytest.mark.parametrize("kernel", lane_cases(KERNELS, [LAYER_NORM]), ids=str)
def test_a_right_kernel_passes(kernel):
    module = small(kernel.module)
    skip = ["determinism", "jit", "padding", "vmap", "subsets", "sizes", "donation"]  # which compile much
    assert jaxfn.kernelcheck(kernel.of(module), kernel.plain(module), inputs(kernel), draws=4, skip=skip)


@row("K1")
@slow
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_a_right_kernel_passes_every_check(kernel):
    module = small(kernel.module)
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))

    def shard(f):
        in_specs, out_specs = kernel.split
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    args = tuple(kernel.args(24, 19, 5))
    report = jaxfn.kernelcheck(kernel.of(module), kernel.plain(module), args, shard=shard)
    assert {"outputs", "gradients", "scales", "jit", "vmap", "sizes", "subsets", "shard"} <= {*report.checks}


@row("K1")
@slow
@pytest.mark.parametrize(("seed", "sizes"), list(enumerate(SIZES)))
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_right_kernels_raise_no_alarm(kernel, seed, sizes):
    """Each kernel by each check, and in each size; the checks that compile much take turns."""
    module = small(kernel.module)
    args = tuple(kernel.args(*sizes, seed=seed))
    turn = (KERNELS.index(kernel) + seed) % len(TURNS)
    skip = ["determinism", "jit", "padding", "vmap", *(check for check in TURNS if check != TURNS[turn])]
    # Probabilities that are computed again from a logarithm are a little less exact than those of a softmax.
    factor = 3 if kernel in (ATTENTION, CAUSAL) else 2
    report = jaxfn.kernelcheck(kernel.of(module), kernel.plain(module), args, seed=seed, skip=skip, factor=factor)
    assert {"outputs", "gradients", "scales", "constants", TURNS[turn]} <= {*report.checks}


@row("K1")
@pytest.mark.parametrize("fault", lane_cases(TRIED, QUICK), ids=str)
def test_a_planted_fault_is_found(fault):
    assert found_by(fault)


@row("K1")
def test_the_faults_are_many_and_each_is_another_program():
    """And the text that each replaces is there."""
    assert len(FAULTS) == len({(fault.kernel.module, fault.change()) for fault in FAULTS}) >= 150
    for fault in FAULTS:
        _, old, new = fault.change()
        compile(new, str(fault), "exec")
        assert old != new
