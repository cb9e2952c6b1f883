"""R torch's form: `autograd_function(forward=..., backward=...)`, where inputs and gradients have names.

    python examples/functional.py

The two functions are those of R torch's "Extending autograd" guide, `$` written as a dot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxfn


def linear_forward(ctx, input: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    ctx.save_for_backward(input=input, weight=weight, bias=bias)
    output = input @ weight.T
    if bias is not None:
        output = output + bias
    return output


def linear_backward(ctx, grad_output: jax.Array) -> dict[str, jax.Array | None]:
    s = ctx.saved_variables
    grads: dict[str, jax.Array | None] = {"input": None, "weight": None, "bias": None}
    if ctx.needs_input_grad.input:
        grads["input"] = grad_output @ s.weight
    if ctx.needs_input_grad.weight:
        grads["weight"] = grad_output.T @ s.input
    if s.bias is not None and ctx.needs_input_grad.bias:
        grads["bias"] = grad_output.sum(0)
    return grads


linear = jaxfn.autograd_function(forward=linear_forward, backward=linear_backward)


def mul_constant_forward(ctx, tensor: jax.Array, constant: float) -> jax.Array:
    ctx.save_for_backward(constant=constant)
    return tensor * constant


def mul_constant_backward(ctx, grad_output: jax.Array) -> dict[str, Any]:
    return {"tensor": grad_output * ctx.saved_variables.constant}  # omitted inputs have no gradient


mul_constant = jaxfn.autograd_function(forward=mul_constant_forward, backward=mul_constant_backward)


class Results(NamedTuple):
    arguments: dict[str, jax.Array]  # of linear
    gradients: dict[str, jax.Array]  # of the sum of its squares, by name
    without_bias: dict[str, jax.Array]
    mul_constant: float  # the gradient of 2 x at 1


def sum_of_squares(arguments: dict[str, jax.Array]) -> jax.Array:
    return jnp.sum(linear(**arguments) ** 2)


def main() -> Results:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"input": (4, 3), "weight": (2, 3), "bias": (2,)}
    arguments = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
    gradients = jax.grad(sum_of_squares)(arguments)
    without_bias = jax.grad(sum_of_squares)({"input": arguments["input"], "weight": arguments["weight"]})
    constant = float(jax.grad(mul_constant)(1.0, 2))
    print("linear, gradient of the weight", gradients["weight"], sep="\n")
    print(f"linear, gradient of the bias   {gradients['bias']}")
    print(f"linear without a bias          gradients of {', '.join(without_bias)}")
    print(f"mul_constant(x, 2)             gradient {constant}")
    return Results(arguments, gradients, without_bias, constant)


if __name__ == "__main__":
    main()
