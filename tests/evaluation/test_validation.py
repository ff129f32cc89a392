"""Settings that validation cases choose, and tables of validation scores."""

from math import isnan
from statistics import fmean, stdev
from typing import Any

import pytest
from typer.testing import CliRunner

from collegium.cli import app
from collegium.evaluation.results import results_frame, write_results
from collegium.evaluation.validation import (
    selected_table,
    validation_sweep_table,
    validation_table,
)

ABOUT: dict[str, Any] = {"experiment": "e", "metric": "dice", "model": "global"}


def trained(setting, site, val, test, *, seed=0, algorithm="fedavg", **changes):
    """Validation scores of rounds 1 and 2, of which 2 is selected, and a test case each."""
    about = {**ABOUT, "variation": setting, "site": site, "seed": seed, "algorithm": algorithm}
    about |= changes
    yield dict(**about, split="val", round=1, value=0.99)  # of a round that was not selected
    yield dict(**about, split="val", round=2, value=val)
    yield dict(**about, split="test", round=2, case=f"{site}-c", patient="p", value=test)


def sweep(scores, **changes):
    """Rows of settings, by setting and site a pair of validation and test score."""
    return [
        row
        for setting, by_site in scores.items()
        for site, pair in by_site.items()
        for row in trained(setting, site, *pair, **changes)
    ]


PLANTED = {
    "lam 1": {"A": (0.70, 0.60), "B": (0.80, 0.62)},  # best on validation: 0.75
    "lam 10": {"A": (0.90, 0.95), "B": (0.58, 0.97)},  # best on test, second on validation: 0.74
    "lam 2": {"A": (0.10, 0.10), "B": (0.20, 0.10)},
}


def cells(table):
    return {(c.method, c.column): (c.mean, c.note) for c in table.cells.itertuples()}


def test_the_setting_that_is_best_on_test_and_second_on_validation_is_not_chosen():
    found = cells(selected_table(results_frame(sweep(PLANTED)), ["fedavg"]))
    assert found["FedAvg global", "validation"] == (pytest.approx(0.75), "lam 1")
    assert found["FedAvg global", "test"] == (pytest.approx(0.61), "")
    assert len(found) == 2


def test_every_method_has_a_setting_of_its_own_and_means_are_over_sites_and_seeds():
    rows = sweep(PLANTED) + sweep({k: {s: (v - 0.05, t) for s, (v, t) in of.items()}
                                   for k, of in PLANTED.items()}, seed=1)  # fmt: skip
    other = {
        "lam 1": {"A": (0.1, 0.5), "B": (0.1, 0.7)},
        "lam 10": {"A": (0.3, 0.2), "B": (0.3, 0.4)},
        "lam 2": {"A": (0.3, 0.9), "B": (0.2, 0.9)},
    }
    rows += [row for seed in (0, 1) for row in sweep(other, algorithm="ditto", seed=seed)]
    table = selected_table(results_frame(rows), ["fedavg", "ditto"])
    found = cells(table)
    assert found["FedAvg global", "validation"] == (pytest.approx(fmean([0.75, 0.70])), "lam 1")
    assert found["Ditto global", "validation"] == (pytest.approx(0.3), "lam 10")
    assert found["Ditto global", "test"][0] == pytest.approx(0.3)
    (first,) = table.cells[table.cells["method"] == "FedAvg global"].query(
        "column == 'validation'"
    )["sd"]
    assert first == pytest.approx(stdev([0.75, 0.70]))
    assert table.notes[-1].startswith(
        "Over all methods, validation cases choose FedAvg global with lam 1"
    )
    assert "Ditto" in selected_table(results_frame(rows), apart=["fedavg"]).notes[-1]


def test_of_losses_the_lowest_is_chosen():
    found = cells(selected_table(results_frame(sweep(PLANTED, metric="log_loss"))))
    assert found["FedAvg global", "validation"][1] == "lam 2"


def test_equal_scores_are_said_and_the_first_setting_in_order_is_taken():
    same = {"b 10": {"A": (0.5, 0.9)}, "b 9": {"A": (0.5, 0.1)}}
    table = selected_table(results_frame(sweep(same)))
    assert cells(table)["FedAvg global", "validation"][1] == "b 9"
    assert any(
        "equal validation scores" in note and "FedAvg global" in note for note in table.notes
    )


def test_settings_with_other_sites_or_seeds_are_not_compared():
    other = {**PLANTED, "only A": {"A": (0.99, 0.99)}}
    table = selected_table(results_frame(sweep(other)))
    assert cells(table)["FedAvg global", "validation"][1] == "lam 1"
    assert any(note.endswith("are others: only A.") for note in table.notes)
    fewer = [*sweep(PLANTED), *sweep({k: PLANTED[k] for k in ("lam 10", "lam 2")}, seed=1)]
    table = selected_table(results_frame(fewer))
    assert cells(table)["FedAvg global", "validation"][1] == "lam 10"
    assert any(note.endswith("are others: lam 1.") for note in table.notes)


def test_a_model_whose_validation_score_is_undefined_at_a_site_is_not_chosen():
    rows = sweep({**PLANTED, "lam 10": {"A": (0.99, 0.9), "B": (None, 0.9)}})
    assert cells(selected_table(results_frame(rows)))["FedAvg global", "validation"][1] == "lam 1"


def test_sites_outside_get_the_setting_that_those_inside_choose():
    rows = sweep(PLANTED)
    for setting, value in (("lam 1", 0.4), ("lam 10", 0.8), ("lam 2", 0.9)):
        about = {**ABOUT, "variation": setting, "algorithm": "fedavg", "seed": 0, "round": 2}
        about |= {"split": "outside", "site": "X", "case": "c", "patient": "p"}
        rows += [{**about, "model": "none", "value": value}]
        rows += [{**about, "model": "tent", "value": value + 0.05}]
    found = cells(selected_table(results_frame(rows), where="outside"))
    assert found["FedAvg", "validation"] == (pytest.approx(0.75), "lam 1")
    assert found["FedAvg", "test"][0] == pytest.approx(0.4)
    assert found["FedAvg + Tent", "test"][0] == pytest.approx(0.45)


def test_the_table_of_validation_scores_has_those_of_the_selected_rounds():
    rows = sweep(PLANTED) + sweep(PLANTED, fold=1, seed=0)
    table = validation_table(results_frame(rows), variation="lam 1")
    found = cells(table)
    assert found["FedAvg global", "A"][0] == pytest.approx(0.70)
    assert found["FedAvg global", "average"][0] == pytest.approx(0.75)
    swept = cells(validation_sweep_table(results_frame(sweep(PLANTED))))
    assert swept["FedAvg global", "lam 10"][0] == pytest.approx(0.74)
    assert not [value for value, _ in swept.values() if isnan(value)]


def test_the_command_prints_the_choice_and_nothing_of_the_other_settings(tmp_path):
    write_results(results_frame(sweep(PLANTED)), tmp_path)
    shown = CliRunner().invoke(app, ["tables", str(tmp_path), "--select"])
    assert shown.exit_code == 0, shown.output
    assert "0.750 (lam 1)" in shown.stdout
    assert "0.610" in shown.stdout
    assert "0.96" not in shown.stdout  # the test score of lam 10
    assert (tmp_path / "tables/dice-selected.md").exists()
    assert (tmp_path / "tables/dice-validation-sweep.tex").exists()


def test_the_command_says_where_there_is_nothing_to_choose_by(tmp_path):
    rows = [row for row in sweep(PLANTED) if row["split"] == "test"]
    write_results(results_frame(rows), tmp_path)
    shown = CliRunner().invoke(app, ["tables", str(tmp_path), "--select"])
    assert shown.exit_code != 0
    assert "no validation scores" in shown.stderr
    assert "Traceback" not in shown.stderr
