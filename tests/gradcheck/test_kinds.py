"""Row G4: what the report says of a wrong saved tensor, a transposed gradient, and an input without a gradient."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import function_of
from tests.support.checking import failure, normal, of_inputs, passes, rule, saving
from tests.support.marks import cells, row
from tests.support.runs import number_of_calls


def kinds(*args, **options):
    return [mismatch.mistake for mismatch in failure(*args, **options).mismatches]


def sigmoid_rule(g, y):
    return g * y * (1 - y)


def quotient_rule(g, x, w):
    return g / w, -g * x / w**2


SIGMOID = saving(jax.nn.sigmoid, lambda y, x: (x,), sigmoid_rule)
QUOTIENT = saving(jnp.divide, lambda y, x, w: (w, x), quotient_rule)
# What is wrong: the Function, the number of inputs, and what `saved` says of it.
WRONG_SAVED = {
    "input for output": (SIGMOID, 1, "output 0 instead of saved_tensors[0]"),
    "output for input": (
        saving(jnp.sin, lambda y, x: (y,), lambda g, x: g * jnp.cos(x)),
        1,
        "input inputs[0] instead of saved_tensors[0]",
    ),
    "another saved tensor": (
        saving(lambda x, w: x * jnp.exp(w), lambda y, x, w: (y, x, w), lambda g, y, x, e: (g * jnp.exp(x), g * y)),
        2,
        "saved_tensors[2] instead of saved_tensors[1]",
    ),
    "swapped": (QUOTIENT, 2, "saved_tensors[0] and saved_tensors[1] swapped"),
    "under jit": (jax.jit(SIGMOID), 1, "output 0 instead of saved_tensors[0]"),
    "in another function": (lambda x: jnp.tanh(SIGMOID(2 * x)), 1, "output 0 instead of saved_tensors[0]"),
    "called twice": (lambda x, w: QUOTIENT(QUOTIENT(x, w), w), 2, "saved_tensors[0] and saved_tensors[1] swapped"),
}


def inputs_of(count):
    return tuple(1.5 + abs(normal(3, 2, seed=seed)) for seed in range(count))


@row("G4")
@cells("mistake", ["input for output", "swapped"], WRONG_SAVED)
@pytest.mark.parametrize("options", [{}, {"fast_mode": True}, {"against": "finite_differences"}], ids=str)
def test_a_wrong_saved_tensor_is_named(mistake, options):
    function, count, saved = WRONG_SAVED[mistake]
    for kind in kinds(function, inputs_of(count), **options):
        assert kind.endswith(f".backward is right with {saved}")
        assert ("swapped saved tensors: " if "swapped" in saved else "a wrong saved tensor: ") in kind


@row("G4")
def test_a_wrong_tensor_saved_for_jvp_is_named():
    class Exp(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.base = x
            return jnp.exp(x)

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * ctx.base

    found = kinds(Exp.apply, normal(3), check_forward_ad=True, check_backward_ad=False)
    assert found == ["a wrong saved tensor: Exp.jvp is right with output 0 instead of ctx.base"]


@row("G4")
def test_equal_inputs_do_not_hide_which_tensor_is_meant():
    """At the checked point both `b` and `c` would do, and x + 1 is 1 where x is 0."""
    product = saving(lambda a, b, c: a * b * c, lambda y, *xs: xs, lambda g, a, b, c: (g * b * c, g * a * c, g * b * b))
    a, b = normal(3), normal(3, seed=1)
    assert kinds(product, (a, b, b)) == [None]
    affine = saving(lambda x: x + 1, lambda y, x: (x,), lambda g, x: g * x)
    assert kinds(affine, np.zeros(3)) == ["zero everywhere"]


@row("G4")
def test_two_explanations_are_both_named():
    product = saving(jnp.multiply, lambda y, a, b: (a, b), lambda g, a, b: (g * a, g * b))
    (first, second) = kinds(product, (normal(3), normal(3, seed=1)))
    saved = "swapped saved tensors: forward.backward is right with saved_tensors[0] and saved_tensors[1] swapped"
    assert first == f"swapped with the gradient of input 1 ('inputs[1]'), or {saved}"
    assert second == f"swapped with the gradient of input 0 ('inputs[0]'), or {saved}"


@row("G4")
@pytest.mark.parametrize("options", [{}, {"fast_mode": True}, {"against": "finite_differences"}], ids=str)
@pytest.mark.parametrize("factor", [-1.0, 0.5])
def test_a_wrong_factor_of_one_term_is_named_with_its_line(factor, options):
    def backward(g, x):
        return g * (jnp.cos(x) + 2 * factor * x)

    report = failure(saving(lambda x: jnp.sin(x) + x**2, lambda y, x: (x,), backward), normal(4), **options)
    line = f"{__file__}:{backward.__code__.co_firstlineno + 1}:"
    (kind,) = {mismatch.mistake for mismatch in report.mismatches}
    assert kind.startswith(f"a wrong factor of one term: backward is right with {1 / factor:.6g} times the second term")
    assert f" term at {line}" in kind and not any("surrogate=" in note for note in report.notes)


@row("G4")
@pytest.mark.parametrize("axis", [None, 0, (1, 2)])
def test_a_sum_in_place_of_a_mean_is_named(axis):
    x = normal(2, 3, 5)
    taken = x.size // x.sum(axis).size

    def spread(g, x):
        return jnp.broadcast_to(g if axis is None else jnp.expand_dims(g, axis), x.shape)

    (kind,) = kinds(saving(lambda x: x.mean(axis), lambda y, x: (x,), spread), x)
    assert kind.endswith(f", perhaps that of a sum of {taken} elements, where forward takes their mean")
    (kind,) = kinds(saving(lambda x: x.sum(axis), lambda y, x: (x,), lambda g, x: spread(g, x) / taken), x)
    assert kind.endswith(f", perhaps that of a mean of {taken} elements, where forward takes their sum")


def matmul_rule(grad_w):
    return saving(jnp.matmul, lambda y, x, w: (x, w), lambda g, x, w: (g @ w.T, grad_w(g, x, w)))


def scaled(gradient):
    """sin, with `gradient(cos(x) * g)`."""
    return saving(jnp.sin, lambda y, x: (x,), lambda g, x: gradient(jnp.cos(x) * g).reshape(x.shape))


# The Function, the shapes of its inputs, and the kind.
TRANSPOSED = {
    "square": (matmul_rule(lambda g, x, w: g.T @ x), [(3, 3), (3, 3)], "the gradient is transposed"),
    "reshaped": (
        matmul_rule(lambda g, x, w: (g.T @ x).reshape(w.shape)),
        [(2, 3), (3, 4)],
        "the gradient is transposed",
    ),
    "three axes": (scaled(lambda g: g.transpose(1, 2, 0)), [(2, 3, 4)], "transposed: its axes are in order (1, 2, 0)"),
    "the other factor": (
        matmul_rule(lambda g, x, w: x @ g),
        [(3, 3), (3, 3)],
        "transposed: the Jacobian is multiplied from the wrong side",
    ),
}


@row("G4")
@pytest.mark.parametrize("mistake", TRANSPOSED)
def test_a_transposed_gradient_is_named(mistake):
    function, shapes, text = TRANSPOSED[mistake]
    (kind,) = kinds(function, tuple(normal(*shape, seed=i) for i, shape in enumerate(shapes)))
    assert kind.endswith(text)


@row("G4")
def test_a_transposed_tangent_is_named():
    row = jnp.arange(1.0, 4.0)
    outer = function_of("jvp", lambda x: jnp.outer(x, row), lambda saved, tangent: jnp.outer(row, tangent), None)
    (kind,) = kinds(outer, normal(3), check_forward_ad=True, check_backward_ad=False)
    assert kind == "the tangent is transposed"


def product(backward, choose=lambda y, x, w: (x, w)):
    return saving(jnp.multiply, choose, backward)


def symmetric(x):
    return x + x.T


# Rules that are wrong in another way: no array that is saved would make them right, and nothing is transposed.
OTHERS = {
    "wrong function": saving(jnp.tanh, lambda y, x: (y,), lambda g, y: g * (1 - y)),
    "both with one array": product(lambda g, x, w: (g * w, g * w)),
    "swapped, and twice one of them": product(lambda g, x, w: (2 * g * x, g * w)),
    "sum for product": product(lambda g, x, w: (g * (x + w), g * x)),
    "a missing square": saving(lambda x, w: x * w**2, lambda y, *xs: xs, lambda g, x, w: (g * w, 2 * g * x * w)),
    "gradient of the square": saving(lambda x, w: x**2 * w, lambda y, *xs: xs, lambda g, x, w: (g * x * w, g * x**2)),
    "an entry": product(lambda g, x, w: ((g * w).at[0, 0].mul(1.5), g * x)),
    "rolled": product(lambda g, x, w: (g * jnp.roll(w, 1, 0), g * x)),
    "flipped": product(lambda g, x, w: ((g * w)[::-1], g * x)),
    "stale": product(lambda g, x, w: (g * w, g * jnp.sin(x))),
    "nearly right": product(lambda g, x, w: (g * (w + 3e-5), g * x)),
    "a small difference of symmetric gradients": saving(
        lambda x, w: (symmetric(x) * symmetric(w)).sum(),
        lambda y, x, w: (x, w),
        lambda g, x, w: (g * (2 * symmetric(w) + 1e-4 * jnp.eye(3)), 2 * g * symmetric(x)),
    ),
    "the mean": saving(lambda x, w: x - x.mean() + 0 * w, lambda y, x, w: (x, w), lambda g, x, w: (g, 0 * g)),
    "an output at a wrong position": saving(
        lambda x, w: jnp.exp(x) * w, lambda y, x, w: (y, w), lambda g, y, w: (g * w, g * y)
    ),
}


@row("G4")
@cells("mistake", ["both with one array", "nearly right", "a small difference of symmetric gradients"], OTHERS)
def test_other_mistakes_are_not_taken_for_these(mistake):
    function = OTHERS[mistake]
    inputs = 1.5 + abs(normal(3, 3)), 1.5 + abs(normal(3, 3, seed=1))
    for kind in kinds(function, inputs[: 1 if mistake == "wrong function" else 2]):
        assert kind is None or not any(word in kind for word in ("saved", "transposed", "swapped", "elementwise")), kind


@row("G4")
def test_the_note_names_the_inputs_for_which_backward_returned_none():
    def notes(backward):
        report = failure(product(backward), (normal(3), normal(3, seed=1)))
        return [note for note in report.notes if "None" in note]

    texts = [f"forward.backward returned None for input {i} ('inputs[{i}]'), so its gradient is zero" for i in (0, 1)]
    assert notes(lambda g, x, w: (None, None)) == texts
    assert notes(lambda g, x, w: (g * w, None)) == texts[1:]
    assert notes(lambda g, x, w: (-g * w, g * x)) == []
    constant = passes(product(lambda g, x, w: (None, g * x)), (np.zeros(3), normal(3)), argnums=1)
    assert not constant.notes
    assert not passes(rule(lambda ctx, x: jnp.round(x), lambda ctx, g: None), normal(3)).notes


@row("G4")
def test_a_forward_that_raises_at_a_further_trace_does_not_hide_the_report():
    def traces(limit):
        count = 0

        def forward(ctx, x):
            nonlocal count
            count += 1
            assert count < limit
            ctx.save_for_backward(x)
            return jax.nn.sigmoid(x)

        (kind,) = kinds(rule(forward, lambda ctx, g: sigmoid_rule(g, *ctx.saved_tensors)), normal(3))
        return count, kind

    count, kind = traces(100)
    assert "a wrong saved tensor" in kind
    assert traces(count) == (count, None)


@row("G4")
def test_a_callback_that_raises_for_another_saved_array_does_not_hide_the_report():
    def cosine_of_arcsine(y):
        assert (abs(np.asarray(y)) <= 1).all()
        return np.sqrt(1 - np.asarray(y) ** 2)

    def backward(g, x, y):
        return 2 * g * jax.pure_callback(cosine_of_arcsine, jax.typeof(y), y, vmap_method="sequential")

    sine = saving(jnp.sin, lambda y, x: (x, y), backward)
    assert kinds(sine, np.array([0.3, 0.4, 1.2])) == ["a constant factor: 2 times what it should be"]


RELU = of_inputs(jax.nn.relu, lambda g, x: jnp.where(x > 0, g, 0.0))
MAXIMUM = of_inputs(jnp.maximum, lambda g, x, y: (jnp.where(x > y, g, 0.0), jnp.where(x > y, 0.0, g)))
KINKS = {
    "relu at 0": (RELU, (np.linspace(-1, 1, 5),)),
    "maximum at a tie": (MAXIMUM, (np.array([1.0, 2.0]), np.array([1.0, 3.0]))),
}


@row("G4")
@pytest.mark.parametrize("what", KINKS)
def test_a_kink_is_named(what):
    report = failure(*KINKS[what])
    assert {mismatch.mistake for mismatch in report.mismatches} == {"a kink of the function"}
    assert any(note.startswith("kink: the rule is right a small step away") for note in report.notes)
    assert not any("surrogate=" in note for note in report.notes)


@row("G4")
@cells("value", [5.0, -0.5])
def test_a_wrong_value_at_a_kink_is_not_a_kink(value):
    wrong = of_inputs(jax.nn.relu, lambda g, x: jnp.where(x == 0, value * g, jnp.where(x > 0, g, 0.0)))
    assert "a kink of the function" not in kinds(wrong, np.linspace(-1, 1, 5))


def many_saved(count, factor):
    def forward(ctx, x):
        ys = [jnp.sin((k + 1.0) * x) for k in range(count)]
        ctx.save_for_backward(x, *ys)
        return sum(jnp.cos(y) for y in ys)

    def backward(ctx, g):
        x, *ys = ctx.saved_tensors
        return factor * g * sum(-jnp.sin(y) * (k + 1.0) * jnp.cos((k + 1.0) * x) for k, y in enumerate(ys))

    return rule(forward, backward)


@row("G4")
def test_a_failed_check_costs_at_most_ten_times_one_that_passes():
    def cost(factor):
        check = partial(jaxfn.gradcheck, many_saved(16, factor), np.linspace(0.1, 1, 3), raise_exception=False)
        assert check().passed == (factor == 1)  # so that JAX has compiled what both share
        return number_of_calls(check)

    assert cost(1.5) < 10 * cost(1.0)


@row("G4")
def test_a_search_for_a_wrong_saved_tensor_that_stops_says_so():
    report = failure(many_saved(8, 1.5), np.linspace(0.1, 1, 20_000), fast_mode=True)
    assert "the search for a wrong saved tensor stopped after 20 of 117 replacements" in report.notes


@row("G3")
@pytest.mark.parametrize("options", [{}, {"atol": 1e-5}, {"atol": 1e-5, "rtol": 1e-3}])
def test_the_default_tolerance_is_the_one_in_the_signature(options):
    cube = of_inputs(lambda x: x**3, lambda g, x: 1.0005 * 3 * g * x**2)
    failure(cube, np.linspace(0.5, 1, 3), **options)
    passes(cube, np.linspace(0.5, 1, 3), atol=2e-5)


@row("G1")
def test_a_list_can_be_an_argument():
    assert jaxfn.gradcheck(lambda pair: pair[0] * pair[1], ([np.array([0.5]), np.array([1.5])],))
