"""Results of torch, and the file format for them: a plain `.npz` of arrays and one JSON text."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxfn._parity.backends import Measurements, Runs
from jaxfn._parity.comparison import expected_ulps
from jaxfn._parity.inputs import Array
from jaxfn._parity.module_record import ModuleRecord, module_record
from jaxfn._reports import first_line
from jaxfn._version import __version__

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


def write_torch_results(path: str, found: TorchResults) -> None:
    """Writes results of torch to a file."""
    arrays: dict[str, Array] = {}
    args = [_encoded(arg, f"argument {i}", arrays) for i, arg in enumerate(found.args)]
    results = {name: getattr(found.runs, name) for name in _RUNS} | {"errors": found.errors}
    arrays |= {f"{run}/{what}": array for run, of_run in results.items() for what, array in of_run.items()}
    module = None if found.module is None else _encoded(asdict(found.module), "the module", arrays)
    content = {
        "format": _FORMAT,
        "jaxfn": __version__,
        "module": module,
        "name": found.name,
        "args": args,
        "no_second_order": found.runs.no_second_order,
        "no_double": found.runs.no_double,
        "versions": found.versions,
        # NumPy's format does not have bfloat16 and float8 types; they are written as bits.
        "dtypes": {name: str(array.dtype) for name, array in arrays.items()},
    }
    plain = {name: array.view(f"u{array.itemsize}") if _is_foreign(array) else array for name, array in arrays.items()}
    with open(path, "wb") as file:
        np.savez(file, allow_pickle=False, content=np.array(json.dumps(content)), **plain)


def read_torch_results(path: str) -> TorchResults:
    """Reads results of torch from a file.

    Raises:
      OSError: The file cannot be opened.
      ValueError: It is not a file that `record_reference` wrote, or has no outputs.
    """
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as content:
            found = _read(content)
    except (ValueError, TypeError, KeyError, AttributeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"paritycheck: {path} cannot be read ({type(error).__name__}: {first_line(error)}). Write it with "
            "jaxfn.record_reference of this version."
        ) from error
    if not found.runs.native:
        raise ValueError(f"paritycheck: {path} has no outputs. Write it with jaxfn.record_reference of this version.")
    return found


def _read(file: Any) -> TorchResults:
    content = json.loads(str(file["content"]))
    if content.get("format") != _FORMAT:
        raise ValueError(
            f"its format is {content.get('format')}, which jaxfn {content.get('jaxfn', '(unknown)')} wrote; "
            f"jaxfn {__version__} reads format {_FORMAT}"
        )
    arrays = {name: _with_dtype(file[name], dtype) for name, dtype in content["dtypes"].items()}
    native, double, nudged, errors = (
        {name.removeprefix(f"{run}/"): x for name, x in arrays.items() if name.startswith(f"{run}/")}
        for run in (*_RUNS, "errors")
    )
    return TorchResults(
        content["name"],
        tuple(_decoded(arg, arrays) for arg in content["args"]),
        Runs(native, double, nudged, content["no_second_order"], content["no_double"]),
        errors,
        content["versions"],
        None if content["module"] is None else module_record(_decoded(content["module"], arrays)),
    )


def _is_foreign(array: Array) -> bool:
    return array.dtype.kind == "V"


def _with_dtype(array: Array, dtype: str) -> Array:
    return array if str(array.dtype) == dtype else array.view(jnp.dtype(dtype))


def _encoded(value: Any, where: str, arrays: dict[str, Array]) -> dict[str, Any]:
    """Returns a value as JSON, and adds its arrays to `arrays`."""
    if isinstance(value, np.ndarray):
        name = f"input/{len(arrays)}"
        arrays[name] = value
        return {"array": name}
    if isinstance(value, (tuple, list)):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encoded(item, f"{where}[{i}]", arrays) for i, item in enumerate(value)]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encoded(item, f"{where}[{key!r}]", arrays) for key, item in value.items()}}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    raise TypeError(
        f"record_reference cannot write {where}, a {type(value).__name__}: it writes arrays, numbers, strings, None, "
        "and lists, tuples and dicts of them. Record a function that has the rest built in."
    )


def _decoded(encoded: Mapping[str, Any], arrays: Mapping[str, Array]) -> Any:
    ((kind, content),) = encoded.items()
    if kind == "array":
        return arrays[content]
    if kind == "dict":
        return {key: _decoded(item, arrays) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [_decoded(item, arrays) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content
