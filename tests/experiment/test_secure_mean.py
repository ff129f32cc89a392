"""Means of masked replies on a user's road: the file, the command, the models and the report."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from collegium.cli import app
from collegium.data.phantoms import make_federation
from collegium.runtime.ledger import read_ledger

METHODS = ["local", "fedavg", "fedbn", "fedadam"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of three sites, and an experiment file."""
    found = tmp_path_factory.mktemp("secure")
    make_federation(found / "data", 3, cases=8, size=32)
    settings = {
        "name": "tiny",
        "federation": "data/federation.yaml",
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "norm": "batch"},
        "algorithms": METHODS,
        "rounds": 2,
        "training": {"optimizer": "sgd", "momentum": 0.0, "lr": 0.01, "batch_size": 2,
                     "local_steps": 2},
    }  # fmt: skip
    (found / "tiny.yaml").write_text(yaml.safe_dump(settings))
    return found


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))


def run(folder: Path, name: str, *overrides: str) -> Any:
    arguments = ["run", str(folder / "tiny.yaml"), f"output={folder / name}", *overrides]
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("setting", "tolerance"), [("{}", 1e-5), ("{bits: 32, fraction_bits: 16}", 1e-3)]
)
def test_a_run_with_the_setting_has_the_models_of_one_without(folder, setting, tolerance):
    """Up to what four steps of training and FedAdam's quotients make of half a step."""
    outputs = {}
    for name, overrides in {"plain": (), "masked": (f"secure_mean={setting}",)}.items():
        result = run(folder, f"{name}{len(setting)}", *overrides)
        assert result.exit_code == 0, result.output
        outputs[name] = folder / f"{name}{len(setting)}"
    for method in METHODS:
        plain, masked = (outputs[name] / method / "seed-0" for name in outputs)
        files = [path.relative_to(plain) for path in plain.rglob("*.safetensors")]
        assert files
        for file in files:
            one, two = load_file(plain / file), load_file(masked / file)
            for name in one:
                assert torch.allclose(one[name], two[name], rtol=1e-4, atol=tolerance), (file, name)
        scores = [json.loads((f / "server/test.json").read_text()) for f in (plain, masked)]
        assert scores[0].keys() == scores[1].keys()
    site = outputs["masked"] / "fedbn/seed-0/clients/birch"
    mode = (site / "unmasked.safetensors").stat().st_mode
    assert sys.platform == "win32" or stat.S_IMODE(mode) == 0o600
    trained = [line for line in read_ledger(site / "ledger.jsonl") if line["stage"] == "train"]
    assert trained
    assert all(line["parts"].keys() == {"$key", "progress"} for line in trained)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm=pooled"], ["Pooled trains on the data of all", "leave out either"]),
        (["algorithm=grace"], ["Grace needs the part", "of each", "such as fedavg"]),
        (["algorithm=fedavg", "codec=half"], ["no codec can shorten"]),
        (["algorithm=fedavg", "diagnostics=[layer_distance]"], ["layer_distance", "diagnostics"]),
        (["algorithm=fedavg", "secure_mean.min_sites=4"], ["3 sites train", "min_sites is 4"]),
        (["algorithm=fedavg", "protocol=leave-one-site-out", "adapters=[none]"], ["2 sites train"]),
        (["secure_mean.bits=16"], ["secure_mean.bits", "16"]),
        (["secure_mean.fraction_bits=60"], ["secure_mean.fraction_bits"]),
        (["secure_mean={bits: 32, fraction_bits: 28}"], ["lower it to 24 or less"]),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_the_first_round(folder, overrides, words):
    result = run(folder, "refused", "secure_mean={}", *overrides)
    assert result.exit_code == 2, result.output
    text = " ".join(result.output.split())
    assert all(word in text for word in words), text
    assert not list((folder / "refused").rglob("*.state"))


def test_a_value_beyond_the_range_ends_the_run_in_one_sentence(folder):
    """Of 32 bits with 24 behind the point a site has 42 for weight times value."""
    result = run(
        folder, "range", "algorithm=fedavg", "secure_mean={bits: 32, fraction_bits: 24}",
        "training.lr=1.0e+4",
    )  # fmt: skip
    text = " ".join(result.output.split())
    assert result.exit_code == 4, text
    assert "times its weight, is beyond the 42" in text
    assert "Traceback" not in text
