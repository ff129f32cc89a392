from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from collegium.data.phantoms import make_federation
from collegium.diagnostics.drift.distances import SiteFeatures
from collegium.diagnostics.drift.measurement import Drift, map_features, measure_drift, spread
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.experiment import ExperimentConfig
from collegium.experiment.jobs import Event

Configure = Callable[..., ExperimentConfig]


def cloud(seed: int, count: int, shift: float = 0.0) -> SiteFeatures:
    rows = np.random.default_rng(seed).normal(shift, 1.0, (count, 5))
    return SiteFeatures(rows, np.arange(count))


def features(count: int = 12) -> dict[str, Any]:
    return {
        site: {"global": cloud(k, count, 30.0 * k), "local": cloud(k + 9, count, 30.0 * k)}
        for k, site in enumerate("AB")
    }


def look(config: ExperimentConfig, **given: Any) -> Drift:
    return measure_drift(config, split="train", **given)


def test_every_algorithm_is_measured_in_every_round(configure: Configure) -> None:
    events: list[Event] = []
    drift = look(configure(), rounds=[2, 1, 2], observe=events.append)
    assert [(m.algorithm, m.round) for m in drift.moments] == [
        ("fedavg", 1), ("fedavg", 2), ("fedbn", 1), ("fedbn", 2)
    ]  # fmt: skip
    assert (drift.sites, drift.rounds, drift.seed) == (["alder", "birch"], [1, 2], 0)
    for moment in drift.moments:
        assert moment.windows.keys() == moment.drift.keys() == {"alder", "birch"}
        assert all(0 <= value <= 2 for value in moment.drift.values())
        assert np.shape(moment.between) == (2, 2)
        assert len(moment.points) == 2 * sum(moment.windows.values())
    untrained = [moment.between for moment in drift.moments if moment.round == 1]
    assert untrained[0] == untrained[1]
    kinds = ["job", "round", "round", "done"]
    assert [(e.kind, e.algorithm) for e in events] == [
        (kind, label) for label in ("fedavg", "fedbn") for kind in kinds
    ]


def test_the_same_configuration_gives_the_same_numbers(configure: Configure) -> None:
    config = configure("algorithm=fedavg", "rounds=1")
    assert look(config) == look(config)


def test_a_training_that_changes_nothing_gives_zero(configure: Configure) -> None:
    still = ["algorithm=fedavg", "training.optimizer=sgd", "training.lr=1e-30", "rounds=1"]
    (moment,) = look(configure(*still, "model.norm=instance")).moments
    assert moment.drift == {"alder": 0.0, "birch": 0.0}


def test_running_statistics_alone_let_features_drift(configure: Configure) -> None:
    still = ["algorithm=fedavg", "training.optimizer=sgd", "training.lr=1e-30", "rounds=1"]
    (moment,) = look(configure(*still, "model.norm=batch")).moments
    assert min(moment.drift.values()) > 1


def test_at_most_so_many_windows_are_looked_at_and_few_patients_noted(
    configure: Configure,
) -> None:
    (moment,) = look(configure("algorithm=fedavg", "rounds=1"), limit=3).moments
    assert moment.windows == {"alder": 3, "birch": 3}
    drift = measure_drift(configure("algorithm=fedavg", "rounds=1"), limit=3, split="train")
    counts = drift.moments[0].patients
    assert drift.notes == [
        f"{site} has training images of {counts[site]} patients; its distances are coarse, and a "
        f"large one can be chance."
        for site in ("alder", "birch")
    ]


def test_by_default_the_first_the_last_and_two_rounds_between_are_looked_at(
    configure: Configure,
) -> None:
    drift = look(configure("algorithm=fedavg", "rounds=8"))
    assert drift.rounds == [1, 2, 4, 8]


def test_rounds_at_home_are_not_looked_at(configure: Configure) -> None:
    settings = ("algorithm=fedavg", "rounds=4", "home_rounds=2")
    assert look(configure(*settings)).rounds == [1, 2]
    with pytest.raises(ConfigError, match="the rounds asked for are 3; choose some from 1 to 2"):
        look(configure(*settings), rounds=[3])


def test_no_site_with_images_of_two_patients_is_a_sentence(configure: Configure) -> None:
    few = ["federation.splits.validation=0.1", "algorithm=fedavg", "rounds=1"]
    with pytest.raises(DataError, match="no site's validation images of two patients"):
        measure_drift(configure(*few))


def test_a_site_with_images_of_one_patient_is_left_out_and_said_to_be(
    configure: Configure, tmp_path: Path
) -> None:
    federation = make_federation(tmp_path / "data", 2, cases=12, size=32)
    manifest = tmp_path / "data" / "birch" / "manifest.csv"
    lines = manifest.read_text().splitlines()
    manifest.write_text("\n".join(lines[:4]) + "\n")
    drift = measure_drift(configure("algorithm=fedavg", "rounds=1", f"federation={federation}"))
    assert drift.sites == ["alder", "birch"]
    assert drift.moments[0].windows.keys() == {"alder"}
    assert drift.moments[0].between == [[0.0]]
    assert drift.notes[-1] == (
        "birch is missing in every round: it has validation images of fewer than two patients, or "
        "sent no model back."
    )


@pytest.mark.parametrize(
    ("overrides", "given", "words"),
    [
        ([], {"rounds": [0, 1]}, "the rounds asked for are 0, 1; choose some from 1 to 2"),
        ([], {"rounds": [3]}, "choose some from 1 to 2"),
        ([], {"rounds": []}, "the rounds asked for are nothing"),
        ([], {"limit": 1}, "a limit of at least 2"),
        (["algorithm=local"], {}, "in 'local' no site receives a model"),
        (["algorithm=pooled"], {}, "in 'pooled' no site receives a model"),
        (["algorithm=ifca"], {}, "choose another algorithm"),
        (
            ["algorithms=[fedavg, distance]"],
            {},
            "^distance: of the two sites alder and birch neither",
        ),
        (["codec=half"], {}, "the models of 'fedavg' travel coded"),
        (["secure_mean={}"], {}, "which secure_mean hides from a server; .*: set secure_mean=null"),
        (["variations={a: {rounds: 1}}"], {}, "set variations={}"),
    ],
)
def test_what_cannot_be_measured_is_a_sentence(
    configure: Configure, overrides: list[str], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        look(configure(*overrides), **given)


def test_there_are_three_kinds_of_images(configure: Configure) -> None:
    with pytest.raises(ConfigError, match="split is 'all'"):
        measure_drift(configure(), split="all")  # type: ignore[arg-type]


def test_a_map_has_a_point_per_window_and_model_and_comes_out_the_same_again() -> None:
    points = map_features(features(), 3)
    assert [(p.site, p.kind) for p in points] == [
        key for key in (("A", "global"), ("A", "local"), ("B", "global"), ("B", "local"))
        for _ in range(12)
    ]  # fmt: skip
    assert map_features(features(), 3) == points


def test_windows_that_look_alike_lie_together_in_a_map() -> None:
    points = map_features(features(), 0)
    places = np.array([(p.x, p.y) for p in points])
    gaps = np.linalg.norm(places[:, None] - places[None], axis=2) + 1e9 * np.eye(len(points))
    assert all(points[k].site == points[int(gaps[k].argmin())].site for k in range(len(points)))


def test_of_many_windows_some_are_shown_from_the_first_to_the_last() -> None:
    assert spread(3, 9) == [0, 1, 2]
    assert spread(10, 4) == [0, 2, 5, 7]
    assert spread(600, 200) == list(range(0, 600, 3))


def test_too_few_windows_or_features_give_no_map() -> None:
    assert map_features({"A": {"global": cloud(0, 1), "local": cloud(1, 1)}}, 0) == []
    flat = SiteFeatures(np.arange(6.0)[:, None], np.arange(6))
    assert map_features({"A": {"global": flat, "local": flat}}, 0) == []
