from xml.etree import ElementTree

import pytest

from collegium.evaluation.report.plots import (
    COLOURS,
    MARKERS,
    ChartLine,
    interval_svg,
    learning_curves,
    legend_svg,
    limits,
    line_chart,
    reach,
    ticks,
)
from collegium.evaluation.results import results_frame


def round_row(algorithm="fedavg", seed=0, site="A", number=1, **changes):
    about = {"split": "train", "metric": "loss", "value": 1.0, "model": ""}
    return dict(experiment="e", algorithm=algorithm, seed=seed, site=site, round=number,
               **{**about, **changes})  # fmt: skip


def line(points, name="FedAvg", place=0, *, dashed=False):
    return ChartLine(name, place, dashed, points)


def lines_in(svg):
    """Name -> (x, y) of the points of each line."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("g"):
        if "data-name" in group.attrib:
            (drawn,) = group.iter("polyline")
            points = drawn.attrib["points"].split(" ")
            found[group.attrib["data-name"]] = [
                tuple(map(float, point.split(","))) for point in points
            ]
    return found


def test_a_curve_is_the_mean_over_seeds_and_folds_by_round():
    rows = [
        round_row(seed=0, number=2, value=0.4),
        round_row(seed=1, number=2, value=0.6),
        round_row(seed=1, number=2, value=0.8, fold=1),
        round_row(seed=0, number=1, value=0.9),
        round_row(seed=1, number=1, value=None),
    ]
    (found,) = learning_curves(results_frame(rows), "loss", "train", ["fedavg"])["A"]
    assert list(found.points) == [1, 2]
    assert list(found.points.values()) == pytest.approx([0.9, 0.6])


def test_each_site_has_a_line_for_each_algorithm_and_model():
    val = {"split": "val", "metric": "dice"}
    rows = [
        round_row(algorithm, site=site, model=model, **val)
        for site in ("C", "A")
        for algorithm, model in (("ditto", "global"), ("ditto", "personal"), ("fedavg", "global"))
    ]
    found = learning_curves(results_frame(rows), "dice", "val", ["fedavg", "ditto"])
    assert list(found) == ["A", "C"]
    assert [(s.name, s.place, s.dashed, s.look) for s in found["A"]] == [
        ("FedAvg global", 0, False, "c0"),
        ("Ditto global", 1, False, "c1"),
        ("Ditto personal", 1, True, "c1 dashed"),
    ]
    assert len({s.key for s in found["A"]}) == 3


def test_nothing_to_draw_is_no_curve():
    assert (
        learning_curves(results_frame([round_row(value=None)]), "loss", "train", ["fedavg"]) == {}
    )


def test_a_line_is_drawn_to_scale():
    svg = line_chart([line({1: 0.0, 2: 0.5, 5: 1.0})], "Loss", (0.0, 1.0))
    # the frame reaches from 66 to 508 and, downwards, from 10 to 212
    assert lines_in(svg)["FedAvg"] == [(66, 212), (66 + 442 / 4, 111), (508, 10)]
    assert ElementTree.fromstring(svg).attrib["data-y"] == "212 10 0 1"


def test_a_line_of_many_rounds_is_thinned_but_keeps_its_ends():
    points = {number: float(number) for number in range(1, 1001)}
    drawn = lines_in(line_chart([line(points)], "Loss"))["FedAvg"]
    assert 100 < len(drawn) <= 151
    assert (drawn[0][0], drawn[-1][0]) == (66, 508)


def test_the_first_rounds_do_not_decide_what_the_frame_holds():
    points = {number: 9.0 if number < 3 else number / 20 for number in range(1, 21)}
    assert limits([line(points)]) == pytest.approx((0.15 - 0.0425, 1.0 + 0.0425))
    assert limits([line(points)], warm_up=0.0)[1] > 9
    assert limits([line({1: 9.0, 2: 1.0})])[1] > 9
    low, high = limits([line({1: 3.0})])
    assert low < 3.0 < high


def test_names_in_charts_are_escaped_and_the_chart_says_what_it_shows():
    drawn = ElementTree.fromstring(
        line_chart([line({1: 0.5, 7: 0.25}, '<i>"x')], "A & B", over="step")
    )
    assert drawn.attrib["aria-label"] == 'A & B over steps 1 to 7. Last values: <i>"x 0.25.'
    assert drawn.attrib["role"] == "img"


def test_algorithms_differ_in_colour_and_marker():
    looks = [legend_svg(line({1: 1.0}, place=place)) for place in range(COLOURS)]
    assert len(set(looks)) == COLOURS
    assert len(set(MARKERS)) == len(MARKERS)
    assert legend_svg(line({}, dashed=True)) != legend_svg(line({}))


def test_ticks_are_round_and_lie_between():
    assert ticks(0.12, 0.87) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert ticks(1, 12) == [5, 10]
    assert ticks(3, 3) == [3]
    assert [str(tick) for tick in ticks(-0.1, 0.5)] == ["0.0", "0.2", "0.4"]


def test_an_interval_is_drawn_to_scale_around_zero():
    drawn = ElementTree.fromstring(interval_svg(0.05, -0.1, 0.1, 0.1))
    zero, bar, dot = (part.attrib for part in drawn)
    assert float(zero["x1"]) == 80
    assert (float(bar["x1"]), float(bar["x2"])) == (8, 152)
    assert float(dot["cx"]) == 80 + 36
    assert drawn.get("aria-hidden") == "true"


def test_an_interval_that_is_none_is_a_dot_or_nothing():
    dot = ElementTree.fromstring(interval_svg(0.0, None, None, 1.0))
    assert len(dot.findall("line")) == 1
    assert dot.find("circle") is not None
    empty = ElementTree.fromstring(interval_svg(None, None, None, 1.0))
    assert empty.find("circle") is None


def test_the_common_scale_reaches_the_farthest_end():
    assert reach([0.1, -0.3, 0.2, None]) == 0.3
    assert reach([]) == 1.0
