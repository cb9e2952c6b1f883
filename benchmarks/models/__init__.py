"""The same networks written for torch and natively in flax NNX, with the same names for the same parameters."""
