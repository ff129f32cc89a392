from typing import Any

import pytest

from collegium.evaluation.comparisons import adapting_table, joining_table
from collegium.evaluation.report.answers import answer_outside, answer_sites, select_on_validation
from collegium.evaluation.report.reading import RunOutput
from collegium.evaluation.results import AlgorithmLabels, results_frame

ABOUT: dict[str, Any] = {"experiment": "e", "seed": 0, "site": "A", "metric": "dice"}


def validation(algorithm, values, **changes):
    for number, value in enumerate(values, start=1):
        about = {**ABOUT, **changes, "algorithm": algorithm, "split": "val", "model": "global"}
        yield dict(**about, round=number, value=value)


def final(algorithm, values):
    for number, value in enumerate(values):
        about = {**ABOUT, "algorithm": algorithm, "split": "test", "model": "global", "round": 2}
        yield dict(**about, case=f"c{number}", patient=f"p{number}", value=value)


def run_of(rows, pooled=()):
    labels = AlgorithmLabels((), ("local", "a", "b"), "local", frozenset(pooled))
    return RunOutput({}, results_frame(rows), labels, "dice")


def test_the_method_of_an_answer_is_chosen_on_validation_alone():
    rows = [
        *validation("local", (0.9, 0.9)), *validation("a", (0.5, 0.7)),
        *validation("b", (0.8, 0.1)), *final("a", [0.9]), *final("b", [0.2]),
    ]  # fmt: skip
    assert select_on_validation(run_of(rows)) == {"A": ("b", "global")}
    assert select_on_validation(run_of(rows, ["b"])) == {"A": ("a", "global")}


def test_folds_count_like_seeds():
    rows = [
        *validation("a", (0.6,)), *validation("a", (0.2,), fold=1),
        *validation("b", (0.5,)), *validation("b", (0.5,), fold=1),
    ]  # fmt: skip
    assert select_on_validation(run_of(rows)) == {"A": ("b", "global")}


@pytest.mark.parametrize(
    ("gain", "starts", "counts"),
    [
        (0.1, "Joining helps A: with a global, Dice 0.535 alone, 0.635 joined, difference +0.1",
         [1, 0, 1]),
        (-0.1, "Joining hurts A: with a global, Dice 0.535 alone, 0.435 joined",
         [0, 1, 1]),
        (0.0, "Nobody can tell from this run whether joining helps A: ", [0, 0, 2]),
    ],
)  # fmt: skip
def test_the_answer_is_one_sentence_and_counts_the_methods(gain, starts, counts):
    alone = [0.5 + 0.01 * k for k in range(8)]
    rows = [
        *validation("a", (0.9,)), *validation("b", (0.1,)), *final("local", alone),
        *final("a", [value + gain for value in alone]), *final("b", alone),
    ]  # fmt: skip
    run = run_of(rows)
    answer = answer_sites(run, joining_table(run.results, "dice", run.order))["A"]
    assert answer.sentence.startswith(starts)
    assert list(answer.counts.values()) == counts
    assert [c.algorithm for c in answer.methods] == ["a", "b"]


def test_without_validation_no_method_is_chosen():
    alone = [0.5 + 0.01 * k for k in range(8)]
    rows = [*final("local", alone), *final("a", alone)]
    run = run_of(rows)
    answer = answer_sites(run, joining_table(run.results, "dice", run.order))["A"]
    assert (answer.chosen, answer.outcome) == (None, "")
    assert "No method was chosen for A" in answer.sentence


def test_every_site_outside_is_answered_for_each_adapted_method():
    gains = {"A": {"none": 0.0, "tent": 0.1, "dsbn": -0.2}, "B": {"none": 0.0, "tent": 0.1}}
    rows = [
        dict(**{**ABOUT, "site": site}, algorithm="a", split="outside", model=adapter, round=2,
            case=f"c{k}", patient=f"p{k}", value=0.5 + 0.01 * k + gain)
        for site, adapters in gains.items()
        for adapter, gain in adapters.items()
        for k in range(8)
    ]  # fmt: skip
    first, second = answer_outside(adapting_table(results_frame(rows), "dice", ["a"]))
    assert (first.site, second.site) == ("A", "B")
    said = [(c.model, c.outcome, sentence) for c, sentence in first.methods]
    gain, loss = "+0.100 [+0.100, +0.100]", "-0.200 [-0.200, -0.200]".replace("-", "\u2212")
    assert said == [
        ("tent", "helps",
         f"With a + Tent, Dice 0.535 unadapted, 0.635 adapted, difference {gain}."),
        ("dsbn", "hurts",
         f"With a + DSBN, Dice 0.535 unadapted, 0.335 adapted, difference {loss}."),
    ]  # fmt: skip
    assert first.counts == {"helps": 1, "hurts": 1, "cannot tell": 0}
    assert (first.outcome, second.outcome) == ("", "helps")
