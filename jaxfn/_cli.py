"""The command line for the public functions: `check`, `parity`, `explain`, `port` and `doctor`."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import jaxfn
from jaxfn._reports import first_line

_EXAMPLES = """examples:
  python -m jaxfn check my_package.functions:Linear --shape 2,3 --shape 4,3 --shape 4
  python -m jaxfn check my_package.functions:loss --inputs my_package.functions:example_inputs
  python -m jaxfn parity my_port:Linear their_package:Linear --shape 2,3 --shape 4,3
  python -m jaxfn parity my_port:Linear linear.npz
  python -m jaxfn explain their_package:Linear --shape 2,3 --shape 4,3 --dtype float32
  python -m jaxfn port their_package:Linear --example "float32[2,3], float32[4,3], None" -o linear.py
  python -m jaxfn doctor --json

A name is module:attribute; modules are also found in the current directory. Exit codes: 0 passed, 1 failed, 2 wrong
arguments."""


class _UsageError(Exception):
    """A wrong argument, described in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        options = _parser().parse_args(argv)
        return options.run(options)
    except _UsageError as error:
        print(f"jaxfn: {first_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:  # raised by the function that is checked
        print(f"jaxfn: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jaxfn",
        description="Checks Functions, compares ports, explains translations.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    check = _command(commands, "check", _check, "check the derivatives of a function (jaxfn.check)")
    check.add_argument("function", help="module:name of a Function or a function of arrays")
    check.add_argument("--surrogate", help="module:name of the function whose derivative the rule claims to be")
    _add_inputs(check, "float64")
    parity = _command(commands, "parity", _parity, "compare a port with its torch original (jaxfn.paritycheck)")
    parity.add_argument("function", help="module:name of the port")
    parity.add_argument("reference", help="module:name of the torch Function, function or module, or a recorded file")
    parity.add_argument("--load", help="module:name of the function from a torch module's arrays to the parameters")
    parity.add_argument("--has-buffers", action="store_true", help="--load returns (parameters, buffers)")
    _add_inputs(parity, "float32")
    explain = _command(commands, "explain", _explain, "show the translation of torch code (jaxfn.explain)")
    explain.add_argument("function", help="module:name of a torch Function, function or module")
    _add_inputs(explain, "float32")
    port = _command(commands, "port", _port, "rewrite torch code for JAX, with a test (jaxfn.port)")
    port.add_argument("function", help="module:name of a torch Function or function")
    port.add_argument(
        "--example",
        action="append",
        required=True,
        help="arguments, as 'float32[3,4], int64[3] < 5, 0.1' (random arrays and Python values), or module:name of "
        "a function that returns a tuple of arguments; several for code with several branches",
    )
    port.add_argument("--seed", type=int, default=0, help="seed of random arguments (default: 0)")
    port.add_argument(
        "-o", "--output", required=True, help="file to write; test_FILE and FILE.npz are written next to it"
    )
    _command(commands, "doctor", _doctor, "show versions, and what of jaxfn works with them")
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], int], description: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=description, description=description.capitalize() + ".")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _add_inputs(parser: argparse.ArgumentParser, dtype: str) -> None:
    parser.add_argument("--shape", action="append", default=[], help="shape of an argument, as 3,4; once per argument")
    parser.add_argument("--dtype", default=dtype, help=f"dtype of these arguments (default: {dtype})")
    parser.add_argument("--inputs", help="module:name of a function that returns a tuple of arguments")
    parser.add_argument("--seed", type=int, default=0, help="seed of random arguments (default: 0)")


def _load(name: str) -> Any:
    """Imports `module:attribute`."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise _UsageError(f"{name!r} is not of the form module:name")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _UsageError(f"cannot import {module_name}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise _UsageError(f"{module_name} has no {attribute}")
        found = getattr(found, part)
    return found


def _callable(name: str) -> Callable[..., Any]:
    """Imports a function; of a `Function` class it returns `apply`."""
    found = _load(name)
    if isinstance(found, type) and issubclass(found, jaxfn.Function):
        return found.apply
    if not callable(found):
        raise _UsageError(f"{name} is a {type(found).__name__}, expected a function")
    return found


def _inputs(options: Any) -> tuple[Any, ...]:
    if options.inputs:
        return _arguments(options.inputs)
    if not options.shape:
        raise _UsageError("arguments are missing: pass --shape once per argument, or --inputs module:name")
    generator = np.random.default_rng(options.seed)
    try:
        shapes = [tuple(int(size) for size in shape.rstrip(",").split(",") if shape) for shape in options.shape]
        dtype = np.dtype(options.dtype)
        if dtype.kind not in "fc":
            raise ValueError(f"{dtype} is not a floating-point or complex dtype")
    except (TypeError, ValueError) as error:
        raise _UsageError(f"--shape takes sizes as 3,4 and --dtype a NumPy dtype: {error}") from error
    if dtype.kind == "c":
        return tuple((generator.standard_normal((*shape, 2)) @ [1, 1j]).astype(dtype) for shape in shapes)
    return tuple(generator.standard_normal(shape).astype(dtype) for shape in shapes)


def _conclude(options: Any, report: Any) -> int:
    print(report.to_json() if options.json else report)
    return 0 if report.passed else 1


def _check(options: Any) -> int:
    function = _callable(options.function)
    surrogate = _callable(options.surrogate) if options.surrogate else None
    return _conclude(options, jaxfn.check(function, _inputs(options), surrogate=surrogate, raise_exception=False))


def _parity(options: Any) -> int:
    if options.has_buffers and not options.load:
        raise _UsageError("--has-buffers needs --load")
    function = _callable(options.function)
    if Path(options.reference).is_file():
        reference, inputs = options.reference, None
    else:
        reference, inputs = _callable(options.reference), _inputs(options)
    load = _callable(options.load) if options.load else None
    report = jaxfn.paritycheck(
        function, reference, inputs, load=load, has_buffers=options.has_buffers, raise_exception=False
    )
    return _conclude(options, report)


def _explain(options: Any) -> int:
    try:
        converted = jaxfn.from_torch(_load(options.function))
    except (ImportError, TypeError) as error:
        raise _UsageError(str(error)) from error
    explanation = jaxfn.explain(converted, *_inputs(options))
    print(json.dumps({"explanation": str(explanation)}) if options.json else explanation)
    return 0 if explanation else 1


def _port(options: Any) -> int:
    port = importlib.import_module("jaxfn._port")
    examples = [_example(text, options.seed, port.parse_example) for text in options.example]
    written = port.write_port(_load(options.function), examples, Path(options.output))
    result = {"files": list(map(str, written.files)), "notes": written.notes}
    print(json.dumps(result) if options.json else "\n".join((*(f"wrote {x}" for x in result["files"]), *written.notes)))
    return 0


def _example(text: str, seed: int, parse: Callable[[str, int], tuple[Any, ...]]) -> tuple[Any, ...]:
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return _arguments(text)
    try:
        return parse(text, seed)
    except ValueError as error:
        raise _UsageError(" ".join(str(error).split())) from error


def _arguments(name: str) -> tuple[Any, ...]:
    """Imports arguments, or a function that returns them."""
    found = _load(name)
    found = found() if callable(found) else found
    return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _doctor(options: Any) -> int:
    versions = {"python": platform.python_version(), "jaxfn": jaxfn.__version__}
    for package in ("jax", "jaxlib", "numpy", "torch", "matplotlib"):
        try:
            versions[package] = importlib.import_module(package).__version__
        except ImportError:
            versions[package] = "not installed"
    devices = [str(device) for device in importlib.import_module("jax").devices()]
    has_torch = versions["torch"] != "not installed"
    works = {
        "Functions, gradcheck, kernelcheck, residuals, find_nan": "yes",
        "from_torch, paritycheck": _torch_support() if has_torch else "no: pip install torch==2.13.0 (the CPU build)",
        "plots of reports": "yes" if versions["matplotlib"] != "not installed" else 'no: pip install "jaxfn[plot]"',
    }
    if options.json:
        print(json.dumps({"versions": versions, "devices": devices, "works": works}, indent=2))
    else:
        lines = [f"{name:10} {version}" for name, version in versions.items()]
        lines += [f"{'devices':10} {', '.join(devices)}", "", *(f"{what}: {answer}" for what, answer in works.items())]
        print("\n".join(lines))
    return 0


def _torch_support() -> str:
    try:
        jaxfn.from_torch(importlib.import_module("torch").sin)
    except Exception as error:  # the message names the version and the reason
        return f"no: {str(error).splitlines()[0]}"
    return "yes"
