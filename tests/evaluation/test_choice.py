from typing import Any

from collegium.evaluation.choice import Choice, choose_on_validation
from collegium.evaluation.results import results_frame

ABOUT: dict[str, Any] = {"experiment": "e", "seed": 0, "site": "A", "metric": "dice"}


def validation(algorithm, values, chosen=1, **changes):
    """Scores on validation, and one test case of the model of the chosen round."""
    about = {**ABOUT, **changes, "algorithm": algorithm, "model": "global"}
    for number, value in enumerate(values, start=1):
        yield dict(**about, split="val", round=number, value=value)
    yield dict(**about, split="test", round=chosen, case="c", patient="p", value=0.0)


def test_a_method_is_chosen_on_validation_alone_by_its_selected_round():
    rows = [*validation("local", (0.6, 0.6)), *validation("a", (0.5, 0.7), chosen=2),
            *validation("b", (0.8, 0.1)), *validation("c", (0.9, 0.2), chosen=2)]  # fmt: skip
    rows.append({**rows[-1], "case": "d", "value": 1.0})
    assert choose_on_validation(results_frame(rows)) == {"A": Choice(("b", "global"), False)}
    assert choose_on_validation(results_frame(rows), pooled=["b"]) == {
        "A": Choice(("a", "global"), False)
    }


def test_folds_count_like_seeds():
    rows = [
        *validation("a", (0.6,)), *validation("a", (0.2,), fold=1),
        *validation("b", (0.5,)), *validation("b", (0.5,), fold=1),
    ]  # fmt: skip
    assert choose_on_validation(results_frame(rows))["A"].method == ("b", "global")


def test_it_is_known_whether_training_alone_was_better():
    rows = [*validation("local", (0.9,)), *validation("a", (0.5,))]
    assert choose_on_validation(results_frame(rows))["A"].alone_better
    assert choose_on_validation(results_frame(rows), local="a")["A"] == Choice(
        ("local", "global"), False
    )


def test_of_losses_the_lowest_is_chosen():
    rows = [*validation("a", (0.9, 0.4), 2, metric="log_loss"),
            *validation("b", (0.5, 0.6), metric="log_loss")]  # fmt: skip
    assert choose_on_validation(results_frame(rows))["A"].method == ("a", "global")
