"""Functions whose Python code reads the values of tensors, in eager calls: compared with torch."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")

from tests.support.checked_function import Checked  # noqa: E402
from tests.support.reading_functions import (  # noqa: E402
    CASES,
    INPUTS,
    halve_until_small,
    if_expression,
    if_sum,
    in_jax,
    in_torch,
    newton_square_root,
    slope_by_sign,
    through_numpy,
    written_to_nonzero,
)
from tests.support.torch_code import Net, counting, explained_under_jit, function_of, rule  # noqa: E402

QUICK = """
    if_sum if_in_backward MasksGradient implicit_fixed_point retried numpy_in_backward numpy_written
    written_to_a_mask_that_may_be_empty listed_by_rows mean_of_selected written_to_nonzero scaled_by_item
"""


@row("H20")
@cells("name", QUICK.split(), CASES)
def test_eager_calls_take_the_course_that_torch_takes(name: str):
    """Compares `forward`, `backward` and the second derivative; the inputs take different courses by turns."""
    theirs, ours = CASES[name], jaxfn.from_torch(CASES[name])
    for values in [*INPUTS, INPUTS[0]]:
        x = np.array(values, np.float32)
        for expected, got in zip(in_torch(theirs, x), in_jax(ours, jnp.asarray(x)), strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)


@row("H20")
def test_each_course_is_traced_once():
    """There are two courses in forward, and two in backward."""
    F, runs = counting(rule(if_sum, slope_by_sign))
    for values in [*INPUTS * 2, [-1.0, 2.0, 3.0, -7.0]]:
        x = np.array(values, np.float32)
        np.testing.assert_allclose(F.apply(x), if_sum(torch.tensor(x)), rtol=1e-6)
        jax.grad(lambda x: F.apply(x).sum())(jnp.asarray(x))
        jax.vmap(F.apply)(jnp.stack([x, x * 2]))
    assert runs.count("forward") == 2
    assert runs.count("backward") <= 2 * 2


@row("H20")
def test_beyond_32_courses_calls_are_right_and_warn_once():
    F, runs = counting(function_of(lambda x: x * x.tolist()[0] if x.sum() > 0 else x))
    with pytest.warns(UserWarning, match="Counts.forward reads values .* more than 32 different") as caught:
        for i in range(1, 38):
            x = np.array([i, 2 * i, 3], np.float32)
            np.testing.assert_array_equal(F.apply(x), i * x)
    assert len(caught) == 1
    before = len(runs)
    np.testing.assert_array_equal(F.apply(np.array([2, 4, 3], np.float32)), [4, 8, 6])  # This one is cached.
    assert len(runs) == before


@row("H20")
def test_the_elements_of_a_batch_must_agree():
    F = jaxfn.from_torch(CASES["if_in_backward"])
    batch = jnp.array([[1.0, 2], [0.5, 3], [2, 2]])
    mapped = jax.vmap(jax.grad(lambda x, w: (F.apply(x) * w).sum()), (0, None))(batch, jnp.array([1.0, 2]))
    for x, gradient in zip(batch, mapped, strict=True):
        tensor = torch.tensor(np.asarray(x), requires_grad=True)
        (CASES["if_in_backward"].apply(tensor) * torch.tensor([1.0, 2])).sum().backward()
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-6)
    within = jax.grad(lambda x: jax.vmap(lambda x: F.apply(x).sum())(x).sum())(batch)
    np.testing.assert_allclose(within, np.stack([jax.grad(lambda x: F.apply(x).sum())(x) for x in batch]), rtol=1e-6)
    mixed = batch - jnp.array([[0.0], [9], [0]])
    for function in (jaxfn.from_torch(CASES["if_sum"]).apply, jax.grad(lambda x: F.apply(x).sum())):
        with pytest.raises(jaxfn.TranslationError, match="not the same for all elements(?s:.*)if "):
            jax.vmap(function)(mixed)


@row("H20")
def test_errors_of_the_code_are_raised_and_not_remembered():
    F = jaxfn.from_torch(CASES["asserted"])
    for _ in range(2):
        with pytest.raises(AssertionError, match="too large"):
            F.apply(jnp.full(3, 200.0))
        np.testing.assert_array_equal(F.apply(jnp.full(3, 2.0)), np.full(3, 4.0))


def read_in_branch(x: Any) -> Any:
    return x * 2 if x.sum() > 0 else x * 3


READS = {
    "branch": (read_in_branch, r"x.sum\(\) > 0"),
    "mean of selected": (lambda x: x * x[x < 0].mean(), "`mean` of elements selected"),
    "list of selected": (lambda x: x + torch.cat([x[x < 0], x[x > 0]]), "aten.cat.default of elements selected"),
    "nested": (lambda x: IfSum.apply(x) * 3, r"if x.sum\(\) > 0"),
}
IfSum = CASES["if_sum"]


@row("H20")
@pytest.mark.parametrize("transform", [jax.jit, lambda f: lambda x: jax.lax.map(f, x[None])[0]], ids=["jit", "map"])
@cells("name", ["branch", "nested"], READS)
def test_a_read_without_an_answer_raises_if_the_code_catches_its_error(transform: Any, name: str):
    read, message = READS[name]

    def guess(x: Any) -> Any:
        try:
            return read(x)
        except Exception:
            return x

    F = jaxfn.from_torch(function_of(guess))
    np.testing.assert_array_equal(F.apply(-jnp.ones(2)), read(-torch.ones(2)))
    with pytest.raises(jaxfn.TranslationError, match=message):
        transform(F.apply)(jnp.ones(2))


@row("H20")
def test_an_array_that_shares_its_memory_is_not_written_to():
    def clip(x: Any) -> Any:
        x.numpy()[0] = 7
        return x * 2

    with pytest.raises(jaxfn.TranslationError, match=r"writes to the NumPy array(?s:.*)x.numpy\(\)\[0\] = 7"):
        jaxfn.from_torch(function_of(clip)).apply(jnp.ones(3))


@row("H20")
def test_drawn_numbers_are_read():
    """The draw that is not used does not change what is drawn after it."""

    def unused_draw(x: Any) -> Any:
        torch.rand(5)
        return draws(x)

    F = jaxfn.from_torch(function_of(unused_draw))
    assert_both_branches_are_drawn(lambda key: [F.apply(TENS, key=key)])


TENS = jnp.full(3, 10.0)


def draws(x: Any) -> Any:
    noise = torch.rand_like(x)
    return x * noise if noise.sum() > len(x) / 2 else x + noise


def assert_both_branches_are_drawn(run: Any) -> None:
    """Asserts that both branches are drawn, of every result of `draws(10)`."""
    seen: set[bool] = set()
    for key in jax.random.split(jax.random.key(0), 20):
        for y, again in zip(run(key), run(key), strict=True):
            noise = y / 10 if y.max() < 10 else y - 10
            assert (noise.sum() > 1.5) == (y.max() < 10) and (noise >= 0).all() and (noise < 1).all()
            np.testing.assert_array_equal(y, again)
            seen.add(bool(y.max() < 10))
        if len(seen) == 2:
            return
    raise AssertionError(f"one branch alone: {seen}")


@row("H20")
def test_integers_that_need_64_bits_are_not_read_wrong():
    with pytest.raises(jaxfn.TranslationError, match="64 bits"):
        jaxfn.from_torch(function_of(lambda x: x * ((x.long() * 2**40).sum().item() % 7))).apply(jnp.ones(3))


@row("H20")
def test_replaced_operations_and_integers_among_the_inputs():
    def forward(x: Any, index: Any) -> Any:
        return torch.sinc(x)[index] if torch.sinc(x).sum() > 1 else x[index]

    def backward(g: Any, x: Any, index: Any) -> Any:
        return torch.zeros(4).index_add(0, index, g) / (int(index.max()) + 1), None

    F = jaxfn.from_torch(rule(forward, backward), ops={"aten.sinc": lambda x: x + 1})
    x, index = jnp.arange(4.0), jnp.array([0, 2, 2])
    np.testing.assert_array_equal(F.apply(x, index), [1, 3, 3])
    np.testing.assert_array_equal(F.apply(x - 5, index), [-5, -3, -3])
    np.testing.assert_allclose(jax.grad(lambda x: F.apply(x, index).sum())(x), [1 / 3, 0, 2 / 3, 0])


@row("H20")
def test_bfloat16_and_double_precision():
    for dtype in ("bfloat16", "float64"):
        with jax.enable_x64(dtype == "float64"):
            x = jnp.array(INPUTS[2], dtype)
            tensor = torch.tensor(INPUTS[2], dtype=getattr(torch, dtype))
            for name in ("scaled_by_item", "halve_until_small", "numpy_written"):
                if name != "numpy_written" or dtype != "bfloat16":  # which NumPy does not have
                    expected = CASES[name].apply(tensor)
                    got = jaxfn.from_torch(CASES[name]).apply(x)
                    assert str(got.dtype) == dtype
                    np.testing.assert_allclose(got.astype(float), expected.double(), rtol=1e-2)


@row("H20", "I7")
def test_python_functions_do_not_read():
    for function in (if_sum, lambda x: IfSum.apply(x) + 1):
        with pytest.raises(jaxfn.TranslationError, match=r"if x.sum\(\) > 0"):
            jaxfn.from_torch(function)(jnp.ones(3))


class AppliesItself(torch.autograd.Function):
    """The derivative of sin(x + n pi / 2) by the Function itself, through NumPy at every order."""

    @staticmethod
    def forward(ctx, x, n):
        ctx.save_for_backward(x)
        ctx.n = n
        return torch.from_numpy(np.sin(x.detach().numpy() + n * np.float32(np.pi / 2)))

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * AppliesItself.apply(x, ctx.n + 1), None


def applies_reading(x):
    y = IfSum.apply(x)
    return y + CASES["if_in_backward"].apply(-y) if y.max() > 5 else y


# Applies a Function that reads in forward and in backward, to a value that depends on what was read before.
AppliesReading = rule(applies_reading, lambda g, x: CASES["if_in_backward"].apply(g * x) + 0 * AppliesReading.apply(x))


def differentiates_reading(x):
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(IfSum.apply(leaf * leaf).sum(), leaf)
    return gradient + x


NESTED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "recursive": (AppliesItself, (0,)),
    "forward and backward": (AppliesReading, ()),
    "autograd inside": (function_of(differentiates_reading, torch.cos), ()),
}


@row("H20")
@cells("name", [*NESTED], NESTED)
def test_functions_that_functions_apply_read(name: str):
    function, others = NESTED[name]
    converted = jaxfn.from_torch(function)
    theirs = SimpleNamespace(apply=lambda x: function.apply(x, *others))
    ours = SimpleNamespace(apply=lambda x: converted.apply(x, *others))
    for values in (INPUTS[1], INPUTS[3], INPUTS[1]):
        x = np.array(values, np.float32)
        expected = in_torch(theirs, x)
        for theirs_, ours_ in zip(expected, in_jax(ours, jnp.asarray(x)), strict=True):
            np.testing.assert_allclose(ours_, theirs_, rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(jax.vmap(ours.apply, 1, 1)(jnp.stack([x, x], 1))[:, 1], expected[0], rtol=1e-5)


@row("H12", "H20")
def test_threads_read_in_functions_inside():
    """A read without an answer leaves reference cycles, which only one thread at a time can collect."""
    F, found = jaxfn.from_torch(AppliesReading), dict[int, Any]()

    def run(i: int) -> None:
        for values in (INPUTS[i], INPUTS[i - 1]):
            found[i] = jax.vjp(F.apply, jnp.array(values))[1](jnp.ones(4))[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, gradient in found.items():
        tensor = torch.tensor(INPUTS[i - 1], requires_grad=True)
        AppliesReading.apply(tensor).sum().backward()
        np.testing.assert_allclose(gradient, tensor.grad, rtol=1e-5)
    assert len(found) == 3


@row("H20")
def test_a_function_that_reads_and_draws_inside_another():
    inner = function_of(draws)
    F = jaxfn.from_torch(rule(lambda x: inner.apply(x) * 2, lambda g, x: inner.apply(x) * g))

    def value_and_gradient(key: Any) -> Any:
        y, pullback = jax.vjp(lambda x: F.apply(x, key=key), TENS)
        return y / 2, *pullback(jnp.ones(3))

    assert_both_branches_are_drawn(value_and_gradient)
    with pytest.raises(jaxfn.TranslationError, match="another key for each call"):
        F.apply(jnp.ones(3))


# --- Under `jax.jit`.


@row("H21")
def test_checks_are_skipped_under_jit_with_one_warning_each_that_names_the_line():
    F = jaxfn.from_torch(Checked)
    x = jnp.array([1.0, -2.0, 3.0])
    with pytest.warns(UserWarning, match="a check of values is skipped under jax.jit") as caught:
        for scale in (1.0, 2.0):
            gradient = jax.jit(jax.grad(lambda x: F.apply(x).sum()))(scale * x)
            np.testing.assert_allclose(gradient, 2 * scale * x)
        assert jax.jit(F.apply)(200 * x)[0] == 200**2
        np.testing.assert_allclose(jax.lax.map(F.apply, x), x**2)
        np.testing.assert_allclose(jax.jit(jax.grad(jax.grad(F.apply)))(3.0), 2.0)
    lines = [str(warning.message).splitlines()[-1].strip() for warning in caught]
    assert_text = 'assert (x < 100).all() and not (x < -100).any(), "too large"'
    assert sorted(set(lines)) == [assert_text, "if g.isnan().any():", "return not torch.isfinite(x).all()"]
    # A call outside `jit` makes the checks.
    with pytest.raises(AssertionError, match="too large"):
        F.apply(200 * x)
    with pytest.raises(ValueError, match="not finite"):
        F.apply(jnp.inf * x)
    with pytest.warns(UserWarning, match="NaN in the gradient"):
        jax.vjp(F.apply, x)[1](jnp.nan * x)


def checked_and_handled(x: Any) -> Any:
    try:
        if (x > 1).any():
            raise ValueError
    except ValueError:
        return x / 2
    return x


def raised_in_a_helper(x: Any) -> Any:
    try:
        return Checked.forward(type("ctx", (), {"save_for_backward": print}), x)
    except ValueError:
        return x


class Ignoring:
    """A context manager that handles exceptions."""

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> bool:
        return True


def checked_in_a_context(x: Any) -> Any:
    with torch.no_grad(), Ignoring():
        if (x > 1).any():
            raise ValueError
        x = 2 * x
    return x


def not_the_whole_condition(x: Any) -> Any:
    if len(x) > int((x > 1).sum()):
        raise ValueError
    return x


def converted_item(x: Any) -> Any:
    return x * math.sqrt(x.max().item())


def larger_item(x: Any) -> Any:
    return x * max(x.max().item(), 1.0)


@row("H21")
@pytest.mark.parametrize(
    ("code", "kind", "line"),
    [
        (if_sum, "to choose a branch", "if x.sum() > 0:"),
        (if_expression, "to choose a branch", "return x.sin() if (x > 0.5).all() else x.exp()"),
        (halve_until_small, "to end a loop", "while (x.abs() > 1).any():"),
        (checked_and_handled, "in a check whose failure the code may handle", "if (x > 1).any():"),
        (checked_in_a_context, "in a check whose failure the code may handle", "if (x > 1).any():"),
        (raised_in_a_helper, "in a check whose failure the code may handle", "return not torch.isfinite(x).all()"),
        (not_the_whole_condition, "in a check", "if len(x) > int((x > 1).sum()):"),
        (converted_item, "as a number", "return x * math.sqrt(x.max().item())"),
        (larger_item, "to choose a branch (in an `if`, or by `max()`", "return x * max(x.max().item(), 1.0)"),
        (
            through_numpy,
            "as an array or a list",
            "return torch.from_numpy(np.sort(x.detach().numpy())[::-1].copy()) * x",
        ),
        (written_to_nonzero, "for the shape", "(where,) = torch.nonzero(x > 0, as_tuple=True)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_other_reads_raise_under_jit_with_kind_line_and_what_to_do(code: Any, kind: str, line: str):
    F = jaxfn.from_torch(function_of(code))
    with pytest.raises(jaxfn.TranslationError) as caught:
        jax.jit(F.apply)(jnp.ones(3))
    message = str(caught.value)
    assert f"Python code reads the value of a tensor {kind}" in message and message.endswith(line)
    assert "outside jax.jit" in message and "fallback='callback'" in message and "ops=" in message


@row("H10", "H21")
def test_explain_lists_reads_with_line_kind_and_answer():
    F = jaxfn.from_torch(rule(lambda x: newton_square_root(x) * x.max().item(), slope_by_sign))
    forward, backward = jaxfn.explain(F, jnp.array([1.0, 4.0])).parts
    found = [(read.kind, read.line.text, read.answer.item()) for read in forward.reads]
    check = "if (new - y).abs().max() < 1e-3:"
    assert found[:-1] == [("branch", check, False)] * (len(found) - 2) + [("branch", check, True)]
    assert found[-1][::2] == ("number", "a traced number")
    assert [(read.kind, read.answer.item()) for read in backward.reads] == [("branch", True)]
    text = str(jaxfn.explain(F, jnp.array([1.0, 4.0])))
    assert "forward, values that it reads:" in text and f"{check}\n    (branch, in this call True" in text
    assert "(number, stays a traced number)" in text
    explanation = explained_under_jit(F, jnp.ones(2))
    assert not explanation.is_supported and "to choose a branch" in str(explanation)
    parts = explained_under_jit(jaxfn.from_torch(Checked), jnp.ones(2)).parts
    assert [read.kind for part in parts for read in part.reads] == ["check"] * 4
    assert "(check, skipped: assumed to be True" in str(parts[0])


@row("H20")
def test_reads_in_a_second_derivative_while_the_caller_stores_outputs():
    stored = []
    F = jaxfn.from_torch(CASES["if_in_backward"])

    def loss(x: Any) -> Any:
        y = F.apply(x)
        stored.append(y)
        return (y * y).sum()

    x = jnp.array([1.0, 2.0])
    tensor = torch.tensor([1.0, 2.0], requires_grad=True)
    y = CASES["if_in_backward"].apply(tensor)
    (gradient,) = torch.autograd.grad((y * y).sum(), tensor, create_graph=True)
    (expected,) = torch.autograd.grad(gradient.sum(), tensor)
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(loss)(x).sum())(x), expected, rtol=1e-6)


@row("H3")
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_sums_of_selected_elements_need_no_values(transform: Any):
    def forward(x: Any, y: Any) -> Any:
        return x[x > 0].log().sum() + y[x[:, 0] > 0].sum(dtype=torch.float32)

    def backward(g: Any, x: Any, y: Any) -> Any:
        return x * (g * y[x < 0].square()).sum(), (x * x)[x > 0].sum() * y

    SumsSelected = rule(forward, backward)
    x, y = np.array([[1.0, -2, 3], [-0.5, 4, 1]], np.float32), np.array([[2.0, 1, 0.5], [3, 5, 7]], np.float32)
    tensors = [torch.tensor(value, requires_grad=True) for value in (x, y)]
    output = SumsSelected.apply(*tensors)
    gradients = torch.autograd.grad(output, tensors, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradients), tensors)
    apply = jaxfn.from_torch(SumsSelected).apply
    np.testing.assert_allclose(transform(apply)(x, y), output.detach(), rtol=1e-5)

    def gradients_squared(x: Any, y: Any) -> Any:
        return sum((g**2).sum() for g in jax.grad(apply, (0, 1))(x, y))

    for ours, theirs in zip(
        [*transform(jax.grad(apply, (0, 1)))(x, y), *transform(jax.grad(gradients_squared, (0, 1)))(x, y)],
        [*gradients, *second],
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-4)


@row("I2")
def test_the_first_element_of_any_strides():
    """Also of a parameter with other strides than contiguous ones, which `as_strided` cannot read elsewhere."""

    def Strided(*view: Any) -> Any:
        weight = torch.nn.Parameter((torch.arange(6.0) + 1).reshape(3, 2).t()[1:])
        return Net(lambda self, x: torch.as_strided(self.weight, *view) * x, weight=weight)

    for view in (((), ()), ((1, 1), (3, 5))):
        net = Strided(*view)
        np.testing.assert_array_equal(jaxfn.from_torch(net)(jnp.ones(1)), net(torch.ones(1)).detach())
    with pytest.raises(jaxfn.TranslationError, match="reads memory by strides"):
        jaxfn.from_torch(Strided((2,), (1,)))(jnp.ones(2))


@row("H20")
def test_a_course_without_x64_is_not_taken_with_it():
    """An int64 among the reads has twice the bytes there."""
    F = jaxfn.from_torch(function_of(lambda x: x * (int((x > 0).sum()) + 10 * int((x > 5).sum()))))
    for is_on in (False, True, False):
        with jax.enable_x64(is_on):
            for values, factor in (([1, -1, -1], 1), ([6, 7, 8], 33), ([6, -1, -1], 11)):
                x = jnp.array(values, np.float32)
                np.testing.assert_array_equal(F.apply(x), factor * x)


@row("H1")
def test_a_ref_is_not_an_argument():
    for apply in (jaxfn.from_torch(IfSum).apply, jax.jit(jaxfn.from_torch(AppliesReading, fallback="callback").apply)):
        with pytest.raises(TypeError, match=r"got a jax.Ref. Pass its value, ref\[...\]"):
            apply(jax.new_ref(jnp.ones(3)))
