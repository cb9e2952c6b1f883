"""What jaxfn costs, beside rules by hand, equinox and torch, and torch's gradcheck: `python -m benchmarks`."""
