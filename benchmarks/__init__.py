"""What jaxfn costs, beside hand-written rules, equinox and torch, and torch's gradcheck: `python -m benchmarks`."""
