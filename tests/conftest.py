"""Eight virtual devices and quick compilation, before anything starts JAX's backend; which tests run."""

import gc
import os
import re
from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Thousands of small programs are compiled, and each runs once. XLA's own passes, which the tests look at, all run.
QUICK = ["--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 11):  # a third of all time; later jaxlibs have one way only, and stop at the name
    QUICK.append("--xla_cpu_use_fusion_emitters=false")
os.environ["XLA_FLAGS"] = " ".join([*QUICK, os.environ.get("XLA_FLAGS", "")])


@pytest.fixture
def double_precision() -> Iterator[None]:
    """Enables float64 and exact products, to compare with torch."""
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
    parser.addoption("--brief", action="store_true", help="run one quick test of each row in each file")
    parser.addoption("--one-case", action="store_true", help="run one case of each quick test")
    parser.addoption("--row", action="append", help="run only tests of this row of docs/contract.md")


def pytest_configure(config: pytest.Config) -> None:
    if config.pluginmanager.hasplugin("cacheprovider") and jax.config.jax_compilation_cache_dir is None:
        # Compiled programs are cached for other workers and the next run.
        jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects tests of rows that `--row` omits, slow ones without `--all`, all but one a row with `--brief`.

    With `--one-case`, further cases: one with further marks, such as one that needs torch, counts as another test.
    """
    rows = set(config.getoption("row") or ())
    chosen = [
        item
        for item in items
        if (config.getoption("all") or not item.get_closest_marker("slow"))
        and (not rows or any(rows.intersection(mark.args) for mark in item.iter_markers("row")))
    ]
    if config.getoption("brief"):
        first = {
            (item.path, name): item
            for item in reversed(chosen)
            for mark in item.iter_markers("row")
            for name in mark.args
        }
        chosen = [item for item in chosen if item in first.values()]
    if config.getoption("one_case"):
        tests = {
            (item.nodeid.partition("[")[0], *sorted(mark.name for mark in item.iter_markers())): item
            for item in reversed(chosen)
        }
        chosen = list(tests.values())[::-1]
    config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
    items[:] = chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says how to run the tests that are skipped where packages are missing; `-rs` lists them."""
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
    missing = {name for text in skipped for name in re.findall(r"No module named '(\w+)", text)}
    if missing:
        install = 'pip install torch==2.13.0 && pip install -e ".[cookbook,dev]"'
        terminalreporter.write_line(f"{len(skipped)} skipped, for lack of {', '.join(sorted(missing))}: {install}")
