from math import isnan
from statistics import fmean

import pytest
from tests.evaluation.figures.conftest import SITES, sweep_rows

from collegium.evaluation.figures.layers import MOST_ROUNDS, layer_figures

LAYERS = ("up.weight", "down.weight")


def rates(rounds):
    about = {"experiment": "e", "algorithm": "ditto", "split": "train", "variation": ""}
    return [
        {**about, "site": site, "seed": seed, "round": number, "metric": f"masking_rates/{layer}",
         "value": 0.01 * number + 0.1 * seed + 0.3 * LAYERS.index(layer) + 0.05 * (site == "south")}
        for site in SITES for seed in (0, 1) for number in range(1, rounds + 1) for layer in LAYERS
    ]  # fmt: skip


def plain():
    return [{**row, "variation": ""} for row in sweep_rows(settings=("one",))]


def test_a_cell_is_the_mean_over_seeds_of_a_tensor_in_a_round(source_of, by_name):
    rows = rates(3)
    figure = by_name(layer_figures, source_of(plain() + rows))["masking-rates"]
    assert figure.title == "Masking rates by tensor and round, Ditto"
    north, south = (panel.heat for panel in figure.panels)
    assert north.rows == LAYERS  # in the order of the model
    assert north.columns == (1, 2, 3)
    expected = fmean(
        row["value"] for row in rows
        if row["site"] == "south" and row["round"] == 2 and row["metric"].endswith("down.weight")
    )  # fmt: skip
    assert south.values[1][1] == pytest.approx(expected) == pytest.approx(0.42)
    # of all panels one scale, from no entry to the most
    assert north.limits == south.limits == (0.0, pytest.approx(0.43))


def test_a_site_without_a_tensor_has_no_cells_of_it(source_of, by_name):
    rows = [r for r in rates(2) if r["site"] == "north" or r["metric"].endswith("up.weight")]
    _, south = by_name(layer_figures, source_of(plain() + rows))["masking-rates"].panels
    assert all(isnan(value) for value in south.heat.values[1])


def test_of_many_rounds_some_are_drawn_and_the_caption_says_so(source_of, by_name):
    rounds = 2 * MOST_ROUNDS + 1
    figure = by_name(layer_figures, source_of(plain() + rates(rounds)))["masking-rates"]
    assert figure.panels[0].heat.columns == tuple(range(1, rounds + 1, 3))
    assert figure.caption.endswith("Of every 3 rounds the first is drawn.")


def test_a_run_without_rates_has_no_figure(source_of):
    assert not list(layer_figures(source_of(plain())))


def test_rates_that_are_undefined_are_left_out(source_of, by_name):
    rows = rates(2)
    for row in rows:
        if row["round"] == 2 or row["site"] == "south":
            row["value"] = None
    (north,) = by_name(layer_figures, source_of(plain() + rows))["masking-rates"].panels
    assert (north.title, north.heat.columns) == ("north", (1,))
