"""The version of jaxfn."""

__version__ = "0.1.0"
