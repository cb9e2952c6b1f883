"""Row H19: torch Functions that cannot be traced, run by torch on the host, compared with their traced twins."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxfn
from tests.support.marks import cells, row

torch = pytest.importorskip("torch")

Base: Any = torch.autograd.Function


def read(*values: Any) -> None:
    """Reads values, which a trace does not have."""
    for x in values:
        if isinstance(x, torch.Tensor) and not bool(torch.isfinite(x).all()):
            raise ValueError("an infinite value")


def reading(function: Any, method: str = "forward") -> Any:
    """Returns a twin of a torch Function that cannot be traced."""

    @functools.wraps(getattr(function, method))
    def checked(*args: Any) -> Any:
        read(*args)
        return getattr(function, method)(*args)

    return type(function.__name__, (function,), {method: staticmethod(checked)})


def outside(x: Any, allocate: Any) -> Any:
    """Returns a copy of a tensor, in memory that is written to as compiled code does."""
    out = allocate(x)
    ctypes.memmove(out.untyped_storage().data_ptr(), x.untyped_storage().data_ptr(), x.element_size() * x.numel())
    return out


def host(function: Any) -> Any:
    return jaxfn.from_torch(function, fallback="callback").apply


class Tanh(Base):
    @staticmethod
    def forward(ctx, x):
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return g * (1 - y * y)


class Cube(Base):
    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


class Two(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x**2, x.exp()

    @staticmethod
    def backward(ctx, g, h):
        (x,) = ctx.saved_tensors
        return (0 if g is None else 2 * x * g) + (0 if h is None else h * x.exp())


class OneOfTwo(Two):
    """An output is not used."""


class Sort(Base):
    @staticmethod
    def forward(ctx, x):
        values, indices = x.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.save_for_backward(indices)
        return values, indices

    @staticmethod
    def backward(ctx, g, _):
        return torch.zeros_like(g).scatter(-1, ctx.saved_tensors[0], g)


class HalfMarked(Base):
    @staticmethod
    def forward(ctx, x):
        y, z = x.sin(), x * 3
        ctx.mark_non_differentiable(z)
        ctx.save_for_backward(x)
        return y, z

    @staticmethod
    def backward(ctx, g, _):
        return g * ctx.saved_tensors[0].cos()


class Power(Base):
    @staticmethod
    def forward(ctx, x, n, scale=2.0):
        ctx.save_for_backward(x)
        ctx.n, ctx.scale = n, scale
        return x**n * scale

    @staticmethod
    def backward(ctx, g):
        return g * ctx.n * ctx.saved_tensors[0] ** (ctx.n - 1) * ctx.scale, None, None


class Dirty(Base):
    @staticmethod
    def forward(ctx, x):
        x.mul_(3)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class SavedAndWritten(Base):
    """Saves its output, which is an input that it updated."""

    @staticmethod
    def forward(ctx, x):
        x.exp_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


class Product(Base):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return (g * w if ctx.needs_input_grad[0] else None), ((g * x).sum(0) if ctx.needs_input_grad[1] else None)


class Affine(Base):
    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(x, weight, bias)
        y = x @ weight.T
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, g):
        x, weight, bias = ctx.saved_tensors
        return g @ weight, g.T @ x, None if bias is None else g.sum(0)


class Embedding(Base):
    @staticmethod
    def forward(ctx, table, indices):
        ctx.save_for_backward(indices)
        ctx.shape = table.shape
        return table[indices]

    @staticmethod
    def backward(ctx, g):
        return torch.zeros(ctx.shape, dtype=g.dtype).index_add(0, ctx.saved_tensors[0].long(), g), None


class Normalize(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        std = x.std(-1, keepdim=True)
        y = (x - x.mean(-1, keepdim=True)) / std
        slope = (g * y).sum(-1, keepdim=True) / (x.shape[-1] - 1)
        return (g - g.mean(-1, keepdim=True) - y * slope) / std


class Clip(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.abs() < 0.3)
        return x.clamp(-0.3, 0.3)

    @staticmethod
    def backward(ctx, g):
        return torch.where(ctx.saved_tensors[0], g, 0)


class StraightThrough(Base):
    forward = staticmethod(lambda ctx, x: (4 * x).round())
    backward = staticmethod(lambda ctx, g: 4 * g)


class Reverse(Base):
    """Returns a view of its input, and gives it another gradient than autodiff would."""

    @staticmethod
    def forward(ctx, x, alpha):
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        return -ctx.alpha * g, None


class Same(Base):
    forward = staticmethod(lambda ctx, x: x)
    backward = staticmethod(lambda ctx, g: 2 * g)


class Twice(Base):
    @staticmethod
    def forward(ctx, x):
        y = x.sin()
        ctx.save_for_backward(x)
        return y, y

    @staticmethod
    def backward(ctx, g, h):
        return (g + h) * ctx.saved_tensors[0].cos()


class Nested(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return Tanh.apply(x)

    @staticmethod
    def backward(ctx, g):
        return g * (1 - Tanh.apply(ctx.saved_tensors[0]) ** 2)


class ByVjp(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.cos()

    @staticmethod
    def vjp(ctx, g):
        return -g * ctx.saved_tensors[0].sin()


class Halved(Base):
    """Has a `jvp` and a `vmap`, which are not called on the host."""

    generate_vmap_rule = False

    @staticmethod
    def forward(x):
        return x / 2

    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(lambda ctx, g: g / 2)
    jvp = staticmethod(lambda ctx, t: t / 2)
    vmap = staticmethod(lambda info, in_dims, x: (Halved.apply(x), in_dims[0]))


WEIGHT = np.random.default_rng(1).uniform(-1, 1, (4, 5))
EXTRAS = {
    "Power": [3],
    "Product": [WEIGHT[0]],
    "Affine": [WEIGHT, WEIGHT[:, 0]],
    "Embedding": [np.array([2, 0, 2, 1], np.int32)],
    "Reverse": [0.7],
}
FUNCTIONS = [Tanh, Cube, Two, OneOfTwo, Sort, HalfMarked, Power, Dirty, SavedAndWritten, Product, Affine, Embedding]
FUNCTIONS += [Normalize, Clip, StraightThrough, Reverse, Same, Twice, Nested, ByVjp, Halved]
NAMES = [function.__name__ for function in FUNCTIONS]


def derivatives(apply: Any, name: str) -> Any:
    """Returns a function that computes outputs and gradients."""

    def total(*args: Any) -> Any:
        outputs = apply(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = outputs[1:] if name == "OneOfTwo" else outputs
        terms = [(i + 1) * jnp.sin(y).sum() for i, y in enumerate(used) if jnp.issubdtype(y.dtype, jnp.inexact)]
        return sum(terms).astype(jnp.float32), outputs

    def all_of_them(*args: Any) -> Any:
        is_float = [isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact) for x in args]
        argnums = tuple(i for i, x in enumerate(is_float) if x)
        return jax.grad(total, argnums, has_aux=True)(*args)

    return all_of_them


QUICK = [(name, "float32") for name in ("Tanh", "Cube", "OneOfTwo", "Sort", "Power", "SavedAndWritten", "Affine")]
QUICK += [(name, "float32") for name in ("Embedding", "Twice", "Halved")] + [
    ("Two", "float64"),
    ("Product", "bfloat16"),
]


@row("H19")
@pytest.mark.filterwarnings("ignore:Dirty|SavedAndWritten:UserWarning")
@cells("name, dtype", QUICK, NAMES, ["float32", "float64", "bfloat16"])
def test_a_callback_equals_the_traced_function(name: str, dtype: str):
    function = FUNCTIONS[NAMES.index(name)]
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(np.random.default_rng(0).uniform(-0.5, 0.5, (3, 2, 5)), dtype)
        extras = [
            jnp.asarray(v, dtype if v.dtype.kind == "f" else None) if isinstance(v, np.ndarray) else v
            for v in EXTRAS.get(name, [])
        ]
        traced = derivatives(jaxfn.from_torch(function).apply, name)
        for method in ["forward", "backward"] if name == "Tanh" else ["forward"]:
            by_host = derivatives(host(reading(function, method)), name)
            assert "pure_callback" in str(jax.make_jaxpr(lambda x: by_host(x, *extras))(x[:, 0]))
            expected = jax.jit(lambda x: traced(x, *extras))(x[:, 0])
            assert_close(by_host(x[:, 0], *extras), expected, dtype)
            assert_close(jax.jit(lambda x: by_host(x, *extras))(x[:, 0]), expected, dtype)
            batched = [jax.jit(jax.vmap(lambda x: f(x, *extras), 1, 1))(x) for f in (by_host, traced)]
            assert_close(*batched, dtype)


def assert_close(results: Any, expected: Any, dtype: str) -> None:
    tolerance = 0.06 if dtype == "bfloat16" else 1e-5 if dtype == "float32" else 1e-12
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max()))


@row("H19")
def test_complex_gradients():
    class Square(Base):
        @staticmethod
        def forward(ctx, z):
            read(z)
            ctx.save_for_backward(z)
            return z * z

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0].conj()

    z = jnp.array([1 + 2j, -0.5 + 1j])
    for f in (host(Square), jax.jit(host(Square))):

        def first(f, z):
            return jax.grad(lambda z: jnp.real(f(f(z)) * (1 - 3j)).sum())(z)

        np.testing.assert_allclose(first(f, z), first(jnp.square, z), rtol=1e-5)


@row("H19")
def test_compiled_code_with_several_inputs_under_scan_and_checkpoint():
    class Compiled(Product):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return outside(x * w, torch.empty_like)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return (g * w if ctx.needs_input_grad[0] else None), (g * x if ctx.needs_input_grad[1] else None)

    x, w = jnp.array([1.0, -2.0, 0.5]), jnp.array([0.3, 1.1, -0.9])
    apply = host(Compiled)

    def run(f, x, w):
        def step(c, _):
            return jnp.sin(jax.checkpoint(f)(c, w)), None

        return jax.lax.scan(step, x, None, length=4)[0].sum()

    for argnums in (0, 1, (0, 1)):
        gradients = [jax.jit(jax.grad(lambda x, w, f=f: run(f, x, w), argnums))(x, w) for f in (apply, jnp.multiply)]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *gradients)
    np.testing.assert_allclose(jax.grad(lambda x: apply(x, x).sum())(x), 2 * x)  # one array, passed twice
    xs = jnp.stack([x, 2 * x], axis=1)
    np.testing.assert_allclose(jax.vmap(apply, (1, None))(xs, w), xs.T * w)
    np.testing.assert_allclose(jax.jit(jax.vmap(apply, (None, 1), 1))(w, xs), xs * w[:, None])
    for shape in ((0, 2), ()):
        assert jax.jit(jax.grad(lambda x: apply(x, x).sum()))(jnp.ones(shape)).shape == shape


@row("H19")
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients_in_shard_map(check_vma: bool):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    apply, spec = host(reading(Tanh)), PartitionSpec

    def total(w, x):
        return jax.lax.psum((apply(x * w) ** 2).sum(), "data")

    sharded = jax.shard_map(total, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec(), check_vma=check_vma)
    w, x = jnp.float32(1.5), jnp.arange(4.0)
    expected = jax.grad(lambda w: (jnp.tanh(x * w) ** 2).sum())(w)
    np.testing.assert_allclose(jax.jit(jax.grad(sharded))(w, x), expected, rtol=1e-5)


@row("H19")
def test_random_numbers_belong_to_the_key():
    class Drop(Base):
        @staticmethod
        def forward(ctx, x):
            read(x)
            ctx.mask = (torch.rand_like(x) > 0.5).to(x.dtype)
            return x * ctx.mask

        @staticmethod
        def backward(ctx, g):
            return g * ctx.mask

    apply, x, key = host(Drop), jnp.arange(1.0, 33.0), jax.random.key(0)
    state = torch.get_rng_state()
    y = apply(x, key=key)
    assert 0 < (y == 0).sum() < 32 and not (y == apply(x, key=jax.random.key(1))).all()
    np.testing.assert_array_equal(jax.jit(apply)(x, key=key), y)
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: apply(x, key=key).sum()))(x) * x, y)
    keys = jax.random.split(key, 2)
    batched = jax.vmap(lambda key: apply(x, key=key))(keys)
    np.testing.assert_array_equal(batched, [apply(x, key=k) for k in keys])
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(jaxfn.TranslationError, match="Drop.forward draws random numbers"):
        apply(x)


class Positive(Base):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x[x > 0]

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x).masked_scatter(x > 0, g)


@row("H19")
def test_shapes_that_depend_on_values():
    apply, x = host(Positive), jnp.array([1.0, -2.0, 3.0])
    with pytest.raises(Exception, match=r"the output is torch.float32\[2\] .* and was torch.float32\[3\] for others"):
        jax.jit(apply)(x).block_until_ready()
    np.testing.assert_allclose(jax.grad(lambda x: (apply(x) ** 2).sum())(x), [2, 0, 6])
    jitted = jax.jit(lambda x: apply(x))
    np.testing.assert_allclose(jitted(x[::-1]), [3, 1])  # as many as in the eager call
    with pytest.raises(Exception, match=r"Positive.forward: TranslationError: the output is torch.float32\[3\]"):
        jitted(x**2).block_until_ready()


@row("H19")
def test_a_forward_that_does_not_end_on_example_values():
    class Root(Base):
        @staticmethod
        def forward(ctx, x):
            y = torch.ones_like(x)
            while (y * y - x).abs().max() > 1e-5 or x.min() < 1:
                y = (y + x / y) / 2
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, g):
            return g / (2 * ctx.saved_tensors[0])

    x = jnp.array([2.0, 9.0])
    apply = host(Root)
    with pytest.raises(jaxfn.TranslationError, match=r"no end after 20000 calls.*call Root.apply once outside"):
        jax.jit(apply)(x)
    np.testing.assert_allclose(apply(x), x**0.5, rtol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: apply(x).sum()))(x), 0.5 * x**-0.5, rtol=1e-5)


@row("H19")
def test_arrays_of_the_caller_do_not_change():
    x = jnp.array([0.25, 0.5])
    with pytest.warns(UserWarning, match="^Dirty mutates one of its inputs"):
        y = host(reading(Dirty))(x)
    np.testing.assert_array_equal(y, 3 * np.array([0.25, 0.5]))
    np.testing.assert_array_equal(x, [0.25, 0.5])


@row("H19")
@pytest.mark.parametrize("place", ["output", "ctx", "saved", "beside a large one"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_forward_that_depends_on_state_raises(place: str, is_compiled: bool):
    count = [0]

    class Counting(Base):
        @staticmethod
        def forward(ctx, x):
            read(x)
            count[0] += 1
            ctx.count = 1 + 0.01 * count[0] if place in ("ctx", "beside a large one") else 1
            ctx.size = 1e9 if place == "beside a large one" else 1
            ctx.save_for_backward(torch.full_like(x, count[0] if place == "saved" else 1))
            return x * (count[0] if place == "output" else 1)

        @staticmethod
        def backward(ctx, g):
            return g * ctx.count * ctx.saved_tensors[0]

    gradient = jax.grad(lambda x: host(Counting)(x).sum())
    with pytest.raises(Exception, match=r"Counting.forward runs again .* stored\s+something else on ctx"):
        jax.block_until_ready((jax.jit(gradient) if is_compiled else gradient)(jnp.ones(3)))


@row("H19")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_second_derivative_raises(wrap: Any):
    class Compiled(Base):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx, g):
            return 2 * g * outside(ctx.saved_tensors[0], torch.empty_like)

    x = jnp.array([1.0, 2.0])
    for function in (Compiled, reading(Cube)):
        f = wrap(host(function))

        def slope(x, f=f):
            return jax.grad(lambda x: (f(x) ** 2).sum())(x)

        expected = 4 * x**3 if function is Compiled else 6 * x**5
        np.testing.assert_allclose(jax.jit(slope)(x), expected, rtol=1e-5)
        for second in (jax.jacrev(slope), jax.jit(jax.jacrev(slope))):
            with pytest.raises(jaxfn.TranslationError, match=rf"{function.__name__}: .* it is differentiated once"):
                second(x)


@row("H19")
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_forward_that_depends_on_which_inputs_need_a_gradient(wrap: Any):
    class Needed(Base):
        @staticmethod
        def forward(ctx, x, w):
            read(x)
            x_needs, w_needs = ctx.needs_input_grad
            ctx.save_for_backward(w if x_needs else None, x if w_needs else None)
            return torch.rand(()) * x * w

        @staticmethod
        def backward(ctx, g):
            w, x = ctx.saved_tensors
            return None if w is None else g * w, None if x is None else g * x

    f = wrap(functools.partial(host(Needed), key=jax.random.key(0)))
    x, w = jnp.float32(2), jnp.float32(3)
    assert jax.grad(f)(x, w) == 3 and jax.grad(f, (0, 1))(x, w) == (3, 2)


@row("H19")
def test_autocast_of_the_caller():
    class Matmul(Base):
        forward = staticmethod(lambda ctx, x: (read(x), x @ x.T)[1])
        backward = staticmethod(lambda ctx, g: g)

    apply, x = host(Matmul), jnp.eye(3)
    for f in (apply, jax.jit(apply)):
        with torch.autocast("cpu", torch.bfloat16):
            assert f(x).dtype == jnp.bfloat16
    assert jax.jit(lambda x: apply(x))(x).dtype == jnp.float32


@row("H19")
def test_dtypes_without_x64():
    class Wide(Base):
        @staticmethod
        def forward(ctx, x, indices):
            read(x)
            ctx.save_for_backward(x, indices)
            return x.double().gather(0, indices) ** 2, indices.long() * 2**29

        @staticmethod
        def backward(ctx, g, _):
            x, indices = ctx.saved_tensors
            assert g.dtype == torch.float64
            return torch.zeros_like(g).scatter_add(0, indices.long(), g * 2 * x.gather(0, indices)).to(x.dtype), None

    x, indices = jnp.array([1.0, 2.0, 3.0]), jnp.array([2, 0, 2])
    for f in (host(Wide), jax.jit(host(Wide))):
        y, multiples = f(x, indices)
        assert y.dtype == jnp.float32 and multiples.dtype == jnp.int32
        np.testing.assert_array_equal(multiples, indices * 2**29)
        np.testing.assert_allclose(jax.grad(lambda x: f(x, indices)[0].sum())(x), [2, 0, 12])
        with pytest.raises(Exception, match="integers that need 64 bits"):
            jax.block_until_ready(f(jnp.ones(9), indices * 4))


@row("H19")
def test_calls_in_several_threads():
    f, x = host(reading(Tanh)), jnp.linspace(-1, 1, 7)
    gradients: dict[int, Any] = {}

    def run(i: int) -> None:
        for _ in range(3):
            total = jax.grad(lambda x: f(x * i).sum())
            gradients[i] = (total if i % 2 else jax.jit(total))(x)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for i in range(1, 5):
        np.testing.assert_allclose(gradients[i], i / jnp.cosh(x * i) ** 2, atol=1e-5)


@row("H19")
def test_errors_name_the_function_and_the_line():
    class Listed(Base):
        forward = staticmethod(lambda ctx, x: [x * 2, x * 3])
        backward = staticmethod(lambda ctx, *gradients: gradients[0])

    x = jnp.array([1.0, 2.0])
    with pytest.raises(Exception, match=r"(?s)Tanh.forward: ValueError: an infinite value.*test_callback.*raise Val"):
        jax.jit(host(reading(Tanh)))(x / 0).block_until_ready()
    with pytest.raises(ValueError, match="^an infinite value"):
        host(reading(Tanh))(x / 0)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(host(reading(Tanh)), (x,), (x,))
    with pytest.raises(jaxfn.TranslationError, match="Halved.jvp is not called on the host: use reverse mode"):
        jax.jvp(host(reading(Halved)), (x,), (x,))
    with pytest.raises(jaxfn.TranslationError, match="tensors inside a list as output 0"):
        jax.grad(lambda x: host(reading(Listed))(x)[0].sum())(x)


@row("H19")
def test_what_can_be_traced_is_traced():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: host(Tanh)(x).sum()))(jnp.ones(3))
    assert "pure_callback" not in str(jaxpr)
    with pytest.raises(TypeError, match="subclasses of torch.autograd.Function"):
        jaxfn.from_torch(torch.sin, fallback="callback")
    with pytest.raises(ValueError, match="'callback', got 'cond'"):
        jaxfn.from_torch(Tanh, fallback="cond")
