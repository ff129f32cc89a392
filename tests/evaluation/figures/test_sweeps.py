from math import sqrt
from statistics import fmean, stdev, variance

import pytest
from scipy.stats import t as student
from tests.evaluation.figures.conftest import CONFIG, sweep_rows

from collegium.evaluation.figures.sweeps import sweep_figures, swept_value
from collegium.evaluation.figures.traffic import traffic_figures

TWO = ("a", "b")


@pytest.mark.parametrize(
    ("first", "second", "name", "values"),
    [
        ({"algorithms.2.tau": 0.1}, {"algorithms.2.tau": 1}, "tau", (0.1, 1.0)),
        ({"algorithms.2.lam": 2.0}, {}, "lam", (2.0, 0.5)),  # as the experiment has it
        ({"training": {"local_epochs": 1}}, {"training.local_epochs": 4}, "local epochs", (1, 4)),
        ({"rounds": 5, "algorithms.1.mu": 1, "algorithms.2.mu": 1},
         {"rounds": 5, "algorithms.1.mu": 2, "algorithms.2.mu": 2}, "mu", (1, 2)),
        ({"federation.outside": ["south"]}, {"federation.outside": []}, "sites that train", (1, 2)),
    ],
)  # fmt: skip
def test_settings_that_differ_in_one_number_stand_at_it(first, second, name, values):
    swept = swept_value({**CONFIG, "variations": {"a": first, "b": second}}, TWO)
    assert swept.axis.title == name
    assert tuple(swept.places.values()) == values
    assert swept.axis.ticks == tuple(sorted(values))
    assert not swept.shared


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"rounds": 5, "training.local_epochs": 4}, {"rounds": 20, "training.local_epochs": 1}),
        ({"algorithms.1.mu": 1, "algorithms.2.mu": 2}, {"algorithms.1.mu": 3}),
        ({"codec": "stc"}, {"codec": "identity"}),
        ({"model.norm": True}, {"model.norm": False}),
        ({"federation.outside": ["south"]}, {"federation.outside": ["north"]}),
        ({}, {}),
    ],
)  # fmt: skip
def test_other_settings_stand_side_by_side(first, second):
    swept = swept_value({**CONFIG, "variations": {"a": first, "b": second}}, TWO)
    assert (swept.axis.title, swept.axis.names) == ("setting", TWO)
    assert swept.places == {"a": 0.0, "b": 1.0}


def test_numbers_far_apart_are_on_a_logarithmic_axis():
    def scale(*numbers):
        names = [str(number) for number in numbers]
        variations = {str(number): {"algorithms.2.lam": number} for number in numbers}
        return swept_value({**CONFIG, "variations": variations}, names).axis.scale

    assert scale(0.01, 0.1, 10) == "log"
    assert scale(0.1, 1) == "linear"
    assert scale(0.0, 0.01, 10) == "linear"


def test_points_are_means_over_seeds_of_the_average_over_sites(swept, by_name, values):
    rows, source = swept
    figure = by_name(sweep_figures, source)["sweep-dice"]
    ditto = figure.panels[0].series[2]
    assert (ditto.name, ditto.kind, ditto.x) == ("Ditto personal", "points", (0.1, 1.0))
    for place, setting in enumerate(("lam 0.1", "lam 1")):
        own = {"variation": setting, "algorithm": "ditto", "split": "test"}
        seeds = [
            fmean(fmean(values(rows, **own, seed=k, site=site)) for site in ("north", "south"))
            for k in range(3)
        ]
        assert ditto.y[place] == pytest.approx(fmean(seeds))
        assert ditto.high[place] - ditto.y[place] == pytest.approx(stdev(seeds))
    assert "one sample standard deviation over seeds" in figure.caption
    assert "95 % intervals" in figure.caption


def test_differences_have_the_interval_of_the_patients(source_of, by_name, values):
    rows = sweep_rows(seeds=1)
    panel = by_name(sweep_figures, source_of(rows))["sweep-dice"].panels[1]
    assert panel.guide == "zero"
    assert [series.name for series in panel.series] == ["FedAvg global", "Ditto personal"]
    differences, squares = [], []
    for site in ("north", "south"):
        own = {"variation": "lam 1", "site": site, "split": "test"}
        pairs = zip(
            values(rows, **own, algorithm="ditto"), values(rows, **own, algorithm="local"),
            strict=True,
        )  # fmt: skip
        each = [joined - alone for joined, alone in pairs]
        differences.append(fmean(each))
        squares.append(variance(each) / 8 / 4)  # of the mean of two sites with eight patients each
    total = sum(squares)
    df = total**2 / sum(square**2 / 7 for square in squares)
    bar = student.ppf(0.975, df) * sqrt(total)
    ditto = panel.series[1]
    assert ditto.y[1] == pytest.approx(fmean(differences))
    assert ditto.low[1] == pytest.approx(fmean(differences) - bar)
    assert ditto.high[1] == pytest.approx(fmean(differences) + bar)


def test_without_training_alone_there_is_one_panel(source_of, by_name):
    rows = [row for row in sweep_rows() if row["algorithm"] != "local"]
    figure = by_name(sweep_figures, source_of(rows))["sweep-dice"]
    assert [panel.title for panel in figure.panels] == [""]
    assert "Left" not in figure.caption


def test_settings_of_one_value_are_points_around_their_mean(source_of, by_name):
    names = ("n", "s", "both")
    outside = {"n": ["south"], "s": ["north"], "both": []}
    config = {**CONFIG, "variations": {n: {"federation.outside": outside[n]} for n in names}}
    figure = by_name(sweep_figures, source_of(sweep_rows(settings=names), config))["sweep-dice"]
    line, first, second = [s for s in figure.panels[0].series if s.name == "Ditto personal"]
    assert (first.kind, first.x, second.x) == ("settings", (1.0, 2.0), (1.0,))
    assert (line.kind, line.x) == ("points", (1.0, 2.0))
    assert line.y == pytest.approx((fmean([first.y[0], second.y[0]]), first.y[1]))
    assert figure.caption.endswith("the line joins their means, and small points are the settings.")


def test_a_run_without_settings_has_no_sweep(source_of):
    rows = [{**row, "variation": ""} for row in sweep_rows(settings=("one",))]
    assert not list(sweep_figures(source_of(rows)))


def test_a_metric_that_is_undefined_everywhere_has_no_sweep(source_of, by_name):
    rows = [{**row, "metric": "hd95", "value": None} for row in sweep_rows() if "case" in row]
    assert "sweep-hd95" not in by_name(sweep_figures, source_of([*sweep_rows(), *rows]))


def coded():
    """The second setting sends a quarter."""
    rows = sweep_rows()
    for row in rows:
        if row["variation"] == "lam 1" and "bytes_up" in row:
            row["bytes_up"] //= 4
    return rows


def test_bytes_are_drawn_over_the_value_only_if_they_differ(swept, source_of, by_name):
    assert "sweep-bytes" not in by_name(sweep_figures, swept[1])
    sent, received = by_name(sweep_figures, source_of(coded()))["sweep-bytes"].panels
    assert (sent.title, sent.y.label) == ("Sent by the sites", "bytes (kB)")
    # 2000 bytes a round at two sites over four rounds
    assert sent.series[1].y == (16.0, 4.0)
    assert received.series[1].y == (32.0, 32.0)


def test_bytes_add_up_over_the_rounds(swept, by_name):
    figure = by_name(traffic_figures, swept[1])["bytes"]
    assert [panel.title for panel in figure.panels] == [
        "Sent by the sites",
        "Received by the sites",
    ]
    local, fedavg, ditto = figure.panels[0].series
    assert fedavg.x == (1, 2, 3, 4)
    assert fedavg.y == pytest.approx((4, 8, 12, 16))
    assert local.y == pytest.approx((0.02, 0.04, 0.06, 0.08))
    assert (fedavg.low, ditto.name) == (fedavg.y, "Ditto")
    assert figure.panels[1].series[1].y == pytest.approx((8, 16, 24, 32))


def test_settings_that_send_other_amounts_are_lines_of_their_own(source_of, by_name):
    figure = by_name(traffic_figures, source_of(coded()))["bytes"]
    names = [series.name for series in figure.panels[0].series]
    assert names == [
        f"{method}, {setting}"
        for setting in ("lam 0.1", "lam 1")
        for method in ("Local", "FedAvg", "Ditto")
    ]
    assert figure.panels[0].series[4].y == pytest.approx((1, 2, 3, 4))
    looks = {(s.look.colour, s.look.marker) for s in figure.panels[0].series}
    assert len(looks) == 6


def test_many_settings_that_send_other_amounts_have_panels(source_of, by_name):
    names = tuple(f"s{k}" for k in range(4))
    rows = sweep_rows(settings=names)
    for row in rows:
        if "bytes_up" in row:
            row["bytes_up"] *= 1 + names.index(row["variation"])
    figure = by_name(traffic_figures, source_of(rows))["bytes"]
    assert [panel.title for panel in figure.panels] == [
        f"{way} by the sites, {name}" for name in names for way in ("Sent", "Received")
    ]
    assert figure.across == 2


def test_a_run_that_sends_nothing_has_no_figure_of_bytes(source_of):
    rows = [{k: v for k, v in r.items() if not k.startswith("bytes")} for r in sweep_rows()]
    assert not list(traffic_figures(source_of(rows)))
