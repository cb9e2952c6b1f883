"""Rows H1-H5, H8-H10: torch Functions converted by `from_torch`, compared with those classes in torch."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import cells, row
from tests.support.runs import noting_runs

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("double_precision")

from tests.support.libraries import Jax, JittedJax, assert_same, of_arrays, torch_library  # noqa: E402
from tests.support.torch_code import counting, explained_under_jit, function_of, rule  # noqa: E402
from tests.support.torch_functions import CASES  # noqa: E402

EXP = CASES["exp"].function


@row("H1")
@pytest.mark.filterwarnings("ignore:'saved_variables' is deprecated")
@cells(
    "library, name",
    [
        *((JittedJax, name) for name in CASES),
        *((Jax, name) for name in ["mul_constant", "log_sum_exp", "undefined_gradients", "WritesItsGradient"]),
    ],
    [JittedJax, Jax],
    CASES,
)
def test_outputs_and_derivatives_are_those_of_torch(library: Any, name: str):
    case = CASES[name]
    theirs, arrays = of_arrays(case.function, case.args)
    ours, _ = of_arrays(jaxfn.from_torch(case.function), case.args)
    want = torch_library().derivatives(theirs, arrays, case.order)
    for got, expected in zip(library.derivatives(ours, arrays, case.order), want, strict=True):
        assert_same(got, expected, 1e-8)


@row("H1")
@cells(
    "name",
    ["LinearFunction", "AppliesAnother", "PickLogits"],
    ["LinearFunction", "MaskedReLU", "Triangle", "Softmax", "AppliesAnother", "PickLogits"],
)
def test_under_vmap_and_scan(name: str):
    """A batch of calls, of their gradients too, equals one call after another."""
    call, arrays = of_arrays(jaxfn.from_torch(CASES[name].function), CASES[name].args)
    argnums = [i for i, x in enumerate(arrays) if x.dtype.kind == "f"]
    gradient = jax.grad(lambda *xs: (call(*xs) ** 2).sum(), argnums)
    batches = [jnp.stack([x, x[::-1], -x if x.dtype.kind == "f" else x]) for x in arrays]
    one_by_one = [gradient(*(batch[i] for batch in batches)) for i in range(3)]
    want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
    assert_same(jax.vmap(gradient)(*batches), [np.asarray(x) for x in want])
    scanned = jax.jit(lambda *xs: jax.lax.scan(lambda carry, x: (carry, gradient(*x)), 0, xs)[1])(*batches)
    assert_same(scanned, [np.asarray(x) for x in want])
    of_batch = jax.jit(jax.grad(lambda *xs: (jax.vmap(call)(*xs) ** 2).sum(), argnums))(*batches)
    assert_same(of_batch, [np.asarray(x) for x in want])


@row("H1")
def test_is_a_Function_with_torchs_name_and_parameters():
    Linear = jaxfn.from_torch(CASES["LinearFunction"].function)
    assert issubclass(Linear, jaxfn.Function)
    assert (Linear.__name__, Linear.__doc__) == ("LinearFunction", CASES["LinearFunction"].function.__doc__)
    assert Linear.apply is Linear.apply
    assert jaxfn.from_torch(CASES["LinearFunction"].function) is Linear
    x, weight = np.ones((2, 3)), np.ones((4, 3))
    assert_same([Linear.apply(x, bias=None, weight=weight)], [np.full((2, 4), 3.0)])
    Separate = jaxfn.from_torch(CASES["SeparateStyle"].function)
    assert_same([Separate.apply(scale=3.0, x=x)], [np.tanh(3 * x)])
    with pytest.raises(TypeError, match=r"LinearFunction.apply\(input, weight, bias=None, \*, key=None\): missing"):
        Linear.apply(x)


@row("H1")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "complex64"])
def test_dtypes_are_preserved(dtype: str):
    x = jnp.arange(3).astype(dtype)
    result = jaxfn.from_torch(CASES["mul_constant"].function).apply(x, 2)
    assert result.dtype == dtype
    assert_same([result.astype("complex128")], [np.arange(3) * 2 + 0j])


@row("H1")
def test_second_derivatives_use_all_active_flags():
    """d²/dxdw of (x·w)² is 4xw at the second order, also where backward looks at needs_input_grad."""
    Linear = jaxfn.from_torch(CASES["LinearFunction"].function)

    def square(x, w):
        return (Linear.apply(x.reshape(1, 1), w.reshape(1, 1)) ** 2).sum()

    assert jax.grad(jax.grad(square, 0), 1)(2.0, 3.0) == 24
    assert jax.jit(jax.grad(jax.grad(square, 1), 0))(2.0, 3.0) == 24


@row("H2")
def test_torch_code_runs_once_for_a_shape():
    F, runs = counting(rule(lambda x, power: x**power, lambda g, x: (g * x, None), lambda inputs, output: inputs[:1]))
    gradient = jax.grad(lambda x: F.apply(x, 2).sum())
    for _ in range(3):
        gradient(jnp.ones(3))
        jax.jit(jax.grad(lambda x: F.apply(x, 2).sum()))(jnp.ones(3))
    assert runs == ["forward", "backward"]
    gradient(jnp.ones(4))
    gradient(jnp.ones(4, "float32"))
    assert runs == ["forward", "backward"] * 3
    F.apply(jnp.ones(4), 2.0)  # torch distinguishes 2.0 from 2
    assert runs == ["forward", "backward"] * 3 + ["forward"]


@row("H2")
def test_a_closure_is_known_by_what_it_holds():
    note, runs = noting_runs()

    class Mapped(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x, function: note("forward") or function(x))

    Mapped = jaxfn.from_torch(Mapped)

    def times(number):
        return lambda x: x * number

    assert [float(Mapped.apply(jnp.ones(()), times(n))) for n in (2, 3, 2, 3)] == [2, 3, 2, 3]
    assert len(runs) == 2


@row("H2")
def test_modules_are_constants_read_at_every_call():
    module = torch.nn.Linear(2, 2).double()
    Runs = jaxfn.from_torch(function_of(lambda x: module(x)))
    for _ in range(2):
        x = np.ones((3, 2))
        assert_same([Runs.apply(x)], [module(torch.tensor(x)).detach().numpy()])
        with torch.no_grad():
            module.weight.add_(1)


@row("H2")
def test_checkpoint():
    """torch's own checkpoint, which restores random states and gives gradients to parameters."""
    module = torch.nn.Linear(2, 2).double()
    module.weight.grad = torch.ones(2, 2, dtype=torch.float64)
    F = jaxfn.from_torch(torch.utils.checkpoint.CheckpointFunction)
    x = np.ones((3, 2))
    with pytest.warns(UserWarning, match="backward gives gradients to tensors that are not inputs"):
        got = jax.grad(lambda x: F.apply(lambda x: module(x).sin(), True, x).sum())(x)
    tensor = torch.tensor(x, requires_grad=True)
    (want,) = torch.autograd.grad(module(tensor).sin().sum(), tensor)
    assert_same([got], [want.numpy()])
    assert module.weight.grad.tolist() == [[1, 1], [1, 1]] and module.bias.grad is None
    with pytest.raises(jaxfn.TranslationError, match="a random state that the code sets itself"):
        dropout = torch.nn.functional.dropout
        jax.grad(lambda x: F.apply(dropout, True, x, key=jax.random.key(0)).sum())(x)


@row("H2")
def test_writes_outside_raise():
    module = torch.nn.BatchNorm1d(2)
    Normalizes = jaxfn.from_torch(function_of(lambda x: module(x)))
    with pytest.raises(jaxfn.TranslationError, match="mutates an external tensor"):
        Normalizes.apply(jnp.ones((3, 2), "float32"))
    module.eval()
    assert Normalizes.apply(jnp.ones((3, 2), "float32")).shape == (3, 2)


@row("H2")
def test_mark_dirty():
    class Doubles(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            x.mul_(2)
            ctx.save_for_backward(x)
            return x

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * ctx.saved_tensors[0]

    x = jnp.full(3, 5.0)
    with pytest.warns(UserWarning, match="mark_dirty on a JAX array does not change"):
        assert_same([jaxfn.from_torch(Doubles).apply(x)], [np.full(3, 10.0)])
    assert_same([x], [np.full(3, 5.0)])
    assert_same([jax.grad(lambda x: jaxfn.from_torch(Doubles).apply(x).sum())(x)], [np.full(3, 10.0)])


@row("H2")
def test_an_unmarked_write_to_an_input_is_warned_of():
    with pytest.warns(UserWarning, match="Runs mutates one of its inputs"):
        output = jaxfn.from_torch(function_of(lambda x: x.clamp_(0, 1) * 2)).apply(jnp.full(3, 5.0))
    assert_same([output], [np.full(3, 2.0)])


@row("H2")
def test_once_differentiable():
    Once = jaxfn.from_torch(CASES["OnceDifferentiable"].function)
    with pytest.raises(RuntimeError, match="trying to differentiate twice a function that was marked with"):
        jax.grad(jax.grad(lambda x: Once.apply(x)))(2.0)


@row("H2")
@pytest.mark.parametrize("materialize", [True, False])
def test_gradients_of_unused_outputs(materialize: bool):
    seen = []

    def backward(*gradients_and_x):
        gradients = gradients_and_x[:3]
        seen.append([None if g is None else (tuple(g.shape), g.dtype) for g in gradients])
        return sum(k * g for k, g in zip((2, 3), gradients, strict=False) if g is not None)

    Three = rule(lambda x: (x * 2, x * 3, x.argmax()), backward, materialize=materialize)
    Three = jaxfn.from_torch(Three)
    assert_same([jax.grad(lambda x: Three.apply(x)[1].sum())(jnp.ones(4))], [np.full(4, 3.0)])
    zeros = ((4,), torch.float64)
    assert seen == [[zeros, zeros, ((), torch.int64)] if materialize else [None, zeros, None]]


@row("H2")
def test_devices_are_all_one():
    class Moves(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, device):
            y = x.cuda().to("cuda:0").to(device)
            mask = torch.ones(x.shape, device=device) + torch.zeros(x.shape, device=torch.device("cuda"))
            return (y * mask).cpu() + torch.full_like(x, 1, device="cuda")

    assert_same([jaxfn.from_torch(Moves).apply(jnp.ones(3), torch.device("cuda", 0))], [np.full(3, 2.0)])


class Branches(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sign=1, flip=False):
        ctx.set_materialize_grads(False)
        ctx.sign = -sign if flip else sign
        if x.dim() == 2 and not ctx.needs_input_grad[0]:
            return x.sum()
        return x * ctx.sign

    @staticmethod
    def backward(ctx, grad_output):
        if ctx.needs_input_grad[0]:
            return grad_output * ctx.sign, None, None
        return None, None, None


@row("H3")
def test_control_flow_on_static_values_and_flags():
    F = jaxfn.from_torch(Branches)
    assert_same([F.apply(np.ones(2), 3), F.apply(np.ones(2), 3, True)], [np.full(2, 3.0), np.full(2, -3.0)])
    assert F.apply(jnp.ones((2, 2))) == 4
    value, gradient = jax.vjp(lambda x: F.apply(x, 2), jnp.ones((2, 2)))
    assert_same([value, *gradient(jnp.ones((2, 2)))], [np.full((2, 2), 2.0), np.full((2, 2), 2.0)])


def branch(x):
    if x.sum() > 0:  # the line
        return x
    return -x


def loop(x):
    while (x > 1).any():  # the line
        x = x / 2
    return x


def array_of_numpy(x):
    return torch.from_numpy(np.sin(x.detach().numpy()))  # the line


# Code that needs the value of a tensor.
DATA_DEPENDENT = {
    "if": branch,
    "while": loop,
    "numpy": array_of_numpy,
    "float": lambda x: x * float(x.max()),  # the line
    "int": lambda x: x[: int(x[0])],  # the line
    "tolist": lambda x: x * x.tolist()[0],  # the line
    "nonzero": lambda x: x[x.nonzero()],  # the line
    "length of a selection": lambda x: x[x > 0].shape[0] * x,  # the line
    "cat of selections": lambda x: torch.cat([x[x > 0], x[x <= 0]]),  # the line
}


@row("H3")
@pytest.mark.parametrize("name", DATA_DEPENDENT)
def test_control_flow_on_tensor_values_names_the_line(name: str):
    code = DATA_DEPENDENT[name]
    function = jaxfn.from_torch(function_of(code))
    with pytest.raises(jaxfn.TranslationError) as error:
        jax.jit(function.apply)(jnp.array([1.0, 2.0]))
    message = str(error.value)
    assert "Runs" in message or "selected by a mask" in message
    assert f"in {code.__name__}\n" in message and message.endswith("# the line")


def multiply_two_selections(x):
    y = x.clone()
    y[x > 0] = x[x > 0] * x[x > 1]
    return y


@row("H3")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x: x[x > 0] + 1, "storing or returning of elements selected by a mask"),
        (multiply_two_selections, "`mul` with a selection by another mask"),
    ],
    ids=["returned", "multiplied"],
)
def test_selections_that_are_not_written_back_by_their_mask_raise(code: Any, message: str):
    with pytest.raises(jaxfn.TranslationError, match=message):
        jax.jit(jaxfn.from_torch(function_of(code)).apply)(jnp.ones(2))


@row("H3")
def test_selections_evaluate_nothing_that_was_not_selected():
    """The derivative of log(x) where x is 0 does not spread as NaN."""

    def code(x):
        y = x.clone()
        y[x > 0] = torch.log(x[x > 0]) / x[x > 0]
        y[x > 0] *= 2
        return y

    f = jaxfn.from_torch(function_of(code, slope=code)).apply
    values = [jnp.array([0.0, -1.0, 2.0])]
    for _ in range(2):
        values.append(jax.grad(lambda x, f=f: f(x).sum())(values[0]))
        f = jax.grad(lambda x, f=f: f(x).sum())
    assert all(np.isfinite(value).all() for value in values)
    assert_same(values[2:], [np.array([1, 1, 2 * (1 - np.log(2.0)) / 4])])


@torch.library.custom_op("jaxfn_test::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


@double.register_fake
def _(x):
    return torch.empty_like(x)


@torch.library.custom_op("jaxfn_test::shapeless", mutates_args=())
def shapeless(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * 2)


def launch(x: torch.Tensor, factor: float) -> tuple[torch.Tensor, float]:
    """Around a kernel: it takes pointers."""
    return torch.frombuffer(bytes(x.data_ptr()), dtype=x.dtype), factor


UsesOperations = rule(double, lambda g, _: shapeless(g))
UsesKernel = rule(lambda x: launch(x, 2)[0], lambda g, _: launch(g, 2)[0])


@row("H4")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="raises before torch is called, by a test in test_versions.py")
def test_all_operations_without_a_translation_at_once():
    def many(x):
        y = double(x)
        return torch.ops.aten.segment_reduce(y, "sum", lengths=torch.tensor([1, 2]))

    with pytest.raises(jaxfn.TranslationError) as error:
        jaxfn.from_torch(function_of(many)).apply(jnp.ones(3))
    message = str(error.value)
    assert "Runs.forward: no translation to JAX for" in message
    assert "jaxfn_test.double.default, called at" in message and "y = double(x)" in message
    assert "aten.segment_reduce.default, called at" in message and "ops={" in message


@row("H4")
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="raises before torch is called, by a test in test_versions.py")
def test_the_rest_is_unaffected():
    F = jaxfn.from_torch(UsesOperations, ops={double: lambda x: x * 2})
    assert_same([F.apply(jnp.ones(3))], [np.full(3, 2.0)])
    with pytest.raises(
        jaxfn.TranslationError,
        match=r"calls jaxfn_test.shapeless.default, whose code cannot be traced .*numpy.*what shapes",
    ):
        jax.grad(lambda x: F.apply(x).sum())(jnp.ones(3))


ATEN = torch.ops.aten


@row("H9")
@pytest.mark.parametrize(
    "operation",
    [ATEN.matmul, ATEN.linear.default, "aten.scaled_dot_product_attention", "aten::softmax.int", ATEN.einsum],
    ids=str,
)
def test_a_replacement_that_would_never_be_called(operation):
    with pytest.raises(
        ValueError, match=r"torch decomposes aten[.:\w]+ into other operations .* would never be called"
    ):
        jaxfn.from_torch(function_of(lambda x: x @ x), ops={operation: jnp.matmul})


REPLACED = {
    "packet": ATEN.relu,
    "overload": ATEN.relu.default,
    "name": "aten.relu",
    "name of an overload": "aten.relu.default",
    "name of the dispatcher's": "aten::relu",
    "function of torch": torch.relu,
    "custom operation": double,
    "packet of a custom operation": torch.ops.jaxfn_test.double,
    "overload of a custom operation": torch.ops.jaxfn_test.double.default,
    "name of a custom operation": "jaxfn_test::double",
}


@row("H9")
@pytest.mark.parametrize("name", REPLACED)
def test_a_replacement_is_called(name: str):
    """Here `x + 7`, instead of relu in forward or of a custom operation, whose backward is replaced too."""
    function = UsesOperations if "custom" in name else function_of(lambda x: torch.relu(x))
    F = jaxfn.from_torch(function, ops={REPLACED[name]: lambda x: x + 7, shapeless: lambda g: g * 3})
    assert_same([F.apply(jnp.ones(3))], [np.full(3, 8.0)])
    if function is UsesOperations:
        assert_same([jax.jit(jax.grad(lambda x: F.apply(x).sum()))(jnp.ones(3))], [np.full(3, 3.0)])


@row("H4")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x: x.to_sparse(), "^Runs: to_sparse returns a sparse tensor, which has no counterpart on JAX"),
        (lambda x: x.to_sparse_csr(), "^Runs: to_sparse_csr returns a sparse tensor"),
        (lambda x: launch(x, 2.0)[0], "Runs passes a tensor's memory to compiled code"),
        (lambda x: x * x.untyped_storage().resize_(0).nbytes(), "Runs passes a tensor's memory to compiled code"),
        (lambda x: x * len(x.__cuda_array_interface__), "Runs passes a tensor's memory to compiled code"),
        (lambda x: torch._sparse_semi_structured_tile(x)[0], "Runs calls .*tile.*only compiled code"),
        (
            lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
            r"(?s)Runs passes a function to a higher-order operation.*torch\.cond\(x",
        ),
    ],
    ids=["sparse", "sparse rows", "pointer", "storage", "CUDA array", "only on a GPU", "cond"],
)
def test_code_that_JAX_cannot_run_raises(code: Any, message: str):
    with pytest.raises(jaxfn.TranslationError, match=message):
        jaxfn.from_torch(function_of(code)).apply(jnp.ones((2, 2), "float32"))


class Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        mask = (torch.rand_like(x) > p).to(x.dtype) / (1 - p)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.saved_tensors[0], None


NoisyGradient = rule(lambda x: x * 1, lambda g, _: g + torch.randn(g.shape), name="NoisyGradient")


@row("H5")
def test_one_key_one_draw():
    F, x, key = jaxfn.from_torch(Dropout), jnp.ones(100), jax.random.key(0)
    mask = np.asarray(F.apply(x, 0.5, key=key))
    assert set(mask) == {0.0, 2.0} and 25 < (mask > 0).sum() < 75
    step = jax.jit(lambda x, key: jax.value_and_grad(lambda x: F.apply(x, 0.5, key=key).sum())(x))
    assert_same([step(x, key)[1]], [mask])  # an equal draw, in backward too
    assert not np.array_equal(step(x, jax.random.key(1))[1], mask)
    assert step._cache_size() == 1
    keys = jax.random.split(key, 5)
    masks = jax.vmap(lambda key: F.apply(x, 0.5, key=key))(keys)
    assert_same(masks, [np.asarray(F.apply(x, 0.5, key=key)) for key in keys])
    with pytest.raises(jaxfn.TranslationError, match=r"Dropout.forward draws random numbers, .* explicit key"):
        F.apply(x, 0.5)


@row("H5")
def test_draws_in_backward():
    F, key = jaxfn.from_torch(NoisyGradient), jax.random.key(0)

    def gradient(key):
        return jax.grad(lambda x: F.apply(x, key=key).sum())(jnp.zeros(1000))

    noise = np.asarray(gradient(key)) - 1
    assert abs(noise.mean()) < 0.15 and abs(noise.std() - 1) < 0.15
    assert_same([jax.jit(gradient)(key)], [noise + 1])
    assert_same([F.apply(jnp.ones(3))], [np.ones(3)])  # nothing is drawn here
    with pytest.raises(jaxfn.TranslationError, match=r"NoisyGradient.backward draws random numbers.*apply\(..., key="):
        gradient(None)


@row("H5")
def test_a_Function_inside_draws_too():
    def backward(first, second, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = Dropout.apply(x, 0.5)
        (gradient,) = torch.autograd.grad(y, x, first)
        return gradient - y / x  # both of one draw

    Outer = rule(lambda x: (Dropout.apply(x, 0.5), Dropout.apply(x, 0.5)), backward, name="Outer")
    F, x, key = jaxfn.from_torch(Outer), jnp.ones(50), jax.random.key(0)
    first, second = F.apply(x, key=key)
    assert not np.array_equal(first, second)
    assert_same([jax.grad(lambda x: F.apply(x, key=key)[0].sum())(x)], [np.zeros(50)])
    with pytest.raises(jaxfn.TranslationError, match="Outer.forward draws random numbers"):
        F.apply(x)


GENERATOR = torch.Generator()  # which others may use too


@row("H5")
@pytest.mark.parametrize(
    ("code", "at", "mean", "deviation"),
    [
        (lambda x: torch.bernoulli(x, generator=GENERATOR), 0.25, 0.25, 0.433),
        (lambda x: torch.distributions.Normal(x, 2 * torch.ones_like(x)).sample(), 3.0, 3, 2),
    ],
    ids=["generator", "distribution"],
)
def test_draws_have_their_distribution(code: Any, at: float, mean: float, deviation: float):
    drawn = jaxfn.from_torch(function_of(code)).apply(jnp.full(5000, at), key=jax.random.key(0))
    assert abs(drawn.mean() - mean) < 0.05 * deviation and abs(drawn.std() - deviation) < 0.05 * deviation


@row("H5")
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x: (torch.manual_seed(0), x + torch.rand(3))[1], "sets itself"),
        (lambda x: x + torch.rand(3, generator=torch.Generator().manual_seed(0)), "sets itself"),
        (lambda x: x * float(np.random.rand()), "random numbers from Python or NumPy"),
    ],
    ids=["seed", "generator", "numpy"],
)
def test_draws_that_no_key_decides_raise(code: Any, message: str):
    with pytest.raises(jaxfn.TranslationError, match=message):
        jaxfn.from_torch(function_of(code)).apply(jnp.ones(3), key=jax.random.key(0))


@row("H9")
def test_python_functions_replaced():
    before = launch
    F = jaxfn.from_torch(UsesKernel, ops={launch: lambda x, factor: (jnp.sin(x) * factor, factor)})
    x = jnp.array([0.1, 0.2])
    assert_same([F.apply(x)], [2 * np.sin(x)])
    gradient = jax.grad(lambda x: (F.apply(x) ** 2).sum())
    assert_same([jax.jit(gradient)(x)], [2 * np.sin(4 * np.sin(x))])
    assert launch is before


@row("H10")
def test_explain():
    explanation = jaxfn.explain(CASES["MaskedReLU"].function, np.ones((2, 3)))
    assert explanation.is_supported
    text = str(explanation)
    assert "MaskedReLU" in text and "aten.clamp.default" in text
    assert [part.name for part in explanation.parts] == ["forward", "backward"]
    # Which of them torch makes of a write by a mask depends on its version.
    assert {"aten.index_put.default", "aten.masked_fill.Scalar"} & set(explanation.parts[1].operations)


@row("H10")
def test_explain_does_not_raise():
    for function, ops in ((UsesOperations, {}), (UsesOperations, {shapeless: lambda x: x}), (UsesKernel, {})):
        explanation = jaxfn.explain(jaxfn.from_torch(function, ops=ops), np.ones(3))
        assert not explanation.is_supported
        assert any(word in str(explanation) for word in ("jaxfn_test.double.default, ", "compiled code"))
    explanation = jaxfn.explain(function_of(branch), np.ones(3))
    assert explanation.is_supported and "# the line" in str(explanation)
    explanation = explained_under_jit(jaxfn.from_torch(function_of(branch)), np.ones(3))
    assert "cannot be traced" in str(explanation) and "# the line" in str(explanation)
    assert "draws random numbers" in str(jaxfn.explain(Dropout, np.ones(3), 0.5))


@row("H2")
def test_float64_with_x64_off():
    with jax.enable_x64(False):
        F = jaxfn.from_torch(function_of(lambda x: (x.double() / 3).to(x.dtype)))
        with pytest.warns(UserWarning, match="Runs computes in float64, .* It runs in float32") as warned:
            first = F.apply(np.ones(3))
            F.apply(np.ones(3))
        assert len(warned) == 1
        assert first.dtype == "float32"
        assert_same([first], [np.full(3, 1 / 3, "float32")], 1e-7)


IN_ANOTHER_PROCESS = """
import sys
import jaxfn
assert "torch" not in sys.modules
sys.modules["torch"] = None
try:
    jaxfn.from_torch(object)
except ImportError as error:
    print(str(error).replace("\\n", " "))
del sys.modules["torch"]
import torch, jax
jax.grad(jaxfn.from_torch(torch.nn.functional.softplus))(1.0)
print(*(name for name in sys.modules if name.startswith(("jaxfn._port", "jaxfn._parity"))))
"""


@row("L2")
def test_torch_is_optional_and_a_conversion_imports_nothing_that_ports_and_compares():
    result = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS], capture_output=True, text=True, check=True)
    without_torch, imported = result.stdout.splitlines()
    assert "pip install torch" in without_torch and imported == ""


@row("H1")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_an_instance_of_a_function_is_not_a_function():
    with pytest.raises(TypeError, match="Pass its class, and pass the arguments of __init__ to apply"):
        jaxfn.from_torch(function_of(torch.sin)())


def checked_cross_entropy(scores, target):
    """Checks for int64 labels, as published code does."""
    if target.dtype != torch.int64:
        raise TypeError("target must be an int64 tensor")
    return torch.nn.functional.cross_entropy(scores, target)


def checked_slope(g, scores, target):
    assert target.dtype == torch.int64
    return g * (scores.softmax(-1) - torch.nn.functional.one_hot(target, 3)) / len(target), None


ChecksDtype = rule(checked_cross_entropy, checked_slope)


@row("H13")
def test_int32_labels_where_the_code_itself_asks_for_int64():
    scores, target = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32), np.array([2, 0], np.int32)
    x = torch.tensor(scores, requires_grad=True)
    value = ChecksDtype.apply(x, torch.tensor(target).long())
    (gradient,) = torch.autograd.grad(value, x)
    converted = jaxfn.from_torch(ChecksDtype).apply
    in_a_function = jaxfn.from_torch(lambda x, t: ChecksDtype.apply(x, t))
    for call in (converted, in_a_function, jax.jit(converted)):
        ours, slopes = jax.value_and_grad(call)(scores, target)
        np.testing.assert_allclose(ours, value.detach(), rtol=1e-6)
        np.testing.assert_allclose(slopes, gradient, rtol=1e-5, atol=1e-7)
    with pytest.raises(TypeError, match="int64"):
        converted(scores, target.astype(np.int16))


@row("H2")
@pytest.mark.filterwarnings("ignore:.*Type. is deprecated")
def test_the_type_of_a_tensor():
    function = importlib.import_module("torch.autograd._functions").Type
    x = np.ones(2, np.float32)
    output, pull = jax.vjp(lambda x: jaxfn.from_torch(function).apply(x, "torch.HalfTensor"), x)
    assert output.dtype == "float16" and pull(jnp.ones(2, "float16"))[0].dtype == "float32"


WRONG_OPS = {
    "a name that torch does not have": ({"nonsense": jnp.sin}, ValueError, "torch has no operation"),
    "a packet that torch does not have": ({"aten.nonsense": jnp.sin}, ValueError, "torch has no operation"),
    "an overload that torch does not have": ({"aten.sin.Tensor": jnp.sin}, ValueError, "torch has no operation"),
    "not an operation": ({3: jnp.sin}, TypeError, "a key is a torch operation, its name, or a Python function, got 3"),
    "a class": ({torch.nn.Linear: jnp.sin}, TypeError, "a key is a torch operation"),
    "not a function": ({torch.mul: 3}, TypeError, "ops={mul: ...}: expected a JAX function, got 3"),
}


@row("H9")
@pytest.mark.parametrize("case", WRONG_OPS)
def test_wrong_ops_raise_before_any_call(case: str):
    ops, error, message = WRONG_OPS[case]
    with pytest.raises(error, match=re.escape(message)):
        jaxfn.from_torch(torch.sin, ops=ops)


@jaxfn.function
def decorated(ctx: Any, x: Any) -> Any:
    return x


RUNS_ON_JAX = {
    "a Function": lambda: decorated.Function,
    "its apply": lambda: decorated.apply,
    "a decorated function": lambda: decorated,
    "a converted Function": lambda: jaxfn.from_torch(EXP),
    "its apply too": lambda: jaxfn.from_torch(EXP).apply,
    "a converted function": lambda: jaxfn.from_torch(torch.sin),
    "a converted module": lambda: jaxfn.from_torch(torch.nn.Linear(2, 3)),
    "its apply as well": lambda: jaxfn.from_torch(torch.nn.Linear(2, 3)).apply,
    "a module in eval mode": lambda: jaxfn.from_torch(torch.nn.Linear(2, 3)).as_eval(),
    "jit": lambda: jax.jit(lambda x: x),
    "jnp.sin": lambda: jnp.sin,
    "a ufunc": lambda: jnp.add,
    "custom_vjp": lambda: jax.custom_vjp(jnp.sin),
    "custom_jvp": lambda: jax.custom_jvp(jnp.sin),
    "a partial": lambda: partial(jnp.add, 1.0),
}


@row("H1")
@pytest.mark.parametrize("case", RUNS_ON_JAX)
def test_what_runs_on_jax_already_is_not_torch_code(case: str):
    code = RUNS_ON_JAX[case]()
    with pytest.raises(TypeError, match="(?s)expected torch code, and .* already runs on JAX"):
        jaxfn.from_torch(code)


@row("H10")
def test_explain_takes_all_torch_code_and_its_conversion():
    x = np.ones((4, 2), np.float32)
    for code in (EXP, torch.exp, torch.nn.Linear(2, 3), lambda x: torch.special.zeta(x, x)):
        converted = jaxfn.from_torch(code)
        explanation = jaxfn.explain(code, x)
        assert str(explanation) == repr(explanation) == str(jaxfn.explain(converted, x))
        assert bool(explanation) is explanation.is_supported is ("zeta" not in str(explanation))
    assert str(jaxfn.explain(jaxfn.from_torch(EXP).apply, x)) == str(jaxfn.explain(EXP, x))
    assert not hasattr(jaxfn.from_torch(EXP), "explain") and not hasattr(jaxfn.from_torch(torch.exp), "source")
    with pytest.raises(TypeError, match="already runs on JAX"):
        jaxfn.explain(jnp.sin, x)


def test_what_is_converted_says_what_it_is():
    assert repr(jaxfn.from_torch(EXP)) == "<jaxfn Function Exp, converted from torch: backward>"
    net = jaxfn.from_torch(torch.nn.Linear(2, 3))
    assert repr(net.as_eval()).startswith("<jaxfn module in eval mode, converted from Linear(")
    assert isinstance(net, jaxfn.ConvertedModule) and issubclass(jaxfn.from_torch(EXP), jaxfn.Function)
