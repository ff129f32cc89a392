import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from collegium.diagnostics.assessment import survey as module
from collegium.diagnostics.assessment.survey import Assessment, survey_sites
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.heterogeneity.survey import SurveyQuestions, site_statistics
from collegium.runtime.ledger import first_break, read_ledger

Configure = Callable[..., ExperimentConfig]
PARTS = ["intensity_maxima", "label_volumes", "label_histogram", "embeddings", "components"]


def test_each_site_tells_all_parts_once_and_writes_them_down(
    configure: Configure, tmp_path: Path
) -> None:
    replies, exchanged = survey_sites(configure(), Assessment(grid=16))
    assert list(replies) == ["alder", "birch", "cedar", "elm"]
    for site, message in replies.items():
        assert list(message) == PARTS
        lines = read_ledger(tmp_path / "run" / "assessment" / "clients" / site / "ledger.jsonl")
        assert first_break(lines) is None
        assert [line["method"] for line in lines] == ["survey"]
        assert list(lines[0]["parts"]) == PARTS
        assert exchanged[site]["bytes_up"] == lines[0]["bytes"]
        assert exchanged[site]["parts"] == {
            part: entry["bytes"] for part, entry in lines[0]["parts"].items()
        }
    assert not list((tmp_path / "run").rglob("*.state"))
    assert not (tmp_path / "run" / "splits").exists()


def test_a_second_process_tells_the_same(configure: Configure) -> None:
    one, _ = survey_sites(configure(), Assessment(grid=16))
    two, _ = survey_sites(configure("engine.workers=2"), Assessment(grid=16))
    for site, message in one.items():
        same = two[site]
        assert same["embeddings"]["cases"].equal(message["embeddings"]["cases"])
        assert same["label_volumes"] == message["label_volumes"]


def test_policies_decide_what_leaves(configure: Configure) -> None:
    replies, exchanged = survey_sites(
        configure(
            "federation.sites.alder.forbid=[embeddings, label_volumes]",
            "federation.sites.birch.allow=[model, label_histogram]",
            "federation.sites.cedar.allow=[]",
        ),
        Assessment(grid=16),
    )
    assert list(replies["alder"]) == ["intensity_maxima", "label_histogram"]
    assert list(replies["birch"]) == ["label_histogram"]
    assert list(replies["cedar"]) == []
    assert exchanged["cedar"]["withheld"] == PARTS
    assert exchanged["alder"]["withheld"] == ["label_volumes", "embeddings", "components"]


def test_no_identifier_and_no_image_leaves(configure: Configure, drawn: Path) -> None:
    replies, _ = survey_sites(configure(), Assessment(summary="quantiles", grid=16))
    for message in replies.values():
        tensors = {"embeddings", "components"}
        plain = json.dumps({k: v for k, v in message.items() if k not in tensors})
        assert "case" not in plain.replace('"cases"', "")
        assert list(message["embeddings"]) == ["mean"]
        assert len(message["embeddings"]["mean"]) == 1
        assert message["components"]["first"].shape == (4,)  # positions, 2 x 2


def test_a_site_that_fails_is_left_out_and_says_so(
    configure: Configure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(client: Any, questions: SurveyQuestions) -> Any:
        if client.id == "birch":
            raise OSError("a disk with a patient's name on it")
        return site_statistics(client, questions)

    monkeypatch.setattr(module, "site_statistics", failing)
    replies, exchanged = survey_sites(configure(), Assessment(grid=16))
    assert "birch" not in replies
    assert "the details are in the log of this site" in exchanged["birch"]["failed"]
    assert "patient" not in exchanged["birch"]["failed"]
    assert exchanged["birch"]["withheld"] == []


def test_a_wrong_summary_is_told_before_anybody_is_asked() -> None:
    with pytest.raises(ConfigError, match="summary is 'means'"):
        Assessment(summary="means")  # type: ignore[arg-type]
