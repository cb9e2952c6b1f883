"""`python -m jaxfn`: each command as a process, with right and wrong arguments."""

import importlib.util
import json
import subprocess
import sys
import textwrap
from collections import namedtuple

import numpy as np
import pytest

import jaxfn
from tests.support.marks import row

FUNCTIONS = """
    import jax.numpy as jnp, numpy as np, jaxfn

    def saved(slope):
        def backward(ctx, g):
            return slope * g * ctx.saved_tensors[0]

        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        return jaxfn.autograd_function(forward, backward)

    square, wrong = saved(2), saved(3)
    number = 3.0

    class Square(square.Function):
        pass

    def root(x):
        return jnp.sqrt(-1 - x * x)

    def raising(x):
        raise ValueError("mine")

    def raising_inputs():
        raise TypeError("mine")

    def inputs():
        return (np.linspace(-1, 1, 5),)

    def two(x, y):
        return x * y
"""
TORCH_CODE = """
    import torch

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * g * x

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.round(x)

        @staticmethod
        def backward(ctx, g):
            return g

    def branch(x):
        return x if x.sum().item() > 0 else -x

    def tensors():
        return (torch.linspace(-1, 1, 5, dtype=torch.float64),)

    def row(x):
        return x.unsqueeze(0)
"""
# Runs the commands that it reads, each as it would run in a separate process.
COMMANDS = """
    import contextlib, io, json, sys
    from jaxfn._cli import main

    for command in sys.stdin:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                code = main(json.loads(command))
            except SystemExit as exit:
                code = exit.code
        print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("commands")
    (path / "functions.py").write_text(textwrap.dedent(FUNCTIONS))
    (path / "theirs.py").write_text(textwrap.dedent(TORCH_CODE))
    return path


def run(folder, *arguments):
    command = [sys.executable, "-m", "jaxfn", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


Result = namedtuple("Result", "returncode stdout stderr")


@pytest.fixture(scope="module")
def run_several(folder):
    """Runs commands in one process, which imports JAX and torch once: the exit code and both outputs of each."""
    program = [sys.executable, "-c", textwrap.dedent(COMMANDS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, cwd=folder, text=True, **pipes) as process:

        def run_all(*commands):
            for command in commands:
                print(json.dumps(command), file=process.stdin, flush=True)
                yield Result(*json.loads(process.stdout.readline()))

        yield lambda *commands: list(run_all(*commands))
        process.stdin.close()


@row("L5")
def test_check_says_what_is_wrong_by_its_exit_code_and_as_json(folder):
    right = run(folder, "check", "functions:Square", "--example", "float64[2,3]")
    assert right.returncode == 0 and right.stdout.startswith("check of Square.apply: passed"), right.stderr
    wrong = run(folder, "check", "functions:wrong", "--example", "functions:inputs", "--json")
    report = json.loads(wrong.stdout)
    assert wrong.returncode == 1 and not report["passed"]
    assert report["reports"][0]["mismatches"][0]["mistake"].startswith("a constant factor: 1.5")


WRONG = {
    ("check", "functions:squar", "--example", "float64[3]"): "functions has no squar; did you mean square?",
    ("check", "nowhere:square", "--example", "float64[3]"): "cannot import nowhere",
    ("check", "functions", "--example", "float64[3]"): "not of the form module:name",
    ("check", "functions:number", "--example", "3"): "number is of type float, expected a function",
    ("check", "functions:square"): "arguments are missing",
    ("check", "functions:square", "--example", "float64["): "is not a list of arguments",
    ("check", "functions:square", "--example", "float64(3)"): "float64(3) is neither dtype[sizes] nor a Python value",
    ("check", "./functions.py:square", "--example", "float64[3]"): "of the form module:name: write functions:square",
    ("check", "functions:square", "--example", "float64[3], 2"): ".apply(x): too many positional arguments",
    ("check", "functions:two", "--example", "float64[3]"): "two() missing 1 required positional argument: 'y'",
    ("gradcheck", "functions:square", "--example", "int64[3]"): "at least one floating or complex array",
    ("gradcheck", "functions:square", "--example", "float64[3]", "--surrogate", "functions:two"): "missing 1 required",
    ("kernelcheck", "functions:square", "functions:two", "--example", "float64[3]"): "missing 1 required",
    ("residuals", "functions:square", "--example", "float64[3], 2"): "too many positional arguments",
    ("find_nan", "functions:two", "--example", "float64[3]"): "missing 1 required positional argument: 'y'",
    ("check", "jax.numpy:matmul", "--example", "float64[2,3], float64[2,3]"): "got (3,) and (2,)",
    ("check", "functions:square", "--example", "3", "--example", "4"): "check takes one --example, got 2",
    ("paritycheck", "functions:square", "--example", "float64[3]"): "required: reference",
    ("paritycheck", "functions:square", "missing.npz"): "'missing.npz' is not of the form module:name",
    (
        "paritycheck",
        "functions:square",
        "torch:square",
        "--example",
        "float64[3]",
        "--has-buffers",
    ): "--has-buffers needs --load",
    ("paritycheck", "functions:number", "missing.npz"): "number is of type float, expected a function",
    (
        "paritycheck",
        "functions:square",
        "functions:number",
        "--example",
        "float64[3]",
    ): "number is of type float, expected a function",
    ("dance",): "invalid choice",
}


@row("L5")
def test_wrong_arguments_are_one_line(run_several):
    commands = [[arguments] if isinstance(arguments, str) else arguments for arguments in WRONG]
    for text, (code, out, err) in zip(WRONG.values(), run_several(*commands), strict=True):
        assert code == 2 and out == "" and text in err and len(err.splitlines()) == 1, (text, err)


@row("L5")
def test_torch_code_is_converted(run_several):
    pytest.importorskip("torch")
    example = ("--example", "theirs:tensors")
    right = [
        ("check", "theirs:Square", *example),
        ("residuals", "theirs:Square", *example),
        ("find_nan", "theirs:Square", *example),
        ("kernelcheck", "functions:square", "theirs:Square", "--example", "float32[3]"),
        ("check", "functions:square", *example),
    ]
    wrong = [
        ("explain", "theirs:Square", "--example", "float32[3], 2"),
        ("paritycheck", "functions:square", "theirs:Square", "--example", "float32[3], float32[3]"),
        ("check", "torch.nn:Linear", "--example", "float64[3]"),
    ]
    codes = [0] * len(right) + [2] * len(wrong)
    *results, function = run_several(*right, *wrong, ("check", "theirs:row", "--example", "float64[3]"))
    for wanted, (code, _, err) in zip(codes, results, strict=True):
        assert code == wanted, err
    assert function[0] == 1 and "row was called with JAX arrays" in function[2]
    assert "jaxfn.from_torch(row)" in function[2]


@row("L5")
def test_port_keeps_files_and_says_what_its_test_skips(folder, run_several):
    pytest.importorskip("torch")
    command = ("port", "theirs:Round", "--example", "float32[3]", "-o", "rounded.py")
    first, again, forced, *failed = run_several(
        command,
        command,
        (*command, "--force"),
        ("port", "theirs:branch", "--example", "float32[3]", "-o", "branch.py"),
        ("port", "theirs:Round", "--example", "float32[3]", "-o", "no-module.py"),
        ("port", "functions:square", "--example", "float32[3]", "-o", "square.py"),
    )
    for code, out, _ in (first, forced):
        assert code == 0 and "test_gradients of test_rounded.py is skipped: backward is not the derivative" in out
    assert again[0] == 2 and "rounded.py exists. --force replaces it" in again[2]
    reads_value, no_module, not_torch = failed
    assert reads_value[0] == 1 and "Use torch.where" in reads_value[2] and "ops=" not in reads_value[2]
    assert 'theirs.py", line 25, in branch' in reads_value[2]
    assert no_module[0] == 2 and "no-module.py is not a module" in no_module[2]
    assert not_torch[0] == 2 and "already runs on JAX" in not_torch[2] and "from_torch" not in not_torch[2]
    assert not (folder / "branch.py").exists()


@row("L5")
def test_doctor_and_help(folder, run_several):
    found = json.loads(run(folder, "doctor", "--json").stdout)
    assert found["versions"]["jaxfn"] == jaxfn.__version__ and found["devices"]
    by_option, alone, version = run_several(["--help"], [], ["--version"])
    assert "jaxfn check" in by_option.stdout == alone.stdout
    assert version.stdout == f"jaxfn {jaxfn.__version__}\n"


@row("L5")
def test_kernelcheck_residuals_and_find_nan(run_several):
    example = ("--example", "float32[3]")
    kernel, wrong, residuals, no_nan, nan = run_several(
        ("kernelcheck", "functions:square", "functions:Square", *example),
        ("kernelcheck", "functions:wrong", "functions:root", *example),
        ("residuals", "functions:square", *example, "--json"),
        ("find_nan", "functions:square", *example),
        ("find_nan", "functions:root", *example),
    )
    assert kernel.returncode == 0 and kernel.stdout.startswith("kernelcheck of "), kernel.stderr
    assert wrong.returncode == 1 and no_nan.returncode == 0
    assert json.loads(residuals.stdout)["total_bytes"] == 12
    assert nan.returncode == 1 and nan.stdout.startswith("nan first appears in")


@row("L5")
def test_paritycheck_and_explain(run_several):
    pytest.importorskip("torch")
    example = ("--example", "float64[3]")
    right, wrong, explained, unsupported, failed = run_several(
        ("paritycheck", "functions:square", "torch:square", *example),
        ("paritycheck", "functions:wrong", "torch:square", *example),
        ("explain", "torch:square", *example),
        ("explain", "torch:bincount", *example),
        ("explain", "functions:square", *example),
    )
    assert right.returncode == 0 and "paritycheck" in right.stdout, right.stderr
    assert wrong.returncode == unsupported.returncode == 1
    assert explained.returncode == 0 and "aten.pow.Tensor_Scalar" in explained.stdout, explained.stderr
    assert failed.returncode == 2 and "already runs on JAX" in failed.stderr


RAISING = {
    ("check", "functions:raising", "--example", "float64[3]"): "ValueError: mine",
    ("check", "functions:square", "--example", "functions:raising_inputs"): "TypeError: mine",
}
RAISING_NEXT_TO_TORCH = {
    ("paritycheck", "functions:raising", "torch:square", "--example", "functions:inputs"): "ValueError: mine",
}


@row("L5")
def test_an_error_of_the_users_code_is_a_failure(run_several):
    errors = RAISING | (RAISING_NEXT_TO_TORCH if importlib.util.find_spec("torch") else {})
    for text, result in zip(errors.values(), run_several(*errors), strict=True):
        assert result.returncode == 1 and text in result.stderr, result


MODULES = """
    import torch

    torch.manual_seed(0)
    module = torch.nn.BatchNorm1d(3)

    def load(arrays):
        return dict(arrays), {name: arrays[name] for name in ("running_mean", "running_var")}

    def normalize(p, buffers, x, unbiased=4 / 3):
        mean, var = x.mean(0), x.var(0)
        y = (x - mean) / (var + 1e-5) ** 0.5 * p["weight"] + p["bias"]
        new = {"running_mean": mean, "running_var": unbiased * var}
        return y, {name: 0.9 * x + 0.1 * new[name] for name, x in buffers.items()}

    def wrong(p, buffers, x):
        return normalize(p, buffers, x, 1.0)
"""


@row("L5", "H6b")
def test_parity_of_a_module(folder, run_several):
    pytest.importorskip("torch")
    (folder / "modules.py").write_text(textwrap.dedent(MODULES))
    options = ("modules:module", "--load", "modules:load", "--has-buffers", "--example", "float32[4,3]")
    right, wrong = run_several(
        ("paritycheck", "modules:normalize", *options),
        ("paritycheck", "modules:wrong", *options, "--json"),
    )
    assert right.returncode == 0 and "gradient of weight" in right.stdout, right.stderr
    rows = json.loads(wrong.stdout)["rows"]
    assert {row["what"] for row in rows if row["verdict"] != "equal"} == {"buffer running_var"}


TRAINING = """
    import jax.numpy as jnp, optax

    optimizer = optax.sgd(0.1)

    def load(arrays):
        return dict(arrays)

    def loss(p, batch):
        return ((batch @ p["weight"].T + p["bias"]) ** 2).mean()

    def wrong(p, batch):
        return ((batch @ p["weight"].T + p["bias"]) ** 2).sum()
"""


@row("L5", "H7b")
def test_a_recorded_training_job(folder, run_several):
    torch = pytest.importorskip("torch")
    (folder / "training.py").write_text(textwrap.dedent(TRAINING))
    jaxfn.record_reference(
        lambda module, batch: (module(batch) ** 2).mean(),
        [np.linspace(-1, 1, 6).reshape(2, 3)] * 2,
        folder / "job.npz",
        module=torch.nn.Linear(3, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
    )
    options = ("job.npz", "--load", "training:load", "--optimizer", "training:optimizer")
    right, wrong, incomplete = run_several(
        ("trainingcheck", "training:loss", *options),
        ("trainingcheck", "training:wrong", *options, "--json"),
        ("trainingcheck", "training:loss", "job.npz"),
    )
    assert right.returncode == 0 and "by SGD, 2 steps: passed" in right.stdout, right.stderr
    found = json.loads(wrong.stdout)
    assert wrong.returncode == 1 and (found["step"], found["stage"], found["name"]) == (0, "loss", "loss")
    assert incomplete.returncode == 2
