"""Row K1: faults in the forwards and backwards of kernels are found, each by the check that is about it."""

from __future__ import annotations

import pytest

from jaxfn import kernelcheck
from tests.support.kernel_faults import FAULTS, KERNELS
from tests.support.marks import row, thorough


def _cases():
    """One fault for each check belongs to the quick lane."""
    seen = set()
    for kernel, old, new, check in FAULTS:
        case = (kernel, old, new, check)
        name = f"{kernel}: {old.strip()} -> {new.strip()}"
        yield pytest.param(*case, id=name, marks=[thorough] if check in seen else [])
        seen.add(check)


@row("K1")
@pytest.mark.parametrize("kernel, old, new, check", list(_cases()))
def test_a_fault_is_found(kernel, old, new, check):
    made = KERNELS[kernel]
    report = kernelcheck(made.made(old, new), made.reference, made.inputs, raise_exception=False)
    assert check in report.failed_checks


@row("K1")
@pytest.mark.parametrize(
    "kernel", [pytest.param(k, marks=[] if k in ("moments", "doubled") else [thorough]) for k in KERNELS]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=thorough), pytest.param(2, marks=thorough)])
def test_no_fault_is_found_where_there_is_none(kernel, seed):
    made = KERNELS[kernel]
    assert kernelcheck(made.made(), made.reference, made.inputs, seed=seed)
