"""Contract rows I1 to I4: hooks of tensors next to torch's, what backward writes, and unsupported hooks of modules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.torch_code import Net  # noqa: E402

nn = torch.nn
X, Y = (np.random.default_rng(seed).normal(size=(4, 3)) for seed in (0, 1))
pytestmark = pytest.mark.usefixtures("double_precision", "few_objects")


def linear():
    return nn.Linear(3, 3)


def with_hook_of_a_tensor(self, x):
    h = self.first(x)
    h.register_hook(lambda g: g / torch.sqrt(1 + (g**2).sum()))
    return h.sin()


def with_hooks():
    hooked = linear()
    hooked.weight.register_hook(lambda g: g / torch.sqrt(1 + (g**2).sum()))
    return Net(with_hook_of_a_tensor, first=nn.Sequential(linear(), hooked))


def build(make):
    torch.manual_seed(0)
    return make().double()


def of_torch(make, args, argnums, order):
    """Gradients, or those of the sum of their cubes, by all parameters and by the arguments at these positions."""
    module = build(make)
    tensors = [torch.tensor(x) for x in args]
    sought = [*module.parameters(), *(tensors[i].requires_grad_() for i in argnums)]
    output = module(*tensors)
    total = 0.05 * (output**2 * torch.arange(1, output.numel() + 1).reshape(output.shape)).sum()
    gradients = torch.autograd.grad(total, sought, create_graph=order == 2, materialize_grads=True)
    if order == 2:
        gradients = torch.autograd.grad(sum((g**3).sum() for g in gradients), sought, materialize_grads=True)
    return [g.detach().numpy() for g in gradients]


def of_jax(make, args, argnums, order, wrap=jax.jit):
    net = jaxfn.from_torch(build(make))
    buffers = net.buffers

    def total(parameters, sought):
        all_args = [sought.get(i, x) for i, x in enumerate(args)]
        output = net.apply(parameters, buffers, *all_args)[0]
        return 0.05 * (output**2 * jnp.arange(1, output.size + 1).reshape(output.shape)).sum()

    gradient = jax.grad(wrap(total), (0, 1))
    if order == 2:
        first = gradient
        gradient = jax.grad(lambda *x: sum((g**3).sum() for g in jax.tree.leaves(first(*x))), (0, 1))
    of_parameters, of_arguments = jax.jit(gradient)(net.parameters, {i: jnp.asarray(args[i]) for i in argnums})
    names = [name for name, _ in net.torch_module.named_parameters()]
    return [*(of_parameters[name] for name in names), *(of_arguments[i] for i in argnums)]


def assert_same(ours, theirs):
    scale = max(np.abs(g).max() for g in theirs)
    assert len(ours) == len(theirs) and scale > 1e-6
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10 * scale)


@row("I2", "I3")
@pytest.mark.parametrize("argnums", [[0], []], ids=["by x too", "by parameters"])
@pytest.mark.parametrize("order, wrap", [(1, jax.jit), (2, jax.jit), (2, jax.checkpoint)])
def test_hooks_of_a_tensor_and_of_a_parameter(order, wrap, argnums):
    assert_same(of_jax(with_hooks, [X], argnums, order, wrap), of_torch(with_hooks, [X], argnums, order))


@row("I2")
def test_hooks_under_vmap_and_scan():
    """A hook sees the gradient of one example, as torch's does in a loop."""
    net = jaxfn.from_torch(build(with_hooks))
    parameters, rows = net.parameters, np.stack([X, Y, X * Y])

    def gradient(x):
        return jax.grad(lambda p, x: (net.apply(p, {}, x)[0] ** 3).sum(), (0, 1))(parameters, x)

    one_by_one = [gradient(x) for x in rows]
    expected = jax.tree.map(lambda *g: jnp.stack(g), *one_by_one)
    by_vmap = jax.jit(jax.vmap(gradient, 1))(rows.swapaxes(0, 1))
    _, by_scan = jax.jit(lambda rows: jax.lax.scan(lambda c, x: (c, gradient(x)), None, rows))(rows)
    module = build(with_hooks)
    theirs = torch.autograd.grad((module(torch.tensor(Y)) ** 3).sum(), [*module.parameters()])
    names = [name for name, _ in module.named_parameters()]
    assert_same([one_by_one[1][0][name] for name in names], [g.numpy() for g in theirs])
    for found in (by_vmap, by_scan):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


@row("I2", "I4")
def test_a_hook_that_draws_takes_the_key():
    def noisy(x):
        y = x * 1
        y.register_hook(lambda gradient: gradient + torch.rand_like(gradient))
        return y.tanh()

    net = jaxfn.from_torch(noisy)

    def gradient(key):
        return jax.grad(lambda x: net(x, key=key).sum())(X)

    noise = gradient(jax.random.key(0)) - (1 - np.tanh(X) ** 2)
    assert (noise >= 0).all() and (noise < 1).all() and noise.std() > 0.1
    np.testing.assert_array_equal(gradient(jax.random.key(0)), gradient(jax.random.key(0)))
    with pytest.raises(TranslationError, match="key="):
        jax.grad(lambda x: net(x).sum())(X)


def looks(module, *gradients):
    return None


@row("I2")
@cells(
    "method, when",
    [
        ("register_full_backward_hook", "before conversion"),
        ("register_full_backward_pre_hook", "after a call"),
        ("register_backward_hook", "before conversion"),
        ("register_module_full_backward_hook", "after a call"),
        ("register_module_full_backward_pre_hook", "before conversion"),
        ("register_module_backward_hook", "after a call"),
    ],
)
def test_backward_hooks_of_modules_raise_by_name(method, when, monkeypatch):
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)  # of which torch has one alone
    is_of_all = method.startswith("register_module")
    module = nn.Sequential(linear(), nn.Tanh()).double()
    net, expected = jaxfn.from_torch(module), module(torch.tensor(X)).detach()
    if when == "after a call":
        net(X)
    register = getattr(nn.modules.module if is_of_all else module[1], method)
    handle = register(functools.partial(looks))
    if when == "before conversion":
        net = jaxfn.from_torch(module)
    owner = r"the module \(Sequential\)" if is_of_all else r"1 \(Tanh\)"
    try:
        with pytest.raises(
            TranslationError,
            match=rf"(?s){owner} has a backward hook, looks, registered by {method}\. .*output in a .*Function",
        ):
            net(X)
        np.testing.assert_allclose(jaxfn.from_torch(torch.no_grad()(module))(X), expected)  # where torch calls none
    finally:
        handle.remove()
    np.testing.assert_allclose(net(X), expected)


STORED = []


def stores(net, gradient):
    STORED.append(gradient.norm())


def asks(net, gradient):
    STORED.append(float(gradient.norm()))


def counts(net, gradient):
    net.count += 1


def sets(net, gradient):
    net.part.seen = gradient


def notes(net, gradient):
    net.log.append("called")


def moves(net, gradient):
    net.mean.mul_(0.9).add_(gradient.mean())


def assigns(net, gradient):
    net.mean = net.mean * 0.9


def trains(net, gradient):
    with torch.no_grad():
        net.w.sub_(gradient.mean(0))


def leaves_a_gradient(net, gradient):
    net.w.grad = torch.ones(3, dtype=torch.float64)


def stateful(run):
    net = Net(run, first=linear(), part=nn.Tanh(), w=nn.Parameter(torch.ones(3)), count=0, log=[]).double()
    net.register_buffer("mean", torch.ones(3, dtype=torch.float64))
    return net


def of_tensor(hook):
    def run(self, x):
        y = self.first(x) * self.w
        y.register_hook(lambda gradient: hook(self, gradient))
        return self.part(y)

    return run


class Stateful(torch.autograd.Function):
    """Its backward calls a hook."""

    @staticmethod
    def forward(ctx, x, net, hook):
        ctx.net, ctx.hook = net, hook
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.hook(ctx.net, gradient)
        return 2 * gradient, None, None


def of_function(hook):
    return lambda self, x: Stateful.apply(self.first(x) * self.w, self, hook)


@row("I2", "I5")
@pytest.mark.parametrize(
    "kind, hook, message",
    [
        (of_tensor, stores, "backward stores a tensor.*jax.grad return them"),
        (of_tensor, asks, r"`.item\(\)`"),
        (of_tensor, counts, r"backward mutates the attribute count of the module \(Net\).*lost"),
        (of_tensor, sets, r"backward mutates the attribute seen of part \(Tanh\).*lost"),
        (of_tensor, notes, "backward mutates the attribute log of the module.*lost"),
        (of_tensor, moves, "backward mutates mean.*lost"),
        (of_tensor, assigns, "backward mutates mean of the module.*lost"),
        (of_tensor, trains, "backward mutates w.*lost"),
        (of_tensor, leaves_a_gradient, "backward mutates the .grad of w.*lost"),
        (of_function, counts, "backward mutates the attribute count.*lost"),
        (of_function, moves, "backward mutates mean.*lost"),
        (of_function, trains, "backward mutates w.*lost"),
    ],
)
def test_what_backward_stores_or_writes_raises_where_it_is_differentiated(kind, hook, message):
    module = stateful(kind(hook))
    net = jaxfn.from_torch(module)
    before = {name: id(x) for name, x in vars(module).items()}
    np.testing.assert_allclose(net(X), module(torch.tensor(X)).detach(), rtol=1e-12)
    with pytest.raises(TranslationError, match=f"(?s){message}"):
        jax.jit(jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum()))(net.parameters)
    assert {name: id(x) for name, x in vars(module).items()} == before and not hasattr(module.part, "seen")
    assert module.count == 0 and (module.mean == 1).all() and not module.log and module.w.grad is None
    assert all(type(x) is torch.Tensor for x in STORED)
    STORED.clear()


def written(is_before, called):
    def run(self, x):
        y = None if is_before else called(self, self.first(x) * self.w)
        with torch.no_grad():
            self.mean.add_(torch.tensor([1.0, 2.0, 3.0]))
        return called(self, self.first(x) * self.w) if is_before else y

    return run


@row("I2", "I5")
def test_backward_reads_what_forward_has_written_by_then():
    called = of_tensor(lambda net, gradient: gradient * net.mean)
    after, before = (lambda: stateful(written(True, called))), (lambda: stateful(written(False, called)))
    assert_same(of_jax(after, [X], [0], 1), of_torch(after, [X], [0], 1))
    with pytest.raises(TranslationError, match="reads mean of the module, which forward mutates afterwards"):
        of_jax(before, [X], [0], 1)


def squared_where(make):
    """The sum of squares of a tensor whose gradient a hook squares."""

    def total(x):
        y = make(x)
        y.register_hook(lambda gradient: gradient * gradient)
        return (y * y).sum()

    return total


def both_orders(make):
    """Derivatives of the first and the second order, as torch has them."""
    x = torch.tensor(X, requires_grad=True)
    (first,) = torch.autograd.grad(squared_where(make)(x), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return first.detach(), second


@row("I2", "I3")
@pytest.mark.parametrize(
    "make",
    [lambda x: x * x * x, torch.relu, lambda x: torch.tanh(x).clone(), lambda x: x.max(1).values,
     lambda x: torch.exp(x).reshape(-1)],
    ids=["cube", "relu", "copy of tanh", "max", "view of exp"],
)  # fmt: skip
def test_second_derivatives_pass_a_hook_of_a_tensor(make):
    first, second = both_orders(make)
    of_jax = jax.grad(jaxfn.from_torch(squared_where(make)))
    np.testing.assert_allclose(of_jax(X), first, rtol=1e-9)
    np.testing.assert_allclose(jax.grad(lambda x: of_jax(x).sum())(X), second, rtol=1e-9)


USES_ITS_RESULT = {
    "tanh": torch.tanh,
    "exp": torch.exp,
    "sqrt": lambda x: (x * x + 1).sqrt(),
    "softmax": lambda x: x.softmax(1),
    "cumprod": lambda x: x.cumprod(0),
    "std": lambda x: x.std(0),
    "logsumexp": lambda x: x.logsumexp(1),
    "norm": lambda x: x.norm(dim=1),
    "prod": torch.prod,
}


@row("I2", "I3")
@cells("name", ["tanh", "softmax", "std"], USES_ITS_RESULT)
def test_second_derivatives_that_bypass_the_hook_of_a_tensor_raise(name):
    """torch has them: through the `y` in tanh's `g * (1 - y * y)` they pass the hook of `y` again."""
    make = USES_ITS_RESULT[name]
    first, _ = both_orders(make)
    of_jax = jax.grad(jaxfn.from_torch(squared_where(make)))
    np.testing.assert_allclose(of_jax(X), first, rtol=1e-9)
    for again in (of_jax, jax.jit(of_jax)):
        with pytest.raises(TranslationError, match=r"(?s)total registers a hook.*y\.clone\(\).*y\.register_hook"):
            jax.grad(lambda x, again=again: again(x).sum())(X)
