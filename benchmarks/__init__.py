"""What jaxfn costs beside rules by hand, equinox and torch, and its gradcheck beside torch's: `python -m benchmarks`."""
