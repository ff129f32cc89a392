from itertools import pairwise
from statistics import fmean, median

import pytest
from tests.evaluation.figures.conftest import sweep_rows

from collegium.evaluation.figures.cases import case_boxes, joined_against_alone
from collegium.evaluation.figures.source import of_single_cases
from collegium.evaluation.results import results_frame


def case_means(values, rows, **wanted):
    return {f"c{k}": fmean(values(rows, **wanted, case=f"c{k}", split="test")) for k in range(8)}


def test_a_box_holds_the_cases_of_a_setting(swept, by_name, values):
    rows, source = swept
    figure = by_name(case_boxes, source)["cases-dice"]
    assert [panel.title for panel in figure.panels] == ["north", "south"]
    south = figure.panels[1]
    assert south.y.names == ("lam 0.1", "lam 1")
    ditto = south.boxes[2]
    cases = case_means(values, rows, algorithm="ditto", site="south", variation="lam 1")
    assert ditto.name == "Ditto personal"
    assert ditto.boxes[1].median == pytest.approx(median(cases.values()))
    assert ditto.boxes[1].count == 8
    places = sorted(box.place for boxes in south.boxes for box in boxes.boxes)
    apart = [b - a for a, b in pairwise(places)]
    assert min(apart) >= south.boxes[0].width


def test_without_a_sweep_methods_stand_side_by_side(source_of, by_name):
    rows = [{**row, "variation": ""} for row in sweep_rows(settings=("one",))]
    panel = by_name(case_boxes, source_of(rows))["cases-dice"].panels[0]
    assert panel.y.names == ("Local personal", "FedAvg global", "Ditto personal")
    assert [boxes.boxes[0].place for boxes in panel.boxes] == [0, 1, 2]


def test_a_case_without_a_score_in_one_training_is_left_out(source_of, by_name):
    rows = sweep_rows()
    hole = {"case": "c3", "seed": 1, "algorithm": "fedavg", "site": "north", "variation": "lam 1"}
    for row in rows:
        if row.items() >= hole.items():
            row["value"] = None
    north, south = by_name(case_boxes, source_of(rows))["cases-dice"].panels
    assert [box.count for box in north.boxes[1].boxes] == [8, 7]
    assert [box.count for box in south.boxes[1].boxes] == [8, 8]


def test_metrics_of_sets_of_cases_and_hits_have_no_boxes():
    about = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1, "site": "a",
             "split": "test", "model": "global"}  # fmt: skip
    values = {"auc": (0.1, 0.2, 0.3, 0.4), "accuracy": (0, 1, 1, 0), "set": (0.7,) * 4,
              "log_loss": (0.1, 0.2, 0.3, 0.4)}  # fmt: skip
    rows = [
        {**about, "case": f"c{k}", "patient": f"p{k}", "metric": metric, "value": value}
        for metric, found in values.items()
        for k, value in enumerate(found)
    ]
    assert of_single_cases(results_frame(rows)) == ["log_loss"]


def test_every_case_stands_at_its_scores_alone_and_joined(swept, by_name, values):
    rows, source = swept
    figure = by_name(joined_against_alone, source)["joined-against-alone-lam 1"]
    answers = source.compared.joining("dice", "lam 1").answers
    assert [panel.title for panel in figure.panels] == [c.verdict.site for c in answers]
    for panel, answer in zip(figure.panels, answers, strict=True):
        own = {"site": panel.title, "variation": "lam 1"}
        alone = case_means(values, rows, algorithm="local", **own)
        joined = case_means(values, rows, algorithm=answer.algorithm, **own)
        (series,) = panel.series
        assert series.name == answer.verdict.method
        assert series.x == pytest.approx([*alone.values()])
        assert series.y == pytest.approx([*joined.values()])
        assert panel.guide == "diagonal"
        assert panel.x.limits == panel.y.limits


def test_without_training_alone_there_is_nothing_to_compare(source_of):
    rows = [row for row in sweep_rows() if row["algorithm"] != "local"]
    assert not list(joined_against_alone(source_of(rows)))


def test_of_a_classification_the_first_score_of_single_cases_is_drawn(source_of, by_name):
    rows = sweep_rows()
    for row in [row for row in rows if row["metric"] == "dice"]:
        row["metric"], row["value"] = "accuracy", float(row["value"] > 0.6)
        if "case" in row:
            for place, metric in enumerate(("log_loss", "brier")):
                value = 0.1 + place + 0.01 * int(row["case"][1:]) + 0.3 * row["value"]
                rows.append({**row, "metric": metric, "value": value})
    source = source_of(rows)
    assert source.metric == "accuracy"
    boxes = by_name(case_boxes, source)
    assert {name: f.in_report for name, f in boxes.items()} == {
        "cases-log_loss": True, "cases-brier": False,
    }  # fmt: skip
    figure = by_name(joined_against_alone, source)["joined-against-alone-lam 1"]
    assert figure.panels[0].x.label == "Log loss alone"
