"""Runs a program with Functions and with their twins, and says how the two compare."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np

from tests.fuzz.evaluate import evaluate
from tests.fuzz.functions import write_by_hand_in_forward_mode
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import COMPILED, TRACED, Operation, Program, walk
from tests.fuzz.source import write, write_alone
from tests.fuzz.types import FLOATS

AGREED, DISCARDED, REFUSED, WRONG = "agreed", "discarded", "refused", "wrong"
VALUES_DIFFER = "values differ"
_ANOTHER_DRAW = "the gradient belongs to another draw than the output"
_REFUSALS = (NotImplementedError, RuntimeError, TypeError, ValueError)
_TOLERANCES = {"float32": 5e-4, "bfloat16": 0.1}


@dataclass(frozen=True)
class Outcome:
    """How a program went.

    Attributes:
      kind: the two sides agreed; the twins raise, so that the program means nothing; jaxfn refused it by name; or
        what jaxfn did is wrong.
      message: what was refused, or is wrong, without the names and numbers of this one program.
      comparisons: how many arrays and counts were compared.
    """

    kind: str
    message: str = ""
    comparisons: int = 0

    @property
    def sort(self) -> str:
        """What stays the same while a program is shrunk: the kind, and how the message begins."""
        beginning, _, detail = self.message.partition(": ")
        return f"{self.kind} {beginning} {'' if 'often' in beginning else detail[:24]}".strip()


def check(program: Program) -> Outcome:
    """Runs both sides of a program; what NumPy finds wrong is looked at again in the compiled program."""
    outcome = _checked(program)
    if outcome.kind == WRONG and program.measure.how == TRACED:
        return _checked(replace(program, measure=replace(program.measure, how=COMPILED)))
    return outcome


def _checked(program: Program) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace = _namespace(write(program))
        measure = _counted if program.stateful else partial(_computed, program.measure.how)
        try:
            wanted = measure(namespace, "TWINS")
        except Exception as error:
            return Outcome(DISCARDED, normalized(error))
        try:
            with _all_frames():
                got = measure(namespace, "FUNCTIONS")
        except Exception as error:
            kind = REFUSED if is_refusal(error) else WRONG
            return Outcome(kind, normalized(error))
    if not program.stateful:
        return _compare(got, wanted, tolerance_of(program))
    outcome = _compare_counts(got, wanted, tolerance_of(program))
    if outcome.message == _ANOTHER_DRAW and any(spec.has_forward_mode for spec in program.functions):
        by_hand = _counted(_namespace(write(program, write_by_hand_in_forward_mode)), "TWINS")
        if not _is_of_one_draw(by_hand, tolerance_of(program)):
            return Outcome(DISCARDED, "a jax.custom_jvp by hand: its gradient belongs to another draw as well")
    return outcome


@contextmanager
def _all_frames() -> Generator[None]:
    """Errors show the frames of jaxfn too, by which a refusal is known."""
    filtering = cast(Any, jax.config).jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", filtering)


def _namespace(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(source, "<fuzzed program>", "exec"), namespace)
    return namespace


def agrees_in_double_precision(program: Program) -> bool:
    """Whether values agree where rounding does not matter: of the sine of a large number it leaves nothing."""
    source = write_alone(program, tolerance_of(program))
    source = source.replace("import jax, jaxfn\n", 'import jax, jaxfn\njax.config.update("jax_enable_x64", True)\n', 1)
    for dtype in FLOATS:
        source = source.replace(f"jnp.{dtype}", "jnp.float64")
    return subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=300).returncode == 0


def tolerance_of(program: Program) -> float:
    """How much results may differ, relative to the largest."""
    dtypes = {argument.dtype for argument in program.arguments}
    names = {s.name for s in walk(program.block) if isinstance(s, Operation)}
    is_coarse = "bfloat16" in dtypes or any("bfloat16" in OPERATIONS[name].source for name in names)
    return _TOLERANCES[FLOATS[is_coarse]]


def is_refusal(error: BaseException) -> bool:
    """Whether an exception is jaxfn's own, in words that name the Function.

    Or JAX's, of an eager `shard_map` inside of an eager `jax.checkpoint`.
    """
    if isinstance(error, NotImplementedError) and "symbolic_zeros support with shard_map" in str(error):
        return True
    return type(error) in _REFUSALS and bool(re.search(r"\bF\d+\b", str(error))) and _is_raised_in_jaxfn(error)


def _is_raised_in_jaxfn(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and "/jaxfn/" in frames[-1].f_code.co_filename


def normalized(error: BaseException) -> str:
    """The type and the first sentences of an error, without names and numbers of the program."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"\b([FT]\d+|make_[FT]\d+)\b(_backward|_bwd|_fwd)?", "F", text)
    text = re.sub(r"\b[vpbx]\d+\b", "v", text)
    text = re.sub(r"(int|float|bfloat|complex)\d+(\[[\d,]*\])?|\(\d[\d, ]*,?\)|\d+", "N", text)
    return f"{type(error).__name__}: {text[:200]}"


def _computed(how: str, namespace: dict[str, Any], side: str) -> Any:
    measured = namespace["measured"](namespace["program"](*namespace[side]))
    evaluated = evaluate(measured, namespace["ARGUMENTS"]) if how == TRACED else None
    return jax.block_until_ready(measured(*namespace["ARGUMENTS"])) if evaluated is None else evaluated


def _counted(namespace: dict[str, Any], side: str) -> tuple[Any, Any, list[int]]:
    """The result, the argument, and how often forward had run after one call and after two."""
    run, (argument,), runs = namespace["program"](*namespace[side]), namespace["ARGUMENTS"], namespace.get("RUNS", {})
    runs["count"] = 0
    measured, counts = namespace["measured"](run), []
    for _ in range(2):
        result = jax.block_until_ready(measured(argument))
        jax.effects_barrier()
        counts.append(runs["count"])
    return result, argument, counts


def _compare(got: Any, wanted: Any, tolerance: float) -> Outcome:
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        return Outcome(WRONG, "structures differ")
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    if any((ours.shape, ours.dtype) != (theirs.shape, theirs.dtype) for ours, theirs in pairs):
        return Outcome(WRONG, "shapes or dtypes differ", len(pairs))
    numbers = [(_float64(ours), _float64(theirs)) for ours, theirs in pairs]
    scale = max([1, *(np.abs(b[np.isfinite(b)]).max(initial=0) for _, b in numbers)])
    if all(np.allclose(a, b, rtol=tolerance, atol=tolerance * scale, equal_nan=True) for a, b in numbers):
        return Outcome(AGREED, comparisons=len(pairs))
    return Outcome(WRONG, VALUES_DIFFER, len(pairs))


def _compare_counts(got: Any, wanted: Any, tolerance: float) -> Outcome:
    """Forward runs at most as often as by hand, and the gradient belongs to the draw that the output does."""
    counts, counts_by_hand = got[-1], wanted[-1]
    pairs = list(zip(counts, counts_by_hand, strict=True))  # zeros where the output is not used
    if any(ours > by_hand or bool(ours) is not bool(by_hand) for ours, by_hand in pairs):
        return Outcome(WRONG, f"forward runs more often than by hand: {counts}, not {counts_by_hand}", 2)
    if not _is_of_one_draw(got, tolerance):
        return Outcome(WRONG, _ANOTHER_DRAW, 3)
    return Outcome(AGREED, comparisons=3)


def _is_of_one_draw(counted: tuple[Any, Any, list[int]], tolerance: float) -> bool:
    """As the programs are linear, loss = gradient . argument for one draw."""
    result, argument, _ = counted
    if not isinstance(result, tuple):
        return True
    loss, gradient = map(_float64, result)
    return np.allclose(loss, np.vdot(gradient, _float64(argument)), rtol=tolerance, atol=tolerance)


def _float64(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x, np.float64)
