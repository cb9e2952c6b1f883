"""Eight virtual devices and quick compilation, before anything starts JAX's backend; and which tests run."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from tests.support.lanes import all_lanes, quick_lane

jax.config.update("jax_num_cpu_devices", 8)
# Thousands of small programs are compiled, and each runs once. XLA's own passes, which the tests look at, all run.
QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 11):  # a third of all time; later jaxlibs have one way only, and stop at the name
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])

LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def double_precision() -> Iterator[None]:
    """For numbers beside torch's."""
    with jax.enable_x64(True), jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Garbage collection looks at new objects only: JAX's leak checker collects often, and other tests leave much."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")
    parser.addoption("--product", action="store_true", help="as --all, and every case of the sampled tests")
    parser.addoption("--row", action="append", help="run only what is about this row of docs/contract.md")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = 0
    if config.pluginmanager.hasplugin("cacheprovider") and jax.config.jax_compilation_cache_dir is None:
        # What is compiled is kept, for other workers and the next run.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is about other rows than those asked for, and what the lane leaves out."""
    quick = set(quick_lane(items))
    for item in items:
        if item not in quick:
            item.add_marker("slow")  # the cases that were not taken of a sampled test too, so that -m finds them
    rows = set(config.getoption("row") or ())
    asked_for = [i for i in items if not rows or any(rows.intersection(mark.args) for mark in i.iter_markers("row"))]
    if config.getoption("product"):
        chosen = asked_for
    else:
        lane = set(all_lanes(items)) if config.getoption("all") else quick
        chosen = [item for item in asked_for if item in lane]
    config.stash[LEFT_OUT] = len(asked_for) - len(chosen)
    config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
    items[:] = chosen


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells how many it left out; each has collected all tests."""
    if (told := getattr(session.config, "workeroutput", None)) is not None:
        told["left_out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    left_out = getattr(node, "workeroutput", {}).get("left_out", 0)
    node.config.stash[LEFT_OUT] = max(node.config.stash[LEFT_OUT], left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if left_out := terminalreporter.config.stash[LEFT_OUT]:
        more = "--product" if terminalreporter.config.getoption("all") else "--all"
        terminalreporter.write_line(f"{left_out} tests left out; {more} runs more of them")
