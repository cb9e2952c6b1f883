"""Row K1: faults in the forwards and backwards of kernels are found, each by the check that is about it."""

from __future__ import annotations

import pytest

from jaxfn import kernelcheck
from tests.support.kernel_faults import FAULTS, KERNELS
from tests.support.marks import lane_cases, row, slow

QUICK = ("moments", "doubled")


def _cases():
    """One fault for each check that quick kernels have belongs to the quick lane."""
    seen = set()
    for kernel, old, new, check in FAULTS:
        name = f"{kernel}: {old.strip()} -> {new.strip()}"
        is_quick = kernel in QUICK and check not in seen
        yield pytest.param(kernel, old, new, check, id=name, marks=() if is_quick else slow)
        if is_quick:
            seen.add(check)


@row("K1")
@pytest.mark.parametrize("kernel, old, new, check", list(_cases()))
def test_a_fault_is_found(kernel, old, new, check):
    made = KERNELS[kernel]
    report = kernelcheck(made.made(old, new), made.reference, made.inputs, raise_exception=False)
    assert check in report.failed_checks


@row("K1")
@pytest.mark.parametrize("kernel", lane_cases(KERNELS, QUICK))
@pytest.mark.parametrize("seed", lane_cases(range(3), [0]))
def test_no_fault_is_found_where_there_is_none(kernel, seed):
    made = KERNELS[kernel]
    assert kernelcheck(made.made(), made.reference, made.inputs, seed=seed)
