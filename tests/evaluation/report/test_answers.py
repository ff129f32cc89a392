from typing import Any

from collegium.evaluation.comparisons import adapting_table, joining_table
from collegium.evaluation.entries import distinct
from collegium.evaluation.report.answers import answer_outside, answer_sites
from collegium.evaluation.results import results_frame

ABOUT: dict[str, Any] = {"experiment": "e", "seed": 0, "site": "A", "metric": "dice"}
ALONE = [0.5 + 0.01 * k for k in range(8)]
SPREAD = [0.01, -0.01] * 4


def validation(algorithm, value):
    return dict(**ABOUT, algorithm=algorithm, split="val", model="global", round=2, value=value)


def final(algorithm, values, model="global", split="test", **changes):
    for number, value in enumerate(values):
        named = {"case": f"c{number}", "patient": f"p{number}", "value": value}
        about = {**ABOUT, **changes, "algorithm": algorithm, "split": split, "model": model}
        yield {**about, **named, "round": 2}


def test_the_answer_is_the_chosen_methods_verdict_and_counts_those_that_can_be_joined():
    gains = {"a": 0.1, "b": -0.1, "all": 0.3}
    rows = [validation("a", 0.9), validation("b", 0.1), validation("all", 1.0)]
    rows += final("local", ALONE)
    for name, gain in gains.items():
        joined = [v + gain + d for v, d in zip(ALONE, SPREAD, strict=True)]
        rows += final(name, joined)
    table = joining_table(results_frame(rows), "dice", pooled=["all"])
    answer = answer_sites(table, ["all"])["A"]
    assert answer.chosen is not None
    assert (answer.chosen.algorithm, answer.outcome) == ("a", "better")
    assert answer.counts == "1 better, 1 worse, 0 cannot tell"
    assert [c.algorithm for c in answer.methods] == ["a", "all", "b"]


def test_a_model_with_several_names_counts_once():
    rows = [validation("a", 0.5), validation("same", 0.9), validation("b", 0.1)]
    rows += final("local", ALONE)
    for name, gain in {"a": 0.1, "same": 0.1, "b": -0.1}.items():
        joined = [v + gain + d for v, d in zip(ALONE, SPREAD, strict=True)]
        rows += final(name, joined)
    answer = answer_sites(joining_table(results_frame(rows), "dice"))["A"]
    assert len(answer.methods) == 3
    assert (answer.models, answer.counts) == (2, "1 better, 1 worse, 0 cannot tell")
    assert answer.chosen is not None
    assert answer.chosen in distinct(answer.methods)


def test_without_validation_no_method_is_chosen():
    table = joining_table(results_frame([*final("local", ALONE), *final("a", ALONE)]), "dice")
    answer = answer_sites(table)["A"]
    assert (answer.chosen, answer.outcome) == (None, "")
    assert answer.counts == "0 better, 0 worse, 0 cannot tell, 1 the same model"


def test_every_site_outside_is_answered_for_each_adapted_method():
    gains = {"A": {"none": 0.0, "tent": 0.1, "dsbn": -0.2}, "B": {"none": 0.0, "tent": 0.1}}
    rows = [
        row
        for site, adapters in gains.items()
        for adapter, gain in adapters.items()
        for row in final(
            "a",
            [v + gain + d * (gain != 0) for v, d in zip(ALONE, SPREAD, strict=True)],
            adapter,
            "outside",
            site=site,
        )
    ]
    first, second = answer_outside(adapting_table(results_frame(rows), "dice", ["a"]))
    assert (first.site, second.site) == ("A", "B")
    assert [(c.model, c.verdict.outcome) for c in first.methods] == [
        ("tent", "better"), ("dsbn", "worse"),
    ]  # fmt: skip
    assert [c.model for c in first.with_outcome("worse")] == ["dsbn"]
    assert first.counts == "1 better, 1 worse, 0 cannot tell"
    assert (first.outcome, second.outcome) == ("", "better")
