"""Code of modules, in forward and on gradients, compared with torch (rows I2 to I4)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jaxfn  # noqa: E402
from jaxfn import TranslationError  # noqa: E402
from tests.support.marks import row  # noqa: E402
from tests.support.module_checks import (  # noqa: E402
    Quantized,
    Weighted,
    X,
    check,
    numbers,
    seeded,
    tensors_in,
    weights_for,
)

nn, F = torch.nn, torch.nn.functional


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


def penalty_inside(module, x):
    (slope,) = torch.autograd.grad((x @ module.w).tanh().sum(), x, create_graph=True)
    return (slope**2).sum()


@row("I2", "H15")
@pytest.mark.parametrize(
    "forward", [jacobian_inside(True), jacobian_inside(False), vjp_inside, hvp_inside, penalty_inside]
)
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
