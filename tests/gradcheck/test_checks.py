"""Rows G5 and G6: every small check, and second order, each with a right and a wrong Function."""

from __future__ import annotations

import itertools
import re
from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import gradcheck, gradgradcheck
from tests.support.cases import Linear
from tests.support.checking import failure, normal, of_inputs, passes, rule, scaled_sine
from tests.support.marks import cells, row, slow

FORWARD = {"check_forward_ad": True, "check_backward_ad": False}
REFERENCES = ["both", "finite_differences", "autodiff"]
# Each mode, and the rest of the pairs with --all.
modes_and_references = cells("fast_mode, reference", [(False, "both"), (True, "autodiff")], [False, True], REFERENCES)


def saved_square(ctx, x):
    ctx.save_for_backward(x)
    return x * x


def saved_product(ctx, x, y):
    ctx.save_for_backward(x, y)
    return x * y


def custom_jvp(function, jvp):
    function_with_rule = jax.custom_jvp(function)
    function_with_rule.defjvp(jvp)
    return function_with_rule


def custom_vjp(function, fwd, bwd):
    function_with_rule = jax.custom_vjp(function)
    function_with_rule.defvjp(fwd, bwd)
    return function_with_rule


def square_with_jvp(jvp, value=lambda x: x**2):
    """x², whose tangent is `jvp(x, dx)`."""
    return custom_jvp(lambda x: x * x, lambda primals, tangents: (value(*primals), jvp(*primals, *tangents)))


def noise():
    return 1 + 1e-4 * np.random.default_rng().standard_normal()


def on_the_host(f, x, vmap_method="sequential"):
    return jax.pure_callback(f, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method=vmap_method)


@jax.custom_batching.custom_vmap
def sine_wrong_without_batch(x):
    return jnp.sin(x) + 1


sine_wrong_without_batch.def_vmap(lambda axis_size, in_batched, x: (jnp.sin(x), in_batched[0]))


# What is wrong, the function and the check's options, and what the report says.
PROBLEMS = {
    "shape": (
        rule(saved_square, lambda ctx, g: jnp.concatenate([g, g])),
        {},
        r"backward raised RuntimeError.*'x'.*shape \(6,\)",
    ),
    "no backward": (jaxfn.function(saved_square), {}, "defines neither backward"),
    # Unit cotangents do not show it: 1 * 1 is 1 and 0 * 0 is 0.
    "not linear": (rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * g), {}, "not linear"),
    "not linear, fast mode": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * g),
        {"fast_mode": True},
        "not linear",
    ),
    # A square root, say, of 0 and 1 is right, and of a negative number is NaN.
    "NaN for all but unit cotangents": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * jnp.where(g * g == g, g, jnp.nan)),
        {},
        "gradients are NaN for some cotangents",
    ),
    "NaN for a zero cotangent": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * g.sum() / g.sum()),
        {},
        "gradients are NaN for some cotangents",
    ),
    "NaN for all but unit tangents": (
        square_with_jvp(lambda x, t: 2 * x * jnp.where(t * t == t, t, jnp.nan)),
        FORWARD,
        "tangents are NaN for some tangents",
    ),
    "gradient ignored": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0]),
        {},
        "not multiplied by grad_output",
    ),
    "noise in backward": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * noise()),
        {},
        "not deterministic",
    ),
    "noise on the host": (
        rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * on_the_host(lambda g: g * noise(), g)),
        {},
        "not deterministic",
    ),
    "noise in forward": (
        rule(lambda ctx, x: x + on_the_host(lambda x: x * noise(), x), lambda ctx, g: 2 * g),
        {},
        "not deterministic",
    ),
    "once differentiable": (
        rule(saved_square, jaxfn.once_differentiable(lambda ctx, g: 2 * ctx.saved_tensors[0] * g)),
        {"check": gradgradcheck},
        "once_differentiable",
    ),
    "fwd with another value": (
        custom_vjp(jnp.sin, lambda x: (jnp.sin(x) + 1, x), lambda x, g: (g * jnp.cos(x),)),
        {},
        "different values when it is differentiated",
    ),
    "no jvp": (scaled_sine(1.0), {"check_forward_ad": True}, "forward mode"),
    "another value without a batch": (
        custom_vjp(sine_wrong_without_batch, lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x),)),
        {},
        "different values when it is differentiated",
    ),
    "jvp not linear": (
        square_with_jvp(lambda x, t: 2 * x * t * abs(t)),
        FORWARD,
        "jvp is not linear: the tangent of output 0 for the tangent 2 u -3 v",
    ),
    "jvp with another value": (
        square_with_jvp(lambda x, t: 2 * x * t, lambda x: x**2 + 1),
        FORWARD,
        "different values when it is differentiated",
    ),
    "noise in jvp": (square_with_jvp(lambda x, t: 2 * x * t * noise()), FORWARD, "jvp is not deterministic"),
}


SLOW_PROBLEMS = ["not linear, fast mode", "noise on the host"]


@row("G1", "G5", "G6")
@cells("problem", [name for name in PROBLEMS if name not in SLOW_PROBLEMS], PROBLEMS)
def test_a_problem_is_reported_as_a_failure(problem):
    function, options, message = PROBLEMS[problem]
    assert re.search(message, "\n".join(failure(function, normal(3), **options).problems), re.DOTALL)


@row("G5")
def test_nondet_tol_allows_noise():
    noisy = rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * noise())
    passes(noisy, normal(3), nondet_tol=1.0, atol=1.0)


@row("G5")
def test_a_large_number_does_not_hide_noise_in_others():
    traces = itertools.count()

    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g * (1 + np.array([0, 1e-4, 0]) * next(traces))

    noisy = rule(saved_square, backward)
    (problem,) = failure(noisy, np.array([1e10, 1.0, -2.0])).problems
    assert "not deterministic" in problem


@row("G5")
def test_undefined_cotangents():
    def pair(backward):
        def forward(ctx, x):
            ctx.set_materialize_grads(False)
            return 2 * x, 3 * x

        return rule(forward, lambda ctx, a, b: backward(a, b))

    raising = pair(lambda a, b: 2 * a + 3 * b)
    mistaken = pair(lambda a, b: (1.0 if a is None else 2 * a) + (0 if b is None else 3 * b))
    assert "cotangent of output 0 is undefined" in failure(raising, normal(3)).problems[0]
    passes(raising, normal(3), check_undefined_grad=False)
    problem = failure(mistaken, normal(3)).problems[0]
    assert "changes if the cotangent of output 0 is undefined: treat it as zeros" in problem


@row("G5")
def test_undefined_tangents():
    def product(mistake):
        def jvp(primals, tangents):
            (x, y), (dx, dy) = primals, tangents
            zero = [type(t).__name__ == "SymbolicZero" for t in tangents]
            parts = [jnp.full_like(x, mistake) if zero[0] else dx * y, jnp.zeros_like(x) if zero[1] else x * dy]
            return x * y, sum(parts)

        function_with_rule = jax.custom_jvp(lambda x, y: x * y)
        function_with_rule.defjvp(jvp, symbolic_zeros=True)
        return function_with_rule

    inputs = normal(3), normal(3, seed=1)
    passes(product(0.0), inputs, **FORWARD)
    assert "tangent of input 0 ('x') is undefined" in failure(product(1.0), inputs, **FORWARD).problems[0]
    passes(product(1.0), inputs, check_undefined_grad=False, **FORWARD)


@row("G5")
def test_jvp_that_reads_which_inputs_are_differentiated():
    def product(mistake):
        class Product(jaxfn.Function):
            @staticmethod
            def forward(ctx, x, y):
                return saved_product(ctx, x, y)

            @staticmethod
            def jvp(ctx, dx, dy):
                x, y = ctx.saved_tensors
                return (dx * y + x * dy) * (1 if all(ctx.needs_input_grad) else mistake)

        return Product.apply

    inputs = normal(3), normal(3, seed=1)
    passes(product(1), inputs, **FORWARD)
    for function in (product(2), jax.jit(product(2))):
        assert "tangent of input 0 ('x') is undefined" in failure(function, inputs, **FORWARD).problems[0]


@row("G5")
def test_one_input_at_a_time():
    def backward(asked_for):
        def product(ctx, g):
            x, y = ctx.saved_tensors
            return g * y if ctx.needs_input_grad[asked_for] else None, g * x

        return product

    inputs = normal(3), normal(3, seed=1)
    passes(rule(saved_product, backward(0)), inputs)
    (problem,) = failure(rule(saved_product, backward(1)), inputs).problems
    assert "needs_input_grad" in problem and "input 0 ('x')" in problem


@jax.custom_batching.custom_vmap
def doubled_wrongly_in_batches(g):
    return 2 * g


doubled_wrongly_in_batches.def_vmap(lambda axis_size, in_batched, g: (3 * g, in_batched[0]))


DOUBLED = {
    "right": (lambda g: on_the_host(lambda g: 2 * np.asarray(g), g), None),
    "no batching rule": (lambda g: on_the_host(lambda g: 2 * np.asarray(g), g, None), "cannot be batched"),
    "wrong batching rule": (doubled_wrongly_in_batches, "wrong under jax.vmap"),
}


@row("G5")
@cells(
    "mode, name",
    [("grad", "right"), ("grad", "wrong batching rule"), ("forward_grad", "no batching rule")],
    ["grad", "forward_grad"],
    DOUBLED,
)
def test_batched_gradients(mode, name):
    doubled, message = DOUBLED[name]
    if mode == "grad":
        function, options = rule(saved_square, lambda ctx, g: ctx.saved_tensors[0] * doubled(g)), {}
    else:
        function, options = square_with_jvp(lambda x, t: x * doubled(t)), FORWARD
    batched = {f"check_batched_{mode}": True, **options}
    if message is None:
        passes(function, normal(3), **batched)
    else:
        passes(function, normal(3), **options)
        (problem,) = failure(function, normal(3), **batched).problems
        assert message in problem


@row("G5")
def test_gradient_dtypes():
    single = rule(saved_square, lambda ctx, g: (2 * ctx.saved_tensors[0] * g).astype(jnp.float32))
    passes(single, np.ones(3))
    (problem,) = failure(single, np.ones(3), check_grad_dtypes=True).problems
    assert "float32" in problem and "float64" in problem and "'x'" in problem


@row("G5")
@modes_and_references
def test_forward_mode(fast_mode, reference):
    def sine(factor):
        return custom_jvp(jnp.sin, lambda x, t: (jnp.sin(*x), factor * t[0] * jnp.cos(*x)))

    options = {"fast_mode": fast_mode, "against": reference, "check_forward_ad": True}
    passes(sine(1.0), normal(3), **options)
    (mismatch,) = failure(sine(1.001), normal(3), check_backward_ad=False, **options).mismatches
    assert mismatch.mode == "forward"
    if not fast_mode:
        assert mismatch.mistake == "a constant factor: 1.001 times what it should be"


@row("G5")
def test_forward_mode_of_large_and_complex_functions():
    def product(mistake):
        def jvp(primals, tangents):
            (x, y), (dx, dy) = primals, tangents
            return 1j * x * y, 1j * (x * dy + dx * y) + mistake * dx.at[2].set(0)

        return custom_jvp(lambda x, y: x * y * 1j, jvp)

    inputs = normal(300) + 1j * normal(300, seed=1), normal(300, seed=2)
    passes(product(0.0), inputs, **FORWARD)
    (mismatch,) = failure(product(1e-3), inputs, **FORWARD).mismatches
    assert mismatch.input == "input 0 ('x')" and mismatch.count == 2 * 299


# Complex numbers.


@row("G5")
@modes_and_references
def test_complex(fast_mode, reference):
    z = normal(3) + 1j * normal(3, seed=1)
    options = {"fast_mode": fast_mode, "against": reference}
    passes(rule(saved_square, lambda ctx, g: 2 * g * ctx.saved_tensors[0].conj()), z, **options)
    report = failure(rule(saved_square, lambda ctx, g: 2 * g * ctx.saved_tensors[0]), z, **options)
    assert report.mismatches[0].mistake == "missing conjugate"


@row("G5")
def test_functions_without_a_complex_derivative():
    """Neither holomorphic nor antiholomorphic, against hand-written derivatives in torch's convention."""

    def mixed(slope):
        return of_inputs(lambda z: z * z.conj() + 3j * z.conj(), slope)

    z = normal(3) + 1j * normal(3, seed=1)
    passes(mixed(lambda g, z: g * z + g.conj() * (z + 3j)), z)
    (mismatch,) = failure(mixed(lambda g, z: g * z), z).mismatches
    assert {entry.part for entry in mismatch.entries} <= {"real", "imaginary"}


# Outputs that are not differentiable, pytrees, layouts, sizes.


@row("G5")
def test_the_output_with_a_wrong_gradient_is_named_among_others():
    def forward(ctx, x):
        ctx.order = jnp.argsort(x)
        shifted = x + 1
        ctx.mark_non_differentiable(shifted)
        return ctx.order, shifted, x[ctx.order]

    def backward(ctx, _order, _shifted, g):
        return jnp.zeros_like(g).at[ctx.order].set(2.0 * g)

    assert [m.output for m in failure(rule(forward, backward), normal(4)).mismatches] == ["output 2"]


@row("G5")
def test_no_differentiable_output_may_depend_on_the_inputs():
    def marked(compute):
        def forward(ctx, x):
            y = compute(x)
            ctx.mark_non_differentiable(y)
            return y

        return rule(forward, lambda ctx, g: g)

    passes(marked(lambda x: jnp.where(x > 0, 1.0, jnp.nan)), normal(3))
    assert "expected to be zero" in failure(marked(jnp.sin), normal(3)).problems[0]


Parameters = namedtuple("Parameters", ["weight", "biases"])


@row("G5")
@cells("fast_mode", [True], [False, True])
def test_pytrees(fast_mode):
    def layer(factor):
        def forward(ctx, parameters, x):
            ctx.parameters, ctx.x = parameters, x
            hidden = x @ parameters.weight + parameters.biases["b"]
            return {"out": hidden, "extra": (jnp.sum(x * x), 3)}

        def backward(ctx, g):
            out, extra = g["out"], g["extra"][0]
            gradients = Parameters(factor * ctx.x.T @ out, {"b": out.sum(0)})
            return gradients, out @ ctx.parameters.weight.T + 2 * ctx.x * extra

        return rule(forward, backward)

    inputs = Parameters(normal(3, 2), {"b": normal(2)}), normal(4, 3)
    passes(layer(1.0), inputs, fast_mode=fast_mode)
    (mismatch,) = failure(layer(1.001), inputs, fast_mode=fast_mode).mismatches
    assert mismatch.input == "input 0 ('parameters').weight" and mismatch.output == "output 0['out']"


@row("G5")
@slow
@pytest.mark.parametrize("fast_mode", [False, True], ids=["full", "fast"])
@pytest.mark.parametrize("empty", [normal(0), normal(3, 0)], ids=["(0,)", "(3, 0)"])
def test_an_empty_input_next_to_another_one(empty, fast_mode):
    def function(factor):
        return lambda a, b: scaled_sine(1.0)(a).sum() + scaled_sine(factor)(b)

    inputs = empty, normal(6, 4).T[::2, ::-1]
    passes(scaled_sine(1.0), empty, fast_mode=fast_mode)
    passes(function(1.0), inputs, fast_mode=fast_mode)
    failure(function(1.001), inputs, fast_mode=fast_mode)


@row("G5")
def test_non_finite_derivatives_are_failures():
    failure(lambda x: jnp.sqrt(x), np.array([0.0, 1.0]))
    passes(lambda x: jnp.sqrt(x), np.array([0.5, 1.0]))


# Large problems: in blocks of bounded size.


@slow
@pytest.mark.parametrize("reference", REFERENCES)
def test_blocks_give_equal_results(reference):
    inputs = normal(40, 9), normal(30, 9)

    class Wrong(Linear):
        @staticmethod
        def backward(ctx, grad_output):
            grad_input, grad_weight, _ = Linear.backward(ctx, grad_output)
            return grad_input, None if grad_weight is None else grad_weight.at[29, 8].multiply(1.001), None

    for max_memory in (2 << 20, 64 << 20):
        passes(Linear.apply, inputs, against=reference, max_memory=max_memory)
        (mismatch,) = failure(Wrong.apply, inputs, against=reference, max_memory=max_memory).mismatches
        assert mismatch.count == 40  # the column of one weight, one row for each example
        assert all(entry.input_index == (29, 8) and entry.index[1] == 29 for entry in mismatch.entries)


@cells("index", [1199], [0, 41, 1199])
def test_one_wrong_row_in_any_batch_is_found(index):
    wrong = rule(saved_square, lambda ctx, g: (2 * ctx.saved_tensors[0] * g).at[3].add(1e-6 * g[index]))
    report = failure(wrong, normal(1200), max_memory=1 << 20, against="autodiff")
    (mismatch,) = report.mismatches
    assert (mismatch.count, mismatch.total) == (1, 1200 * 1200) and not mismatch.matrices
    (entry,) = mismatch.entries
    assert (entry.index, entry.input_index) == ((index,), (3,))
    with pytest.raises(ValueError, match="too large"):
        report.plot()


def test_programs_stay_below_the_memory_that_they_may_use(monkeypatch):
    from jaxfn._gradcheck.evaluation.batches import BatchedEvaluator

    needed, batches = [], []
    original = BatchedEvaluator._compile

    def recorded(self, compute, functions, count, make, each):
        batch, program = original(self, compute, functions, count, make, each)
        needed.append(program.bytes())
        batches.append((batch, count))
        return batch, program

    monkeypatch.setattr(BatchedEvaluator, "_compile", recorded)
    passes(Linear.apply, (normal(40, 30), normal(50, 30)), max_memory=4 << 20)
    assert needed and max(needed) <= 4 << 20
    assert any(batch < size for batch, size in batches)


def test_as_many_projections_as_unit_vectors_are_not_taken_for_those():
    wrong = rule(saved_square, lambda ctx, g: 2.002 * ctx.saved_tensors[0] * g)
    (mismatch,) = failure(lambda x, y: (wrong(x), 2 * y), (normal(2), normal(2)), fast_mode=True).mismatches
    assert (mismatch.output, mismatch.count, mismatch.total) == ("output 0", 2, 4)


# Compiled checks are reused for an identical function, and for no other one.


def test_the_second_check_on_other_values_compiles_nothing(monkeypatch):
    compiled = compiled_by(monkeypatch)
    function = scaled_sine(1.0)
    passes(function, normal(3, 17))
    assert compiled
    compiled.clear()
    passes(function, normal(3, 17, seed=1))
    passes(scaled_sine(1.0), normal(3, 17, seed=2))  # another function object with equal code
    assert not compiled
    failure(scaled_sine(1.001), normal(3, 17))
    assert compiled


def damped(c, change=lambda dx, dw, ctx, g: (dx, dw)):
    """w tanh(c x), whose constant makes each one another program; `change` maps its gradients to wrong ones."""

    def forward(ctx, x, w):
        y = jnp.tanh(c * x)
        ctx.save_for_backward(w, y)
        return jnp.where(w > 0, y * w, w * y)  # holds a jaxpr of jit

    def backward(ctx, g):
        w, y = ctx.saved_tensors
        return change(c * g * w * (1 - y * y), g * y, ctx, g)

    return rule(forward, backward)


def compiled_by(monkeypatch):
    """The programs that are compiled from now on."""
    compiled = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: compiled.append(a) or compile_(*a, **k))
    return compiled


def test_a_function_of_operations_that_another_had_compiles_nothing(monkeypatch):
    inputs = normal(5, 7), normal(7, seed=1)
    passes(damped(1.1), inputs)
    compiled = compiled_by(monkeypatch)
    reports = {str(passes(damped(c), inputs)) for c in (1.2, 1.3, 1.4, 1.5)}
    assert not compiled and len(reports) == 1
    passes(damped(1.6), (normal(5, 8), normal(8)))
    assert compiled


CHANGES = {
    "value": lambda dx, dw, ctx, g: (1.001 * dx, dw),
    "swapped": lambda dx, dw, ctx, g: (dw, dx),
    "not linear": lambda dx, dw, ctx, g: (dx * g, dw),
    "constant": lambda dx, dw, ctx, g: (dx + 1, dw),
    "None": lambda dx, dw, ctx, g: (dx, None),
    "flags": lambda dx, dw, ctx, g: (dx, dw if ctx.needs_input_grad[0] else 2 * dw),
    "random": lambda dx, dw, ctx, g: (noise() * dx, dw),
}


@row("G5")
@cells("wrong", ["value", "not linear", "flags"], CHANGES)
def test_a_wrong_rule_has_the_same_report_by_operations(wrong, monkeypatch):
    from jaxfn._gradcheck.evaluation import operations

    inputs = normal(3), normal(3, seed=1)
    monkeypatch.setattr(operations, "_MAX_OPERATIONS", -1)  # never by operations
    expected = failure(damped(1.0, CHANGES[wrong]), inputs)
    monkeypatch.undo()
    assert str(failure(damped(1.0, CHANGES[wrong]), inputs)) == str(expected)
    passes(damped(1.0), inputs)


@row("G5")
@pytest.mark.parametrize("inline", [False, True])
def test_every_check_sees_the_calls_in_a_jitted_function(inline):
    """JAX has the jaxpr of such a function from the first check, and an inlined one leaves no trace of itself."""
    function = jax.jit(damped(1.0, CHANGES["flags"]), inline=inline)
    for _ in range(2):
        assert "needs_input_grad" in str(failure(function, (normal(3), normal(3, seed=1))))
    cast = jax.jit(damped(1.0, lambda dx, dw, ctx, g: (dx.astype(np.float32), dw)), inline=inline)
    for _ in range(2):
        assert "float32" in str(failure(cast, (np.ones(3), np.ones(3)), check_grad_dtypes=True, atol=1e-3, rtol=1e-3))


def test_a_jitted_function_is_traced_for_every_check():
    scale = 1.0
    jitted = jax.jit(lambda g: scale * g)  # reads a variable, which JAX's cache does not see
    function = damped(1.0, lambda dx, dw, ctx, g: (jitted(dx), dw))
    passes(function, (normal(3), normal(3, seed=1)))
    scale = 2.0
    failure(function, (normal(3), normal(3, seed=1)))


def closing_over(array):
    return rule(saved_square, lambda ctx, g: array * 2 * ctx.saved_tensors[0] * g)


def with_a_constant_inside(array):
    """A jaxpr shows the constant neither in its text nor among its own constants."""
    scale = jax.jit(lambda g: g * array)
    return rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * scale(g))


def with_a_rule_of(choose):
    function = of_inputs(jnp.multiply, lambda g, x, y: (g * choose(x, y), g * x))
    return lambda x: function(x, np.arange(1.0, 4.0))


def stacked(axis):
    """x, 2 x and 3 x as columns; the gradients of rows are summed where the axis is 0."""

    def backward(ctx, g):
        return jnp.stack([g[:, 0], 2 * g[:, 1], 3 * g[:, 2]], axis=axis).sum(1)

    return rule(lambda ctx, x: jnp.stack([x, 2 * x, 3 * x], axis=1), backward)


def with_jvp(factor, is_generated):
    sine = scaled_sine(factor if is_generated else 1.0)
    if is_generated:
        sine.Function.generate_jvp_rule = True
    else:
        sine.jvp(lambda ctx, tangent: factor * tangent * jnp.cos(ctx.saved_tensors[0]))
    return sine


def host(f):
    return of_inputs(lambda x: on_the_host(f, x), lambda g, x: g * jnp.cos(x))


RIGHT_AND_WRONG = {
    "number that backward reads": lambda is_right: closing_over(1.0 if is_right else 2.0),
    "array that backward reads": lambda is_right: closing_over(np.ones(3) if is_right else np.full(3, 2.0)),
    "numpy constant inside": lambda is_right: with_a_constant_inside(np.array([1, 1.0 if is_right else 2.0, 1])),
    "jax constant inside": lambda is_right: with_a_constant_inside(jnp.array([1, 1.0 if is_right else 2.0, 1])),
    "input that backward reads": lambda is_right: with_a_rule_of((lambda x, y: y) if is_right else (lambda x, y: x)),
    "axis": lambda is_right: stacked(1 if is_right else 0),
    "host function": lambda is_right: host(np.sin if is_right else np.cos),
    "jvp": lambda is_right: with_jvp(1.0 if is_right else 1.1, False),
    "generated jvp": lambda is_right: with_jvp(1.0 if is_right else 1.1, True),
}


@row("G2")
@cells(
    "changed", ["array that backward reads", "jax constant inside", "input that backward reads", "jvp"], RIGHT_AND_WRONG
)
def test_functions_are_distinguished(changed):
    """Each of these changes is detected, as when a rule is fixed in a notebook and checked again."""
    options = {"check_forward_ad": "jvp" in changed, "raise_exception": False}
    with jax.enable_x64(True):
        for is_right in (True, False, True):
            assert bool(gradcheck(RIGHT_AND_WRONG[changed](is_right), normal(3), **options)) is is_right


def test_a_rule_replaced_afterwards_is_checked_again():
    function = rule(saved_square, lambda ctx, g: factor * 2 * ctx.saved_tensors[0] * g)
    factor = 1.0  # a variable that the rule reads
    passes(function, normal(3))
    factor = 2.0
    failure(function, normal(3))
    function.backward(lambda ctx, g: 2 * ctx.saved_tensors[0] * g)
    passes(function, normal(3))


def test_the_number_of_programs_in_memory_is_bounded(monkeypatch):
    from jaxfn._gradcheck.evaluation import execution

    monkeypatch.setattr(execution, "_MAX_CACHED", 2)
    passes(scaled_sine(1.0), normal(1, 13), fast_mode=True)  # not operation by operation, and of no other test
    assert len(execution._cache) <= 2


def test_global_random_state_is_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    passes(scaled_sine(1.0), normal(3), fast_mode=True)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


# G6: second order.


def cubic(second_factor):
    """x³, whose second derivative is wrong by a factor though the first is right."""

    first = of_inputs(lambda x, g: 3 * x * x * g, lambda gg, x, g: (second_factor * 6 * x * g * gg, 3 * x * x * gg))
    return of_inputs(lambda x: x**3, lambda g, x: first(x, g))


@row("G6")
@cells("fast_mode, reference", [(False, "autodiff")], [False, True], REFERENCES)
def test_second_order(fast_mode, reference):
    options = {"fast_mode": fast_mode, "against": reference}
    passes(cubic(1.0), normal(3), check=gradgradcheck, **options)
    passes(cubic(1.001), normal(3), **options)
    (mismatch,) = failure(cubic(1.001), normal(3), check=gradgradcheck, **options).mismatches
    assert mismatch.output == "gradient of input 0 ('inputs[0]')" and mismatch.input == "input 0 ('inputs[0]')"


@row("G6")
def test_grad_outputs():
    passes(lambda x: (scaled_sine(1.0)(x), x > 0, x**2), normal(3), (normal(3), None, normal(3)), check=gradgradcheck)
    with pytest.raises(ValueError, match="grad_outputs has arrays of shapes"):
        gradgradcheck(Linear.apply, (normal(2, 3), normal(4, 3)), normal(4, 2))
    passes(jnp.sin, normal(3), check=gradgradcheck, gen_non_contig_grad_outputs=True)


@row("G6")
def test_second_order_of_a_wrong_first_one_is_checked_by_differences():
    """torch's meaning: the second order has to be the derivative of the first, whatever that is."""
    report = passes(scaled_sine(2.0), normal(3), check=gradgradcheck)
    assert any("finite differences decided" in note for note in report.notes)
