"""Rows H17 and H18: code as it lies in packages: several modules, lambdas, and tensors on modules and classes."""

from __future__ import annotations

import importlib
import textwrap
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxfn
from tests.from_torch.test_source import assert_as_torch, normal
from tests.support.marks import row

torch = pytest.importorskip("torch")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Returns a function that writes a package, whose modules have these texts, and returns its module `main`."""
    name = "package_" + request.node.name.replace("[", "_").rstrip("]")

    def write(**texts: str) -> types.ModuleType:
        (tmp_path / name).mkdir()
        for file, text in {"__init__": "", **texts}.items():
            (tmp_path / name / f"{file}.py").write_text(textwrap.dedent(text).replace("PACKAGE", name))
        monkeypatch.syspath_prepend(tmp_path)
        return importlib.import_module(f"{name}.main")

    return write


@row("H17")
def test_objects_that_answer_for_all_attributes(package):
    """A static argument, which answers for attributes that it does not have, and a private method."""
    main = package(
        main="""
            import torch

            class Scale:
                def __init__(self, factor):
                    self.factor = factor

                def __getattr__(self, name):
                    return getattr(self.factor, name)

                def __double(self):
                    return self.factor * 2

                def apply_to(self, x):
                    return x * self.__double()

            SCALE = Scale(1.5)

            class Scaled(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x):
                    return SCALE.apply_to(x)

                @staticmethod
                def backward(ctx, grad_output):
                    return SCALE.apply_to(grad_output)
        """
    )
    text = jaxfn.port(main.Scaled, normal(3))
    assert_as_torch(main.Scaled, text, normal(3))


@row("H17")
def test_names_of_other_modules_are_followed(package):
    """Functions, classes, bases and constants by `module.name`, through several modules, and aliases."""
    main = package(
        constants="""
            NEAR_ZERO = 1e-3  # a comment
            DIMENSION = 3
        """,
        base="""
            import torch

            class Unary(torch.autograd.Function):
                @classmethod
                def forward(cls, ctx, x):
                    ctx.save_for_backward(x)
                    return cls.compute(x)
        """,
        skew="""
            import torch
            from . import constants

            def _entries(x):
                return x[..., 0], x[..., 1], x[..., 2]

            def hat(x):
                assert x.shape[-1] == constants.DIMENSION
                a, b, c = _entries(x)
                zero = torch.zeros_like(a)
                return torch.stack([zero, -c, b, c, zero, -a, -b, a, zero], -1).reshape(*x.shape, 3)
        """,
        main="""
            import torch
            import PACKAGE.skew as lie
            from . import base, constants
            from .constants import NEAR_ZERO as threshold
            from .skew import hat as skew_symmetric

            def _entries(x):
                return x[..., 0, 1], x[..., 0, 2], x[..., 1, 2]

            class Hat(base.Unary):
                @classmethod
                def compute(cls, x):
                    from .skew import _entries as parts
                    scale = parts(x)[0][..., None, None] * (constants.NEAR_ZERO < 1)
                    return lie.hat(x) + skew_symmetric(x).sin() * scale

                @staticmethod
                def backward(ctx, gradient):
                    (x,) = ctx.saved_tensors
                    a, b, c = _entries(gradient - gradient.mT)
                    scale = torch.where(x.abs() > threshold, x, constants.NEAR_ZERO)
                    return torch.stack([-c, b, -a], -1) * scale
        """,
    )
    text = jaxfn.port(main.Hat, normal(2, 3))
    assert_as_torch(main.Hat, text, normal(2, 3))
    assert "package_" not in text[text.index("import") :]
    assert "class Unary(jaxfn.Function):" in text and "class Hat(Unary):" in text
    assert text.count("def hat(x):") == 1 and "skew_symmetric = hat" in text
    assert "a, b, c = skew_entries(x)" in text and "a, b, c = _entries(gradient - gradient.mT)" in text


@row("H17")
def test_lambdas_of_classes_and_modules_are_written(package):
    main = package(
        main="""
            import torch

            square = lambda x: torch.square(x)

            class Both(torch.autograd.Function):
                forward = staticmethod(lambda ctx, x: ctx.save_for_backward(x) or square(x).sum(-1))
                scale, shift = (lambda x: torch.exp(x)), (lambda x: x.cos())
                backward = staticmethod(lambda ctx, g: g[..., None] * 2 * Both.scale(ctx.saved_tensors[0].log()))
        """
    )
    x = np.abs(normal(2, 3)) + 0.1
    text = jaxfn.port(main.Both, x)
    assert_as_torch(main.Both, text, x)
    assert "square = lambda x: jnp.square(x)" in text and "jnp.exp(x)), (lambda x:" in text


@row("H17")
def test_tensors_of_modules_and_classes_become_constants(package):
    main = package(
        tables="""
            import torch
            WEIGHTS = torch.tensor([0.1, 2.0, -3.0])
            INDICES = torch.tensor([2, 0, 1])
        """,
        main="""
            from types import SimpleNamespace

            import torch
            from . import tables
            from .tables import INDICES

            options = SimpleNamespace(power=2, bounds=(-1.0, 4.0))

            class Weighted(torch.autograd.Function):
                shift = torch.tensor([[1.0], [float("inf")]])
                dtype = torch.float32

                @staticmethod
                def forward(ctx, x):
                    ctx.save_for_backward(x)
                    y = (x * tables.WEIGHTS)[:, INDICES] * Weighted.scale
                    y = y.clamp(options.bounds[0], options.bounds[1]) ** options.power
                    return torch.minimum(y, Weighted.shift).to(Weighted.dtype)

                @staticmethod
                def backward(ctx, gradient):
                    return gradient * tables.WEIGHTS.exp() * (INDICES / 2) * ctx.saved_tensors[0]

            Weighted.scale = torch.full((3,), 1.5)
        """,
    )
    text = jaxfn.port(main.Weighted, normal(2, 3))
    assert_as_torch(main.Weighted, text, normal(2, 3))
    assert "WEIGHTS = np.array([0.1, 2.0, -3.0], np.float32)" in text
    assert "    scale = np.array([1.5, 1.5, 1.5], np.float32)" in text
    assert "    shift = np.array([[1.0], [np.inf]], np.float32)" in text
    assert "options = types.SimpleNamespace(power=2, bounds=(-1.0, 4.0))" in text


@row("H17")
def test_functions_of_einops_are_imported(package):
    """They accept arrays of both libraries; by names, aliases and the module."""
    main = package(
        main="""
            import einops
            import torch
            from einops import rearrange
            from einops import repeat as copies

            class Columns(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, w):
                    ctx.save_for_backward(x, w)
                    return rearrange(x * w, "a b -> b a").exp()

                @staticmethod
                def backward(ctx, grad_output):
                    x, w = ctx.saved_tensors
                    g = rearrange(grad_output * (x * w).exp().t(), "b a -> a b")
                    dx = einops.reduce(g * w, "a b -> a", "sum")
                    return copies(dx, "a -> a b", b=x.shape[1]), g * x
        """
    )
    text = jaxfn.port(main.Columns, normal(3, 4), normal(3, 4, seed=1))
    assert "from einops import repeat as copies" in text and "def rearrange" not in text
    assert_as_torch(main.Columns, text, normal(3, 4), normal(3, 4, seed=1))


@row("H17")
def test_objects_of_the_users_classes_are_written(package):
    main = package(
        options="""
            from dataclasses import dataclass

            @dataclass
            class Options:
                near_zero_float32: float = 0.5
                near_zero_float64: float = 0.5

                def get(self, dtype):
                    return getattr(self, f"near_zero_{str(dtype)[6:]}")

            OPTIONS = Options(near_zero_float64=0.25)
        """,
        main="""
            import torch
            from .options import OPTIONS as current

            def cut(x):
                return torch.where(x.abs() < current.get(x.dtype), torch.zeros_like(x), x)
        """,
    )
    text = jaxfn.port(main.cut, normal(4, 3))
    assert_as_torch(main.cut, text, normal(4, 3))
    assert "Options(near_zero_float32=0.5, near_zero_float64=0.25)" in text


@row("H17")
def test_named_tuples_and_default_values_are_written(package):
    """Named tuples that a function or a metaclass creates are written by their fields; tensors as default values."""
    main = package(
        states="""
            import collections

            class Fields(type):
                def __new__(cls, name, bases, namespace):
                    fields = list(namespace["__annotations__"])
                    return collections.namedtuple(name, fields, defaults=[namespace[x] for x in fields[1:]])
        """,
        main="""
            import collections
            import torch
            from .states import Fields

            class Parameters(metaclass=Fields):
                tau: float
                bound: torch.Tensor = torch.as_tensor(0.75)

            Pair = collections.namedtuple("Pair", "first second")
            SCALES = Pair(2.0, 0.5)

            class Cut(torch.autograd.Function):
                @staticmethod
                def forward(ctx, x, slope=torch.tensor([1.0, 2.0, 3.0]), *, dtype=torch.float32):
                    ctx.parameters = p = Parameters(0.5)
                    ctx.save_for_backward(x)
                    scale = SCALES.first if x.device.type == "cpu" else 3
                    return torch.where(x.abs() < p.bound, p.tau * x, x * slope).to(dtype) * scale

                @staticmethod
                def backward(ctx, gradient):
                    pair = Pair(*ctx.saved_tensors, ctx.parameters.tau)
                    return gradient * torch.where(pair.first > ctx.parameters.bound, 1.0, pair.second), None
        """,
    )
    text = jaxfn.port(main.Cut, normal(2, 3))
    assert_as_torch(main.Cut, text, normal(2, 3))
    assert 'Pair = collections.namedtuple("Pair", ["first", "second"])' in text
    assert "slope=np.array([1.0, 2.0, 3.0], np.float32), *, dtype=jnp.float32" in text


RAISES = {
    "the arguments do not fit": ("return x @ x", r"it raised RuntimeError: .*return x @ x"),
    "endless recursion": ("return f(x)", r"it raised RecursionError(.|\n)*return f\(x\)"),
    "a module": ("return getattr(others, 'tanh')(x)", "it uses the module package_.*others"),
    "a large tensor": ("return x * others.LARGE[0]", "LARGE is a Tensor of 300 elements outside the function"),
    "an update": ("return others.SMALL.add_(1) * x", r"mutates an external tensor.*return others.SMALL.add_\(1\) \* x"),
}


@row("H18")
@pytest.mark.parametrize("case", RAISES)
def test_errors_name_the_function_and_the_line(package, case):
    statement, message = RAISES[case]
    main = package(
        others="""
            import torch
            LARGE, SMALL = torch.ones(100, 3), torch.ones(3)
            from torch import tanh
        """,
        main=f"""
            from . import others

            def f(x):
                {statement}
        """,
    )
    with pytest.raises(jaxfn.TranslationError, match=f"(?s){message}"):
        jaxfn.port(main.f, normal(2, 3))
