"""Eight virtual devices for the sharding tests, and quick compilation, before anything starts JAX's backend."""

import gc
import os
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Thousands of small programs are compiled, and each runs once. XLA's own passes, which the tests look at, all run.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true " + os.environ.get("XLA_FLAGS", "")
)

# JAX's coming implementations, which are switched on in the environment.
COMING = bool(int(os.environ.get("JAX_CUSTOM_VJP3", "0")))
RUNS_PRIMAL_TOO = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces the primal function beside fwd")
ALL_PERTURBED = pytest.mark.xfail(
    COMING, reason="JAX_REMAT3 says that every input of a checkpoint is perturbed", strict=False
)
KEEPS_TRACES = pytest.mark.xfail(
    COMING, reason="JAX_CUSTOM_VJP3 keeps traces, and what they hold, until its caches are full or cleared"
)
TRACES_ALWAYS = pytest.mark.xfail(COMING, reason="JAX_CUSTOM_VJP3 traces a custom_vjp even where its values are known")
NO_REMAT_TRANSPOSE = pytest.mark.xfail(COMING, reason="JAX_REMAT3 cannot transpose jax.checkpoint by itself yet")


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Garbage collection looks at new objects only: JAX's leak checker collects often, and other tests leave much."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How much of the table of torch's operations was tested, in whichever processes."""
    found = [
        entry
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", None) == "call"
        for entry in report.user_properties
    ]
    count = sum(value for name, value in found if name == "samples beside torch")
    operations = {operation for name, value in found if name == "operations" for operation in value}
    if count:
        terminalreporter.write_line(f"{len(operations)} operations of the table in {count} samples beside torch")
