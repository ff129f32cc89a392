"""Rows of results to make tables of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collegium.evaluation.tables import MethodTable


def make_scores(
    algorithm, model, site, values, *, seed=0, metric="dice", unit="", patients=None,
    split="test", fold=0, variation="",
):  # fmt: skip
    """One row per value; each case its own patient unless said otherwise."""
    patients = patients or [f"p{place:02}" for place in range(len(values))]
    about = {"experiment": "e", "algorithm": algorithm, "seed": seed, "fold": fold,
             "variation": variation, "round": 5, "site": site, "split": split, "model": model,
             "metric": metric, "unit": unit}  # fmt: skip
    return [
        {**about, "case": f"c{place:02}", "patient": patient, "value": value}
        for place, (value, patient) in enumerate(zip(values, patients, strict=True))
    ]


@pytest.fixture
def scores():
    return make_scores


@pytest.fixture
def outside():
    """Scores of a site outside: the fold is the place of the site among all, by name."""

    def make(algorithm, adapter, site, values, **options):
        fold = "ABC".index(site)
        return make_scores(algorithm, adapter, site, values, split="outside", fold=fold, **options)

    return make


@pytest.fixture
def cells_of():
    """The cells of a table by the names of the method and of the column."""

    def find(table: MethodTable) -> dict[str, dict[str, Any]]:
        return {name: {cell.column: cell for cell in cells} for name, cells in table.methods}

    return find


@pytest.fixture
def three_methods():
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.02)):
        rows += make_scores("local", "personal", "A", [0.60 + shift, 0.70 + shift], seed=seed)
        rows += make_scores("local", "personal", "B", [0.50 + shift], seed=seed)
        rows += make_scores("fedavg", "global", "A", [0.80, 0.80 + shift], seed=seed)
        rows += make_scores("fedavg", "global", "B", [0.55], seed=seed)
        rows += make_scores("ditto", "personal", "A", [0.75, 0.75], seed=seed)
        rows += make_scores("ditto", "personal", "B", [0.70], seed=seed)
    return rows


@pytest.fixture
def joined_rows():
    alone = [0.50, 0.52, 0.54, 0.56, 0.58, 0.60, 0.62, 0.64]
    rows = make_scores("local", "personal", "A", alone)
    rows += make_scores("fedavg", "global", "A", [value + 0.1 for value in alone[:-1]] + [0.76])
    rows += make_scores("ditto", "personal", "A", [value - 0.1 for value in alone[:-1]] + [0.52])
    rows += make_scores("ditto", "global", "A", [0.9, *[None] * 7])
    return rows


@pytest.fixture(scope="session")
def statistics(reference: Path) -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
    """Input and expected values of a case of `statistics_golden.json`, by its name."""
    text = (reference / "statistics_golden.json").read_text("utf-8")
    by_name = {case["name"]: case for case in json.loads(text)["cases"]}
    return lambda name: (by_name[name]["input"], by_name[name]["expected"])
