"""Pages show the stored figures, and the benchmarks say where they can run."""

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import pytest

from benchmarks import pages, plots, saved, suite, training
from benchmarks.environment import environment, processor
from benchmarks.functions import hand_written, in_jaxfn
from benchmarks.products import flops_of_products
from tests.support.marks import slow

ROOT = Path(__file__).parents[2]
WHERE = {"backend": "cpu", "processor": "Some CPU (R) @ 2 GHz", "cpus": 2, "device": "cpu", "load_before": 1.5}


@pytest.mark.parametrize("path", pages.PAGES, ids=lambda path: path.stem)
def test_pages_have_the_stored_figures(path):
    """`python -m benchmarks.pages` writes them."""
    page = path.read_text()
    assert pages.with_figures(page, pages.PAGES[path](saved.load_all())) == page
    assert pages.with_figures(page, "other figures") != page


def test_plots_show_the_stored_figures():
    """`python -m benchmarks.pages` writes them."""
    drawn = pages.pictures(saved.load_all())
    assert {path: path.read_text() for path in (ROOT / "docs/pictures/benchmarks").iterdir()} == drawn
    for path in drawn:
        assert f"](pictures/benchmarks/{path.name})" in (ROOT / "docs" / "benchmarks.md").read_text()


def marks(svg, text):
    """The horizontal positions of the filled and of the hollow marks in the row of a text, in a plot of ratios."""
    elements = list(ElementTree.fromstring(svg))
    (y,) = {float(e.get("y")) for e in elements if e.text == text}
    found = {True: [], False: []}
    for e in elements:
        if e.tag.endswith("circle") and abs(float(e.get("cy")) - y) < 15:
            found[e.get("fill") != "none"].append(float(e.get("cx")))
    return found


def test_a_plot_of_ratios_is_logarithmic_and_has_a_mark_for_each_network():
    def row(measurement, ratio, **others):
        ratios = {"jaxfn": ratio, "torch": 0.01, **others}
        return {"measurement": measurement, "function": "f", "unit": "seconds", "ratios_to_hand_written": ratios}

    svg = plots.functions([row("trace", 2.0), row("trace", 4.0, equinox=8.0), row("a & b", 1.0), row("none", None)])
    (two, four), (eight,) = marks(svg, "trace").values()
    (one,), nothing = marks(svg, "a & b").values()
    assert four - two == pytest.approx(two - one, abs=0.2) and eight - four == pytest.approx(two - one, abs=0.2)
    assert one < two and not nothing and ">none<" not in svg


def test_plots_of_models_and_of_checks():
    values = {"from_torch": 3.0, "flax": 6.0, "torch": None}
    times = [{"model": "net", "measurement": "step", "unit": "seconds", "values": values}]
    flops = [{"model": "net", "measurement": "flops", "unit": "operations", "values": values}]
    svg = plots.training([*times, *flops])
    (mark,), hollow = marks(svg, "step").values()
    (half,) = {float(e.get("x")) for e in ElementTree.fromstring(svg) if e.text == "0.5"}
    assert mark == half and not hollow and ">flops<" not in svg

    def check(size, **values):
        return {"check": "gradcheck", "shapes": [[size], [2, size]], "warm_ups": 0, "unit": "seconds", "values": values}

    svg = plots.checking([check(10, jaxfn=1.0, torch=1.0), check(1000, jaxfn=3.0, torch=None)])
    lines = [e.get("points").split() for e in ElementTree.fromstring(svg) if e.tag.endswith("polyline")]
    assert [len(points) for points in lines] == [2, 1] and lines[0][0] == lines[1][0]
    (x, y), (later, higher) = (map(float, point.split(",")) for point in lines[0])
    assert x < later and higher < y


def test_the_ratios_of_README_are_those_of_the_medians():
    """Computed here from the medians of each form, and not from the ratios that were saved."""
    rows = [row for row in saved.load_all()[0]["functions"] if row["measurement"] == "eager value-and-grad"]
    found = sorted(row["medians"]["jaxfn"] / row["medians"]["hand-written"] for row in rows)
    middle = (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
    assert f"| eager value-and-grad | {middle:.2f} |" in (ROOT / "README.md").read_text()


def test_pages_have_measured_figures_in_generated_text_only():
    """A figure that is typed in prose would stay when the measured ones change."""
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        typed = re.sub(
            r"<!-- figures.*?<!-- end of figures -->|```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL
        )
        assert not re.findall(r"\d\.\d+ times|a tenth|\d (?:ms|us|milliseconds|microseconds)\b", typed), page.name


def test_stored_figures_name_the_machine():
    for content in saved.load_all():
        assert not content["quick"]
        assert {"processor", "cpus", "jax", "jaxlib", "python", "device"} <= content["environment"].keys()
    assert processor() and environment()["processor"] == processor()
    assert saved.path_for(WHERE).name == "some-cpu-r-2-ghz-2-cores.json"
    assert saved.path_for(WHERE | {"backend": "gpu", "device": "NVIDIA X1"}).name == "nvidia-x1.json"


def test_parts_are_merged_with_others_of_that_machine_and_versions(tmp_path):
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


@slow
def test_the_time_before_compiling_is_split_into_that_of_torch_and_that_of_jax(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(training, "MODELS", (training.Model("GPT", (20, 8, 16, 2, 1), (2, 8), tokens=20),))
    monkeypatch.setattr(training, "_compiled", lambda model, module: None)
    seconds = {row.measurement: row.values.get("from_torch") for row in training.run(1) if row.is_met is None}
    parts = seconds["traced by torch"], seconds["traced by JAX"]
    assert min(parts) > 0 and sum(parts) == pytest.approx(seconds["before compiling"])


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
