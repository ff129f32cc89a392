import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, StorageError
from collegium.runtime.selection import (
    FEDERATION,
    Chosen,
    KeptModels,
    Selection,
    Selector,
    choices_at,
    choose,
    mean_defined,
)


def chosen_rounds(rule: Selection, *scores: float | None, events: int = 9) -> list[int]:
    """The round chosen after each of the rounds 1, 2, ..."""
    chosen: Chosen | None = None
    found = []
    for number in range(1, len(scores) + 1):
        chosen = choose(rule, chosen, scores[:number], number=number, events=events)
        found.append(chosen["round"])
    return found


def test_undefined_values_are_left_out_of_a_mean():
    assert mean_defined([1.0, None, 4.0]) == 2.5
    assert mean_defined([None]) is None
    assert mean_defined([]) is None


def test_the_best_round_is_the_earlier_of_equals():
    assert chosen_rounds(Selection(), 0.25, 0.25, 0.5, 0.5, 0.4) == [1, 1, 3, 3, 3]


def test_an_undefined_score_replaces_none_that_is_defined():
    assert chosen_rounds(Selection(), None, None, -5.0, None) == [1, 2, 3, 3]


def test_the_last_round_is_the_last_whatever_its_score():
    assert chosen_rounds(Selection(round="last"), 0.9, 0.1, None) == [1, 2, 3]


def test_a_smoothed_choice_has_the_best_mean_of_three_rounds():
    """The means are 0.5 at the third, then 0.567, 0.533 and 0.533."""
    rule = Selection(round="smoothed")
    assert chosen_rounds(rule, 0.3, 0.9, 0.3, 0.5, 0.8, 0.3) == [1, 2, 3, 4, 4, 4]
    assert chosen_rounds(rule, 0.3, 0.2) == [1, 2]
    assert chosen_rounds(rule, 0.5, None, 0.1, None, 0.4) == [1, 2, 3, 3, 3]


@pytest.mark.parametrize("kind", ["best", "smoothed"])
def test_with_few_events_it_is_the_last_round(kind: Any):
    rule = Selection(round=kind)
    assert chosen_rounds(rule, 0.9, 0.5, 0.4, 0.3, events=5) == [1, 2, 3, 4]
    assert chosen_rounds(rule, 0.9, 0.5, 0.4, 0.3, events=6)[-1] != 4


@pytest.mark.parametrize(
    "wrong", [{"by": "site's"}, {"round": "first"}, {"min_events": -1}, {"min_events": 1.5}]
)
def test_settings_that_make_no_rule_are_refused(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        Selection(**wrong)


def rows_of(*values: float | None) -> list[dict[str, Any]]:
    return [{"case": f"c{n}", "patient": f"p{n}", "dice": v} for n, v in enumerate(values)]


def selector(rule: Selection) -> Selector:
    """Two sites, of which the larger one decides for the federation: 0.4, then 0.6."""
    found = Selector(rule, "dice")
    found.add(1, {"A": {"global": rows_of(0.8)}, "B": {"global": rows_of(0.2, 0.2)}})
    found.add(2, {"A": {"global": rows_of(0.6)}, "B": {"global": rows_of(0.6, None)}})
    return found


def test_sites_and_federation_choose_by_the_cases_of_their_own():
    choices = selector(Selection(min_events=0)).choices["global"]
    assert {who: found["round"] for who, found in choices.items()} == {"A": 1, "B": 2, "": 2}
    assert choices[FEDERATION] == {"round": 2, "score": 0.6, "events": 2}


def test_few_events_are_those_of_whoever_chooses():
    choices = selector(Selection(min_events=2)).choices["global"]
    assert {who: found["round"] for who, found in choices.items()} == {"A": 2, "B": 2, "": 2}
    assert {who: found["events"] for who, found in choices.items()} == {"A": 1, "B": 1, "": 2}


@pytest.mark.parametrize(("by", "other"), [("site", "federation"), ("federation", "site")])
def test_the_other_choice_of_a_global_model_is_tested_too(by: Any, other: str):
    rule = Selection(by=by, min_events=0)
    rounds = {k: c["round"] for k, c in choices_at(selector(rule).choices, "A", rule).items()}
    expected = {"site": 1, "federation": 2}
    assert rounds == {"global": expected[by], f"global by {other}": expected[other]}


def test_a_site_that_was_always_away_tests_what_the_federation_chose():
    rule = Selection(min_events=0)
    rounds = {k: c["round"] for k, c in choices_at(selector(rule).choices, "C", rule).items()}
    assert rounds == {"global": 2, "global by federation": 2}


def test_a_restored_selector_chooses_as_before():
    rule, rows = Selection(round="smoothed", min_events=0), {"A": {"personal": rows_of(0.5)}}
    whole, first = Selector(rule, "dice"), Selector(rule, "dice")
    restored = Selector(rule, "dice")
    scores = [first.add(number, rows) for number in (1, 2, 3)][-1]
    assert scores == {"personal": {"A": 0.5, FEDERATION: 0.5}}
    replay = Selector(rule, "dice")
    for number in (1, 2, 3):
        restored.restore(replay.add(number, rows), replay.choices)
    for found in (first, restored):
        found.add(4, {"A": {"personal": rows_of(0.9)}})
    for number in (1, 2, 3):
        whole.add(number, rows)
    whole.add(4, {"A": {"personal": rows_of(0.9)}})
    assert restored.choices == first.choices == whole.choices
    assert restored.choices["personal"]["A"]["round"] == 4


def model(number: float) -> Tensors:
    return Tensors({"w": torch.tensor([number])})


def held(kept: KeptModels, number: int | None = None) -> float | None:
    found = kept.load(number)
    return None if found is None else float(found["w"])


def test_models_are_kept_by_round(tmp_path: Path):
    kept = KeptModels(tmp_path)
    assert held(kept) is None
    for number in (1, 2, 3):
        kept.keep(model(number), number)
    kept.drop_all_but({1, 3})
    assert [held(KeptModels(tmp_path), number) for number in (1, 2, 3, None)] == [1, None, 3, 3]
    kept.drop_all_but([])
    assert held(kept) is None


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_leaves_the_models_before(tmp_path: Path, monkeypatch, call: str):
    kept = KeptModels(tmp_path)
    kept.keep(model(1), 1)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os if call == "fsync" else Path, call, full)
        with pytest.raises(StorageError, match="is full"):
            kept.keep(model(2), 2)
    assert held(kept) == 1
    kept.keep(model(3), 3)
    assert held(kept) == 3


def test_the_federations_scores_are_those_of_personal_models_where_there_are_any():
    found = selector(Selection(min_events=0))
    assert found.federation_scores() == pytest.approx([0.4, 0.6])
    personal = Selector(Selection(), "dice")
    personal.add(1, {"A": {"global": rows_of(0.1), "personal": rows_of(0.7, 0.9)}})
    assert personal.federation_scores() == pytest.approx([0.8])
    assert Selector(Selection(), "dice").federation_scores() == []


def test_smoothed_scores_of_the_federation_begin_with_the_third():
    found = Selector(Selection(round="smoothed"), "dice")
    for number, score in enumerate((0.1, 0.2, 0.6, 0.7), start=1):
        found.add(number, {"A": {"global": rows_of(score)}})
    assert found.federation_scores() == pytest.approx([0.3, 0.5])
