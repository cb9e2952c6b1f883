"""Eight virtual devices for the sharding tests, before anything starts JAX's backend."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
