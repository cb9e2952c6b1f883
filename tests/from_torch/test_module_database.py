"""Rows I1 and I2: the modules of torch's own database, converted, compared with torch on torch's own samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support.marks import cells, row, slow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what the samples try

import jaxfn  # noqa: E402
from tests.support.torch_internals import torch_internal  # noqa: E402

pytree: Any = torch.utils._pytree
DATABASE = {info.name: info for info in torch_internal("common_modules").module_db}

# Those whose operation has no translation.
UNSUPPORTED = {"nn.Bilinear", "nn.FractionalMaxPool2d", "nn.FractionalMaxPool3d", "nn.MultiLabelMarginLoss"}
NAMES = [name for name in DATABASE if name not in UNSUPPORTED]
# Which samples of each module, from 0 (the first) to 1 (the last): each in one dtype, as both have equal traces.
POSITIONS = {torch.float32: [0.5], torch.float64: [0.0, 1.0]}
# Compiling takes most of the time, and these programs run once.
QUICK = {"xla_backend_optimization_level": 0}


@dataclasses.dataclass
class Sample:
    """A module that torch has called, and what came of it."""

    module: Any  # another one like it, which was not called
    arguments: Any
    differentiated: list[Any]
    outputs: list[Any]
    weights: list[Any]
    gradients: dict[str, Any]
    gradients_of_inputs: list[Any]
    buffers: dict[str, Any]


def tensors(value: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def copied(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def sampled_inputs(info: Any, dtype: Any) -> Iterator[tuple[Any, bool]]:
    """Inputs of a module, and whether it trains: some that lie far apart, in one mode and the other in turn."""
    for modes in [(True,), (False,)] if info.train_and_eval_differ else [(True, False)]:
        torch.manual_seed(1)
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=modes[0])
        inputs = [module_input for module_input in inputs if module_input.forward_input is not None]
        for i, index in enumerate(sorted({round(x * (len(inputs) - 1)) for x in POSITIONS[dtype]})):
            yield inputs[index], modes[(i + (dtype is torch.float32)) % len(modes)]


def called_by_torch(info: Any, module_input: Any, training: bool, dtype: Any) -> Sample:
    constructor = module_input.constructor_input

    def make() -> Any:
        torch.manual_seed(2)
        return info.module_cls(*copied(constructor.args), **copied(constructor.kwargs)).to(dtype).train(training)

    module, other = make(), make()
    # Each is a separate leaf: some samples have one tensor twice.
    arguments = pytree.tree_map_only(
        torch.Tensor,
        lambda x: x.detach().clone().requires_grad_(x.requires_grad),
        (module_input.forward_input.args, module_input.forward_input.kwargs),
    )
    if any(isinstance(x, torch.nn.UninitializedParameter) for x in module.parameters()):
        with pytest.raises(jaxfn.TranslationError, match="Call the module once in torch first"):
            jaxfn.from_torch(module)
        for one in (module, other):
            torch.manual_seed(3)
            one(*copied(arguments[0]), **copied(arguments[1]))
    differentiated = [x for x in tensors(arguments) if x.requires_grad]
    args, kwargs = copied(arguments)  # which it may write to
    outputs = tensors(other(*args, **kwargs))
    weights = [np.random.default_rng(i).standard_normal(y.shape) for i, y in enumerate(outputs)]
    parameters = {name: x for name, x in other.named_parameters() if x.requires_grad}
    pairs = [(y, torch.tensor(w, dtype=y.dtype)) for y, w in zip(outputs, weights, strict=True) if y.requires_grad]
    by = [*parameters.values(), *differentiated]
    gradients = [None] * len(by)
    if pairs:
        total = sum((y * w).sum() for y, w in pairs)
        gradients = torch.autograd.grad(total, by, allow_unused=True, materialize_grads=True)
    return Sample(
        module, arguments, differentiated, outputs, weights, dict(zip(parameters, gradients, strict=False)),
        list(gradients[len(parameters) :]), dict(other.named_buffers()),
    )  # fmt: skip


def called_by_jax(sample: Sample) -> tuple[Any, tuple[Any, ...]]:
    """A function for outputs, gradients and buffers, and its arguments."""
    net = jaxfn.from_torch(sample.module)
    are_inputs = [any(x is y for y in sample.differentiated) for x in tensors(sample.arguments)]
    arrays = [jnp.asarray(x.detach().numpy()) for x in tensors(sample.arguments)]

    def loss(parameters: Any, inputs: Any, buffers: Any, constants: Any) -> Any:
        values, others = iter(inputs), iter(constants)
        arrays_in_order = iter([next(values if is_input else others) for is_input in are_inputs])
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda _: next(arrays_in_order), sample.arguments)
        output, moved = net.apply(parameters, buffers, *args, **kwargs)
        leaves = jax.tree.leaves(output)
        terms = zip(leaves, sample.weights, sample.outputs, strict=True)
        total = sum((y * w.astype(y.dtype)).sum() for y, w, theirs in terms if theirs.requires_grad)
        return jnp.real(total * 1.0), (leaves, moved)

    inputs, constants = (
        [x for x, is_input in zip(arrays, are_inputs, strict=True) if is_input is kind] for kind in (True, False)
    )
    return jax.grad(loss, (0, 1), has_aux=True), (net.parameters, inputs, net.buffers, constants)


def close(ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    wanted = theirs.detach().numpy()
    finite = np.abs(wanted[np.isfinite(wanted)])
    scale = max(1.0, float(finite.max(initial=0)))
    assert ours.shape == wanted.shape and ours.dtype == jax.dtypes.canonicalize_dtype(wanted.dtype), what
    np.testing.assert_allclose(ours, wanted, rtol=10 * tolerance, atol=tolerance * scale, err_msg=what)


def compare(sample: Sample, results: Any, tolerance: float, what: str) -> None:
    (slopes, slopes_of_inputs), (outputs, moved) = results
    for ours, theirs in zip(outputs, sample.outputs, strict=True):
        close(ours, theirs, tolerance, f"{what}: an output")
    if any(y.requires_grad for y in sample.outputs):
        assert set(slopes) == set(sample.gradients)
        for name, theirs in sample.gradients.items():
            close(slopes[name], theirs, 10 * tolerance, f"{what}: {name}")
        for ours, theirs in zip(slopes_of_inputs, sample.gradients_of_inputs, strict=True):
            close(ours, theirs, 10 * tolerance, f"{what}: an input")
    for name, theirs in sample.buffers.items():
        close(moved[name], theirs, tolerance, f"{what}: {name}")


def check(name: str, dtype: Any) -> None:
    info = DATABASE[name]
    functions, operands, samples = [], [], []
    for module_input, training in sampled_inputs(info, dtype):
        what = f"{name} {module_input.desc} {'train' if training else 'eval'}"
        sample = called_by_torch(info, module_input, training, dtype)
        function, arguments = called_by_jax(sample)
        functions.append(function)
        operands.append(arguments)
        samples.append((sample, what))

    def all_of_them(operands: Any) -> Any:
        return [function(*arguments) for function, arguments in zip(functions, operands, strict=True)]

    results = jax.jit(all_of_them, compiler_options=QUICK)(operands)
    tolerance = 1e-10 if dtype is torch.float64 else 2e-5
    for (sample, what), result in zip(samples, results, strict=True):
        compare(sample, result, tolerance, what)


FIRST = ["nn.BatchNorm2d", "nn.Conv1d", "nn.GaussianNLLLoss", "nn.LazyConv1d", "nn.LPPool1d"]


@row("I1", "I2", "I4")
@cells("name", FIRST, NAMES)
def test_modules_in_single_precision(name: str) -> None:
    check(name, torch.float32)


@row("I1", "I2", "I4")
@slow
@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("name", NAMES)
def test_modules_in_double_precision(name: str) -> None:
    check(name, torch.float64)


def test_those_listed_are_in_the_database() -> None:
    assert {*UNSUPPORTED, *FIRST} <= set(DATABASE)
