"""The checks, by name: each looks at a kernel in one way and gives rows of the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfn._gradcheck.problem.traced import Traced, is_part, trace
from jaxfn._kernelcheck.arguments import Arguments, Arrays, surrounded
from jaxfn._kernelcheck.bench import Bench, Case, Exact
from jaxfn._kernelcheck.report import Row
from jaxfn._kernelcheck.sides import BatchedSide, KernelError, Results, Side, computed

Check = Callable[[Bench, "Wishes"], Iterator[Row]]


@dataclass(frozen=True)
class Wishes:
    """The options of the checks; see `kernelcheck`.

    Attributes:
      scales: factors of the inputs.
      sizes: arguments of other sizes; `None` where these are derived.
      shard: puts a function on several devices.
      skip: names of checks that are left out.
      allow_zero_gradients: whether a reference may have a gradient of zero.
    """

    scales: Sequence[float]
    sizes: Sequence[Arguments] | None
    shard: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    skip: frozenset[str]
    allow_zero_gradients: bool


def values(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Outputs and gradients."""
    yield from bench.judged("outputs", bench.measured(bench.main), bench.target)


def vacuous(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Whether gradients of zero would pass."""
    for name, expected in zip(bench.gradient_names(), bench.target.gradients, strict=True):
        if expected.exact.size and expected.judge(np.zeros(expected.exact.shape), bench.factor).passed:
            message = (
                "is zero in the reference, or not larger than rounding errors: a kernel that returns zeros passes. "
                "Choose other inputs, leave it out by argnums=, or say allow_zero_gradients=True."
            )
            yield bench.said("vacuous", name, message, passed=wishes.allow_zero_gradients)
        else:
            yield bench.said("vacuous", name, "")


def determinism(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Compares two runs of one program."""
    is_same = bench.measured(bench.main).same_as(bench.measured(bench.main))
    yield bench.said("determinism", "compiled", "" if is_same else "two runs of one program on the same inputs differ")


def eager_determinism(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Compares two eager runs."""
    is_same = bench.eager.same_as(bench.first_results(bench.side.run))
    yield bench.said("determinism", "eager", "" if is_same else "two eager runs on the same inputs differ")


def undifferentiated(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Outputs where nothing is differentiated, which a rule may compute by other code."""
    side = replace(bench.side, arguments=bench.arguments.undifferentiated())
    results = computed(jax.jit(side.mapped), *bench.arrays(bench.main))
    yield from bench.judged("undifferentiated", results, bench.target)


def jit(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Without `jax.jit`."""
    yield from bench.judged("jit", bench.eager, bench.target, [0], " eagerly")


def vmap(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Under `jax.vmap`: of the gradient along axis 0, and the gradient of it along others, an argument unbatched."""
    fixed, xs, cotangents = bench.arrays(bench.main)
    run = jax.jit(jax.vmap(bench.side.run, in_axes=(None, 0, 0)))
    yield from bench.judged("vmap", computed(run, fixed, xs, cotangents), bench.target, suffix=" along axis 0")
    owners = sorted(set(bench.arguments.owners))
    for owner in owners if len(owners) > 1 else ():
        yield from _unbatched(bench, owner)


def _unbatched(bench: Bench, owner: int) -> Iterator[Row]:
    """One argument without the batch, the others batched along their last axis."""
    arguments = bench.arguments
    alone = [i for i, o in enumerate(arguments.owners) if o == owner]
    xs = [np.repeat(x[:1], bench.draws, 0) if i in alone else x for i, x in enumerate(bench.main.xs)]
    case = Case(xs, bench.main.cotangents)
    target = bench.expected(case)
    fixed, given, cotangents = bench.arrays(case)
    given = [x[0] if i in alone else jnp.moveaxis(x, 0, -1) for i, x in enumerate(given)]
    axes = tuple(None if i in alone else -1 for i in range(len(given)))
    side = BatchedSide(bench.kernel, arguments, axes)
    results = computed(jax.jit(side.run), fixed, given, cotangents)
    gradients: Arrays = []
    for position, (i, gradient) in enumerate(zip(arguments.differentiated, results.gradients, strict=True)):
        if i in alone:
            target.gradients[position] = target.gradients[position].summed()
            gradients.append(gradient[None])
        else:
            gradients.append(np.moveaxis(gradient, -1, 0))
    names = ", ".join(arguments.names[i] for i in alone)
    suffix = f" along the last axis, {names} unbatched"
    yield from bench.judged("vmap", replace(results, gradients=gradients), target, suffix=suffix)


def undefined(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """One output's cotangent at a time, the others undefined."""
    count = len(bench.outputs.floats)
    for kept in range(count) if count > 1 else ():
        zeroed = [ct if i == kept else 0 * ct for i, ct in enumerate(bench.main.cotangents)]
        target = bench.expected(Case(bench.main.xs, zeroed))
        results = _mapped(bench, outputs=[kept])
        yield from bench.judged("undefined", results, target, suffix=f", {bench.outputs.names[kept]} alone used")


def subsets(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """One input at a time differentiated; nothing is computed where that is the same operations."""
    chosen = bench.arguments.differentiated
    if len(chosen) < 2:
        return

    def gradients(inputs: Sequence[int], *args: Any) -> Arrays:
        return bench.side.run(*args, inputs=inputs)[2]

    args = bench.arrays(bench.main, 0)
    whole = _traced(partial(gradients, chosen), *args)
    for position, (i, name) in enumerate(zip(chosen, bench.gradient_names(), strict=True)):
        what = f"{name}, which alone is differentiated"
        if is_part(_traced(partial(gradients, [i]), *args), whole, position):
            yield bench.said("subsets", what, "")
        else:
            (gradient,) = _mapped(bench, inputs=[i]).gradients
            yield bench.row("subsets", what, bench.target.gradients[position].judge(gradient, bench.factor))


def scales(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Inputs that are smaller and larger."""
    for scale in wishes.scales:
        case = bench.case([scale * value for value in bench.arguments.values])
        results, target = bench.measured(case), bench.expected(case)
        suffix = f", inputs times {scale:g}"
        yield from bench.judged("scales", results, target, suffix=suffix, only_overflow=abs(scale) > 1)


def constants(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Inputs that are zero, or the same number everywhere."""
    values = bench.arguments.values
    same = [np.full_like(value, value.flat[0] if value.size else 0) for value in values]
    for what, given in (("zero", [np.zeros_like(value) for value in values]), ("constant", same)):
        case = bench.case(given)
        target = bench.expected(case).with_equal_inputs(bench.target)
        yield from bench.judged("constants", bench.measured(case), target, suffix=f", inputs {what}")


def padding(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Inputs that lie between NaNs, which a kernel gets that reads out of bounds."""
    fixed, xs, cotangents = bench.arrays(bench.main, 0)
    results = computed(bench.side.run, fixed, *([surrounded(x) for x in arrays] for arrays in (xs, cotangents)))
    yield from bench.judged("padding", results.as_draw(), bench.target, [0], ", inputs between NaNs")


def sizes(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Other sizes, which do not divide a block."""
    for what, arguments in _sizes(bench) if wishes.sizes is None else _listed(wishes.sizes):
        other = replace(bench, arguments=arguments, exact=Exact(bench.reference, arguments))
        try:
            problem = mismatch(other)
            if problem:
                yield bench.said("sizes", what, problem)
            else:
                yield from other.judged("sizes", other.measured(other.main), other.target, suffix=f" for {what}")
        except KernelError as error:
            yield bench.said("sizes", what, f"refused, {error}", passed=True)


def donation(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """Inputs that may be overwritten, and others that may not."""
    given = bench.arrays(bench.main, 0)
    before = [np.array(x) for x in given[1]]
    computed(bench.side.run, *given)
    changed = [
        name
        for name, x, was in zip(bench.arguments.names, given[1], before, strict=True)
        if np.asarray(x).tobytes() != was.tobytes()
    ]
    message = f"{', '.join(changed)} changed: the kernel writes into its arguments" if changed else ""
    yield bench.said("donation", "inputs", message)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        results = bench.first_results(jax.jit(bench.side.run, donate_argnums=(1, 2)))
    yield from bench.judged("donation", results, bench.target, [0], ", inputs donated")


def shard(bench: Bench, wishes: Wishes) -> Iterator[Row]:
    """On several devices."""
    if wishes.shard is not None:
        side = replace(bench.side, function=wishes.shard(bench.kernel))
        results = bench.first_results(jax.jit(side.run))
        yield from bench.judged("shard", results, bench.target, [0], ", sharded")


def run(bench: Bench, wishes: Wishes, *, is_first: bool) -> Iterator[Row]:
    """All checks of a kernel in one dtype, less those to be skipped."""
    problem = _problem(bench)
    if problem and bench.arguments.differentiated:
        arguments = bench.arguments.undifferentiated()
        plain = replace(bench, arguments=arguments, exact=Exact(bench.reference, arguments))
        if not _problem(plain):
            yield bench.said("gradients", "the gradient", problem)
            bench, problem = plain, ""
    if problem:
        yield bench.said("outputs", "the kernel", problem)
        return
    for name, check in [*IN_EVERY_DTYPE, *(IN_ONE_DTYPE if is_first else ())]:
        if name not in wishes.skip:
            try:
                yield from check(bench, wishes)
            except KernelError as error:
                yield bench.said(name, "the kernel", str(error))


def _problem(bench: Bench) -> str:
    """Why a kernel cannot be compared at all: it raises, or returns something else."""
    try:
        problem = mismatch(bench)
        if not problem:
            bench.measured(bench.main)
    except KernelError as error:
        return str(error)
    return problem


def mismatch(bench: Bench) -> str:
    """Describes how the kernel's outputs differ from the reference's in names and shapes; empty if they do not."""
    got, wanted = bench.outputs, bench.wanted
    shapes = [[y.shape for y in (*side.floats, *side.others)] for side in (got, wanted)]
    if got.names == wanted.names and shapes[0] == shapes[1]:
        return ""
    return f"the kernel returns {got.listed()}, and the reference {wanted.listed()}"


def _traced(function: Callable[..., Any], *args: Any) -> Traced:
    try:
        return trace(function, *args)
    except Exception as error:
        raise KernelError(error) from error


def _mapped(bench: Bench, **kept: Sequence[int]) -> Results:
    """All draws, where only some inputs or outputs count."""
    return computed(jax.jit(partial(bench.side.mapped, **kept)), *bench.arrays(bench.main))


def _sizes(bench: Bench) -> Iterator[tuple[str, Arguments]]:
    """Arguments in which every dimension of one size has another, as the reference accepts it: some blocks more and a
    last one that is not full, or one entry less."""
    for size in bench.arguments.sizes():
        for new in (2 * size + 1, size - 1):
            arguments = bench.arguments.resized(size, new)
            try:
                Side(bench.reference, arguments).outputs(bench.dtype)
            except Exception:
                continue
            yield f"{size} made {new}", arguments
            break


def _listed(given: Sequence[Arguments]) -> Iterator[tuple[str, Arguments]]:
    for arguments in given:
        yield "shapes " + ", ".join(str(value.shape) for value in arguments.values), arguments


# By name, what is done in every dtype, with programs that are compiled already, and what in the first one alone.
IN_EVERY_DTYPE: list[tuple[str, Check]] = [
    ("outputs", values),
    ("determinism", determinism),
    ("scales", scales),
    ("constants", constants),
]
IN_ONE_DTYPE: list[tuple[str, Check]] = [
    ("vacuous", vacuous),
    ("undifferentiated", undifferentiated),
    ("determinism", eager_determinism),
    ("jit", jit),
    ("padding", padding),
    ("vmap", vmap),
    ("undefined", undefined),
    ("subsets", subsets),
    ("sizes", sizes),
    ("donation", donation),
    ("shard", shard),
]
NAMES = tuple(dict.fromkeys(["outputs", "gradients", *(name for name, _ in (*IN_EVERY_DTYPE, *IN_ONE_DTYPE))]))
