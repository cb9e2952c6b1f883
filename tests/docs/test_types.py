"""Signatures that editors show, and users' annotations. The types part of CI checks that pyright accepts them."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import pytest

import jaxfn
from tests.support.marks import row


@pytest.fixture(scope="module")
def typed_user():
    """The module, which checks its derivatives while it is imported."""
    return importlib.import_module("tests.docs.typed_user")


@row("L3")
def test_an_annotated_user_gets_right_derivatives(typed_user):
    assert typed_user.report and typed_user.second_report
    assert typed_user.found is None and typed_user.total > 0
    assert typed_user.backward_alone().tolist() == [3, 3]


def parameters(function):
    return list(inspect.signature(function).parameters)


@row("L3")
def test_apply_has_the_parameters_of_forward_without_the_ctx(typed_user):
    signature = inspect.signature(typed_user.Scale.apply)
    assert list(signature.parameters) == ["x", "scale", "offset"]
    assert signature.parameters["offset"].default == 0.0 and signature.return_annotation is jax.Array
    assert parameters(typed_user.Named.apply) == parameters(typed_user.Square.apply) == ["x"]
    assert parameters(typed_user.cube) == parameters(typed_user.cube.apply) == ["x"]


@row("L3")
def test_a_setup_context_that_is_registered_later():
    @jaxfn.function
    def scaled(x, scale):
        return x * scale

    assert parameters(scaled) == ["scale"]

    @scaled.setup_context
    def _(ctx, inputs, output): ...

    assert parameters(scaled) == parameters(scaled.apply) == ["x", "scale"]


@row("L3")
def test_a_class_that_inherits_forward():
    class Base(jaxfn.Function):
        pass

    class Double(Base):
        @staticmethod
        def forward(ctx, x, *, times=2):
            return x * times

    assert parameters(Double.apply) == ["x", "times"]
    with pytest.raises(NotImplementedError, match="Base defines no forward"):
        Base.apply(1.0)


@row("L3")
def test_jit_knows_the_arguments_by_their_names():
    static = []

    class Scale(jaxfn.Function):
        @staticmethod
        def forward(ctx, x, scale):
            static.append(isinstance(scale, float))
            return x * scale

        @staticmethod
        def backward(ctx, grad_output):
            return grad_output, None

    assert jax.jit(Scale.apply, static_argnames="scale")(jnp.ones(3), 2.0).sum() == 6
    assert jax.jit(Scale.apply, static_argnames="scale")(jnp.ones(3), scale=2.0).sum() == 6
    assert set(static) == {True}  # once or twice: JAX may cache the first trace
