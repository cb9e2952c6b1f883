"""A few networks, each written for torch and in flax NNX, with equal names of parameters."""
