"""`check`: every check of a Function in one call; and what `gradcheck` checks on request."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import Square, in_library
from tests.support.checking import failure, normal, rule, scaled_sine
from tests.support.libraries import torch_library
from tests.support.marks import row


class WithVmap(jaxfn.Function):
    """sin(x) * w, with a `vmap` method that multiplies by `factor`, and along `axis` alone."""

    factor, axes = 1.0, (0, 1, 2, None)

    @staticmethod
    def forward(x, w):
        return jnp.sin(x) * w

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w * jnp.cos(x), g * jnp.sin(x)

    @classmethod
    def vmap(cls, info, in_dims, x, w):
        x, w = (a if d is None else jnp.moveaxis(a, d, 0) for a, d in zip((x, w), in_dims, strict=True))
        factor = cls.factor if set(in_dims) <= set(cls.axes) else 2.0
        return factor * jnp.sin(x) * w, 0


class WrongVmap(WithVmap):
    factor = 2.0


class WrongForAnUnbatchedArgument(WithVmap):
    axes = (0, 1, 2)


INPUTS = normal(2, 3), normal(2, 3, seed=1)


@row("G6")
def test_a_right_function_passes_every_check():
    report = jaxfn.check(WithVmap.apply, INPUTS)
    assert report and [r.check for r in report.reports] == ["gradcheck", "gradgradcheck"] and not report.failures
    assert report.notes == ["forward mode is not defined, so it was not checked"]
    assert jaxfn.check(jnp.sin, normal(3)).notes == []


@row("G6")
@pytest.mark.parametrize("function", [WrongVmap, WrongForAnUnbatchedArgument])
def test_a_wrong_vmap_method_is_found(function):
    assert jaxfn.gradcheck(function.apply, INPUTS)
    with pytest.raises(jaxfn.CheckError, match=r"output 0 is wrong under jax\.vmap") as caught:
        jaxfn.check(function.apply, INPUTS)
    assert type(caught.value) is jaxfn.CheckError and isinstance(caught.value.report, jaxfn.reports.CheckReport)
    if function is WrongForAnUnbatchedArgument:
        (first, second) = caught.value.report.reports[0].problems
        assert "input 0 ('x') unbatched" in first and "input 1 ('w') unbatched" in second


@row("G6")
def test_a_compiled_output_that_differs_by_more_than_rounding_is_found():
    """Finite differences and rules of first order would not notice this factor, nor does the largest number have it."""

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * (1 + 1e-9 * (abs(x) < 1e3)) if isinstance(x, jax.core.Tracer) else x * x

    square = rule(forward, lambda ctx, g: 2 * g * ctx.saved_tensors[0])
    x = np.append(normal(3), 1e6)
    assert jaxfn.gradcheck(square, x)
    with pytest.raises(jaxfn.CheckError, match=r"output 0 differs between an eager call and jax\.jit"):
        jaxfn.check(square, x)


@row("G6")
def test_a_compiled_output_that_is_all_rounding_is_right():
    assert jaxfn.check(lambda x: jnp.sin(x) ** 2 + jnp.cos(x) ** 2 - 1, normal(50))


@row("G6")
def test_a_function_without_second_derivatives():
    @jaxfn.function
    def once(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @once.backward
    @jaxfn.once_differentiable
    def _(ctx, g):
        return 2 * g * ctx.saved_tensors[0]

    report = jaxfn.check(once, normal(3))
    assert report and len(report.reports) == 1 and any("once_differentiable" in note for note in report.notes)


@row("G2")
def test_autodiff_of_a_surrogate_that_stops_a_gradient_decides():
    rounded = rule(lambda ctx, x: jnp.round(x), lambda ctx, g: g)

    def surrogate(x):
        return x + jax.lax.stop_gradient(jnp.round(x) - x)

    report = jaxfn.gradcheck(rounded, np.linspace(-2, 2, 9), surrogate=surrogate)
    assert report and any("autodiff decided" in note for note in report.notes)
    wrong = rule(lambda ctx, x: jnp.round(x), lambda ctx, g: 2 * g)
    failure(wrong, np.linspace(-2, 2, 9), surrogate=surrogate)


def test_reports_have_one_base_and_a_form_for_notebooks():
    wrong = rule(lambda ctx, x: jnp.sin(x), lambda ctx, g: g)
    found = jaxfn.gradcheck(wrong, normal(3), raise_exception=False)
    kernel = jaxfn.kernelcheck(wrong, jnp.sin, normal(3), raise_exception=False)
    whole = jaxfn.check(wrong, normal(3), raise_exception=False)
    for report in (found, kernel, whole):
        assert isinstance(report, jaxfn.reports.Report) and not report and report.failures
        with pytest.raises(jaxfn.CheckError) as caught:
            report.raise_if_failed()
        assert caught.value.report is report and type(report).__name__ != "Report"
        assert '"passed": false' in report.to_json() and report._repr_html_().startswith("<pre>")
    assert "<svg" in found._repr_html_() and "<table>" in kernel._repr_html_()
    assert "<td>Square</td>" in jaxfn.residuals(Square.apply, 2.0)._repr_html_()
    assert jaxfn.gradcheck(jnp.sin, normal(3)).raise_if_failed() is None


@row("K1")
def test_kernelcheck_runs_checks_of_the_caller():
    def is_positive(func, reference, inputs):
        return None if (func(*inputs) > 0).all() else "is not positive"

    assert jaxfn.kernelcheck(jnp.exp, jnp.exp, normal(5), checks={"positive": is_positive}).checks[-1] == "positive"
    report = jaxfn.kernelcheck(
        jnp.sin, jnp.sin, -abs(normal(5)), checks={"positive": is_positive}, raise_exception=False
    )
    assert report.failed_checks == ["positive"]
    with pytest.raises(ValueError, match="a check that exists already"):
        jaxfn.kernelcheck(jnp.sin, jnp.sin, normal(5), checks={"vmap": is_positive})


@row("G2")
@pytest.mark.parametrize("inside", ["alone", "next to another output"])
def test_a_function_without_the_derivative_of_its_surrogate_is_wrong(inside):
    """The rule that `surrogate` is about was forgotten."""
    if inside == "alone":
        failure(jnp.round, normal(3), surrogate=lambda x: x)
    else:
        failure(lambda x: (jnp.sin(x), jnp.round(x)), normal(3), surrogate=lambda x: (jnp.sin(x), x))


@row("G6")
def test_what_does_not_apply_is_a_note():
    constant = jaxfn.check(jnp.sign, normal(3))
    assert constant and any("second derivatives were not checked" in note for note in constant.notes)
    weight = jnp.linspace(-1, 1, 4096, dtype=jnp.float32).reshape(64, 64)
    assert jaxfn.check(lambda x: x.astype(jnp.float32) @ weight, np.linspace(-1, 1, 64), second_order=False)


@row("K1")
@pytest.mark.parametrize("verdict", [False, True, np.bool_(False)])
def test_a_check_of_the_caller_returns_a_message(verdict):
    with pytest.raises(TypeError, match="the check 'mine' returned bool"):
        jaxfn.kernelcheck(jnp.sin, jnp.sin, normal(5), checks={"mine": lambda *_: verdict})


@row("G6")
def test_a_vmap_method_is_checked_at_zero_too():
    class Flips(WithVmap):
        @staticmethod
        def vmap(info, in_dims, x, w):
            return jnp.flip(jnp.sin(x) * w, 0), 0

    assert not jaxfn.check(Flips.apply, (np.zeros((2, 3)), np.ones((2, 3))), raise_exception=False)


class NotFinite(WithVmap):
    """sin(x) * w * scale + constant; its `vmap` method adds `added` to the second element of the batch."""

    scale, constant, added = 1.0, np.array([[np.nan, 0, 0], [0, np.inf, 0]]), 0.0

    @classmethod
    def forward(cls, x, w):
        return WithVmap.forward(x, w) * cls.scale + cls.constant

    @classmethod
    def vmap(cls, info, in_dims, x, w):
        output, axis = super().vmap(info, in_dims, x, w)
        return (output * cls.scale + cls.constant).at[1].add(cls.added), axis


class NanInTheSecondElement(NotFinite):
    scale = np.array([[0, 1, 1], [1, 1, 1]])
    constant, added = 0.0, np.array([[np.nan, 0, 0], [0, 0, 0]])


class OneNextToInfinity(NotFinite):
    added = 1.0


@row("G6")
@pytest.mark.parametrize("function", [NanInTheSecondElement, OneNextToInfinity])
def test_a_wrong_vmap_method_with_values_that_are_not_finite_is_found(function):
    """`nan_to_num` makes NaN 0, as the right output is, and infinity so large that the tolerance allows anything."""
    report = jaxfn.gradcheck(function.apply, INPUTS, check_vmap=True, raise_exception=False)
    assert any("output 0 is wrong under jax.vmap" in problem for problem in report.problems)


@row("G6")
def test_a_vmap_method_agrees_where_both_are_not_finite():
    report = jaxfn.gradcheck(NotFinite.apply, INPUTS, check_vmap=True, raise_exception=False)
    assert not any("jax.vmap" in problem for problem in report.problems)


@row("G3")
def test_lower_precision_warns_once_for_all_checks():
    with pytest.warns(UserWarning, match="float32, which is not double precision") as caught:
        assert jaxfn.check(WithVmap.apply, [x.astype(np.float32) for x in INPUTS])
    (warning,) = caught
    assert str(warning.message).startswith("input 0 ('x') is float32, input 1 ('w') is float32, which is not double")
    assert warning.filename == __file__


class MaskedBatchedWrongly(jaxfn.Function):
    @staticmethod
    def forward(x):
        return jnp.where(jnp.arange(4) < 2, x, -1e9)

    @staticmethod
    def setup_context(ctx, inputs, output): ...

    @staticmethod
    def backward(ctx, grad_output):
        return jnp.where(jnp.arange(4) < 2, grad_output, 0.0)

    @staticmethod
    def vmap(info, in_dims, x):
        return MaskedBatchedWrongly.forward(jnp.moveaxis(x, in_dims[0], 0) + 1e-3), 0


@row("G6")
def test_a_mask_does_not_hide_a_wrong_vmap():
    x = np.array([0.1, 0.2, 0.3, 0.4])
    assert not jaxfn.check(MaskedBatchedWrongly.apply, x, raise_exception=False)
    assert not jaxfn.gradcheck(MaskedBatchedWrongly.apply, x, check_vmap=True, raise_exception=False)


@row("G6")
def test_an_error_of_a_second_derivative_is_a_failure_whatever_its_text():
    @jax.custom_jvp
    def square(x):
        return x**2

    @square.defjvp
    def _(primals, tangents):
        raise RuntimeError("not marked with @once_differentiable")

    cube = rule(lambda ctx, x: (ctx.save_for_backward(x), x**3)[1], lambda ctx, g: 3 * square(ctx.saved_tensors[0]) * g)
    report = jaxfn.check(cube, np.linspace(0.1, 1, 3), raise_exception=False)
    assert not report and "not marked with @once_differentiable" in str(report)


CHECKS = {
    "check": lambda f, x: jaxfn.check(f, x),
    "gradcheck": lambda f, x: jaxfn.gradcheck(f, x),
    "gradgradcheck": lambda f, x: jaxfn.gradgradcheck(f, x),
    "kernelcheck": lambda f, x: jaxfn.kernelcheck(f, lambda x: x * x, x, dtypes=["float32"], skip=["sizes"]),
    "paritycheck": lambda f, x: jaxfn.paritycheck(f, lambda x: x * x, [x]),
    "find_nan": lambda f, x: jaxfn.find_nan(f, x) is None,
    "residuals": lambda f, x: jaxfn.residuals(f, x),
}


@row("G1b")
@pytest.mark.parametrize("name", CHECKS)
def test_a_class_and_its_apply_are_checked_and_torch_code_is_not(name):
    torch = pytest.importorskip("torch")
    check = CHECKS[name]

    TorchSquare = in_library(Square, torch_library())
    for f in (Square, Square.apply, lambda x: Square.apply(x)):
        assert check(f, np.linspace(0.1, 1, 3)), f
    assert check(Square, torch.linspace(0.1, 1, 3, dtype=torch.float64, requires_grad=True))
    with pytest.raises(TypeError, match=rf"^{name} takes a Function class or a function, and its arguments; got Array"):
        check(jnp.ones(3), jnp.ones(3))
    torch_code = {
        "Square": TorchSquare,
        "Square.apply": TorchSquare.apply,
        "Linear": torch.nn.Linear(3, 3),
        "sin": torch.sin,
        "relu": torch.nn.functional.relu,
    }
    for code, f in torch_code.items():
        message = rf"^{name} takes a JAX function, and {code} is torch code.*from_torch.*paritycheck"
        with pytest.raises(TypeError, match=message):
            check(f, np.linspace(0.1, 1, 3))


@row("G1b")
def test_numbers_out_of_range_raise():
    x = np.linspace(0.1, 1, 3)
    for number in (-1, np.nan, np.inf):
        for call in (
            lambda n: jaxfn.check(jnp.sin, x, atol=n),
            lambda n: jaxfn.kernelcheck(jnp.sin, jnp.sin, x, factor=n),
            lambda n: jaxfn.paritycheck(jnp.sin, None, [x], rtol=n),
        ):
            with pytest.raises(ValueError, match="expected a finite number"):
                call(number)


@row("G6")
def test_check_takes_tolerances_and_fast_mode():
    wrong = scaled_sine(1.0005)
    assert not jaxfn.check(wrong, normal(3), raise_exception=False)
    assert jaxfn.check(wrong, normal(3), atol=1e-2, rtol=1e-2)
    report = jaxfn.check(jnp.sin, normal(3), fast_mode=True)
    assert all(any(note.startswith("fast mode") for note in r.notes) for r in report.reports)
