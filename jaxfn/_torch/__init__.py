"""`from_torch`: existing PyTorch Functions on JAX."""
