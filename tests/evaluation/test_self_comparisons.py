"""A method against itself, trained with other seeds: a verdict should hardly ever say yes or no.

Nothing is simulated here: perceptrons are trained on drawn tables of many sites, and the seeds of
each site are put into pairs of groups, which the code of `collegium tables` compares as training
alone and joining. Groups share no training, so that, given a site's data, its comparisons are
independent; a yes or a no of any of them is an error.
"""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, ttest_rel

from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.results import read_results
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.runner import run_experiment

SITES, SEEDS = 16, 30
PATIENTS = 150
LEVEL, SURE = 0.05, 0.99
"""How often a verdict may err, and how sure the test is that it errs more often when it fails."""

CONFIG = {
    "name": "itself",
    "model": {"name": "mlp", "hidden": [16, 8]},
    "training": {"lr": 0.01, "batch_size": 8, "local_steps": 10},
    "rounds": 4,
    "seeds": [*range(SEEDS)],
    "algorithms": ["local"],
    "evaluation": {"every": 4},
    "engine": {"together": True},
}

pytestmark = pytest.mark.slow


def write_site(path: Path, rng: np.random.Generator) -> None:
    """Write patients whose risk is logistic in two of four findings."""
    findings = rng.normal(size=(PATIENTS, 4))
    risk = 1 / (1 + np.exp(findings[:, 1] - 1.5 * findings[:, 0]))
    ill = np.where(rng.random(PATIENTS) < risk, "ill", "well")
    table = pd.DataFrame(findings, columns=["a", "b", "c", "d"]).assign(outcome=ill)
    table.to_csv(path, index=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The results of training alone at every site, once for each seed."""
    root = tmp_path_factory.mktemp("itself")
    rng = np.random.default_rng(0)
    sites = {}
    for number in range(SITES):
        sites[f"s{number:02}"] = {"table": f"s{number:02}.csv"}
        write_site(root / f"s{number:02}.csv", rng)
    federation = {
        "name": "itself",
        "root": str(root),
        "sites": sites,
        "task": {"name": "classification", "classes": ["well", "ill"]},
        "table": {"label": "outcome", "numeric": ["a", "b", "c", "d"]},
        "splits": {"validation": 0.2, "test": 0.6},
    }
    config = parse_config({**CONFIG, "federation": federation, "output": str(root / "run")})
    return read_results(run_experiment(config))


def in_two_groups(results: pd.DataFrame, trainings: int) -> list[pd.DataFrame]:
    """The results as runs of `local` and `again`, each with so many trainings of both."""
    parts = []
    for pair in range(SEEDS // (2 * trainings)):
        first = 2 * trainings * pair
        part = results[results["seed"].between(first, first + 2 * trainings - 1)]
        place = part["seed"] - first
        names = np.where(place < trainings, "local", "again")
        parts.append(part.assign(algorithm=names, seed=place % trainings))
    return parts


@pytest.mark.parametrize("metric", ["log_loss", "brier", "auc", "accuracy", "balanced_accuracy"])
@pytest.mark.parametrize("trainings", [3, 5])
def test_a_method_is_seldom_better_or_worse_than_itself(
    results: pd.DataFrame, trainings: int, metric: str
) -> None:
    parts = in_two_groups(results, trainings)
    outcomes = [
        found.verdict.outcome
        for part in parts
        for found in joining_table(part, metric, ["local", "again"]).by_site
    ]
    assert len(outcomes) == SITES * len(parts)
    wrong = sum(outcome in ("better", "worse") for outcome in outcomes)
    assert wrong <= binom.ppf(SURE, len(outcomes), LEVEL), (wrong, len(outcomes))


def test_a_test_over_patients_alone_takes_the_luck_of_trainings_for_a_difference(
    results: pd.DataFrame,
) -> None:
    found = []
    for part in in_two_groups(results, 5):
        scores = part[(part["split"] == "test") & (part["metric"] == "log_loss")]
        means = scores.groupby(["site", "patient", "algorithm"])["value"].mean().unstack()
        for _, site in means.groupby("site"):
            found.append(float(ttest_rel(site["again"], site["local"]).pvalue) < LEVEL)
    assert sum(found) > binom.ppf(SURE, len(found), LEVEL), (sum(found), len(found))
