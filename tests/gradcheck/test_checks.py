"""Rows G5 and G6: every small check, and second order, each with a right and a wrong Function."""

from __future__ import annotations

from collections import namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from jaxfn import gradcheck, gradgradcheck
from tests.support.cases import Linear
from tests.support.checking import failure, normal, passes, scaled_sine
from tests.support.marks import lane_cases, row, slow

MODES = pytest.mark.parametrize("fast_mode", [False, True], ids=["full", "fast"])


def rule(forward, backward):
    made = jaxfn.function(forward)
    made.backward(backward)
    return made


def saved_square(ctx, x):
    ctx.save_for_backward(x)
    return x * x


# G5: shapes, errors, linearity.


@row("G5")
def test_wrong_shapes_are_reported_as_failures():
    wrong = rule(saved_square, lambda ctx, g: jnp.concatenate([g, g]))
    for check in (gradcheck, gradgradcheck):
        (problem,) = failure(wrong, normal(3), check=check).problems
        assert "backward raised RuntimeError" in problem and "shape (6,)" in problem and "'x'" in problem


@row("G5")
def test_no_backward_is_reported_as_a_failure():
    (problem,) = failure(jaxfn.function(saved_square), normal(3)).problems
    assert "defines neither backward" in problem


@row("G5")
@MODES
def test_a_rule_that_is_not_linear(fast_mode):
    """Unit cotangents do not show it: 1 * 1 is 1 and 0 * 0 is 0."""
    wrong = rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * g)
    assert "not linear" in failure(wrong, normal(3), fast_mode=fast_mode).problems[0]


@row("G5")
def test_not_multiplied_by_grad_output():
    wrong = rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0])
    problems = failure(wrong, normal(3)).problems
    assert any("not multiplied by grad_output" in problem for problem in problems)


# G5: undefined cotangents.


def pair(backward):
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return 2 * x, 3 * x

    return rule(forward, backward)


@row("G5")
def test_undefined_cotangents():
    def right(ctx, a, b):
        return (0 if a is None else 2 * a) + (0 if b is None else 3 * b)

    def raising(ctx, a, b):
        return 2 * a + 3 * b

    def mistaken(ctx, a, b):
        return (1.0 if a is None else 2 * a) + (0 if b is None else 3 * b)

    passes(pair(right), normal(3))
    assert "cotangent of output 0 is undefined" in failure(pair(raising), normal(3)).problems[0]
    passes(pair(raising), normal(3), check_undefined_grad=False)
    assert "takes an undefined cotangent of output 0" in failure(pair(mistaken), normal(3)).problems[0]


@row("G5")
def test_one_input_at_a_time():
    def product(backward):
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        return rule(forward, backward)

    def right(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y if ctx.needs_input_grad[0] else None), (g * x if ctx.needs_input_grad[1] else None)

    def wrong(ctx, g):
        x, y = ctx.saved_tensors
        return (g * y if ctx.needs_input_grad[1] else None), g * x

    inputs = normal(3), normal(3, seed=1)
    passes(product(right), inputs)
    (problem,) = failure(product(wrong), inputs).problems
    assert "needs_input_grad" in problem and "input 0 ('x')" in problem


# G5: determinism.


@row("G5")
def test_trace_time_randomness_in_backward():
    generator = np.random.default_rng(0)
    wrong = rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g * (1 + 1e-4 * generator.standard_normal()))
    assert "not deterministic" in failure(wrong, normal(3)).problems[0]
    passes(wrong, normal(3), nondet_tol=1.0, atol=1.0)


@row("G5")
def test_randomness_on_the_host():
    generator = np.random.default_rng(0)

    def noisy(g):
        return g * (1 + 1e-4 * generator.standard_normal())

    def backward(ctx, g):
        g = jax.pure_callback(noisy, jax.ShapeDtypeStruct(g.shape, g.dtype), g, vmap_method="sequential")
        return 2 * ctx.saved_tensors[0] * g

    assert any("not deterministic" in problem for problem in failure(rule(saved_square, backward), normal(3)).problems)


@row("G5")
def test_a_forward_that_is_not_deterministic():
    generator = np.random.default_rng(0)

    def forward(ctx, x):
        noise = jax.pure_callback(
            lambda x: generator.standard_normal(x.shape),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            x,
            vmap_method="sequential",
        )
        return x + noise

    assert any("not deterministic" in p for p in failure(rule(forward, lambda ctx, g: g), normal(3)).problems)


# G5: batched gradients.


@row("G5")
def test_batched_gradients():
    def on_the_host(vmap_method):
        def backward(ctx, g):
            shape = jax.ShapeDtypeStruct(g.shape, g.dtype)
            doubled = jax.pure_callback(lambda g: 2 * np.asarray(g), shape, g, vmap_method=vmap_method)
            return ctx.saved_tensors[0] * doubled

        return rule(saved_square, backward)

    passes(on_the_host("sequential"), normal(3), check_batched_grad=True)
    passes(on_the_host(None), normal(3))
    (problem,) = failure(on_the_host(None), normal(3), check_batched_grad=True).problems
    assert "cannot be batched" in problem


@row("G5")
def test_batched_gradients_with_wrong_values():
    @jax.custom_batching.custom_vmap
    def double(g):
        return 2 * g

    double.def_vmap(lambda axis_size, in_batched, g: (3 * g, in_batched[0]))
    wrong = rule(saved_square, lambda ctx, g: ctx.saved_tensors[0] * double(g))
    passes(wrong, normal(3))
    (problem,) = failure(wrong, normal(3), check_batched_grad=True).problems
    assert "wrong under jax.vmap" in problem


# G5: dtypes.


@row("G5")
def test_gradient_dtypes():
    def backward(ctx, g):
        return (2 * ctx.saved_tensors[0] * g).astype(jnp.float32)

    right = rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * g)
    passes(right, np.ones(3), check_grad_dtypes=True)
    passes(rule(saved_square, backward), np.ones(3))
    (problem,) = failure(rule(saved_square, backward), np.ones(3), check_grad_dtypes=True).problems
    assert "float32" in problem and "float64" in problem and "'x'" in problem


# G5: forward mode.


def custom_jvp(derivative):
    @jax.custom_jvp
    def sine(x):
        return jnp.sin(x)

    sine.defjvp(lambda primals, tangents: (jnp.sin(primals[0]), tangents[0] * derivative(primals[0])))
    return sine


@row("G5")
@MODES
@pytest.mark.parametrize("reference", ["both", "finite_differences", "autodiff"])
def test_forward_mode(fast_mode, reference):
    options = {"fast_mode": fast_mode, "reference": reference, "check_forward_ad": True}
    passes(custom_jvp(jnp.cos), normal(3), check_batched_forward_grad=True, **options)
    report = failure(custom_jvp(lambda x: 1.001 * jnp.cos(x)), normal(3), check_backward_ad=False, **options)
    (mismatch,) = report.mismatches
    assert mismatch.check == "forward mode"
    if not fast_mode:
        assert mismatch.kind == "a constant factor: 1.001 times what it should be"


@row("G5")
def test_forward_mode_of_large_and_complex_functions():
    @jax.custom_jvp
    def product(x, y):
        return x * y * 1j

    def tangent(primals, tangents):
        (x, y), (dx, dy) = primals, tangents
        return product(x, y), 1j * (x * dy + dx * y) + 1e-3 * dx.at[2].set(0) * wrong

    product.defjvp(tangent)
    x, y = normal(300) + 1j * normal(300, seed=1), normal(300, seed=2)
    wrong = 0.0
    passes(product, (x, y), check_forward_ad=True, check_backward_ad=False)
    wrong = 1.0
    (mismatch,) = failure(product, (x, y), check_forward_ad=True, check_backward_ad=False).mismatches
    assert mismatch.input == "input 0 ('x')" and mismatch.count == 2 * 299


@row("G5")
@pytest.mark.parametrize("vmap_method", ["sequential", None])
def test_batched_forward_gradients(vmap_method):
    def doubled(t):
        shape = jax.ShapeDtypeStruct(t.shape, t.dtype)
        return jax.pure_callback(lambda t: 2 * np.asarray(t), shape, t, vmap_method=vmap_method)

    @jax.custom_jvp
    def double(x):
        return 2 * x

    double.defjvp(lambda primals, tangents: (double(primals[0]), doubled(tangents[0])))
    options = {"check_forward_ad": True, "check_backward_ad": False}
    passes(double, normal(3), **options)
    if vmap_method:
        passes(double, normal(3), check_batched_forward_grad=True, **options)
    else:
        (problem,) = failure(double, normal(3), check_batched_forward_grad=True, **options).problems
        assert "forward mode cannot be batched" in problem


@row("G5")
def test_no_forward_mode_is_reported_as_a_failure():
    (problem,) = failure(scaled_sine(1.0), normal(3), check_forward_ad=True).problems
    assert "forward mode" in problem


@row("G5")
def test_a_forward_mode_that_is_not_linear():
    """Unit tangents do not show it either."""

    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda primals, tangents: (primals[0] ** 2, 2 * primals[0] * tangents[0] * abs(tangents[0])))
    options = {"check_forward_ad": True, "check_backward_ad": False}
    problems = failure(square, normal(3), **options).problems
    assert "jvp is not linear: the tangent of output 0 for the tangent 2 u -3 v" in problems[0]


@row("G5")
def test_a_forward_mode_with_another_value():
    @jax.custom_jvp
    def square(x):
        return x * x

    square.defjvp(lambda primals, tangents: (primals[0] ** 2 + 1, 2 * primals[0] * tangents[0]))
    options = {"check_forward_ad": True, "check_backward_ad": False}
    assert "another value when it is differentiated" in failure(square, normal(3), **options).problems[0]


@row("G5")
def test_trace_time_randomness_in_forward_mode():
    generator = np.random.default_rng(0)

    @jax.custom_jvp
    def square(x):
        return x * x

    def noisy(primals, tangents):
        return primals[0] ** 2, 2 * primals[0] * tangents[0] * (1 + 1e-4 * generator.standard_normal())

    square.defjvp(noisy)
    options = {"check_forward_ad": True, "check_backward_ad": False}
    assert "jvp is not deterministic" in failure(square, normal(3), **options).problems[0]


@row("G5")
def test_undefined_tangents():
    @jax.custom_jvp
    def product(x, y):
        return x * y

    def guarded(mistake):
        def tangent(primals, tangents):
            (x, y), (dx, dy) = primals, tangents
            zero = [type(t).__name__ == "SymbolicZero" for t in tangents]
            parts = [jnp.full_like(x, mistake) if zero[0] else dx * y, jnp.zeros_like(x) if zero[1] else x * dy]
            return product(x, y), sum(parts)

        product.defjvp(tangent, symbolic_zeros=True)

    inputs, options = (normal(3), normal(3, seed=1)), {"check_forward_ad": True, "check_backward_ad": False}
    guarded(0.0)
    passes(product, inputs, **options)
    guarded(1.0)
    assert "undefined tangent of input 0" in failure(product, inputs, **options).problems[0]
    passes(product, inputs, check_undefined_grad=False, **options)


# G5: complex numbers.


@row("G5")
@MODES
@pytest.mark.parametrize("reference", ["both", "finite_differences", "autodiff"])
def test_complex(fast_mode, reference):
    def complex_square(backward):
        return rule(saved_square, backward)

    z = normal(3) + 1j * normal(3, seed=1)
    options = {"fast_mode": fast_mode, "reference": reference}
    passes(complex_square(lambda ctx, g: 2 * g * ctx.saved_tensors[0].conj()), z, **options)
    report = failure(complex_square(lambda ctx, g: 2 * g * ctx.saved_tensors[0]), z, **options)
    assert report.mismatches[0].kind == "missing conjugate"


@row("G5")
@pytest.mark.parametrize("reference", ["both", "finite_differences"])
def test_between_real_and_complex(reference):
    z, x = normal(2, 2) + 1j * normal(2, 2, seed=1), normal(2, 2, seed=2)

    def magnitude(ctx, z):
        ctx.save_for_backward(z)
        return (z * z.conj()).real

    passes(rule(magnitude, lambda ctx, g: 2 * g * ctx.saved_tensors[0]), z, reference=reference)
    failure(rule(magnitude, lambda ctx, g: 2 * g * ctx.saved_tensors[0].conj()), z, reference=reference)

    def phase(ctx, x):
        y = jnp.exp(1j * x)
        ctx.save_for_backward(y)
        return y

    passes(rule(phase, lambda ctx, g: (g * (1j * ctx.saved_tensors[0]).conj()).real), x, reference=reference)
    report = failure(rule(phase, lambda ctx, g: (g * 1j * ctx.saved_tensors[0]).real), x, reference=reference)
    assert {entry.part for entry in report.mismatches[0].entries} <= {"real", "imaginary"}


@row("G5")
def test_functions_without_a_complex_derivative():
    """Neither holomorphic nor antiholomorphic, against torch's convention by hand."""

    def mixed(ctx, z):
        ctx.save_for_backward(z)
        return z * z.conj() + 3j * z.conj()

    def backward(ctx, g):
        (z,) = ctx.saved_tensors
        return g * z + g.conj() * (z + 3j) if right else g * z

    right = True
    z = normal(3) + 1j * normal(3, seed=1)
    passes(rule(mixed, backward), z)
    right = False
    failure(rule(mixed, backward), z)


# G5: what is not differentiable, and None.


@row("G5")
def test_outputs_that_are_not_differentiable():
    def forward(ctx, x):
        order = jnp.argsort(x)
        shifted = x + 1
        ctx.mark_non_differentiable(shifted)
        ctx.order = order
        return x[order], order, shifted

    def backward(ctx, g, _order, _shifted):
        return jnp.zeros_like(g).at[ctx.order].set(factor * g)

    factor = 1.0
    passes(rule(forward, backward), normal(4))
    passes(rule(forward, backward), normal(4), fast_mode=True)
    passes(rule(forward, backward), normal(4), check=gradgradcheck)
    factor = 2.0
    assert [m.output for m in failure(rule(forward, backward), normal(4)).mismatches] == ["output 0"]


@row("G5")
def test_no_differentiable_output_may_depend_on_the_inputs():
    def marked(compute):
        def forward(ctx, x):
            y = compute(x)
            ctx.mark_non_differentiable(y)
            return y

        return rule(forward, lambda ctx, g: g)

    passes(marked(lambda x: (x > 0).astype(x.dtype)), normal(3))
    assert "expected to be zero" in failure(marked(jnp.sin), normal(3)).problems[0]


@row("G5")
def test_integer_and_static_inputs():
    def take(ctx, x, index, scale, mode):
        ctx.size, ctx.index, ctx.scale = x.shape[0], index, scale
        return scale * x[index] if mode == "take" else x

    def backward(ctx, g):
        return jnp.zeros(ctx.size, g.dtype).at[ctx.index].add(ctx.scale * g), None, None, None

    passes(rule(take, backward), (normal(5), np.array([0, 0, 3]), 2, "take"))
    wrong = rule(take, lambda ctx, g: (jnp.zeros(ctx.size, g.dtype).at[ctx.index].set(ctx.scale * g), None, None, None))
    failure(wrong, (normal(5), np.array([0, 0, 3]), 2, "take"))


@row("G5")
def test_none_gradients():
    def forward(ctx, x, y):
        ctx.save_for_backward(x)
        return x * x + 0 * y

    def other(ctx, x, y):
        ctx.save_for_backward(x)
        return x * x + y

    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g, None

    inputs = normal(3), normal(3, seed=1)
    passes(rule(forward, backward), inputs)
    (mismatch,) = failure(rule(other, backward), inputs).mismatches
    assert mismatch.input == "input 1 ('y')" and mismatch.kind == "zero everywhere"


# G5: pytrees, layouts, sizes.

Parameters = namedtuple("Parameters", ["weight", "biases"])


@row("G5")
@MODES
def test_pytrees(fast_mode):
    def forward(ctx, parameters, x):
        ctx.parameters, ctx.x = parameters, x
        hidden = x @ parameters.weight + parameters.biases["b"]
        return {"out": hidden, "extra": (jnp.sum(x * x), 3)}

    def backward(ctx, g):
        out, extra = g["out"], g["extra"][0]
        weight = ctx.x.T @ out
        return Parameters(factor * weight, {"b": out.sum(0)}), out @ ctx.parameters.weight.T + 2 * ctx.x * extra

    inputs = Parameters(normal(3, 2), {"b": normal(2)}), normal(4, 3)
    factor = 1.0
    passes(rule(forward, backward), inputs, fast_mode=fast_mode)
    factor = 1.001
    (mismatch,) = failure(rule(forward, backward), inputs, fast_mode=fast_mode).mismatches
    assert mismatch.input == "input 0 ('parameters').weight" and mismatch.output == "output 0['out']"


@row("G5")
@slow
@pytest.mark.parametrize("fast_mode", [False, True], ids=["full", "fast"])
def test_layouts_and_sizes(fast_mode):
    x = normal(4, 6)
    for array in (x.T, x[::2, ::-1], np.broadcast_to(x[0], (3, 6)), np.float64(0.3), normal(1, 1)):
        passes(scaled_sine(1.0), array, fast_mode=fast_mode)
        failure(scaled_sine(1.001), array, fast_mode=fast_mode)
    for empty in (normal(0), normal(3, 0)):
        passes(scaled_sine(1.0), empty, fast_mode=fast_mode)
        passes(lambda a, b: scaled_sine(1.0)(a).sum() + scaled_sine(1.0)(b), (empty, x), fast_mode=fast_mode)
        failure(lambda a, b: scaled_sine(1.0)(a).sum() + scaled_sine(1.1)(b), (empty, x), fast_mode=fast_mode)


@row("G5")
def test_non_finite_derivatives_are_failures():
    failure(lambda x: jnp.sqrt(x), np.array([0.0, 1.0]))
    passes(lambda x: jnp.sqrt(x), np.array([0.5, 1.0]))


# Large problems: in blocks of bounded size.
REFERENCES = ["finite_differences", "autodiff"]


@slow
@pytest.mark.parametrize("reference", ["both", *REFERENCES])
def test_blocks_give_the_same_verdict(reference):
    inputs = normal(40, 9), normal(30, 9)

    class Wrong(Linear):
        @staticmethod
        def backward(ctx, grad_output):
            grad_input, grad_weight, _ = Linear.backward(ctx, grad_output)
            return grad_input, None if grad_weight is None else grad_weight.at[29, 8].multiply(1.001), None

    for max_memory in (2 << 20, 64 << 20):
        passes(Linear.apply, inputs, reference=reference, max_memory=max_memory)
        (mismatch,) = failure(Wrong.apply, inputs, reference=reference, max_memory=max_memory).mismatches
        assert mismatch.count == 40  # the column of one weight, one row for each example
        assert all(entry.input_index == (29, 8) and entry.output_index[1] == 29 for entry in mismatch.entries)


@pytest.mark.parametrize("place", [0, 41, 1199])
def test_one_wrong_row_in_any_batch_is_found(place):
    wrong = rule(saved_square, lambda ctx, g: (2 * ctx.saved_tensors[0] * g).at[3].add(1e-6 * g[place]))
    (mismatch,) = failure(wrong, normal(1200), max_memory=1 << 20, reference="autodiff").mismatches
    assert mismatch.count == 1 and mismatch.entries[0].output_index == (place,)
    assert mismatch.entries[0].input_index == (3,)


def test_programs_stay_below_the_memory_that_they_may_use(monkeypatch):
    from jaxfn._gradcheck.numbers import sweep as _sweep

    needed, batches = [], []
    original = _sweep.Sweep._program

    def recorded(self, compute, functions, count, make, each):
        batch, program = original(self, compute, functions, count, make, each)
        needed.append(program.bytes())
        batches.append((batch, count))
        return batch, program

    monkeypatch.setattr(_sweep.Sweep, "_program", recorded)
    for max_memory in (4 << 20, 16 << 20):
        needed.clear()
        batches.clear()
        passes(Linear.apply, (normal(40, 30), normal(50, 30)), max_memory=max_memory)
        assert needed and max(needed) <= max_memory
        assert any(batch < size for batch, size in batches)


def test_as_many_projections_as_unit_vectors_are_not_taken_for_those():
    wrong = rule(saved_square, lambda ctx, g: 2.002 * ctx.saved_tensors[0] * g)
    (mismatch,) = failure(lambda x, y: (wrong(x), 2 * y), (normal(2), normal(2)), fast_mode=True).mismatches
    assert (mismatch.output, mismatch.count, mismatch.total) == ("output 0", 2, 4)


def test_the_second_check_on_other_values_compiles_nothing(monkeypatch):
    from jaxfn._gradcheck.numbers import programs as _programs

    compiled = []
    monkeypatch.setattr(_programs, "compile_quickly", lambda lowered: compiled.append(lowered) or lowered.compile())
    function = scaled_sine(1.0)
    passes(function, normal(3, 7))
    assert compiled
    compiled.clear()
    passes(function, normal(3, 7, seed=1))
    passes(scaled_sine(1.0), normal(3, 7, seed=2))  # another function object with the same code
    assert not compiled
    failure(scaled_sine(1.001), normal(3, 7))
    assert compiled


def test_a_rule_replaced_afterwards_is_checked_anew():
    factor = 1.0
    function = rule(saved_square, lambda ctx, g: factor * 2 * ctx.saved_tensors[0] * g)
    passes(function, normal(3))
    factor = 2.0  # a variable that the rule reads
    failure(function, normal(3))
    function.backward(lambda ctx, g: 2 * ctx.saved_tensors[0] * g)
    passes(function, normal(3))
    constant = np.ones(3)
    closing = rule(saved_square, lambda ctx, g: constant * 2 * ctx.saved_tensors[0] * g)
    passes(closing, normal(3))
    constant = np.full(3, 2.0)
    failure(closing, normal(3))


def test_callbacks_are_told_apart():
    def on_the_host(compute):
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return jax.pure_callback(compute, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

        return rule(forward, lambda ctx, g: g * jnp.cos(ctx.saved_tensors[0]))

    passes(on_the_host(np.sin), normal(3))
    failure(on_the_host(np.cos), normal(3))


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_constants_of_functions_inside_are_told_apart(array):
    """A jaxpr shows them neither in its text nor among its own constants."""

    def scaled(constant):
        scale = jax.jit(lambda g: g * constant)
        return rule(saved_square, lambda ctx, g: 2 * ctx.saved_tensors[0] * scale(g))

    with jax.enable_x64(True):
        for constant, is_right in (([1.0, 1, 1], True), ([1.0, 2, 1], False), ([1.0, 1, 1], True)):
            assert gradcheck(scaled(array(constant)), normal(3), raise_exception=False) is is_right


def test_rules_that_read_other_inputs_are_told_apart():
    """What a program does not use is in no text: the gradient `g * x` of either input could be the other's."""

    def product(choose):
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            return x * y

        def backward(ctx, g):
            x, y = ctx.saved_tensors
            return g * choose(x, y), g * x

        return rule(forward, backward)

    inputs = normal(3), normal(3, seed=1)
    passes(product(lambda x, y: y), inputs)
    failure(product(lambda x, y: x), inputs)
    passes(product(lambda x, y: y), inputs)


def test_programs_differ_in_what_they_use_and_in_how_it_is_arranged():
    from jaxfn._gradcheck.evaluation.execution import Mode

    a, b = np.ones(3), np.full(3, 2.0)
    functions = {
        "first": (lambda a, b: [jnp.sin(a)], [np.sin(a)]),
        "second": (lambda a, b: [jnp.sin(b)], [np.sin(b)]),
        "itself": (lambda a, b: [a], [a]),
        "the other": (lambda a, b: [b], [b]),
        "turned": (lambda a, b: [jnp.stack([a, b], axis=1)], [np.stack([a, b], axis=1)]),
        "not turned": (lambda a, b: [jnp.stack([a, b])], [np.stack([a, b])]),
    }
    for function, expected in functions.values():
        (found,) = Mode.VECTORIZED.program(function, a, b).start(a, b)()
        np.testing.assert_allclose(found, expected[0], rtol=1e-6)
    keyed = Mode.VECTORIZED.program(lambda a, b: {"a": jnp.sin(a)}, a, b).start(a, b)()
    np.testing.assert_allclose(keyed["a"], np.sin(a), rtol=1e-6)


def test_kept_programs_are_bounded(monkeypatch):
    from jaxfn._gradcheck.numbers import programs as _programs

    monkeypatch.setattr(_programs, "_PROGRAMS_KEPT", 2)
    for size in (1, 2, 3):
        passes(scaled_sine(1.0), normal(size))
        assert len(_programs._kept) <= 2


def test_global_random_state_is_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    passes(scaled_sine(1.0), normal(3), fast_mode=True)
    np.testing.assert_array_equal(np.random.get_state()[1], before)


# G6: second order.


def cubic(second_factor):
    """x**3, whose second derivative is wrong by a factor though the first is right."""

    @jaxfn.function
    def first(ctx, x, g):
        ctx.save_for_backward(x, g)
        return 3 * x * x * g

    @first.backward
    def _(ctx, gg):
        x, g = ctx.saved_tensors
        return second_factor * 6 * x * g * gg, 3 * x * x * gg

    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    return rule(forward, lambda ctx, g: first(ctx.saved_tensors[0], g))


@row("G6")
@MODES
@pytest.mark.parametrize("reference", lane_cases(["both", "finite_differences", "autodiff"], ["autodiff"]))
def test_second_order(fast_mode, reference):
    options = {"fast_mode": fast_mode, "reference": reference}
    passes(cubic(1.0), normal(3), check=gradgradcheck, **options)
    passes(cubic(1.001), normal(3), **options)
    (mismatch,) = failure(cubic(1.001), normal(3), check=gradgradcheck, **options).mismatches
    assert mismatch.output == "gradient of input 0 ('x')" and mismatch.input == "input 0 ('x')"


@row("G6")
def test_grad_outputs():
    inputs = normal(2, 3), normal(4, 3)
    passes(Linear.apply, inputs, normal(2, 4), check=gradgradcheck)
    passes(lambda x: (scaled_sine(1.0)(x), x > 0, x**2), normal(3), (normal(3), None, normal(3)), check=gradgradcheck)
    with pytest.raises(ValueError, match="grad_outputs has arrays of shapes"):
        gradgradcheck(Linear.apply, inputs, normal(4, 2))
    passes(Linear.apply, inputs, check=gradgradcheck, gen_non_contig_grad_outputs=True)


@row("G6")
def test_complex_second_order():
    right = rule(saved_square, lambda ctx, g: 2 * g * ctx.saved_tensors[0].conj())
    passes(right, normal(3) + 1j * normal(3, seed=1), check=gradgradcheck)


@row("G6")
def test_once_differentiable():
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g

    once = rule(saved_square, jaxfn.once_differentiable(backward))
    passes(once, normal(3))
    assert "once_differentiable" in failure(once, normal(3), check=gradgradcheck).problems[0]


@row("G6")
def test_forward_over_reverse():
    passes(jnp.sin, normal(3), check=gradgradcheck, check_fwd_over_rev=True)
    with pytest.raises(ValueError, match="nothing is left"):
        gradgradcheck(jnp.sin, normal(3), check_rev_over_rev=False)


@row("G6")
def test_second_order_of_a_wrong_first_one_is_judged_by_differences():
    """torch's meaning: the second order has to be the derivative of the first, whatever that is."""
    report = passes(scaled_sine(2.0), normal(3), check=gradgradcheck)
    assert any("finite differences decided" in note for note in report.notes)


@row("G6")
@slow
def test_a_gradient_that_was_cut_off():
    class CutOff(Linear):
        @staticmethod
        def backward(ctx, grad_output):
            grad_input, grad_weight, grad_bias = Linear.backward(ctx, grad_output)
            return grad_input, grad_weight, None if grad_bias is None else jax.lax.stop_gradient(grad_bias)

    inputs = normal(2, 3), normal(4, 3), normal(4)
    passes(CutOff.apply, inputs)
    passes(Linear.apply, inputs, check=gradgradcheck)
    (mismatch,) = failure(CutOff.apply, inputs, check=gradgradcheck).mismatches
    assert mismatch.output == "gradient of input 2 ('bias')" and mismatch.kind == "zero everywhere"
