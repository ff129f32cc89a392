from statistics import fmean

import pytest
from tests.evaluation.figures.conftest import CONFIG

from collegium.evaluation.figures.calibration import reliability_figures
from collegium.evaluation.figures.cases import case_boxes

TASK = {"name": "classification", "classes": ["healthy", "ill"], "calibration_bins": 4}
RUN = {**CONFIG, "federation": {"task": TASK, "sites": {}}, "variations": {}}
CASES = {  # probability of "ill" by seed, and whether the case is
    "c0": (0.10, 0.20, 0), "c1": (0.20, 0.15, 1), "c2": (0.90, 0.30, 1), "c3": (1.00, 0.95, 1),
    "c4": (0.80, 0.85, 0),
}  # fmt: skip


def rows(sites=("north", "south"), metrics=("ece",)):
    found = []
    for site in sites:
        for seed in (0, 1):
            for number, (case, (*both, ill)) in enumerate(CASES.items()):
                about = {
                    "experiment": "e", "algorithm": "fedavg", "seed": seed, "round": 2,
                    "site": site, "case": case, "patient": case, "split": "test", "model": "global",
                }  # fmt: skip
                values = {"_class": ill, "_p0": 1 - both[seed], "_p1": both[seed],
                          "accuracy": 1.0, **dict.fromkeys(metrics, 0.1 * number)}  # fmt: skip
                found += [{**about, "metric": k, "value": float(v)} for k, v in values.items()]
    return found


def test_a_point_is_a_bin_of_the_test_cases(source_of, by_name):
    figure = by_name(reliability_figures, source_of(rows(), RUN))["reliability"]
    assert figure.title == "Reliability of the probability of ill"
    assert [panel.title for panel in figure.panels] == ["north", "south"]
    panel = figure.panels[0]
    assert panel.guide == "diagonal"
    (line,) = panel.series
    assert line.name == "FedAvg global"
    # quarters of 0 to 1, by hand: four cases of both seeds in the first, one in the second, five in
    # the last
    first, last = [0.10, 0.20, 0.20, 0.15], [0.90, 1.00, 0.80, 0.95, 0.85]
    assert line.x == pytest.approx((fmean(first), 0.30, fmean(last)))
    assert line.y == pytest.approx((2 / 4, 1.0, 3 / 5))


def test_without_the_metric_there_is_none(source_of):
    assert not list(reliability_figures(source_of(rows(metrics=()), RUN)))


def test_pseudo_values_of_the_calibration_error_have_no_boxes(source_of):
    assert not list(case_boxes(source_of(rows(), RUN)))
