"""The report of `gradcheck`: as data, as text, as pictures."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.util import find_spec
from io import StringIO
from typing import Any, ClassVar

import numpy as np

from jaxfn._gradcheck.report.plot import draw
from jaxfn._reports import (
    CheckError,
    Entry,
    Number,
    Report,
    Row,
    entry_table,
    preformatted,
    public,
    show_index,
    small,
)


class GradcheckError(CheckError):
    """A derivative is wrong.

    Attributes:
      report: the `GradcheckReport`.

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
      ...     print(error.report.mismatches[0].mistake)
      wrong sign

    Torch counterpart: `torch.autograd.gradcheck.GradcheckError`.
    """


@public
@dataclass(frozen=True)
class JacobianEntry(Entry):
    """A wrong entry of a Jacobian.

    Attributes:
      input_index: the index of the element of the input; `index` is that of the output.
      part: the part of a complex output that is differentiated, "real" or "imaginary" (in forward mode, the part of a
        complex input); empty for real arrays.
      numeric: the value by finite differences, or `None`.
      autodiff: the value by autodiff of the function without its rule, or `None` if that is not possible.
    """

    input_index: tuple[int, ...]
    part: str
    numeric: Number | None
    autodiff: Number | None


@public
@dataclass(kw_only=True)
class Mismatch(Row):
    """The derivative of one output with respect to one input is wrong.

    Attributes:
      mode: "reverse" or "forward".
      output, input: the names of both, with paths into pytrees.
      output_shape, input_shape: the shapes of both.
      count, total: the number of wrong entries, and of all; of random projections in fast mode.
      mistake: the kind of mistake, if the Jacobian shows it clearly.
      matrices: the whole Jacobian as "analytic", "numeric" and "autodiff", if it is small.
    """

    mode: str
    output: str
    input: str
    output_shape: tuple[int, ...]
    input_shape: tuple[int, ...]
    mistake: str | None = None
    matrices: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict[str, np.ndarray[Any, Any]])

    def __post_init__(self) -> None:
        self.passed = False
        self.what = f"{self.output} {self.output_shape} with respect to {self.input} {self.input_shape}"


@public
@dataclass(repr=False, eq=False)
class GradcheckReport(Report):
    """The report of `gradcheck` or `gradgradcheck`; true if it passed.

    Attributes:
      function: the name of the function.
      check: "gradcheck" or "gradgradcheck".
      mismatches: wrong derivatives.
      problems: other failures, as text.
      notes: how it was checked, as far as that matters for the result.
      source: the locations of the function's rules, "file:line".
    """

    _error: ClassVar[type[CheckError]] = GradcheckError

    function: str
    check: str
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])
    problems: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    source: list[str] = field(default_factory=list[str])

    @property
    def failures(self) -> list[Mismatch | str]:
        """The mismatches and the other problems."""
        return [*self.mismatches, *self.problems]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain Python values; complex numbers stay complex."""
        content = super().to_dict()
        for mismatch in content["mismatches"]:
            mismatch["matrices"] = {name: array.tolist() for name, array in mismatch["matrices"].items()}
        return content

    def __str__(self) -> str:
        lines = [f"{self.check} of {self.function}: {'passed' if self.passed else 'FAILED'}"]
        for mismatch in self.mismatches:
            lines += ["", *_mismatch_lines(mismatch)]
        for problem in self.problems:
            lines += ["", problem]
        if not self.passed and self.source:
            lines += ["", *(f"defined at {location}" for location in self.source)]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        text = preformatted(str(self))
        if not any(mismatch.matrices for mismatch in self.mismatches) or find_spec("matplotlib") is None:
            return text
        picture = StringIO()
        self.plot(next(i for i, m in enumerate(self.mismatches) if m.matrices)).savefig(picture, format="svg")
        return text + picture.getvalue()[picture.getvalue().index("<svg") :]

    def plot(self, mismatch: int = 0) -> Any:
        """Draws the analytic Jacobian, the reference and the error as heat maps, one row for each output element.

        Args:
          mismatch: an index into `mismatches`.

        Returns:
          A matplotlib figure.

        Raises:
          ValueError: there is no such mismatch, or its Jacobian was too large to be stored.
        """
        if not 0 <= mismatch < len(self.mismatches):
            raise ValueError(f"there is no mismatch {mismatch}: the report has {len(self.mismatches)}")
        drawn = self.mismatches[mismatch]
        return draw(drawn.matrices, drawn.input, drawn.output)


def _mismatch_lines(mismatch: Mismatch) -> list[str]:
    name = "backward" if mismatch.mode == "reverse" else "forward-mode derivative"
    lines = [f"wrong {name} of {mismatch.what}: {mismatch.count:,} of {mismatch.total:,} entries"]
    if mismatch.mistake:
        lines.append(f"  looks like: {mismatch.mistake}")
    return lines + (entry_table(_HEADER, list(map(_cells, mismatch.entries)), "  ") if mismatch.entries else [])


_HEADER = ["output", "input", "analytic", "numeric", "autodiff", "error", "relative", "tolerance"]


def _cells(e: JacobianEntry) -> list[str]:
    index = f"{show_index(e.index)}{' ' + e.part if e.part else ''}"
    values = ["" if v is None else f"{v:.7g}" for v in (e.value, e.numeric, e.autodiff)]
    relative = e.error / abs(e.expected) if e.expected else float("inf")
    return [index, show_index(e.input_index), *values, *map(small, (e.error, relative, e.allowed))]
