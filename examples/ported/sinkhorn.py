"""examples.ported.originals.Sinkhorn, rewritten for JAX by jaxfn. The license of the original applies."""

import jax
import jax.numpy as jnp

import jaxfn


def _normalize(logits, dim):
    return logits - jax.nn.logsumexp(logits, axis=dim, keepdims=True)


class Sinkhorn(jaxfn.Function):
    """Scales exp(logits) to a doubly stochastic matrix, by alternating normalizations of its rows and columns."""

    @staticmethod
    def forward(ctx, logits, num_steps):
        steps = []
        for _ in range(num_steps):
            rows = _normalize(logits, -1)
            logits = _normalize(rows, -2)
            steps.append((rows, logits))
        ctx.save_for_backward(*[x for step in steps for x in step])
        return jnp.exp(logits)

    @staticmethod
    def backward(ctx, grad_output):
        saved = ctx.saved_tensors
        grad = grad_output * jnp.exp(saved[-1])
        for i in reversed(range(len(saved))):
            # saved[i] is a normalization over columns if i is odd, and over rows if it is even.
            dim = -2 if i % 2 else -1
            grad = grad - jnp.exp(saved[i]) * grad.sum(axis=dim, keepdims=True)
        return grad, None
