"""Row K1: faults in the forwards and backwards of kernels are found, each by the check that is about it."""

from __future__ import annotations

from jaxfn import kernelcheck
from tests.support.kernel_faults import FAULTS, KERNELS, all_but
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
