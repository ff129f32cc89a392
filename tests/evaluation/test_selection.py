from typing import Any

import pytest

from collegium.evaluation.results import SELECTION, results_frame
from collegium.evaluation.selection import (
    rounds_table,
    rounds_trained,
    selected_rounds,
    selected_scores,
    selection_notes,
    used_models,
)

ABOUT: dict[str, Any] = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "metric": "dice"}
RULE = {"by": "site", "round": "best", "min_events": 6}


def results(events: dict[str, float], *, other: str = "global by federation"):
    """Sites, each with its events, whose global model is that of round 2 of 3."""
    rows = []
    for site, count in events.items():
        for model, number in (("global", 2), (other, 3)):
            about = {**ABOUT, "site": site, "model": model}
            counted = {"split": SELECTION, "metric": "events", "value": count}
            rows.append({**about, "round": number, **counted})
            test = {"split": "test", "case": "c", "patient": "p", "value": 0.5}
            rows.append({**about, "round": number, **test})
        for number, value in enumerate((0.1, 0.2, 0.3), start=1):
            val = {"split": "val", "model": "global", "round": number, "value": value}
            rows.append({**ABOUT, "site": site, **val})
    return results_frame(rows)


def test_the_round_of_a_model_is_that_of_its_test_scores():
    found = selected_rounds(results({"A": 9}))
    assert [*zip(found["model"], found["round"], strict=True)] == [
        ("global", 2), ("global by federation", 3),
    ]  # fmt: skip


def test_the_validation_score_is_that_of_the_selected_round():
    found = selected_scores(results({"A": 9, "B": 9}))
    assert [*zip(found["site"], found["value"], strict=True)] == [("A", 0.2), ("B", 0.2)]


def test_the_model_of_the_other_choice_takes_no_part():
    assert set(used_models(results({"A": 9}))["model"]) == {"global"}


def test_the_rule_is_one_sentence_and_the_other_choice_another():
    assert selection_notes(results({"A": 9}), RULE) == (
        "The round of each model is the one that was best on its site's own validation cases.",
        '"global by federation" is the global model of the federation\'s choice, and takes no part '
        "in answers.",
    )
    assert selection_notes(results({"A": 9}), {}) == ()


@pytest.mark.parametrize(
    ("by", "who"), [("site", ["A", "C"]), ("federation", ["all sites together"])]
)
def test_few_events_are_said_with_site_and_number(by, who):
    rule, other = {**RULE, "by": by, "round": "smoothed"}, "global by site"
    found = results({"A": 1, "B": 6, "C": 0}, other=other if by == "federation" else "x")
    notes = selection_notes(found, rule)[1:]
    few = [note for note in notes if "last round instead" in note]
    assert [note.split(" it is ")[0].removeprefix("At ") for note in few] == who
    if by == "site":
        assert few[0] == (
            "At A it is the last round instead, since the choice would depend on 1 patient of the "
            "validation cases (of the rarer class, if there are classes); at least 6 are needed."
        )


def test_the_last_round_depends_on_no_events():
    notes = selection_notes(results({"A": 1}), {**RULE, "round": "last"})
    assert notes[0] == "The round of each model is the last one."
    assert len(notes) == 2


def stopped(*ends: tuple[str, int, int]):
    """One tested model of each training: its algorithm, its seed, and its last round."""
    rows = []
    for algorithm, seed, end in ends:
        about = {**ABOUT, "algorithm": algorithm, "seed": seed, "site": "A"}
        count = {"split": SELECTION, "metric": "rounds", "value": end, "round": end}
        score = {"split": "test", "case": "c", "patient": "p", "value": 0.5, "round": 2}
        rows += [about | count, about | score | {"model": "global"}]
    return results_frame(rows)


def test_different_numbers_of_rounds_are_said_with_the_methods():
    found = stopped(("fedavg", 1, 8), ("fedavg", 0, 10), ("ditto", 0, 12), ("ditto", 1, 12))
    assert rounds_trained(found) == {"ditto": [12, 12], "fedavg": [10, 8]}
    assert selection_notes(found, RULE)[1:] == (
        "Early stopping: trainings ended after different numbers of rounds, so that budgets are "
        "not equal: ditto 12, fedavg 8 to 10.",
    )
    table = rounds_table(found, ["fedavg", "ditto"])
    assert table.ends == ["10, 8", "12, 12"]


def test_equal_numbers_of_rounds_are_one_sentence():
    found = stopped(("fedavg", 0, 8), ("ditto", 0, 8))
    assert selection_notes(found, RULE)[1:] == (
        "Early stopping: every training ended after round 8.",
    )


def test_without_early_stopping_nothing_is_said_of_the_end():
    assert rounds_trained(results({"A": 9})) == {}
    assert rounds_table(results({"A": 9}), []).ends == []
