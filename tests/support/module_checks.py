"""Modules of torch, compared with what from_torch makes of them."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

import jaxfn
from tests.support.torch_code import Net, function_of

nn = torch.nn

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
