"""A federation whose sites lack modalities, from the command line alone."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from collegium import cli

MODALITIES = ["t1", "t2", "flair"]
SITES = ["site_1", "site_2", "site_3"]
METHODS = ["fedavg", "modalityencoders", "private", "modalityfilters"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave the library's logger as it was found."""
    level = cli.logger.level
    yield
    cli.logger.setLevel(level)


def call(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.slow
def test_sites_that_lack_a_modality_train_are_compared_and_predict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call("phantoms", "data", "--size", "32", "--cases", "8", "--sites", "3")
    call(
        "partition", "data/federation.yaml", "federation.image.channels=rgb",
        "federation.image.inputs=3", "--sites", "3", "--lack-channel", "--output", "data/sites.csv",
    )  # fmt: skip
    with (tmp_path / "data" / "sites.csv").open() as file:
        kept = {row["site"]: [*map(int, row["channels"].split())] for row in csv.DictReader(file)}
    assert sorted(kept.values()) == [[0, 1], [0, 2], [1, 2]]
    federation = yaml.safe_load((tmp_path / "data" / "federation.yaml").read_text())
    federation["sites"] = {site: {"manifest": "sites.csv"} for site in SITES}
    federation["sites"]["site_1"]["modalities"] = [MODALITIES[k] for k in kept["site_1"]]
    federation["image"] |= {"channels": "rgb", "modalities": MODALITIES}
    call("phantoms", "hub", "--size", "32", "--cases", "6", "--sites", "1", "--seed", "7")
    hub = next((tmp_path / "hub").glob("*/images")).parent
    federation["public"] = {"images": str(hub / "images"), "labels": str(hub / "masks")}
    (tmp_path / "data" / "lacking.yaml").write_text(yaml.safe_dump(federation))

    looked = json.loads(call("inspect", "data/lacking.yaml", "--json"))
    for site in looked["sites"]:
        [lacked] = {*range(3)} - {*kept[site["name"]]}
        [missing] = site["missing_channels"]
        assert (missing["channel"], missing["name"]) == (lacked, MODALITIES[lacked])
        assert missing["cases"] == site["cases"]

    experiment = {
        "name": "lacking",
        "federation": "data/lacking.yaml",
        "model": {"name": "modality_unet", "channels": [4, 8]},
        "algorithms": [
            "fedavg",
            "modalityencoders",
            {"name": "modalityencoders", "decoder": "private", "label": "private"},
            {"name": "modalityfilters", "warm_up": 0, "patience": 1},
        ],
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 2},
        "seeds": [0],
        "output": "run",
    }
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(experiment))
    call("run", "x.yaml")
    tables = call("tables", "run")
    assert all(name in tables for name in (*SITES, "FedAvg global", *METHODS[1:]))
    rows = pd.read_csv(tmp_path / "run" / "results.csv")
    scored = rows[rows["metric"] == "dice"]
    assert {*zip(scored["algorithm"], scored["site"], strict=True)} >= {
        (method, site) for method in METHODS for site in SITES
    }
    assert scored["value"].between(0, 1).all()
    sent = rows[rows["metric"] == "loss"].groupby("algorithm")["bytes_up"].max()
    assert sent["private"] < sent["modalityencoders"] < sent["fedavg"]

    images = str(next((tmp_path / "data").glob("*/images")))
    for method in METHODS[1:]:
        call(
            "predict", "run", images, "--algorithm", method, "--output", f"masks-{method}",
            *(["--site", "site_1"] if method != "modalityencoders" else []),
        )  # fmt: skip
        assert len([*(tmp_path / f"masks-{method}").rglob("*.png")]) == 8
    call("export", "run", "--algorithm", "private", "--site", "site_1", "--output", "bundle")
    graph = (tmp_path / "bundle" / "configs" / "inference.json").read_text()
    places = [kept["site_1"].index(k) if k in kept["site_1"] else None for k in range(3)]
    assert f"for k in {places}]" in graph
