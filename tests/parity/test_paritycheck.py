"""H6, H7: a port next to the torch Function that it was ported from, live and from a recorded file."""

import functools
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import ComplexSquare, Linear, Square, Swish, in_library
from tests.support.either_library import Torch
from tests.support.libraries import make_function
from tests.support.marks import row

torch = pytest.importorskip("torch")

from tests.support.torch_functions import LinearFunction as TorchLinear  # noqa: E402


def random(*shapes, dtype=np.float32):
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


compare = functools.partial(jaxfn.paritycheck, raise_exception=False)
LINEAR = random((4, 3), (5, 3), (5,))


def verdicts(report):
    return {row.what: row.verdict for row in report.rows}


@row("H6")
@pytest.mark.parametrize("port", [Linear, Linear.apply, jaxfn.from_torch(TorchLinear)], ids=["class", "apply", "from"])
def test_a_right_port(port):
    report = compare(port, TorchLinear, LINEAR)
    assert report, report
    gradients = [row.what for row in report.rows if row.what.startswith("gradient")]
    assert len(gradients) == 3 + 3  # together and alone
    assert {row.what for row in report.rows if row.what.startswith("second")} == {
        "second derivative, input 0",
        "second derivative, input 1",
        "second derivative, input 2",
        "second derivative, grad_output 0",
    }


@row("H6")
def test_optional_input_left_out():
    assert jaxfn.paritycheck(Linear, TorchLinear, [*LINEAR[:2], None])


@row("H6")
def test_nothing_to_compare_is_not_agreement():
    with pytest.raises(ValueError, match="paritycheck: .*nothing.* returned no tensor .* nothing to compare"):
        jaxfn.paritycheck(lambda x: None, _nothing, [np.ones(3, np.float32)])


def _nothing(x):
    return None


@row("H6")
def test_second_order_can_be_left_out():
    report = jaxfn.paritycheck(Linear, TorchLinear, LINEAR, second_order=False)
    assert report
    assert not any(row.what.startswith("second") for row in report.rows)


@row("H6")
def test_a_wrong_gradient_is_a_wrong_formula():
    class Wrong(Linear):
        @staticmethod
        def backward(ctx, grad_output):
            grad_input, grad_weight, grad_bias = Linear.backward(ctx, grad_output)
            return grad_input, None if grad_weight is None else 1.001 * grad_weight, grad_bias

    report = compare(Wrong, TorchLinear, LINEAR)
    assert not report
    wrong = {what for what, verdict in verdicts(report).items() if verdict == "formula"}
    assert wrong >= {"gradient of input 1 (alone)", "gradient of input 1"}
    assert not {what for what in wrong if what.startswith(("output", "gradient of input 0", "gradient of input 2"))}


@row("H6")
def test_only_the_second_derivative_is_wrong():
    class Stopped(Square):
        @staticmethod
        def backward(ctx, grad_output):
            return 2 * jax.lax.stop_gradient(ctx.saved_tensors[0]) * grad_output

    report = compare(Stopped, in_library(Square, Torch), random((3,)))
    assert {what for what, verdict in verdicts(report).items() if verdict != "equal"} == {"second derivative, input 0"}


@row("H6")
def test_rounding_is_distinguished_from_a_wrong_formula():
    def unstable(x):
        return x + 1e4 - 1e4

    report = compare(unstable, lambda x: x * 1.0, random((5,)))
    assert verdicts(report)["output 0"] == "rounding"
    (row,) = [row for row in report.rows if row.what == "output 0"]
    assert row.double_error < 1e-9 < row.relative_error
    assert jaxfn.paritycheck(unstable, lambda x: x * 1.0, random((5,)), atol=1e-2)


@row("H6")
def test_a_kink_is_named():
    TorchAbs = make_function(Torch, torch.abs, lambda g, x: g * torch.sign(x))
    report = compare(lambda x: jnp.abs(x), TorchAbs, [np.array([0.0, 1.0, -2.0], np.float32)])
    assert verdicts(report)["gradient of input 0"] == "kink"
    assert "clamp, abs" in str(report)


# It saves an intermediate, whose derivative torch drops from second derivatives.
TorchSwish = in_library(Swish, Torch)


def swish(factor=1.0, of_stopped=False):
    """Returns a port of `TorchSwish`, with its gradient times a factor, or without the second derivative by `x`."""

    def backward(ctx, grad_output):
        x, s = ctx.saved_tensors
        x = jax.lax.stop_gradient(x) if of_stopped else x
        return factor * grad_output * (s + x * s * (1 - s))

    return jaxfn.autograd_function(Swish.forward, backward)


SECOND = "second derivative, input 0"


@row("H6")
@pytest.mark.parametrize(
    "port",
    [
        jaxfn.from_torch(TorchSwish),
        jaxfn.from_torch(TorchSwish.apply),
        jax.jit(jaxfn.from_torch(TorchSwish).apply),
        jax.checkpoint(swish()),
    ],
    ids=["adopted", "function", "jit", "checkpoint"],
)
@pytest.mark.parametrize("is_recorded", [False, True], ids=["live", "recorded"])
def test_a_saved_intermediate_is_a_note(port, is_recorded, tmp_path):
    inputs = random((4,))
    if is_recorded:
        jaxfn.record_reference(TorchSwish, inputs, tmp_path / "swish.npz")
        report = compare(port, tmp_path / "swish.npz")
    else:
        report = compare(port, TorchSwish, inputs)
    assert report, report
    assert {what for what, verdict in verdicts(report).items() if verdict != "equal"} == {SECOND}
    assert verdicts(report)[SECOND] == "intermediate"
    (note,) = report.notes
    assert "neither an input nor an output" in note
    assert "Save inputs or outputs" in note


@row("H6")
@pytest.mark.parametrize(
    ("port", "wrong"),
    [
        (swish(1.001), "gradient of input 0"),
        (swish(of_stopped=True), SECOND),
        (lambda x: swish()(x) * 1.001, "output 0"),
        (
            lambda x: x * jax.nn.sigmoid(x),
            SECOND,
        ),  # it saves nothing: only the port has the whole second derivative
    ],
    ids=["gradient", "second", "output", "without"],
)
def test_a_saved_intermediate_excuses_nothing_else(port, wrong):
    report = compare(port, TorchSwish, random((4,)))
    assert not report
    assert verdicts(report)[wrong] == "formula"


@row("H6")
def test_complex_in_torchs_convention():
    torch_square = in_library(ComplexSquare, Torch)
    z = (np.array([1.0, -2.0]) + 1j * np.array([0.5, 3.0])).astype(np.complex64)
    assert jaxfn.paritycheck(lambda z: z * z, torch_square, [z])
    port = jaxfn.autograd_function(lambda ctx, z: z * z, lambda ctx, g: 2 * g)
    wrong = compare(port, torch_square, [z])
    assert verdicts(wrong)["gradient of input 0"] == "formula"


@row("H6")
def test_shapes_dtypes_and_missing_outputs():
    def three(x):
        return x * 2, x.sum(), (x > 0)

    def port(x):
        return x[None] * 2, x.sum().astype(jnp.float16)

    found = verdicts(compare(port, three, random((3,)), second_order=False))
    assert found["output 0"] == "shape (1, 3)"
    assert found["output 1"] == "dtype float16"
    assert found["output 2"] == "missing"
    extra = compare(lambda x: (x * 2, x), lambda x: x * 2, random((3,)), second_order=False)
    assert not extra
    assert verdicts(extra)["output 1"] == "extra"


@row("H6")
def test_another_number_of_outputs_is_said_once_and_right_gradients_are_equal(tmp_path):
    def one(x):
        return torch.sin(x)

    def port(x):
        return jnp.sin(x), jnp.cos(x)

    (x,) = random((3, 2))
    with pytest.raises(jaxfn.CheckError, match="^paritycheck of port, a port of one: FAILED ") as failure:
        jaxfn.paritycheck(port, one, [x])
    report = failure.value.report
    wrong = {what: verdict for what, verdict in verdicts(report).items() if verdict != "equal"}
    assert wrong == {"output 1": "extra"} and "gradient of input 0" in verdicts(report)
    assert report.notes[0].endswith("Derivatives are those of output 0 alone.")
    assert (report.port, report.reference, report.failures[0].port) == ("port", "one", "port")
    doubled = compare(lambda x: (port(x)[0] * 2, x), one, [x])
    assert verdicts(doubled)["gradient of input 0"] == "formula"  # a wrong gradient is still found

    jaxfn.record_reference(one, [x], tmp_path / "one.npz")
    assert verdicts(compare(port, tmp_path / "one.npz")) == verdicts(report)
    jaxfn.record_reference(lambda x: (x.sin(), x.cos()), [x], tmp_path / "two.npz")
    missing = compare(jnp.sin, tmp_path / "two.npz")
    assert verdicts(missing) == {"output 0": "equal", "output 1": "missing"}
    assert missing.notes[0].endswith("Derivatives are not compared.")


@row("H6")
@pytest.mark.parametrize(("factor", "verdict"), [(1, "equal"), (3, "formula")])
def test_derivatives_are_compared_for_the_outputs_that_both_return(factor, verdict):
    """One of three outputs has another shape, and one is missing."""

    @jaxfn.function
    def port(ctx, x):
        ctx.save_for_backward(x)
        return x[0] * 2, x**3

    @port.backward
    def _(ctx, g0, g1):
        (x,) = ctx.saved_tensors
        return jnp.zeros_like(x).at[0].set(2 * g0) + factor * 3 * x**2 * g1

    (x,) = random((3, 2))
    report = compare(port, lambda x: (x * 2, x**3, x.exp()), [x])
    found = verdicts(report)
    assert [found.pop(f"output {i}") for i in range(3)] == ["shape (2,)", "equal", "missing"]
    assert found["gradient of input 0"] == found["second derivative, input 0"] == verdict
    assert set(found) == {"gradient of input 0", "second derivative, input 0", "second derivative, grad_output 1"}


class TorchSine(torch.nn.Module):
    def forward(self, x):
        return torch.sin(x)


@row("H6")
@pytest.mark.parametrize(
    ("port", "reference", "names"),
    [
        (Square, in_library(Square, Torch).apply, "Square"),
        (jaxfn.from_torch(in_library(Square, Torch)).apply, lambda x: x * x, "Square, a port of <lambda>"),
        (lambda x: jnp.sin(x), TorchSine().forward, "<lambda>, a port of TorchSine"),
        (jaxfn.from_torch(TorchSine()), TorchSine(), "TorchSine"),
        (jaxfn.from_torch(TorchSine()), torch.sin, "TorchSine, a port of sin"),
        (functools.partial(jax.jit(jnp.square)), in_library(Square, Torch), "square, a port of Square"),
    ],
)
def test_a_report_names_the_functions(port, reference, names):
    report = jaxfn.paritycheck(port, reference, random((3,)), second_order=False)
    assert str(report).startswith(f"paritycheck of {names}: passed (")
    assert {row.port for row in report.rows} == {report.port} == {names.partition(",")[0]}


@row("H6")
def test_64_bit_follows_the_setting():
    assert jaxfn.paritycheck(lambda x: jnp.sin(x), torch.sin, random((3,), dtype=np.float64))
    with jax.enable_x64(True):
        report = compare(lambda x: jnp.sin(x), torch.sin, random((3,), dtype=np.float64))
    assert report
    assert report.rows[0].relative_error < 1e-12


@row("H6")
def test_no_second_derivative_in_torch_is_a_note():
    TorchOnce = make_function(Torch, torch.square, lambda g, x: 2 * x * g)
    TorchOnce.backward = staticmethod(torch.autograd.function.once_differentiable(TorchOnce.backward))
    report = compare(lambda x: x**2, TorchOnce, random((3,)))
    assert report
    assert "torch has no second derivatives" in str(report)


@row("H6")
def test_the_report_is_a_table_and_json():
    report = compare(Linear, TorchLinear, LINEAR)
    content = json.loads(report.to_json())
    assert content["passed"] is True
    assert content["versions"]["torch"] == torch.__version__
    assert [row["what"] for row in content["rows"]] == [row.what for row in report.rows]
    lines = str(report).splitlines()
    assert len({line.index("equal") for line in lines[2:]}) == 1  # one column


@row("H7")
def test_a_reference_that_runs_on_jax(tmp_path):
    converted = jaxfn.from_torch(TorchLinear)
    for check in (
        lambda: jaxfn.paritycheck(converted, converted, LINEAR),
        lambda: jaxfn.record_reference(converted, LINEAR, tmp_path / "linear.npz"),
    ):
        with pytest.raises(TypeError, match="compares with torch code, and .*LinearFunction.* runs on JAX"):
            check()


@row("H7")
def test_recorded_and_checked_without_torch(tmp_path):
    path = tmp_path / "linear.npz"
    jaxfn.record_reference(TorchLinear, LINEAR, path)
    with np.load(path, allow_pickle=False) as file:
        np.testing.assert_array_equal(file["native/output 0"], TorchLinear.apply(*map(torch.tensor, LINEAR)).numpy())
    script = f"""
        import sys
        sys.modules["torch"] = None  # importing it fails
        import jaxfn
        right = lambda x, w, b: x @ w.T + b
        wrong = lambda x, w, b: x @ w.T + 2 * b
        path = {str(path)!r}
        print(bool(jaxfn.paritycheck(right, path)), bool(jaxfn.paritycheck(wrong, path, raise_exception=False)))
        try:
            jaxfn.paritycheck(right, right, [1.0])
        except ImportError as error:
            print(error)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("True False\n")
    assert "pip install torch" in run.stdout


@row("H7")
def test_python_values_and_bfloat16(tmp_path):
    path = tmp_path / "scaled.npz"
    (x,) = random((3, 2))
    args = [x.astype(jnp.bfloat16), {"by": [2.0, None]}, 3, "name"]
    jaxfn.record_reference(lambda x, how, power, name: x**power * how["by"][0], args, path)
    report = compare(lambda x, how, power, name: x**power * how["by"][0], path)
    assert report.rows[0].dtype == "bfloat16"
    assert report.rows[0].verdict == "equal"


@row("H7")
def test_what_cannot_be_written(tmp_path):
    with pytest.raises(TypeError, match="cannot write argument 1, a function"):
        jaxfn.record_reference(lambda x, f: f(x), [np.ones(2, np.float32), lambda x: x], tmp_path / "f.npz")
    with pytest.raises(TypeError, match="Omit `inputs`"):
        jaxfn.paritycheck(lambda x: x, tmp_path / "f.npz", [1.0])


@row("H7")
def test_a_file_that_was_changed_raises(tmp_path):
    jaxfn.record_reference(torch.sin, random((3,)), tmp_path / "sin.npz")
    with np.load(tmp_path / "sin.npz") as file:
        arrays = dict(file)
    arrays["native/output 0"] = np.zeros(3, np.float32)
    np.savez(tmp_path / "changed.npz", **arrays)
    with pytest.raises(ValueError, match="changed.npz cannot be read .*it was changed after it was written"):
        jaxfn.paritycheck(jnp.zeros_like, tmp_path / "changed.npz")


@row("H6")
@pytest.mark.parametrize("reference", [lambda m: m, lambda m: m.forward, lambda m: lambda x: m(x)])
def test_weights_in_float32(reference):
    """A module is copied to float64; what captures one does not run there, and a note says so."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    port = jaxfn.from_torch(module)
    weight, bias = (np.asarray(port.parameters[f"0.{name}"]) for name in ("weight", "bias"))

    def right(x, by=1.0):
        y = x @ weight.T + bias
        return by * (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5)

    report = compare(right, reference(module), random((4, 3)))
    assert report, report
    is_captured = "torch does not run in float64" in str(report)
    assert is_captured == (report.rows[0].double_error is None)
    assert is_captured or module[1].num_batches_tracked == 0  # the user's module is unchanged
    wrong = compare(lambda x: right(x, 1.01), reference(module), random((4, 3)))
    assert verdicts(wrong)["output 0"] == ("differs" if is_captured else "formula")


@row("H6")
def test_a_port_in_float32_only():
    def port(x):
        return jax.lax.mul(x, jnp.float32(2))  # no promotion

    report = compare(port, lambda x: 2 * x, random((3,)))
    assert report and "JAX does not run in float64" in str(report)


@row("H6")
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8, np.bool_])
def test_integers_are_exact(dtype):
    large = np.array([0, 1, np.iinfo(dtype).max if dtype != np.bool_ else True], dtype)
    other = large.copy()
    other[-1] = not other[-1] if dtype == np.bool_ else other[-1] - 1
    with jax.enable_x64(True):
        assert jaxfn.paritycheck(lambda x: jnp.asarray(large), lambda x: torch.tensor(large), random((3,)))
        report = compare(lambda x: jnp.asarray(other), lambda x: torch.tensor(large), random((3,)))
    assert [(row.verdict, row.max_error) for row in report.failures] == [("formula", 1.0)]
    counts = np.array([7, 1000], np.int32)
    assert jaxfn.paritycheck(lambda x: counts + 1, lambda x: torch.tensor(counts), random((3,)), atol=1)


@row("H6")
def test_none_and_numbers_among_outputs():
    (x,) = random((3,))
    assert jaxfn.paritycheck(lambda x: (None, 2 * x, 3.0), lambda x: (None, 2 * x, 3.0), [x])
    moved = compare(lambda x: (2 * x, None), lambda x: (None, 2 * x), [x])
    assert verdicts(moved) == {"output 1": "missing", "output 0": "extra"}
    number = compare(lambda x: (x, 4.0), lambda x: (x, 3.0), [x])
    assert verdicts(number)["output 1"] == "formula"
    with pytest.raises(TypeError, match="<lambda> returned a set as output 1, which cannot be compared"):
        jaxfn.paritycheck(lambda x: x, lambda x: (x, {x}), [x])


@row("H6")
def test_half_precision_hides_no_wrong_formula():
    (x,) = random((50,), dtype=jnp.bfloat16)

    def port(factor):
        return lambda x: jnp.tanh(x) * factor

    assert jaxfn.paritycheck(port(1.0), torch.tanh, [x])
    report = compare(port(1.01), torch.tanh, [x])
    assert set(verdicts(report).values()) == {"formula"}
    cast = jaxfn.paritycheck(
        lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype),
        lambda x: torch.tanh(x.bfloat16()).to(x.dtype),
        [x],
    )
    assert cast  # the original casts too


@row("H6")
def test_an_error_without_a_text_in_second_derivatives():
    def fail(*_):
        raise NotImplementedError

    Raising = make_function(Torch, torch.clone, fail)
    Doubling = make_function(Torch, lambda x: 2 * x, lambda g, _: Raising.apply(2 * g))
    report = jaxfn.paritycheck(lambda x: 2 * x, Doubling, random((3,)))
    assert "torch has no second derivatives: NotImplementedError" in str(report)


@row("H7")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", ""),
        (b"not an archive", ""),
        (b"PK\x03\x04broken", ""),
        ("truncated", ""),
        ({}, ""),
        ({"format": 2, "jaxfn": "9.0"}, "its format is 2, which jaxfn 9.0 wrote; jaxfn .* reads format 1"),
        ({"dtypes": {}}, r"its format is None, which jaxfn \(unknown\) wrote"),
    ],
)
def test_a_broken_file(content, why, tmp_path):
    path = tmp_path / "sin.npz"
    jaxfn.record_reference(torch.sin, random((3,)), path)
    if isinstance(content, dict):
        np.savez(path, **({"content": np.array(json.dumps(content))} if content else {"x": np.ones(3)}))
    elif content == "truncated":
        path.write_bytes(path.read_bytes()[:-300])
    else:
        path.write_bytes(content)
    message = rf"paritycheck: .*sin.npz cannot be read \(.*{why}.*\)\. Write it with jaxfn\.record_reference"
    with pytest.raises(ValueError, match=message):
        jaxfn.paritycheck(jnp.sin, path)


@row("H6")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shift", [0.0, 1e-3, 3.0])
def test_a_mask_does_not_hide_errors_of_other_numbers(shift, dtype):
    is_lower = np.tril(np.ones((8, 8), bool))
    (q,) = random((8, 4), dtype=dtype)
    with jax.enable_x64(dtype is np.float64):
        report = compare(
            lambda q: jnp.where(is_lower, q @ q.T + shift, -1e9),
            lambda q: torch.where(torch.tensor(is_lower), q @ q.T, torch.tensor(-1e9).to(q.dtype)),
            [q],
        )
    assert bool(report) == (shift == 0.0), report


@row("H6")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_zero_up_to_rounding(seed, dtype):
    """The errors of torch are measured where all is rounding."""
    x, c = (np.random.default_rng(seed).standard_normal(shape).astype(dtype) for shape in ((4, 5), (4, 1)))
    with jax.enable_x64(dtype is np.float64):
        assert jaxfn.paritycheck(lambda x, c: jax.nn.softmax(x + c), lambda x, c: torch.softmax(x + c, -1), [x, c])
