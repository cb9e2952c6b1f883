"""Random arrays for checks: each is determined by its purpose and index, and none is one that callers draw.

A cotangent that equals an argument makes wrong rules right: `2 * x * x` is the gradient `2 * x * g` for `g = x`. So
the seeds are not small integers, which callers and documentation use for arguments.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_SEED = tuple(b"jaxfn")


def random_generator(purpose: str, index: int = 0) -> np.random.Generator:
    """Returns the source of the random numbers for a purpose."""
    return np.random.default_rng([*_SEED, *purpose.encode(), index])


def draw(purpose: str, index: int, like: Any) -> np.ndarray[Any, Any]:
    """Returns standard normal numbers, with the shape and dtype of `like`."""
    generator = random_generator(purpose, index)
    numbers = generator.standard_normal(like.shape)
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        numbers = numbers + 1j * generator.standard_normal(like.shape)
    return np.asarray(numbers, like.dtype)
