"""Errors of code that cannot be translated from torch."""

from __future__ import annotations

from jaxfn._diagnostics import NeedsValuesError


class TranslationError(RuntimeError):
    """A torch Function, module or operation that cannot run on JAX unchanged.

    The message names the operation, the line of torch code, and a fix.
    """


class DataDependentError(TranslationError, NeedsValuesError):
    """Python code reads the concrete value of a traced tensor, which has none."""


class SelectionError(DataDependentError):
    """An operation needs the number of elements that a mask selects."""


class EscapedNumberError(TranslationError):
    """User code stores a number that depends on the values of tensors, and stays traced."""


class EscapedTensorError(TranslationError):
    """A tensor of one trace is used in another one."""
