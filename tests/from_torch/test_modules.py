"""Contract rows I: whole modules and Python functions of tensors, compared with torch on equal numbers."""

import dataclasses
import functools
import re
import threading
import types
import warnings
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support import torch_functions  # noqa: E402
from tests.support.contexts import CONTEXTS  # noqa: E402
from tests.support.marks import cells, row  # noqa: E402
from tests.support.runs import noting_runs  # noqa: E402
from tests.support.torch_code import Net, function_of  # noqa: E402

nn, F = torch.nn, torch.nn.functional
X = torch.linspace(-2, 2, 12).reshape(4, 3)


# Its backward is not the derivative of its forward, which is zero.
Quantized = function_of(lambda x: torch.round(x * 4) / 4, lambda x: 1 + x**2, name="Quantized")


class Weighted(Net):
    """A weight and a buffer, and what is done with them."""

    def __init__(self, run):
        super().__init__(run, w=nn.Parameter(torch.linspace(-1, 1.5, 9).reshape(3, 3)))
        self.register_buffer("mean", torch.zeros(3))


def tensors_in(value):
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


def numbers(tensor):
    return tensor.detach().numpy()


def weights_for(outputs):
    return [np.random.default_rng(i).standard_normal(o.shape).astype(np.float32) for i, o in enumerate(outputs)]


def of_torch(module, args):
    """Outputs, the gradients of their weighted sum, and the tensors that the module has afterwards."""
    outputs = tensors_in(module(*args))
    loss = sum(
        (o * torch.tensor(w)).sum() for o, w in zip(outputs, weights_for(outputs), strict=True) if o.requires_grad
    )
    loss.backward()
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in module.named_parameters()}
    after = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return outputs, {n: g for n, g in gradients.items() if after[n].requires_grad}, after


def check(make, *args, train=True, jit=True, written=()):
    """Compares a module on JAX with an equal one in torch; buffers include what forward mutates."""
    module, others = (make().train(train) for _ in range(2))
    before = {name: x.clone() for name, x in module.state_dict().items()}
    net = jaxfn.from_torch(module)
    arrays = [jnp.asarray(x.numpy()) if isinstance(x, torch.Tensor) else x for x in args]
    outputs, gradients, after = of_torch(others, args)
    differentiable = [o.requires_grad for o in outputs]

    def loss(differentiated, buffers):
        parameters, among_buffers = differentiated
        output, buffers = net.apply(parameters, {**buffers, **among_buffers}, *arrays)
        leaves = jax.tree.leaves(output)
        terms = zip(leaves, weights_for(outputs), differentiable, strict=True)
        return sum((y * w).sum() for y, w, has_gradient in terms if has_gradient), (leaves, buffers)

    transformed = jax.value_and_grad(loss, has_aux=True)
    parameters, buffers = net.parameters, net.buffers
    assert set(parameters) == set(gradients)
    among_buffers = {name: parameters.pop(name) for name in written}
    value, slopes = (jax.jit(transformed) if jit else transformed)((parameters, among_buffers), buffers)
    found, moved = value[1]
    slopes = {**slopes[0], **slopes[1]}
    for ours, theirs in zip(found, outputs, strict=True):
        np.testing.assert_allclose(ours, numbers(theirs), rtol=2e-5, atol=2e-5)
    # A bias before a batch norm has a gradient of zero: what is left of it is the rounding of others.
    scale = max(1.0, *(float(theirs.abs().max()) for theirs in gradients.values()))
    for name, theirs in gradients.items():
        np.testing.assert_allclose(slopes[name], numbers(theirs), rtol=1e-4, atol=1e-5 * scale, err_msg=name)
    assert set(moved) == {*buffers, *written}
    for name, ours in moved.items():
        np.testing.assert_allclose(ours, numbers(after[name]), rtol=1e-5, atol=1e-6, err_msg=name)
    for name, x in module.state_dict().items():  # torch's own is as it was
        assert torch.equal(x, before[name])
    held = tensors_in([list(vars(part).values()) for part in module.modules()])
    assert {type(x) for x in held} <= {torch.Tensor, nn.Parameter}
    module(*args)  # and runs
    return net


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "chosen": {"mask": torch.arange(35).reshape(5, 7) % 3 > 0},
    "nothing chosen": {"mask": (torch.arange(35).reshape(5, 7) % 3 > 0) & (torch.arange(5) != 2)[:, None]},
    "added": {"mask": torch.linspace(-1, 1, 70).reshape(2, 1, 5, 7)},
    "nothing left": {"mask": torch.where(torch.arange(5) == 2, -torch.inf, 0.5)[:, None].expand(5, 7)},
    "grouped": {"enable_gqa": True, "heads": 2},
    "narrow values": {"width": 2},
}


class Attention(nn.Module):
    """Attention, whose three arguments depend on a weight in different ways."""

    def __init__(self, mask=None, heads=4, width=3, **options):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1.5, 9).reshape(3, 3))
        self.mask, self.heads, self.width, self.options = mask, heads, width, options

    def forward(self, query, key):
        key = key[:, : self.heads] @ self.w
        mask = self.mask if self.mask is None or self.mask.dtype == torch.bool else self.mask.to(key.dtype)
        value = torch.sin(key[..., : self.width])
        return F.scaled_dot_product_attention(query * self.w[0], key, value, attn_mask=mask, **self.options)


@row("I2")
@cells("name", ["causal", "nothing chosen", "added", "grouped"], ATTENTION)
def test_attention_at_every_order(name, double_precision):
    module = Attention(**ATTENTION[name]).double()
    query, key = torch.sin(torch.arange(120.0).double()).reshape(2, 4, 5, 3), torch.cos(torch.arange(168.0).double())
    key = key.reshape(2, 4, 7, 3)
    direction = torch.cos(torch.arange(9.0).double()).reshape(3, 3)

    def of_torch(w):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # others have no second derivative
            return (torch.func.functional_call(module, {"w": w}, (query, key)) ** 3).sum(-1)

    net = jaxfn.from_torch(module)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key)]

    def of_jax(w, query=arrays[0], key=arrays[1]):
        return (net.apply({"w": w}, {}, query, key)[0] ** 3).sum(-1)

    w = net.parameters["w"]
    slope = torch.autograd.functional.vjp(lambda w: of_torch(w).sum(), module.w.detach())[1]
    curvature = torch.autograd.functional.hvp(lambda w: of_torch(w).sum(), module.w.detach(), direction)[1]
    tangent = torch.autograd.functional.jvp(of_torch, module.w.detach(), direction)[1]
    along = jnp.asarray(direction.numpy())
    values, tangents = jax.jvp(of_jax, (w,), (along,))
    np.testing.assert_allclose(values, numbers(of_torch(module.w)), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(tangents, tangent.numpy(), rtol=1e-9, atol=1e-12)
    gradient = jax.jit(jax.grad(lambda w: of_jax(w).sum()))
    np.testing.assert_allclose(gradient(w), slope.numpy(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(jax.jvp(gradient, (w,), (along,))[1], curvature.numpy(), rtol=1e-9, atol=1e-12)
    if "mask" not in ATTENTION[name] or module.mask.ndim == 2:
        rows = jax.vmap(lambda q, k: of_jax(w, q[None], k[None])[0])(*arrays)
        np.testing.assert_allclose(rows, values, rtol=1e-9, atol=1e-12)


GROUPS = {  # where groups end, and the product of each one
    "rows": ((8, 4), (3, 4, 8), lambda a, b: jnp.concatenate([a[:2] @ b[0], a[2:7] @ b[2], jnp.zeros((1, 8))])),
    "columns": (
        (3, 8, 4),
        (4, 8),
        lambda a, b: jnp.concatenate([a[0] @ b[:, :2], a[2] @ b[:, 2:7], jnp.zeros((8, 1))], 1),
    ),
    "inner": (
        (4, 8),
        (8, 12),
        lambda a, b: jnp.stack([a[:, :2] @ b[:2], jnp.zeros((4, 12)), a[:, 2:7] @ b[2:7]]),
    ),
    "batched": ((3, 5, 4), (3, 4, 8), lambda a, b: a @ b),
}


@row("I4", "H2")
@cells("name", ["rows", "batched"], GROUPS)
def test_products_of_groups_at_every_order(name):
    *shapes, wanted = GROUPS[name]
    offsets = () if name == "batched" else (torch.tensor([2, 2, 7], dtype=torch.int32),)
    ours = jaxfn.from_torch(lambda a, b: torch._grouped_mm(a, b, *offsets))
    a, b = (jnp.sin(jnp.arange(float(np.prod(shape))) ** 1.1).reshape(shape) for shape in shapes)
    tangents = jnp.cos(a), b**2 - 0.3

    def everything(product):
        def slopes(a, b):
            return jax.grad(lambda a, b: (jnp.sin(product(a, b)) * 1.5).sum(), (0, 1))(a, b)

        along = jax.jvp(product, (a, b), tangents)
        return along, jax.jvp(slopes, (a, b), tangents), jax.vmap(slopes, (0, None))(jnp.stack([a, a + 0.5]), b)

    found = jax.jit(lambda: everything(ours))()
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(everything(wanted)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@row("I3")
@pytest.mark.parametrize(
    ("compiled", "other", "message"),
    [
        (lambda x: x[9], torch.nonzero, "nonzero"),  # a mistake of the code's own says less
        (torch.nonzero, lambda x: x[9], "nonzero"),
        (torch.special.airy_ai, lambda x: x[9], "airy_ai"),
        (torch.special.airy_ai, torch.nonzero, "airy_ai"),
    ],
)
def test_code_that_fails_whether_or_not_it_is_compiled(compiled, other, message):
    def code(x):
        return (compiled if torch.compiler.is_compiling() else other)(x)

    with pytest.raises(TranslationError, match=message):
        jaxfn.from_torch(code)(numbers(X))


@row("H9", "I2")
def test_another_attention_replaces_torchs():
    """A fused kernel, where the device has one."""
    used = []

    def attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        used.append(is_causal)
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        found = jax.nn.dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)
        return jnp.swapaxes(found, 1, 2)

    module = Attention(is_causal=True)
    net = jaxfn.from_torch(module, ops={F.scaled_dot_product_attention: attention})
    query, key = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 7, 3)
    arrays = [jnp.asarray(x.numpy()) for x in (query, key)]
    expected = module(query, key)
    expected.square().sum().backward()
    slope = jax.grad(lambda p: (net.apply(p, {}, *arrays)[0] ** 2).sum())(net.parameters)
    assert used and all(used)
    np.testing.assert_allclose(net(*arrays), numbers(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(slope["w"], module.w.grad.numpy(), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------------- what code does


def plain(module, x):
    return torch.tanh(x @ module.w)


def with_a_function(module, x):
    return Quantized.apply(x @ Quantized.apply(module.w)) ** 2


def straight_through(module, x):
    y = x @ module.w
    return y + (torch.round(y) - y).detach()


def without_gradients(module, x):
    with torch.no_grad():
        factor = (x @ module.w).sin() + Quantized.apply(x @ module.w)
        module.mean.mul_(0.9).add_(factor.mean(0) * 0.1)
    return (x @ module.w) * factor + module.mean


def detached_three_ways(module, x):
    y, z = x @ module.w, x @ module.w
    leaf = y.detach().requires_grad_()
    z.detach_()
    return (y * 2) * leaf + (y * 3) * z + (y * 5) * module.w.data.sum()


def buffer_assigned(module, x):
    module.mean = module.mean * 0.5 + x.mean(0)
    return x @ module.w + module.mean


def step_inside(module, x):
    (slope,) = torch.autograd.grad(((x @ module.w) ** 2).sum(), module.w, create_graph=True)
    return x @ (module.w - 0.1 * slope)


def hooks_of_a_weight_and_of_a_result(module, x):
    module.w.register_hook(lambda gradient: gradient.clamp(-0.5, 0.5))
    y = x @ module.w
    y.register_hook(lambda gradient: None)  # it only looks
    return y**2


def views_written(module, x):
    y = x @ module.w
    y[:, 0] = y[:, 1] * 2
    y[1:].mul_(3)
    return y.relu_()


def gradients_asked_for(module, x):
    y = x @ module.w
    y.retain_grad()
    return y * 2 if torch.is_grad_enabled() and y.requires_grad and module.w.requires_grad else y


def data_written(module, x):
    module.w.data.clamp_(-0.5, 0.5)
    return (x @ module.w) ** 2


def rows_written_without_gradients(module, x):
    with torch.no_grad():
        module.w[0].mul_(3)
        module.w[:, 1] = 0.5
    y = x @ module.w
    with torch.no_grad():
        y.view(-1)[2:7].mul_(2)
        y[y > 1] = 0.25
    return y.mul_(3) ** 2


def detached_and_written(module, x):
    y = x * 3
    detached, row = y.detach(), y.data[0]
    detached.clamp_(-1, 1)
    y.mul_(2)
    row.add_(1)
    return (y**2 * detached * row) @ module.w


def data_exchanged_and_stored(module, x):
    original = module.w.data
    module.w.data = module.w.data.sign()
    y = x @ module.w
    module.w.data = original
    return y @ original


def detached_and_grown(module, x):
    y = (x @ module.w).detach()
    y += x @ module.w
    y[0] = (x @ module.w)[1]
    return y**2


def data_of_a_buffer_written(module, x):
    module.mean.data.mul_(0.5).copy_((x @ module.w).mean(0))
    return x @ module.w + module.mean


DETACH, METHOD = torch.detach, torch.Tensor.detach  # taken before anything is traced
LIBRARY = torch.library.Library("jaxfn_test_modules", "FRAGMENT")
for kind, detached in {
    "taken": lambda x: DETACH(x),
    "method": lambda x: METHOD(x),
    "aten": lambda x: torch.ops.aten.detach.default(x),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "detach_": lambda x: x.clone().detach_(),
    "function": lambda x: torch.detach(x),
}.items():
    LIBRARY.define(f"times_{kind}(Tensor x) -> Tensor")
    LIBRARY.impl(f"times_{kind}", lambda x, detached=detached: x * detached(x), "CompositeImplicitAutograd")


def library_operations_that_detach(module, x):
    ops = torch.ops.jaxfn_test_modules
    y = x @ module.w
    here = y * torch.ops.aten.detach(y) * 17
    of_references = ops.times_taken(y) * 7 + ops.times_method(y) * 11 + ops.times_aten(y) * 13 + here
    return (
        ops.times_detach(y) + ops.times_data(y) * 2 + ops.times_detach_(y) * 3 + ops.times_function(y) * 5
    ) + of_references


def twice_with_a_hook(x):
    y = x * 2
    y.register_hook(lambda gradient: gradient * 7)
    return y * 3


LIBRARY.define("hooked(Tensor x) -> Tensor")
LIBRARY.impl("hooked", twice_with_a_hook, "CompositeImplicitAutograd")


def library_operations_with_hooks(module, x):
    return torch.ops.jaxfn_test_modules.hooked(x @ torch.ops.jaxfn_test_modules.hooked(module.w))


def nodes_of_autograds_graph_looked_at(module, x):
    y = x @ module.w
    node, other = y.grad_fn, (y * 2).grad_fn.next_functions[0][0]
    assert node == other and {node} == {other} and isinstance(node, torch.autograd.graph.Node)
    assert node.name() == "MmBackward0" and x.grad_fn is None
    edge = torch.autograd.graph.get_gradient_edge(y)
    return torch.autograd.grad((y**3).sum(), edge, create_graph=True)[0]


def data_written_before_and_after_what_needs_no_values(module, x):
    y = x @ module.w
    z = y.clone() * y.clone() + y
    y.data.mul_(3)
    module.mean.data.add_(1)
    return z + y * module.mean


def data_exchanged_and_written(module, x):
    module.w.data = module.w.data.sign()
    module.w.data.mul_(0.5)
    constant = torch.zeros(3)
    constant.data = torch.arange(3.0)
    return (x @ module.w) ** 2 * constant


def integers_read(module, x):
    ones = torch.ones_like((x @ module.w).argmax(-1))
    assert ones.all() and int(ones.new_full((5000,), 3).max()) == 3
    indices = torch.zeros_like(ones)
    indices[1] = 2
    return (x @ module.w)[indices]


def checks_left_out_of_a_trace(module, x):
    if not torch.compiler.is_compiling():
        assert not x.isnan().any()
    return x @ module.w


def another_operation_in_a_trace(module, x):
    """Computes another operation in a trace, as transformers' mixtures of experts do."""
    y = x @ module.w
    return torch.special.airy_ai(y) if torch.compiler.is_compiling() else y.sin()


def mistaken_in_a_trace(module, x):
    """Has a bug that shows in a trace, as transformers' Switch Transformer has."""
    mask = None if torch.compiler.is_compiling() else torch.ones(4, 1)
    return (x @ module.w) * mask[:3].sum()


def seeded_and_not_drawn(module, x):
    """Sets a seed and draws nothing, as transformers' Reformer does."""
    torch.manual_seed(int(torch.seed() % 2**31))
    return x @ module.w


WHAT_CODE_DOES = [
    plain, with_a_function, straight_through, without_gradients, detached_three_ways, buffer_assigned, step_inside,
    hooks_of_a_weight_and_of_a_result, views_written, gradients_asked_for, data_written,
    rows_written_without_gradients, detached_and_written, data_exchanged_and_stored, detached_and_grown,
    data_of_a_buffer_written, data_exchanged_and_written, data_written_before_and_after_what_needs_no_values,
    library_operations_that_detach, library_operations_with_hooks, nodes_of_autograds_graph_looked_at,
    integers_read, checks_left_out_of_a_trace, another_operation_in_a_trace, mistaken_in_a_trace,
    seeded_and_not_drawn,
]  # fmt: skip
WRITES_TO_W = [data_written, rows_written_without_gradients, data_exchanged_and_written]


@row("I2", "I3")
@pytest.mark.parametrize("forward", WHAT_CODE_DOES)
def test_gradients_are_torchs_whatever_the_code_does(forward):
    check(lambda: Weighted(forward), X, jit=forward is not plain, written=["w"] if forward in WRITES_TO_W else [])


@row("I2")
@pytest.mark.parametrize("forward", WRITES_TO_W)
def test_values_that_would_be_lost_raise(forward):
    net, x = jaxfn.from_torch(Weighted(forward)), jnp.asarray(X.numpy())
    with pytest.raises(TranslationError, match=r"(?s)Weighted mutates w in forward.*\{\*\*buffers, 'w': array\}"):
        jax.jit(net.apply)(net.parameters, net.buffers, x)
    np.testing.assert_allclose(net(x), numbers(Weighted(forward)(X)), rtol=1e-5, atol=1e-6)  # which writes to nothing


@row("I2")
def test_a_target_network_moves_where_it_is_frozen():
    def make(frozen):
        torch.manual_seed(0)

        def averaged(module, x):
            with torch.no_grad():
                for old, new in zip(module.target.parameters(), module.online.parameters(), strict=True):
                    old.lerp_(new, 0.25)
            return module.online(x) - module.target(x)

        module = Weighted(averaged)
        module.online, module.target = nn.Linear(3, 2), nn.Linear(3, 2)
        module.target.requires_grad_(not frozen)
        return module

    check(lambda: make(frozen=True), X)
    net = jaxfn.from_torch(make(frozen=False))
    with pytest.raises(TranslationError, match="mutates target.bias, target.weight in forward.*requires_grad_"):
        net.apply(net.parameters, net.buffers, jnp.asarray(X.numpy()))


@row("I2", "I3")
@pytest.mark.parametrize("forward", [with_a_function, rows_written_without_gradients, detached_and_written])
def test_second_derivatives_go_by_the_rules_of_Functions_and_not_by_what_autograd_does_not_see(forward):
    module, other = Weighted(forward), Weighted(forward)
    net = jaxfn.from_torch(module)
    x = X.clone().requires_grad_()
    slopes = torch.autograd.grad(other(x).sum(), (other.w, x), create_graph=True)
    expected = torch.autograd.grad(sum((g**2).sum() for g in slopes), (other.w, x))

    def total(w, x):
        if forward in WRITES_TO_W:
            return net.apply({}, {**net.buffers, "w": w}, x)[0].sum()
        return net.apply({"w": w}, net.buffers, x)[0].sum()

    def squares(w, x):
        return sum((g**2).sum() for g in jax.grad(total, (0, 1))(w, x))

    arrays = net.parameters["w"], jnp.asarray(X.numpy())
    for ours, theirs in zip(jax.grad(total, (0, 1))(*arrays), slopes, strict=True):
        np.testing.assert_allclose(ours, numbers(theirs), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(jax.grad(squares, (0, 1))(*arrays), expected, strict=True):
        np.testing.assert_allclose(ours, numbers(theirs), rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))


@row("I2")
def test_straight_through_in_a_function_of_torch():
    def loss(logits, weights, hard):
        return (F.gumbel_softmax(logits, hard=hard) * weights).sum()

    arguments = jnp.array([0.3, -0.2, 0.9]), jnp.array([1.0, 2.0, -3.0])
    grad = jax.grad(jaxfn.from_torch(loss))
    soft = grad(*arguments, False, key=jax.random.key(3))
    np.testing.assert_allclose(grad(*arguments, True, key=jax.random.key(3)), soft, rtol=1e-6)
    assert np.abs(soft).max() > 1e-3


def hook_afterwards(module, x):
    y = x @ module.w
    z = y * 2
    y.register_hook(lambda gradient: gradient * 7)
    return y * z


def hook_removed(module, x):
    y = x @ module.w
    y.register_hook(lambda gradient: gradient * 7).remove()
    return y


def two_hooks(module, x):
    y = x @ module.w
    y.register_hook(lambda gradient: gradient * 7)
    y.register_hook(lambda gradient: gradient + 1)
    return y


def a_parameter_in_a_closure(module, x):
    return module.closure((x @ module.w)[:3])


def frozen_inside(module, x):
    module.w.requires_grad = False
    y = x @ module.w
    module.w.requires_grad = True
    return y + x @ module.w


def hook_of_a_node(module, x):
    y = (x @ module.w) ** 2
    y.grad_fn.register_prehook(lambda gradients: tuple(g * 7 for g in gradients))
    return y


def hook_of_a_further_node(module, x):
    y = (x @ module.w) ** 2
    y.grad_fn.next_functions[0][0].register_hook(lambda inputs, outputs: None)
    return y


def hook_of_a_gradient_that_is_there(module, x):
    module.w.register_post_accumulate_grad_hook(lambda w: None)
    return x @ module.w


REGISTER = torch.Tensor.register_hook  # taken before anything is traced


def hooked_in_a_kernel(x):
    y = x * 2
    REGISTER(y, lambda gradient: gradient * 7)
    return y


LIBRARY.define("hooked_by_a_reference(Tensor x) -> Tensor")
LIBRARY.impl("hooked_by_a_reference", hooked_in_a_kernel, "CompositeImplicitAutograd")


def hook_in_a_kernel(module, x):
    return torch.ops.jaxfn_test_modules.hooked_by_a_reference(x @ module.w)


def data_of_another_written(module, x):
    other = x.T @ x
    module.w.data = other
    other.mul_(3)
    return x @ module.w


def data_of_a_buffer_that_is_written(module, x):
    constant = torch.ones(3)
    constant.data = module.mean.data
    with torch.no_grad():
        constant.add_(2)
    return x @ module.w + module.mean


def data_of_a_saved_tensor_written(module, x):
    y = x @ module.w
    z = y * y
    y.data.mul_(2)
    return z


def data_of_a_saved_parameter_exchanged(module, x):
    y = (x @ module.w) @ module.w
    module.w.data = module.w.data.sign()
    return y


def data_saved_by_a_function_written(module, x):
    y = x @ module.w
    z = Quantized.apply(y)
    y.data.mul_(2)
    return z


def hooks_of_saved_tensors(module, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return (x @ module.w) ** 2


@row("I2")
@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize(
    "forward, message",
    [
        (hook_afterwards, "was used before"),
        (hook_removed, "removes a hook"),
        (hooks_of_saved_tensors, "saved_tensors_hooks"),
        (two_hooks, "a second hook"),
        (a_parameter_in_a_closure, "parameter or buffer 'w'"),
        (frozen_inside, "freeze it before"),
        (hook_of_a_node, "`grad_fn`, PowBackward0.*tensor.register_hook.*in hook_of_a_node"),
        (hook_of_a_further_node, "`grad_fn`, MmBackward0"),
        (hook_of_a_gradient_that_is_there, "Use `register_hook`"),
        (hook_in_a_kernel, "Register a hook on the tensor.*in hooked_in_a_kernel"),
        (data_of_another_written, r"Assign a copy: `tensor.data = other.clone\(\)`.*in data_of_another_written"),
        (data_of_a_buffer_that_is_written, "storage of two tensors"),
        (data_of_a_saved_tensor_written, r"saved for backward.*`tensor.clone\(\)`.*in data_of_a_saved_tensor_written"),
        (data_of_a_saved_parameter_exchanged, "saved for backward"),
        (data_saved_by_a_function_written, "saved for backward"),
    ],
)
def test_gradients_that_would_be_others_raise(forward, message):
    module = Weighted(forward)
    module.closure = functools.partial(torch.mul, module.w)
    net = jaxfn.from_torch(module)
    with pytest.raises(TranslationError, match=f"(?s){message}"):
        jax.grad(lambda parameters: net.apply(parameters, net.buffers, jnp.asarray(X.numpy()))[0].sum())(net.parameters)


@row("I2")
@pytest.mark.usefixtures("few_objects")
def test_gradients_by_arguments_raise_where_only_those_would_be_others():
    net = jaxfn.from_torch(Weighted(data_exchanged_and_stored))
    x = jnp.asarray(X.numpy())
    slopes, _ = jax.vjp(net, x)
    values, _ = jax.jit(net.apply)(net.parameters, net.buffers, x)
    np.testing.assert_array_equal(slopes, values)  # computing it is right
    with pytest.raises(TranslationError, match="(?s)only parameters can be.*in data_exchanged_and_stored"):
        jax.grad(lambda x: net(x).sum())(x)


def jacobian_inside(create_graph):
    def forward(module, x):
        return torch.autograd.functional.jacobian(lambda a: (a @ module.w) ** 3, x, create_graph).sum((0, 1)) + x

    return forward


def vjp_inside(module, x):
    return torch.autograd.functional.vjp(lambda a: (a @ module.w) ** 3, x, x, create_graph=True)


def hvp_inside(module, x):
    return torch.autograd.functional.hvp(lambda a: ((a @ module.w) ** 3).sum(), x, x, create_graph=True)


@row("I2")
@pytest.mark.parametrize("forward", [jacobian_inside(True), jacobian_inside(False), vjp_inside, hvp_inside])
def test_gradients_by_arguments_through_gradients_inside(forward):
    module = Weighted(forward)
    net, x = jaxfn.from_torch(Weighted(forward)), X.clone().requires_grad_()
    outputs = tensors_in(module(x))
    weights = weights_for(outputs)
    loss = sum((o * torch.tensor(w)).sum() for o, w in zip(outputs, weights, strict=True))
    wanted = torch.autograd.grad(loss, (module.w, x), materialize_grads=True, allow_unused=True)

    def ours(w, x):
        leaves = jax.tree.leaves(net.apply({"w": w}, net.buffers, x)[0])
        return sum((y * w).sum() for y, w in zip(leaves, weights, strict=True))

    for got, theirs in zip(jax.grad(ours, (0, 1))(net.parameters["w"], jnp.asarray(X.numpy())), wanted, strict=True):
        expected = numbers(theirs)
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max() + 1e-6)


@row("I2")
def test_parameters_stored_in_containers_are_those_of_the_call():
    def make():
        module = Weighted(lambda module, x: x @ module.stored["w"][0] + module.stored["mean"])
        module.stored = {"w": [module.w], "mean": module.mean}
        return module

    check(make, X)


@row("I2")
def test_hooks_of_the_gradients_that_parameters_have_raise():
    module = nn.Linear(3, 2)
    module.weight.register_post_accumulate_grad_hook(lambda weight: None)
    with pytest.raises(TranslationError, match="Linear: weight has a hook that torch calls after it stored `.grad`"):
        jaxfn.from_torch(module)(jnp.ones((4, 3)))


@row("I4")
@pytest.mark.parametrize(
    "register, hook",
    [
        ("register_module_forward_hook", lambda module, inputs, output: output * 2),
        ("register_module_forward_pre_hook", lambda module, inputs: (inputs[0] * 2,)),
    ],
)
def test_hooks_of_all_modules_are_those_of_the_call(register, hook):
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh()))()
    net, x = jaxfn.from_torch(module), jnp.asarray(X.numpy())
    before = net(x)
    handle = getattr(nn.modules.module, register)(hook)
    np.testing.assert_allclose(net(x), numbers(module(X)), rtol=1e-5)
    assert (net(x) != before).any()
    handle.remove()
    np.testing.assert_array_equal(net(x), before)


@row("I4")
def test_parts_and_functions_that_were_exchanged_are_those_of_the_call():
    module = Weighted(lambda module, x: module.layer(x @ module.w))
    net, x = jaxfn.from_torch(module), jnp.asarray(X.numpy())
    for i in range(8):  # where the one that was there before lay in memory
        module.layer = None
        module.layer = [nn.Tanh, nn.Sigmoid, nn.Softsign][i % 3]()
        np.testing.assert_allclose(net(x), numbers(module(X)), rtol=1e-5, atol=1e-6)
    for i in range(8):
        module.run = None
        module.run = lambda module, x, i=i: x * i
        np.testing.assert_allclose(net(x), i * X, rtol=1e-6)


# ------------------------------------------------------------------------------------------------------ torch's modules


def seeded(make):
    def build():
        torch.manual_seed(1)
        return make()

    return build


def tied():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


def frozen():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    return module


def doubling():
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    module[0].register_forward_hook(lambda module, inputs, output: output * 2)
    return module


MODULES = {
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), X),
    "spectral norm": (lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)), X),
    "hook of spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(3, 2)), X),
    "hook of weight norm": (lambda: nn.utils.weight_norm(nn.Linear(3, 2)), X),
    "tied": (tied, X),
    "frozen": (frozen, X),
    "forward hook": (doubling, X),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        torch.linspace(-1, 1, 2 * 2 * 6 * 8).reshape(2, 2, 6, 8).sin(),
    ),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
        torch.linspace(-1, 1, 40).reshape(2, 5, 4).sin(),
    ),
    "embedding, 32 bits": (
        lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)),
        torch.tensor([[0, 1, 2], [3, 0, 8]], dtype=torch.int32),
    ),
}


@row("I2")
@pytest.mark.parametrize(
    "kind, norm", [(nn.Embedding, 1.0), (nn.Embedding, float("inf")), (nn.EmbeddingBag, 2.0), (nn.EmbeddingBag, 3.5)]
)
def test_embeddings_whose_rows_are_renormalized(kind, norm):
    indices = torch.tensor([[0, 1, 2], [3, 0, 8]])
    check(
        seeded(lambda: nn.Sequential(kind(9, 4, max_norm=0.8, norm_type=norm), nn.Linear(4, 2))),
        indices,
        written=["0.weight"],
    )


@row("I1", "I2")
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
@cells(
    "name, train",
    [
        *((name, True) for name in MODULES),
        *((name, False) for name in ["spectral norm", "hook of spectral norm", "convolutions", "transformer"]),
    ],
    MODULES,
    [True, False],
)
def test_modules_of_torch(name, train):
    make, x = MODULES[name]
    check(seeded(make), x, train=train)


class Packed(nn.Module):
    """Sequences of lengths that are not multiples of each other, not sorted, and padded to more than the longest."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [3, 5, 2, 5], batch_first=True, enforce_sorted=False)
        output, state = self.layer(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(output, batch_first=True, total_length=7, padding_value=1.5)
        return padded, state


SEQUENCES = torch.linspace(-3, 3, 4 * 5 * 3).reshape(4, 5, 3).sin()


RECURRENT = {
    "plain": {},
    "no bias, batch first": {"bias": False, "batch_first": True},
    "two layers, two directions": {"num_layers": 2, "bidirectional": True},
    "projections": {"num_layers": 2, "bidirectional": True, "proj_size": 2},
    "relu": {"nonlinearity": "relu"},
}


@row("I2")
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize(
    "kind, options",
    [
        ("LSTM", "no bias, batch first"),
        ("LSTM", "projections"),
        ("GRU", "two layers, two directions"),
        ("RNN", "plain"),
        ("RNN", "relu"),
    ],
)
def test_recurrent_layers(kind, options):
    check(seeded(lambda: getattr(nn, kind)(3, 4, **RECURRENT[options])), SEQUENCES)


@row("I2")
@cells("kind", ["LSTM"], ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_of_one_sequence(kind):
    check(seeded(lambda: getattr(nn, kind)(3, 4)), SEQUENCES[0])


@row("I2")
@cells("kind", ["GRU"], ["LSTM", "GRU", "RNN"])
def test_packed_sequences(kind):
    check(seeded(lambda: Packed(getattr(nn, kind)(3, 4, 2, batch_first=True, bidirectional=True))), SEQUENCES)


def equations(jaxpr):
    for equation in jaxpr.eqns:
        inner = list(jaxprs_in_params(equation.params))
        yield from [equation] if not inner else [e for part in inner for e in equations(part)]


@row("I2")
def test_pooling_makes_no_array_of_all_windows():
    net = jaxfn.from_torch(nn.MaxPool2d(5, 1, 2))
    x = jnp.zeros((2, 3, 20, 20))
    program = jax.make_jaxpr(jax.grad(lambda x: net.apply({}, {}, x)[0].sum()))(x)
    assert max(y.aval.size for e in equations(program.jaxpr) for y in e.outvars) <= 2 * 3 * 24 * 24


@row("I2")
@pytest.mark.parametrize(
    "norm, times", [(nn.BatchNorm2d(3), 4), (nn.LayerNorm((20, 21)), 6), (nn.GroupNorm(3, 3), 6)], ids=repr
)
def test_a_norm_sums_over_its_argument_no_more_than_it_must(norm, times):
    """Sums for mean and variance; in reverse for the mean, the variance, the weight (with the variance's) and the bias.

    Batch norm's mean has its gradient from the sums for weight and bias.
    """
    net = jaxfn.from_torch(norm)
    x = jnp.zeros((2, 3, 20, 21))

    def loss(parameters, x):
        return jnp.vdot(net.apply(parameters, net.buffers, x)[0], x)

    program = jax.make_jaxpr(jax.grad(loss, (0, 1)))(net.parameters, x)
    sums = [e for e in equations(program.jaxpr) if e.primitive.name == "reduce_sum" and e.invars[0].aval.size == x.size]
    assert len(sums) <= times


SECOND_ORDER = {
    "batch norm": (lambda: nn.BatchNorm1d(3, dtype=torch.float64), (5, 3, 4)),
    "batch norm without weights": (lambda: nn.BatchNorm2d(2, affine=False, dtype=torch.float64), (3, 2, 1, 3)),
    "batch norm without statistics": (
        lambda: nn.BatchNorm1d(3, track_running_stats=False, dtype=torch.float64),
        (7, 3),
    ),
    "instance norm": (lambda: nn.InstanceNorm1d(2, affine=True, dtype=torch.float64), (3, 2, 5)),
    "max pool": (lambda: nn.MaxPool2d((3, 2), (2, 1), (1, 0)), (2, 3, 5, 4)),
    "large max pool": (lambda: nn.MaxPool1d(18, 3), (2, 30)),
    "adaptive max pool": (lambda: nn.AdaptiveMaxPool2d((2, 3)), (2, 5, 7)),
    "max pool of one element": (lambda: nn.MaxPool1d(1), (2, 1)),
}


@row("I2", "I3")
@pytest.mark.usefixtures("double_precision")
@cells("name", ["batch norm", "max pool", "large max pool", "adaptive max pool"], SECOND_ORDER)
def test_second_derivatives_of_norms_and_pools(name):
    """Values, what they are multiplied by and their mean, far from zero, all vary."""
    make, shape = SECOND_ORDER[name]
    module, net = make(), jaxfn.from_torch(make())
    x, v = 2 + np.random.default_rng(0).standard_normal((2, *shape))

    def gradient_in_torch(x):
        y = module(x.sin() + x)
        return torch.autograd.grad(((y + 0.3) ** 3).sum(), x, create_graph=True)[0]

    tensor = torch.tensor(x, requires_grad=True)
    wanted = torch.autograd.grad((gradient_in_torch(tensor) * torch.tensor(v)).sum(), tensor)[0]

    def gradient(x):
        def loss(x):
            y, _ = net.apply(net.parameters, net.buffers, jnp.sin(x) + x)
            return ((y + 0.3) ** 3).sum()

        return jax.grad(loss)(x)

    for got in (jax.grad(lambda x: jnp.vdot(gradient(x), v))(x), jax.jvp(gradient, (x,), (v,))[1]):
        np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-9, atol=1e-9)


@row("I2")
def test_a_recurrent_layer_is_one_loop():
    net = jaxfn.from_torch(nn.LSTM(3, 4))
    call = functools.partial(net.apply, net.parameters, {})
    short, long = (str(jax.make_jaxpr(lambda x: call(x)[0][0])(jnp.ones((length, 2, 3)))) for length in (5, 50))
    assert len(re.findall(r"\bscan\[", long)) == 1
    assert long.count("\n") == short.count("\n")


@row("I2")
def test_checkpoints_repeat_their_draws():
    dropout = nn.Dropout(0.5)

    def of_checkpoint(checkpoint):
        def code(x, w):
            y, largest = checkpoint(lambda a, b: (dropout((a @ w).sin()) * b, a.max(0)), x @ w, x + 1)
            return (checkpoint(lambda a: (a @ w).tanh(), y) + largest.values).sum()

        converted = jaxfn.from_torch(code)
        return lambda w: converted(X.numpy(), w, key=jax.random.key(0))

    w = jnp.ones((3, 3))
    expected = jax.grad(of_checkpoint(lambda f, *args: f(*args)))(w)
    taken_before = torch.utils.checkpoint.checkpoint
    for checkpoint in (
        lambda *args: taken_before(*args, use_reentrant=True),
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=True),
        lambda *args: torch.utils.checkpoint.checkpoint(*args, use_reentrant=False),
    ):
        f = of_checkpoint(checkpoint)
        assert len(re.findall(r"\b(remat\d?|checkpoint)\[", str(jax.make_jaxpr(f)(w)))) == 2
        np.testing.assert_allclose(jax.grad(f)(w), expected, rtol=1e-4, atol=1e-5)


@row("I2")
def test_lengths_that_depend_on_arguments_raise():
    packed = jaxfn.from_torch(lambda x, lengths: nn.utils.rnn.pack_padded_sequence(x, lengths).data)
    with pytest.raises(TranslationError, match="lengths depend on the arguments.*Python numbers"):
        packed(jnp.ones((5, 2, 3)), jnp.array([5, 3]))


# ------------------------------------------------------------------------------------------------- what goes in and out


@row("I1")
def test_parameters_and_buffers_by_name():
    module = seeded(lambda: nn.Sequential(tied(), nn.BatchNorm1d(3), frozen()))()
    net = jaxfn.from_torch(module)
    trained = {name for name, x in module.named_parameters() if x.requires_grad}
    assert set(net.parameters) == trained and "0.2.weight" not in trained
    assert set(net.buffers) == {name for name, _ in module.named_buffers()} | {"2.0.weight", "2.0.bias"}
    for name, array in {**net.parameters, **net.buffers}.items():
        np.testing.assert_array_equal(array, numbers(module.state_dict()[name]))
    with pytest.raises(AttributeError, match="parameters"):
        net.parameters = {}


@row("I1")
def test_what_is_missing_or_unknown_is_named():
    net = jaxfn.from_torch(nn.BatchNorm1d(3))
    parameters, buffers, x = net.parameters, net.buffers, jnp.ones((4, 3))
    with pytest.raises(TypeError, match="BatchNorm1d: missing arrays for the parameters or buffers bias. "):
        net.apply({"weight": parameters["weight"]}, buffers, x)
    with pytest.raises(TypeError, match="BatchNorm1d has no parameter or buffer 'scale'"):
        net.apply({**parameters, "scale": x}, buffers, x)
    with pytest.raises(TypeError, match=r"expected an array of shape \(3,\) for weight, got shape \(4, 3\)"):
        net.apply({**parameters, "weight": x}, buffers, x)
    for forgotten in (x, {}):
        with pytest.raises(TypeError, match=r"net\.apply\(net\.parameters, net\.buffers, \.\.\.\)"):
            net.apply(parameters, forgotten, x)
    with pytest.raises(AttributeError, match=r"no attribute 'weight'; the torch module has: net\.torch_module\.weight"):
        _ = net.weight
    with pytest.raises(TypeError, match="bias is in both the parameters and the buffers"):
        net.apply(parameters, {**buffers, "bias": parameters["bias"]}, x)


@row("I1")
def test_parameters_passed_as_buffers_are_frozen():
    module = Weighted(lambda module, x: x @ module.w if module.w.requires_grad else x)
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    output, buffers = net.apply({}, {**net.parameters, **net.buffers}, x)
    np.testing.assert_array_equal(output, x)
    assert set(buffers) == {"w", "mean"}


class Fields(OrderedDict):
    """A dict that can do more, as outputs of transformers are."""


@dataclasses.dataclass
class Result:
    """Not known to JAX."""

    loss: object
    logits: object = None
    name: str = "result"


Pair = namedtuple("Pair", "a b")


class Cache:
    """Neither."""

    def __init__(self, x):
        self.keys, self.size = [x], 3


OUTPUTS = {
    "tuple": (lambda x: (x, [x + 1]), lambda x: (x, [x + 1])),
    "namedtuple": (lambda x: Pair(x, x + 1), lambda x: Pair(x, x + 1)),
    "dict": (lambda x: {"a": x}, lambda x: {"a": x}),
    "dict of another kind": (lambda x: Fields(a=x, b=None, c=(x,)), lambda x: {"a": x, "c": (x,)}),
    "dataclass": (lambda x: Result(x), lambda x: {"loss": x}),
    "in a tuple": (lambda x: (Result(x), None), lambda x: ({"loss": x}, None)),
    "object": (lambda x: (x, Cache(x)), lambda x: (x, {"keys": [x]})),
    "of torch": (lambda x: x.max(0), lambda x: (x.max(0), x.argmax(0))),
}


@row("I2", "I6")
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_a_structure_that_jax_knows(name):
    function, expected = OUTPUTS[name]
    x = jnp.asarray(X.numpy())
    net = jaxfn.from_torch(Weighted(lambda module, x: function(x)))
    for call in (lambda x: net.apply(net.parameters, net.buffers, x)[0], jaxfn.from_torch(function)):
        got = jax.jit(lambda x, call=call: call(x))(x)
        assert jax.tree.structure(got) == jax.tree.structure(expected(x))
        jax.tree.map(np.testing.assert_array_equal, got, expected(x))


# ------------------------------------------------------------------------------------------------------- modes and keys


@row("I4")
def test_the_mode_is_that_of_the_call():
    module = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5)))()
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    with pytest.raises(TranslationError, match=r"Sequential.*key=jax.random.key"):
        net(x)
    dropped = [net(x, key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert (dropped[0] == dropped[1]).all() and (dropped[0] != dropped[2]).any()
    stored = dropped[0] != 0
    np.testing.assert_allclose(dropped[0][stored], 2 * numbers(module[0](X))[stored], rtol=1e-5)
    np.testing.assert_allclose(net.as_eval()(x), numbers(module.eval()(X)), rtol=1e-5)
    module.train()
    assert (net(x, key=jax.random.key(0)) == dropped[0]).all()
    module[1].p = 0.0
    np.testing.assert_allclose(net(x, key=jax.random.key(0)), numbers(module[0](X)), rtol=1e-5)


@row("I4")
def test_a_parameter_of_forward_that_is_called_key():
    attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x = jnp.ones((2, 5, 4))
    output, _ = jaxfn.from_torch(attention)(x, key=x, value=x, jax_key=jax.random.key(0))
    assert output.shape == (2, 5, 4)


@row("I4")
def test_dropout_between_recurrent_layers():
    net = jaxfn.from_torch(nn.LSTM(3, 4, 2, dropout=0.5))
    x = jnp.asarray(SEQUENCES.numpy())
    first, again, other = (net(x, key=jax.random.key(seed))[0] for seed in (0, 0, 1))
    assert (first == again).all() and (first != other).any()


# ------------------------------------------------------------------------------------------------------ transformations


def module_of_all():
    function = Net(lambda self, x: Quantized.apply(x) * torch.tanh(x))
    return seeded(lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), function, nn.Linear(5, 2)))()


@row("I2")
@pytest.mark.parametrize("name", ["jit", "checkpoint", "vmap", "scan", "cond"])
def test_derivatives_in_every_context(name):
    module = module_of_all()
    net = jaxfn.from_torch(module)
    buffers, x = net.buffers, jnp.asarray(X.numpy())
    _, expected, _ = of_torch(module, (X,))
    (weights,) = weights_for([torch.zeros(4, 2)])

    def loss(*arrays):
        parameters = dict(zip(net.parameters, arrays, strict=True))
        return (net.apply(parameters, buffers, x)[0] * weights).sum()

    arrays = tuple(net.parameters.values())
    slopes = jax.grad(CONTEXTS[name](loss), range(len(arrays)))(*arrays)
    for key, ours in zip(net.parameters, slopes, strict=True):
        np.testing.assert_allclose(ours, numbers(expected[key]), rtol=1e-3, atol=1e-5, err_msg=key)


@row("I2")
def test_two_batches_at_once():
    module = module_of_all().eval()
    net = jaxfn.from_torch(module)
    batches = jnp.stack([jnp.asarray(X.numpy()), 1 - jnp.asarray(X.numpy())], axis=1)
    output, _ = jax.vmap(net.apply, (None, None, 1), (1, None))(net.parameters, net.buffers, batches)
    for i, x in enumerate((X, 1 - X)):
        np.testing.assert_allclose(output[:, i], numbers(module(x)), rtol=1e-4, atol=1e-6)


@row("I3")
def test_forward_mode_of_a_module_and_of_a_function_inside():
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output * 2

        @staticmethod
        def jvp(ctx, tangent):
            return tangent * 3

    net = jaxfn.from_torch(Weighted(lambda module, x: Tripled.apply(x @ module.w)))
    x, buffers, parameters = jnp.asarray(X.numpy()), net.buffers, net.parameters
    f = functools.partial(lambda p: net.apply(p, buffers, x)[0].sum())
    tangents = jax.tree.map(jnp.ones_like, parameters)
    _, pushed = jax.jvp(f, (parameters,), (tangents,))
    np.testing.assert_allclose(pushed, 3 * 3 * x.sum(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(jax.grad(f)(parameters)["w"], 2 * x.sum(0)[:, None] * np.ones((3, 3)), rtol=1e-5)


@row("I1")
def test_a_converted_module_is_a_constant_of_a_jitted_function():
    net = jaxfn.from_torch(Weighted(plain))
    traces = []

    @jax.jit
    def step(parameters, x):
        traces.append(None)
        return net.apply(parameters, {"mean": jnp.zeros(3)}, x)[0]

    @functools.partial(jax.jit, static_argnums=0)
    def called(net, parameters, x):
        traces.append(None)
        return net.apply(parameters, net.buffers, x)[0]

    for _ in range(2):
        step(net.parameters, jnp.ones((4, 3)))
        called(net, net.parameters, jnp.ones((4, 3)))
    assert len(traces) == 2


@row("I2")
def test_threads_trace_one_module():
    x = jnp.asarray(X.numpy())
    expected, net = jaxfn.from_torch(module_of_all())(x), jaxfn.from_torch(module_of_all())
    together = threading.Barrier(4)

    def call(length):
        together.wait()
        return net(jnp.concatenate([x] * length))[:4]

    with ThreadPoolExecutor(4) as threads:
        for output in threads.map(call, (1, 1, 2, 3)):  # the statistics of a batch are those of its copies
            np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ back into torch


@row("I7")
def test_weights_go_back_into_torch():
    module = module_of_all()
    net = jaxfn.from_torch(module)
    x = jnp.asarray(X.numpy())
    parameters = jax.tree.map(lambda p: p * 0.5 + 1, net.parameters)
    _, buffers = net.apply(parameters, net.buffers, x)
    net.load(parameters, buffers)
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose({**parameters, **buffers}[name], numbers(tensor), rtol=1e-6)
    np.testing.assert_allclose(net.as_eval()(x), numbers(module.eval()(X)), rtol=1e-4, atol=1e-5)
    with pytest.raises(TypeError, match="has no parameter or buffer 'nothing'"):
        net.load({"nothing": x})


@row("I2", "I3")
def test_the_code_runs_once_for_its_shapes():
    """Eagerly, under jit and in every derivative, in whatever order the parameters' dict is."""
    note, runs = noting_runs()

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            note("forward")
            return x.round()

        @staticmethod
        def backward(ctx, grad_output):
            note("backward")
            return grad_output

    def forward(module, x):
        note("module")
        return Counted.apply(x @ module.w) * module.z

    module = Weighted(forward)
    module.z = nn.Parameter(torch.ones(3))
    module.a = nn.Parameter(torch.ones(3))
    net = jaxfn.from_torch(module)
    parameters, buffers = net.parameters, net.buffers

    def loss(parameters, x):
        return net.apply(parameters, buffers, x)[0].sum()

    x = jnp.asarray(X.numpy())
    net(x)
    loss(parameters, x)
    jax.grad(loss)(parameters, x)
    jax.jit(jax.grad(loss, (0, 1)))(dict(reversed(parameters.items())), x)
    jax.vmap(jax.grad(loss), (None, 0))(parameters, x[None])
    assert runs == ["module", "forward", "backward"]
    net(jnp.ones((5, 3)))
    assert runs.count("module") == 2


@row("I6")
@pytest.mark.parametrize(
    "function", [F.gelu, torch.sin, torch.nn.functional.linear, functools.partial(torch.add, alpha=3)]
)
def test_compiled_functions_have_no_signature(function):
    args = [X] if function in (F.gelu, torch.sin) else [X, X]
    got = jaxfn.from_torch(function)(*[jnp.asarray(x.numpy()) for x in args])
    np.testing.assert_allclose(got, function(*args), rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError):
        jaxfn.from_torch(function)(jnp.ones(3), wrong=1)


def is_fine(x):
    """A check, as libraries have them: it only warns or raises."""
    if x.isnan().any():
        warnings.warn("NaN", stacklevel=2)
    assert (x < 100).all()


class Asking(nn.Module):
    """Reads values in three lines: of a function, a method and forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def scaled(self, x):
        return x * 2 if x.sum() > 0 else -x

    def forward(self, x):
        is_fine(x)
        return self.scaled(Quantized.apply(self.linear(x))) * self.factor(x)

    def factor(self, x):
        return 3


class AskingMore(Asking):
    def factor(self, x):
        return int(x.abs().max())


@row("I7")
def test_every_line_that_reads_a_value_is_reported_at_once():
    net = jaxfn.from_torch(nn.Sequential(AskingMore(), AskingMore()))
    with pytest.raises(TranslationError) as caught:
        net(jnp.ones((4, 3)))
    explanation = jaxfn.explain(net, jnp.ones((4, 3)))
    lines = [(location.line.text, location.line.callable) for location in explanation.values_needed]
    here = f"{__name__}."
    assert lines == [
        ("if x.isnan().any():", f"{here}is_fine"),
        ("assert (x < 100).all()", f"{here}is_fine"),
        ("return x * 2 if x.sum() > 0 else -x", f"{here}Asking.scaled"),
        ("return int(x.abs().max())", f"{here}AskingMore.factor"),
    ]
    assert not explanation.is_supported
    for text, name in lines:
        assert text in str(caught.value) and f"ops={{{name}: jax_function}}" in str(caught.value)
        assert text in str(explanation)


@row("I7")
def test_functions_and_methods_that_ask_for_values_are_replaced():
    """A check is dropped by a function that returns nothing."""
    module = Asking()
    ops = {
        is_fine: lambda x: None,
        Asking.scaled: lambda self, x: jnp.where(x.sum() > 0, x * 2, -x),
    }
    net = jaxfn.from_torch(module, ops=ops)
    gradients = jax.grad(lambda p: net.apply(p, {}, jnp.asarray(X.numpy()))[0].sum())(net.parameters)
    module(X).sum().backward()
    for name, parameter in module.named_parameters():
        np.testing.assert_allclose(gradients[name], parameter.grad, rtol=1e-5)


@row("I7")
def test_explain_lists_the_functions_in_it():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return Quantized.apply(x) * 2

        jvp = backward = staticmethod(lambda ctx, gradient: gradient * 2)

    class Fixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x + 1

    net = jaxfn.from_torch(Weighted(lambda module, x: Fixed.apply(Twice.apply(Quantized.apply(x @ module.w)))))
    found = {f.name: (f.times, f.rules) for f in jaxfn.explain(net, jnp.ones((4, 3))).parts[0].functions}
    assert jaxfn.explain(net, jnp.ones((4, 3))).is_supported
    assert "aten.mm.default" in jaxfn.explain(net, jnp.ones((4, 3))).parts[0].operations
    assert found == {"Fixed": (1, ()), "Twice": (1, ("backward", "jvp")), "Quantized": (2, ("backward",))}


def unsupported_inside(module, x):
    return torch.special.airy_ai(x @ module.w)


@row("I7")
def test_an_operation_without_a_translation_names_the_function_around_it():
    net = jaxfn.from_torch(Weighted(unsupported_inside))
    (entry,) = jaxfn.explain(net, jnp.ones((4, 3))).parts[0].unsupported
    assert entry.callable == f"{__name__}.unsupported_inside"
    with pytest.raises(TranslationError, match=re.escape(f"in {__name__}.unsupported_inside")):
        net(jnp.ones((4, 3)))


def make_potential():
    """A buffer that is empty until the module has seen an argument."""

    def forward(self, x):
        if self.potential.shape != x.shape:
            self.potential = torch.zeros_like(x)
        self.potential = self.decay * self.potential + x
        return self.potential

    module = Net(forward, decay=nn.Parameter(torch.tensor(0.7)))
    module.register_buffer("potential", torch.zeros(0))
    return module


@row("I2", "I7")
def test_a_buffer_that_gets_its_shape_by_the_first_call():
    theirs, net = make_potential(), jaxfn.from_torch(make_potential())
    buffers = net.buffers
    for i in range(3):
        output, buffers = jax.jit(net.apply)(net.parameters, buffers, (i + 1) * jnp.asarray(X.numpy()))
        np.testing.assert_allclose(output, numbers(theirs((i + 1) * X)), rtol=1e-6)
    net.load({}, buffers)
    np.testing.assert_allclose(numbers(net.torch_module.potential), numbers(theirs.potential), rtol=1e-6)
    np.testing.assert_allclose(net(jnp.asarray(X.numpy())), numbers(theirs(X)), rtol=1e-6)
    with pytest.raises(TypeError, match="expected an array of shape"):
        net.apply(net.parameters, {"potential": jnp.ones((5, 3))}, jnp.asarray(X.numpy()))


# ------------------------------------------------------------------------------------------------------------ functions


def squared_distance(a, b, *, scale=2.0):
    """A loss."""
    with torch.no_grad():
        norm = (a**2).sum()
    return Quantized.apply((a - b) * scale).pow(2).mean() / norm


@row("I6")
@pytest.mark.parametrize("bound", [False, True], ids=["function", "partial"])
def test_functions_of_tensors(bound, scale=3.0):
    function = functools.partial(squared_distance, scale=scale) if bound else squared_distance
    ours = jaxfn.from_torch(function)
    options = {} if bound else {"scale": scale}
    a, b = X.clone().requires_grad_(), (X.flip(0) * 0.3).requires_grad_()
    value = function(a, b, **options)
    wanted = torch.autograd.grad(value, (a, b))
    x, y = jnp.asarray(numbers(a)), jnp.asarray(numbers(b))
    got, slopes = jax.value_and_grad(lambda x, y: ours(x, y, **options), (0, 1))(x, y)
    np.testing.assert_allclose(got, numbers(value), rtol=1e-5)
    for g, w in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-6)
    assert ours.__name__ == "squared_distance" and ours.__doc__ == "A loss."


@row("I6")
def test_functions_that_draw_and_what_they_close_over():
    def sampler(mean):
        return mean + torch.randn(mean.shape)

    sample = jaxfn.from_torch(sampler)
    with pytest.raises(TranslationError, match=r"sampler.*sampler\(\.\.\., key="):
        sample(jnp.zeros(3))
    draws = [sample(jnp.zeros(3), key=jax.random.key(seed)) for seed in (0, 0, 1)]
    assert (draws[0] == draws[1]).all() and (draws[0] != draws[2]).any()
    factor = [2.0]
    scaled = jaxfn.from_torch(lambda x: x * factor[0])
    assert scaled(jnp.ones(())) == 2
    factor[0] = 3.0
    assert scaled(jnp.ones(())) == 3


class Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        self.last = x.shape
        return x * self.factor if self.training else -x


class Unregistered(nn.Module):
    """Has modules that torch does not register, and itself, in containers and a plain object."""

    def __init__(self):
        super().__init__()
        self.listed, self.table = [Scale(2.0), self], {"a": (Scale(3.0),)}
        self.plain = types.SimpleNamespace(inner=nn.Sequential(Scale(5.0)))

    def forward(self, x):
        return self.listed[0](x) + 10 * self.table["a"][0](x) + 100 * self.plain.inner(x)


@row("I2", "I4")
def test_attributes_of_modules_that_are_not_registered_are_read_and_restored():
    module = Unregistered()
    net = jaxfn.from_torch(module)
    changes = {
        "nothing": lambda: None,
        "in a list": lambda: setattr(module.listed[0], "factor", 7.0),
        "mode": lambda: module.table["a"][0].eval(),
        "in an object": lambda: setattr(module.plain.inner[0], "factor", 0.5),
        "a part": lambda: module.plain.inner.append(Scale(0.25)),
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*changes the attribute last of listed")
        for name, change in changes.items():
            change()
            got = net.apply(net.parameters, net.buffers, jnp.ones(2))[0]
            assert not hasattr(module.listed[0], "last") and not hasattr(module.plain.inner[0], "last"), name
            np.testing.assert_array_equal(got, module(torch.ones(2)), name)
            del module.listed[0].last, module.plain.inner[0].last


@row("I4")
def test_numbers_in_attributes_are_distinguished_by_type_and_sign():
    module = Scale(1)
    net = jaxfn.from_torch(module)
    integers = torch.arange(3)
    for factor in (1, 1.0, True, 0.0, -0.0):
        module.factor = factor
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*changes the attribute last")
            got = net(jnp.arange(3))
        wanted = module(integers)
        assert jnp.issubdtype(got.dtype, jnp.floating) == wanted.is_floating_point()
        np.testing.assert_array_equal(jnp.signbit(got.astype(float)), torch.signbit(wanted.float()))


READ = types.ModuleType("read")
NUMBERS, TENSOR = [2.0], torch.tensor(2.0)


class Numbers:
    value = 2.0


def by_global(x):
    return x * NUMBERS[0]


def by_function(x):
    return (lambda y: [by_global][0](y))(x)


def by_tensor(x):
    return x * TENSOR


def by_class(x):
    return x * Numbers.value


def by_module(x):
    return x * READ.value


def by_attribute(x):
    return x * by_attribute.value


def by_default(x, factor=NUMBERS):
    return x * factor[0]


def set_numbers(value):
    NUMBERS[0] = Numbers.value = READ.value = by_attribute.value = value
    TENSOR.fill_(value)


@row("I6")
@pytest.mark.parametrize(
    "function",
    [by_global, by_function, by_tensor, by_class, by_module, by_attribute, by_default, Numbers],
    ids=lambda function: function.__name__,
)
def test_a_function_reads_what_may_change_in_every_call(function):
    if function is Numbers:
        local = NUMBERS
        function = functools.partial(lambda x, y: x * local[0] + y, y=TENSOR)
    converted = jaxfn.from_torch(function)
    for value in (2.0, 3.0, 0.0, -0.0):
        set_numbers(value)
        got, expected = converted(jnp.full(2, 5.0)), function(torch.full((2,), 5.0))
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(jnp.signbit(got), torch.signbit(expected))


def traced_aloud(x, factor=3.0):
    print("traced")
    return torch.sin(x) * NUMBERS[0] * factor * TENSOR


@row("I6")
def test_a_function_is_traced_once_for_equal_shapes_and_captured_values(capsys):
    set_numbers(2.0)
    converted = jaxfn.from_torch(traced_aloud)
    for call in (converted, converted, jax.jit(converted), jax.grad(lambda x: converted(x).sum())):
        call(jnp.ones(2))
    jax.vmap(converted)(jnp.ones((3, 2)))
    assert capsys.readouterr().out.count("traced") == 1
    converted(jnp.ones(3))
    converted(jnp.ones(2), factor=2.0)
    set_numbers(7.0)
    converted(jnp.ones(2))
    assert capsys.readouterr().out.count("traced") == 3


@row("I6")
@pytest.mark.parametrize("wrong", [3, nn.Linear, "relu", None], ids=repr)
def test_what_is_neither_raises(wrong):
    with pytest.raises(TypeError, match="expected torch code: a subclass of torch.autograd.Function, a torch"):
        jaxfn.from_torch(wrong)


class Every2nd(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.as_strided((4,), (2,)).clone()

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return torch.zeros_like(w).as_strided_scatter(grad, (4,), (2,))


class ReadsMemoryOfSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w)
        return w.sum()

    @staticmethod
    def backward(ctx, grad):
        (w,) = ctx.saved_tensors
        return grad * w.as_strided((4,), (2,)).sum() * torch.ones_like(w)


READS_MEMORY = {
    "directly": (
        lambda self, x: (self.w * x).as_strided((4,), (2,)).sum(),
        r"as_strided.*'w'.*channels_last.*contiguous\(\).*in <lambda>",
    ),
    "in forward": (lambda self, x: (Every2nd.apply(self.w) * x[0]).sum(), "Every2nd.*as_strided.*'w'.*channels_last"),
    "in backward": (
        lambda self, x: (ReadsMemoryOfSaved.apply(self.w) * x[0]).sum(),
        "ReadsMemoryOfSaved.*as_strided.*'w'.*channels_last",
    ),
}


@row("I2")
@pytest.mark.parametrize("name", READS_MEMORY)
def test_memory_of_a_parameter_is_read_only_where_it_is_in_JAXs_order(name):
    """Results take the order over from their operands; that of a parameter is not known to JAX."""
    run, message = READS_MEMORY[name]
    x = np.ones(4, np.float32)
    module = Net(run, w=nn.Parameter(torch.arange(24.0).reshape(1, 2, 3, 4)))
    net = jaxfn.from_torch(module)
    expected = module(torch.tensor(x))
    expected.backward()

    def value_and_gradients(net):
        return jax.value_and_grad(lambda p: net.apply(p, {}, x)[0])(net.parameters)

    value, gradients = value_and_gradients(net)
    assert value == expected.item()
    np.testing.assert_array_equal(gradients["w"], module.w.grad)
    module.w.data = module.w.data.contiguous(memory_format=torch.channels_last)
    assert module(torch.tensor(x)) != expected or name == "in backward"
    for failing in (net, jaxfn.from_torch(module)):
        with pytest.raises(TranslationError, match=f"(?s){message}"):
            value_and_gradients(failing)
    module.w.data = module.w.data.contiguous()
    assert value_and_gradients(net)[0] == expected.item()


class ReturnsTransposed(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: (2 * x).t())
    backward = staticmethod(lambda ctx, gradient: 2 * gradient.t())


class StoresTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.t())
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return grad * y.as_strided((3, 4), (4, 1))


# What is read, from which memory.
IN_ANOTHER_ORDER = {
    "a transposed argument": lambda x: Every2nd.apply(x.t()),
    "an argument in channels_last": lambda x: Every2nd.apply(
        x.reshape(1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    ),
    "a part of a tensor": lambda x: Every2nd.apply(x[1:]),
    "what a Function returns": lambda x: ReturnsTransposed.apply(x).as_strided((4,), (2,)),
    "what depends on that": lambda x: (ReturnsTransposed.apply(x) + 1).as_strided((4,), (2,)),
    "what a Function saves": StoresTransposed.apply,
}


@row("I2")
@pytest.mark.parametrize("read", IN_ANOTHER_ORDER.values(), ids=IN_ANOTHER_ORDER)
def test_memory_in_another_order_is_not_read_across_a_Function(read):
    """Arguments and results of a Function have no preferred strides."""
    net = jaxfn.from_torch(lambda x: read(x).sum())
    with pytest.raises(TranslationError, match=r"as_strided.*tensor.*transposed, or a part.*contiguous"):
        jax.grad(net)(np.arange(12, dtype=np.float32).reshape(3, 4))


class ReadsMemoryOfGradient(torch.autograd.Function):
    forward = staticmethod(lambda ctx, x: x + 0)
    backward = staticmethod(lambda ctx, gradient: gradient.as_strided((4, 3), (3, 1)))


@row("I2")
def test_memory_is_read_that_does_not_depend_on_what_is_in_another_order():
    """The first two Functions are not applied to the weight; that order comes to the last one with its gradient."""

    def run(self, x):
        y = (ReadsMemoryOfSaved.apply(x) * self.w).sum() + Every2nd.apply(x).sum()
        return y if self.training else y + (ReadsMemoryOfGradient.apply(x) * self.w).sum()

    module = Net(run, w=nn.Parameter(torch.arange(12.0).reshape(3, 4).t()))
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    tensor = torch.tensor(x, requires_grad=True)
    expected = module(tensor)
    net = jaxfn.from_torch(module)
    expected.backward()
    np.testing.assert_allclose(net(x), expected.item())
    np.testing.assert_allclose(jax.grad(net)(x), tensor.grad)
    net = net.as_eval()
    with pytest.raises(TranslationError, match="depend on a gradient, whose strides may come from 'w'"):
        jax.grad(net)(x)


@row("I2")
@pytest.mark.parametrize("name", ["a", "b"])
def test_the_tensor_in_another_order_is_named(name):
    parameters = {key: nn.Parameter(torch.arange(12.0).reshape(3, 4).t()) for key in "ab"}
    module = Net(lambda self, x: Every2nd.apply(getattr(self, name) * x).sum(), **parameters)
    with pytest.raises(
        TranslationError, match=f"Every2nd reads memory by strides .as_strided. that depend on '{name}'"
    ):
        jaxfn.from_torch(module)(np.float32(2))


@torch_functions.scripted
def total(x: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    return x + original


def blend(x, original, tracing=1.0):
    return x * tracing + original


@row("I2")
@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.utils.checkpoint.checkpoint(blend, x, original=x, tracing=3.0, use_reentrant=False),
        lambda x: blend(x, original=x, tracing=3.0),
        lambda x: total(x, original=3 * x),
        lambda x: torch.nn.BatchNorm1d(3, affine=False)(input=x),
        lambda x: torch.detach_(input=2 * x),
    ],
    ids=["checkpoint", "ops", "TorchScript", "BatchNorm", "detach_"],
)
def test_arguments_may_have_any_name(call):
    """Names include those of jaxfn's own functions, which replace what is called."""
    net = jaxfn.from_torch(call, ops={blend: lambda x, original, tracing: x * tracing + original})
    np.testing.assert_allclose(net(X.numpy()), call(X), rtol=1e-5, atol=1e-6)
