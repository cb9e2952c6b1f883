"""What a jaxfn Function costs beside the same rule by hand, with equinox and in torch: `python -m benchmarks`."""
