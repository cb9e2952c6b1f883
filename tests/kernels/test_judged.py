"""kernelcheck checks the kernels of `examples/kernels`: right ones pass, and whatever is wrong with one is found."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import AxisType

import jaxfn
from tests.support.kernel_examples import ATTENTION, CAUSAL, KERNELS, LAYER_NORM, small
from tests.support.marks import cells, row, slow
from tests.support.pallas_faults import FAULTS, found_by, inputs

# (rows, columns, width), in addition to the sizes that kernelcheck tries automatically.
SIZES = [(2, 5, 3), (16, 32, 16), (33, 31, 5), (50, 20, 17)]
COMPILE_MUCH = ["determinism", "jit", "padding", "vmap", "subsets", "sizes", "donation"]
QUICK = [
    "layer_norm: _forward_kernel: no mask",
    "cross_entropy: _weight_kernel: transposed",
    "flash_attention_causal: _key_value_kernel: stale accumulator",
]
NAMED = {str(fault): fault for fault in FAULTS}


@row("K1")
@cells("kernel", [LAYER_NORM], KERNELS, ids=str)
def test_a_right_kernel_passes(kernel):
    module = small(kernel.module)
    assert jaxfn.kernelcheck(kernel.of(module), kernel.plain(module), inputs(kernel), draws=4, skip=COMPILE_MUCH)


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
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_right_kernels_raise_no_alarm_in_any_size(kernel, sizes):
    module = small(kernel.module)
    args = tuple(kernel.args(*sizes, seed=SIZES.index(sizes)))
    # Probabilities that are computed again from a logarithm are a little less exact than those of a softmax.
    factor = 3 if kernel in (ATTENTION, CAUSAL) else 2
    report = jaxfn.kernelcheck(kernel.of(module), kernel.plain(module), args, skip=COMPILE_MUCH, factor=factor)
    assert {"outputs", "gradients", "scales", "constants", "undifferentiated"} <= {*report.checks}


@row("K1")
@cells("fault", QUICK, NAMED)
def test_a_planted_fault_is_found(fault):
    assert found_by(NAMED[fault])


@row("K1")
def test_the_faults_are_many_and_each_is_another_program():
    """And the text that each replaces is there."""
    assert len(FAULTS) == len(NAMED) == len({(fault.kernel.module, fault.change()) for fault in FAULTS}) >= 100
    for fault in FAULTS:
        _, old, new = fault.change()
        compile(new, str(fault), "exec")
        assert old != new
