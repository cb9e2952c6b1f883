"""Runs many programs, and says what came of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import jax

from tests.fuzz.check import (
    AGREED,
    DISCARDED,
    REJECTED,
    WRONG,
    Outcome,
    agrees_in_double_precision,
    check,
    tolerance_of,
)
from tests.fuzz.compare import VALUES_DIFFER
from tests.fuzz.draw import draw
from tests.fuzz.program import Call, Program, walk
from tests.fuzz.shrink import shrink
from tests.fuzz.source import write_alone

_PROGRAMS_BETWEEN_CLEARINGS = 400


@dataclass(frozen=True)
class Disagreement:
    """A program that goes wrong, shrunk, and how."""

    seed: int
    outcome: Outcome
    program: Program

    @property
    def source(self) -> str:
        """A complete Python program that shows it."""
        return write_alone(self.program, tolerance_of(self.program))

    @property
    def features(self) -> str:
        """The parts of the shrunken program: alike in programs that go wrong for one reason."""
        program, measure = self.program, self.program.measure
        wraps = " ".join(wrap.kind for wrap in program.wraps) or "no transformation"
        functions = {_described(s) for s in walk(program.block) if isinstance(s, Call)}
        how = "jit" if measure.is_jitted else "eager"
        return f"{self.outcome.sort}; {how} {measure.name}; {wraps}; {', '.join(sorted(functions))}"


def _described(call: Call) -> str:
    spec = call.function
    needed = " where it is needed" if spec.saves_needed else ""
    rule = " with a vmap rule" if spec.vmap_rule else ""
    closing = " closing over a value" if call.closed else ""
    return f"{spec.modes} mode saving {spec.saving}{needed}{rule}{closing}"


@dataclass
class Report:
    """The results of a number of programs.

    Attributes:
      kinds: how many there were of each kind of outcome.
      rejections: how many of each message.
      discarded: how many of each message of the twins.
      comparisons: how many arrays and counts were compared.
      disagreements: those that were shrunk.
      seconds: how long it took, with shrinking.
    """

    kinds: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    comparisons: int = 0
    disagreements: list[Disagreement] = field(default_factory=list)
    seconds: float = 0

    def add(self, outcome: Outcome) -> None:
        """Counts an outcome."""
        self.kinds[outcome.kind] += 1
        self.comparisons += outcome.comparisons
        if outcome.kind == REJECTED:
            self.rejections[outcome.message] += 1
        elif outcome.kind == DISCARDED:
            self.discarded[outcome.message] += 1

    def text(self) -> str:
        """The report to print; of disagreements that are alike, the first one's program."""
        lines = [
            f"{self.kinds.total()} programs in {self.seconds:.0f} s",
            f"{self.comparisons} comparisons; {self.kinds[AGREED]} programs agree",
        ]
        for title, counter in (("rejected", self.rejections), ("discarded", self.discarded)):
            lines.append(f"{counter.total()} {title}")
            lines += [f"  {count:5} {message}" for message, count in counter.most_common()]
        lines.append(f"{self.kinds[WRONG]} disagreements")
        seen: Counter[str] = Counter()
        for found in self.disagreements:
            seen[found.features] += 1
            if seen[found.features] == 1:
                lines += [
                    f"\n{'#' * 30} seed {found.seed}: {found.outcome.message}",
                    f"# {found.features}",
                    found.source,
                ]
        return "\n".join([*lines, *(f"{count:5} {features}" for features, count in seen.most_common())])


def fuzz(
    seeds: range,
    seconds: float = float("inf"),
    shrinking: float = 20,
    checked: Callable[[Program], Outcome] = check,
    say: Callable[[str], None] = lambda line: None,
) -> Report:
    """Draws and checks the programs of these seeds.

    Args:
      seeds: one per program.
      seconds: after which no further program is begun.
      shrinking: seconds for each disagreement; 0 for none.
      checked: what says how a program goes.
      say: is called with every disagreement as soon as it is found.
    """
    report, start = Report(), time.monotonic()
    for done, seed in enumerate(seeds):
        if time.monotonic() - start > seconds:
            break
        program = draw(seed)
        outcome = checked(program)
        if outcome.kind == WRONG and outcome.message == VALUES_DIFFER and agrees_in_double_precision(program):
            outcome = Outcome(DISCARDED, "values differ by rounding alone")
        report.add(outcome)
        if outcome.kind == WRONG:
            small = shrink(program, outcome, shrinking, checked) if shrinking else program
            report.disagreements.append(Disagreement(seed, outcome, small))
            say(f"seed {seed}: {outcome.message}")
        if done % _PROGRAMS_BETWEEN_CLEARINGS == _PROGRAMS_BETWEEN_CLEARINGS - 1:
            jax.clear_caches()  # every compiled program is cached otherwise
    report.seconds = time.monotonic() - start
    return report
