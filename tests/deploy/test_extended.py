"""A network that an algorithm extends is predicted with, adapted and exported as a whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from collegium import cli
from collegium.deploy import export_bundle, open_model, open_models, predict_folder
from collegium.experiment.config.building import build_extended_network
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import run_experiment
from collegium.models.files import import_model

pytestmark = pytest.mark.filterwarnings("ignore:NvImgCodecPydicomReader:UserWarning")  # MONAI's

SWAPPED = '''
"""FedPer whose network ends in a layer that exchanges the two classes."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from collegium.algorithms.fedper import FedPer


class Swap(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), requires_grad=False)

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.einsum("oi,bi...->bo...", self.weight, logits)


@dataclass(frozen=True)
class Swapped(FedPer):
    """FedPer (https://arxiv.org/abs/1912.00818) with classes exchanged at the end."""

    def extend(self, module: nn.Module) -> None:
        """Add a layer behind the network's output."""
        module.swap = Swap()
        module.projection = nn.Conv2d(2, 2, 1)  # unused, and now the last convolution there is

        def last(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return module.swap(output)

        module.register_forward_hook(last)
'''
MODEL = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}


def volumes(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for case in range(5):
        label = np.zeros((16, 16, 4), np.uint8)
        label[4:9, 5:12] = 1
        image = rng.normal(size=label.shape) + 3 * label
        for kind, array in (("images", image.astype(np.float32)), ("labels", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            path = folder / kind / f"p{case}.nii.gz"
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of two sites with the algorithm, in a folder with its file and images."""
    folder = tmp_path_factory.mktemp("extended")
    code = folder / "swapped.py"
    code.write_text(SWAPPED)
    for site in ("a", "b"):
        volumes(folder / site)
    config = {
        "name": "swapped",
        "federation": {
            "name": "two", "root": str(folder), "sampling": {"crop": [16, 16]},
            "sites": {s: {"folder": s, "share": ["personal"]} for s in ("a", "b")},
        },
        "model": MODEL,
        "training": {"lr": 0.01, "local_steps": 2, "batch_size": 2},
        "algorithms": [f"{code}:Swapped"],
        "rounds": 1,
        "output": str(folder / "run"),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))
        patch.chdir(folder)
        run_experiment(parse_config(config))
        (folder / "experiment.yaml").write_text(json.dumps({**config, "output": "again"}))
        yield folder / "run"


def masks(folder: Path) -> dict[str, np.ndarray]:
    return {
        path.name: np.asarray(nib.load(path).dataobj)  # type: ignore[attr-defined]
        for path in sorted(folder.glob("*.nii.gz"))
    }


def test_the_head_stays_the_networks_own_and_never_leaves_a_site(run: Path) -> None:
    sent = set()
    for line in (run / "Swapped/seed-0/clients/a/ledger.jsonl").read_text().splitlines():
        entry = json.loads(line)
        sent |= {name for name, *_ in entry["parts"].get("model", {}).get("tensors", [])}
    # the head of MONAI's U-Net is its outermost path up, whatever is added behind it
    assert sent
    assert not {name for name in sent if name.startswith("model.2.")}
    assert {"projection.weight", "projection.bias"} <= sent
    assert "swap.weight" not in sent  # nobody trains it, and both sides have it


def test_a_bundle_marks_what_predict_marks(run: Path, tmp_path: Path) -> None:
    from monai.bundle.workflows import ConfigWorkflow

    opened = open_model(run, site="a")
    predict_folder(opened, run.parent / "a/images", tmp_path / "own")
    bundle = export_bundle(opened, tmp_path / "bundle")
    assert (bundle / "scripts" / "swapped.py").read_text() == SWAPPED
    described = json.loads((bundle / "configs/metadata.json").read_text())
    assert "collegium" in described["required_packages_version"]
    workflow = ConfigWorkflow(
        str(bundle / "configs/inference.json"), str(bundle / "configs/metadata.json"),
        workflow_type="inference", bundle_root=str(bundle), output_dir=str(tmp_path / "monai"),
        dataset_dir=str(run.parent / "a/images"),
    )  # fmt: skip
    workflow.initialize()
    workflow.run()
    workflow.finalize()
    ours, theirs = masks(tmp_path / "own"), masks(tmp_path / "monai")
    assert len(ours) == 5
    assert ours.keys() == theirs.keys()
    for name, mask in ours.items():
        np.testing.assert_array_equal(mask, theirs[name])
    assert 0 < np.mean([mask.mean() for mask in ours.values()]) < 1


def test_predictions_are_those_of_the_extended_network(run: Path, tmp_path: Path) -> None:
    opened = open_model(run, site="a")
    (model,) = opened.models.values()
    algorithm = {"name": f"{run.parent / 'swapped.py'}:Swapped"}
    network = build_extended_network({**MODEL, "out_channels": 2}, algorithm).eval()
    network.load_state_dict(dict(model))
    predict_folder(opened, run.parent / "a/images", tmp_path / "own")
    image = np.asarray(nib.load(run.parent / "a/images/p0.nii.gz").dataobj)  # type: ignore[attr-defined]
    image = (image - image.mean()) / image.std()
    with torch.no_grad():
        slices = torch.from_numpy(image).permute(2, 0, 1)[:, None].float()
        expected = network(slices).argmax(1).permute(1, 2, 0).numpy()
    found = masks(tmp_path / "own")["p0.nii.gz"]
    assert (found == expected).mean() > 0.99  # a voxel may round otherwise
    with torch.no_grad():
        swap = network.swap.weight.flip(0).clone()  # type: ignore[union-attr, operator]
        network.swap.weight.copy_(swap)  # type: ignore[union-attr, operator]
        assert (found == network(slices).argmax(1).permute(1, 2, 0).numpy()).mean() < 0.01


@pytest.mark.parametrize("place", ["run", "run/Swapped/seed-0/server/deployed"])
def test_adapt_takes_the_run_and_the_folder_of_its_models(
    run: Path, tmp_path: Path, place: str
) -> None:
    images, output = run.parent / "b/images", tmp_path / place.replace("/", "-")
    command = ["adapt", str(run.parent / place), str(images)]
    command += ["--adapter", "ensemble", "--output", str(output)]
    if place != "run":  # code of the user's own does not stand beside models
        refused = CliRunner().invoke(cli.app, command)
        assert refused.exit_code == 2
        assert "name its file with --config" in refused.output.replace("\n", " ")
        command += ["--config", str(run.parent / "experiment.yaml")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert len(masks(output / "predictions")) == 5


def test_the_folder_of_a_built_in_method_needs_no_experiment(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))
    volumes(tmp_path / "a")
    output = run_experiment(parse_config({
        "name": "turned",
        "federation": {"name": "one", "root": str(tmp_path), "sampling": {"crop": [16, 16]},
                       "sites": {"a": {"folder": "a"}}},
        "model": MODEL, "training": {"local_steps": 1, "batch_size": 2},
        "algorithms": ["fedavg", {"name": "ttt", "lam": 0.5}], "rounds": 1,
        "output": str(tmp_path / "run"),
    }))  # fmt: skip
    deployed = output / "ttt/seed-0/server/deployed"
    settings = json.loads((deployed / "settings.json").read_text())
    assert settings["algorithm"] == {"name": "ttt", "lam": 0.5, "rotations": "random"} | {
        key: value for key, value in settings["algorithm"].items() if key == "weighting"
    }
    opened = open_models(deployed)
    assert opened.algorithm.name == "ttt"
    assert {n for n in opened.models["global"] if n.startswith("rotation.")}
    opened.network().load_state_dict(dict(import_model(deployed / "global.safetensors")))
    plain = json.loads((output / "fedavg/seed-0/server/deployed/settings.json").read_text())
    assert "algorithm" not in plain
