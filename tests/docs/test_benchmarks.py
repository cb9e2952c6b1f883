"""Pages show the figures that are kept, and the benchmarks say where they can run."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import pages, saved, suite
from benchmarks.environment import environment, processor
from benchmarks.functions import hand_written, in_jaxfn
from benchmarks.products import flops_of_products
from tests.support.marks import slow

ROOT = Path(__file__).parents[2]
WHERE = {"backend": "cpu", "processor": "Some CPU (R) @ 2 GHz", "cpus": 2, "device": "cpu", "load_before": 1.5}


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.stem)
def test_pages_have_the_figures_that_are_kept(path):
    """`python -m benchmarks.pages` writes them."""
    page = path.read_text()
    assert pages.with_figures(page, pages.PAGES[path](saved.load_all())) == page
    assert pages.with_figures(page, "other figures") != page


def test_the_ratios_of_README_are_those_of_the_medians():
    """Computed here from the medians of each form, and not from the ratios that were saved."""
    rows = [row for row in saved.load_all()[0]["functions"] if row["measurement"] == "eager value-and-grad"]
    found = sorted(row["medians"]["jaxfn"] / row["medians"]["hand-written"] for row in rows)
    middle = (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
    assert f"| eager value-and-grad | {middle:.2f} |" in (ROOT / "README.md").read_text()


def test_what_is_kept_names_the_machine():
    for content in saved.load_all():
        assert not content["quick"]
        assert {"processor", "cpus", "jax", "jaxlib", "python", "device"} <= content["environment"].keys()
    assert processor() and environment()["processor"] == processor()
    assert saved.path_for(WHERE).name == "some-cpu-r-2-ghz-2-cores.json"
    assert saved.path_for(WHERE | {"backend": "gpu", "device": "NVIDIA X1"}).name == "nvidia-x1.json"


def test_parts_are_kept_beside_others_of_the_same_machine_and_versions(tmp_path):
    path = tmp_path / "a.json"
    saved.update(path, WHERE, False, {"functions": [1]})
    saved.update(path, WHERE | {"load_before": 0.1}, False, {"kernels": [2]})
    assert json.loads(path.read_text())["functions"] == [1] and saved.load(path)["kernels"] == [2]
    saved.update(path, WHERE | {"cpus": 3}, False, {"kernels": [3]})
    assert "functions" not in saved.load(path) and saved.load(path)["kernels"] == [3]
    saved.update(path, WHERE | {"cpus": 3}, True, {"functions": [4]})
    assert "kernels" not in saved.load(path)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="there is an accelerator")
def test_the_accelerator_suite_says_that_there_is_none():
    command = [sys.executable, "-m", "benchmarks", "--device"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "no GPU or TPU here" in done.stderr and not done.stdout


@slow
def test_traces_are_measured_in_each_form(monkeypatch):
    monkeypatch.setattr(suite, "WORKLOADS", suite.WORKLOADS[-1:])
    effort = suite.Effort(calls=0, builds=2, compiles=0, steps=0)
    rows = list(suite.traces({"jaxfn": in_jaxfn, "hand-written": hand_written}, effort))
    assert [row.measurement for row in rows] == ["trace", "lower", "compile"]
    assert rows[0].samples.keys() == {"jaxfn", "hand-written"} and all(len(s) == 2 for s in rows[0].samples.values())
    assert all(value > 0 for value in rows[0].medians.values())


def test_products_in_loops_are_counted_as_often_as_they_run():
    x, w, kernel = jnp.ones((3, 4)), jnp.ones((4, 4)), jnp.ones((2, 3, 5, 1))

    def loop(x, w):
        return jax.lax.scan(lambda x, _: (jax.jit(jnp.matmul)(x, w), None), x, length=7)[0]

    assert flops_of_products(loop, x, w) == 7 * flops_of_products(jnp.matmul, x, w) == 7 * 2 * 3 * 4 * 4
    images = jnp.ones((6, 3, 8, 9))
    convolved = jax.eval_shape(lambda x, k: jax.lax.conv(x, k, (1, 2), "VALID"), images, kernel)
    assert flops_of_products(lambda x, k: jax.lax.conv(x, k, (1, 2), "VALID"), images, kernel) == (
        2 * convolved.size * 3 * 5 * 1
    )
