"""Benchmarks of jaxfn, hand-written rules, equinox and torch: `python -m benchmarks`."""
