"""Results of torch, and the file format for them: a plain `.npz` of arrays and one JSON text."""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxfn._parity.backends import Measurements, Runs
from jaxfn._parity.comparison import expected_ulps
from jaxfn._parity.inputs import Array
from jaxfn._reports import first_line
from jaxfn._version import __version__

if TYPE_CHECKING:
    from jaxfn._port.modules.module_record import ModuleRecord

_RUNS = ("native", "double", "nudged")
_FORMAT = 1


@dataclass(frozen=True)
class TorchResults:
    """The results of torch.

    Attributes:
      name: the name of the function.
      args: its arguments, with NumPy arrays.
      runs: what it returned.
      errors: the errors of torch below double precision, in units of the epsilon, of shape (samples, *shape).
      versions: the versions of torch and NumPy.
      module: what a module computes.
    """

    name: str
    args: tuple[Any, ...]
    runs: Runs
    errors: Measurements
    versions: dict[str, str]
    module: ModuleRecord | None = None

    def ulps(self, what: str) -> Any:
        """Returns the errors to allow since torch has such, in units of the epsilon of a dtype, for each entry."""
        return expected_ulps(self.errors.get(what), self.runs.double.get(what))

    def outputs(self) -> Measurements:
        """Returns the outputs, by names as `output 0`."""
        return {what: array for what, array in self.runs.native.items() if what.startswith("output")}

    def without_derivatives(self) -> TorchResults:
        """Returns the results for the outputs alone."""
        return replace(self, runs=self.runs._replace(native=self.outputs()))


def import_torch(what: str) -> Any:
    """Returns torch.

    Raises:
      ImportError: It is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"jaxfn.{what} runs torch code, and torch is not installed. Run `pip install torch` (the CPU build "
            f"suffices), or call jaxfn.record_reference where it is installed, and pass that file to the check."
        ) from error
    return torch


def torch_versions() -> dict[str, str]:
    """Returns the versions of torch and NumPy."""
    return {"torch": import_torch("record_reference").__version__, "numpy": np.__version__}


def write_torch_results(path: str, found: TorchResults) -> None:
    """Writes results of torch to a file."""
    arrays: dict[str, Array] = {}
    args = [encode_value(arg, f"argument {i}", arrays) for i, arg in enumerate(found.args)]
    results = {name: getattr(found.runs, name) for name in _RUNS} | {"errors": found.errors}
    arrays |= {f"{run}/{what}": array for run, of_run in results.items() for what, array in of_run.items()}
    module = None if found.module is None else encode_value(asdict(found.module), "the module", arrays)
    content = {
        "module": module,
        "name": found.name,
        "args": args,
        "no_second_order": found.runs.no_second_order,
        "no_double": found.runs.no_double,
        "versions": found.versions,
    }
    write_file(path, "paritycheck", content, arrays)


def read_torch_results(path: str) -> TorchResults:
    """Reads results of torch from a file.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It is not a file that `record_reference` wrote of a function or module.
    """
    return read_file(path, "paritycheck", _torch_results)


def write_file(path: str, what: str, content: dict[str, Any], arrays: dict[str, Array]) -> None:
    """Writes what JSON supports, and arrays, to a file for the check `what`."""
    # NumPy's format does not have bfloat16 and float8 types; they are written as bits.
    plain = {name: array.view(f"u{array.itemsize}") if _is_foreign(array) else array for name, array in arrays.items()}
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    text = json.dumps({"format": _FORMAT, "jaxfn": __version__, "check": what, "dtypes": dtypes} | content)
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, content=np.array(text), digest=np.array(_digest(text, plain)), **plain)


def _digest(text: str, arrays: Mapping[str, Array]) -> str:
    """Returns a checksum of everything in a file, by which a change is noticed."""
    digest = hashlib.sha256(text.encode())
    for name in sorted(arrays):
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def read_file(path: str, what: str, decode: Callable[[Any, dict[str, Array]], Any]) -> Any:
    """Reads a file that `write_file` wrote, for the check `what`, and returns what `decode` returns for its content.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It was changed, or `decode` raises.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            text = str(content["content"])
            known = json.loads(text)
            if known.get("format") != _FORMAT:
                raise ValueError(
                    f"its format is {known.get('format')}, which jaxfn {known.get('jaxfn', '(unknown)')} wrote; "
                    f"jaxfn {__version__} reads format {_FORMAT}"
                )
            plain, digest = {name: content[name] for name in known["dtypes"]}, str(content["digest"])
        if _digest(text, plain) != digest:
            raise ValueError("it was changed after it was written")
        if known["check"] != what:
            raise ValueError(f"it is a reference for {known['check']}")
        return decode(known, {name: _with_dtype(array, known["dtypes"][name]) for name, array in plain.items()})
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{what}: {path} cannot be read ({type(error).__name__}: {first_line(error)}). Write it with "
            "jaxfn.record_reference of this version."
        ) from error


def _torch_results(content: Any, arrays: dict[str, Array]) -> TorchResults:
    native, double, nudged, errors = (
        {name.removeprefix(f"{run}/"): x for name, x in arrays.items() if name.startswith(f"{run}/")}
        for run in (*_RUNS, "errors")
    )
    module = content["module"]
    if module is not None:
        from jaxfn._port.modules.module_record import module_record

        module = module_record(decode_value(module, arrays))
    return TorchResults(
        content["name"],
        tuple(decode_value(arg, arrays) for arg in content["args"]),
        Runs(native, double, nudged, content["no_second_order"], content["no_double"]),
        errors,
        content["versions"],
        module,
    )


def _is_foreign(array: Array) -> bool:
    return array.dtype.kind == "V"


def _with_dtype(array: Array, dtype: str) -> Array:
    return array if str(array.dtype) == dtype else array.view(jnp.dtype(dtype))


def encode_value(value: Any, where: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Returns a value as JSON, and adds its arrays to `arrays`.

    Raises:
      TypeError: JSON does not support it. The message names the part, which is in `where`.
    """
    if isinstance(value, np.ndarray):
        name = f"input/{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [encode_value(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode_value(item, f"{where}[{key!r}]", arrays) for key, item in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(
        f"record_reference cannot write {where}, a {type(value).__name__}: it writes arrays, numbers, strings, None, "
        "and lists, tuples and dicts of them. Record a function that has the rest built in."
    )


def decode_value(encoded: Mapping[str, Any], arrays: Mapping[str, Array]) -> Any:
    """Returns the value that `encode_value` encoded."""
    ((kind, content),) = encoded.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {key: decode_value(item, arrays) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [decode_value(item, arrays) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
