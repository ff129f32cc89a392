import numpy as np
import pytest

from collegium.evaluation.reliability import reliability_table
from collegium.evaluation.results import results_frame


def classified(scores, labels, chances, **options):
    """Rows of hidden scores: the classes and probabilities of cases."""
    columns = {"_class": labels} | {f"_p{c}": column for c, column in enumerate(chances.T)}
    return [
        row
        for metric, values in columns.items()
        for row in scores("fedavg", "global", "A", values, metric=metric, **options)
    ]


def test_each_of_several_classes_has_its_bins_in_every_training(scores):
    rng = np.random.default_rng(0)
    rows, expected = [], {}
    for seed in range(2):
        labels, chances = rng.integers(0, 3, 20), rng.dirichlet(np.ones(3), 20)
        rows += classified(scores, labels, chances, seed=seed)
        for c, name in enumerate(("a", "b", "c")):
            low = chances[:, c] <= 0.5
            expected[seed, name] = [
                (own.sum(), chances[own, c].mean(), (labels[own] == c).mean())
                for own in (low, ~low)
                if own.any()
            ]
    table = reliability_table(results_frame(rows), bins=2, classes=("a", "b", "c"))
    assert set(table["where"]) == {"inside"}
    for (seed, name), bins in expected.items():
        found = table[(table["seed"] == seed) & (table["class"] == name)]
        columns = found[["cases", "confidence", "observed"]].to_numpy()
        assert columns == pytest.approx(np.array(bins, float))


def test_means_of_cases_and_probabilities_of_several_models_have_no_bins(scores):
    withheld = scores("local", "personal", "A", [0.8], metric="accuracy", patients=["mean"])
    several = [
        row
        for metric in ("_class", "_p0_0", "_p0_1", "_p1_0", "_p1_1")
        for row in scores("fedavg", "average", "B", [1.0, 0.0], metric=metric, split="outside")
    ]
    table = reliability_table(results_frame([*withheld, *several]))
    assert table.empty
    assert {"where", "site", "class", "low", "high", "observed"} <= set(table.columns)
