"""The report of a check: as data, as text, as pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from jaxfn._gradcheck.report.plot import draw
from jaxfn._inspection.tables import aligned, small

Number = float | complex


class GradcheckError(RuntimeError):
    """A derivative check failed.

    Attributes:
      report: what was found, as data.

    Examples:
      >>> import jax.numpy as jnp, numpy as np, jaxfn
      >>> @jaxfn.function
      ... def sine(ctx, x):
      ...     ctx.save_for_backward(x)
      ...     return jnp.sin(x)
      >>> @sine.backward
      ... def _(ctx, grad_output):
      ...     (x,) = ctx.saved_tensors
      ...     return -grad_output * jnp.cos(x)
      >>> try:
      ...     jaxfn.gradcheck(sine, np.array([0.5, 1.0]))
      ... except jaxfn.GradcheckError as error:
      ...     print(error.report.mismatches[0].kind)
      wrong sign

    Torch counterpart: `torch.autograd.gradcheck.GradcheckError`.
    """

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report

    def __reduce__(self) -> Any:
        return GradcheckError, (self.report,)


@dataclass(frozen=True)
class Entry:
    """One wrong entry of a Jacobian.

    Attributes:
      output_index, input_index: which element of which array.
      part: for a complex output the part that is differentiated, "real" or "imaginary" (in forward mode, the part of a
        complex input); otherwise empty.
      analytic: by the function's rule.
      numeric: by finite differences, if those were asked for.
      autodiff: by autodiff of the function without its rule, where that is possible.
      absolute_error, relative_error: of the analytic value, from the reference that decides.
      tolerance: what the absolute error may be.
    """

    output_index: tuple[int, ...]
    input_index: tuple[int, ...]
    part: str
    analytic: Number
    numeric: Number | None
    autodiff: Number | None
    absolute_error: float
    relative_error: float
    tolerance: float


@dataclass
class Mismatch:
    """The derivative of one output with respect to one input is wrong.

    Attributes:
      check: "backward" or "forward mode".
      output, input: their names, with paths into pytrees.
      output_shape, input_shape: their shapes.
      count, total: how many entries of how many are wrong; of random projections in fast mode.
      entries: the worst few.
      kind: what kind of mistake it looks like, where the evidence is clear.
      matrices: the whole Jacobian "analytic", "numeric" and "autodiff" where it is small.
    """

    check: str
    output: str
    input: str
    output_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    count: int
    total: int
    entries: list[Entry] = field(default_factory=list[Entry])
    kind: str | None = None
    matrices: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict[str, np.ndarray[Any, Any]])


@dataclass
class Report:
    """The report of a check.

    Attributes:
      function: the name of what was checked.
      check: "gradcheck" or "gradgradcheck".
      mismatches: wrong derivatives.
      problems: what else is wrong, in words.
      notes: what one should know about how it was checked.
      source: where the function's `backward` is defined, "file:line".
    """

    function: str
    check: str
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    source: list[str] = field(default_factory=list[str])

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not (self.mismatches or self.problems)

    def __bool__(self) -> bool:
        return self.passed

    def to_dict(self) -> dict[str, Any]:
        """The report as plain Python values; complex numbers stay such."""
        content = asdict(self)
        for mismatch in content["mismatches"]:
            mismatch["matrices"] = {name: array.tolist() for name, array in mismatch["matrices"].items()}
        return content | {"passed": self.passed}

    def __str__(self) -> str:
        lines = [f"{self.check} of {self.function}: {'passed' if self.passed else 'FAILED'}"]
        for mismatch in self.mismatches:
            lines += ["", *_mismatch_lines(mismatch)]
        for problem in self.problems:
            lines += ["", problem]
        if not self.passed and self.source:
            lines += ["", *(f"defined at {place}" for place in self.source)]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def plot(self, mismatch: int = 0) -> Any:
        """Draws analytic, numeric and error as heat maps, outputs downwards and inputs to the right.

        Args:
          mismatch: which of `mismatches`.

        Returns:
          A matplotlib figure.

        Raises:
          ValueError: there is no such mismatch, or its Jacobian was too large to be kept.
        """
        if not 0 <= mismatch < len(self.mismatches):
            raise ValueError(f"there is no mismatch {mismatch}: the report has {len(self.mismatches)}")
        drawn = self.mismatches[mismatch]
        return draw(drawn.matrices, drawn.input, drawn.output)


def _mismatch_lines(mismatch: Mismatch) -> list[str]:
    where = f"{mismatch.output} {mismatch.output_shape} with respect to {mismatch.input} {mismatch.input_shape}"
    name = "backward" if mismatch.check == "backward" else "forward-mode derivative"
    lines = [f"wrong {name} of {where}: {mismatch.count:,} of {mismatch.total:,} entries"]
    if mismatch.kind:
        lines.append(f"  looks like: {mismatch.kind}")
    if mismatch.entries:
        lines += [f"  {line}" for line in _table(mismatch.entries)]
    return lines


def _table(entries: list[Entry]) -> list[str]:
    """The entries in aligned columns; those that no entry has are left out."""
    table = [["output", "input", "analytic", "numeric", "autodiff", "error", "relative", "tolerance"]]
    for e in entries:
        index = f"{_index(e.output_index)}{' ' + e.part if e.part else ''}"
        values = ["" if v is None else f"{v:.7g}" for v in (e.analytic, e.numeric, e.autodiff)]
        errors = map(small, (e.absolute_error, e.relative_error, e.tolerance))
        table.append([index, _index(e.input_index), *values, *errors])
    kept = [column for column in zip(*table, strict=True) if any(column[1:])]
    return aligned(list(zip(*kept, strict=True)), to_the_right=range(len(kept)))


def _index(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"
