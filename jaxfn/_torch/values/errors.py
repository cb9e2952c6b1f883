"""The error of everything that cannot be taken over from torch."""

from __future__ import annotations


class TranslationError(RuntimeError):
    """A torch Function, or an operation in it, that cannot run on JAX as it is.

    The message says which operation, where in the torch code, and what to do about it.
    """


class DataDependentError(TranslationError):
    """Python code asks for the value of a tensor, and while JAX traces there is none."""


class EscapedTensorError(TranslationError):
    """A tensor of one trace is used in another one."""
