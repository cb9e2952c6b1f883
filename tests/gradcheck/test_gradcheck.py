"""Rows G1 to G4: what gradcheck and gradgradcheck take, compare with and report."""

from __future__ import annotations

import inspect
import json
import pickle
import sys
import time
import warnings
from itertools import count
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import GradcheckError, gradcheck, gradgradcheck, kernelcheck
from tests.support import checking
from tests.support.cases import Linear
from tests.support.checking import failure, normal, of_inputs, passes, rule, saving, scaled_sine
from tests.support.kernel_faults import KERNELS, all_but
from tests.support.marks import cells, row, slow

REFERENCES = ["both", "finite_differences", "autodiff"]


# G1: torch's calls.


@row("G1")
def test_the_example_of_torch_without_x64():
    inputs = normal(20, 20), normal(30, 20)
    assert not jax.config.jax_enable_x64
    assert gradcheck(Linear.apply, inputs, eps=1e-6, atol=1e-4)
    assert not jax.config.jax_enable_x64


@row("G1")
def test_takes_torchs_signature():
    torch = pytest.importorskip("torch")
    for ours, theirs in ((gradcheck, torch.autograd.gradcheck), (gradgradcheck, torch.autograd.gradgradcheck)):
        own = inspect.signature(ours).parameters
        for name, parameter in inspect.signature(theirs).parameters.items():
            assert name in own
            assert own[name].kind is parameter.kind
            if parameter.default is not parameter.empty and name not in ("eps", "atol", "rtol", "masked"):
                assert own[name].default == parameter.default, name


@row("G1")
def test_a_single_array_a_list_and_a_class():
    assert gradgradcheck(jnp.sin, normal(3), None, eps=1e-6, atol=1e-4)
    assert gradcheck(Linear, [normal(2, 3), normal(4, 3)], masked=True)


def by_jax(sign):
    """sin as a custom_vjp."""
    sine = jax.custom_vjp(jnp.sin)
    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (sign * g * jnp.cos(x),))
    return sine


def by_jvp(sign):
    sine = jax.custom_jvp(jnp.sin)
    sine.defjvp(lambda x, t: (jnp.sin(*x), sign * t[0] * jnp.cos(*x)))
    return sine


CALLABLES = {
    "Function": scaled_sine,
    "jit of a Function": lambda sign: jax.jit(scaled_sine(sign)),
    "custom_vjp": by_jax,
    "jit of a custom_vjp": lambda sign: jax.jit(by_jax(sign)),
    "function of a custom_vjp": lambda sign: lambda x: by_jax(sign)(x),
    "custom_jvp": by_jvp,
}


@row("G1")
@cells("kind", ["function of a custom_vjp", "custom_jvp"], CALLABLES)
def test_every_kind_of_callable(kind):
    passes(CALLABLES[kind](1), normal(3))
    assert failure(CALLABLES[kind](-1), normal(3)).mismatches[0].mistake == "wrong sign"


@row("G1")
def test_functions_without_a_rule_and_random_keys():
    passes(jnp.sin, normal(3))
    passes(lambda key, x: x * jax.random.normal(key, x.shape), (jax.random.key(0), normal(3)))


@row("G1")
def test_argnums():
    def half_right(x, y):
        return scaled_sine(1.0)(x) + scaled_sine(2.0)(y)

    xs = normal(3), normal(3, seed=1)
    passes(half_right, xs, argnums=0)
    assert [m.input for m in failure(half_right, xs, argnums=(-1,)).mismatches] == ["input 1 ('y')"]


def with_ref(check):
    check(lambda ref, x: x * ref[...], (jax.new_ref(jnp.ones(3)), normal(3)))


REJECTED = {
    "no inexact input": (lambda check: check(lambda x: x, np.arange(3)), "at least one floating or complex array"),
    "no inexact output": (lambda check: check(lambda x: x > 0, normal(3)), "no floating or complex output"),
    "unknown argnum": (lambda check: check(jnp.power, (normal(3), 3), argnums=2), "there are 2 inputs"),
    "integer argnum": (lambda check: check(jnp.power, (normal(3), 3), argnums=1), "no floating or complex array"),
    "Ref": (with_ref, r"input 0 \('ref'\) is a jax.Ref"),
    "unknown reference": (lambda check: check(jnp.sin, normal(3), against="torch"), "must be one of"),
    "negative tolerance": (lambda check: check(jnp.sin, normal(3), atol=-1), "atol=-1, expected a finite number"),
    "no tolerance": (lambda check: check(jnp.sin, normal(3), rtol=float("nan")), "rtol=nan, expected a finite number"),
    "no step": (lambda check: check(jnp.sin, normal(3), eps=0), "eps=0, expected a finite number > 0"),
    "no memory": (lambda check: check(jnp.sin, normal(3), max_memory=0), "max_memory=0, expected"),
    "autodiff without a rule": (lambda _: gradcheck(jnp.sin, normal(3), against="autodiff"), "it has no rule"),
    "batched without backward": (
        lambda _: gradcheck(
            jnp.sin, normal(3), check_backward_ad=False, check_forward_ad=True, check_batched_grad=True
        ),
        "check_backward_ad=True",
    ),
    "batched without forward": (
        lambda _: gradcheck(jnp.sin, normal(3), check_batched_forward_grad=True),
        "check_forward_ad=True",
    ),
    "no mode": (lambda _: gradcheck(jnp.sin, normal(3), check_backward_ad=False), "nothing is left"),
    "no mode twice": (lambda _: gradgradcheck(jnp.sin, normal(3), check_rev_over_rev=False), "nothing is left"),
}


@row("G1")
@pytest.mark.parametrize("rejected", REJECTED)
def test_options_that_raise(rejected):
    call, message = REJECTED[rejected]
    for check in (gradcheck, gradgradcheck):
        with pytest.raises(TypeError if rejected == "Ref" else ValueError, match=message):
            call(check)


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
        assert type(check(scaled_sine(1.0), normal(3))) is jaxfn.reports.GradcheckReport
    assert not gradcheck(scaled_sine(2.0), normal(3), raise_exception=False)
    with pytest.raises(RuntimeError, match="wrong backward of output 0"):
        gradcheck(scaled_sine(2.0), normal(3))


# G2: the references.


@row("G2")
def test_every_reference():
    for reference in REFERENCES:
        (mismatch,) = failure(scaled_sine(1.001), normal(3), against=reference).mismatches
        entry = mismatch.entries[0]
        assert (entry.numeric is None) == (reference == "autodiff")
        assert (entry.autodiff is None) == (reference == "finite_differences")


def rounding(factor=1.0):
    return rule(lambda ctx, x: jnp.round(x * 4) / 4, lambda ctx, g: factor * g)


@row("G2")
def test_a_deliberate_rule_needs_its_surrogate():
    report = failure(rounding(), normal(3))
    assert report.mismatches[0].mistake == "a gradient where there is none"
    assert any("surrogate=" in note for note in report.notes)
    passes(rounding(), normal(3), surrogate=lambda x: x)
    passes(rounding(), normal(3), surrogate=lambda x: x, check=gradgradcheck)
    report = failure(rounding(1.1), normal(3), surrogate=lambda x: x)
    assert report.mismatches[0].mistake == "a constant factor: 1.1 times what it should be"
    assert not any("surrogate=" in note for note in report.notes)


@row("G2")
def test_finite_differences_decide():
    def square(factor):
        return of_inputs(lambda x: x * jax.lax.stop_gradient(x), lambda g, x: factor * x * g)

    assert "finite differences decided" in passes(square(2), normal(3)).notes[-1]
    report = failure(square(1), normal(3))
    assert any("finite differences decided" in note for note in report.notes)
    assert report.mismatches[0].mistake == "a constant factor: 0.5 times what it should be"


@row("G2")
@slow
@pytest.mark.parametrize("index, size", [(0, 1.0), (1777, 1e-2), (3999, 1e-2)])
def test_one_stopped_gradient_among_thousands_is_seen(index, size):
    """Autodiff is compared with finite differences in random directions only, and that is enough."""
    weights = np.random.default_rng(0).standard_normal(4000)
    hidden = size * (np.arange(4000) == index)

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
def test_functions_inside_forward_use_their_rule_and_outermost_ones_lose_it():
    """The bare forward of the outer one has the inner one's derivative, which is not that of its operations."""

    outer = of_inputs(lambda x: rounding()(x) * x, lambda g, x: g * (jnp.round(x * 4) / 4 + x))
    passes(outer, normal(3), against="autodiff")
    failure(outer, normal(3), against="finite_differences")
    failure(lambda x: jnp.sin(rounding()(x)), normal(3), against="autodiff")


# Functions that cannot be computed in the usual way: sin of positive numbers, whose gradient is `factor` times right.


def losing_digits(forward, gradient):
    """Returns a function that makes a Function of `forward`, whose gradient is a factor times `gradient(x)`."""
    return lambda factor: of_inputs(forward, lambda g, x: factor * g * gradient(x))


def sine_as(compute):
    return losing_digits(compute, jnp.cos)


def on_the_host(vmap_method):
    return lambda x: jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=vmap_method)


def sine_in(dtype):
    return losing_digits(
        lambda x: jnp.sin(x.astype(dtype)).astype(x.dtype), lambda x: jnp.cos(x.astype(dtype)).astype(x.dtype)
    )


def batched_as(multiple):
    """sin, whose gradient is multiplied by another number under vmap."""

    @jax.custom_batching.custom_vmap
    def same(x):
        return 1 * x

    same.def_vmap(lambda axis_size, in_batched, x: (multiple * x, in_batched[0]))

    return lambda factor: of_inputs(jnp.sin, lambda g, x: same(factor * g * jnp.cos(x)))


UNUSUAL = {
    "no derivative": (sine_as(on_the_host("sequential")), "finite differences only"),
    "no batching rule": (sine_as(on_the_host(None)), "compiled loop"),
    "wrong batching rule": (batched_as(3), "compiled loop"),
    "Python branch": (sine_as(lambda x: jnp.sin(x) if x[0] > 0 else -jnp.sin(x)), "Python loop"),
    "float32": (sine_in("float32"), "lower precision"),
    "bfloat16": (sine_in("bfloat16"), "lower precision"),
}


@row("G2", "G3")
@cells("unusual", ["no derivative", "Python branch", "bfloat16"], UNUSUAL)
def test_the_report_notes_what_is_unusual(unusual):
    sine, note = UNUSUAL[unusual]
    report = passes(sine(1), abs(normal(3)))
    assert any(note in line for line in report.notes)
    assert failure(sine(-1), abs(normal(3))).mismatches[0].mistake.startswith("wrong sign")


@row("G2")
@slow
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_branch_is_checked_at_the_values_that_are_passed(fast_mode):
    cosine_for_negative = sine_as(lambda x: jnp.sin(x) if x[0] > 0 else jnp.cos(x))(1)
    passes(cosine_for_negative, abs(normal(3)), fast_mode=fast_mode)
    failure(cosine_for_negative, -abs(normal(3)), fast_mode=fast_mode)


@row("G2")
def test_autodiff_of_what_has_no_derivative_raises():
    with pytest.raises(ValueError, match="not possible"):
        gradcheck(UNUSUAL["no derivative"][0](1), normal(3), against="autodiff")


@row("G2")
def test_programs_of_other_batching_rules_are_not_used_again():
    """Both jaxprs have equal text, which does not contain their batching rules."""
    for _ in range(2):
        for multiple, in_a_loop in ((1, False), (3, True)):
            report = passes(batched_as(multiple)(1), normal(3))
            assert any("compiled loop" in note for note in report.notes) is in_a_loop


# G3: precision.


@row("G3")
@pytest.mark.parametrize("setting, factor", [(False, 2.0), (True, 1.0)])
def test_x64_setting_is_left_alone(setting, factor):
    with jax.enable_x64(setting):
        for check in (gradcheck, gradgradcheck):
            assert check(scaled_sine(factor), normal(3), raise_exception=False).passed is (
                factor == 1 or check is not gradcheck
            )
            assert jax.config.jax_enable_x64 is setting
            assert jnp.ones(1).dtype == (jnp.float64 if setting else jnp.float32)


@row("G3")
@cells("dtype", ["complex64"], ["float32", "float16", "bfloat16", "complex64"])
def test_lower_precision_inputs_warn_and_are_checked_in_double(dtype):
    x = jnp.asarray(normal(3), dtype)
    with pytest.warns(UserWarning, match=rf"input 0 \('x'\) is {dtype}, which is not double precision"):
        assert gradcheck(scaled_sine(1.0), x)
    with pytest.warns(UserWarning, match="not double precision"):
        assert not gradcheck(scaled_sine(1.001), x, raise_exception=False)


@row("G3")
def test_double_precision_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(Linear.apply, (normal(2, 3), normal(4, 3), normal(4)))
        with jax.enable_x64(True):
            assert gradcheck(scaled_sine(1.0), jnp.asarray(normal(3)) * 1j)


@row("G3")
@pytest.mark.parametrize(
    "factor, atol, rtol, verdict",
    [
        (1.001, 1e-5, 1.1e-3, True),
        (1.1, 0.05, 0.0, False),
        pytest.param(1.001, 1e-9, 0.9e-3, False, marks=slow),
        pytest.param(1.1, 0.2, 0.0, True, marks=slow),
    ],
)
def test_chosen_tolerances_are_torchs_formula(factor, atol, rtol, verdict):
    x = np.zeros(3)  # where the derivative is 1
    assert gradcheck(scaled_sine(factor), x, atol=atol, rtol=rtol, raise_exception=False).passed is verdict
    options = {"against": "finite_differences", "raise_exception": False}
    assert gradcheck(scaled_sine(factor), x, eps=1e-6, atol=atol, rtol=rtol, **options).passed is verdict


@row("G3")
@cells("size, reference", [(1e-6, "finite_differences")], [1e-6, 1.0, 1e6], REFERENCES)
def test_a_factor_of_a_thousandth_is_caught_at_every_size(size, reference):
    def function(factor):
        return lambda x: size * scaled_sine(factor)(x)

    passes(function(1.0), normal(5), against=reference)
    for factor in (1.001, 0.999):
        failure(function(factor), normal(5), against=reference)


@row("G3")
def test_rounding_is_not_mistaken_for_a_mistake():
    """Right rules that lose many digits on the way: 1e5 + x, minus 1e5."""

    cube = of_inputs(
        lambda x: (x + 1e5) ** 3 - 3e5 * (x + 1e5) ** 2 + 3e10 * (x + 1e5) - 1e15, lambda g, x: g * 3 * x**2
    )
    passes(cube, 1e3 * normal(20), against="autodiff")


def variance(x):
    """The variance of rows, with the rounding of squares."""
    return jnp.mean(x * x, 1, keepdims=True) - jnp.mean(x, 1, keepdims=True) ** 2


variance_rule = losing_digits(variance, lambda x: (x - x.mean(1, keepdims=True)) / 2)
square = losing_digits(lambda x: (x + 1e4) ** 2 - 2e4 * x - 1e8 + x, lambda x: 2 * x.conj() + 1)
sine = losing_digits(lambda x: (2 * jnp.sin(x) - jnp.sin(x + 1e-4) - jnp.sin(x - 1e-4)) * 1e8, lambda x: jnp.cos(x))
total = losing_digits(lambda x: jnp.sum(x + 1e10 * np.array([1, -1, 1, -1, 1, -1])), jnp.ones_like)
# Functions whose finite differences are mostly rounding, with points, and factors that exceed it.
LOSING_DIGITS = {
    "square": (square, normal(6), 1.5),
    "square of zeros": (square, np.zeros(3), 1.5),
    "complex square": (square, normal(3) + 1j * normal(3, seed=1), 1.5),
    "variance": (variance_rule, normal(3, 4) + 1e4, 2.0),
    "variance in float32": (
        losing_digits(
            lambda x: variance(x.astype("float32")).astype(x.dtype), lambda x: (x - x.mean(1, keepdims=True)) / 2
        ),
        normal(3, 4) + 30,
        2.0,
    ),
    "second difference": (sine, normal(4), 1.5),
    "multiples of the step": (total, normal(6), 30.0),
}


@row("G3")
@cells("function, fast_mode", [("square", False), ("variance", True)], LOSING_DIGITS, [False, True])
def test_finite_differences_that_are_mostly_rounding(function, fast_mode):
    """They do not overrule autodiff, and where they decide, only larger differences are mistakes."""
    with_factor, x, factor = LOSING_DIGITS[function]
    passes(with_factor(1.0), x, fast_mode=fast_mode)
    failure(with_factor(1.01), x, fast_mode=fast_mode)
    report = passes(with_factor(1.0), x, fast_mode=fast_mode, against="finite_differences")
    assert fast_mode or any("larger errors" in note for note in report.notes)
    failure(with_factor(factor), x, fast_mode=fast_mode, against="finite_differences")


# Functions, and points next to the end of their domain.
ENDS = {
    "log": (losing_digits(jnp.log, lambda x: 1 / x), 1e-10),
    "sqrt": (losing_digits(jnp.sqrt, lambda x: 0.5 / jnp.sqrt(x)), 1e-8),
    "arccos": (losing_digits(jnp.arccos, lambda x: -1 / jnp.sqrt((1 - x) * (1 + x))), 1 - 1e-9),
    "at the end": (losing_digits(lambda x: x**1.5, lambda x: 1.5 * jnp.sqrt(x)), 0.0),
}


@row("G3")
@cells("function, fast_mode", [("log", False)], ENDS, [False, True])
def test_next_to_the_end_of_a_domain(function, fast_mode):
    with_factor, end = ENDS[function]
    x = np.array([end, 0.5])
    assert not passes(with_factor(1.0), x, fast_mode=fast_mode).notes[fast_mode:]
    failure(with_factor(1.001), x, fast_mode=fast_mode)
    passes(with_factor(1.0), x, fast_mode=fast_mode, against="finite_differences")
    failure(with_factor(2.0), x, fast_mode=fast_mode, against="finite_differences")


@row("G3")
def test_autodiff_decides_where_there_are_no_finite_differences():
    only_at_two = losing_digits(lambda x: x * x + jnp.where(x == 2, 0, jnp.nan), lambda x: 2 * x)
    assert any("autodiff decided there" in note for note in passes(only_at_two(1.0), np.array([2.0])).notes)
    failure(only_at_two(1.001), np.array([2.0]))


@row("G3")
@pytest.mark.parametrize("options", [{}, {"fast_mode": True}, {"against": "autodiff"}], ids=str)
def test_a_factor_of_a_thousandth_is_caught_however_small_the_derivative(options):
    for size in (1e-10, 1e-15):
        tiny = losing_digits(lambda x, size=size: size * x * x, lambda x, size=size: 2 * size * x)
        passes(tiny(1.0), normal(3), **options)
        failure(tiny(1.001), normal(3), **options)


@row("G3")
@pytest.mark.parametrize("fast_mode", [False, True])
def test_a_derivative_that_is_all_rounding_is_not_mistaken_for_a_mistake(fast_mode):
    sigmoid = losing_digits(lambda x: 1 / (1 + jnp.exp(-x)), lambda x: jax.nn.sigmoid(x) * (1 - jax.nn.sigmoid(x)))
    passes(sigmoid(1.0), np.array([40.0]), fast_mode=fast_mode)  # 0 instead of 4e-18
    passes(losing_digits(lambda x: jnp.sum(x - x.mean()), jnp.zeros_like)(1.0), normal(3), fast_mode=fast_mode)


@row("G3")
@pytest.mark.parametrize(
    "forward", [lambda x, b: b * jnp.sin(x), lambda x, b: jnp.sum(b * jnp.sin(x))], ids=["diagonal", "row"]
)
def test_a_small_wrong_entry_next_to_a_large_one_is_found(forward):
    large = np.array([1e10, 0.0])
    for entry in (0.0, 1e-3):
        wrong = large + np.array([0.0, entry])
        function = of_inputs(lambda x: forward(x, large), lambda g, x, wrong=wrong: g * wrong * jnp.cos(x))
        if not entry:
            passes(function, normal(2))
            continue
        (mismatch,) = failure(function, normal(2)).mismatches
        assert mismatch.count == 1 and [e.input_index for e in mismatch.entries] == [(1,)]


@row("G3")
def test_rounding_next_to_a_large_entry_is_not_mistaken_for_a_mistake():
    """Right rules whose reference has errors of 3e-3 next to entries of 1e11."""
    large = 1e11 * np.eye(20)[0]

    def forward(x):
        moved = x + 2e6
        return jnp.sum(moved**3 - 6e6 * moved**2 + 1.2e13 * moved + large * x)

    cube = of_inputs(forward, lambda g, x: g * (3 * x**2 + large))
    passes(cube, normal(20), against="autodiff")


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
    assert mismatch.mistake == "a constant factor: 2 times what it should be"
    worst = max(range(6), key=lambda i: abs(np.cos(x.flat[i])))
    entry = mismatch.entries[0]
    assert entry.index == entry.input_index == tuple(np.unravel_index(worst, x.shape))
    expected = np.cos(x[entry.input_index])
    assert entry.value == pytest.approx(2 * expected) and entry.autodiff == pytest.approx(expected)
    assert entry.numeric == pytest.approx(expected, abs=1e-8)
    assert entry.error == pytest.approx(abs(expected))
    assert 0 < entry.allowed < 1e-5
    text, file_name = str(report), checking.__file__
    for part in ("output 0['value']", "input 0 ('tree')['x'][0]", "6 of 36", mismatch.mistake, "autodiff", file_name):
        assert part in text, text
    line = int(text.split(f"{file_name}:")[1].split()[0])
    with open(file_name) as file:
        assert "sine.backward" in file.readlines()[line - 1]


@row("G4")
def test_the_report_is_data():
    with pytest.raises(GradcheckError) as caught:
        gradcheck(scaled_sine(2.0), normal(3))
    report = caught.value.report
    assert not report and not report.passed
    entry = json.loads(json.dumps(report.to_dict()))["mismatches"][0]["entries"][0]
    assert entry["value"] == report.mismatches[0].entries[0].value
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@row("G4")
@slow
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


def softmax_with(backward):
    return saving(jax.nn.softmax, lambda y, x: [y], backward)


# Those that no other test names: the Function, the shapes of its inputs, and the kind.
KINDS = [
    (softmax_with(lambda g, y: None), [(3, 3)], "zero everywhere"),
    (softmax_with(lambda g, y: g * jnp.nan), [(3, 3)], "not a number"),
    (softmax_with(lambda g, y: g * y * (1 - y)), [(3, 3)], "off-diagonal entries are missing"),
    (
        rule(lambda ctx, bias, x: x + bias, lambda ctx, g: (g[0], g)),
        [(3,), (3, 3)],
        "missing sum over a broadcast axis",
    ),
]


@row("G4")
@pytest.mark.parametrize(("function", "shapes", "kind"), KINDS)
def test_kinds_of_mistakes(function, shapes, kind):
    report = failure(function, tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes)), argnums=0)
    assert kind in report.mismatches[0].mistake


def long_kernelcheck():
    made = KERNELS["doubled"]
    kernelcheck(made.made(), made.reference, made.inputs, skip=all_but(), dtypes=["float32"])


@row("K1")
@pytest.mark.parametrize(
    ("check", "desc", "unit"),
    [
        (lambda: passes(scaled_sine(1.0), normal(1025)), "gradcheck of ", " directions"),
        (long_kernelcheck, "kernelcheck of forward", " checks"),
    ],
    ids=["gradcheck", "kernelcheck"],
)
def test_a_check_of_more_than_two_seconds_shows_its_progress_by_tqdm(check, desc, unit, monkeypatch):
    bars = []

    class FakeBar:
        def __init__(self, desc, total, initial, unit, **options):
            self.desc, self.total, self.n, self.unit, self.is_closed = desc, total, initial, unit, False
            bars.append(self)

        def update(self, count):
            assert not self.is_closed
            self.n += count

        def close(self):
            self.is_closed = True

    monkeypatch.setitem(sys.modules, "tqdm", SimpleNamespace(tqdm=FakeBar))
    monkeypatch.setattr(time, "monotonic", count(step=0.001).__next__)
    check()
    assert not bars
    monkeypatch.setattr(time, "monotonic", count(step=2.1).__next__)
    check()
    (bar,) = bars
    assert bar.desc.startswith(desc) and bar.unit == unit and bar.n == bar.total > 0 and bar.is_closed


def test_without_tqdm_there_is_no_progress(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(time, "monotonic", count(step=2.1).__next__)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    passes(scaled_sine(1.0), normal(1025))
    assert capsys.readouterr() == ("", "")
