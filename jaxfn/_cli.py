"""The command line: a command for each public function that checks, shows or writes something, and `doctor`."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import jaxfn
from jaxfn._check.arguments import as_arguments, as_function, is_torch_code, parse_example
from jaxfn._diagnostics import ADDED
from jaxfn._reports import first_line

_EXAMPLES = """examples:
  jaxfn check my_package.functions:Linear --example "float64[2,3], float64[4,3], float64[4]"
  jaxfn check my_package.functions:loss --example my_package.functions:example_inputs
  jaxfn kernelcheck my_kernels:softmax jax.nn:softmax --example "float32[4,7]"
  jaxfn paritycheck my_port:Linear their_package:Linear --example "float32[2,3], float32[4,3]"
  jaxfn paritycheck my_port:Linear linear.npz
  jaxfn trainingcheck my_port:loss job.npz --load my_port:load --optimizer my_port:optimizer
  jaxfn find_nan my_package.training:loss --example my_package.training:batch
  jaxfn explain their_package:Linear --example "float32[2,3], float32[4,3]"
  jaxfn port their_package:FocalLoss --example "float32[5,3], int64[5,3] < 2, 2.0" -o focal_loss.py
  jaxfn doctor --json

A name is module:attribute; modules are also found in the current directory. `python -m jaxfn` is the same command. Exit
codes: 0 passed, 1 found something or the code raised, 2 cannot be used so."""
_EXAMPLE = (
    "arguments, as 'float32[3,4], int64[3] < 5, 0.1' (random arrays and Python values), or module:name of them or of a "
    "function that returns them"
)


# Errors without other code on the stack are about the arguments that these were called with.
_LIBRARIES = {"jaxfn", "jax", "jaxlib", "numpy", "torch", "__main__", *sys.stdlib_module_names}


class _UsageError(ValueError):
    """A wrong argument, described in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    try:
        options = _parser().parse_args(argv)
        return options.run(options)
    except Exception as error:
        is_usage = _is_about_arguments(error)
        text = first_line(error) if is_usage else f"{type(error).__name__}: {str(error).rstrip()}"
        print(f"jaxfn: {text}{_torch_hint(error)}", file=sys.stderr)
        return 2 if is_usage else 1


def _is_about_arguments(error: Exception) -> bool:
    """Whether an error was raised by a call of the user's code, and not inside it or about what it returned."""
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_inside = any(module.partition(".")[0] not in _LIBRARIES for module in modules) or ADDED in vars(error)
    return isinstance(error, (TypeError, ValueError, OSError, ImportError)) and not is_inside  # torch may be missing


def _torch_hint(error: Exception) -> str:
    """Returns what to do where an error looks like that of torch code that was passed JAX arrays."""
    is_about_types = isinstance(error, (TypeError, AttributeError))
    for frame, _ in traceback.walk_tb(error.__traceback__) if is_about_types else ():
        name, scope = frame.f_code.co_name, frame.f_globals
        uses_torch = any(isinstance(value, ModuleType) and value.__name__ == "torch" for value in scope.values())
        is_users = scope.get("__name__", "").partition(".")[0] not in _LIBRARIES
        if is_users and uses_torch:
            return f"\n  {name} was called with JAX arrays. Of torch code, name a conversion: jaxfn.from_torch({name})."
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="jaxfn",
        description="Checks Functions, compares ports, explains translations.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxfn {jaxfn.__version__}")

    def print_help(_: Any) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    commands = parser.add_subparsers(metavar="command")
    for name, what in ("check", "everything that needs no reference"), ("gradcheck", "first derivatives"):
        check = _command(commands, name, _check, f"check {what} of a function")
        check.add_argument("function", help="module:name of a Function or a function of arrays")
        check.add_argument("--surrogate", help="module:name of the function whose derivative the rule claims to be")
        _add_example(check)
    kernel = _command(commands, "kernelcheck", _kernelcheck, "compare a kernel's errors with those of a reference")
    kernel.add_argument("function", help="module:name of the kernel")
    kernel.add_argument("reference", help="module:name of the reference, a function of JAX")
    _add_example(kernel)
    parity = _command(commands, "paritycheck", _paritycheck, "compare a port with its torch original")
    parity.add_argument("function", help="module:name of the port")
    parity.add_argument("reference", help="module:name of the torch Function, function or module, or a recorded file")
    parity_load = "module:name of the function from a torch module's arrays to the parameters"
    parity.add_argument("--load", help=parity_load)
    parity.add_argument("--has-buffers", action="store_true", help="--load returns (parameters, buffers)")
    _add_example(parity)
    training = _command(commands, "trainingcheck", _trainingcheck, "compare a training job with a recorded one")
    training.add_argument("function", help="module:name of the loss")
    training.add_argument("reference", help="the file that jaxfn.record_reference wrote of torch's job")
    training.add_argument("--load", required=True, help=parity_load)
    training.add_argument("--optimizer", required=True, help="module:name of an optax optimizer")
    training.add_argument("--has-buffers", action="store_true", help="--load returns (parameters, buffers)")
    residuals = _command(commands, "residuals", _residuals, "list what reverse mode saves for the backward pass")
    find_nan = _command(commands, "find_nan", _find_nan, "find where a NaN or an infinity first appears")
    for inspected in residuals, find_nan:
        inspected.add_argument("function", help="module:name of a Function or a function of arrays")
        _add_example(inspected)
    explain = _command(commands, "explain", _explain, "show the translation of torch code")
    explain.add_argument("function", help="module:name of a torch Function, function or module")
    _add_example(explain)
    port = _command(commands, "port", _port, "rewrite torch code for JAX, with a test")
    port.add_argument("function", help="module:name of a torch Function or function")
    port.add_argument(
        "-o", "--output", required=True, help="file to write; test_FILE and FILE.npz are written next to it"
    )
    port.add_argument("--force", action="store_true", help="replace files that exist")
    _add_example(port)
    _command(commands, "doctor", _doctor, "show versions, and what of jaxfn works with them")
    return parser


def _command(commands: Any, name: str, run: Callable[[Any], int], description: str) -> argparse.ArgumentParser:
    text = f"{description} (jaxfn.{name})" if hasattr(jaxfn, name) else description
    parser = commands.add_parser(name, help=text, description=text.capitalize() + ".")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run, command=name)
    return parser


def _add_example(parser: argparse.ArgumentParser) -> None:
    several = "; several for code with several branches" * parser.prog.endswith(" port")
    parser.add_argument("--example", action="append", default=[], help=_EXAMPLE + several)
    parser.add_argument("--seed", type=int, default=0, help="seed of random arguments (default: 0)")


def _load(name: str) -> Any:
    """Imports `module:attribute`."""
    module_name, _, attribute = name.partition(":")
    if not (module_name and attribute):
        raise _UsageError(f"{name!r} is not of the form module:name")
    if module_name.endswith(".py"):
        raise _UsageError(f"{name!r} is not of the form module:name: write {Path(module_name).stem}:{attribute}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a module may raise anything
        raise _UsageError(f"cannot import {module_name}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = "".join(f"; did you mean {name}?" for name in get_close_matches(part, dir(found), 1))
            raise _UsageError(f"{module_name} has no {attribute}{close}")
        found = getattr(found, part)
    return found


def _callable(name: str) -> Callable[..., Any]:
    """Imports a function of arrays; of a `Function` class it returns `apply`, and of torch code the conversion's."""
    found = _torch_code(name)
    return as_function(jaxfn.from_torch(found) if is_torch_code(found) else found, "this command")


def _torch_code(name: str) -> Any:
    """Imports anything that can be called."""
    found = _load(name)
    if not callable(found):
        raise _UsageError(f"{name} is of type {type(found).__name__}, expected a function")
    return found


def _examples(options: Any) -> list[tuple[Any, ...]]:
    """Returns the arguments of each `--example`."""
    if not options.example:
        raise _UsageError("arguments are missing: pass --example 'float32[3], 2', or --example module:name")
    return [_arguments(text, options.seed) for text in options.example]


def _example(options: Any) -> tuple[Any, ...]:
    """Returns the arguments of the only `--example`."""
    first, *more = _examples(options)
    if more:
        raise _UsageError(f"{options.command} takes one --example, got {len(options.example)}")
    return first


def _conclude(options: Any, report: Any) -> int:
    print(report.to_json() if options.json else report)
    return 0 if report.passed else 1


def _check(options: Any) -> int:
    function = _callable(options.function)
    surrogate = _callable(options.surrogate) if options.surrogate else None
    check = getattr(jaxfn, options.command)
    return _conclude(options, check(function, _example(options), surrogate=surrogate, raise_exception=False))


def _kernelcheck(options: Any) -> int:
    kernel, reference = _callable(options.function), _callable(options.reference)
    return _conclude(options, jaxfn.kernelcheck(kernel, reference, _example(options), raise_exception=False))


def _paritycheck(options: Any) -> int:
    if options.has_buffers and not options.load:
        raise _UsageError("--has-buffers needs --load")
    function = _callable(options.function)
    if Path(options.reference).is_file():
        if options.example:
            raise _UsageError("a recorded file has its own arguments: omit --example")
        reference, inputs = options.reference, None
    else:
        reference, inputs = _torch_code(options.reference), _example(options)
    load = _callable(options.load) if options.load else None
    report = jaxfn.paritycheck(
        function, reference, inputs, load=load, has_buffers=options.has_buffers, raise_exception=False
    )
    return _conclude(options, report)


def _trainingcheck(options: Any) -> int:
    report = jaxfn.trainingcheck(
        _callable(options.function),
        options.reference,
        load=_callable(options.load),
        optimizer=_load(options.optimizer),
        has_buffers=options.has_buffers,
        raise_exception=False,
    )
    return _conclude(options, report)


def _residuals(options: Any) -> int:
    return _conclude(options, jaxfn.residuals(_callable(options.function), *_example(options)))


def _find_nan(options: Any) -> int:
    origin = jaxfn.find_nan(_callable(options.function), *_example(options))
    if origin is None:
        text = "no NaN or infinity reaches a result. For those of a derivative, name one: gradient = jax.grad(f)"
        print("null" if options.json else text)
        return 0
    return _conclude(options, origin)


def _explain(options: Any) -> int:
    return _conclude(options, jaxfn.explain(_load(options.function), *_example(options)))


def _port(options: Any) -> int:
    from jaxfn._port.command import write_port

    code, examples = _load(options.function), _examples(options)
    written = write_port(code, examples, Path(options.output), replace=options.force)
    result = {"files": list(map(str, written.files)), "notes": written.notes}
    print(json.dumps(result) if options.json else "\n".join((*(f"wrote {x}" for x in result["files"]), *written.notes)))
    return 0 if written.passed else 1


def _arguments(text: str, seed: int) -> tuple[Any, ...]:
    """Returns the arguments that a text describes, or that it names: they, or a function that returns them."""
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        try:
            return parse_example(text, seed)
        except ValueError as error:
            raise _UsageError(" ".join(str(error).split())) from error
    found = _load(text)
    return as_arguments(found() if callable(found) else found)


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
        "from_torch, explain, port, paritycheck, trainingcheck": _torch_support()
        if has_torch
        else "no: pip install torch==2.13.0 (the CPU build)",
        "plots of reports": "yes" if versions["matplotlib"] != "not installed" else "no: pip install matplotlib",
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
