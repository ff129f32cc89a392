from xml.etree import ElementTree

import pytest

from collegium.benchmark.significance import Interval
from collegium.report.plots import (
    Traffic,
    count_traffic,
    interval_svg,
    learning_curves,
    reach,
    size,
    style,
    title,
    traffic,
)
from collegium.results import Row


def round_row(algorithm="fedavg", seed=0, site="A", number=1, **changes):
    about = {"split": "train", "metric": "loss", "value": 1.0, "model": ""}
    return Row(experiment="e", algorithm=algorithm, seed=seed, site=site, round=number,
               **{**about, **changes})  # fmt: skip


def test_a_curve_is_the_mean_over_seeds_by_round():
    rows = [
        round_row(seed=0, number=2, value=0.4),
        round_row(seed=1, number=2, value=0.6),
        round_row(seed=0, number=1, value=0.9),
        round_row(seed=1, number=1, value=None),
    ]
    figure = learning_curves(rows, "loss", "train", ["fedavg"])
    assert figure is not None
    (line,) = figure.data
    assert list(line.x) == [1, 2]
    assert list(line.y) == pytest.approx([0.9, 0.5])


def test_each_site_has_a_panel_and_each_method_one_entry_in_the_legend():
    val = {"split": "val", "metric": "dice"}
    rows = [
        round_row(algorithm, site=site, model=model, **val)
        for site in ("A", "<b>B", "C")
        for algorithm, model in (("ditto", "global"), ("ditto", "personal"), ("fedavg", "global"))
    ]
    figure = learning_curves(rows, "dice", "val", ["fedavg", "ditto"])
    assert figure is not None
    assert {a.text for a in figure.layout.annotations} == {"A", "&lt;b&gt;B", "C"}
    assert [line.name for line in figure.data if line.showlegend] == [
        "FedAvg global", "Ditto global", "Ditto personal",
    ]  # fmt: skip
    dashes = {line.name: line.line.dash for line in figure.data}
    assert dashes["Ditto personal"] == "dash"
    assert dashes["Ditto global"] == "solid"
    assert len({(line.xaxis, line.yaxis) for line in figure.data}) == 3


def test_algorithms_differ_in_colour_and_marker():
    order = list("abcdefg")
    styles = [style(label, order) for label in order]
    assert len({colour for colour, _ in styles}) == 7
    assert len({marker for _, marker in styles}) == 7


def test_nothing_to_draw_is_no_figure():
    assert learning_curves([round_row(value=None)], "loss", "train", ["fedavg"]) is None
    assert traffic([]) is None
    assert traffic([Traffic("local", 0, 0, 9, 0, 0)]) is None


def test_traffic_is_summed_over_sites_and_rounds_and_averaged_over_seeds():
    rows = [
        round_row(seed=seed, site=site, number=number, bytes_up=up, bytes_down=10, seconds=0.5)
        for seed, up in ((0, 100), (1, 300))
        for site in ("A", "B")
        for number in (1, 2)
    ]
    (found,) = count_traffic(rows, ["fedavg", "never ran"])
    # seed 0: 2 sites x 2 rounds x 100 = 400; seed 1: 1200; mean 800, per round half of it
    assert found == Traffic("fedavg", up=800, down=40, seconds=2.0, up_round=400, down_round=20)


def test_totals_of_the_case_rows_count_what_went_before_and_after_the_rounds():
    rows = [round_row(bytes_up=100), round_row(bytes_up=100, number=2)]
    rows.append(Row(experiment="e", algorithm="fedavg", seed=0, round=2, site="A", case="c001",
                    patient="p001", split="test", model="global", metric="dice", value=0.5,
                    bytes_up=260))  # fmt: skip
    (found,) = count_traffic(rows, ["fedavg"])
    assert (found.up, found.up_round) == (260, 100)


def test_bars_show_the_totals_in_megabytes():
    figure = traffic([Traffic("fedavg", 2_000_000, 500_000, 1, 0, 0)])
    assert figure is not None
    up, down = figure.data
    assert list(up.y) == ["FedAvg"]
    assert (up.x[0], down.x[0]) == (2.0, 0.5)
    assert (up.text[0], down.text[0]) == ("2.0 MB", "500.0 kB")


def test_sizes_are_decimal():
    assert [size(n) for n in (0, 999, 1000, 1_250_000, 3.2e9)] == [
        "0 B", "999 B", "1.0 kB", "1.2 MB", "3.2 GB",
    ]  # fmt: skip


def test_an_interval_is_drawn_to_scale_around_zero():
    drawn = ElementTree.fromstring(interval_svg(Interval(0.05, -0.1, 0.1, 9, 0), 0.1))
    zero, bar, dot = (part.attrib for part in drawn)
    assert float(zero["x1"]) == 80
    assert (float(bar["x1"]), float(bar["x2"])) == (8, 152)
    assert float(dot["cx"]) == 80 + 36
    assert drawn.get("aria-hidden") == "true"


def test_an_interval_that_is_none_is_a_dot_or_nothing():
    dot = ElementTree.fromstring(interval_svg(Interval(0.0, None, None, 1, 0), 1.0))
    assert len(dot.findall("line")) == 1
    assert dot.find("circle") is not None
    empty = ElementTree.fromstring(interval_svg(Interval(None, None, None, 0, 3), 1.0))
    assert empty.find("circle") is None


def test_the_common_scale_reaches_the_farthest_end():
    intervals = [Interval(0.1, -0.3, 0.2, 9, 0), Interval(None, None, None, 0, 0)]
    assert reach(intervals) == 0.3
    assert reach([]) == 1.0


def test_metrics_are_headed_as_the_field_writes_them():
    assert [title(m) for m in ("dice", "hd95_vessel", "negative_loss")] == [
        "Dice", "HD95 vessel", "Negative loss",
    ]  # fmt: skip
