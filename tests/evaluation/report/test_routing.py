import re
from dataclasses import replace

import pytest

from collegium.evaluation.report.routing import (
    RoutingCoefficients,
    gather_adaptations,
    loss_lines,
    mean_routes,
    shades,
    variation_svg,
)


def account(seed=0, adapter="routing", **changes):
    return {
        "adapter": {"name": adapter, "label": adapter}, "algorithm": "iopfl", "seed": seed,
        "site": "hrf", "sources": ["global", "a"], "cases": 45, "steps": 10 + seed, "seconds": 4.0,
        "losses": [], "chosen": None, "coefficients": None, "notes": [],
    } | changes  # fmt: skip


def coefficients(*rows, layers=("down", "up")):
    return {"layers": list(layers), "sources": ["global", "a"], "values": [list(r) for r in rows]}


def test_seeds_of_one_adapter_are_brought_together():
    accounts = [
        account(1, notes=["n"], coefficients=coefficients((0.4, 0.6), (0.2, 0.8))),
        account(0, notes=["n", "m"], coefficients=coefficients((0.6, 0.4), (0.4, 0.6))),
        account(0, "none"),
    ]
    none, routing = gather_adaptations(accounts, ["iopfl"])
    assert (none.name, none.routes, none.seeds) == ("IOP-FL", None, (0,))
    assert (routing.name, routing.seeds, routing.steps) == ("IOP-FL + routing", (0, 1), 10.5)
    assert routing.notes == ("n", "m")
    assert routing.routes is not None
    assert [x for row in routing.routes.values for x in row] == pytest.approx([0.5, 0.5, 0.3, 0.7])
    assert routing.routes.means == pytest.approx((0.4, 0.6))
    assert routing.routes.favourite == "a"


def test_coefficients_of_another_network_are_not_averaged_in():
    accounts = [
        account(0, coefficients=coefficients((0.6, 0.4), (0.4, 0.6))),
        account(1, coefficients=coefficients((0.0, 1.0), layers=["other"])),
    ]
    (found,) = gather_adaptations(accounts, [])
    assert found.routes is not None
    assert found.routes.values == ((0.6, 0.4), (0.4, 0.6))


def test_losses_of_several_cases_are_averaged_by_step():
    losses = [
        {"step": 0, "total": 2.0, "shape": 1.0},
        {"step": 0, "total": 4.0, "shape": None},
        {"step": 1, "total": 1.0},
    ]
    (found,) = gather_adaptations([account(losses=losses)], [])
    (line,) = found.losses  # the shape has a single step, which is no line
    assert (line.name, dict(line.points)) == ("total", {0: 3.0, 1: 1.0})
    low, high = found.frame
    assert low < 1.0 < 3.0 < high


def cell(text, shade, deviation=""):
    return {"text": text, "shade": shade, "deviation": deviation}


def test_shades_reach_from_the_smallest_to_the_largest():
    routes = RoutingCoefficients(("down", "up"), ("global", "a"), ((0.25, 0.75), (0.5, 0.5)))
    assert shades(routes) == [
        ("down", [cell("0.250", 0), cell("0.750", 88)]),
        ("up", [cell("0.500", 44), cell("0.500", 44)]),
    ]
    spread = replace(routes, deviations=((0.01, 0.02), (0.03, 0.04)))
    assert shades(spread)[1] == ("up", [cell("0.500", 44, "0.030"), cell("0.500", 44, "0.040")])
    equal = RoutingCoefficients(("down",), ("global", "a"), ((0.5, 0.5),))
    assert [cell["shade"] for cell in shades(equal)[0][1]] == [0, 0]


def known(*rows, deviations, variation, variation_deviation):
    return coefficients(*rows) | {
        "deviations": deviations, "variation": variation,
        "variation_deviation": variation_deviation,
    }  # fmt: skip


FIRST = known((0.4, 0.6), (0.2, 0.8), deviations=[[0.1, 0.2], [0.3, 0.4]],
              variation=[0.02, 0.5], variation_deviation=[0.01, 0.0])  # fmt: skip
SECOND = known((0.6, 0.4), (0.4, 0.6), deviations=[[0.3, 0.2], [0.1, 0.0]],
               variation=[0.04, 0.3], variation_deviation=[0.03, 0.2])  # fmt: skip


def test_how_cases_differ_is_averaged_over_the_seeds_that_know_it():
    old = coefficients((0.5, 0.5), (0.9, 0.1))
    routes = mean_routes([FIRST, None, SECOND, old])
    assert routes is not None
    assert [x for row in routes.values for x in row] == pytest.approx([0.5, 0.5, 0.5, 0.5])
    assert [x for row in routes.deviations for x in row] == pytest.approx([0.2, 0.2, 0.2, 0.2])
    assert [x for row in routes.varied for x in row] == pytest.approx([3.0, 2.0, 40.0, 10.0])


def test_an_account_older_than_the_weight_variation_has_none():
    routes = mean_routes([coefficients((0.5, 0.5), (0.9, 0.1))])
    assert routes is not None
    assert (routes.deviations, routes.varied) == ((), [])
    assert variation_svg(routes, "routing") == ""
    assert [found["deviation"] for found in shades(routes)[0][1]] == ["", ""]


def points(text):
    return [tuple(map(float, pair.split(","))) for pair in text.split()]


def test_the_chart_has_a_line_of_means_in_a_band_of_one_deviation():
    routes = mean_routes([known(
        (0.4, 0.6), (0.2, 0.8), deviations=[[0.0, 0.0]] * 2,
        variation=[0.1, 0.3], variation_deviation=[0.2, 0.1],
    )])  # fmt: skip
    assert routes is not None
    svg = variation_svg(replace(routes, layers=("down", "<b>up")), "IOP-FL & routing")
    assert 'aria-label="Weight variation of IOP-FL &amp; routing over 2 layers; largest at ' \
        '&lt;b&gt;up, 30 %."' in svg  # fmt: skip
    assert "<b>" not in svg
    line = re.findall(r'<polyline points="([^"]+)"', svg)
    band = re.findall(r'<path fill-opacity=".2" d="M([^"]+)z"', svg)
    assert (len(line), len(band)) == (1, 1)
    (left, low), (right, high) = points(line[0])
    assert left < right
    # 40 % is the highest point of the band, with 5 % of air above it in a frame from 10 to 212
    expected = [212 - 202 * value / 42 for value in (10, 30)]
    assert [low, high] == pytest.approx(expected, abs=0.06)
    around = [212 - 202 * value / 42 for value in (30, 40, 20, 0)]  # never below 0
    assert [y for _, y in points(band[0])] == pytest.approx(around, abs=0.06)
    assert [x for x, _ in points(band[0])] == [left, right, right, left]


def test_a_term_that_is_the_total_itself_has_no_line_of_its_own():
    rows = [{"step": k, "total": 2.0 - k, "entropy": 2.0 - k, "shape": 1.0} for k in range(3)]
    assert [line.name for line in loss_lines(rows)] == ["total", "shape"]
