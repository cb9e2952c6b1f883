"""`python -m tests.fuzz --programs 2000 --seed 0`: the report, and exit status 1 where there is a disagreement."""

from __future__ import annotations

import argparse
import os
import sys

import jax


def main() -> int:
    """Runs the fuzzer; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=2000, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another series of programs")
    parser.add_argument("--start", type=int, default=0, help="the first program of the series")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no program is begun after these")
    parser.add_argument("--shrinking", type=float, default=20, help="seconds for shrinking one disagreement")
    options = parser.parse_args()
    _compile_quickly()
    from tests.fuzz.report import fuzz

    first = options.seed * 1_000_000 + options.start
    report = fuzz(range(first, first + options.programs), options.seconds, options.shrinking, say=_say)
    print(report.text())
    return 1 if report.disagreements else 0


def _compile_quickly() -> None:
    """Eight virtual devices, and quick compilation; before JAX starts its backend."""
    flags = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
        "--xla_cpu_parallel_codegen_split_count=1 --xla_force_host_platform_device_count=8"
    )
    if jax.__version_info__ < (0, 11):  # later jaxlibs have one way only, and stop at the name
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = f"{flags} {os.environ.get('XLA_FLAGS', '')}"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
