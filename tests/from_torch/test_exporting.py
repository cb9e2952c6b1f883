"""The page on exporting: the gradient of a converted model is loaded where there is neither torch nor jaxfn."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from tests.support.marks import row

torch = pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "exporting.md"
PROGRAM = """
    import sys
    sys.modules["torch"] = sys.modules["jaxfn"] = None  # importing them raises ImportError
    import jax, numpy as np

    loaded = jax.export.deserialize(bytearray(open("forces.bin", "rb").read()))
    parameters, positions = dict(np.load("parameters.npz")), np.load("positions.npy")
    np.save("forces.npy", jax.jit(loaded.call)(parameters, positions))
"""


@row("E1", "I2")
def test_an_exported_gradient_needs_neither_torch_nor_jaxfn(tmp_path):
    page = {"__name__": "exporting"}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], page)
    (tmp_path / "forces.bin").write_bytes(page["blob"])
    positions = np.random.default_rng(1).uniform(0, 1, (5, 3)).astype(np.float32)
    np.savez(tmp_path / "parameters.npz", **{name: 2 * x for name, x in page["net"].parameters.items()})
    np.save(tmp_path / "positions.npy", positions)
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    potential = page["potential"]
    with torch.no_grad():
        for parameter in potential.parameters():
            parameter.mul_(2)
    x = torch.from_numpy(positions).requires_grad_()
    (gradient,) = torch.autograd.grad(potential(x), x)
    np.testing.assert_allclose(np.load(tmp_path / "forces.npy"), -gradient.numpy(), rtol=1e-4, atol=1e-5)
    assert "stablehlo" in page["exported"].mlir_module() and "callback" not in page["exported"].mlir_module()
