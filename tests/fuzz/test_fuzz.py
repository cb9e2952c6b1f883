"""Random programs, of Functions and of their twins in plain JAX; and that the fuzzer is not blind."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.fuzz import check as fuzz_check
from tests.fuzz import measures, source
from tests.fuzz.check import DISCARDED, REJECTED, WRONG, check
from tests.fuzz.draw import draw
from tests.fuzz.formulas import FORMULAS, Saving
from tests.fuzz.functions import FunctionSpec, write_function
from tests.fuzz.program import Argument, Block, Call, Measure, Operation, Options, Program, Wrap
from tests.fuzz.report import Disagreement, Report, fuzz
from tests.fuzz.shrink import shrink
from tests.fuzz.source import write_alone
from tests.support.marks import cells, row, slow

SQUARE = FunctionSpec("square", "input")
DROPS = FunctionSpec("drops by numpy", "intermediate")


@row("E1", "D1")
@cells("first", [20], range(0, 40, 10))
def test_programs_agree_with_their_twins(first):
    report = fuzz(range(first, first + 10), shrinking=5)
    assert not report.disagreements, report.text()
    assert report.kinds["agreed"] > 5 and report.comparisons > 5


def test_a_seed_is_a_program():
    assert [draw(seed) for seed in range(30)] == [draw(seed) for seed in range(30)]
    assert len({draw(seed) for seed in range(30)}) == 30


def long_program(spec: FunctionSpec, stateful: bool = False) -> Program:
    """The Function between other operations, in a vmap over the last axis, in a jit."""
    inner = Block(
        ("p1", "p2"),
        (Operation("half", ("p1",), "v1"), Call(spec, ("v1",), ("v2",)), Operation("flip", ("v2",), "v3")),
        ("v3",),
    )
    mapped = Wrap("vmap", "b1", inner, ("p3", "p3"), ("v4",), Options(in_axes=(-1, None), out_axes=(1,)))
    outer = Wrap("jit", "b2", Block(("p3",), (mapped, Operation("negate", ("v4",), "v5")), ("v5",)), ("x0",), ("v6",))
    block = Block(("x0",), (outer, Operation("sum first", ("v6",), "v7")), ("v7",))
    measure = Measure("value_and_grad", (0,)) if stateful else Measure("grad of grad", (0,), is_jitted=True)
    return Program((Argument((3, 2), "float32", 1),), block, measure, stateful)


def outcome_of_running(source: str) -> subprocess.CompletedProcess[str]:
    """Runs a printed program in a separate process."""
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)


def shrunk(program: Program) -> Disagreement:
    """The program, which goes wrong, shrunk: the Function alone is left."""
    outcome = check(program)
    assert outcome.kind == WRONG
    small = shrink(program, outcome, seconds=20)
    assert [type(statement) for statement in small.block.statements] == [Call]
    return Disagreement(0, outcome, small)


def write_functions_with(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    """Replaces a text in the source of every Function."""

    def written(spec, name):
        return [line.replace(old, new) for line in write_function(spec, name)]

    monkeypatch.setattr(source, "write_function", written)


def test_programs_that_are_right_are_found_right():
    assert check(long_program(SQUARE)).kind == "agreed"
    assert check(long_program(DROPS, stateful=True)).kind == "agreed"


@pytest.mark.parametrize(
    ("grad", "measure"),
    [pytest.param("g0 * 0.5 * x", "grad", marks=slow), ("g0 * 0.6 * stop_gradient(x)", "grad of grad")],
)
def test_a_wrong_rule_is_found_and_shrunk(monkeypatch, grad, measure):
    wrong = {"input": Saving(("x",), (grad,), ("dx * 0.6 * x",))}
    monkeypatch.setitem(FORMULAS, "square", replace(FORMULAS["square"], savings=wrong))
    found = shrunk(long_program(SQUARE))
    assert found.outcome.message == "values differ"
    assert found.program.measure == Measure(measure, (0,))
    report = Report(disagreements=[found])
    report.add(found.outcome)
    assert found.source in report.text() and "\n1 disagreements" in report.text()
    if measure == "grad":
        ran = outcome_of_running(found.source)
        assert ran.returncode == 1 and "AssertionError: values differ" in ran.stderr, ran


def test_a_forward_that_runs_twice_is_found_shrunk_and_printed(monkeypatch):
    draws = "    drawn_by_numpy(shape)\n" * 2
    helper = f"\ndef drawn_thrice(shape):\n{draws}    return drawn_by_numpy(shape)\n"
    monkeypatch.setitem(measures.HELPERS, "drawn_thrice", helper)
    write_functions_with(monkeypatch, "drawn_by_numpy", "drawn_thrice")
    found = shrunk(long_program(DROPS, stateful=True))
    assert found.outcome.message.startswith("forward runs more often than hand-written")
    ran = outcome_of_running(found.source)
    assert ran.returncode == 1, ran
    assert re.search(r"forward runs more often than hand-written: \[3, 6\], not \[[12], [23]\]", ran.stderr), ran


def test_a_gradient_of_another_draw_is_found(monkeypatch):
    formula = FORMULAS["drops by numpy"]
    steps = (*formula.steps, ("y0", "x * m"), ("m", "drawn_by_numpy(x.shape)"))
    monkeypatch.setitem(FORMULAS, "drops by numpy", replace(formula, steps=steps, outputs=("y0",)))
    assert shrunk(long_program(DROPS, stateful=True)).outcome.message.startswith("the gradient belongs to another draw")


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError",
        "KeyError('F0')",
        "ValueError('names no Function')",
        "ValueError('F0, not by jaxfn')",
        "jax.errors.JaxRuntimeError('INTERNAL')",
    ],
)
def test_errors_that_are_not_rejections_are_found(monkeypatch, error):
    write_functions_with(monkeypatch, "return y0", f"raise {error}")
    assert check(long_program(SQUARE)).kind == WRONG


@pytest.mark.parametrize("error", ["jax.errors.JaxRuntimeError('INTERNAL')", "ValueError('no rule')"])
def test_a_program_that_raises_with_hand_written_rules_as_well_means_nothing(monkeypatch, error):
    raised = f"raise {error}"
    write_functions_with(monkeypatch, "return y0", raised)
    monkeypatch.setattr(fuzz_check, "write_hand_written", lambda spec, name: [f"def {name}(*args):", f"    {raised}"])
    assert check(long_program(SQUARE)).kind == DISCARDED


def test_a_rejection_is_counted_by_its_message(monkeypatch):
    spec = FunctionSpec("square", "input", style="separate", modes="generated")
    nonlinear = {"input": Saving(("x",), ("g0 * g0 * 0.6 * x",), ("dx",))}
    monkeypatch.setitem(FORMULAS, "square", replace(FORMULAS["square"], savings=nonlinear))
    program = replace(long_program(spec), measure=Measure("jvp", (0,)))
    outcome = check(program)
    assert outcome.kind == REJECTED and outcome.message.startswith("RuntimeError: F.backward is not linear"), outcome
    report = fuzz(range(2), checked=lambda _: outcome)
    assert report.rejections == {outcome.message: 2} and not report.disagreements


@cells("seed", [0], range(2))
def test_printed_programs_run_alone(seed):
    ran = outcome_of_running(write_alone(draw(seed), 1e-3))
    assert ran.returncode == 0 and ran.stdout, ran
