"""Many Functions, calls, threads and processes, much memory, and JAX's strict settings (rows A4, B13, J1 and J2)."""

from __future__ import annotations

import copy
import gc
import importlib
import math
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfn
from tests.support.cases import CASES, MulConstant, function_of
from tests.support.marks import EXPERIMENTAL, cells, row, slow
from tests.support.transformations import transform

ROOT = Path(__file__).parents[2]
MAY_CACHE_TRACES = pytest.mark.skipif(EXPERIMENTAL, reason="JAX_CUSTOM_VJP3 caches traces until its caches are full")


def sine(scale: float) -> Callable[..., Any]:
    def pull(saved, g):
        return g * jnp.cos(saved[0]) * scale

    return function_of("backward", lambda x: jnp.sin(x) * scale, None, pull, name="Sine")


@row("J1")
@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=slow)])
def test_many_functions_in_one_trace(count):
    functions = [sine(1 + i / count) for i in range(count)]

    def chain(x):
        for function in functions:
            x = x + function(x) / count
        return x

    value, slope = 0.5, 1.0
    for i in range(count):
        scale = 1 + i / count
        value, slope = value + math.sin(value) * scale / count, slope * (1 + math.cos(value) * scale / count)
    np.testing.assert_allclose(jax.jit(jax.value_and_grad(chain))(0.5), (value, slope), rtol=1e-3)


@row("J1")
@slow
@pytest.mark.parametrize("derivative, calls", [(False, 10_000), pytest.param(True, 300, marks=MAY_CACHE_TRACES)])
def test_eager_calls_leave_nothing_behind(derivative, calls):
    """Calls with another Python number each time, which is part of the cache key of calls."""
    x = jnp.ones(4)

    def run(first, count):
        for i in range(first, first + count):
            scaled = partial(MulConstant.apply, constant=float(i))
            last = jax.grad(lambda x: scaled(x).sum())(x) if derivative else scaled(x)
        gc.collect()
        assert float(last[0]) == first + count - 1
        return len(gc.get_objects())

    before = run(0, 400)  # more than the 256 that are cached
    assert run(1000, calls) < before + 500


@row("J1")
@slow
def test_residuals_of_a_gigabyte_take_as_much_memory_as_hand_written_ones():
    program = """
        import resource, sys
        import jax, jax.numpy as jnp, jaxfn

        class Sine(jaxfn.Function):
            @staticmethod
            def forward(ctx, x):
                y = jnp.sin(x)
                ctx.save_for_backward(x, y)
                return y

            @staticmethod
            def backward(ctx, g):
                x, y = ctx.saved_tensors
                return g * jnp.cos(x) + 0 * y

        hand_written = jax.custom_vjp(jnp.sin)
        hand_written.defvjp(
            lambda x: (y := jnp.sin(x), (x, y)), lambda saved, g: (g * jnp.cos(saved[0]) + 0 * saved[1],)
        )
        f = {"ours": Sine.apply, "hand-written": hand_written}[sys.argv[1]]
        x = jnp.ones(2**26)  # 256 MB; four of them are live
        y, pull = jax.vjp(lambda x: f(f(f(x) * 1.5)), x)
        (gradient,) = pull(y)
        print(float(gradient[3]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    """
    ours, hand_written = (run_python("-c", program, kind).split() for kind in ("ours", "hand-written"))
    assert float(ours[0]) == float(hand_written[0])
    assert 2**20 < int(ours[1]) < 1.1 * int(hand_written[1])


def run_python(*args: str, **environment: str) -> str:
    """Returns what a new Python process prints."""
    args = tuple(textwrap.dedent(arg) if "\n" in arg else arg for arg in args)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stdout


@row("J1", "B13")
def test_32_threads_at_a_time():
    """Threads call one shared Function and one Function for each thread, eagerly, differentiated and compiled."""
    together, wrong = threading.Barrier(32), []

    def work(i):
        function, x = sine(1.0 + i), jnp.arange(3.0) + i
        together.wait()
        for _ in range(2):
            own, shared = function(x), MulConstant.apply(x, float(i))
            gradient = jax.grad(lambda x: (function(x) * MulConstant.apply(x, float(i))).sum())(x)
            first = jax.grad(lambda x: function(x).sum())
            second = jax.grad(lambda x: first(x).sum())(x)
            compiled = jax.jit(first)(x)
            expected = jnp.sin(x) * (1 + i), x * i, i * (1 + i) * (jnp.cos(x) * x + jnp.sin(x))
            expected += jnp.cos(x) * (1 + i), -jnp.sin(x) * (1 + i)
            for got, plain in zip((own, shared, gradient, compiled, second), expected, strict=True):
                if not np.allclose(got, plain, rtol=1e-3, atol=1e-3):
                    wrong.append((i, got, plain))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# What users pickle: everything here is in `__main__`, in a cell of a notebook, or in a function's body.
IN_MAIN = """
    import functools, multiprocessing, os, pickle, sys
    import cloudpickle, jax, jaxfn

    class Square(jaxfn.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x
        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return 2 * x * g

    @jaxfn.function
    def square(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @square.backward
    def _(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g if square is not None else None  # its own name is among its globals

    def forward(ctx, x):
        ctx.save_for_backward(x=x)
        return x * x

    form = jaxfn.autograd_function(forward, lambda ctx, g: {"x": 2 * g * ctx.saved_variables.x})

    def inside():
        factor = 2.0
        class Inner(Square): pass
        @jaxfn.function
        def inner(ctx, x):
            ctx.save_for_backward(x)
            return x * x
        inner.backward(lambda ctx, g: factor * g * ctx.saved_tensors[0])
        return Inner, inner

    Inner, inner = inside()
    exec(compile('''class Cell(Square): pass
    '''.strip(), "<ipython-input-1-0123456789ab>", "exec"))

    def gradient(f):
        return float(jax.grad(getattr(f, "apply", f))(3.0))
"""
NAMED = ["Square", "Square.apply", "square", "square.apply", "Cell", "form"]
ALL = [*NAMED, "Inner", "Inner.apply", "inner", "functools.partial(Square.apply)", "jax.jit(Square.apply)"]


@row("A4")
@slow
def test_pickles_of_what_is_defined_in_main_before_and_after_its_first_use(tmp_path):
    """pickle goes by name, cloudpickle brings what has no name in another process."""
    program = f"""
    for stage in ("before", "after"):
        for text in {NAMED}:
            value = eval(text)
            assert pickle.loads(pickle.dumps(value)) is value, text
        for text in {ALL}:
            value = eval(text)
            with open(os.path.join({str(tmp_path)!r}, f"{{stage}} {{text}}".replace("/", "")), "wb") as file:
                cloudpickle.dump(value, file)
            assert gradient(value) == gradient(cloudpickle.loads(cloudpickle.dumps(value))) == 6.0, text
    """
    run_python("-c", textwrap.dedent(IN_MAIN) + textwrap.dedent(program))
    reader = """
        import os, pickle, sys, jax
        for name in sorted(os.listdir(sys.argv[1])):
            with open(os.path.join(sys.argv[1], name), "rb") as file:
                f = pickle.load(file)
            f = getattr(f, "apply", f)
            assert float(jax.grad(f)(3.0)) == 6.0 and float(jax.jit(f)(3.0)) == 9.0, name
            print(name)
    """
    assert run_python("-c", reader, str(tmp_path)).split("\n")[:-1] == sorted(os.listdir(tmp_path))
    assert len(os.listdir(tmp_path)) == 2 * len(ALL)


@row("A4")
def test_a_functional_form_is_copied_as_a_function_is():
    form = jaxfn.autograd_function(lambda ctx, x: x * x, lambda ctx, g: g)
    assert copy.copy(form) is copy.deepcopy(form) is form
    again = cloudpickle.loads(cloudpickle.dumps(form))
    assert again.__wrapped__(None, 3.0) == 9.0 and again.__name__ == form.__name__ and again.__doc__ == form.__doc__
    with pytest.raises((pickle.PicklingError, AttributeError), match="Can't (pickle|get) local object"):
        pickle.dumps(form)  # no name finds it, as of any lambda


@row("A4")
@slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes(method, tmp_path):
    """Importing jaxfn starts no backend of JAX, so that processes may be forked still."""
    (tmp_path / "functions.py").write_text(textwrap.dedent(IN_MAIN))
    program = f"""
        import multiprocessing, warnings
        import functions

        def main():
            warnings.simplefilter("ignore")  # of threads that importing JAX has started
            with multiprocessing.get_context({method!r}).Pool(2) as pool:
                values = [functions.Square, functions.square, functions.square.apply, functions.form]
                print(pool.map(functions.gradient, values))

        if __name__ == "__main__":
            main()
    """
    path = tmp_path / "main.py"
    path.write_text(textwrap.dedent(program))
    assert run_python(str(path), PYTHONPATH=f"{ROOT}{os.pathsep}{tmp_path}") == "[6.0, 6.0, 6.0, 6.0]\n"


@row("A4")
def test_a_module_that_is_loaded_again(tmp_path, monkeypatch):
    """Objects created before still have their own rule, and a compiled function what it was compiled from."""
    path = tmp_path / "reloaded_functions.py"
    source = (
        "import jaxfn\n@jaxfn.function\ndef scale(ctx, x):\n    return x * 2\nscale.backward(lambda ctx, g: g * 2)\n"
    )
    path.write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("reloaded_functions")
    old, compiled = module.scale, jax.jit(jax.grad(module.scale))
    assert old(1.0) == compiled(1.0) == 2
    path.write_text(source.replace("2", "3"))
    importlib.invalidate_caches()
    module = importlib.reload(module)
    assert (old(1.0), compiled(1.0), jax.grad(old)(1.0)) == (2, 2, 2)
    assert (module.scale(1.0), jax.jit(jax.grad(module.scale))(1.0)) == (3, 3)
    assert pickle.loads(pickle.dumps(module.scale)) is module.scale
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(old)


@row("J2")
@slow
def test_without_asserts_and_with_jaxs_own_checks():
    """`python -O`, in which no check may be an assert, and JAX_ENABLE_CHECKS=1."""
    program = """
        import jax, jax.numpy as jnp, jaxfn
        assert False  # which is not run

        class Square(jaxfn.Function):
            returned = None
            @staticmethod
            def forward(ctx, x, n=2):
                ctx.save_for_backward(x)
                return x * x, n
            @staticmethod
            def backward(ctx, g, _):
                (x,) = ctx.saved_tensors
                return 2 * x * g if Square.returned is None else Square.returned(g)

        def f(x):
            return Square.apply(x)[0]

        print(jax.jit(jax.grad(f))(3.0), jax.grad(jax.grad(f))(3.0), jax.vmap(jax.grad(f))(jnp.ones(2))[1])
        wrong = [lambda g: (g, g, g), lambda g: (g, g), lambda g: 1.0, lambda g: g * 1j]
        for Square.returned in map(staticmethod, wrong):
            try:
                jax.grad(f)(3.0)
                print("silent")
            except (RuntimeError, TypeError) as error:
                print(type(error).__name__, str(error).splitlines()[0].partition(":")[0])
        for call in (Square, lambda: Square.apply(), lambda: Square.apply(1.0, 2, 3)):
            try:
                call()
                print("silent")
            except TypeError as error:
                print("TypeError")
    """
    lines = run_python("-O", "-c", program, JAX_ENABLE_CHECKS="1").splitlines()
    assert lines[0] == "6.0 2.0 2.0"
    assert len(lines) == 8 and not any("silent" in line for line in lines)
    assert all(line.startswith(("RuntimeError Square.backward", "TypeError")) for line in lines[1:])


SETTINGS = {
    "debug_nans": lambda: jax.debug_nans(True),
    "disable_jit": jax.disable_jit,
    "strict dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "checks": lambda: jax.enable_checks(True),
}
EXP = next(case for case in CASES if case.name == "exp")


@row("J2")
@cells(
    "setting, program",
    [
        ("debug_nans", "vjp of grad"),
        ("debug_nans", "vmap of grad"),
        ("disable_jit", "jit of grad of scan"),
        ("disable_jit", "jit of grad of checkpoint by_name"),
        ("strict dtype promotion", "jit of grad"),
        ("strict dtype promotion", "jit of grad of grad of vmap"),
        ("no rank promotion", "jit of grad of vmap of grad"),
        ("no rank promotion", "jit of grad of cond"),
        ("checks", "jit of grad of grad of scan"),
        ("checks", "grad of jit"),
        *[
            pytest.param(setting, program, marks=slow)
            for setting in SETTINGS
            for program in ("jit of grad of grad of grad", "jacrev", "carried scan")
        ],
    ],
)
def test_settings(setting, program):
    expected = transform(program, EXP, EXP.reference)
    with SETTINGS[setting]():
        got = transform(program, EXP, EXP.apply)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@row("J2")
def test_debug_nans_finds_the_nan_of_a_backward():
    nan = jaxfn.autograd_function(lambda ctx, x: x, lambda ctx, g: g * 0 / 0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(jax.grad(nan))(1.0)


@row("J2")
def test_clear_caches_between_uses():
    """Nothing that jaxfn and JAX cache is needed, and a derivative of an earlier trace does not change."""
    f = jax.jit(lambda x: MulConstant.apply(jnp.sin(x), 3.0).sum())
    x = jnp.arange(3.0)
    y, pull = jax.vjp(f, x)
    for _ in range(2):
        jax.clear_caches()
        np.testing.assert_allclose(pull(jnp.ones_like(y))[0], 3 * jnp.cos(x), rtol=1e-6)
        np.testing.assert_allclose(jax.grad(f)(x), 3 * jnp.cos(x), rtol=1e-6)
        np.testing.assert_allclose(MulConstant.apply(x, 3.0), 3 * x)
