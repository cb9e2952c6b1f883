"""The checks, by name; each returns rows of the report."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxfn._check.arguments import Arguments
from jaxfn._check.modes import Batching, PartialDerivative, batchings
from jaxfn._check.partition import sharding_rule_problems
from jaxfn._check.staging import JaxprFunction, is_same_output, stage
from jaxfn._gradcheck.report.progress import Progress
from jaxfn._kernelcheck.arguments import Arrays, nan_padded, resized
from jaxfn._kernelcheck.arguments import sizes as sizes_of
from jaxfn._kernelcheck.comparison import KernelComparison, Samples, combined
from jaxfn._kernelcheck.error_bounds import ExpectedArray
from jaxfn._kernelcheck.implementations import BatchedImplementation, Implementation, KernelError
from jaxfn._kernelcheck.report import KernelcheckRow

Check = Callable[[KernelComparison, "CheckOptions"], Iterator[KernelcheckRow]]
CustomCheck = Callable[[Callable[..., Any], Callable[..., Any], tuple[Any, ...]], Any]  # a message, or None


@dataclass(frozen=True)
class CheckOptions:
    """The options of the checks; see `kernelcheck`."""

    sizes: Sequence[Arguments] | None  # arguments of other sizes; `None` to derive them from the arguments
    shard: Callable[[Callable[..., Any]], Callable[..., Any]] | None  # maps a function to a sharded one
    custom: Mapping[str, CustomCheck]  # checks of the caller, by name
    skip: frozenset[str]  # the names of the checks to skip
    allow_zero_gradients: bool  # whether a gradient of the reference may be zero


def values(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares outputs and gradients."""
    yield from comparison.compare("outputs", comparison.plain, comparison.expected)


def vacuous(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Checks that gradients of zero would fail."""
    differentiated, names = comparison.arguments.differentiated, comparison.gradient_names()
    for i, name in zip(differentiated, names, strict=True):
        expected = comparison.expected[name]
        is_zero = expected.exact.size and expected.compare(np.zeros(expected.exact.shape), comparison.factor).passed
        if not is_zero:
            yield comparison.message("vacuous", name, "")
        elif comparison.has_derivative[i]:
            message = (
                "is zero in the reference, or not larger than rounding errors: a kernel that returns zeros passes. "
                "Choose other inputs, exclude the argument by argnums=, or pass allow_zero_gradients=True."
            )
            yield comparison.message("vacuous", name, message, passed=options.allow_zero_gradients)
        else:
            yield comparison.message("vacuous", name, "is zero: the reference has no such derivative", passed=True)


def determinism(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares two runs of one executable."""
    again = comparison.run(comparison.main)
    yield from comparison.compare_runs(", compiled", comparison.plain, again)


def eager_determinism(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares two eager runs."""
    again = comparison.first_results(comparison.implementation.run)
    yield from comparison.compare_runs(", eagerly", comparison.eager, again, [0])


def undifferentiated(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares outputs without differentiation, which a rule may compute by other code."""
    kernel = replace(comparison.implementation, arguments=replace(comparison.arguments, chosen=frozenset()))
    results = comparison.results(jax.jit(kernel.mapped), *comparison.arrays(comparison.main))
    yield from comparison.compare("undifferentiated", results, comparison.expected)


def jit(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares eager results."""
    yield from comparison.compare("jit", comparison.eager, comparison.expected, [0], " eagerly")


def vmap(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results under `jax.vmap`: of the gradient along the first axis, and of the kernel in each `Batching`."""
    fixed, xs, cotangents = comparison.arrays(comparison.main)
    run = jax.jit(jax.vmap(comparison.implementation.run, in_axes=(None, 0, 0)))
    results = comparison.results(run, fixed, xs, cotangents)
    yield from comparison.compare("vmap", results, comparison.expected, suffix=" along axis 0")
    for batching in batchings(comparison.arguments.owners)[1:]:
        yield from _batched(comparison, batching)


def _batched(comparison: KernelComparison, batching: Batching) -> Iterator[KernelcheckRow]:
    arguments = comparison.arguments
    samples = Samples(batching.items(comparison.main.xs), comparison.main.cotangents)
    expected = comparison.expect(samples)
    fixed, xs, cotangents = comparison.arrays(samples)
    kernel = BatchedImplementation(comparison.kernel, arguments, batching)
    results = comparison.results(jax.jit(kernel.run), fixed, batching.inputs(xs), cotangents)
    for i, name in zip(arguments.differentiated, comparison.gradient_names(), strict=True):
        axis, gradient = batching.axes[i], results[name]
        results[name] = gradient[None] if axis is None else np.moveaxis(gradient, axis, 0)
        expected[name] = expected[name].summed() if axis is None else expected[name]
    yield from comparison.compare("vmap", results, expected, suffix=f" {batching.condition(arguments.names)}")


def undefined(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares gradients with one undefined cotangent."""
    for part in filter(lambda part: part.is_undefined, comparison.parts):
        yield from _part("undefined", comparison, part)


def subsets(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares gradients of one input at a time, unless they are computed by the same eqns as all together."""
    args = comparison.arrays(comparison.main, 0)

    def gradients(part: PartialDerivative | None, *args: Any) -> Arrays:
        return comparison.implementation.run(*args, part=part)[2]

    whole = _staged(partial(gradients, None), *args)
    for part in filter(lambda part: not part.is_undefined, comparison.parts):
        alone = _staged(partial(gradients, part), *args)
        if is_same_output(alone, whole, part.inputs[0]):
            yield comparison.message("subsets", f"gradient {part.condition}", "")
        else:
            yield from _part("subsets", comparison, part)


def _part(check: str, comparison: KernelComparison, part: PartialDerivative) -> Iterator[KernelcheckRow]:
    """Compares the results with a part of the gradients, for all samples."""
    main = comparison.main
    cotangents = [ct if i in part.outputs else 0 * ct for i, ct in enumerate(main.cotangents)]
    expected = comparison.expect(Samples(main.xs, cotangents) if part.is_undefined else main)
    run = jax.jit(partial(comparison.implementation.mapped, part=part))
    results = comparison.results(run, *comparison.arrays(main), inputs=part.inputs)
    yield from comparison.compare(check, results, expected, suffix=f", {part.condition}")


def scales(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results for scaled inputs."""
    for scale in _SCALES:
        samples = comparison.sample([scale * value for value in comparison.arguments.values])
        # Nothing refers to the arrays of one scale while those of the next are computed.
        yield from comparison.compare(
            "scales",
            comparison.run(samples),
            combined(comparison.expect(samples), comparison.expected, ExpectedArray.with_errors_of),
            suffix=f", inputs times {scale:g}",
            only_overflow=scale > 1,
        )


def constants(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results for zeros, and for one number everywhere."""
    values = comparison.arguments.values
    same = [np.full_like(value, value.flat[0] if value.size else 0) for value in values]
    for what, inputs in (("zero", [np.zeros_like(value) for value in values]), ("constant", same)):
        samples = comparison.sample(inputs)
        yield from comparison.compare(
            "constants",
            comparison.run(samples),
            combined(comparison.expect(samples), comparison.expected, ExpectedArray.with_equal_inputs),
            suffix=f", inputs {what}",
        )


def padding(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results for inputs surrounded by NaNs in memory, to detect reads out of bounds."""
    fixed, xs, cotangents = comparison.arrays(comparison.main, 0)
    padded = ([nan_padded(x) for x in arrays] for arrays in (xs, cotangents))
    results = comparison.first_results(comparison.implementation.run, fixed, *padded)
    yield from comparison.compare("padding", results, comparison.expected, [0], ", inputs between NaNs")


def sizes(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results for sizes that are not a multiple of a block."""
    for what, arguments in _sizes(comparison) if options.sizes is None else _listed(options.sizes):
        other = comparison.with_arguments(arguments)
        try:
            problem = mismatch(other)
            if problem:
                yield comparison.message("sizes", what, problem)
            else:
                yield from other.compare("sizes", other.run(other.main), other.expected, suffix=f" for {what}")
        except KernelError as error:
            yield comparison.message("sizes", what, f"not supported: {error}", passed=True)


def donation(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Checks that arguments keep their values, and compares results for donated arguments."""
    arrays = comparison.arrays(comparison.main, 0)
    before = [np.array(x) for x in arrays[1]]
    comparison.results(comparison.implementation.run, *arrays)
    changed = [
        name
        for name, x, was in zip(comparison.arguments.names, arrays[1], before, strict=True)
        if np.asarray(x).tobytes() != was.tobytes()
    ]
    message = f"{', '.join(changed)} changed: the kernel writes into its arguments" if changed else ""
    yield comparison.message("donation", "inputs", message)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        results = comparison.first_results(jax.jit(comparison.implementation.run, donate_argnums=(1, 2)))
    yield from comparison.compare("donation", results, comparison.expected, [0], ", inputs donated")


def shard(comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    """Compares results on several devices."""
    if options.shard is not None:
        kernel = replace(comparison.implementation, function=options.shard(comparison.kernel))
        results = comparison.first_results(jax.jit(kernel.run))
        yield from comparison.compare("shard", results, comparison.expected, [0], ", sharded")
        for problem in sharding_rule_problems(lambda: comparison.first_results(comparison.implementation.run)):
            yield comparison.message("shard", "the sharding rule", problem)


def run_checks(
    comparison: KernelComparison, options: CheckOptions, progress: Progress, *, is_first: bool
) -> Iterator[KernelcheckRow]:
    """Runs all checks of a kernel in one dtype, except those to skip."""
    problem = _problem(comparison)
    if problem and comparison.arguments.differentiated:
        plain = comparison.with_arguments(replace(comparison.arguments, chosen=frozenset()))
        if not _problem(plain):
            yield comparison.message("gradients", "the gradient", problem)
            comparison, problem = plain, ""
    if problem:
        yield comparison.message("outputs", "the kernel", problem)
        return
    plain = [("outputs", values), ("determinism", determinism), *([("determinism", eager_determinism)] * is_first)]
    checks = [*plain, *IN_EVERY_DTYPE, *(IN_ONE_DTYPE if is_first else ())]
    progress.expect(len(checks))
    is_right = True
    for number, (name, check) in enumerate(checks):
        if number >= len(plain) and not is_right:  # every other check would fail too
            return
        for row in _rows(name, check, comparison, options) if name not in options.skip else ():
            is_right &= row.passed
            yield row
        progress.advance(1)
    for name, check in options.custom.items() if is_first else ():
        if name not in options.skip:
            try:
                message = check(comparison.kernel, comparison.reference, comparison.first_inputs())
            except AssertionError as error:
                message = f"AssertionError: {error}"
            if not isinstance(message, (str, type(None))):
                raise TypeError(
                    f"kernelcheck: the check {name!r} returned {type(message).__name__}, expected a message or None"
                )
            yield comparison.message(name, "the kernel", message or "")


def _rows(name: str, check: Check, comparison: KernelComparison, options: CheckOptions) -> Iterator[KernelcheckRow]:
    try:
        yield from check(comparison, options)
    except KernelError as error:
        yield comparison.message(name, "the kernel", str(error))


def _problem(comparison: KernelComparison) -> str:
    """Returns why a kernel cannot be compared: it raises, or returns other arrays; empty if it can."""
    try:
        problem = mismatch(comparison)
        _ = problem or comparison.plain  # runs the kernel
    except KernelError as error:
        return str(error)
    return problem


def mismatch(comparison: KernelComparison) -> str:
    """Describes how the kernel's outputs differ from the reference's in names and shapes; empty if they do not."""
    got, expected = comparison.outputs, comparison.reference_outputs
    shapes = [[[y.shape for y in of_kind] for of_kind in (types.floats, types.others)] for types in (got, expected)]
    if got.names == expected.names and shapes[0] == shapes[1]:
        return ""
    return f"the kernel returns {got.listed()}, and the reference {expected.listed()}"


def _staged(function: Callable[..., Any], *args: Any) -> JaxprFunction:
    try:
        return stage(function, *args)
    except Exception as error:
        raise KernelError(error) from error


def _sizes(comparison: KernelComparison) -> Iterator[tuple[str, Arguments]]:
    """Yields arguments with each size changed, if the reference accepts that: to `2 * n + 1`, or else to `n - 1`.

    Large arrays do not become larger, if the reference accepts the other size.
    """
    is_large = comparison.draws < comparison.max_draws
    for size in sizes_of(comparison.arguments):
        for new in (size - 1, 2 * size + 1) if is_large else (2 * size + 1, size - 1):
            arguments = resized(comparison.arguments, size, new)
            try:
                Implementation(comparison.reference, arguments).outputs(comparison.dtype)
            except Exception:
                continue
            yield f"{size} made {new}", arguments
            break


def _listed(sizes: Sequence[Arguments]) -> Iterator[tuple[str, Arguments]]:
    for arguments in sizes:
        yield "shapes " + ", ".join(str(value.shape) for value in arguments.values), arguments


_SCALES = (1e-3, 1e3)
# The checks in every dtype, which use executables that exist already, and those in the first dtype only.
IN_EVERY_DTYPE: list[tuple[str, Check]] = [
    ("scales", scales),
    ("constants", constants),
]
IN_ONE_DTYPE: list[tuple[str, Check]] = [
    ("vacuous", vacuous),
    ("undifferentiated", undifferentiated),
    ("jit", jit),
    ("padding", padding),
    ("vmap", vmap),
    ("undefined", undefined),
    ("subsets", subsets),
    ("sizes", sizes),
    ("donation", donation),
    ("shard", shard),
]
NAMES = ("outputs", "gradients", "determinism", *(name for name, _ in (*IN_EVERY_DTYPE, *IN_ONE_DTYPE)))
