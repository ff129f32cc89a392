from pathlib import Path
from typing import Any

import pytest

from collegium.data.phantoms import make_federation
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.grid import holders, jobs_of, variations_of
from collegium.experiment.jobs import Event
from collegium.experiment.runner import run_experiment

SETTINGS: dict[str, Any] = {
    "name": "grid",
    "federation": {
        "name": "f",
        "root": "/data",
        "sites": {name: {"folder": name} for name in ("east", "north", "south")},
    },
    "model": {"name": "unet"},
    "algorithms": ["fedavg", {"name": "iopfl", "tau": 0.5}],
    "rounds": 2,
    "output": "/out",
}


def grid(**changes: Any) -> Any:
    return parse_config({**SETTINGS, **changes})


def test_a_plain_experiment_is_algorithms_by_seeds() -> None:
    jobs = jobs_of(grid(seeds=[3, 1]))
    assert [job.key for job in jobs] == [
        ("", "", "fedavg", 3), ("", "", "iopfl", 3), ("", "", "fedavg", 1), ("", "", "iopfl", 1),
    ]  # fmt: skip
    assert jobs[1].folder == Path("/out/iopfl/seed-3")
    assert jobs[1].base == Path("/out")
    assert all(job.config.federation.outside == () for job in jobs)
    held = holders(jobs)
    assert all(held[job.key] is job for job in jobs)


def test_every_site_is_left_out_in_turn() -> None:
    jobs = jobs_of(grid(protocol="leave-one-site-out", algorithms=["fedavg"]))
    assert [(c.fold, c.left_out) for c in jobs] == [(0, "east"), (1, "north"), (2, "south")]
    assert [job.config.federation.outside for job in jobs] == [("east",), ("north",), ("south",)]
    assert jobs[1].folder == Path("/out/without-north/fedavg/seed-0")
    assert jobs[1].name == "without north, fedavg, seed 0"
    assert len({job.training for job in jobs}) == 3


def test_a_site_that_is_outside_for_good_is_not_left_out_in_turn() -> None:
    federation = {**SETTINGS["federation"], "outside": ["south"]}
    jobs = jobs_of(grid(protocol="leave-one-site-out", federation=federation))
    assert {job.left_out for job in jobs} == {"east", "north"}
    assert {job.config.federation.outside for job in jobs} == {
        ("east", "south"), ("north", "south"),
    }  # fmt: skip


def test_variations_change_what_they_name_and_nothing_else() -> None:
    config = grid(
        variations={
            "1 epoch": {"training.local_epochs": 1},
            "4 epochs": {"training.local_epochs": 4, "algorithms.1.tau": 0.7},
        }
    )
    found = variations_of(config)
    assert list(found) == ["1 epoch", "4 epochs"]
    assert [each.training.local_epochs for each in found.values()] == [1, 4]
    assert [each.algorithms[1].params["tau"] for each in found.values()] == [0.5, 0.7]
    assert found["4 epochs"].rounds == 2
    folders = [job.folder for job in jobs_of(config)]
    assert folders[0] == Path("/out/1 epoch/fedavg/seed-0")
    assert folders[3] == Path("/out/4 epochs/iopfl/seed-0")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training.epochs": 2}, r"unknown field.*variation 'v'"),
        ({"rounds": 0}, r"rounds: should be at least 1, not 0 \(variation 'v'\)"),
        ({"output": "elsewhere"}, "variation 'v' sets output, which belongs to the whole"),
    ],
)
def test_a_variation_that_cannot_be_is_refused(changes: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        variations_of(grid(variations={"v": changes}))


def test_cells_that_would_train_the_same_models_share_one_training() -> None:
    config = grid(
        algorithms=["fedavg"],
        variations={
            "all": {},
            "two": {"federation.outside": ["south"]},
            "the same two": {"federation.outside": ["south"], "adapters": ["tent"]},
            "more rounds": {"federation.outside": ["south"], "rounds": 3},
            "in turn": {"protocol": "leave-one-site-out"},
        },
    )
    jobs = jobs_of(config)
    held = {job.key[:2]: holders(jobs)[job.key].key[:2] for job in jobs}
    assert held == {
        ("all", ""): ("all", ""),
        ("two", ""): ("two", ""),
        ("the same two", ""): ("two", ""),
        ("more rounds", ""): ("more rounds", ""),
        ("in turn", "east"): ("in turn", "east"),
        ("in turn", "north"): ("in turn", "north"),
        ("in turn", "south"): ("two", ""),
    }


def test_another_seed_algorithm_or_codec_is_another_training() -> None:
    config = grid(
        seeds=[0, 1],
        algorithms=[
            "fedavg",
            {"name": "fedavg", "label": "again"},
            {"name": "fedavg", "label": "coded", "codec": "half"},
            "fedbn",
        ],
    )
    jobs = jobs_of(config)
    held = {job.key[2:]: holders(jobs)[job.key].key[2:] for job in jobs}
    assert {mine: theirs for mine, theirs in held.items() if mine != theirs} == {
        ("again", 0): ("fedavg", 0),
        ("again", 1): ("fedavg", 1),
    }


def mark_trained(job: Any) -> None:
    """Leave in a job's folder what a training ends with."""
    folder = job.folder / "server"
    folder.mkdir(parents=True)
    (folder / "test.json").write_text("{}")


def test_a_training_that_is_finished_is_used_by_a_cell_placed_before_it(tmp_path: Path) -> None:
    old = {"old": {"federation.outside": ["south"]}}
    new = {"new": {"federation.outside": ["south"], "adapters": ["tent"]}}
    settings: Any = {"algorithms": ["fedavg"], "output": str(tmp_path)}
    (begun,) = jobs_of(grid(**settings, variations=old))
    jobs = jobs_of(grid(**settings, variations={**new, **old}))
    assert [holders(jobs)[job.key].variation for job in jobs] == ["new", "new"]
    assert not any(job.trained for job in jobs)
    mark_trained(begun)
    assert [job.trained for job in jobs] == [False, True]
    assert [holders(jobs)[job.key].variation for job in jobs] == ["old", "old"]
    mark_trained(jobs[0])  # as it happened before: trained twice
    assert [holders(jobs)[job.key].variation for job in jobs] == ["new", "new"]


def test_a_run_extended_before_what_it_trained_trains_nothing_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(tmp_path / "cache"))
    settings: Any = {
        "federation": str(make_federation(tmp_path / "data", 2, cases=8, size=32)),
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1},
        "algorithms": ["fedavg"],
        "rounds": 1,
        "training": {"batch_size": 2, "local_steps": 1},
        "output": str(tmp_path / "run"),
    }
    old = {"old": {"federation.outside": ["birch"]}}
    new = {"new": {"federation.outside": ["birch"], "adapters": ["none"]}}
    run_experiment(grid(**settings, variations=old))
    events: list[Event] = []
    config = grid(**settings, variations={**new, **old})
    run_experiment(config, events.append)
    told = [(event.kind, event.variation) for event in events]
    assert told == [("job", "new"), ("adapt", "new"), ("done", "new")]
    first, second = jobs_of(config)
    assert (first.trained, second.trained) == (False, True)


def test_every_job_has_the_training_of_its_algorithm() -> None:
    own: dict[str, Any] = {"optimizer": "sgd", "lr": 0.05}
    config = grid(
        algorithms=["fedavg", {"name": "scaffold", "training": own}],
        variations={"few": {"training.local_steps": 2}, "fast": {"training.lr": 0.5}},
    )
    found = {job.key[::2]: job.config.training for job in jobs_of(config)}
    told = {key: (t.optimizer, t.lr, t.local_steps) for key, t in found.items()}
    assert told == {
        ("few", "fedavg"): ("adam", 1e-3, 2),
        ("few", "scaffold"): ("sgd", 0.05, 2),
        ("fast", "fedavg"): ("adam", 0.5, None),
        ("fast", "scaffold"): ("sgd", 0.05, None),
    }


def test_another_training_of_an_algorithm_is_another_one_and_an_equal_one_is_shared() -> None:
    config = grid(
        training={"lr": 0.1},
        algorithms=[
            "fedavg",
            {"name": "fedavg", "label": "slow", "training": {"lr": 0.01}},
            {"name": "fedavg", "label": "the same", "training": {"lr": 0.1}},
        ],
    )
    jobs = jobs_of(config)
    held = {job.key[2]: holders(jobs)[job.key].key[2] for job in jobs}
    assert held == {"fedavg": "fedavg", "slow": "slow", "the same": "fedavg"}
    assert jobs[1].training == jobs_of(grid(training={"lr": 0.01}))[0].training
