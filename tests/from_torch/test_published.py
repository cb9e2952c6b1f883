"""Row H1 on Functions that other people published, unchanged.

Their code is not part of this project. The folder in the environment variable `JAXFN_WILD_SRC` holds the packages,
unpacked one folder each (`pip download --no-deps snntorch==1.0.0`, and so on: see `PACKAGES`); without it these
tests are skipped.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")

SOURCES = os.environ.get("JAXFN_WILD_SRC", "")
PACKAGES = ("snntorch==1.0.0", "entmax==1.3", "timm==1.0.31", "pytorch_revgrad==0.2.0", "pytorchcv==0.0.74")

pytestmark = pytest.mark.skipif(
    not SOURCES, reason=f"JAXFN_WILD_SRC does not name a folder with {', '.join(PACKAGES)} unpacked in it"
)


class Wild(NamedTuple):
    """A Function in a package, and its arguments.

    Attributes:
      package: the folder.
      module: the module in it.
      name: the name of the class.
      args: returns the arguments; NumPy arrays are inputs.
      wanted: the positions of the inputs that get gradients. Default: all floating ones.
      draws: whether it draws random numbers, so that only shapes are compared.
      error_line: the source line that the error names under `jit`, where values decide what Python code does.
    """

    package: str
    module: str
    name: str
    args: Callable[[], tuple[Any, ...]]
    wanted: tuple[int, ...] | None = None
    draws: bool = False
    error_line: str | None = None


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def uniform(*shape: int, low: float = 0.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)


def below(high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, high, shape)


def spikes(*shape: int) -> np.ndarray:
    return (uniform(*shape) < 0.3).astype(np.float32)


def covariance(*shape: int) -> np.ndarray:
    m = normal(*shape)
    return (m @ m.swapaxes(-1, -2) / shape[-1] + 0.3 * np.eye(shape[-1])).astype(np.float32)


def slayer(x: Any, grad: Any, out: Any) -> Any:
    """A surrogate derivative for snntorch's CustomSurrogate."""
    near = torch.abs(x) < 1.0
    return grad * torch.where(near, torch.exp(-2.0 * torch.abs(x)), torch.full_like(x, 0.1)) * (1 + out)


def reversible() -> tuple[Any, ...]:
    torch.manual_seed(0)
    f = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.Sigmoid())
    g = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1), torch.nn.Tanh())
    return normal(2, 4, 3, 3), f, g, *f.parameters(), *g.parameters()


def _surrogate(name: str, *statics: Any, **options: Any) -> Wild:
    return Wild("snntorch", "snntorch.surrogate", name, lambda: (normal(5, 4, scale=0.5), *statics), **options)


def _time(name: str, args: Callable[[], tuple[Any, ...]], **options: Any) -> Wild:
    return Wild("snntorch", "snntorch.functional.loss", f"SpikeTime.{name}", args, **options)


def _entmax(module: str, name: str, args: Callable[[], tuple[Any, ...]], **options: Any) -> Wild:
    return Wild("entmax", f"entmax.{module}", name, args, **options)


def _cv(module: str, name: str, args: Callable[[], tuple[Any, ...]], **options: Any) -> Wild:
    return Wild("pytorchcv", f"pytorchcv.models.{module}", name, args, **options)


WILD = [
    *(_surrogate(name) for name in ("StraightThroughEstimator", "Heaviside")),
    *(_surrogate(name, 25) for name in ("Triangular", "FastSigmoid", "ATan", "Sigmoid")),
    *(_surrogate(name, 1.3, 0.2) for name in ("SparseFastSigmoid", "SpikeRateEscape")),
    _surrogate("StochasticSpikeOperator", 0.1, 0.4, draws=True),
    _surrogate("CustomSurrogate", slayer),
    Wild(
        "snntorch",
        "snntorch.functional.quant",
        "StateQuant",
        lambda: (normal(3, 4, 2), np.linspace(-1.3, 1.2, 6, dtype=np.float32)),
        (0,),
    ),
    _time("FirstSpike", lambda: (spikes(6, 3, 4), "cpu")),
    _time("MultiSpike", lambda: (spikes(7, 2, 3), 3, "cpu")),
    _time("Tolerance", lambda: (uniform(4, 5, high=8), uniform(4, 5, high=8, seed=1), 2), wanted=(0,)),
    Wild("pytorch_revgrad", "pytorch_revgrad.functional", "RevGrad", lambda: (normal(4, 3), np.float32(0.6)), (0,)),
    _entmax("activations", "SparsemaxFunction", lambda: (normal(4, 8), -1, None)),
    _entmax("activations", "SparsemaxFunction", lambda: (normal(6, 9), -1, 3), error_line="if torch.any(unsolved):"),
    _entmax("activations", "Entmax15Function", lambda: (normal(3, 7, 4), 1, None)),
    _entmax("activations", "Entmax15Function", lambda: (normal(5, 9), -1, 3), error_line="if torch.any(unsolved):"),
    _entmax("root_finding", "EntmaxBisectFunction", lambda: (normal(4, 6), 1.5, -1, 40, True)),
    _entmax(
        "root_finding",
        "EntmaxBisectFunction",
        lambda: (normal(4, 6, scale=0.6), uniform(4, 1, low=1.2, high=2.2), -1, 40, True),
    ),
    _entmax("root_finding", "SparsemaxBisectFunction", lambda: (normal(4, 7, scale=0.4), -1, 50, True)),
    _entmax("root_finding", "NormmaxBisectFunction", lambda: (normal(4, 6, scale=0.7), 2, -1, 40)),
    _entmax("root_finding", "BudgetBisectFunction", lambda: (normal(3, 9, scale=0.8), 2, -1, 40)),
    _entmax("losses", "SparsemaxLossFunction", lambda: (normal(5, 6), below(6, 5), None)),
    _entmax("losses", "Entmax15LossFunction", lambda: (normal(5, 6), below(6, 5), None)),
    _entmax("losses", "EntmaxBisectLossFunction", lambda: (normal(4, 7), below(7, 4), 1.6, 40)),
    _entmax("losses", "NormmaxBisectLossFunction", lambda: (normal(4, 5, scale=0.4), below(5, 4), 2, 40)),
    *(
        Wild("timm", "timm.layers.activations_me", name, lambda: (normal(4, 6, scale=2.5),))
        for name in ("SwishAutoFn", "MishAutoFn", "HardSigmoidAutoFn", "HardSwishAutoFn", "HardMishAutoFn")
    ),
    _cv(
        "shakeshakeresnet_cifar",
        "ShakeShake",
        lambda: (normal(4, 3, 2, 2), normal(4, 3, 2, 2, seed=1), uniform(4, 1, 1, 1)),
        wanted=(0, 1),
        draws=True,
    ),
    _cv(
        "shakedropresnet_cifar",
        "ShakeDrop",
        lambda: (normal(4, 3, 2, 2), np.zeros((), np.float32), uniform(4, 1, 1, 1, low=-1)),
        wanted=(0,),
        draws=True,
    ),
    _cv("isqrtcovresnet", "CovPool", lambda: (normal(2, 3, 4, 2),)),
    _cv("isqrtcovresnet", "NewtonSchulzSqrt", lambda: (covariance(2, 4, 4), 5)),
    _cv("isqrtcovresnet", "Triuvec", lambda: (normal(2, 4, 4),)),
    _cv("wrn1bit_cifar", "Binarize", lambda: (normal(4, 3, 3, 3),)),
    _cv("revnet", "ReversibleBlockFunction", reversible, wanted=(0,)),
]


def load(wild: Wild) -> Any:
    folder = os.path.join(SOURCES, wild.package)
    if not os.path.isdir(folder):
        pytest.skip(f"{folder} is not there")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found: Any = _import(folder, wild.module)
    for part in wild.name.split("."):
        found = getattr(found, part)
    return found


def _import(folder: str, name: str) -> Any:
    """The module; where its package wants dependencies that are not here, the file alone."""
    try:
        return importlib.import_module(name)
    except ImportError:
        path = os.path.join(folder, *name.split(".")) + ".py"
        spec = importlib.util.spec_from_file_location(f"wild_{name.replace('.', '_')}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def cotangent(value: Any) -> np.ndarray:
    return np.cos(np.arange(value.size, dtype=np.float32)).reshape(value.shape)


def in_torch(wild: Wild, function: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Outputs, and gradients for fixed cotangents."""
    args = [torch.from_numpy(np.array(x)) if isinstance(x, (np.ndarray, np.generic)) else x for x in wild.args()]
    inputs = [args[i].requires_grad_() for i in _wanted(wild)]
    output = function.apply(*(x * 1 if any(x is y for y in inputs) else x for x in args))
    outputs = output if isinstance(output, tuple) else (output,)
    values = [y.detach().numpy().copy() for y in outputs]
    torch.autograd.backward(outputs, [torch.from_numpy(cotangent(y)) for y in values], inputs=inputs)
    return values, [x.grad.numpy() for x in inputs]


def in_jax(wild: Wild, function: Any, jit: Any) -> tuple[list[jax.Array], list[jax.Array]]:
    """Outputs and gradients in JAX; one seed for a Function that draws."""
    args = wild.args()
    positions = [i for i, x in enumerate(args) if isinstance(x, (np.ndarray, np.generic))]
    options = {"key": jax.random.key(0)} if wild.draws else {}

    def outputs_and_gradients(arrays: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        def call(wanted: list[jax.Array]) -> list[jax.Array]:
            filled = list(args)
            for position, array in (*zip(positions, arrays, strict=True), *zip(_wanted(wild), wanted, strict=True)):
                filled[position] = array
            output = function.apply(*filled, **options)
            return list(output) if isinstance(output, tuple) else [output]

        values, pullback = jax.vjp(call, [arrays[positions.index(i)] for i in _wanted(wild)])
        return values, pullback([jnp.asarray(cotangent(y)) for y in values])[0]

    return jit(outputs_and_gradients)([jnp.asarray(args[i]) for i in positions])


def _wanted(wild: Wild) -> tuple[int, ...]:
    floating = (i for i, x in enumerate(wild.args()) if isinstance(x, np.ndarray) and x.dtype.kind == "f")
    return tuple(floating) if wild.wanted is None else wild.wanted


@row("H1")
@pytest.mark.filterwarnings("ignore:.*mutates one of its inputs", "ignore:'saved_variables' is deprecated")
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jitted"])
@pytest.mark.parametrize("wild", WILD, ids=[f"{w.package}.{w.name}{i}" for i, w in enumerate(WILD)])
def test_published_functions(wild: Wild, jit: Any):
    function = load(wild)
    ours = jaxfn.from_torch(function)
    if wild.error_line is not None and jit is jax.jit:
        with pytest.raises(jaxfn.TranslationError) as error:
            in_jax(wild, ours, jit)
        assert "reads the value of a tensor" in str(error.value) and str(error.value).endswith(wild.error_line)
        return
    want, got = in_torch(wild, function), in_jax(wild, ours, jit)
    for theirs, result in zip((*want[0], *want[1]), (*got[0], *got[1]), strict=True):
        assert result.shape == theirs.shape
        assert result.dtype == jax.dtypes.canonicalize_dtype(theirs.dtype)
        if not wild.draws:
            np.testing.assert_allclose(result, theirs, rtol=1e-4, atol=1e-5)
    if wild.draws:
        again = in_jax(wild, ours, jit)
        np.testing.assert_array_equal(again[1][0], got[1][0])
