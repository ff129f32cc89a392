from statistics import fmean, stdev

import pytest
from tests.evaluation.figures.conftest import sweep_rows

from collegium.evaluation.figures.server import MOST_BOXES, server_figures

BOX = {"min": 0.0, "q1": 1.0, "median": 2.0, "q3": 3.0, "max": 9.0, "mean": 2.5}


def recorded(rounds=3):
    about = {"experiment": "e", "algorithm": "ditto", "site": "", "split": "train"}
    for seed in (0, 1):
        for number in range(1, rounds + 1):
            own = {**about, "seed": seed, "round": number}
            for side, shift in (("before", 0.0), ("after", 0.25)):
                value = 0.125 * number + shift + 0.5 * seed
                yield {**own, "metric": f"consistency/{side}", "value": value}
            for name, value in BOX.items():
                yield {**own, "metric": f"sdwd/{name}", "value": value + number + seed}


def plain():
    return [{**row, "variation": ""} for row in sweep_rows(settings=("one",))]


def test_both_sides_of_the_inequality_are_lines_over_rounds(source_of, by_name):
    figure = by_name(server_figures, source_of([*plain(), *recorded()]))["consistency"]
    (panel,) = figure.panels
    before, after = panel.series
    assert [s.name for s in panel.series] == [
        "before the server's weights", "after the server's weights",
    ]  # fmt: skip
    for number in (1, 2, 3):
        seeds = [0.125 * number + 0.5 * seed for seed in (0, 1)]
        place = before.x.index(number)
        assert before.y[place] == pytest.approx(fmean(seeds))
        assert before.high[place] - before.y[place] == pytest.approx(stdev(seeds))
        assert after.y[place] - before.y[place] == pytest.approx(0.25)


def test_a_box_of_a_round_is_that_of_the_rows_as_a_mean_over_seeds(source_of, by_name):
    (panel,) = by_name(server_figures, source_of([*plain(), *recorded()]))["sdwd"].panels
    assert panel.y.names == ("1", "2", "3")
    box = panel.boxes[0].boxes[1]  # round 2: both seeds are 2.5 above on average
    assert (box.place, box.low, box.first, box.median, box.third, box.high) == (
        1.0, 2.5, 3.5, 4.5, 5.5, 11.5,
    )  # fmt: skip


def test_of_many_rounds_some_have_boxes(source_of, by_name):
    rows = [*plain(), *recorded(3 * MOST_BOXES)]
    (panel,) = by_name(server_figures, source_of(rows))["sdwd"].panels
    assert panel.y.names == tuple(str(number) for number in range(1, 3 * MOST_BOXES + 1, 3))


def test_a_run_without_them_has_no_such_figures(source_of):
    assert not list(server_figures(source_of(plain())))
