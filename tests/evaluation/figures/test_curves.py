from statistics import fmean, stdev

import pandas as pd
import pytest
from tests.evaluation.figures.conftest import sweep_rows

from collegium.evaluation.figures.curves import frame_of, learning_curves, line_of
from collegium.evaluation.figures.data import Look, Series


def test_every_setting_has_a_panel_and_a_figure_by_site(swept, by_name):
    figures = by_name(learning_curves, swept[1])
    assert [*figures] == [
        "learning-curves", "learning-curves-lam 0.1", "learning-curves-lam 1",
        "loss-curves", "loss-curves-lam 0.1", "loss-curves-lam 1",
    ]  # fmt: skip
    assert [panel.title for panel in figures["learning-curves"].panels] == ["lam 0.1", "lam 1"]
    by_site = figures["learning-curves-lam 1"]
    assert [panel.title for panel in by_site.panels] == ["north", "south"]
    assert [s.name for s in by_site.panels[0].series] == [
        "Local personal", "FedAvg global", "Ditto personal",
    ]  # fmt: skip
    assert "one sample standard deviation over seeds" in by_site.caption


def test_a_line_is_the_mean_over_seeds_with_a_band_of_one_sd(swept, by_name, values):
    rows, source = swept
    line = by_name(learning_curves, source)["learning-curves-lam 1"].panels[1].series[2]
    own = {"variation": "lam 1", "site": "south", "algorithm": "ditto", "split": "val"}
    for place, number in enumerate(range(1, 5)):
        seeds = values(rows, **own, round=number)
        assert len(seeds) == 3
        assert line.x[place] == number
        assert line.y[place] == pytest.approx(fmean(seeds))
        assert line.high[place] - line.y[place] == pytest.approx(stdev(seeds))
        assert line.y[place] - line.low[place] == pytest.approx(stdev(seeds))


def test_over_settings_a_seed_counts_with_its_mean_over_sites(swept, by_name, values):
    rows, source = swept
    line = by_name(learning_curves, source)["learning-curves"].panels[0].series[1]
    seeds = [
        fmean(values(rows, variation="lam 0.1", algorithm="fedavg", seed=k, split="val", round=3))
        for k in range(3)
    ]
    assert line.y[2] == pytest.approx(fmean(seeds))
    assert line.high[2] - line.low[2] == pytest.approx(2 * stdev(seeds))


def test_a_line_has_the_rounds_that_all_seeds_and_all_sites_have(source_of, by_name):
    hole = {"split": "val", "algorithm": "fedavg", "variation": "lam 1", "seed": 2, "round": 4,
            "site": "north"}  # fmt: skip
    rows = [row for row in sweep_rows() if not row.items() >= hole.items()]
    figures = by_name(learning_curves, source_of(rows))
    by_site = figures["learning-curves-lam 1"].panels
    assert by_site[0].series[1].x == (1, 2, 3)
    assert by_site[1].series[1].x == (1, 2, 3, 4)
    assert figures["learning-curves"].panels[1].series[1].x == (1, 2, 3)


def test_one_seed_has_no_band(source_of, by_name):
    figures = by_name(learning_curves, source_of(sweep_rows(seeds=1)))
    assert {s.low for p in figures["loss-curves"].panels for s in p.series} == {()}


def test_the_frame_leaves_out_what_the_first_rounds_alone_would_need():
    rounds = tuple(float(k) for k in range(21))
    line = Series("a", Look(0, 0), "line", rounds, (50.0, 40.0, 30.0, *rounds[3:]))
    assert frame_of([line]) == pytest.approx((3 - 0.05 * 17, 20 + 0.05 * 17))
    short = Series("a", Look(0, 0), "line", (0.0, 1.0), (5.0, 1.0))
    assert frame_of([short]) == pytest.approx((0.8, 5.2))
    assert frame_of([]) is None


def test_of_many_rounds_a_line_has_some_and_the_last():
    rows = pd.DataFrame({"seed": 0, "round": range(1, 402), "value": [k / 400 for k in range(401)]})
    line = line_of("a", Look(0, 0), rows)
    assert line is not None
    assert line.x == tuple(range(2, 402, 3))
    assert line.y[-1] == 1.0
    assert line_of("a", Look(0, 0), rows[:0]) is None
