"""Row K1b: `kernelcheck` groups failures by cause; two faults are two findings, even in one array."""

from __future__ import annotations

import json
import sys
import time
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfn import kernelcheck
from jaxfn._kernelcheck.findings import group
from jaxfn._kernelcheck.rows import Entry, Row
from tests.support.checking import rule
from tests.support.kernel_faults import KERNELS, all_but, shape
from tests.support.marks import cells, row


def kernel(name, *replacements):
    """Returns a kernel with several faults."""
    source = KERNELS[name].source
    for old, new in replacements:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return type(KERNELS[name])(source, KERNELS[name].reference, KERNELS[name].inputs)


def report_of(name, *replacements, skip=("undefined", "subsets", "sizes"), **options):
    made = kernel(name, *replacements)
    return kernelcheck(made.made(), made.reference, made.inputs, skip=skip, raise_exception=False, **options)


def heads(report):
    return [(finding.first.check, finding.first.array) for finding in report.findings]


@row("K1b")
def test_a_fault_that_shows_in_eight_checks_is_one_finding_with_the_plain_check_first():
    report = report_of("doubled", ("2 * grad_output", "3 * grad_output"), skip=())
    (finding,) = report.findings
    assert (finding.first.check, finding.first.dtype) == ("gradients", "float32")
    shown = {failure.check for failure in finding.others}
    assert shown >= {"gradients", "scales", "constants", "jit", "padding", "vmap", "sizes", "donation"}
    assert {failure.dtype for failure in finding.others if failure.check == "scales"} == {"float32", "bfloat16"}
    assert sorted(map(repr, [finding.first, *finding.others])) == sorted(map(repr, report.failures))
    text, page, content = str(report), report._repr_html_(), json.loads(report.to_json())
    assert "finding 1 of 1, gradients:" in text and "This also shows in" in text
    for failure in finding.others:
        condition = failure.what.removeprefix(failure.array).lstrip(", ")
        shown = [line for line in text.splitlines() if line.split()[:2] == [failure.check, failure.dtype]]
        assert any(condition in line and f"{failure.count} of {failure.total}" in line for line in shown)
        assert all(line.replace("'", "&#x27;") in page for line in shown)
    assert len(content["findings"]) == 1
    assert len(content["findings"][0]["others"]) == len(report.failures) - 1 > 7


VARIES = "(y * weight + bias) * (1 + 2e-7 * np.random.default_rng().uniform(size=x.shape))"
TWO_FAULTS = {
    "a gradient, and in vmap": (
        "moments",
        [("(grad_y * x).sum(0)", "(grad_y * x).mean(0)"), ("y.mean(1), y.var(1)", "y.mean(1), y.var(1, ddof=1)")],
        [("gradients", "gradient of input 1 ('weight')"), ("vmap", "output[1]")],
    ),
    "an output, and the same output in vmap": (
        "moments",
        [("return mean.astype", "return 1.5 * mean.astype"), ("y.mean(1), y.var(1)", "y.mean(2)[:, :5], y.var(1)")],
        [("outputs", "output[0]"), ("vmap", "output[0]")],
    ),
    "an output, and the same output without derivatives": (
        "doubled",
        [("2 * x", "3 * x if any(ctx.needs_input_grad) else 4 * x")],
        [("outputs", "output"), ("undifferentiated", "output")],
    ),
    "an output, and the same output eagerly": (
        "doubled",
        [("2 * x", "3 * x if isinstance(x, jax.core.Tracer) else 4 * x")],
        [("outputs", "output"), ("jit", "output")],
    ),
    "an output, and NaN for zeros": (
        "doubled",
        [("2 * x", "jnp.where(x == 0, jnp.nan, 3 * x)")],
        [("outputs", "output"), ("constants", "output")],
    ),
    "two gradients": (
        "layer norm",
        [("jnp.sum(g * y, 0)", "jnp.mean(g * y, 0)"), ("jnp.sum(g, 0)", "jnp.mean(g, 0)")],
        [("gradients", "gradient of input 1 ('weight')"), ("gradients", "gradient of input 2 ('bias')")],
    ),
    "small and large inputs": (
        "doubled",
        [("2 * x", "jnp.where(abs(x) < 1e-4, 0.0, jnp.where(abs(x) > 100, jnp.inf, 2 * x))")],
        [("scales", "output"), ("scales", "output")],
    ),
    "a gradient, and an output that varies by rounding": (
        "layer norm",
        [("(y * weight + bias)", VARIES), ("jnp.sum(g, 0)", "jnp.mean(g, 0)")],
        [("gradients", "gradient of input 2 ('bias')"), ("determinism", "output")],
    ),
    "an output that is wrong, and varies by rounding": (
        "layer norm",
        [("(y * weight + bias)", f"1.5 * {VARIES}")],
        [("outputs", "output"), ("determinism", "output")],
    ),
}


@row("K1b")
@cells("faults", ["an output, and the same output in vmap", "an output, and NaN for zeros"], TWO_FAULTS)
def test_two_faults_are_two_findings(faults):
    name, replacements, expected = TWO_FAULTS[faults]
    report = report_of(name, *replacements)
    assert heads(report) == expected
    assert sum(1 + len(finding.others) for finding in report.findings) == len(report.failures)


@row("K1b")
def test_imprecise_results_need_not_be_equal_to_be_one_finding():
    report = report_of("layer norm", ("x = x.astype(jnp.float32)", "x = x.astype(jnp.bfloat16)"))
    assert heads(report) == [
        ("outputs", "output"),
        ("gradients", "gradient of input 0 ('x')"),
        ("gradients", "gradient of input 1 ('weight')"),
    ]


@row("K1b")
def test_a_kernel_that_draws_is_one_finding():
    """A callback draws whenever it runs, so that no two results are equal."""
    generator = np.random.default_rng(0)

    def doubled(x):
        def draw(x):
            return (2 * x * (1 + generator.uniform(0.1, 0.2))).astype(x.dtype)

        return jax.pure_callback(draw, x, x, vmap_method="expand_dims")

    kernel = rule(lambda ctx, x: doubled(x), lambda ctx, g: 2 * g)
    report = kernelcheck(kernel, lambda x: 2 * x, shape(5, 3), dtypes=["float32"], raise_exception=False)
    assert {"outputs", "jit", "vmap"} <= set(report.failed_checks)
    assert heads(report) == [("determinism", "output")]
    assert report.findings[0].first.worst[0].error > 0


def raising(calls):
    raise ValueError(f"call {next(calls)} has values")


@row("K1b")
def test_errors_of_one_line_are_one_finding_that_names_file_and_line():
    calls = count()

    def doubled(x):
        if not isinstance(x, jax.core.Tracer):
            raising(calls)
        return 2 * x

    kernel = rule(lambda ctx, x: doubled(x), lambda ctx, g: 2 * g)
    report = kernelcheck(kernel, lambda x: 2 * x, shape(3), raise_exception=False)
    assert report.failed_checks == ["determinism", "jit", "padding", "donation"]
    (finding,) = report.findings
    line = raising.__code__.co_firstlineno + 1
    assert finding.first.raised == f"ValueError at {__file__}:{line}"
    for number, failure in enumerate([finding.first, *finding.others]):
        assert failure.message == f"it raised ValueError: call {number} has values ({__file__}:{line})"
        assert failure.message in str(report)


@row("K1b")
def test_an_error_of_every_dtype_is_one_finding_and_two_lines_are_two():
    def failing(x):
        if x.dtype == jnp.bfloat16:
            raise TypeError("no bfloat16")
        raise TypeError("not at all")

    report = kernelcheck(failing, jnp.sin, shape(3), dtypes=["float32", "float16"], raise_exception=False)
    assert len(report.failures) == 2 and len(report.findings) == 1
    report = kernelcheck(failing, jnp.sin, shape(3), raise_exception=False)
    assert len(report.findings) == 2


# The rules, on rows.


def failure(check, array="output", dtype="float32", *, repeats="plain", value=3.0, **fields):
    return Row(
        check, dtype, array, False, "wrong", array, repeats, worst=[Entry((0,), value, 2.0, 1.0, 0.1, 9.0)], **fields
    )


RULES = [
    # (rows, sizes of the findings)
    ([failure("scales"), failure("outputs")], [2]),  # the simplest is first
    ([failure("scales"), failure("constants")], [1, 1]),  # neither explains the other
    ([failure("scales"), failure("scales", dtype="bfloat16")], [2]),
    ([failure("scales"), failure("outputs", dtype="bfloat16")], [1, 1]),  # right for plain inputs in float32
    ([failure("scales", dtype="bfloat16"), failure("outputs"), failure("outputs", dtype="bfloat16")], [3]),
    ([failure("outputs"), failure("outputs", "output[1]")], [1, 1]),
    ([failure("outputs"), failure("scales", value=np.nan)], [1, 1]),
    ([failure("outputs", value=np.inf), failure("scales", value=np.nan)], [2]),
    ([failure("outputs"), failure("vmap")], [2]),
    ([failure("outputs"), failure("vmap", repeats="")], [1, 1]),
    ([failure("outputs"), failure("vmap"), failure("vmap", repeats="")], [2, 1]),
    ([failure("vmap", repeats=""), failure("vmap", repeats="")], [2]),
    ([failure("vmap", repeats=""), failure("shard", repeats="")], [1, 1]),
    ([failure("jit", repeats=""), failure("padding", repeats="jit")], [2]),
    ([failure("jit", repeats=""), failure("padding", repeats="")], [1, 1]),
    ([failure("determinism", count=1), failure("outputs"), failure("vmap", repeats="")], [3]),
    ([failure("determinism"), failure("outputs")], [1, 1]),  # differs by rounding only
    ([failure("outputs"), failure("determinism", value=np.nan, count=1)], [2]),
    ([failure("determinism", repeats="jit", count=1), failure("outputs")], [1, 1]),
    ([failure("determinism", repeats="jit", count=1), failure("vmap", repeats="")], [2]),
    ([failure("determinism"), failure("determinism", repeats="jit")], [2]),
    ([failure("outputs", raised="E at a:1"), failure("vmap", "other", raised="E at a:1")], [2]),
    ([failure("outputs", raised="E at a:1"), failure("outputs", raised="E at a:2")], [1, 1]),
    ([failure("outputs", raised="E at a:1"), failure("outputs")], [1, 1]),
]


@row("K1b")
@pytest.mark.parametrize("number", range(len(RULES)))
def test_the_rules(number):
    rows, sizes = RULES[number]
    findings = group(rows)
    assert sorted((1 + len(finding.others) for finding in findings), reverse=True) == sizes
    assert all(finding.first.check != "scales" for finding in findings[:1]) or "outputs" not in {r.check for r in rows}


@row("K1b")
def test_a_check_of_more_than_two_seconds_shows_its_progress(monkeypatch):
    bars = []

    class FakeBar:
        def __init__(self, desc, total, initial, unit, **options):
            self.desc, self.total, self.n, self.unit, self.is_closed = desc, total, initial, unit, False
            bars.append(self)

        def update(self, number):
            assert not self.is_closed
            self.n += number

        def close(self):
            self.is_closed = True

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=FakeBar))
    monkeypatch.setattr(time, "monotonic", count(step=2.1).__next__)
    report_of("doubled", skip=all_but(), dtypes=["float32"])
    (bar,) = bars
    assert bar.desc == "kernelcheck of forward" and bar.unit == " checks"
    assert bar.n == bar.total > 0 and bar.is_closed
