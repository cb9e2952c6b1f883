"""Rows H17 and H18: torch code that is rewritten for JAX, compared with torch, and code that is not supported."""

from __future__ import annotations

import enum
import functools
import gc
import json
import math
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row, slow

torch = pytest.importorskip("torch")

from examples.ported import originals  # noqa: E402
from tests.support import source_examples as samples  # noqa: E402

ROOT = Path(__file__).parents[2]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def load(text: str) -> types.ModuleType:
    module = sys.modules["written"] = types.ModuleType("written")  # Dataclasses look up their module.
    exec(compile(text, "written.py", "exec"), vars(module))
    return module


def source_of(function: Any, *args: Any, **options: Any) -> str:
    return jaxfn.port(function, *args, **options)


def assert_as_torch(function: Any, text: str, *args: Any, reads_values: bool = False) -> None:
    """Compares outputs and gradients with torch's, eagerly and, if it reads no values, compiled, at new values."""
    module = load(text)
    port = getattr(module, function.__name__)
    port, call = (port.apply, function.apply) if isinstance(function, type) else (port, function)
    indices = [i for i, x in enumerate(args) if isinstance(x, np.ndarray) and x.dtype.kind in "fc"]
    values = [np.asarray(x * 0.7 + 0.1, x.dtype) if i in indices else x for i, x in enumerate(args)]
    leaves = {i: torch.from_numpy(values[i].copy()).requires_grad_() for i in indices}
    tensors = [torch.from_numpy(np.array(x)) if isinstance(x, np.ndarray) else x for x in values]
    outputs = leaves_of(call(*(leaves[i] * 1 if i in leaves else x for i, x in enumerate(tensors))))
    differentiable = [y for y in outputs if y.requires_grad]

    def ported(*arrays: Any) -> list[Any]:
        full = [getattr(module, x.__name__) if callable(x) else x for x in values]
        full = [getattr(module, type(x).__name__)[x.name] if isinstance(x, enum.Enum) else x for x in full]
        for i, x in zip(indices, arrays, strict=True):
            full[i] = x
        return [jnp.asarray(y) for y in jax.tree.leaves(port(*full))]

    arrays = [jnp.asarray(values[i]) for i in indices]
    for run in (ported,) if reads_values else (ported, jax.jit(ported)):
        for got, wanted in zip(run(*arrays), outputs, strict=True):
            np.testing.assert_allclose(got, wanted.detach().numpy(), rtol=1e-4, atol=1e-5)
    if not differentiable or not indices:
        return
    weights = [torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape).to(y.dtype) for y in outputs]
    chosen = [w for w, y in zip(weights, outputs, strict=True) if y.requires_grad]
    gradients = torch.autograd.grad(differentiable, [*leaves.values()], chosen, allow_unused=True)

    def loss(*arrays: Any) -> Any:
        terms = zip(ported(*arrays), weights, outputs, strict=True)
        return sum(jnp.real(y * jnp.asarray(w.numpy()).conj()).sum() for y, w, wanted in terms if wanted.requires_grad)

    for got, wanted in zip(jax.grad(loss, range(len(arrays)))(*arrays), gradients, strict=True):
        expected = np.zeros(got.shape) if wanted is None else wanted.numpy()
        np.testing.assert_allclose(np.conj(got), expected, rtol=1e-4, atol=1e-5)


def leaves_of(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@row("H17")
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("name", samples.WRITTEN)
def test_the_written_source_computes_as_torch(name):
    function, args = samples.WRITTEN[name]
    text = source_of(function, *args)
    assert "torch" not in text[text.index("import") :].replace("torch.Tensor", "")
    assert_as_torch(function, text, *args)


@row("H18")
@pytest.mark.parametrize("name", samples.READS_VALUES)
def test_code_that_reads_values_is_written_to_run_outside_jit(name):
    function, args = samples.READS_VALUES[name]
    text = source_of(function, *args)
    assert "runs outside `jax.jit` only" in text and "no example reached" not in text
    assert_as_torch(function, text, *args, reads_values=True)


@row("H18")
def test_inputs_that_have_no_gradient():
    """The code raises an error where a gradient of the first input is needed."""
    text = source_of(samples.ByTheScaleAlone, normal(3), np.float32(2.0))
    assert "raise RuntimeError" in text
    apply = load(text).ByTheScaleAlone.apply
    assert jax.grad(lambda s: apply(normal(3), s).sum())(2.0) == pytest.approx(normal(3).sum(), rel=1e-5)
    with pytest.raises(RuntimeError, match="no gradient of x"):
        jax.grad(lambda x: apply(x, 2.0).sum())(normal(3))


@row("H17")
def test_only_calls_of_torch_change():
    """Comments, layout, names, control flow and docstrings are those of the original."""
    text = source_of(originals.FocalLoss, normal(5, 3), np.ones((5, 3), np.int64), 2.0)
    old = (ROOT / "examples/ported/originals.py").read_text().splitlines()
    new = text[text.index("class") :].splitlines()
    assert [line for line in new if line.strip() and line not in old] == [
        "class FocalLoss(jaxfn.Function):",
        "        log_p = jax.nn.log_sigmoid(signs * logits)",
        "        p = jnp.exp(log_p)",
        "        log_p = jax.nn.log_sigmoid(signs * logits)",
        "        p = jnp.exp(log_p)",
        "        return grad_output * signs * slope / logits.size, None, None",
    ]


PORTED = {
    "focal_loss": ("FocalLoss", [(normal(5, 3), np.ones((5, 3), np.int64), 2.0)]),
    "learned_step_quantizer": ("LearnedStepQuantizer", [(normal(4, 5), np.float32(0.3), 3)]),
    "sinkhorn": ("Sinkhorn", [(normal(2, 4, 3), 5)]),
    "group_norm": (
        "GroupNorm",
        [(normal(2, 6, 3, 5), normal(6), normal(6, seed=1), 3), (normal(2, 6, 3, 5), normal(6), None, 2)],
    ),
    "stochastic_rounding": ("StochasticRounding", [(normal(4, 5), 8)]),
}


@row("H17")
@pytest.mark.parametrize("file", PORTED)
def test_the_files_of_the_examples_are_what_is_written(file):
    name, (first, *more) = PORTED[file]
    text = source_of(getattr(originals, name), *first, examples=more)
    assert text == (ROOT / f"examples/ported/{file}.py").read_text()


@row("H17")
def test_forward_mode_and_batching_rule_are_those_of_the_original():
    x = jnp.asarray(normal(3, 4))
    apply = load(source_of(samples.AllRules, normal(3, 4), 2.0)).AllRules.apply
    _, tangent = jax.jvp(lambda x: apply(x, 2.0), (x,), (jnp.ones_like(x),))
    np.testing.assert_allclose(tangent, 2 * jnp.exp(2 * x), rtol=1e-5)
    np.testing.assert_allclose(jax.vmap(lambda x: apply(x, 2.0), 1, 1)(x), jnp.exp(2 * x), rtol=1e-5)


@row("H17")
def test_random_numbers_are_those_of_the_converted_function():
    function, x = originals.StochasticRounding, normal(4, 5)
    port = load(source_of(function, x, 8)).StochasticRounding
    key = jax.random.key(3)
    expected = jaxfn.from_torch(function).apply(x, 8, key=key)
    np.testing.assert_array_equal(port.apply(x, 8, key=key), expected)
    noisy = load(source_of(samples.NoisyGradient, x)).NoisyGradient
    for ours in (noisy.apply, jax.jit(noisy.apply)):
        gradient = jax.grad(lambda x: ours(x, key=key).sum())(x)
        wanted = jax.grad(lambda x: jaxfn.from_torch(samples.NoisyGradient).apply(x, key=key).sum())(x)
        np.testing.assert_allclose(gradient, wanted, rtol=1e-6)


@row("H17")
def test_numbers_drawn_repeatedly_are_those_of_the_converted_function():
    x, key = normal(3, 4), jax.random.key(5)
    port = load(source_of(samples.DrawsRepeatedly, x, 3)).DrawsRepeatedly
    for steps in (3, 4):
        ours, wanted = (
            jax.vjp(lambda x, f=f, n=steps: f.apply(x, n, key=key), x)
            for f in (port, jaxfn.from_torch(samples.DrawsRepeatedly))
        )
        np.testing.assert_allclose(ours[0][0], wanted[0][0], rtol=1e-5)
        np.testing.assert_allclose(*(pullback(out)[0] for out, pullback in (ours, wanted)), rtol=1e-5)


@row("H17")
def test_the_docstring_says_that_one_size_was_compared():
    assert "at the example's sizes alone" in source_of(samples.OneSize, normal(3, 4))
    assert "at the example's sizes alone" not in source_of(samples.Tanh, normal(3, 4))


@row("H17")
def test_x64_and_other_dtypes_give_the_dtypes_of_torch():
    text = source_of(samples.Promotes, np.arange(6).reshape(2, 3), normal(2, 3))
    port, converted = load(text).Promotes, jaxfn.from_torch(samples.Promotes)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            args = jnp.arange(6).reshape(2, 3), jnp.asarray(normal(2, 3))
            for got, wanted in zip(port.apply(*args), converted.apply(*args), strict=True):
                assert got.dtype == wanted.dtype
                np.testing.assert_allclose(got, wanted, rtol=1e-6)


@row("H17")
def test_strict_spellings_only_where_a_derivative_needs_them():
    text = source_of(samples.AbsoluteTwice, normal(3, 4))
    assert "ctx.size = jnp.abs(x)" in text and "return grad_output * absolute(x)" in text
    gradient = jax.grad(lambda x: jax.grad(lambda x: load(text).AbsoluteTwice.apply(x).sum())(x).sum())
    np.testing.assert_array_equal(gradient(jnp.array([0.0, 2.0, -1.0])), [0.0, 1.0, -1.0])


def celu_of(x):
    return torch.nn.functional.celu(x, 1.3)


@row("H17")
def test_the_second_derivative_of_a_written_celu_is_that_of_torch_at_0():
    ported = load(jaxfn.port(celu_of, normal(3, 4))).celu_of
    x = torch.tensor([0.0, 2.0, -1.0], requires_grad=True)
    (slope,) = torch.autograd.grad(celu_of(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(slope.sum(), x)
    found = jax.grad(lambda x: jax.grad(lambda x: ported(x).sum())(x).sum())(jnp.asarray(x.detach().numpy()))
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-7)


@row("H17")
def test_lines_that_no_example_reached_raise():
    text = source_of(samples.Branches, normal(3), "sin")
    port = load(text).Branches
    np.testing.assert_allclose(port.apply(jnp.ones(3), "sin"), np.sin(np.ones(3)), rtol=1e-6)
    with pytest.raises(NotImplementedError, match="no example reached source_examples.py, line"):
        port.apply(jnp.ones(3), "exp")
    both = load(source_of(samples.Branches, normal(3), "sin", examples=[(normal(3), "exp")])).Branches
    np.testing.assert_allclose(both.apply(jnp.ones(3), "exp"), np.exp(np.ones(3)), rtol=1e-6)


@row("H17")
def test_functions_nested_functions_and_helpers_are_written_once():
    text = source_of(samples.loss, normal(4, 3), normal(4, 3, seed=1))
    assert text.count("class Clipped(jaxfn.Function)") == text.count("def scaled(") == 1
    assert_as_torch(samples.loss, text, normal(4, 3), normal(4, 3, seed=1))
    partial = jaxfn.from_torch(functools.partial(samples.loss, slope=3.0))
    assert callable(partial)


@row("H17")
def test_names_of_the_user_are_not_shadowed():
    text = source_of(samples.Shadows, normal(3), normal(3, seed=1))
    assert_as_torch(samples.Shadows, text, normal(3), normal(3, seed=1))
    assert "import jax.numpy as jnp_" in text


@row("H18")
@pytest.mark.parametrize("name", samples.NOT_SUPPORTED)
def test_what_cannot_be_written_raises_with_the_line(name):
    function, args, message = samples.NOT_SUPPORTED[name]
    with pytest.raises(jaxfn.TranslationError, match=message):
        source_of(function, *args)


@row("H18")
def test_results_that_differ_raise(monkeypatch):
    """A wrong rule of the table is found by the comparison; if second derivatives alone differ, they raise."""
    from jaxfn._port.source import table

    entries = dict(table.table())
    (tanh,) = entries["tanh"]
    monkeypatch.setattr(table, "table", lambda: entries)
    monkeypatch.setattr("jaxfn._port.source.expressions.table", lambda: entries)
    code = "jnp.sinh({input})"
    entries["tanh"] = [tanh._replace(plain=code, strict=code)]
    named = r"torch has (.|\n)*`jnp.sinh\({input}\)`(.|\n)*source_examples.py(.|\n)*torch.tanh\(x\)"
    with pytest.raises(jaxfn.TranslationError, match=f"the rewritten source has other outputs(.|\n)*{named}"):
        source_of(samples.Tanh, normal(3))
    code = "jnp.tanh(lax.stop_gradient({input}))"
    entries["tanh"] = [tanh._replace(plain=code, strict=code)]
    text = source_of(samples.TanhBackward, normal(3))
    assert "Its second derivatives raise an error: they may differ." in text
    port, x = load(text).TanhBackward.apply, jnp.arange(1.0, 4.0)
    np.testing.assert_allclose(jax.grad(lambda x: port(x).sum())(x), np.tanh(x), rtol=1e-6)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        jax.grad(lambda x: jax.grad(lambda x: port(x).sum())(x).sum())(x)


@row("H18")
def test_modules_and_partials_raise():
    with pytest.raises(TypeError, match=r"the source of a module \(Linear\) is not rewritten"):
        jaxfn.port(torch.nn.Linear(2, 3), np.ones((4, 2)))


@row("H18")
def test_the_state_of_the_code_is_unchanged():
    code = samples.Tanh.forward.__code__
    names = set(vars(samples))
    source_of(samples.Tanh, normal(3))
    assert samples.Tanh.forward.__code__ is code and set(vars(samples)) == names
    with pytest.raises(jaxfn.TranslationError):
        source_of(samples.ReadsRegistry, normal(3))
    assert samples.registry() == {"scale": 3.0}


@row("H18")
def test_the_programs_of_a_comparison_are_freed():
    """No program stays, of `jvp` and `vmap` neither."""
    (client,) = {device.client for device in jax.devices()}
    counts: list[int] = []
    for shape in [(2, 3), (3, 4)]:
        source_of(samples.AllRules, normal(*shape), 0.7)
        gc.collect()
        counts.append(len(client.live_executables()))
    assert counts[1] <= counts[0]


@row("H17")
@slow
def test_the_written_source_runs_without_torch(tmp_path):
    (tmp_path / "written.py").write_text(source_of(originals.Sinkhorn, normal(2, 4, 3), 5))
    program = """
        import sys
        sys.modules["torch"] = None
        import jax.numpy as jnp, written
        print(written.Sinkhorn.apply(jnp.zeros((1, 2, 2)), 3).sum())
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "2.0", result.stderr


@row("L5")
def test_the_command_writes_the_file_its_test_and_the_oracle(tmp_path):
    (tmp_path / "theirs.py").write_text((ROOT / "examples/ported/originals.py").read_text())
    example = "float32[5,3], int64[5,3] < 2, 2.0"
    command = [
        sys.executable,
        "-m",
        "jaxfn",
        "port",
        "theirs:FocalLoss",
        "--example",
        example,
        "-o",
        "focal.py",
        "--json",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["files"] == ["focal.py", "test_focal.py", "focal.npz"]
    assert math.prod(np.load(tmp_path / "focal.npz")["input/0"].shape) == 15
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_focal.py"]
    result = subprocess.run(test, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "2 passed" in result.stdout, result.stdout
    wrong = subprocess.run(
        [*command[:6], "float32[", "-o", "f.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert wrong.returncode == 2 and "is not a list of arguments" in wrong.stderr
