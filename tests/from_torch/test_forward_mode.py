"""H1, D4: a torch Function's own `jvp` through from_torch, beside torch's forward mode."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

torch = pytest.importorskip("torch")
# torch's own forward mode compiles something of its own with it.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")
forward_ad = torch.autograd.forward_ad


class TorchCombined(torch.autograd.Function):
    """Its jvp is deliberately not the derivative, so that a mix-up shows."""

    @staticmethod
    def forward(ctx, x, power, w):
        ctx.power = power
        ctx.save_for_backward(x, w)
        ctx.save_for_forward(w, x.exp())
        sign = x.sign()
        ctx.mark_non_differentiable(sign)
        return x**power * w, sign

    @staticmethod
    def backward(ctx, grad_output, _):
        x, w = ctx.saved_tensors
        return grad_output * w * ctx.power, None, grad_output * x

    @staticmethod
    def jvp(ctx, x_t, power_t, w_t):
        assert power_t is None
        w, exp = ctx.saved_tensors
        return 5 * x_t * exp + w_t * w * ctx.power, None


class TorchSeparate(torch.autograd.Function):
    @staticmethod
    def forward(x, y=None):
        return x.sin() if y is None else x.sin() * y

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, grad_output):
        x, y = ctx.saved_tensors
        return grad_output * x.cos() * (1 if y is None else y), None if y is None else grad_output * x.sin()

    @staticmethod
    def jvp(ctx, x_t, y_t):
        x, _ = ctx.saved_tensors
        tangent = 0
        if x_t is not None:
            tangent = tangent + 7 * x_t * x.cos()
        if y_t is not None:
            tangent = tangent + y_t * x.sin()
        return tangent


X, W = np.array([0.5, -1.0, 2.0], np.float32), np.array([3.0, 1.0, -2.0], np.float32)
DX, DW = np.array([1.0, 2.0, 0.5], np.float32), np.array([-1.0, 0.25, 1.0], np.float32)


def by_torch(function, primals, tangents):
    with forward_ad.dual_level():
        duals = [
            p if t is None else forward_ad.make_dual(torch.from_numpy(p), torch.from_numpy(t))
            for p, t in zip(primals, tangents, strict=True)
        ]
        duals = [torch.from_numpy(d) if isinstance(d, np.ndarray) else d for d in duals]
        outputs = function.apply(*duals)
        output = outputs[0] if isinstance(outputs, tuple) else outputs
        primal, tangent = forward_ad.unpack_dual(output)
    return primal.numpy(), tangent.numpy()


@row("H1", "D4")
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)])
def test_jvp_as_torch(jit, which):
    function = jaxfn.from_torch(TorchCombined)
    tangents = [DX if 0 in which else None, None, DW if 1 in which else None]
    primal, tangent = by_torch(TorchCombined, [X, 3, W], tangents)

    def of_chosen(*chosen):
        args = dict(zip(which, chosen, strict=True))
        return function.apply(args.get(0, X), 3, args.get(1, W))[0]

    def push(*chosen):
        return jax.jvp(of_chosen, chosen, tuple((DX, DW)[i] for i in which))

    ours = (jax.jit(push) if jit else push)(*((X, W)[i] for i in which))
    np.testing.assert_allclose(ours[0], primal, rtol=1e-6)
    np.testing.assert_allclose(ours[1], tangent, rtol=1e-6)


@row("H1", "D4")
def test_reverse_mode_still_uses_backward():
    function = jaxfn.from_torch(TorchCombined)
    x = torch.from_numpy(X).requires_grad_()
    TorchCombined.apply(x, 3, torch.from_numpy(W))[0].sum().backward()
    gradient = jax.grad(lambda x: function.apply(x, 3, W)[0].sum())(X)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-6)


@row("H1", "D4", "B9")
@pytest.mark.parametrize("which", [(0, 1), (0,), (1,)])
def test_undefined_tangents_as_torch(which):
    function = jaxfn.from_torch(TorchSeparate)
    tangents = [DX if 0 in which else None, DW if 1 in which else None]
    _, tangent = by_torch(TorchSeparate, [X, W], tangents)

    def of_chosen(*chosen):
        args = dict(zip(which, chosen, strict=True))
        return function.apply(args.get(0, X), args.get(1, W))

    _, ours = jax.jvp(of_chosen, tuple((X, W)[i] for i in which), tuple((DX, DW)[i] for i in which))
    np.testing.assert_allclose(ours, tangent, rtol=1e-6)


@row("H1", "D7")
def test_hessian_by_both_rules():
    function = jaxfn.from_torch(TorchSeparate)
    # Forward over reverse: the derivative of backward's own operations, in forward mode.
    hessian = jax.hessian(lambda x: function.apply(x).sum())(X)
    np.testing.assert_allclose(hessian, -np.diag(np.sin(X)), rtol=1e-5, atol=1e-6)
    jacobian = jax.vmap(lambda t: jax.jvp(function.apply, (jnp.asarray(X),), (t,))[1])(jnp.eye(3))
    np.testing.assert_allclose(jacobian, 7 * np.diag(np.cos(X)), rtol=1e-6, atol=1e-6)
