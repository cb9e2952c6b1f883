# pyright: reportUnnecessaryTypeIgnoreComment=true
"""Mistakes that pyright and mypy report: both object to a `type: ignore` that is not needed. Nothing runs this file."""

import jax

import jaxfn
from tests.docs.typed_user import Scale, Square, cube, loss, twice, twice_backward, twice_forward


def calls(x: jax.Array) -> None:
    """Calls that do not fit the signature of `forward`."""
    Scale.apply(x)  # type: ignore[call-arg]
    Scale.apply(x, "2")  # type: ignore[arg-type]
    Scale.apply(x, 2.0, offse=1.0)  # type: ignore[call-arg]
    Square.apply(x).no_such_method()  # type: ignore[attr-defined]
    cube(x, x)  # type: ignore[call-arg]
    cube("x")  # type: ignore[arg-type]
    twice.apply(1)  # type: ignore[arg-type]
    result: str = twice(x)  # type: ignore[assignment]
    loss(result)  # type: ignore[arg-type]


def instances(x: jax.Array) -> None:
    """A Function that is instantiated, and the code below it."""
    Scale(x)  # type: ignore[call-arg]
    after: int = "text"  # type: ignore[assignment]
    loss(after)  # type: ignore[arg-type]


def definitions() -> None:
    """Rules and options that do not exist or are not functions."""
    jaxfn.function(3)  # type: ignore[call-overload]
    jaxfn.function(twice_forward, 3)  # type: ignore[call-overload]
    jaxfn.function(twice_forward, twice_backward, generate_jvp=True)  # type: ignore[call-overload]
    jaxfn.function(twice_forward, vmap=True)  # type: ignore[call-overload]
    cube.backwrad(twice_backward)  # type: ignore[attr-defined]
    cube.backward(3)  # type: ignore[type-var]
    cube.generate_jvp = True  # type: ignore[attr-defined]
    cube.generate_jvp_rule = "yes"  # type: ignore[assignment]
    cube.defvjp(twice_forward, twice_backward)  # type: ignore[attr-defined]
    jaxfn.once_differentiable(3)  # type: ignore[type-var]
    jaxfn.saved_tensors_hooks(1, 2)  # type: ignore[arg-type]
    jaxfn.check_grads(loss)  # type: ignore[attr-defined]
