"""The examples print what they claim: each one's `main` runs here, and its results are checked."""

from __future__ import annotations

import ast
import importlib.util
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfn
from tests.support.cases import host_memory_is_apart
from tests.support.kernel_examples import FOLDER
from tests.support.kernel_examples import load as load_kernel
from tests.support.marks import HIGH_PRIMITIVES, slow
from tests.support.recipes import load as load_example

EXAMPLES = Path(__file__).parents[2] / "examples"
# Packages that are not among the extra requirements of tests.
NEEDED = {
    "equinox_layer": ("equinox",),
    "from_torch": ("torch", "entmax"),
    "from_torch_model": ("torch", "snntorch"),
    "nnx_layer": ("flax",),
    "port_a_model": ("torch", "flax"),
}


def load(name: str) -> ModuleType:
    """The example as a module; importing it must not run it."""
    for package in NEEDED.get(name, ()):
        pytest.importorskip(package)
    return load_example(name, EXAMPLES)


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    return load("digits")


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py") if path.stem != "pictures"))
def test_importing_an_example_does_not_run_it(name, capsys):
    assert callable(load(name).main)
    assert capsys.readouterr().out == ""


def test_digits_learns(digits):
    results = digits.main([])
    assert results.accuracy >= 0.95 and results.float32_accuracy >= 0.95
    assert results.rounding_accuracy < 0.8
    assert results.compilations == 1
    assert results.gradient_difference < 1e-6
    assert results.largest_gradient > 0.1  # so the difference above says something
    assert all(8 < levels <= 16 for levels in results.weight_levels)


def test_digits_takes_other_operations(digits):
    results = digits.main(["--epochs", "2", "--seed", "3"], ops=digits.PLAIN)
    assert results.gradient_difference == 0
    assert results.compilations == 1


def test_digits_notices_a_wrong_gradient(digits):
    data, params = digits.load_data(0), digits.init_params(0)

    def quantize(weight):  # the right values and twice the gradient
        rounded = digits.Quantize.apply(weight)
        return 2 * rounded - jax.lax.stop_gradient(rounded)

    wrong = digits.FUNCTIONS._replace(quantize=quantize)
    difference, _ = digits.compare_gradients(wrong, params, data.train_images, data.train_labels)
    assert difference > 1e-2


def test_digits_gives_its_buffers_away(digits):
    trainer = digits.Trainer(digits.FUNCTIONS, optax.adam(1e-3))
    data, params = digits.load_data(0), digits.init_params(0)
    state = trainer.optimizer.init(params)
    batches = digits.shuffled_batches(np.random.default_rng(0), len(data.train_images))
    trainer.epoch(params, state, data.train_images, data.train_labels, batches)
    assert all(weight.is_deleted() for weight in params)
    assert not data.train_images.is_deleted()


@HIGH_PRIMITIVES
def test_digits_relu_saves_only_its_mask(digits):
    _, vjp = jax.vjp(digits.ReLU.apply, jnp.array([-1.0, 2.0]))
    assert [residual.dtype for residual in jax.tree.leaves(vjp)] == [bool]


def test_decorator():
    results = load("decorator").main()
    w, x, y = (np.asarray(a, np.float64) for a in (results.weight, results.x, results.labels))
    slopes = -y / (1 + np.exp(y * (x @ w)))
    unclipped = slopes[:, None] * x
    norms = np.linalg.norm(unclipped, axis=1, keepdims=True)
    assert 0 < np.sum(norms > 1) < len(norms)  # some are clipped and some are not
    np.testing.assert_allclose(results.gradients, unclipped / np.maximum(norms, 1), rtol=1e-5)
    assert results.slope == 1
    assert np.isnan(results.plain_slope)


def test_functional():
    functional = load("functional")
    results = functional.main()
    x, w, b = (np.asarray(results.arguments[name], np.float64) for name in ("input", "weight", "bias"))
    delta = 2 * (x @ w.T + b)
    expected = {"input": delta @ w, "weight": delta.T @ x, "bias": delta.sum(0)}
    assert results.gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(results.gradients[name], gradient, rtol=1e-5, atol=1e-5)
    delta = 2 * (x @ w.T)
    assert results.without_bias.keys() == {"input", "weight"}
    np.testing.assert_allclose(results.without_bias["input"], delta @ w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(results.without_bias["weight"], delta.T @ x, rtol=1e-5, atol=1e-5)
    assert results.mul_constant == 2


@slow
def test_straight_through_hessian():
    example = load("straight_through_hessian")
    results = example.main()
    assert results.jaxfn == 2.0
    assert results.custom_vjp == 0.0
    assert results.torch in (None, 2.0)
    A, _ = example.least_squares()
    np.testing.assert_allclose(results.newton.hessian, A.T @ A, rtol=1e-5)
    np.testing.assert_array_equal(results.custom_vjp_newton.hessian, np.zeros((3, 3)))
    assert results.newton.losses[0] == results.custom_vjp_newton.losses[0] > 1
    assert results.newton.losses[-1] == pytest.approx(0, abs=1e-9)
    assert results.custom_vjp_newton.losses[-1] > results.custom_vjp_newton.losses[0]


def test_split_kernels():
    """The attention is right on eight devices, and each kernel passes its checks, those of its sharding rule too."""
    kernels = load_example("split_kernels", EXAMPLES / "kernels")
    assert all(difference < 1e-4 for difference in kernels.main().values())
    generator = np.random.default_rng(0)
    x = generator.normal(size=(4, 6))
    jaxfn.check(kernels.CrossEntropy.apply, (x, generator.integers(0, 6, 4)))
    for name, inputs in {"RMSNorm": (x, x[0]), "Softmax": (x,), "QuantizeRows": (x,)}.items():
        jaxfn.gradcheck(getattr(kernels, name).apply, inputs, check_forward_ad=True)
    classes = [node for node in ast.parse(Path(kernels.__file__).read_text()).body if isinstance(node, ast.ClassDef)]
    assert len(classes) == 5 and all(node.end_lineno - node.lineno < 60 for node in classes)


@slow
def test_split_attention():
    """The attention is plain attention in float64, at two orders and in both modes; it saves no matrix of scores."""
    kernels = load_example("split_kernels", EXAMPLES / "kernels")
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        args = [generator.normal(size=(2, 2, n, 4)) for n in (5, 256, 256)]

        def gradient(f):
            return jax.grad(lambda *args: kernels.loss(f, *args), (0, 1, 2))

        def second(f):
            return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(g)) for g in gradient(f)(*args)), (0, 1, 2))

        def along(f):
            return lambda *args: jax.jvp(f, args, args)

        for way in (along, gradient, second, lambda f: along(gradient(f))):
            ours, theirs = way(kernels.Attention.apply)(*args), way(kernels.plain_attention)(*args)
            for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)
        jaxfn.check(kernels.Attention.apply, [generator.normal(size=(2, 1, n, 2)) for n in (3, 4, 4)])
    sizes = [[jax.ShapeDtypeStruct((1, 1, n, 16), np.float32)] * 3 for n in (256, 512)]
    small, large = (jaxfn.residuals(kernels.Attention.apply, *shapes).total_bytes for shapes in sizes)
    assert large == 2 * small


def test_from_torch_trains_as_torch_does():
    results = load("from_torch").main(["--steps", "60"])
    assert results.largest_difference < 1e-3
    assert results.torch_losses[-1] < results.torch_losses[0] / 4
    assert results.accuracy > 0.9
    assert results.compilations == 1


@slow
@pytest.mark.filterwarnings("ignore:.*changes the attribute reset")  # which snntorch computes in every call
def test_from_torch_model_trains_as_torch_does():
    results = load("from_torch_model").main(["--steps", "40"])
    np.testing.assert_allclose(results.jax_losses, results.torch_losses, rtol=1e-5)
    assert results.torch_losses[-1] < results.torch_losses[0] * 0.7
    assert results.loaded_accuracy == results.jax_accuracy == results.torch_accuracy > 0.4
    assert results.compilations == 1
    assert {name for name, parts in results.parts.items() if parts == 8} >= {"conv1.weight", "linear.weight"}


@slow
def test_digits_trains_as_well_with_bfloat16_residuals(digits):
    def pack(x):
        return x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x

    def unpack(x):
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    exact = digits.main(["--epochs", "10"])
    with jaxfn.saved_tensors_hooks(pack, unpack):
        results = digits.main(["--epochs", "10"])
    assert exact.accuracy > 0.9
    assert abs(results.accuracy - exact.accuracy) <= 0.01
    assert results.compilations == 1
    assert 1e-6 < results.gradient_difference < 1e-2  # the hooks were really active


@slow
def test_second_order():
    results = load("second_order").main(num_steps=6)
    assert max(results.differences.values()) < 1e-5
    assert all(time > 0 for time in results.milliseconds.values())
    assert results.losses[-1] < results.losses[0] / 2
    assert results.accuracy > 0.7


@slow
def test_second_order_products_are_products_with_the_matrices():
    example = load("second_order")
    images, labels = jnp.eye(64)[:3], jnp.array([3, 1, 4])
    problem = example.Problem(example.FUNCTIONS, images, labels)
    direction = jnp.cos(jnp.arange(float(problem.start.size)))
    plain = example.Problem(example.PLAIN, images, labels)
    jacobian = jax.jacrev(plain.logits)(problem.start).reshape(30, -1)
    curvature = jax.hessian(lambda y: plain.ops.cross_entropy(y.reshape(3, 10), labels))(
        plain.logits(problem.start).ravel()
    )
    expected = jacobian.T @ (curvature @ (jacobian @ direction))
    product = problem.gauss_newton_product(problem.start, direction)
    np.testing.assert_allclose(product, expected, rtol=1e-3, atol=1e-6)
    for product in (problem.hessian_product, problem.hessian_product_in_reverse):
        difference = jax.grad(plain.loss)(problem.start + 1e-2 * direction) - jax.grad(plain.loss)(
            problem.start - 1e-2 * direction
        )
        np.testing.assert_allclose(product(problem.start, direction), difference / 2e-2, rtol=0.05, atol=2e-3)


@slow
def test_residual_hooks():
    example = load("residual_hooks")
    results = example.main()
    saved = 2 * example.LAYERS * example.BATCH * example.WIDTH * 4  # two arrays for each layer
    plain = results["no hooks"].device
    assert plain - results["bfloat16"].device == saved / 2
    assert 0.73 * saved < plain - results["int8"].device < 0.75 * saved
    on_host = saved if host_memory_is_apart() else 0
    assert (plain - results["host memory"].device, results["host memory"].host) == (on_host, on_host)
    assert results["no hooks"].gradient_error == results["host memory"].gradient_error == 0
    assert 0 < results["bfloat16"].gradient_error < 0.01
    assert 0 < results["int8"].gradient_error < 0.02


@slow
def test_sharded_training():
    """`main` asserts the numbers of one device, and the collectives of a hand-written custom_vjp."""
    example = load("sharded_training")
    results = example.main(steps=8)
    assert results.differences.keys() == {"jit, Auto axes", "jit, Explicit axes", "shard_map"}
    params = example.init(2)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(example.BATCH, example.WIDTH)), jnp.float32)
    plain = example.Ops(jnp.matmul, jnp.add, jax.nn.swish)
    y = example.network(plain, example.init(1), x)
    for loss in results.losses:
        value, gradients = jax.value_and_grad(example.loss_of(plain))(params, x, y)
        assert loss == pytest.approx(float(value), rel=1e-5)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients)


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_importing_a_kernel_does_not_run_it(name, capsys):
    load_kernel(name)
    assert capsys.readouterr().out == ""


SMALLER = {
    "layer_norm": {"num_rows": 160, "width": 40},
    "cross_entropy": {"num_rows": 160, "num_words": 1501, "width": 12},
    "flash_attention": {"length": 160, "width": 10},
    "lapack": {"n": 20},
}


@slow
@pytest.mark.parametrize("name", SMALLER)
def test_a_kernel_matches_plain_JAX_and_saves_less(name):
    """`main` asserts what else it claims: that no array has the size of the logits or scores, and what is needed."""
    results = load_kernel(name).main(**SMALLER[name])
    assert results.differences.keys() == {"jit", "vmap", "shard_map"}
    assert 0 < max(results.differences.values()) < 1e-4
    assert results.saved < results.saved_by_plain / 2


def test_host_routine():
    results = load_kernel("host_routine").main(sigma=0.5, gamma=0.7)
    assert results.difference < 1e-12
    assert max(results.slope_difference, results.curvature_difference) < 1e-4
    assert results.host_calls == [(31,)]


def test_a_ported_model():
    results = load("port_a_model").main()
    assert results.right
    assert results.wrong_epsilon.first_deviation.layer == "norm"
    first = results.wrong_activation.first_deviation
    assert (first.layer, first.before) == ("", "blocks")  # the activation is in the module's own code


@slow
def test_a_layer_of_nnx():
    results = load("nnx_layer").main()
    assert results.last_loss < 1e-6 and results.ensemble_shape == (4, 256, 5)


def test_a_layer_of_equinox():
    results = load("equinox_layer").main()
    assert results.saved_bytes == 192 and results.difference < 1e-6 and results.last_loss < 1e-6


JOURNEYS = ["train", "port", "kernel", "wrong_gradient", "memory", "training_job"]


@slow
@pytest.mark.parametrize("name", JOURNEYS)
def test_journeys(name, tmp_path):
    if name in ("port", "training_job"):
        pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    module = import_module(f"examples.journeys.{name}")
    results = module.main(["--picture", str(tmp_path / "out.svg")])
    assert "<svg" in (tmp_path / "out.svg").read_text()
    if name == "train":
        accuracies = {way: result.accuracies[-1] for way, result in results.items()}
        assert accuracies["Function"] > 0.9 and accuracies["float32"] > 0.9 and accuracies["plain rounding"] < 0.7
    elif name == "port":
        assert results.parity and results.losses[-1] < 0.5 * results.losses[0] and results.difference < 1e-4
    elif name == "kernel":
        assert results.kernel and "scales" in results.careless.failed_checks
    elif name == "training_job":
        assert results.right and not results.right.notes
        where = [(report.step, report.stage) for report in results[1:]]
        assert where == [(0, "gradient"), (3, "parameters")]
        assert results.trained_reference.name.startswith("reference.")
    elif name == "wrong_gradient":
        assert results.report.mismatches[0].mistake.startswith("off-diagonal") and results.origin.function == "norm"
    else:
        total = results.comparison.total_bytes
        assert total["8-bit gelu"] < 0.4 * total["jax.nn.gelu"]
        assert total["checkpoint"] < total["dots_saveable"] < total["8-bit gelu"]
        assert total["8-bit gelu and product"] < 0.75 * total["dots_saveable"]
        assert 0 < results.gradient_errors["8-bit gelu"] < results.gradient_errors["8-bit gelu and product"] < 0.02


@pytest.mark.parametrize("path", [EXAMPLES / "digits.py", *(EXAMPLES / "journeys" / f"{name}.py" for name in JOURNEYS)])
def test_programs_of_the_first_page_say_what_to_install(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    command = re.search(r"^    pip install .*\n    python (\S+)", docstring, re.MULTILINE)
    assert EXAMPLES.parent / command[1] == path


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed")
def test_the_journey_of_porting_says_that_it_needs_torch():
    with pytest.raises(SystemExit, match="No module named .torch.*pip install torch=="):
        import_module("examples.journeys.port")
