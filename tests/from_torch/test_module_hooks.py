"""Contract rows I1 to I4: backward hooks of modules beside torch's, and what backward writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import row  # noqa: E402

nn = torch.nn
X, Y = (np.random.default_rng(seed).normal(size=(4, 3)) for seed in (0, 1))
PLACES = np.array([2, 0, 1, 1])


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


class Net(nn.Module):
    """Parts, and a function of the module and the arguments."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args):
        return self.run(self, *args)


class Cubed(torch.autograd.Function):
    """Its backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * 3 * ctx.saved_tensors[0] ** 2


def full(module, *hooks):
    for hook in hooks:
        module.register_full_backward_hook(hook)
    return module


def pre(module, *hooks):
    for hook in hooks:
        module.register_full_backward_pre_hook(hook)
    return module


def each(gradients, function):
    return tuple(None if g is None or not g.dtype.is_floating_point else function(g) for g in gradients)


def mixed(module, grad_inputs, grad_outputs):
    """Each gradient gets something of all others, so that a missing or a zero one is seen."""
    if all(g is None for g in grad_inputs):
        return None
    common = 0.1 * sum(g.sin().sum() for g in (*grad_inputs, *grad_outputs) if g is not None)
    return each(grad_inputs, lambda g: 0.5 * g + common)


def tripled(module, grad_inputs, grad_outputs):
    return None if all(g is None for g in grad_inputs) else each(grad_inputs, lambda g: 3 * g)


def normed(module, grad_inputs, grad_outputs):
    if all(g is None for g in grad_inputs):
        return None
    length = torch.sqrt(1 + sum((g.double() ** 2).sum() for g in grad_inputs if g is not None))
    return each(grad_inputs, lambda g: g / length)


def by_weight(module, grad_inputs, grad_outputs):
    return None if grad_inputs[0] is None else (grad_inputs[0] * module.weight.sum(),)


def looks(module, grad_inputs, grad_outputs):
    assert type(grad_inputs) is tuple and all(g is None or g.ndim == 2 for g in grad_outputs)


def sine(module, grad_outputs):
    return each(grad_outputs, lambda g: g.sin() * 2)


def by_weight_before(module, grad_outputs):
    return each(grad_outputs, lambda g: g * module.weight.mean())


class Several(nn.Module):
    """Takes and returns tensors among other things, of which some need no gradient."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0, -1.0]))

    def forward(self, a, n, b, k=1):
        return a * self.w + b, "text", b.sin() * a * n * k, None, b.detach(), (a * 3,)


def linear():
    return nn.Linear(3, 3)


def of_leaked(self, x):
    """The gradient comes to the input past the output, of which there is none."""
    self.part(self.first(x))
    return self.part.kept * 3


def of_both(self, x):
    return self.part(self.first(x)) * self.part.kept


def with_hook_of_a_tensor(self, x):
    h = self.first(x)
    h.register_hook(lambda g: g / torch.sqrt(1 + (g**2).sum()))
    return h.sin()


def weight_hooked():
    module = linear()
    module.weight.register_hook(lambda g: g / torch.sqrt(1 + (g**2).sum()))
    return module


def leaking():
    def run(self, x):
        self.kept = x * x
        return x.sin()

    return pre(full(Net(run), mixed), sine)


def gradient_inside(self, x):
    h = self.first(x)
    return self.part(h) + torch.autograd.grad((self.part(h) ** 2).sum(), h, create_graph=True)[0]


def recomputed(self, x):
    return torch.utils.checkpoint.checkpoint(self.part, self.first(x), use_reentrant=False)


def without_gradients(self, x):
    with torch.no_grad():
        y = self.part(x)
    return self.part(x.detach()) * y + self.part(x)


HOOKED = {
    "several in order": (lambda: pre(full(nn.Linear(3, 2), mixed, tripled, looks), sine, sine), X),
    "in each other": (
        lambda: full(nn.Sequential(linear(), full(nn.Sequential(pre(nn.Tanh(), sine), linear()), mixed)), normed),
        X,
    ),
    "tuples": (
        lambda: Net(
            lambda self, x, y: self.part(x, 2, y, k=3)[0] * self.part(y, 3, x)[2],
            part=pre(full(Several(), mixed), sine),
        ),
        X,
        Y,
    ),
    "an output that is not used": (
        lambda: Net(
            lambda self, x, y: self.part(self.first(x), 2, y)[2],
            first=linear(),
            part=pre(full(Several(), mixed), sine),
        ),
        X,
        Y,
    ),
    "whole numbers": (lambda: nn.Sequential(full(nn.Embedding(3, 4), looks), full(nn.Linear(4, 2), mixed)), PLACES),
    "whole numbers beside others": (
        lambda: Net(
            lambda self, x, i: self.part(self.first(x), i)[0],
            first=linear(),
            part=full(Net(lambda self, a, i: (a[i] ** 2, i + 1)), mixed),
        ),
        X,
        PLACES,
    ),
    "called twice": (
        lambda: (lambda part: nn.Sequential(part, nn.Tanh(), part))(pre(full(linear(), mixed), sine)),
        X,
    ),
    "one argument twice": (
        lambda: Net(
            lambda self, x: (lambda h: self.part(h, h))(self.first(x)),
            first=linear(),
            part=full(Net(lambda self, a, b: a * b.sin()), lambda module, gi, go: (gi[0] * 2, gi[1] * gi[0])),
        ),
        X,
    ),
    "one output twice": (
        lambda: Net(
            lambda self, x: sum(self.part(self.first(x))),
            first=linear(),
            part=pre(full(Net(lambda self, a: (a, a)), mixed), sine),
        ),
        X,
    ),
    "by parameters": (lambda: nn.Sequential(linear(), full(pre(linear(), by_weight_before), by_weight)), X),
    "a Function inside": (
        lambda: nn.Sequential(linear(), pre(full(Net(lambda self, x: Cubed.apply(x) + x), mixed), sine)),
        X,
    ),
    "checkpoint": (lambda: Net(recomputed, first=linear(), part=full(nn.Sequential(nn.Tanh(), linear()), tripled)), X),
    "hooks of a tensor, and of a parameter": (
        lambda: Net(with_hook_of_a_tensor, first=nn.Sequential(linear(), weight_hooked())),
        X,
    ),
    "no gradients": (lambda: Net(without_gradients, part=pre(full(linear(), mixed), sine)), X),
    "past the output": (lambda: Net(of_leaked, first=linear(), part=leaking()), X),
    "past the output too": (lambda: Net(of_both, first=linear(), part=leaking()), X),
    "autograd inside": (lambda: Net(gradient_inside, first=linear(), part=full(nn.Tanh(), normed)), X),
    "a dict, which has no hooks": (
        lambda: Net(
            lambda self, x: self.part(self.first(x))["a"],
            first=linear(),
            part=full(Net(lambda self, a: {"a": a.sin()}), mixed),
        ),
        X,
    ),
    "gradients of None": (
        lambda: Net(
            lambda self, x: self.part(self.first(x), 1, x)[0],
            first=linear(),
            part=full(Several(), lambda module, gi, go: (None, None, go[0] * 2)),
        ),
        X,
    ),
    "complex numbers": (
        lambda: Net(
            lambda self, x: torch.view_as_real(self.part(torch.complex(self.first(x), x))),
            first=linear(),
            part=pre(
                full(Net(lambda self, a: a * a * (1 + 2j)), lambda module, gi, go: (gi[0] * (2 + 1j) + go[0],)),
                lambda module, go: (go[0] * 1j,),
            ),
        ),
        X,
    ),
}


def made(make):
    torch.manual_seed(0)
    return make().double()


def of_torch(make, args, places, order):
    """Gradients, or those of the sum of their cubes, by all parameters and by the arguments at these places."""
    module = made(make)
    tensors = [torch.tensor(x) for x in args]
    sought = [*module.parameters(), *(tensors[i].requires_grad_() for i in places)]
    output = module(*tensors)
    total = 0.05 * (output**2 * torch.arange(1, output.numel() + 1).reshape(output.shape)).sum()
    gradients = torch.autograd.grad(total, sought, create_graph=order == 2, materialize_grads=True)
    if order == 2:
        gradients = torch.autograd.grad(sum((g**3).sum() for g in gradients), sought, materialize_grads=True)
    return [g.detach().numpy() for g in gradients]


def of_jax(make, args, places, order, wrap=jax.jit):
    net = jaxfn.from_torch(made(make))
    buffers = net.buffers

    def total(parameters, sought):
        given = [sought.get(i, x) for i, x in enumerate(args)]
        output = net.apply(parameters, buffers, *given)[0]
        return 0.05 * (output**2 * jnp.arange(1, output.size + 1).reshape(output.shape)).sum()

    gradient = jax.grad(wrap(total), (0, 1))
    if order == 2:
        first = gradient
        gradient = jax.grad(lambda *x: sum((g**3).sum() for g in jax.tree.leaves(first(*x))), (0, 1))
    of_parameters, of_arguments = jax.jit(gradient)(net.parameters, {i: jnp.asarray(args[i]) for i in places})
    names = [name for name, _ in net.torch_module.named_parameters()]
    return [*(of_parameters[name] for name in names), *(of_arguments[i] for i in places)]


def assert_same(ours, theirs):
    scale = max(np.abs(g).max() for g in theirs)
    assert len(ours) == len(theirs) and scale > 1e-6
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10 * scale)


@pytest.mark.filterwarnings("ignore:.*changes the attribute kept")
@row("I2", "I3")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing", "ignore:For backward hooks to be called")
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("name", HOOKED)
def test_backward_hooks_of_modules_are_torchs(name, order):
    make, *args = HOOKED[name]
    places = [i for i, x in enumerate(args) if x.dtype.kind == "f"]
    for differentiated in [places, places[1:]]:
        if list(made(make).parameters()) or differentiated:
            assert_same(of_jax(make, args, differentiated, order), of_torch(make, args, differentiated, order))


@pytest.mark.filterwarnings("ignore:.*changes the attribute kept")
@row("I2")
@pytest.mark.parametrize("name", ["in each other", "hooks of a tensor, and of a parameter", "past the output too"])
def test_hooks_in_a_checkpoint_get_whole_gradients_at_second_order(name):
    make, x = HOOKED[name]
    assert_same(of_jax(make, [x], [0], 2, jax.checkpoint), of_torch(make, [x], [0], 2))


@row("I2")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_backward_hooks_under_vmap_and_scan():
    """A hook sees the gradient of one example, as torch's does in a loop."""
    make, _ = HOOKED["in each other"]
    net = jaxfn.from_torch(made(make))
    parameters, rows = net.parameters, np.stack([X, Y, X * Y])

    def gradient(x):
        return jax.grad(lambda p, x: (net.apply(p, {}, x)[0] ** 3).sum(), (0, 1))(parameters, x)

    one_by_one = [gradient(x) for x in rows]
    expected = jax.tree.map(lambda *g: jnp.stack(g), *one_by_one)
    by_vmap = jax.jit(jax.vmap(gradient, 1))(rows.swapaxes(0, 1))
    _, by_scan = jax.jit(lambda rows: jax.lax.scan(lambda c, x: (c, gradient(x)), None, rows))(rows)
    module = made(make)
    theirs = torch.autograd.grad((module(torch.tensor(Y)) ** 3).sum(), [*module.parameters()])
    names = [name for name, _ in module.named_parameters()]
    assert_same([one_by_one[1][0][name] for name in names], [g.numpy() for g in theirs])
    for found in (by_vmap, by_scan):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


@row("I2", "I4")
def test_backward_hooks_of_all_modules_are_those_of_the_call():
    def make():
        return nn.Sequential(linear(), full(nn.Tanh(), tripled))

    plain = of_jax(make, [X], [0], 1)
    hooks = [
        nn.modules.module.register_module_full_backward_hook(normed),
        nn.modules.module.register_module_full_backward_pre_hook(sine),
    ]
    try:
        assert_same(of_jax(make, [X], [0], 1), theirs := of_torch(make, [X], [0], 1))
    finally:
        for hook in hooks:
            hook.remove()
    assert not np.allclose(theirs[0], plain[0])
    np.testing.assert_array_equal(of_jax(make, [X], [0], 1)[0], plain[0])


@row("I4")
def test_backward_hooks_are_those_there_are_when_it_is_called():
    module = made(lambda: nn.Sequential(linear(), nn.Tanh()))
    net = jaxfn.from_torch(module)

    def gradient():
        return jax.jit(jax.grad(lambda x: net.apply(net.parameters, {}, x)[0].sum()))(X)

    before = gradient()
    handle = module[1].register_full_backward_hook(tripled)
    np.testing.assert_allclose(gradient(), 3 * before, rtol=1e-12)
    handle.remove()
    np.testing.assert_array_equal(gradient(), before)


@row("I2", "I6")
def test_backward_hooks_of_a_module_that_a_function_calls():
    part = full(nn.Tanh(), tripled)
    slope = jax.grad(lambda x: jaxfn.from_torch(lambda x: part(x).sum())(x))(X)
    np.testing.assert_allclose(slope, 3 * (1 - np.tanh(X) ** 2), rtol=1e-12)


@row("I2", "I4")
def test_a_hook_that_draws_takes_the_key():
    def noisy(module, grad_inputs, grad_outputs):
        return (grad_inputs[0] + torch.rand_like(grad_inputs[0]),)

    net = jaxfn.from_torch(full(nn.Tanh(), noisy))

    def gradient(key):
        return jax.grad(lambda x: net.apply({}, {}, x, key=key)[0].sum())(X)

    noise = gradient(jax.random.key(0)) - (1 - np.tanh(X) ** 2)
    assert (noise >= 0).all() and (noise < 1).all() and noise.std() > 0.1
    np.testing.assert_array_equal(gradient(jax.random.key(0)), gradient(jax.random.key(0)))
    with pytest.raises(TranslationError, match="key="):
        net.apply({}, {}, X)


def old_kind(module):
    module.register_backward_hook(lambda module, gi, go: None)


def old_kind_of_all(module):
    return nn.modules.module.register_module_backward_hook(lambda module, gi, go: None)


@row("I2")
@pytest.mark.parametrize("register", [old_kind, old_kind_of_all])
def test_hooks_of_the_old_kind_are_refused(register, monkeypatch):
    monkeypatch.setattr(nn.modules.module, "_global_is_full_backward_hook", None)  # of which torch has one alone
    module = nn.Sequential(linear(), nn.Tanh())
    handle = register(module[1])
    try:
        with pytest.raises(TranslationError, match=r"\((Tanh|Sequential)\).*lambda.*Use register_full_backward_hook"):
            jaxfn.from_torch(module)(X)
    finally:
        if handle is not None:
            handle.remove()


@row("I2")
@pytest.mark.parametrize(
    "hooks, error, message",
    [
        ([lambda m, gi, go: (gi[0], gi[0])], RuntimeError, r"1 \(Tanh\): <lambda> returned 2 of them.*a tuple of 1"),
        ([tripled, lambda m, gi, go: gi[0]], RuntimeError, "returned a tensor; expected None or a tuple"),
        ([lambda m, gi, go: (gi[0].sum(),)], RuntimeError, r"of shape \(\).*grad_input\[0\]; expected \(4, 3\)"),
        ([lambda m, gi, go: (gi[0].float(),)], RuntimeError, "torch.float32.*expected.*torch.float64"),
        ([lambda m, gi, go: (2.0,)], TypeError, "returned a float"),
    ],
)
def test_what_a_hook_may_return(hooks, error, message):
    net = jaxfn.from_torch(nn.Sequential(linear(), full(nn.Tanh(), *hooks)).double())
    with pytest.raises(error, match=f"(?s){message}"):
        jax.grad(lambda p: net.apply(p, {}, X)[0].sum())(net.parameters)


@row("I2")
def test_writes_in_place_to_what_hooks_make_views_of_are_refused():
    """As torch does where it differentiates; an argument needs no gradient to torch while it is traced."""
    for module in (nn.ReLU(inplace=True), nn.Sequential(linear(), nn.ReLU(inplace=True))):
        full(module if isinstance(module, nn.ReLU) else module[1], tripled)
        with pytest.raises(RuntimeError, match=r"(?s)backward hooks, where torch makes views|is a view"):
            jaxfn.from_torch(module.double())(X)


KEPT = []


def keeps(net, module, grad_inputs, grad_outputs):
    KEPT.append(grad_inputs[0].norm())


def asks(net, module, grad_inputs, grad_outputs):
    KEPT.append(grad_inputs[0].norm().item())


def counts(net, module, grad_inputs, grad_outputs):
    net.count += 1


def sets(net, module, grad_inputs, grad_outputs):
    module.seen = grad_inputs[0]


def notes(net, module, grad_inputs, grad_outputs):
    net.log.append("called")


def moves(net, module, grad_inputs, grad_outputs):
    net.mean.mul_(0.9).add_(grad_inputs[0].mean())


def assigns(net, module, grad_inputs, grad_outputs):
    net.mean = net.mean * 0.9


def trains(net, module, grad_inputs, grad_outputs):
    with torch.no_grad():
        net.w.sub_(grad_outputs[0].mean(0))


def leaves_a_gradient(net, module, grad_inputs, grad_outputs):
    net.w.grad = torch.ones(3, dtype=torch.float64)


def stateful(run, *hooks):
    net = Net(run, first=linear(), part=nn.Tanh(), w=nn.Parameter(torch.ones(3)), count=0, log=[]).double()
    net.register_buffer("mean", torch.ones(3, dtype=torch.float64))
    return net, full(net.part, *(functools.partial(hook, net) for hook in hooks))


def plainly(self, x):
    return self.part(self.first(x) * self.w) + self.mean


@row("I2")
@pytest.mark.parametrize(
    "hook, message",
    [
        (keeps, r"hooks of part \(Tanh\): keeps.*keeps a tensor.*jax.grad return them"),
        (asks, r"hooks of part \(Tanh\): asks.*`.item\(\)`"),
        (counts, r"hooks of part \(Tanh\): counts.*the attribute count of the module \(Net\).*lost"),
        (sets, r"sets.*the attribute seen of part \(Tanh\)"),
        (notes, "notes.*the attribute log of the module"),
        (moves, "moves.*writes to mean.*lost"),
        (assigns, "assigns.*writes to mean of the module.*lost"),
        (trains, "trains.*writes to w.*lost"),
        (leaves_a_gradient, "the .grad of w.*lost"),
    ],
)
def test_what_a_hook_keeps_or_writes_is_refused_where_it_is_differentiated(hook, message):
    module, _ = stateful(plainly, hook)
    net = jaxfn.from_torch(module)
    before = {name: id(x) for name, x in vars(module).items()}
    np.testing.assert_allclose(net(X), module(torch.tensor(X)).detach(), rtol=1e-12)  # no hook is called
    with pytest.raises(TranslationError, match=f"(?s){message}"):
        jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum())(net.parameters)
    assert {name: id(x) for name, x in vars(module).items()} == before and not hasattr(module.part, "seen")
    assert (module.mean == 1).all() and not module.log and module.w.grad is None
    assert all(type(x) is torch.Tensor for x in KEPT)
    KEPT.clear()


def of_tensor(hook):
    def run(self, x):
        y = self.first(x) * self.w
        y.register_hook(lambda gradient: hook(self, self.part, (gradient,), (gradient,)))
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
        ctx.hook(ctx.net, ctx.net.part, (gradient,), (gradient,))
        return 2 * gradient, None, None


def of_function(hook):
    return lambda self, x: Stateful.apply(self.first(x) * self.w, self, hook)


@row("I2", "I5")
@pytest.mark.parametrize("kind", [of_tensor, of_function])
@pytest.mark.parametrize("hook", [counts, notes, moves, assigns, trains])
def test_what_backward_writes_is_refused(kind, hook):
    module, _ = stateful(kind(hook))
    net = jaxfn.from_torch(module)
    net(X)
    with pytest.raises(TranslationError, match=r"(?s)backward writes to .*lost"):
        jax.jit(jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum()))(net.parameters)
    assert module.count == 0 and not module.log and (module.mean == 1).all()


def reads(net, module, grad_inputs, grad_outputs):
    return (grad_inputs[0] * net.mean,)


def written(is_before, called):
    def run(self, x):
        y = None if is_before else called(self, self.first(x) * self.w)
        with torch.no_grad():
            self.mean.add_(torch.tensor([1.0, 2.0, 3.0]))
        return called(self, self.first(x) * self.w) if is_before else y

    return run


@row("I2", "I5")
def test_backward_reads_what_forward_has_written_by_then():
    hook_of_tensor = of_tensor(lambda net, module, gi, go: gi[0] * net.mean)
    for called, hooks in [(lambda self, y: self.part(y), [reads]), (lambda self, y: hook_of_tensor(self, y), [])]:
        make = lambda is_before, called=called, hooks=hooks: stateful(written(is_before, called), *hooks)[0]  # noqa: E731
        assert_same(of_jax(lambda: make(True), [X], [0], 1), of_torch(lambda: make(True), [X], [0], 1))
        with pytest.raises(TranslationError, match="reads mean of the module, to which forward writes afterwards"):
            of_jax(lambda: make(False), [X], [0], 1)


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


@row("I2", "I3")
@pytest.mark.parametrize(
    "make",
    [torch.tanh, torch.exp, lambda x: x.softmax(1), lambda x: x.cumprod(0), lambda x: (x * x + 1).sqrt(),
     lambda x: x.std(0), lambda x: x.logsumexp(1), lambda x: x.norm(dim=1), torch.prod],
    ids=["tanh", "exp", "softmax", "cumprod", "sqrt", "std", "logsumexp", "norm", "prod"],
)  # fmt: skip
def test_second_derivatives_that_use_a_tensor_beside_its_hook_are_refused(make):
    """torch has them: through the `y` in tanh's `g * (1 - y * y)` they go by the hook of `y` once more."""
    first, _ = both_orders(make)
    of_jax = jax.grad(jaxfn.from_torch(squared_where(make)))
    np.testing.assert_allclose(of_jax(X), first, rtol=1e-9)
    for again in (of_jax, jax.jit(of_jax), jax.checkpoint(of_jax)):
        with pytest.raises(TranslationError, match=r"(?s)total registers a hook.*y\.clone\(\).*y\.register_hook"):
            jax.grad(lambda x, again=again: again(x).sum())(X)
