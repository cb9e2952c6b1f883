"""Eight virtual devices for the sharding tests, before anything starts JAX's backend."""

import os

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)

# JAX's coming implementations, which are switched on in the environment.
COMING = bool(int(os.environ.get("JAX_CUSTOM_VJP3", "0")))
RUNS_PRIMAL_TOO = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces the primal function beside fwd")
ALL_PERTURBED = pytest.mark.xfail(
    COMING, reason="JAX_REMAT3 says that every input of a checkpoint is perturbed", strict=False
)
KEEPS_TRACES = pytest.mark.xfail(
    COMING, reason="JAX_CUSTOM_VJP3 keeps traces, and what they hold, until its caches are full or cleared"
)
NO_REMAT_TRANSPOSE = pytest.mark.xfail(COMING, reason="JAX_REMAT3 cannot transpose jax.checkpoint by itself yet")
