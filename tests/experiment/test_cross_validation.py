"""Cross-validation by patient, as the command runs it."""

import csv
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from sklearn.metrics import balanced_accuracy_score, roc_auc_score
from typer.testing import CliRunner, Result

from collegium.cli import app
from collegium.evaluation.results import read_results
from collegium.evaluation.scores import rows_of

SITES = ("A", "B", "C")
FOLDS = 3


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables of three sites, whose patients have two visits each."""
    folder = tmp_path_factory.mktemp("tables")
    for number, site in enumerate(SITES):
        rng = np.random.default_rng(number)
        x, noise = rng.normal(size=(2, 24))
        rows = [f"{site}p{n // 2},{a:.4f},{'yes' if a + 0.5 * b > 0 else 'no'}"
                for n, (a, b) in enumerate(zip(x, noise, strict=True))]  # fmt: skip
        (folder / f"{site}.csv").write_text("\n".join(["patient,x,outcome", *rows]) + "\n")
    return folder


def write(folder: Path, **changes: Any) -> Path:
    data: dict[str, Any] = {
        "name": "cv",
        "federation": {
            "name": "cv", "sites": {site: {"table": f"{site}.csv"} for site in SITES},
            "task": {"name": "classification", "classes": ["no", "yes"],
                     "metrics": ["sensitivity"]},
            "table": {"label": "outcome", "numeric": ["x"], "patient": "patient"},
            "splits": {"folds": FOLDS},
        },
        "model": {"name": "mlp", "hidden": [4]},
        "training": {"optimizer": "sgd", "lr": 0.2, "batch_size": 8, "local_steps": 3},
        "rounds": 2, "seeds": [0, 1], "algorithms": ["local", "fedavg"],
        "protocol": "cross-validation", "output": str(folder / "run"),
    }  # fmt: skip
    data |= changes
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    shown = call("run", str(write(folder)))
    assert shown.exit_code == 0, shown.output
    return folder / "run"


def own_patients(run: Path, fold: int, site: str, split: str) -> set[str]:
    """The site's own names of the patients of a split, by the key that stays there."""
    found = set()
    for path in run.glob(f"fold-{fold}/fedavg/seed-*/clients/{site}/cases-{split}.csv"):
        with path.open(newline="") as file:
            found |= {row["own_patient"] for row in csv.DictReader(file)}
    return found


def test_no_patient_is_on_both_sides_and_each_is_tested_once(run: Path) -> None:
    for site in SITES:
        tested: Counter[str] = Counter()
        for fold in range(1, FOLDS + 1):
            test, val = (own_patients(run, fold, site, split) for split in ("test", "val"))
            assert test
            assert not test & val
            tested.update(test)
        assert tested == {f"{site}p{n}": 1 for n in range(12)}


def test_a_patient_of_two_visits_stays_together_in_the_stored_splits(run: Path) -> None:
    for path in run.glob("fold-*/splits/*.json"):
        splits = yaml.safe_load(path.read_text())["splits"]
        assert len(splits) == 24
    assert len([*run.glob("fold-*/splits/*.json")]) == FOLDS * len(SITES)


def test_every_case_has_one_score_by_seed_and_sets_are_those_of_all_folds(run: Path) -> None:
    """Against scikit-learn, of the predictions of all folds; every patient has two visits."""
    results = read_results(run)
    tested = results[(results["split"] == "test") & (results["case"] != "")]
    for (site, seed), rows in tested[tested["model"] == "global"].groupby(["site", "seed"]):
        by_case: dict[str, dict[str, float]] = defaultdict(dict)
        for row in rows_of(rows):
            by_case[row.case][row.metric] = row.value
        assert len(by_case) == 24, (site, seed)
        assert rows["patient"].nunique() == 12
        truth = [scores["_class"] for scores in by_case.values()]
        positive = [scores["_p1"] for scores in by_case.values()]
        auc = np.mean([scores["auc"] for scores in by_case.values()])
        assert auc == pytest.approx(roc_auc_score(truth, positive))
        balanced = np.mean([scores["balanced_accuracy"] for scores in by_case.values()])
        guesses = [scores["_p1"] > scores["_p0"] for scores in by_case.values()]
        assert balanced == pytest.approx(balanced_accuracy_score(truth, guesses))
    assert sorted(tested["part"].unique()) == [1, 2, 3]
    sensitivity = tested[tested["metric"] == "sensitivity"]
    assert set(sensitivity["value"].dropna()) <= {0.0, 1.0}
    assert sensitivity["value"].notna().any()


def test_a_seed_is_one_training_of_the_verdicts_which_have_all_patients(run: Path) -> None:
    with (run / "tables/auc-joining.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["site"] == "A"]
    assert {row["patients"] for row in rows} == {"12"}
    assert {row["trainings_joined"] for row in rows} == {"2"}


def test_a_finished_run_is_resumed_without_training_and_names_its_folds(run: Path) -> None:
    before = (run / "results.csv").read_bytes()
    shown = call("resume", str(run))
    assert shown.exit_code == 0, shown.output
    assert "round 1/2" not in shown.output
    assert (run / "results.csv").read_bytes() == before
    refused = call("export", str(run), "--output", str(run.parent / "models"))
    assert refused.exit_code != 0
    assert "--fold" in refused.stderr
    assert "fold 2" in refused.stderr


def test_every_fold_is_tried_with_each_site_outside(folder: Path) -> None:
    path = write(
        folder, protocol="leave-one-site-out+cross-validation", adapters=["none"], seeds=[0],
        algorithms=["fedavg"], output=str(folder / "nested"),
    )  # fmt: skip
    shown = call("run", str(path))
    assert shown.exit_code == 0, shown.output
    results = read_results(folder / "nested")
    jobs = results[["fold", "part"]].drop_duplicates()
    assert len(jobs) == FOLDS * len(SITES)
    outside = results[(results["split"] == "outside") & (results["metric"] == "accuracy")]
    for site, rows in outside.groupby("site"):
        assert rows["case"].nunique() == 24, site  # all cases, in every fold of the others
        assert len(rows) == 24 * FOLDS
    inside = results[(results["split"] == "test") & (results["metric"] == "accuracy")]
    for site, rows in inside[inside["model"] == "global"].groupby("site"):
        assert rows["case"].nunique() == 24, site
        assert len(rows) == 24 * (len(SITES) - 1)  # once in each fold that the site trains in
    assert (folder / "nested/fold-2/without-B/fedavg/seed-0").is_dir()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"federation.splits.fold": 2}, "takes each fold in turn; remove it"),
        ({"federation.splits.folds": 1}, "a whole number from 2 on"),
        ({"federation.splits.folds": 13}, "site A has 12 patients, too few for 13 folds"),
    ],
)
def test_what_cannot_be_cross_validated_is_refused(
    folder: Path, changes: dict[str, Any], words: str
) -> None:
    path = write(folder, output=str(folder / "refused"))
    for command in ("run", "inspect"):
        shown = call(command, str(path), *(f"{key}={value}" for key, value in changes.items()))
        assert shown.exit_code != 0, command
        assert words in shown.output, command
        assert "Traceback" not in shown.output
