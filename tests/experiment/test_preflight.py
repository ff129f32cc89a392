"""What cannot work is refused before the first round: too few sites, networks, adapters."""

import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from collegium.data.phantoms import make_federation
from collegium.errors import ConfigError
from collegium.evaluation.results import ROWS_FILE, read_rows
from collegium.experiment.config.experiment import parse_config, to_dict
from collegium.experiment.federation import OpenedExperiment
from collegium.experiment.grid import jobs_of
from collegium.experiment.preflight import check_setups
from collegium.experiment.runner import run_experiment

UNET: dict[str, Any] = {"name": "unet", "in_channels": 1, "channels": [2, 4], "num_res_units": 0}
NAMES = ("alder", "birch", "cedar", "elm")
CLUSTERS = {"name": "distance", "label": "clusters", "mode": "clusters"}
TOO_FEW = "3 sites do not make two clusters of at least two; add sites, or set mode to weights"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLLEGIUM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four sites that hand their personal models out."""
    path = make_federation(tmp_path_factory.mktemp("phantoms"), 4, cases=4, size=32)
    about = {"name": "f", "federation": str(path), "model": UNET, "rounds": 1}
    config = parse_config({**about, "algorithms": ["fedavg"]})
    federation: dict[str, Any] = to_dict(config)["federation"]
    assert [*federation["sites"]] == [*NAMES]
    for site in federation["sites"].values():
        site["share"] = ["personal"]
    return federation


def refusal(folder: Path, federation: dict[str, Any], *algorithms: Any, **settings: Any) -> str:
    """Run FedAvg and what cannot work, and say why nothing was trained."""
    about = {"name": "tiny", "rounds": 1, "output": str(folder / "run"), "model": UNET}
    named = [{"name": "fedavg", "adapters": ["none"]}, *algorithms]
    config = parse_config({**about, "federation": federation, "algorithms": named, **settings})
    with pytest.raises(ConfigError) as found:
        run_experiment(config)
    assert not any(job.folder.exists() for job in jobs_of(config))
    return str(found.value)


def told(
    folder: Path, federation: dict[str, Any], caplog: pytest.LogCaptureFixture, **settings: Any
) -> list[str]:
    """What is told before the first round about scores."""
    about = {"name": "tiny", "rounds": 1, "output": str(folder / "told"), "model": UNET}
    config = parse_config({**about, "federation": federation, "algorithms": ["fedavg"], **settings})
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        OpenedExperiment(config).check_data("")
    return [record.message for record in caplog.records if ": no " in record.message]


# --- robust means


def test_robust_means_that_could_not_protect_are_refused(
    tmp_path: Path, phantoms: dict[str, Any]
) -> None:
    krum = {"name": "fedavg+robust", "rule": "krum"}
    assert refusal(tmp_path, phantoms, krum) == (
        "fedavg+robust: the rule krum needs 5 sites or more (2 hostile + 3, and hostile + "
        "selected, at hostile: 1), and 4 train; add sites or choose another rule"
    )
    assert "a robust mean would protect nothing" in refusal(tmp_path, phantoms, "ifca+robust")
    few = {"participation": {"clients_per_round": 2}}
    assert refusal(tmp_path, phantoms, "fedbn+robust", **few) == (
        "fedbn+robust: participation lets 2 sites train in round 1, and the method needs 3; raise "
        "clients_per_round, or take sites out of absent"
    )
    away = {"participation": {"absent": {"elm": [1], "cedar": [1]}}}
    assert "lets 2 sites train in round 1" in refusal(tmp_path, phantoms, "robust", **away)
    fold = refusal(tmp_path, phantoms, "robust", **few, protocol="leave-one-site-out")
    assert fold.startswith("without alder, robust: participation lets 2 sites train in round 1")
    wrong = {"name": "robust", "rule": "median", "trim": 0.1}
    with pytest.raises(ConfigError, match="trim belongs to the rule trimmed_mean"):
        refusal(tmp_path, phantoms, wrong)


def test_a_robust_mean_runs_from_a_file(tmp_path: Path, phantoms: dict[str, Any]) -> None:
    about = {"name": "robust", "rounds": 1, "output": str(tmp_path / "run"), "model": UNET}
    named = [
        "robust",
        {"name": "ditto+robust", "rule": "trimmed_mean", "trim": 0.25},
        {"name": "fedbn+robust", "rule": "norm_bound", "label": "bounded"},
    ]
    output = run_experiment(parse_config({**about, "federation": phantoms, "algorithms": named}))
    rows = read_rows(output.rglob(ROWS_FILE))
    bounded = rows[rows["metric"].str.startswith("norm_bound/")]
    assert {*bounded["metric"]} == {f"norm_bound/{name}" for name in NAMES}
    assert {*bounded["algorithm"]} == {"bounded"}


# --- sites and networks


@pytest.fixture
def bare(tmp_path: Path) -> dict[str, Any]:
    """A network without normalisation."""
    file = tmp_path / "bare.py"
    file.write_text("from torch import nn\n\ndef build():\n    return nn.Conv2d(1, 2, 1)\n")
    return {"name": f"{file}:build"}


def test_a_method_that_is_another_one_on_the_network_is_named(
    bare: dict[str, Any], phantoms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    about = {"name": "tiny", "rounds": 1, "federation": phantoms}
    for model, warnings in ((bare, 1), (UNET, 0)):
        config = parse_config({**about, "model": model, "algorithms": ["fedavg", "fedbn"]})
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            check_setups(config)
        assert len(caplog.messages) == warnings
        if warnings:
            assert caplog.messages[0].startswith("fedbn is fedavg on this network with these")
    caplog.clear()
    optimised = parse_config({**about, "model": UNET, "algorithms": ["modalityencoders+fedavgm"]})
    check_setups(optimised)
    assert caplog.messages == [
        "modalityencoders+fedavgm is fedavg+fedavgm on this network with these settings: it has "
        "nothing of its own there, and its scores are those of fedavg+fedavgm"
    ]


def test_a_method_that_is_refused_is_not_said_to_be_another_one(
    bare: dict[str, Any], phantoms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    about = {"name": "tiny", "rounds": 1, "federation": phantoms}
    config = parse_config({**about, "model": bare, "algorithms": ["fedbn+fedavgm"]})
    with pytest.raises(ConfigError, match="no global model that a server could optimise"):
        check_setups(config)
    assert caplog.messages == []


def test_metrics_in_millimetres_of_pictures_are_told_of_and_select_no_models(
    tmp_path: Path, phantoms: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    task = {**phantoms["task"], "surface_tolerance": 2.0}
    headline = {**phantoms, "task": {**task, "metric": "surface_dice"}}
    assert refusal(tmp_path, headline) == (
        "task.metric is surface_dice, which is undefined at site alder, whose images have no "
        "spacing: choose another metric, or give the images in a format that states it"
    )
    further = {**phantoms, "task": {**task, "metrics": ["surface_dice", "assd"]}}
    assert told(tmp_path, further, caplog) == [
        "alder, birch, cedar, elm: no surface_dice, without a spacing of its axes"
    ]
    assert told(tmp_path, {**phantoms, "task": {**task, "surface_tolerance": None}}, caplog) == []


def test_a_site_without_validation_cases_is_told_to_have_no_threshold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = pictures(tmp_path)
    federation["task"]["metrics"] = ["sensitivity"]
    federation["splits"] = {"validation": 0.0, "test": 0.5}
    assert told(tmp_path, federation, caplog, model=DENSENET) == [
        "a, b: no threshold, without validation cases"
    ]


def test_a_method_for_another_task_is_refused(tmp_path: Path, phantoms: dict[str, Any]) -> None:
    file = tmp_path / "rows.py"
    file.write_text(
        '"""Mine."""\nfrom collegium import FedAvg, settings\n\n\n@settings\nclass Rows(FedAvg):\n'
        '    """FedAvg for tables."""\n\n    tasks = frozenset({"table"})\n'
    )
    text = refusal(tmp_path, phantoms, f"{file}:Rows")
    expected = "Rows is made for table, and the task here is segmentation; choose another algorithm"
    assert text == expected


def test_every_fold_has_sites_enough_before_any_trains(
    tmp_path: Path, phantoms: dict[str, Any]
) -> None:
    said = refusal(tmp_path, phantoms, CLUSTERS, protocol="leave-one-site-out")
    assert said == f"without alder, clusters: {TOO_FEW}"


def test_every_variation_has_sites_enough_before_any_trains(
    tmp_path: Path, phantoms: dict[str, Any]
) -> None:
    outside = {"4 inside": [], "3 inside": ["elm"]}
    sweep = {name: {"federation.outside": sites} for name, sites in outside.items()}
    said = refusal(tmp_path, phantoms, CLUSTERS, variations=sweep)
    assert said == f"3 inside, clusters: {TOO_FEW}"


@pytest.mark.parametrize(
    ("algorithm", "left", "says"),
    [
        ("distance", 3, "of the two sites birch and cedar neither is more distant"),
        ("fedprox+distance", 3, "of the two sites birch and cedar neither is more distant"),
        ("pfednet", 2, "there is one site only"),
        ({"name": "pfednet", "k": 3}, 4, "k is 3, but with 3 sites a site has 1 to 2 neighbours"),
        ({"name": "pfednet", "label": "p", "k": 2}, 3, "k is 2, but with 2 sites"),
        ("resfim", 2, "'birch' is the only site, so that there is no other whose style"),
    ],
)
def test_a_fold_with_too_few_sites_is_named(
    tmp_path: Path, phantoms: dict[str, Any], algorithm: Any, left: int, says: str
) -> None:
    sites = {name: phantoms["sites"][name] for name in NAMES[:left]}
    label = algorithm if isinstance(algorithm, str) else algorithm.get("label", algorithm["name"])
    said = refusal(tmp_path, {**phantoms, "sites": sites}, algorithm, protocol="leave-one-site-out")
    assert said.startswith(f"without alder, {label}: ")
    assert says in said


def test_an_encoder_that_is_not_there_is_named(tmp_path: Path, phantoms: dict[str, Any]) -> None:
    said = refusal(tmp_path, phantoms, {"name": "distance", "kind": "embedding", "encoder": "res"})
    assert said.startswith("distance: encoder: ")
    assert "'res'" in said


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"freeze": ["enkoder"]}, "the network has no role and no submodule or tensor 'enkoder'"),
        ({"freeze": ["names"]}, "names is the whole network, and nothing is left to train"),
    ],
)
def test_what_an_algorithm_cannot_freeze_is_refused_at_once(
    tmp_path: Path, phantoms: dict[str, Any], training: dict[str, Any], says: str
) -> None:
    said = refusal(tmp_path, phantoms, {"name": "ditto", "training": training})
    assert said.startswith(f"training.freeze: {says}")


# --- models that a method does not have


@pytest.mark.parametrize("name", ["distance", "fedprox+distance"])
def test_a_method_without_personal_models_has_none_by_distance_either(
    tmp_path: Path, phantoms: dict[str, Any], name: str
) -> None:
    said = refusal(tmp_path, {**phantoms, "outside": ["elm"]}, {
        "name": name, "adapters": ["none", "ensemble"],
    })  # fmt: skip
    assert said.startswith(f"the adapter 'ensemble' needs personal models, and '{name}' has none")


# --- tasks


def table(folder: Path) -> dict[str, Any]:
    for number, site in enumerate("abc"):
        rows = np.random.default_rng(number).normal(50, 9, (8, 2)).round(1).tolist()
        lines = [f"{age},{size},{k % 2}" for k, (age, size) in enumerate(rows)]
        (folder / f"{site}.csv").write_text("\n".join(["age,size,ill", *lines]))
    sites = {site: {"table": f"{site}.csv", "share": ["personal"]} for site in "abc"}
    columns = {"label": "ill", "numeric": ["age", "size"]}
    task = {"name": "classification", "classes": ["0", "1"]}
    about = {"name": "f", "root": str(folder), "outside": ["c"], "task": task}
    return {**about, "sites": sites, "table": columns}


def pictures(folder: Path) -> dict[str, Any]:
    for number, site in enumerate("abc"):
        (folder / site).mkdir()
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 8), np.uint8)
        for case in range(8):
            Image.fromarray(pixels[case]).save(folder / site / f"{case}.png")
        lines = [f"{site}/{case}.png,{'ill' if case % 2 else 'well'}" for case in range(8)]
        (folder / f"{site}.csv").write_text("\n".join(["image,class", *lines]))
    sites = {site: {"manifest": f"{site}.csv", "share": ["personal"]} for site in "abc"}
    task = {"name": "classification", "classes": ["well", "ill"]}
    about = {"name": "f", "root": str(folder), "outside": ["c"], "task": task}
    return {**about, "sites": sites, "image": {"inputs": 1}}


DENSENET = {"name": "densenet", "growth": 2, "blocks": [1], "init_features": 4}
MLP = {"name": "mlp", "hidden": [4]}


@pytest.mark.parametrize(
    ("federation", "model", "settings", "says"),
    [
        (pictures, DENSENET, {}, r"the shape loss needs images or volumes, .* shape \(\d, 2\); "
         r"leave it out, e\.g\. with terms=\[consistency,entropy\]"),
        (table, MLP, {}, r"the shape loss needs images or volumes, .* shape \(\d, 2\); leave it"),
        (table, MLP, {"terms": ["consistency"], "transforms": True},
         "routing.transforms rotates images, not rows; set it to false"),
    ],
)  # fmt: skip
def test_routing_that_does_not_suit_the_task_is_refused_at_once(
    tmp_path: Path, federation: Any, model: dict[str, Any], settings: dict[str, Any], says: str
) -> None:
    routing = {"name": "routing", "epochs": 1, **settings}
    algorithm = {"name": "iopfl", "adapters": ["none", routing]}
    assert re.match(says, refusal(tmp_path, federation(tmp_path), algorithm, model=model))


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ("fedper", "fedper: FedPer shares nothing of a network whose tensors are all"),
        ("ttt", "Logistic takes rows of a table, whose columns cannot be turned"),
    ],
)
def test_a_network_without_the_part_that_a_method_needs_is_refused_at_once(
    tmp_path: Path, algorithm: str, says: str
) -> None:
    said = refusal(tmp_path, table(tmp_path), algorithm, model={"name": "logistic"})
    assert said.startswith(says)
