"""Contract row I5: Functions whose backward gives gradients to a module's parameters that they do not take."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.contexts import CONTEXTS, eager  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.torch_code import Net  # noqa: E402

nn = torch.nn


pytestmark = pytest.mark.usefixtures("double_precision", "few_objects")


class Reversible(torch.autograd.Function):
    """Saves its output alone; backward computes the input again, and leaves gradients in `.grad` of f and g."""

    @staticmethod
    def forward(ctx, x, f, g):
        ctx.f, ctx.g = f, g
        with torch.no_grad():
            x1, x2 = x.chunk(2, -1)
            y1 = x1 + f(x2)
            y = torch.cat([y1, x2 + g(y1)], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_output):
        (y,) = ctx.saved_tensors
        (y1, y2), (dy1, dy2) = y.chunk(2, -1), grad_output.chunk(2, -1)
        with torch.enable_grad():
            y1 = y1.detach().requires_grad_()
            g = ctx.g(y1)
            torch.autograd.backward(g, dy2)
        dx1 = dy1 + y1.grad
        with torch.enable_grad():
            x2 = (y2 - g).detach().requires_grad_()
            torch.autograd.backward(ctx.f(x2), dx1)
        return torch.cat([dx1, dy2 + x2.grad], -1), None, None


class Checkpoint(torch.autograd.Function):
    """A checkpoint of any Python function, which finds its parameters automatically."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad_output)
        return None, x.grad


class CheckpointOfParameters(torch.autograd.Function):
    """Takes the parameters as arguments, and `run` uses them as the module's."""

    @staticmethod
    def forward(ctx, run, x, *parameters):
        ctx.run, ctx.x, ctx.parameters = run, x, list(parameters)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(y, [x, *ctx.parameters], grad_output, allow_unused=True)


class Rounded(torch.autograd.Function):
    """Only backward uses the layer."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return x.round()

    @staticmethod
    def backward(ctx, grad_output):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        y.backward(grad_output)
        return x.grad, None


class HandWritten(torch.autograd.Function):
    """Assigns `.grad` itself, and returns a gradient of the weight as well: torch adds the two."""

    @staticmethod
    def forward(ctx, x, weight, layer):
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + layer.bias

    @staticmethod
    def backward(ctx, grad_output):
        x, weight = ctx.saved_tensors
        for parameter, gradient in ((ctx.layer.weight, grad_output.t() @ x), (ctx.layer.bias, grad_output.sum(0))):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return grad_output @ weight, 2 * grad_output.t() @ x, None


def block(f=None, g=None):
    f, g = f or nn.Linear(3, 3), g or nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return Net(lambda self, x: Reversible.apply(x, self.f, self.g), f=f, g=g)


def shared():
    f = nn.Linear(3, 3)
    return Net(lambda self, x: self.b(self.a(x)), a=block(f), b=block(None, f))


def partly_frozen():
    module = block()
    module.f.weight.requires_grad_(False)
    return module


def hooked(self, x):
    y = self.a(x)
    y.register_hook(lambda gradient: gradient * self.a.weight.sum())
    return y


NETS = {
    "reversible blocks": lambda: nn.Sequential(block(), block(), nn.Linear(6, 2)),
    "a layer in two blocks": shared,
    "a frozen weight": partly_frozen,
    "a weight norm": lambda: block(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))),
    "a hook that makes the weight": lambda: block(nn.utils.weight_norm(nn.Linear(3, 3))),
    "a lambda": lambda: Net(lambda self, x: Checkpoint.apply(lambda v: torch.sin(self.a(v)), x), a=nn.Linear(6, 5)),
    "a block in a checkpoint": lambda: Net(
        lambda self, x: Checkpoint.apply(lambda v: self.inner(v) * 2, x), inner=block()
    ),
    "parameters as arguments too": lambda: Net(
        lambda self, x: CheckpointOfParameters.apply(lambda v: torch.sin(self.a(v)), x, *self.a.parameters()),
        a=nn.Linear(6, 5),
    ),
    "only some as arguments": lambda: Net(
        lambda self, x: HandWritten.apply(HandWritten.apply(x, self.a.weight, self.a).tanh(), self.a.weight, self.a),
        a=nn.Linear(6, 6),
    ),
    "only in backward": lambda: Net(lambda self, x: Rounded.apply(x, self.a), a=nn.Linear(6, 6)),
    "in a hook of a tensor": lambda: Net(hooked, a=nn.Linear(6, 6)),
    "batch norm": lambda: block(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "batch norm in eval mode": lambda: block(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).eval(),
}


def build(name, seed=0):
    torch.manual_seed(seed)
    return NETS[name]().double()


def loss(outputs):
    return (outputs**2).sum() + outputs.sum()


X = np.random.default_rng(0).normal(size=(5, 6))


@row("I5")
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.filterwarnings(
    "ignore:Reversible mutates .*running_mean.* and, where it repeats the computation, in backward"
)
@cells(
    "name, wrap",
    [*((name, jax.jit) for name in NETS), ("a lambda", eager), ("only in backward", eager)],
    NETS,
    [jax.jit, eager],
)
def test_every_parameter_gets_its_gradient(name, wrap):
    module = build(name)
    net = jaxfn.from_torch(module)
    buffers = net.buffers

    def total(parameters, x):
        output, moved = net.apply(parameters, buffers, x)
        return loss(output), (output, moved)

    gradients, (output, moved) = wrap(jax.grad(total, (0, 1), has_aux=True))(net.parameters, X)
    assert all(p.grad is None for p in module.parameters())

    x = torch.tensor(X, requires_grad=True)
    expected = module(x)
    buffers_of_torch = {name: b.clone() for name, b in module.named_buffers()}  # before backward computes again
    loss(expected).backward()
    np.testing.assert_allclose(output, expected.detach(), rtol=1e-12)
    np.testing.assert_allclose(gradients[1], x.grad, rtol=1e-9, atol=1e-12)
    expected = {key: p.grad.numpy() for key, p in module.named_parameters() if p.requires_grad}
    assert set(gradients[0]) == set(expected) and all(map(np.any, expected.values()))
    for key, gradient in expected.items():
        np.testing.assert_allclose(gradients[0][key], gradient, rtol=1e-9, atol=1e-12, err_msg=key)
    for key, buffer in buffers_of_torch.items():
        np.testing.assert_allclose(moved[key], buffer, rtol=1e-12, err_msg=key)


def plainly(self, x):
    """Computes `block` without a Function."""
    x1, x2 = x.chunk(2, -1)
    y1 = x1 + self.f(x2)
    return torch.cat([y1, x2 + self.g(y1)], -1)


@row("I5")
@cells("order, name", [(1, "checkpoint"), (2, "jit")], [1, 2], ["jit", "checkpoint", "vmap", "scan"])
def test_derivatives_in_every_context(order, name):
    """The block's backward is the derivative of what it computes, so JAX's autodiff of that is equal."""
    module = build("reversible blocks")
    plain = nn.Sequential(*(Net(plainly, f=part.f, g=part.g) if hasattr(part, "f") else part for part in module))

    def derivatives(module):
        net = jaxfn.from_torch(module)
        buffers = net.buffers

        def total(x, *arrays):
            parameters = dict(zip(net.parameters, arrays, strict=True))
            return jnp.sin(net.apply(parameters, buffers, x)[0]).sum()

        arrays = (jnp.asarray(X), *net.parameters.values())
        derivative = jax.grad(CONTEXTS[name](total), range(len(arrays)))
        if order == 2:
            first = derivative
            derivative = jax.grad(lambda *a: sum(jnp.vdot(g, g) for g in first(*a)), range(len(arrays)))
        return jax.jit(derivative)(*arrays)

    for ours, expected in zip(derivatives(module), derivatives(plain), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-8, atol=1e-10)


@row("I5")
def test_a_batch_of_parameters():
    net = jaxfn.from_torch(build("reversible blocks"))
    gradient = jax.grad(lambda p: jnp.sin(net.apply(p, net.buffers, X)[0]).sum())
    several = [jax.tree.map(lambda a, k=k: k * a, net.parameters) for k in (1, -1, 2)]
    batched = jax.jit(jax.vmap(gradient))(jax.tree.map(lambda *a: jnp.stack(a), *several))
    for i, parameters in enumerate(several):
        for key, expected in gradient(parameters).items():
            np.testing.assert_allclose(batched[key][i], expected, rtol=1e-8, atol=1e-10)


def _over_devices(module, within):
    """The gradients of a loss that is a sum over the first axis of x, by four devices."""
    net = jaxfn.from_torch(module)
    parameters, buffers = net.parameters, net.buffers

    def total(parameters, x):
        return jnp.sin(net.apply(parameters, buffers, x)[0]).sum()

    def on_one(parameters, x):
        return jax.lax.psum(within(total)(parameters, x), "i")

    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    summed = jax.shard_map(on_one, mesh=mesh, in_specs=(jax.P(), jax.P("i")), out_specs=jax.P())
    return jax.jit(jax.grad(summed))(parameters, np.concatenate([X, X[:3] * 2]))


@row("I5")
@pytest.mark.parametrize(
    "within",
    [jax.checkpoint, lambda f: lambda p, x: jax.lax.scan(lambda c, y: (c, f(p, y[None])), None, x)[1].sum()],
    ids=["checkpoint", "scan"],
)
def test_on_four_devices(within):
    module = build("reversible blocks")
    gradients = _over_devices(module, within)
    torch.sin(module(torch.tensor(np.concatenate([X, X[:3] * 2]), requires_grad=True))).sum().backward()
    for key, parameter in module.named_parameters():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-9, atol=1e-12, err_msg=key)


@row("H12", "I5")
def test_one_thread_traces_modules_and_another_trains():
    """Both go through the same Functions concurrently, and the one that trains has the losses that it has alone."""
    started, done = threading.Event(), threading.Event()

    def train(module, is_over):
        """Returns the losses of the steps until it is over."""
        optimizer, losses = torch.optim.SGD(module.parameters(), 1e-3), []
        while not is_over(losses):
            optimizer.zero_grad()
            value = loss(module(torch.tensor(X, requires_grad=True)))
            value.backward()
            optimizer.step()
            losses.append(value.item())
            started.set()
            done.wait(0.005)  # tracing gets on too
        return losses

    other = build("reversible blocks", seed=1)
    net = jaxfn.from_torch(other)
    with ThreadPoolExecutor(1) as thread:
        training = thread.submit(train, build("reversible blocks"), lambda losses: done.is_set())
        try:
            assert started.wait(60)
            gradients = jax.grad(lambda p: loss(net.apply(p, net.buffers, X)[0]))(net.parameters)
        finally:
            done.set()
        in_parallel = training.result(60)
    loss(other(torch.tensor(X, requires_grad=True))).backward()
    for key, parameter in other.named_parameters():
        np.testing.assert_allclose(gradients[key], parameter.grad, rtol=1e-9, atol=1e-12, err_msg=key)
    alone = train(build("reversible blocks"), lambda losses: len(losses) == len(in_parallel))
    np.testing.assert_allclose(alone, in_parallel, rtol=1e-12)


@row("I5")
def test_new_parameters_are_seen_by_forward_and_backward():
    """Nothing of the module's own values is left in the program."""
    module, other = build("reversible blocks"), build("reversible blocks", seed=1)
    net, expected = jaxfn.from_torch(module), jaxfn.from_torch(other)
    step = jax.jit(jax.value_and_grad(lambda net, p: loss(net.apply(p, {}, X)[0]), 1), static_argnums=0)
    step(net, net.parameters)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
        step(net, expected.parameters),
        step(expected, expected.parameters),
    )


@row("I5")
@pytest.mark.parametrize("is_used_before", [False, True])
def test_a_parameter_that_is_not_an_attribute_of_the_module_raises(is_used_before):
    """It would be a constant: torch's present values, and no gradient."""

    a = nn.Linear(6, 6)
    module = Net(
        lambda self, x: Checkpoint.apply(self.layer, x) + self.a(x),
        a=a,
        layer=lambda v, held=(a.weight,): v @ held[0].t(),
    ).double()
    if is_used_before:  # as a constant, outside any module
        with pytest.warns(UserWarning, match="constants on JAX"):
            jax.grad(lambda x: jaxfn.from_torch(Checkpoint).apply(module.layer, x).sum())(X)
    net = jaxfn.from_torch(module)
    with pytest.raises(TranslationError, match=r"Checkpoint uses its parameter or buffer 'a.weight'"):
        jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum())(net.parameters)


@row("I5")
def test_an_intermediate_in_a_closure_raises():
    net = jaxfn.from_torch(
        Net(lambda self, x: (lambda m: Checkpoint.apply(lambda v: v * m, x))(self.a(x)), a=nn.Linear(6, 6)).double()
    )
    with pytest.raises(TranslationError, match="Checkpoint uses a tensor of another call of forward"):
        jax.grad(lambda p: net.apply(p, net.buffers, X)[0].sum())(net.parameters)


class Masked(torch.autograd.Function):
    """Backward uses what the module has computed."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x * 2

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output * ctx.module.mask, None


@pytest.mark.filterwarnings("ignore:.*changes the attribute mask")
@row("I5", "H8")
@pytest.mark.parametrize("was_called", [False, True])
def test_an_intermediate_that_backward_alone_uses_raises_where_it_is_differentiated(was_called):
    """The module holds a mask of another input if torch has called it before."""

    def forward(self, x):
        self.mask = self.a(x)
        return Masked.apply(x, self)

    module = Net(forward, a=nn.Linear(6, 6)).double()
    if was_called:
        module(torch.ones(5, 6, dtype=torch.float64))
    net = jaxfn.from_torch(module)
    np.testing.assert_array_equal(net(X), 2 * X)
    with pytest.raises(TranslationError, match="Masked uses a tensor of another call of forward"):
        jax.grad(lambda x: net(x).sum())(X)
