"""The papers' comparisons in configs/papers run from the command line, on phantoms, in two rounds.

Every row of a paper's table is in the results, with a score.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from collegium import cli
from collegium.data.phantoms import make_federation
from collegium.experiment.runner import collect_rows, read_run_config

CONFIGS = Path(__file__).parents[2] / "configs" / "papers"
GRACE_ROWS = {"FedAvg", "FedRoD", "Per-FedAvg", "pFedMe", "GRACE"}
PFEDNET_ROWS = {
    "Ditto", "FedAMP", "FedAvg", "FedPer", "FedProx", "FedRep", "FedRoD", "APFL", "FPFC", "IFCA",
    "pFedMe", "SuPerFed", "L2GD", "FedLC", "pFedNet",
}  # fmt: skip
INSIDE = {
    "iopfl-table1": {"Single-site", "FedAvg", "FedBN", "FedRep", "pFedMe", "IOP-FL"},
    "grace-table1": GRACE_ROWS
    | {"FedAvg P", "FedMTL", "FedBABU", "FedPer", "FedRep", "Ditto", "FedBN"},
    "grace-table2": GRACE_ROWS | {"FedProx", "Scaffold", "MOON", "ELCFS", "HarmoFL"},
    "grace-table4": {"FedAvg P", "MOON", "MOON+GRACE", *"ABCDEFG"},
    "distance": {
        "FedAvg", "FedAvg w 0.1", "FedAvg w 0.3", "FedAvg w 0.5", "FedAvg w 0.5 EUC", "FedProx",
        "FedProx w 0.1", "FedProx w 0.3", "FedProx w 0.5", "Ditto", "clusters EMD", "clusters EUC",
    },
    "resfim": {"FedAvg", "FedBN", "SioBN", "FedPer", "pFL-ResFIM"},
    "pfednet-table3": PFEDNET_ROWS,
    "pfednet-table4": PFEDNET_ROWS,
}  # fmt: skip
"""By file the rows of the paper's table, each scored on the test cases of every site."""

OUTSIDE = {
    "iopfl-table2": {
        ("FedAvg", "none"), ("FedAvg", "Tent"), ("TTT", "TTT"), ("FedDG", "none"),
        ("IOP-FL", "Average"), ("IOP-FL", "Ensemble"), ("IOP-FL", "IOP-FL"),
    },
    "grace-table1": {(row, "none") for row in INSIDE["grace-table1"]},
    "grace-table2": {(row, "none") for row in INSIDE["grace-table2"]},
    "grace-table4": {(row, "none") for row in INSIDE["grace-table4"]},
}  # fmt: skip
"""By file the methods and adapters that are scored at every site while it is outside."""

WITHOUT_GLOBAL = {"FedMTL", "FedPer", "FedRep", "FedBN"}
OUTSIDE["grace-table1"] = {
    (row, "ensemble" if row in WITHOUT_GLOBAL else "none") for row, _ in OUTSIDE["grace-table1"]
}


def read_mask(path: Path) -> Any:
    with Image.open(path) as mask:
        return np.asarray(mask)


def call(*arguments: object) -> None:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


def header_commands(name: str) -> list[list[str]]:
    """The commands in a file's header that try it on phantoms, without the program's name."""
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    first = lines.index(next(line for line in lines if line.startswith("#   collegium phantoms")))
    commands = [shlex.split(line.removeprefix("#   ")) for line in lines[first:] if line[0] == "#"]
    assert {command[0] for command in commands} == {"collegium"}
    return [command[1:] for command in commands]


def draw_lesions(folder: Path) -> Path:
    """Draw three sites whose images have one of two lesions as their class, by their glands."""
    path = make_federation(folder, 3, cases=8, size=32)
    federation = yaml.safe_load(path.read_text())
    for site in federation["sites"]:
        manifest = folder / site / "manifest.csv"
        table = pd.read_csv(manifest)
        areas = [np.mean(read_mask(folder / mask)) for mask in table.pop("label")]
        table["class"] = np.where(areas > np.median(areas), "MEL", "NV")
        table.to_csv(manifest, index=False)
        federation["sites"][site]["share"] = ["personal"]
    federation |= {"task": {"name": "classification"}, "image": {"channels": "rgb"}}
    path.write_text(yaml.safe_dump(federation))
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder that has the files in `configs/papers`, and no data."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "papers").symlink_to(CONFIGS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLLEGIUM_DATA", str(tmp_path))
    return tmp_path


def scored(run: Path, split: str) -> pd.DataFrame:
    """Return a run's scores of single cases in a split."""
    results = collect_rows(read_run_config(run))
    return results[results["value"].notna() & (results["case"] != "") & (results["split"] == split)]


def check_written(run: Path, name: str) -> None:
    """Check that every row of the table has scores at every site, and that tables are there."""
    tested, outside = scored(run, "test"), scored(run, "outside")
    sites = set(read_run_config(run).federation.sites)
    assert len(sites) in (3, 4, 5)
    where = tested.groupby("algorithm")["site"].agg(set)
    for row in INSIDE.get(name, ()):
        assert where[row] == sites, row
    where = outside.groupby(["algorithm", "model"])["site"].agg(set)
    assert where.to_dict() == dict.fromkeys(OUTSIDE.get(name, ()), sites)
    assert (run / "report.html").stat().st_size > 10_000
    assert list((run / "tables").glob("*.csv"))


def test_every_file_has_its_rows_here() -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == {*INSIDE, *OUTSIDE}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*INSIDE, *OUTSIDE}))
def test_the_header_s_commands_score_every_row_of_the_table(name: str, folder: Path) -> None:
    *before, run = header_commands(name)
    for command in before:
        call(*command)
    call(*run, "evaluation.every=2")
    check_written(folder / "runs" / name, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grace-table1", "grace-table2", "grace-table4"])
def test_the_dermoscopy_columns_have_every_row_too(name: str, folder: Path) -> None:
    path = draw_lesions(folder / "lesions")
    network = "{name: densenet, out_channels: 8, growth: 2, blocks: [1], init_features: 4}"
    small = ["federation.image.size=[32,32]", "federation.sampling.crop=[24,24]",
             "training.batch_size=4", "training.local_epochs=1", f"model={network}", "rounds=2",
             "seeds=[0]", "evaluation.every=2"]  # fmt: skip
    call("run", f"configs/papers/{name}.yaml", f"federation={path}", *small)
    check_written(folder / "runs" / name, name)
