"""Each site's personal model at every site, as the command scores it."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium.cli import app
from collegium.evaluation.cross_site import read_cross_site
from collegium.evaluation.results import read_results
from collegium.evaluation.scores import rows_of

SHARED = ("A", "B", "C")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def write(folder: Path, share: tuple[str, ...] = SHARED, **changes: Any) -> Path:
    """Tables of which B's has the rows of A's, and C's the same with the classes exchanged."""
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(2, 60))
    truth = x + 0.3 * noise > 0
    parts = ["train"] * 30 + ["val"] * 10 + ["test"] * 20
    for site in SHARED:
        classes = truth if site != "C" else ~truth
        rows = [f"{site}{n},{a:.4f},{'yes' if c else 'no'},{s}"
                for n, (a, c, s) in enumerate(zip(x, classes, parts, strict=True))]  # fmt: skip
        (folder / f"{site}.csv").write_text("\n".join(["patient,x,outcome,split", *rows]) + "\n")
    sites = {site: {"table": f"{site}.csv"} | ({"share": ["personal"]} if site in share else {})
             for site in SHARED}  # fmt: skip
    table = {"label": "outcome", "numeric": ["x"], "patient": "patient", "split": "split"}
    data: dict[str, Any] = {
        "name": "x",
        "federation": {
            "name": "x", "sites": sites, "table": table,
            "task": {"name": "classification", "classes": ["no", "yes"]},
        },
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"optimizer": "sgd", "lr": 0.3, "batch_size": 8, "local_steps": 8},
        "rounds": 3, "algorithms": ["local", "fedavg", "ditto"], "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross")
    shown = call("run", str(write(folder)))
    assert shown.exit_code == 0, shown.output
    return folder / "run"


@pytest.fixture(scope="module")
def shown(run: Path) -> str:
    found = call("cross-site", str(run))
    assert found.exit_code == 0, found.output
    return found.stdout


def accuracy(run: Path) -> dict[tuple[str, str, str], float]:
    """By algorithm, model and site the mean of the table that the command wrote."""
    with (run / "tables/accuracy-cross-site.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["column"] in SHARED]
    return {
        (row["method"].split()[0], row["method"].split()[-1], row["column"]): float(
            row["mean"] or "nan"
        )
        for row in rows
    }


def test_every_model_is_scored_at_every_site(run: Path, shown: str) -> None:
    found = accuracy(run)
    assert len(found) == 2 * 3 * 3  # FedAvg has no personal models
    assert "Ditto personal of C" in shown
    for method in ("Local", "Ditto"):
        at_home = found[method, "A", "A"]
        assert at_home > 0.8
        assert found[method, "A", "B"] == at_home  # B has the same test cases
        assert found[method, "A", "C"] == pytest.approx(1 - at_home)  # and C their opposites


def test_at_home_it_is_the_score_of_the_run(run: Path, shown: str) -> None:
    results = read_results(run)
    own = results[(results["split"] == "test") & (results["model"] == "personal")]
    scores = read_cross_site(run)
    home = scores[scores["model"] == "personal of " + scores["site"]]
    assert len(home) == len(own)
    key = ["algorithm", "site", "case", "metric"]
    pairs = own.merge(home, on=key, suffixes=("", "_again"), validate="one_to_one")
    assert len(pairs) == len(own)
    for row in rows_of(pairs):
        assert row.value == row.value_again or np.isnan(row.value) == np.isnan(row.value_again)


def test_the_tables_and_answers_of_the_run_do_not_change_and_the_report_has_the_matrix(
    run: Path, shown: str
) -> None:
    before = (run / "tables/accuracy.csv").read_bytes()
    answers = call("tables", str(run))
    assert answers.exit_code == 0
    assert (run / "tables/accuracy.csv").read_bytes() == before
    assert "personal of" not in before.decode()
    assert "Ditto personal of C" in (run / "report.html").read_text(encoding="utf-8")


def test_a_site_that_does_not_share_its_model_keeps_it(tmp_path: Path) -> None:
    call("run", str(write(tmp_path, share=("A",))))
    assert call("cross-site", str(tmp_path / "run")).exit_code == 0
    found = accuracy(tmp_path / "run")
    assert {(model, site) for _, model, site in found} >= {("A", "B"), ("A", "C"), ("B", "B")}
    away = {value for key, value in found.items() if key[1] in "BC" and key[1] != key[2]}
    assert all(map(np.isnan, away))


@pytest.mark.parametrize(
    ("share", "changes", "words"),
    [
        ((), {}, "no site shares its personal model; write share: [personal]"),
        (SHARED, {"algorithms": ["fedavg"]}, "holds no personal models of finished trainings"),
    ],
)
def test_what_has_no_matrix_is_said(
    tmp_path: Path, share: tuple[str, ...], changes: dict[str, Any], words: str
) -> None:
    call("run", str(write(tmp_path, share=share, **changes)))
    refused = call("cross-site", str(tmp_path / "run"))
    assert refused.exit_code != 0
    assert words in refused.stderr
    assert "Traceback" not in refused.stderr
