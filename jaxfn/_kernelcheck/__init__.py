"""`kernelcheck`: compares the errors of a kernel, forward and backward, with those of a reference."""

from jaxfn._kernelcheck.public import kernelcheck as kernelcheck
from jaxfn._kernelcheck.report import KernelcheckReport as KernelcheckReport
