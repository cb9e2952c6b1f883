"""Comparison of a written module with the converted torch code: outputs, gradients and second derivatives."""

from __future__ import annotations

import enum
import itertools
import linecache
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils import _pytree as torch_tree

from jaxfn._jaxpr import all_eqns
from jaxfn._port.source.module import Module
from jaxfn._port.source.observe import is_function_class, is_user_function
from jaxfn._port.source.samples import Example, subsets, variations
from jaxfn._port.source.typecheck import numpy_dtype
from jaxfn._torch.values.arrays import to_jax, to_torch
from jaxfn._torch.values.errors import TranslationError

_RTOL = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 3e-5, "complex64": 3e-5}
_RTOL_DOUBLE = 1e-9
# The largest relative difference in single precision that may be rounding, if the results in double precision agree.
_MAX_ROUNDING = 1e-2
EXAMPLE = "the example"
# A boolean index, a condition or a number, an array of NumPy, and an index of a list.
_NEEDS_VALUES = (
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_PATH = ", rewritten for JAX>"
# Compilation without optimization, which the comparison does not need.
_COMPILER_OPTIONS: Any = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Difference(NamedTuple):
    """A difference between the written module and the converted code.

    Attributes:
      quantity: 0 for outputs, 1 for gradients, 2 for second derivatives.
      group: The group of samples in which it was found.
      sample: The sample.
      reads_values: Whether it is an error of JAX, that a value is needed which is known outside `jax.jit` only.
    """

    quantity: int
    group: Group
    text: str
    sample: Example
    reads_values: bool = False


class Group(NamedTuple):
    """Samples of one shape and dtype.

    Attributes:
      example: An example with these shapes and Python values.
      wanted: The indices of the leaves that are differentiated.
      x64: Whether x64 is on.
      is_double: Whether the example's arrays are in double precision.
      varies: Whether other values than the example's are compared.
      highest: The highest order of derivatives that is compared.
    """

    what: str
    example: Example
    wanted: tuple[int, ...]
    x64: bool
    is_double: bool
    varies: bool
    highest: int = 2


def load(module: Module, name: str) -> types.ModuleType:
    """Executes a module's text."""
    path = f"<{name}{_PATH}"
    lines = module.text.splitlines(keepends=True)
    linecache.cache[path] = (len(module.text), None, lines, path)
    loaded = types.ModuleType(f"_rewritten_{name}")
    sys.modules[loaded.__name__] = loaded  # Dataclasses look up their module.
    try:
        exec(compile(module.text, path, "exec"), vars(loaded))
    finally:
        del sys.modules[loaded.__name__]
    return loaded


def port_value(value: Any, module: types.ModuleType) -> Any:
    """Returns a static argument of the torch code as the written module takes it."""
    if isinstance(value, torch.dtype):
        return numpy_dtype(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.Size):
        return tuple(value)
    if isinstance(value, enum.Enum) and hasattr(module, type(value).__name__):
        return getattr(module, type(value).__name__)(value.value)
    if is_user_function(value) or is_function_class(value):
        return getattr(module, value.__name__)
    if type(value).__module__.partition(".")[0] == "torch" or (getattr(value, "__module__", None) or "").startswith(
        "torch"
    ):
        raise TranslationError(
            f"the source cannot be rewritten: an argument is a {type(value).__name__} of torch. Pass its tensors"
        )
    return value


def make_groups(examples: Sequence[Example], sizes: Sequence[Example], reads_values: bool) -> Iterator[Group]:
    """Yields the groups of samples; with `reads_values`, each of which is traced, fewer values and derivatives."""
    highest = 1 if reads_values else 2
    for example in examples:
        inputs = tuple(example.differentiable)
        yield Group(EXAMPLE, example, inputs, False, False, True)
        for wanted in subsets(inputs):
            if wanted and wanted != inputs:
                what = f"the derivative by input {', '.join(map(str, wanted))} alone"
                yield Group(what, example, wanted, False, False, False, highest)
        yield Group("x64", example, inputs, True, False, False, highest)
        doubled = example.map(in_double, example.inexact)
        yield Group("double precision", doubled, inputs, True, True, False, highest)
    for example in sizes:
        yield Group("another size", example, tuple(example.differentiable), False, False, not reads_values, highest)


def in_double(x: Any) -> Any:
    """Returns an array in double precision."""
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


@dataclass(eq=False)
class Proof:
    """Compares written modules with converted code.

    Attributes:
      oracle: The converted code, a function of arrays.
      torch_code: The torch code, with which code that reads values is compared in all groups but that of the example,
        as each would need another trace of its conversion; `None` if it draws random numbers.
      name: The name of the function in the written modules.
      key_name: The name of the parameter of the converted code that takes a random key.
      constants: Numbers at which the code may have ties.
      is_valid: Whether torch accepts an example.
      methods: Which of `jvp` and `vmap` the Function defines.
      rounds: Whether the code computes in single precision if its inputs are in double precision.
      reads_values: Whether the code reads the values of tensors, so that neither side is compiled, and loops may not
        end at NaN and infinity.
    """

    oracle: Callable[..., Any]
    torch_code: Callable[..., Any] | None
    name: str
    key_name: str
    constants: Sequence[float]
    is_valid: Callable[[Example], bool]
    methods: Sequence[str]
    rounds: bool
    reads_values: bool = False
    _samples: dict[int, list[tuple[str, Example]]] = field(default_factory=dict)
    _expected: dict[tuple[int, int], _Results | _OriginalResults | Exception] = field(default_factory=dict)

    def order(self, group: Group) -> int:
        """Returns the highest order of derivatives that the converted code has, up to 2; -1 if it cannot be called."""
        orders = range(group.highest, -1, -1)
        return next((order for order in orders if self.oracle_error(group, order) is None), -1)

    def oracle_error(self, group: Group, order: int) -> Exception | None:
        """Returns the error of the converted code's derivatives of an order."""
        found = self._oracle_results(group, order)
        return found if isinstance(found, Exception) else None

    def first_difference(self, module: Module, groups: Sequence[Group], order: int) -> Difference | None:
        """Returns the first difference in derivatives up to an order; `None` if there is none."""
        loaded = load(module, self.name)
        port = getattr(loaded, self.name)
        port = port.apply if isinstance(port, type) else port
        for group in groups:
            with warnings.catch_warnings(), jax.enable_x64(group.x64):
                warnings.simplefilter("ignore")
                found = self._compare(group, port, loaded, module.draws, min(order, self.order(group)))
            if self.reads_values:
                jax.clear_caches()  # JAX keeps the program of each operation that runs outside `jit`.
            if found is not None:
                return found
        return None

    def _oracle_results(self, group: Group, order: int) -> _Results | _OriginalResults | Exception:
        """Returns the results of the converted code, which all written modules are compared with, or its error."""
        if (key := (id(group), order)) not in self._expected:
            uses_torch = self.reads_values and group.what != EXAMPLE
            with warnings.catch_warnings(), jax.enable_x64(group.x64):
                warnings.simplefilter("ignore")
                try:
                    if self.torch_code is not None and uses_torch:
                        with suppress(Exception):  # The conversion says whether the group can be compared.
                            self._expected[key] = _OriginalResults(self.torch_code, order, group)
                    if key not in self._expected:
                        self._expected[key] = _Results(self._oracle_program(group), order, group.example)
                except Exception as error:  # User code and JAX raise anything.
                    self._expected[key] = error
        return self._expected[key]

    def _oracle_program(self, group: Group) -> _Program:
        return _Program(self.oracle, group.example, group.wanted, {self.key_name: jax.random.key(7)}, self.reads_values)

    def _compare(
        self, group: Group, port: Callable[..., Any], loaded: Any, draws: bool, order: int
    ) -> Difference | None:
        if order < 0:
            return None
        options = {"key": jax.random.key(7)} if draws else {}
        statics = [i for i in range(len(group.example.leaves)) if i not in group.example.arrays]
        ported = group.example.map(lambda x: port_value(x, loaded), statics)
        ours = _Program(port, ported, group.wanted, options, self.reads_values)
        theirs = self._oracle_results(group, order)
        assert not isinstance(theirs, Exception)
        try:
            results = _Results(ours, order, group.example)
        except Exception as last:  # User code and JAX raise anything.
            errors = ((i, ours.error(group.example, i)) for i in range(order))
            i, error = next(((i, error) for i, error in errors if error is not None), (order, last))
            text = f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}{_written_line(error)}"
            return Difference(i, group, text, group.example, isinstance(error, _NEEDS_VALUES))
        if group.what == EXAMPLE and order == 1 and ours.error(group.example, 2) is None:
            return Difference(2, group, "the converted Function has none", group.example)
        if isinstance(theirs, _Results) and group.what == EXAMPLE:
            for method in self.methods:
                # One program, which is freed, not one for each operation, which JAX keeps.
                run, arrays = getattr(_Program, f"outputs_by_{method}"), ours.arrays(group.example)
                by_method = [_once(partial(run, x), arrays, x.is_eager) for x in (ours, theirs.program)]
                if (text := _difference(*by_method)) is not None:
                    return Difference(0, group, f"{text}, by {method}", group.example)
        is_finite_only = results.is_finite_only or theirs.is_finite_only
        for what, sample in self.samples_of(group):
            if is_finite_only and what in ("at NaN", "at infinity"):
                continue
            for quantity, (a, b) in enumerate(zip(results.at(sample), theirs.at(sample), strict=True)):
                text = _difference(a, b, _RTOL["float32"] if group.is_double and self.rounds else 0)
                if text is not None and not (
                    not group.is_double
                    and _difference(a, b, _MAX_ROUNDING) is None
                    and self._agree_in_double(sample, group, ours, order, quantity)
                ):
                    return Difference(quantity, group, f"{text}, {what}", sample)
        return None

    def samples_of(self, group: Group) -> list[tuple[str, Example]]:
        """Returns the samples of a group that torch accepts."""
        if id(group) not in self._samples:
            found = list(variations(group.example, self.constants))[: None if group.varies else 1]
            found = [x for x in found if not self.reads_values or x[0] not in ("at NaN", "at infinity")]
            self._samples[id(group)] = [x for i, x in enumerate(found) if not i or self.is_valid(x[1])]
        return self._samples[id(group)]

    def _agree_in_double(self, sample: Example, group: Group, ours: _Program, order: int, quantity: int) -> bool:
        """Whether a difference vanishes in double precision, so that it is rounding."""
        doubled = group._replace(example=sample.map(in_double, sample.inexact))
        with jax.enable_x64(True):
            try:
                both = (ours, self._oracle_program(doubled))
                found, expected = (_Results(x, order, doubled.example).at(doubled.example) for x in both)
            except Exception:  # The code may not accept double precision.
                return False
        return _difference(found[quantity], expected[quantity], 1e-7) is None


class _Program(NamedTuple):
    """A function's outputs, gradients and second derivatives as a function of its arrays."""

    function: Callable[..., Any]
    example: Example
    wanted: Sequence[int]
    options: dict[str, Any]
    is_eager: bool

    def error(self, example: Example, order: int) -> Exception | None:
        """Returns the error of derivatives up to an order, as JAX traces them, or runs them."""
        try:
            _ = _Results(self, order, example)
        except Exception as error:
            return error
        return None

    def arrays(self, example: Example) -> list[jax.Array]:
        return [jnp.asarray(example.leaves[i]) for i in example.arrays]

    def run(self, arrays: Sequence[jax.Array], order: int) -> list[list[jax.Array]]:
        """Returns lists of outputs, gradients and second derivatives, up to an order."""
        leaves: list[Any] = list(self.example.leaves)
        for i, x in zip(self.example.arrays, arrays, strict=True):
            leaves[i] = x

        def outputs(wanted: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            """Returns the outputs that have a derivative, and the others."""
            full = list(leaves)
            for i, x in zip(self.wanted, wanted, strict=True):
                full[i] = x
            args, kwargs = self.example.arguments(full)
            returned = jax.tree_util.tree_leaves(self.function(*args, **kwargs, **self.options))
            arrays = [jnp.asarray(x) for x in returned]
            moving = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.inexact)]
            return moving, [x for x in arrays if not jnp.issubdtype(x.dtype, jnp.inexact)]

        wanted = [leaves[i] for i in self.wanted]
        if order == 0 or not wanted:
            return [list(itertools.chain(*outputs(wanted)))]

        def gradients(wanted: list[jax.Array], weights: list[jax.Array]) -> list[jax.Array]:
            return jax.vjp(outputs, wanted, has_aux=True)[1](weights)[0]

        values, pullback, others = jax.vjp(outputs, wanted, has_aux=True)
        weights = [_weights(x, i) for i, x in enumerate(values)]
        results = [[*values, *others], pullback(weights)[0]]
        if order == 1:
            return results
        found, second = jax.vjp(gradients, wanted, weights)
        by_inputs, by_weights = second([_weights(x, i + 20) for i, x in enumerate(found)])
        return [*results, [*by_inputs, *by_weights]]

    def outputs_by_jvp(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the tangents of the outputs, in forward mode."""

        def outputs(wanted: list[jax.Array]) -> list[jax.Array]:
            full = dict(zip(self.example.arrays, arrays, strict=True)) | dict(zip(self.wanted, wanted, strict=True))
            return self.run([full[i] for i in self.example.arrays], 0)[0]

        wanted = [x for i, x in zip(self.example.arrays, arrays, strict=True) if i in self.wanted]
        tangents = jax.jvp(outputs, (wanted,), ([_weights(x, i) for i, x in enumerate(wanted)],))[1]
        return [x for x in tangents if x.dtype != jax.dtypes.float0]

    def outputs_by_vmap(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns the outputs of a batch."""
        batched = [jnp.stack([x, x[::-1] if x.ndim else x]) for x in arrays]
        return jax.vmap(partial(self.run, order=0))(batched)[0]


def _written_line(error: Exception) -> str:
    """Returns the innermost line of the written module that an error passed, as part of a message."""
    frames = [x for x in traceback.extract_tb(error.__traceback__) if x.filename.endswith(_PATH)]
    return f", in the written line `{frames[-1].line}`" if frames else ""


def _weights(x: jax.Array, seed: int) -> jax.Array:
    numbers = np.random.default_rng(seed).uniform(0.5, 1.5, x.shape)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        numbers = numbers * np.exp(1j * np.arange(x.size).reshape(x.shape))
    return jnp.asarray(numbers, x.dtype)


class _Results:
    """The results of a program for samples of one shape, which is traced once, or run without compilation.

    Attributes:
      is_finite_only: Whether it is defined for finite numbers only.

    Raises:
      Exception: What the program raises for the example.
    """

    def __init__(self, program: _Program, order: int, example: Example) -> None:
        self.program = program
        self._found: dict[int, tuple[Example, list[list[np.ndarray]]]] = {}
        self._run: Any = None
        run = partial(program.run, order=order)
        if program.is_eager:
            self._run, self.is_finite_only = _eagerly(run), True
            _ = self.at(example)
        else:
            self._traced: Any = jax.jit(run).trace(program.arrays(example))
            self.is_finite_only = any(map(_is_finite_only, all_eqns(self._traced.jaxpr.jaxpr)))

    def at(self, sample: Example) -> list[list[np.ndarray]]:
        """Returns lists of outputs, gradients and second derivatives."""
        if id(sample) not in self._found:
            if self._run is None:
                self._run, self._traced = _compile(self._traced), None
            results = self._run(self.program.arrays(sample))
            self._found[id(sample)] = sample, [list(map(np.asarray, x)) for x in results]
        return self._found[id(sample)][1]


class _OriginalResults:
    """The results of torch code, up to gradients."""

    is_finite_only = True

    def __init__(self, code: Callable[..., Any], order: int, group: Group) -> None:
        self._code, self._order, self._group = code, order, group
        self._first = self._results(group.example)

    def at(self, sample: Example) -> list[list[np.ndarray]]:
        """Returns lists of outputs and gradients."""
        return self._first if sample is self._group.example else self._results(sample)

    def _results(self, sample: Example) -> list[list[np.ndarray]]:
        args, kwargs, inputs = sample.in_torch(self._group.wanted)
        outputs = [x for x in torch_tree.tree_leaves(self._code(*args, **kwargs)) if x is not None]
        tensors = [x if isinstance(x, torch.Tensor) else torch.tensor(x) for x in outputs]
        moving = [x for x in tensors if x.is_floating_point() or x.is_complex()]
        others = [x for x in tensors if not (x.is_floating_point() or x.is_complex())]
        results = [[_values(x) for x in (*moving, *others)]]
        if self._order and inputs:
            # JAX's gradients of complex numbers are the conjugates of torch's.
            weights = [to_torch(_weights(to_jax(x), i)).conj() for i, x in enumerate(moving)]
            pairs = [(x, w) for x, w in zip(moving, weights, strict=True) if x.requires_grad]
            starts, cotangents = [x for x, _ in pairs], [w for _, w in pairs]
            unused = [None] * len(inputs)
            found = torch.autograd.grad(starts, inputs, cotangents, allow_unused=True) if pairs else unused
            gradients = zip(inputs, found, strict=True)
            results.append([_values(torch.zeros_like(x) if g is None else g.conj()) for x, g in gradients])
        return results


def _values(x: torch.Tensor) -> np.ndarray:
    return np.asarray(to_jax(x))


def _once(function: Callable[..., Any], arrays: Sequence[jax.Array], is_eager: bool) -> Any:
    """Calls a function, compiled unless it is to run eagerly."""
    if is_eager:
        return _eagerly(function)(arrays)
    return _compile(jax.jit(function).trace(arrays))(arrays)


def _compile(traced: Any) -> Any:
    """Compiles a traced function without optimization."""
    return traced.lower().compile(compiler_options=_COMPILER_OPTIONS)


def _eagerly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that runs one operation after the other, and compiles none of the functions inside."""

    def run(arrays: Sequence[jax.Array]) -> Any:
        with jax.disable_jit():
            return function(arrays)

    return run


def _is_finite_only(eqn: Any) -> bool:
    """Whether an operation is a conversion to integers, or an iteration of LAPACK, which may not end at infinity."""
    if eqn.primitive.name in ("eig", "eigh", "schur", "svd"):
        return True
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.issubdtype(old, jnp.inexact) and jnp.issubdtype(new, jnp.integer)


def _difference(ours: Sequence[Any], expected: Sequence[Any], rtol: float = 0) -> str | None:
    """Returns how two lists of arrays differ; `None` if they agree."""
    if len(ours) != len(expected):
        return f"{len(ours)} arrays instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(map(np.asarray, ours), map(np.asarray, expected), strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"array {i} is {a.dtype}{list(a.shape)} instead of {b.dtype}{list(b.shape)}"
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            if not np.array_equal(a, b):
                return f"array {i} has other integers"
            continue
        kind = np.complex128 if b.dtype.kind == "c" else np.float64
        x, y = a.astype(kind), b.astype(kind)
        with np.errstate(all="ignore"):
            is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
            finite = np.abs(y[np.isfinite(y)])
            relative = max(rtol, _RTOL.get(str(b.dtype), _RTOL_DOUBLE))
            allowed = relative * (np.abs(y) + (finite.max() if finite.size else 0))
            is_close = is_equal | (np.isfinite(x) & np.isfinite(y) & (np.abs(x - y) <= allowed))
        if not is_close.all():
            where = tuple(int(n) for n in np.argwhere(~is_close)[0])
            return f"array {i} is {x[where]:.6g} instead of {y[where]:.6g} at {list(where)}"
    return None
