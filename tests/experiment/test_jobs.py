"""Whole jobs on phantoms: folds, adapters, and trainings that several jobs share."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from collegium.data.phantoms import make_federation
from collegium.errors import CheckpointError, ConfigError, EgressError
from collegium.evaluation.report.overlays import read_index
from collegium.evaluation.results import KEY
from collegium.evaluation.scores import rows_of
from collegium.experiment.config.experiment import ExperimentConfig, parse_config, to_dict
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import holders, jobs_of
from collegium.experiment.jobs import Event
from collegium.experiment.runner import collect_rows, run_experiment
from collegium.models.factory import build_model
from collegium.runtime.ledger import read_ledger

MODEL: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1}


def rows_in(config: ExperimentConfig) -> list[Any]:
    """The rows of a run, with None for an undefined value."""
    results = collect_rows(config)
    return rows_of(results.astype({"value": object}).where(results.notna(), None))


def values_in(config: ExperimentConfig) -> dict[tuple[Any, ...], float | None]:
    """The values of a run by the columns that identify a measurement."""
    return {tuple(getattr(row, name) for name in KEY): row.value for row in rows_in(config)}


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("phantoms"), 3, cases=8, size=32)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory) -> None:
    folder = tmp_path_factory.getbasetemp() / "job-cache"
    monkeypatch.setenv("COLLEGIUM_CACHE", str(folder))


@pytest.fixture
def settings(phantoms, tmp_path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "protocol": "leave-one-site-out",
        "federation": str(phantoms),
        "model": MODEL,
        "algorithms": [{"name": "iopfl", "adapters": ["none", "average"]}],
        "rounds": 2,
        "training": {"batch_size": 2, "local_steps": 4, "lr": 0.02},
        "output": str(tmp_path / "run"),
    }


def configure(settings: dict[str, Any], *shares: str, **changes: Any) -> Any:
    config = parse_config({**settings, **changes})
    data = {**settings, **changes, "federation": _federation(config, shares)}
    return parse_config(data)


def _federation(config: Any, shares: Any) -> dict[str, Any]:
    federation: dict[str, Any] = to_dict(config)["federation"]
    for name in shares:
        federation["sites"][name]["share"] = ["personal"]
    return federation


def dice(prediction: np.ndarray, label: np.ndarray) -> float | None:
    total = prediction.sum() + label.sum()
    return None if total == 0 else 2 * (prediction * label).sum() / total


def score_by_hand(config: Any, job: Any, model: str) -> list[float | None]:
    """The Dice of a handed-out model at the site left out, by plain torch and numpy."""
    network = build_model(**MODEL)
    network.load_state_dict(load_file(job.folder / "server/deployed" / f"{model}.safetensors"))
    network.eval()
    data = OpenedExperiment(config).outside(job, job.left_out)
    found = []
    for index in range(len(data)):
        batch = data.example(index).batch
        with torch.no_grad():
            prediction = network(batch["image"]).argmax(1)
        found.append(dice(prediction.numpy() == 1, batch["label"].numpy() == 1))
    return found


def test_every_site_is_outside_once_and_scored_on_all_its_cases(settings) -> None:
    config = configure(settings, "alder", "birch", "cedar")
    events: list[Event] = []
    run_experiment(config, events.append)
    told = [(e.left_out, e.text) for e in events if e.kind == "adapt"]
    assert told == [
        (site, f"{adapter} at {site}")
        for site in ("alder", "birch", "cedar") for adapter in ("none", "average")
    ]  # fmt: skip
    rows = [row for row in rows_in(config) if row.split == "outside" and row.metric == "dice"]
    for fold, job in enumerate(jobs_of(config)):
        here = [row for row in rows if row.fold == fold]
        assert {(row.site, row.algorithm) for row in here} == {(job.left_out, "iopfl")}
        none = [row.value for row in here if row.model == "none"]
        assert len(none) == 8
        assert none == pytest.approx(score_by_hand(config, job, "global"))
        inside = [name for name in ("alder", "birch", "cedar") if name != job.left_out]
        each = [score_by_hand(config, job, name) for name in inside]
        mean = [None if None in pair else float(np.mean(pair)) for pair in zip(*each, strict=True)]
        assert [row.value for row in here if row.model == "average"] == pytest.approx(mean)
        account = json.loads(
            (job.folder / f"outside/{job.left_out}/average/account.json").read_text()
        )
        assert account["sources"] == inside
        place = job.folder / "outside" / job.left_out
        values = [value for value in none if value is not None]
        drawn, _ = read_index(place / "none" / "overlays")
        by_rank = {entry["rank"]: entry["value"] for entry in drawn}
        assert (by_rank["worst"], by_rank["best"]) == (min(values), max(values))
        assert {(entry["site"], entry["model"]) for entry in drawn} == {(job.left_out, "none")}
        several, _ = read_index(place / "average" / "overlays")
        assert several == []  # two predictions of each case, and none of its own
        for site in inside:  # the ledger shows what was handed out
            lines = read_ledger(job.folder / "clients" / site / "ledger.jsonl")
            assert [line["method"] for line in lines if "personal" in line["parts"]] == [
                "share_personal"
            ]


def test_a_site_that_does_not_share_hands_nothing_out(settings) -> None:
    config = configure(settings, "alder", algorithms=["iopfl"], adapters=["none"])
    run_experiment(config)
    for job in jobs_of(config):
        files = {file.stem for file in (job.folder / "server/deployed").glob("*.safetensors")}
        assert files == {"global"} | ({"alder"} - {job.left_out})


def test_home_models_are_scored_and_handed_out_as_personal_ones(settings) -> None:
    ensemble = {"name": "fedavg", "adapters": ["none", "ensemble"]}
    models = ("global", "global by federation", "personal")
    inside = ("alder", "birch")
    data = to_dict(configure(settings, *inside, algorithms=[ensemble], home_rounds=1))
    data["federation"]["outside"] = ["cedar"]
    config = parse_config({**data, "protocol": "inside"})
    run_experiment(config)
    (job,) = jobs_of(config)
    tested = {(r.site, r.model) for r in rows_in(config) if r.metric == "dice" and r.split != "val"}
    assert tested == {
        *((site, model) for site in inside for model in models),
        *(("cedar", adapter) for adapter in ("none", "ensemble")),
    }
    assert {file.stem for file in (job.folder / "server/deployed").glob("*.safetensors")} == {
        "global", *inside,
    }  # fmt: skip
    for site in inside:
        assert (job.folder / "clients" / site / "personal.safetensors").exists()


def test_an_adaptation_that_is_done_is_not_done_again(settings) -> None:
    config = configure(settings, "alder", "birch")
    run_experiment(config)
    job = jobs_of(config)[0]
    before = values_in(config)
    (job.folder / "rows.jsonl").unlink()
    (job.folder / "outside/alder/average/scores.json").unlink()
    events: list[Event] = []
    run_experiment(config, events.append)
    assert [(e.kind, e.text) for e in events] == [
        ("job", ""), ("adapt", "average at alder"), ("done", ""),
    ]  # fmt: skip
    assert list(values_in(config).items()) == list(before.items())


def test_a_run_may_be_extended_and_repeats_nothing(settings) -> None:
    first = configure(settings, "alder", "birch")
    run_experiment(first)
    before = values_in(first)
    more: list[Any] = [{"name": "iopfl", "adapters": ["average", "ensemble"]}, "fedavg"]
    config = configure(settings, "alder", "birch", algorithms=more)
    events: list[Event] = []
    run_experiment(config, events.append)
    assert {e.algorithm for e in events if e.kind == "round"} == {"fedavg"}
    assert [(e.left_out, e.text) for e in events if e.kind == "adapt"] == [
        (site, f"ensemble at {site}") for site in ("alder", "birch", "cedar")
    ]
    after = values_in(config)
    kept = {key for key in before if key[-2] != "none"}
    assert all(after[key] == before[key] for key in kept)
    models = {row.model for row in rows_in(config) if row.split == "outside"}
    assert models == {"average", "ensemble"}  # "none" is not asked for any more
    more[0] = {"name": "iopfl", "adapters": ["average"]}
    other = configure(settings, "alder", "birch", algorithms=more, rounds=3)
    with pytest.raises(CheckpointError, match=r"made with other settings \(.*rounds=2, now 3"):
        run_experiment(other)


def test_an_adapter_with_other_settings_is_run_again(settings) -> None:
    own: Any = [{"name": "fedavg", "adapters": [{"name": "none", "batch_size": 2}]}]
    run_experiment(configure(settings, algorithms=own))
    own[0]["adapters"][0]["batch_size"] = 3
    config = configure(settings, algorithms=own)
    events: list[Event] = []
    run_experiment(config, events.append)
    assert [e.kind for e in events] == ["job", "adapt", "done"] * 3
    account = jobs_of(config)[0].folder / "outside/alder/none/account.json"
    assert json.loads(account.read_text())["adapter"]["batch_size"] == 3


def test_a_training_that_another_cell_did_is_used_and_not_repeated(settings) -> None:
    config = configure(
        settings,
        protocol="inside",
        algorithms=[{"name": "fedavg", "adapters": ["none"]}],
        variations={
            "two": {"federation.outside": ["cedar"]},
            "in turn": {"protocol": "leave-one-site-out"},
        },
    )
    events: list[Event] = []
    output = run_experiment(config, events.append)
    trained = {(e.variation, e.left_out) for e in events if e.kind == "round"}
    assert trained == {("two", ""), ("in turn", "alder"), ("in turn", "birch")}
    jobs = {job.key[:2]: job for job in jobs_of(config)}
    user = jobs["in turn", "cedar"]
    assert holders(list(jobs.values()))[user.key] is jobs["two", ""]
    assert not (user.folder / "server").exists()
    rows = rows_in(config)

    def scores(variation: str, fold: int) -> list[tuple[Any, ...]]:
        return [
            (row.site, row.case, row.split, row.model, row.metric, row.round, row.value)
            for row in rows
            if (row.variation, row.fold) == (variation, fold)
        ]

    assert len(scores("two", 0)) > 20
    assert scores("in turn", 2) == scores("two", 0)
    assert (output / "report.html").exists()


@pytest.mark.parametrize(
    ("shares", "algorithms", "says"),
    [
        ([], [{"name": "iopfl", "adapters": ["ensemble"]}], "'ensemble' needs personal models, and "
         "no site shares its own"),
        (["alder"], [{"name": "fedavg", "adapters": ["average"]}], "'average' needs personal "
         "models, and 'fedavg' has none"),
        (["alder"], [{"name": "fedbn", "adapters": ["tent"]}], "'tent' needs a global model, "
         "and 'fedbn' has none"),
    ],
)  # fmt: skip
def test_an_adapter_that_finds_nothing_to_work_with_is_refused_at_once(
    settings, shares, algorithms, says
) -> None:
    config = configure(settings, *shares, algorithms=algorithms)
    with pytest.raises(ConfigError, match=says):
        run_experiment(config)
    assert not any(job.folder.exists() for job in jobs_of(config))


def test_a_network_without_batch_normalisation_is_not_given_to_tent(settings) -> None:
    config = configure(
        settings, model={**MODEL, "norm": "instance"}, algorithms=["fedavg"], adapters=["tent"]
    )
    with pytest.raises(ConfigError, match="tent adapts batch normalisation, and UNet has none"):
        run_experiment(config)


def test_ttt_is_refused_where_its_task_was_not_trained(settings) -> None:
    config = configure(settings, algorithms=["ttt", "fedavg"], adapters=["ttt"])
    with pytest.raises(ConfigError, match="has no rotation head; train it with the algorithm ttt"):
        run_experiment(config)
    assert not any(job.folder.exists() for job in jobs_of(config))


def test_sharing_is_not_a_way_around_what_a_policy_forbids(settings) -> None:
    config = configure(settings, "alder", algorithms=["fedavg"])
    data = _federation(config, ["alder"])
    data["sites"]["alder"]["forbid"] = ["model"]
    with pytest.raises(EgressError, match="forbids"):
        run_experiment(configure({**settings, "federation": data}, algorithms=["fedavg"]))
