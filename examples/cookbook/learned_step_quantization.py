"""Quantization that learns its own step size (LSQ, Esser et al., 2020).

    python examples/cookbook/learned_step_quantization.py

The step trades rounding (finer is better) against clipping (wider is better), and is trained along with the weights.
Why a Function: autodiff's derivative by the step is the codes alone. With rounding as the identity it is codes - x /
step, which depends on the distance of each value from its code.
Claim: from steps four times too small and too large, training finds one whose error is within 2% of the best, and the
rule is the derivative of its surrogate (`gradcheck`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import jaxfn


@jaxfn.function
def quantize(ctx, x: jax.Array, step: jax.Array, bits: int) -> jax.Array:
    """Rounds x to multiples of a learned step, by signed codes of `bits` bits."""
    ctx.save_for_backward(x, step)
    ctx.bits = bits
    return codes_of(x, step, bits)[1] * step


@quantize.backward
def _(ctx, grad_output: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x, step = ctx.saved_tensors
    rounded, codes = codes_of(x, step, ctx.bits)
    reached = rounded == codes
    by_step = jnp.where(reached, codes - x / step, codes)
    return jnp.where(reached, grad_output, 0), jnp.sum(grad_output * by_step), None


def codes_of(x: jax.Array, step: jax.Array, bits: int) -> tuple[jax.Array, jax.Array]:
    """Returns x / step, rounded, and the nearest codes."""
    rounded = jnp.round(x / step)
    return rounded, jnp.clip(rounded, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def surrogate(x: jax.Array, step: jax.Array, bits: int) -> jax.Array:
    """Computes `quantize` with rounding errors, and codes at both ends, as constants: the rule is its derivative."""
    rounded, codes = map(jax.lax.stop_gradient, codes_of(x, step, bits))
    error = jax.lax.stop_gradient(codes - x / step)
    return jnp.where(rounded == codes, x / step + error, codes) * step


def main(bits: int = 3) -> None:
    x = jax.random.normal(jax.random.key(0), (4096,))

    @jax.jit
    def error(step: jax.Array) -> jax.Array:
        return jnp.mean((quantize(x, step, bits) - x) ** 2)

    steps = jnp.linspace(0.05, 2, 1000)
    best = jnp.min(jax.lax.map(error, steps))
    for start in (0.15, 2.0):
        step = jnp.float32(start)
        for _ in range(200):
            step = step - 0.2 * jax.grad(error)(step)
        print(f"step {start} became {step:.3f}, with an error of {error(step):.4f} (the best is {best:.4f})")
        assert error(jnp.float32(start)) > 1.5 * best and error(step) < 1.02 * best
    with jax.enable_x64(True):
        inputs = jnp.array([-2.13, -0.61, 0.07, 0.38, 1.94]), jnp.array(0.45), bits
        assert jaxfn.gradcheck(quantize, inputs, surrogate=surrogate, against="autodiff")


if __name__ == "__main__":
    main()
