"""`kernelcheck`: a kernel's errors, forward and backward, measured against those of its reference."""

from jaxfn._kernelcheck.kernelcheck import kernelcheck as kernelcheck
from jaxfn._kernelcheck.report import KernelcheckError as KernelcheckError
from jaxfn._kernelcheck.report import KernelReport as KernelReport
