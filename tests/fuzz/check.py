"""Runs a program with Functions and with their twins, and says how the two compare."""

from __future__ import annotations

import re
import subprocess
import sys
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from tests.fuzz.compare import ANOTHER_DRAW, difference, difference_of_counts, is_of_one_draw, result_and_runs
from tests.fuzz.functions import write_hand_written, write_hand_written_in_forward_mode
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.program import Operation, Program, walk
from tests.fuzz.source import write, write_alone
from tests.fuzz.types import FLOATS

AGREED, DISCARDED, REJECTED, WRONG = "agreed", "discarded", "rejected", "wrong"
_REJECTIONS = (NotImplementedError, RuntimeError, TypeError, ValueError)
_TOLERANCES = {"float32": 5e-4, "bfloat16": 0.1}
_LARGEST = 1e12  # the sine of a sum in float32 says nothing long before


@dataclass(frozen=True)
class Outcome:
    """The result of checking a program.

    Attributes:
      kind: the two sides agreed; the twins raise, so that the program means nothing, or a hand-written
        rule raises the error as well; jaxfn rejected it by name; or what jaxfn did is wrong.
      message: what was rejected, or is wrong, without the names and numbers of this one program.
      comparisons: how many arrays and counts were compared.
    """

    kind: str
    message: str = ""
    comparisons: int = 0

    @property
    def sort(self) -> str:
        """The part that shrinking a program preserves: the kind, and the beginning of the message."""
        beginning, _, detail = self.message.partition(": ")
        return f"{self.kind} {beginning} {'' if 'often' in beginning else detail[:24]}".strip()


def check(program: Program) -> Outcome:
    """Runs both sides of a program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        namespace = _namespace(write(program))
        try:
            wanted = _measured(program, namespace, "TWINS")
        except Exception as error:
            return Outcome(DISCARDED, normalized(error))
        if not all((np.abs(np.asarray(x, np.float64)) < _LARGEST).all() for x in jax.tree.leaves(wanted)):
            return Outcome(DISCARDED, "the twins overflow, or nearly")
        try:
            with _all_frames():
                got = _measured(program, namespace, "FUNCTIONS")
        except Exception as error:
            if is_rejection(error) or _may_be_of_a_forgotten_rule(error, program):
                return Outcome(REJECTED, normalized(error))
            is_of_jax = _hand_written_raises(program, normalized(error))
            return Outcome(DISCARDED if is_of_jax else WRONG, normalized(error))
    comparisons, tolerance = len(jax.tree.leaves(got)), tolerance_of(program)
    if not program.stateful:
        message = difference(got, wanted, tolerance)
        return Outcome(WRONG if message else AGREED, message, comparisons)
    (argument,) = namespace["ARGUMENTS"]
    message = difference_of_counts(got, wanted, argument, tolerance)
    if message == ANOTHER_DRAW and any(spec.has_forward_mode for spec in program.functions):
        namespace = _namespace(write(program, write_hand_written_in_forward_mode))
        hand_written, _ = _measured(program, namespace, "TWINS")
        if not is_of_one_draw(hand_written, argument, tolerance):
            return Outcome(DISCARDED, "a hand-written jax.custom_jvp: its gradient belongs to another draw as well")
    return Outcome(WRONG if message else AGREED, message, comparisons)


def _hand_written_raises(program: Program, message: str) -> bool:
    """Whether the program with hand-written `jax.custom_vjp` functions raises that error, too."""
    try:
        _measured(program, _namespace(write(program, write_hand_written)), "TWINS")
    except Exception as error:
        return normalized(error) == message
    return False


@contextmanager
def _all_frames() -> Generator[None]:
    """Errors show the frames of jaxfn too, by which a rejection is known."""
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


def _measured(program: Program, namespace: dict[str, Any], side: str) -> Any:
    """The result with Functions or twins, and how often forward had run where the program is stateful."""
    measured = namespace["measured"](namespace["program"](*namespace[side]))
    if program.stateful:
        return result_and_runs(measured, namespace["ARGUMENTS"], namespace.get("RUNS", {}))
    return jax.block_until_ready(measured(*namespace["ARGUMENTS"]))


def agrees_in_double_precision(program: Program) -> bool:
    """Whether values agree where rounding does not matter: of the sine of a large number it leaves nothing."""
    source = write_alone(program, tolerance_of(program))
    source = source.replace("import jax, jaxfn\n", 'import jax, jaxfn\njax.config.update("jax_enable_x64", True)\n', 1)
    for dtype in FLOATS:
        source = source.replace(f"jnp.{dtype}", "jnp.float64")
    return subprocess.run([sys.executable, "-c", source], capture_output=True, timeout=300).returncode == 0


def tolerance_of(program: Program) -> float:
    """Returns how much results may differ, relative to the largest."""
    dtypes = {argument.dtype for argument in program.arguments}
    names = {s.name for s in walk(program.block) if isinstance(s, Operation)}
    is_coarse = "bfloat16" in dtypes or any("bfloat16" in OPERATIONS[name].source for name in names)
    return _TOLERANCES[FLOATS[is_coarse]]


def is_rejection(error: BaseException) -> bool:
    """Whether an exception is jaxfn's own, with a message that names the Function.

    Or JAX's, of an eager `shard_map` inside an eager `jax.checkpoint`.
    """
    if isinstance(error, NotImplementedError) and "symbolic_zeros support with shard_map" in str(error):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    names_function = re.search(r"\bF\d+\b", str(error))
    return type(error) in _REJECTIONS and bool(names_function and files and "/jaxfn/" in files[-1])


def _may_be_of_a_forgotten_rule(error: BaseException, program: Program) -> bool:
    """Whether JAX 0.10 may raise an error because it forgets the rule of a `custom_jvp` in a scan (row D7)."""
    has_forward_mode = any(spec.has_forward_mode for spec in program.functions)
    has_scan = any(name in write(program) for name in ("lax.scan", "lax.map"))
    is_of_jax = "can't apply forward-mode" in str(error) or "Expected cotangent type" in str(error)
    return is_of_jax and has_forward_mode and has_scan and jax.__version_info__ < (0, 11)


def normalized(error: BaseException) -> str:
    """The type and the first sentences of an error, without names and numbers of the program."""
    text = str(error).partition("\n")[0]
    text = re.sub(r"\b([FT]\d+|make_[FT]\d+)\b(_backward|_bwd|_fwd)?", "F", text)
    text = re.sub(r"\b[vpbx]\d+\b", "v", text)
    text = re.sub(r"(int|float|bfloat|complex)\d+(\[[\d,]*\])?|\(\d[\d, ]*,?\)|\d+", "N", text)
    return f"{type(error).__name__}: {text[:200]}"
