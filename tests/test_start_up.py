"""Which libraries each command imports: one that computes nothing loads none that is heavy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from collegium.data.phantoms import make_federation

ROOT = Path(__file__).resolve().parents[1]

HEAVY = {
    "PIL", "SimpleITK", "h5py", "jinja2", "matplotlib", "mlflow", "monai", "nibabel", "numba",
    "numpy", "nvflare", "pandas", "pyarrow", "pydantic", "pydicom", "scipy", "sklearn", "sympy",
    "torch", "yaml",
}  # fmt: skip

LISTED = {"numpy", "pydantic"}
"""What command lines and settings are checked with, and arrays annotated."""

CHECKED = {*LISTED, "yaml"}
TABLES = {*LISTED, "pandas", "pyarrow", "scipy"}
"""Libraries that tables need; verdicts take Student's distribution from scipy."""

FIGURES = {*TABLES, *CHECKED, "PIL", "matplotlib"}
"""matplotlib imports Pillow."""

REPORT = {*FIGURES, "jinja2"}

EXPERIMENT = """\
name: tiny
federation: data/federation.yaml
model: {name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}
algorithms: [local, {name: fedavg, codec: stc}, grace, pfednet]
adapters: [routing, tent, ttt]
rounds: 1
training: {batch_size: 2, local_steps: 1}
output: run
"""


def loaded(folder: Path, *arguments: str) -> set[str]:
    """The heavy libraries that a command imports in a process of its own."""
    code = (
        "import sys\n"
        "from collegium.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.stderr.write('\\n' + ' '.join(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return HEAVY & {name.partition(".")[0] for name in found.stderr.split("\n")[-1].split()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an experiment that may be shown, and the finished run of a part of it."""
    folder = tmp_path_factory.mktemp("start-up")
    make_federation(folder / "data", 2, cases=6, size=32)
    (folder / "x.yaml").write_text(EXPERIMENT)
    network = "model={name: iop_unet, in_channels: 1, base: 4}"
    loaded(folder, "run", "x.yaml", "algorithms=[local,fedavg]", "adapters=[]", network)
    return folder


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--version"], set()),
        (["--help"], set()),
        (["run", "--help"], {"pydantic"}),
        (["list"], LISTED),
        (["list", "adapters"], LISTED),
        (["list", "codecs"], LISTED),
        (["list", "models"], LISTED),
        (["config", "show", "x.yaml"], CHECKED),
        (["inspect", "data/federation.yaml"], {*CHECKED, "PIL"}),
        (["init", "data/federation.yaml", "started.yaml"], {*CHECKED, "PIL", "scipy"}),
        (["tables", "run"], TABLES),
        (["figures", "run", "--format", "svg"], FIGURES),
        (["report", "run"], REPORT),
        (["resume", "run"], REPORT),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_command_that_computes_nothing_loads_no_library_for_it(
    folder: Path, arguments: list[str], allowed: set[str]
):
    assert loaded(folder, *arguments) <= allowed


def test_training_loads_torch(folder: Path):
    arguments = ["algorithms=[local]", "adapters=[]", "output=other"]
    assert "torch" in loaded(folder, "run", "x.yaml", *arguments)


STOPPING = """\
import os, sys, torch
from torch import nn

def network():
    layer = nn.Conv2d(1, 2, 3, padding=1)
    layer.register_forward_pre_hook(stop)
    return layer

def stop(layer, inputs):
    if layer.training and torch.is_grad_enabled():
        sys.stderr.write("\\n" + " ".join(sys.modules))
        sys.stderr.flush()
        os._exit(0)
"""
"""A network that ends the process at its first step."""


def test_the_first_step_waits_for_no_library_of_tables_and_reports(folder: Path):
    (folder / "stopping.py").write_text(STOPPING)
    model = "model={name: stopping.py:network}"
    found = loaded(folder, "run", "x.yaml", model, "algorithms=[fedavg]", "adapters=[]", "output=s")
    assert "torch" in found
    assert found <= {*CHECKED, "PIL", "torch"}
