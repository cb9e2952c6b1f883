"""Rows G1 to G6: gradcheck and gradgradcheck, each check with a right and a wrong Function."""

from __future__ import annotations

import sys
import warnings
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import GradcheckError, gradcheck, gradgradcheck
from jaxfn._gradcheck.report import progress as _progress
from tests.support import checking
from tests.support.cases import Linear
from tests.support.checking import failure, normal, passes, scaled_sine
from tests.support.marks import lane_cases, row, sampled, slow


@row("G2")
@pytest.mark.parametrize("factors", [(1.0, 1.1), (1.1, 1.0)], ids=["right first", "wrong first"])
@pytest.mark.parametrize("generated", [False, True], ids=["jvp", "generate_jvp_rule"])
def test_another_forward_mode_of_the_same_name_is_checked_anew(factors, generated):
    """As when a rule is mended in a notebook and checked again."""

    def scaled(factor):
        if generated:
            sine = scaled_sine(factor)
            sine.Function.generate_jvp_rule = True
        else:
            sine = scaled_sine(1.0)
            sine.jvp(lambda ctx, tangent: factor * tangent * jnp.cos(ctx.saved_tensors[0]))
        return sine

    for factor in factors:
        right = gradcheck(scaled(factor), normal(3), check_forward_ad=True, raise_exception=False)
        assert right is (factor == 1.0)


# G1: torch's calls.


@row("G1")
def test_the_seeds_example_without_x64():
    inputs = normal(20, 20), normal(30, 20)
    assert not jax.config.jax_enable_x64
    assert gradcheck(Linear.apply, inputs, eps=1e-6, atol=1e-4) is True
    assert not jax.config.jax_enable_x64


@row("G1")
def test_takes_torchs_signature():
    torch = pytest.importorskip("torch")
    import inspect

    for ours, theirs in ((gradcheck, torch.autograd.gradcheck), (gradgradcheck, torch.autograd.gradgradcheck)):
        own = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(theirs).parameters.items():
            assert name in own
            if parameter.default is not parameter.empty and name != "masked":
                assert own[name].default == parameter.default, name


@row("G1")
def test_positional_tolerances_and_a_single_array():
    assert gradcheck(jnp.sin, normal(3), 1e-6, 1e-4) is True
    assert gradgradcheck(jnp.sin, normal(3), None, 1e-6, 1e-4) is True
    assert gradcheck(Linear.apply, [normal(2, 3), normal(4, 3)], masked=True) is True


@row("G1")
def test_every_kind_of_callable():
    @jax.custom_vjp
    def by_hand(x):
        return jnp.sin(x)

    by_hand.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),))

    @jax.custom_jvp
    def forwards(x):
        return jnp.sin(x)

    forwards.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * jnp.cos(primals[0])))
    for function in (Linear.apply, lambda x, w: scaled_sine(1.0)(Linear.apply(x, w)), jax.jit(Linear.apply)):
        passes(function, (normal(2, 3), normal(4, 3)))
    for function in (scaled_sine(1.0), jnp.sin, by_hand, forwards, jax.jit(by_hand), lambda x: by_hand(x) ** 2):
        passes(function, normal(3))


@row("G1")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda x: f(x)], ids=["itself", "jit", "lambda"])
def test_a_wrong_custom_vjp_is_caught(wrap):
    @jax.custom_vjp
    def by_hand(x):
        return jnp.sin(x)

    by_hand.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (-g * jnp.cos(x),))
    assert failure(wrap(by_hand), normal(3)).mismatches[0].kind == "wrong sign"


@row("G1")
def test_a_fwd_with_another_value_is_caught():
    @jax.custom_vjp
    def by_hand(x):
        return jnp.sin(x)

    by_hand.defvjp(lambda x: (jnp.sin(x) + 1, x), lambda x, g: (g * jnp.cos(x),))
    assert "another value when it is differentiated" in failure(by_hand, normal(3)).problems[0]


@row("G1")
def test_argnums():
    def half_right(x, y):
        return scaled_sine(1.0)(x) + scaled_sine(2.0)(y)

    xs = normal(3), normal(3, seed=1)
    passes(half_right, xs, argnums=0)
    assert [m.input for m in failure(half_right, xs).mismatches] == ["input 1 ('y')"]
    assert [m.input for m in failure(half_right, xs, argnums=(-1,)).mismatches] == ["input 1 ('y')"]
    passes(lambda x, n: x**n, (normal(3), 2.0))
    passes(lambda x, n: abs(x) ** n, (normal(3), 2.0), argnums=(0, 1))
    for argnums, message in ((2, "there are 2 inputs"), (1, "no floating or complex array")):
        with pytest.raises(ValueError, match=message):
            gradcheck(lambda x, n: x, (normal(3), 3), argnums=argnums)


@row("G1")
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_nothing_to_differentiate(check):
    with pytest.raises(ValueError, match="at least one floating or complex array"):
        check(lambda x: x, np.arange(3))
    with pytest.raises(ValueError, match="no floating or complex output"):
        check(lambda x: x > 0, normal(3))


@row("G1")
def test_impossible_wishes():
    with pytest.raises(ValueError, match="must be one of"):
        gradcheck(jnp.sin, normal(3), reference="torch")
    with pytest.raises(ValueError, match="no rule to take off"):
        gradcheck(jnp.sin, normal(3), reference="autodiff")
    with pytest.raises(ValueError, match="check_backward_ad=True"):
        gradcheck(jnp.sin, normal(3), check_backward_ad=False, check_forward_ad=True, check_batched_grad=True)
    with pytest.raises(ValueError, match="check_forward_ad=True"):
        gradcheck(jnp.sin, normal(3), check_batched_forward_grad=True)
    with pytest.raises(ValueError, match="nothing is left"):
        gradcheck(jnp.sin, normal(3), check_backward_ad=False)


@row("G1")
def test_references_and_keys():
    with pytest.raises(TypeError, match=r"input 0 \('ref'\) is a jax.Ref"):
        gradcheck(lambda ref, x: x * ref[...], (jax.new_ref(jnp.ones(3)), normal(3)))
    passes(lambda key, x: x * jax.random.normal(key, x.shape), (jax.random.key(0), normal(3)))


@row("G1")
def test_errors_of_the_function_are_its_own():
    def broken(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        gradcheck(broken, normal(3))
    assert not jax.config.jax_enable_x64


@row("G1")
def test_returns_or_raises():
    for check in (gradcheck, gradgradcheck):
        assert check(scaled_sine(1.0), normal(3)) is True
    assert gradcheck(scaled_sine(2.0), normal(3), raise_exception=False) is False
    assert not gradcheck(scaled_sine(2.0), normal(3), return_report=True)
    with pytest.raises(RuntimeError, match="wrong backward of output 0"):
        gradcheck(scaled_sine(2.0), normal(3))


# G2: the references.


@row("G2")
def test_every_reference():
    for reference in ("both", "finite_differences", "autodiff"):
        passes(scaled_sine(1.0), normal(3), reference=reference)
        (mismatch,) = failure(scaled_sine(1.001), normal(3), reference=reference).mismatches
        entry = mismatch.entries[0]
        assert (entry.numeric is None) == (reference == "autodiff")
        assert (entry.autodiff is None) == (reference == "finite_differences")


def rounding(surrogate_factor=1.0):
    @jaxfn.function
    def straight_through(ctx, x):
        return jnp.round(x * 4) / 4

    @straight_through.backward
    def _(ctx, grad_output):
        return surrogate_factor * grad_output

    return straight_through


@row("G2")
def test_a_deliberate_rule_needs_its_surrogate():
    report = failure(rounding(), normal(3))
    assert report.mismatches[0].kind == "a gradient where there is none"
    assert any("surrogate=" in note for note in report.notes)
    passes(rounding(), normal(3), surrogate=lambda x: x)
    passes(rounding(), normal(3), surrogate=lambda x: x, check=gradgradcheck)
    report = failure(rounding(1.1), normal(3), surrogate=lambda x: x)
    assert report.mismatches[0].kind == "a constant factor: 1.1 times what it should be"
    assert not any("surrogate=" in note for note in report.notes)


@row("G2")
def test_finite_differences_decide():
    @jaxfn.function
    def square(ctx, x):
        ctx.save_for_backward(x)
        return x * jax.lax.stop_gradient(x)

    @square.backward
    def right(ctx, grad_output):
        return 2 * ctx.saved_tensors[0] * grad_output

    report = passes(square, normal(3))
    assert "finite differences decided" in report.notes[-1]
    square.backward(lambda ctx, grad_output: ctx.saved_tensors[0] * grad_output)
    report = failure(square, normal(3))
    assert any("finite differences decided" in note for note in report.notes)
    assert report.mismatches[0].kind == "a constant factor: 0.5 times what it should be"


@row("G2")
@sampled
@pytest.mark.parametrize("place", lane_cases([0, 1777, 3999], [1777]))
@pytest.mark.parametrize("size", lane_cases([1.0, 1e-2], [1e-2]))
def test_one_stopped_gradient_among_thousands_is_seen(place, size):
    """Autodiff is compared with finite differences in random directions only, and that is enough."""
    weights = np.random.default_rng(0).standard_normal(4000)
    hidden = size * (np.arange(4000) == place)

    @jaxfn.function
    def f(ctx, x):
        ctx.save_for_backward(x)
        return (weights * x**2).sum() + (hidden * jax.lax.stop_gradient(x) ** 2).sum()

    x = np.random.default_rng(1).uniform(0.5, 1.5, 4000)
    f.backward(lambda ctx, grad_output: grad_output * 2 * ctx.saved_tensors[0] * weights)  # as autodiff has it
    assert not jaxfn.gradcheck(f, x, raise_exception=False)
    f.backward(lambda ctx, grad_output: grad_output * 2 * ctx.saved_tensors[0] * (weights + hidden))
    assert jaxfn.gradcheck(f, x)


@row("G2")
def test_functions_inside_forward_keep_their_rule():
    """The bare forward of the outer one has the inner one's derivative, which is not that of its operations."""
    inner = rounding()

    @jaxfn.function
    def outer(ctx, x):
        ctx.save_for_backward(x)
        return inner(x) * x

    @outer.backward
    def _(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (jnp.round(x * 4) / 4 + x)

    passes(outer, normal(3), reference="autodiff")
    failure(outer, normal(3), reference="finite_differences")


@row("G2")
def test_outermost_functions_lose_their_rule():
    failure(lambda x: jnp.sin(rounding()(x)), normal(3), reference="autodiff")


@row("G2")
def test_a_forward_that_jax_cannot_differentiate():
    @jaxfn.function
    def on_the_host(ctx, x):
        ctx.save_for_backward(x)
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    @on_the_host.backward
    def _(ctx, grad_output):
        return grad_output * jnp.cos(ctx.saved_tensors[0])

    report = passes(on_the_host, normal(3))
    assert any("finite differences only" in note for note in report.notes)
    with pytest.raises(ValueError, match="not possible"):
        gradcheck(on_the_host, normal(3), reference="autodiff")
    on_the_host.backward(lambda ctx, grad_output: grad_output * jnp.cos(ctx.saved_tensors[0]) * 1.001)
    failure(on_the_host, normal(3))


@row("G2")
def test_no_batching_rule_is_no_obstacle():
    @jaxfn.function
    def unbatched(ctx, x):
        ctx.save_for_backward(x)
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @unbatched.backward
    def _(ctx, grad_output):
        return grad_output * jnp.cos(ctx.saved_tensors[0])

    report = passes(unbatched, normal(3))
    assert any("compiled loop" in note for note in report.notes)
    unbatched.backward(lambda ctx, grad_output: -grad_output * jnp.cos(ctx.saved_tensors[0]))
    assert failure(unbatched, normal(3)).mismatches[0].kind == "wrong sign"


@row("G2")
def test_python_that_looks_at_values():
    @jaxfn.function
    def branching(ctx, x):
        ctx.save_for_backward(x)
        return jnp.sin(x) if x[0] > 0 else jnp.cos(x)

    @branching.backward
    def _(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (jnp.cos(x) if x[0] > 0 else -jnp.sin(x))

    for x in (abs(normal(3)), -abs(normal(3))):
        report = passes(branching, x)
        assert any("Python loop" in note for note in report.notes)
    passes(branching, abs(normal(3)), fast_mode=True)
    branching.backward(lambda ctx, grad_output: grad_output * jnp.cos(ctx.saved_tensors[0]))
    passes(branching, abs(normal(3)))
    failure(branching, -abs(normal(3)))
    failure(branching, -abs(normal(3)), fast_mode=True)


def batched_as(factor):
    """2 x, whose backward is `factor` x under vmap."""

    @jax.custom_batching.custom_vmap
    def doubled(x):
        return 2 * x

    doubled.def_vmap(lambda axis_size, in_batched, x: (factor * x, in_batched[0]))

    @jaxfn.function
    def function(ctx, x):
        return 2 * x

    @function.backward
    def _(ctx, grad_output):
        return doubled(grad_output)

    return function


@row("G2")
def test_wrong_batching_is_not_taken_for_a_wrong_rule():
    report = passes(batched_as(3), normal(3))
    assert any("compiled loop" in note for note in report.notes)


@row("G2")
def test_programs_of_other_batching_rules_are_not_used_again():
    """The traces of both read the same; what they do when they are batched is in no text."""
    for _ in range(2):
        for factor, in_a_loop in ((2, False), (3, True)):
            report = passes(batched_as(factor), normal(3))
            assert any("compiled loop" in note for note in report.notes) is in_a_loop


# G3: precision.


@row("G3")
@pytest.mark.parametrize("setting", [False, True])
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_x64_setting_is_left_alone(setting, factor):
    with jax.enable_x64(setting):
        assert gradcheck(scaled_sine(factor), normal(3), raise_exception=False) is (factor == 1.0)
        assert gradgradcheck(scaled_sine(factor), normal(3), raise_exception=False) is True or factor != 1.0
        assert jax.config.jax_enable_x64 is setting
        assert jnp.ones(1).dtype == (jnp.float64 if setting else jnp.float32)


@row("G3")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_lower_precision_inputs_warn_and_are_checked_in_double(dtype):
    x = jnp.asarray(normal(3), dtype)
    with pytest.warns(UserWarning, match=rf"input 0 \('x'\) is {dtype}, which is not double precision"):
        assert gradcheck(scaled_sine(1.0), x)
    with pytest.warns(UserWarning, match="not double precision"):
        assert not gradcheck(scaled_sine(1.001), x, raise_exception=False)


@row("G3")
@pytest.mark.filterwarnings("error")
def test_double_precision_does_not_warn():
    assert gradcheck(scaled_sine(1.0), normal(3))
    with jax.enable_x64(True):
        assert gradcheck(scaled_sine(1.0), jnp.asarray(normal(3)) * 1j)


@row("G3")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_function_that_computes_in_lower_precision(dtype):
    def rough(factor):
        @jaxfn.function
        def sine(ctx, x):
            ctx.save_for_backward(x.astype(dtype))
            return jnp.sin(x.astype(dtype)).astype(x.dtype)

        @sine.backward
        def _(ctx, grad_output):
            (x,) = ctx.saved_tensors
            return factor * grad_output * jnp.cos(x).astype(grad_output.dtype)

        return sine

    report = passes(rough(1.0), normal(5))
    assert any("lower precision" in note for note in report.notes)
    failure(rough(-1.0), normal(5))


@row("G3")
def test_chosen_tolerances_are_torchs_formula():
    for rule, atol, rtol, verdict in (
        (1.001, 1e-5, 1.1e-3, True),
        (1.001, 1e-9, 0.9e-3, False),
        (1.1, 0.2, 0.0, True),
        (1.1, 0.05, 0.0, False),
    ):
        x = np.zeros(3)  # where the derivative is 1
        assert gradcheck(scaled_sine(rule), x, atol=atol, rtol=rtol, raise_exception=False) is verdict
        assert gradcheck(scaled_sine(rule), x, 1e-6, atol, rtol, False, reference="finite_differences") is verdict


@row("G3")
@pytest.mark.parametrize("reference", lane_cases(["both", "finite_differences", "autodiff"], ["finite_differences"]))
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_factor_of_a_thousandth_is_caught_at_every_size(reference, size):
    def function(factor):
        return lambda x: size * scaled_sine(factor)(x)

    passes(function(1.0), normal(5), reference=reference)
    for factor in (1.001, 0.999):
        failure(function(factor), normal(5), reference=reference)


@row("G3")
def test_rounding_is_not_mistaken_for_a_mistake():
    """Right rules that lose many digits on the way: 1e5 + x, minus 1e5."""

    @jaxfn.function
    def shifted(ctx, x):
        ctx.save_for_backward(x)
        return (x + 1e5) ** 3 - 3e5 * (x + 1e5) ** 2 + 3e10 * (x + 1e5) - 1e15

    @shifted.backward
    def _(ctx, grad_output):
        return grad_output * 3 * ctx.saved_tensors[0] ** 2

    passes(shifted, 1e3 * normal(20), reference="autodiff")


# G4: the report.


@row("G4")
def test_the_report_says_where_and_how_much():
    def tangled(tree, n):
        return {"value": scaled_sine(2.0)(tree["x"][0]), "n": n}

    x = normal(2, 3)
    report = failure(tangled, ({"x": [x]}, 3))
    (mismatch,) = report.mismatches
    assert mismatch.output == "output 0['value']" and mismatch.input == "input 0 ('tree')['x'][0]"
    assert (mismatch.count, mismatch.total) == (6, 36)
    assert mismatch.kind == "a constant factor: 2 times what it should be"
    worst = max(range(6), key=lambda i: abs(np.cos(x.flat[i])))
    entry = mismatch.entries[0]
    assert entry.output_index == entry.input_index == tuple(np.unravel_index(worst, x.shape))
    expected = np.cos(x[entry.input_index])
    assert entry.analytic == pytest.approx(2 * expected) and entry.autodiff == pytest.approx(expected)
    assert entry.numeric == pytest.approx(expected, abs=1e-8)
    assert entry.absolute_error == pytest.approx(abs(expected)) and entry.relative_error == pytest.approx(1)
    assert 0 < entry.tolerance < 1e-5
    text, file_name = str(report), checking.__file__
    for part in ("output 0['value']", "input 0 ('tree')['x'][0]", "6 of 36", mismatch.kind, "autodiff", file_name):
        assert part in text, text
    line = int(text.split(f"{file_name}:")[1].split()[0])
    with open(file_name) as file:
        assert "sine.backward" in file.readlines()[line - 1]


@row("G4")
def test_the_report_is_data(tmp_path):
    import json
    import pickle

    with pytest.raises(GradcheckError) as caught:
        gradcheck(scaled_sine(2.0), normal(3))
    report = caught.value.report
    assert not report and not report.passed
    content = report.to_dict()
    assert (
        json.loads(json.dumps(content))["mismatches"][0]["entries"][0]["analytic"]
        == report.mismatches[0].entries[0].analytic
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@row("G4")
def test_the_report_draws(tmp_path):
    pytest.importorskip("matplotlib")
    report = failure(scaled_sine(2.0), normal(3))
    figure = report.plot()
    figure.savefig(tmp_path / "jacobian.png")
    assert [axes.get_title() for axes in figure.axes[:3]] == ["analytic", "numeric", "error"]
    shown = np.asarray(figure.axes[2].images[0].get_array())
    np.testing.assert_allclose(shown, np.diag(np.cos(normal(3))), atol=1e-6)
    with pytest.raises(ValueError, match="no mismatch 1"):
        report.plot(1)


def linear_rule(backward):
    """x @ w, with some backward."""

    class Product(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w

    Product.backward = staticmethod(backward)
    return Product.apply


KINDS = {
    "wrong sign": lambda ctx, g: (-g @ ctx.saved_tensors[1].T, None),
    "zero everywhere": lambda ctx, g: (None, None),
    "a constant factor: 0.5 times": lambda ctx, g: (g @ ctx.saved_tensors[1].T / 2, None),
    "transposed": lambda ctx, g: (g @ ctx.saved_tensors[1], None),
    "the gradient is transposed": lambda ctx, g: ((g @ ctx.saved_tensors[1].T).T, None),
    "not a number": lambda ctx, g: (g * jnp.nan, None),
}


@row("G4")
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_mistakes(kind):
    report = failure(linear_rule(KINDS[kind]), (normal(3, 3), normal(3, 3, seed=1)), argnums=0)
    assert report.mismatches[0].kind.startswith(kind)


@row("G4")
def test_more_kinds_of_mistakes():
    def added(gradient_of_bias):
        @jaxfn.function
        def add(ctx, x, bias):
            return x + bias

        add.backward(lambda ctx, g: (g, gradient_of_bias(g)))
        return add

    inputs = normal(4, 3), normal(3)
    passes(added(lambda g: g.sum(0)), inputs)
    passes(added(lambda g: g), inputs)  # summed by jaxfn
    assert "missing sum over a broadcast axis" in failure(added(lambda g: g[0]), inputs).mismatches[0].kind

    @jaxfn.function
    def softmax(ctx, x):
        y = jax.nn.softmax(x)
        ctx.save_for_backward(y)
        return y

    @softmax.backward
    def _(ctx, grad_output):
        (y,) = ctx.saved_tensors
        return grad_output * y * (1 - y)

    assert "off-diagonal entries are missing" in failure(softmax, normal(4)).mismatches[0].kind


@row("G4")
@slow
def test_large_jacobians_show_their_worst_entries():
    n = 600

    @jaxfn.function
    def cumulative(ctx, x):
        return jnp.cumsum(x)

    @cumulative.backward
    def _(ctx, grad_output):
        gradient = jnp.cumsum(grad_output[::-1])[::-1]
        return gradient.at[123].add(0.5 * grad_output[456])

    for reference in ("both", "finite_differences", "autodiff"):
        (mismatch,) = failure(cumulative, normal(n), reference=reference).mismatches
        assert (mismatch.count, mismatch.total) == (1, n * n)
        (entry,) = mismatch.entries
        assert (entry.output_index, entry.input_index) == ((456,), (123,))
        assert entry.analytic == pytest.approx(1.5) and entry.absolute_error == pytest.approx(0.5)
        assert not mismatch.matrices
    with pytest.raises(ValueError, match="too large"):
        failure(cumulative, normal(n)).plot()


def test_a_check_of_more_than_two_seconds_shows_its_progress_by_tqdm(monkeypatch):
    bars = []

    class FakeBar:
        def __init__(self, desc, total, initial, **options):
            self.desc, self.total, self.n, self.is_closed = desc, total, initial, False
            bars.append(self)

        def update(self, count):
            assert not self.is_closed
            self.n += count

        def close(self):
            self.is_closed = True

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=FakeBar))
    passes(scaled_sine(1.0), normal(3))
    assert not bars
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=count(step=2.1).__next__))
    passes(scaled_sine(1.0), normal(3))
    (bar,) = bars
    assert "gradcheck of " in bar.desc and bar.n == bar.total > 0 and bar.is_closed


def test_without_tqdm_there_is_no_progress(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=count(step=2.1).__next__))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    passes(scaled_sine(1.0), normal(3))
    assert capsys.readouterr() == ("", "")


def test_warnings_are_none(recwarn):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(Linear.apply, (normal(2, 3), normal(4, 3), normal(4)))
