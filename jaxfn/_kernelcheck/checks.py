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

from jaxfn._gradcheck.problem.staging import JaxprFunction, is_same_output, stage
from jaxfn._kernelcheck.arguments import Arguments, Arrays, nan_padded
from jaxfn._kernelcheck.comparison import Float64Reference, KernelComparison, Samples
from jaxfn._kernelcheck.implementations import BatchedImplementation, Implementation, KernelError, Results, computed
from jaxfn._kernelcheck.report import Row

Check = Callable[[KernelComparison, "CheckOptions"], Iterator[Row]]


@dataclass(frozen=True)
class CheckOptions:
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


def values(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Outputs and gradients."""
    yield from comparison.compare_rows("outputs", comparison.run_kernel(comparison.main), comparison.target)


def vacuous(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Whether gradients of zero would pass."""
    for name, expected in zip(comparison.gradient_names(), comparison.target.gradients, strict=True):
        if expected.exact.size and expected.compare(np.zeros(expected.exact.shape), comparison.factor).passed:
            message = (
                "is zero in the reference, or not larger than rounding errors: a kernel that returns zeros passes. "
                "Choose other inputs, leave it out by argnums=, or say allow_zero_gradients=True."
            )
            yield comparison.message_row("vacuous", name, message, passed=options.allow_zero_gradients)
        else:
            yield comparison.message_row("vacuous", name, "")


def determinism(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Compares two runs of one program."""
    is_same = comparison.run_kernel(comparison.main).same_as(comparison.run_kernel(comparison.main))
    yield comparison.message_row(
        "determinism", "compiled", "" if is_same else "two runs of one program on the same inputs differ"
    )


def eager_determinism(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Compares two eager runs."""
    is_same = comparison.eager.same_as(comparison.first_results(comparison.side.run))
    yield comparison.message_row("determinism", "eager", "" if is_same else "two eager runs on the same inputs differ")


def undifferentiated(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Outputs where nothing is differentiated, which a rule may compute by other code."""
    side = replace(comparison.side, arguments=comparison.arguments.undifferentiated())
    results = computed(jax.jit(side.mapped), *comparison.arrays(comparison.main))
    yield from comparison.compare_rows("undifferentiated", results, comparison.target)


def jit(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Without `jax.jit`."""
    yield from comparison.compare_rows("jit", comparison.eager, comparison.target, [0], " eagerly")


def vmap(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Under `jax.vmap`: of the gradient along axis 0, and the gradient of it along others, an argument unbatched."""
    fixed, xs, cotangents = comparison.arrays(comparison.main)
    run = jax.jit(jax.vmap(comparison.side.run, in_axes=(None, 0, 0)))
    yield from comparison.compare_rows(
        "vmap", computed(run, fixed, xs, cotangents), comparison.target, suffix=" along axis 0"
    )
    argument_indices = sorted(set(comparison.arguments.argument_indices))
    for argument in argument_indices if len(argument_indices) > 1 else ():
        yield from _unbatched(comparison, argument)


def _unbatched(comparison: KernelComparison, argument: int) -> Iterator[Row]:
    """One argument without the batch, the others batched along their last axis."""
    arguments = comparison.arguments
    alone = [i for i, o in enumerate(arguments.argument_indices) if o == argument]
    xs = [np.repeat(x[:1], comparison.draws, 0) if i in alone else x for i, x in enumerate(comparison.main.xs)]
    case = Samples(xs, comparison.main.cotangents)
    target = comparison.expected_results(case)
    fixed, given, cotangents = comparison.arrays(case)
    given = [x[0] if i in alone else jnp.moveaxis(x, 0, -1) for i, x in enumerate(given)]
    axes = tuple(None if i in alone else -1 for i in range(len(given)))
    side = BatchedImplementation(comparison.kernel, arguments, axes)
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
    yield from comparison.compare_rows("vmap", replace(results, gradients=gradients), target, suffix=suffix)


def undefined(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """One output's cotangent at a time, the others undefined."""
    count = len(comparison.outputs.floats)
    for kept in range(count) if count > 1 else ():
        zeroed = [ct if i == kept else 0 * ct for i, ct in enumerate(comparison.main.cotangents)]
        target = comparison.expected_results(Samples(comparison.main.xs, zeroed))
        results = _mapped(comparison, outputs=[kept])
        yield from comparison.compare_rows(
            "undefined", results, target, suffix=f", {comparison.outputs.names[kept]} alone used"
        )


def subsets(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """One input at a time differentiated; nothing is computed where that is the same operations."""
    chosen = comparison.arguments.differentiated
    if len(chosen) < 2:
        return

    def gradients(inputs: Sequence[int], *args: Any) -> Arrays:
        return comparison.side.run(*args, inputs=inputs)[2]

    args = comparison.arrays(comparison.main, 0)
    whole = _traced(partial(gradients, chosen), *args)
    for position, (i, name) in enumerate(zip(chosen, comparison.gradient_names(), strict=True)):
        what = f"{name}, which alone is differentiated"
        if is_same_output(_traced(partial(gradients, [i]), *args), whole, position):
            yield comparison.message_row("subsets", what, "")
        else:
            (gradient,) = _mapped(comparison, inputs=[i]).gradients
            yield comparison.row(
                "subsets", what, comparison.target.gradients[position].compare(gradient, comparison.factor)
            )


def scales(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Inputs that are smaller and larger."""
    for scale in options.scales:
        case = comparison.case([scale * value for value in comparison.arguments.values])
        results, target = comparison.run_kernel(case), comparison.expected_results(case)
        suffix = f", inputs times {scale:g}"
        yield from comparison.compare_rows("scales", results, target, suffix=suffix, only_overflow=abs(scale) > 1)


def constants(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Inputs that are zero, or the same number everywhere."""
    values = comparison.arguments.values
    same = [np.full_like(value, value.flat[0] if value.size else 0) for value in values]
    for what, given in (("zero", [np.zeros_like(value) for value in values]), ("constant", same)):
        case = comparison.case(given)
        target = comparison.expected_results(case).with_equal_inputs(comparison.target)
        yield from comparison.compare_rows("constants", comparison.run_kernel(case), target, suffix=f", inputs {what}")


def padding(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Inputs that lie between NaNs, which a kernel gets that reads out of bounds."""
    fixed, xs, cotangents = comparison.arrays(comparison.main, 0)
    results = computed(comparison.side.run, fixed, *([nan_padded(x) for x in arrays] for arrays in (xs, cotangents)))
    yield from comparison.compare_rows("padding", results.as_draw(), comparison.target, [0], ", inputs between NaNs")


def sizes(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Other sizes, which do not divide a block."""
    for what, arguments in _sizes(comparison) if options.sizes is None else _listed(options.sizes):
        other = replace(comparison, arguments=arguments, exact=Float64Reference(comparison.reference, arguments))
        try:
            problem = mismatch(other)
            if problem:
                yield comparison.message_row("sizes", what, problem)
            else:
                yield from other.compare_rows(
                    "sizes", other.run_kernel(other.main), other.target, suffix=f" for {what}"
                )
        except KernelError as error:
            yield comparison.message_row("sizes", what, f"refused, {error}", passed=True)


def donation(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """Inputs that may be overwritten, and others that may not."""
    given = comparison.arrays(comparison.main, 0)
    before = [np.array(x) for x in given[1]]
    computed(comparison.side.run, *given)
    changed = [
        name
        for name, x, was in zip(comparison.arguments.names, given[1], before, strict=True)
        if np.asarray(x).tobytes() != was.tobytes()
    ]
    message = f"{', '.join(changed)} changed: the kernel writes into its arguments" if changed else ""
    yield comparison.message_row("donation", "inputs", message)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        results = comparison.first_results(jax.jit(comparison.side.run, donate_argnums=(1, 2)))
    yield from comparison.compare_rows("donation", results, comparison.target, [0], ", inputs donated")


def shard(comparison: KernelComparison, options: CheckOptions) -> Iterator[Row]:
    """On several devices."""
    if options.shard is not None:
        side = replace(comparison.side, function=options.shard(comparison.kernel))
        results = comparison.first_results(jax.jit(side.run))
        yield from comparison.compare_rows("shard", results, comparison.target, [0], ", sharded")


def run(comparison: KernelComparison, options: CheckOptions, *, is_first: bool) -> Iterator[Row]:
    """All checks of a kernel in one dtype, less those to be skipped."""
    problem = _problem(comparison)
    if problem and comparison.arguments.differentiated:
        arguments = comparison.arguments.undifferentiated()
        plain = replace(comparison, arguments=arguments, exact=Float64Reference(comparison.reference, arguments))
        if not _problem(plain):
            yield comparison.message_row("gradients", "the gradient", problem)
            comparison, problem = plain, ""
    if problem:
        yield comparison.message_row("outputs", "the kernel", problem)
        return
    for name, check in [*IN_EVERY_DTYPE, *(IN_ONE_DTYPE if is_first else ())]:
        if name not in options.skip:
            try:
                yield from check(comparison, options)
            except KernelError as error:
                yield comparison.message_row(name, "the kernel", str(error))


def _problem(comparison: KernelComparison) -> str:
    """Why a kernel cannot be compared at all: it raises, or returns something else."""
    try:
        problem = mismatch(comparison)
        if not problem:
            comparison.run_kernel(comparison.main)
    except KernelError as error:
        return str(error)
    return problem


def mismatch(comparison: KernelComparison) -> str:
    """Describes how the kernel's outputs differ from the reference's in names and shapes; empty if they do not."""
    got, wanted = comparison.outputs, comparison.reference_outputs
    shapes = [[y.shape for y in (*side.floats, *side.others)] for side in (got, wanted)]
    if got.names == wanted.names and shapes[0] == shapes[1]:
        return ""
    return f"the kernel returns {got.listed()}, and the reference {wanted.listed()}"


def _traced(function: Callable[..., Any], *args: Any) -> JaxprFunction:
    try:
        return stage(function, *args)
    except Exception as error:
        raise KernelError(error) from error


def _mapped(comparison: KernelComparison, **kept: Sequence[int]) -> Results:
    """All draws, where only some inputs or outputs count."""
    return computed(jax.jit(partial(comparison.side.mapped, **kept)), *comparison.arrays(comparison.main))


def _sizes(comparison: KernelComparison) -> Iterator[tuple[str, Arguments]]:
    """Arguments in which every dimension of one size has another, as the reference accepts it: some blocks more and a
    last one that is not full, or one entry less."""
    for size in comparison.arguments.sizes():
        for new in (2 * size + 1, size - 1):
            arguments = comparison.arguments.resized(size, new)
            try:
                Implementation(comparison.reference, arguments).outputs(comparison.dtype)
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
