"""Recipes against the papers' settings, and how they fill an experiment file."""

from pathlib import Path
from typing import Any

import pytest

from collegium.errors import ConfigError
from collegium.experiment.config.building import task_of
from collegium.experiment.config.experiment import ExperimentConfig, load_config, parse_config
from collegium.experiment.config.recipes import RECIPES, apply_recipe
from collegium.experiment.config.schema import flat

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def minimal(**more: Any) -> dict[str, Any]:
    return {
        "name": "x",
        "federation": {"name": "f", "sites": {name: {"folder": name} for name in "AB"}},
        "model": {"name": "unet"},
        "algorithms": ["fedavg"],
        "rounds": 8,
        **more,
    }


def read(recipe: str, **more: Any) -> ExperimentConfig:
    """An experiment that leaves to the recipe all that it can."""
    return parse_config(minimal(recipe=recipe, **more))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_with_a_minimal_file_is_an_experiment(name: str) -> None:
    config = read(name)
    task = task_of(config)
    assert task.metric in task.units
    assert config.rounds == 8  # what the file says stays
    assert RECIPES[name].description


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fills_in_only_what_is_silent(name: str) -> None:
    silent: dict[str, Any] = {}
    apply_recipe(silent, name)
    everything = flat(silent)
    assert everything == flat(RECIPES[name].values)
    for key in everything:
        data: dict[str, Any] = {}
        *above, leaf = key.split(".")
        place = data
        for part in above:
            place = place.setdefault(part, {})
        place[leaf] = 987
        for _ in range(2):
            apply_recipe(data, name)
            assert flat(data) == everything | {key: "987"}


def test_null_in_a_file_counts_as_said() -> None:
    data: dict[str, Any] = {"federation": {"image": {"size": None}}}
    apply_recipe(data, "iop-fl")
    assert data["federation"]["image"] == {"size": None, "normalise": "zscore"}


def test_a_recipe_is_not_changed_by_what_it_filled_in() -> None:
    data: dict[str, Any] = {}
    apply_recipe(data, "iop-fl")
    data["federation"]["image"]["size"][0] = 1
    data["training"]["lr"] = 7
    again: dict[str, Any] = {}
    apply_recipe(again, "iop-fl")
    assert again["federation"]["image"]["size"] == [384, 384]
    assert again["training"]["lr"] == 1e-3


@pytest.mark.parametrize("wrong", [{"training": 5}, {"training": "fast"}, {"inference": [1]}])
def test_a_wrong_value_is_refused_in_words_with_a_recipe_too(wrong: dict[str, Any]) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError, match=key):
        read("distance-fets", **wrong)


def test_an_unknown_recipe_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"recipe.*iop-fl"):
        read("iopfl")


def test_the_recipe_of_rounds_at_home_is_that_of_its_experiment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLLEGIUM_DATA", str(tmp_path))
    shipped = load_config(CONFIGS / "vessel-home.yaml")
    silent: dict[str, Any] = {}
    apply_recipe(silent, "home")
    assert (shipped.rounds, shipped.home_rounds) == (silent["rounds"], silent["home_rounds"])
    assert shipped.training.optimizer_state == silent["training"]["optimizer_state"] == "keep"


def test_fewer_rounds_than_those_at_home_are_refused() -> None:
    with pytest.raises(ConfigError, match="home_rounds is 5, of 4 rounds in all"):
        read("home", rounds=4)


# --- numbers of the papers


def rounds_of(name: str) -> Any:
    return RECIPES[name].values["rounds"]


def test_iop_fl_trains_as_the_paper_says() -> None:
    config = read("iop-fl")
    training, image = config.training, config.federation.image
    assert (training.optimizer, training.lr, training.amsgrad) == ("adam", 1e-3, True)
    assert (training.batch_size, training.local_epochs, rounds_of("iop-fl")) == (16, 1, 100)
    assert training.optimizer_state == "reset"
    assert (config.loss, image.size, image.normalise) == ("dice", (384, 384), "zscore")
    assert config.federation.sampling.flips
    assert config.federation.sampling.rotations


def test_a_recipe_s_weights_go_to_its_own_classes_only() -> None:
    def classified(**task: Any) -> ExperimentConfig:
        data = minimal(recipe="grace-dermoscopy")
        data["federation"]["task"] = task
        return parse_config(data)

    names = ["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"]
    assert classified(classes=names).federation.task.weights is not None
    for classes in (sorted(names), ["well", "ill"]):
        with pytest.raises(ConfigError, match=r"task\.classes is .* or give task\.weights"):
            classified(classes=classes)
        assert classified(classes=classes, weights=None).federation.task.weights is None
    own = classified(classes=["well", "ill"], weights=[1.0, 3.0])
    assert own.federation.task.weights == (1.0, 3.0)


def test_grace_s_prostate_trains_as_the_paper_says_but_for_what_its_text_names() -> None:
    prostate = read("grace-prostate")
    assert (prostate.training.optimizer, prostate.training.lr) == ("adam", 1e-3)
    assert (prostate.training.batch_size, prostate.training.local_epochs) == (16, 1)
    assert (prostate.loss, rounds_of("grace-prostate")) == ("dice_ce", 200)


def test_grace_s_dermoscopy_has_the_paper_s_numbers() -> None:
    skin = read("grace-dermoscopy")
    assert (skin.training.optimizer, skin.training.lr) == ("adam", 5e-4)
    assert (skin.training.batch_size, skin.training.local_epochs) == (64, 5)
    assert (skin.loss, rounds_of("grace-dermoscopy")) == ("focal", 40)
    task, sampling = skin.federation.task, skin.federation.sampling
    assert dict(zip(task.classes, task.weights or (), strict=True)) == {
        "MEL": 5.5813, "NV": 2.0472, "BCC": 7.0204, "AK": 26.1194,
        "BKL": 9.5369, "DF": 101.0707, "VASC": 92.5224, "SCC": 38.3443,
    }  # fmt: skip
    assert [*task.classes] == ["MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"]  # as ISIC
    image = skin.federation.image
    assert (image.size, image.side, sampling.crop) == (224, "shortest", (200, 200))
    assert image.colour_constancy == 6
    assert (sampling.rotate, sampling.zoom, sampling.flips) == (50.0, 0.07, True)
    assert (sampling.shear, sampling.probability) == (0.1, 0.5)
    assert (sampling.shift, sampling.scale) == (0.15, 0.1)  # brightness and contrast
    assert sampling.channels_alike
    assert (sampling.holes, sampling.hole_side) == (8, 16)
    assert not sampling.rotations
    assert task_of(skin).metric == "balanced_accuracy"


@pytest.mark.parametrize(
    ("name", "spacing", "crop", "window"),
    [
        ("distance-fets", (1.0, 1.0, 1.0), (224, 224, 144), (240, 240, 160)),
        ("distance-prostate", (0.3, 0.3, 1.0), (224, 224, 32), (224, 224, 32)),
        ("distance-kits", (1.45, 1.45, 2.9), (256, 256, 64), (256, 256, 80)),
    ],
)
def test_distance_aware_averaging_trains_as_the_paper_says(
    name: str, spacing: tuple[float, ...], crop: tuple[int, ...], window: tuple[int, ...]
) -> None:
    config = read(name)
    training, sampling = config.training, config.federation.sampling
    assert (training.optimizer, training.lr, training.momentum) == ("sgd", 0.01, 0.9)
    assert (training.batch_size, training.local_epochs, rounds_of(name)) == (1, 1, 25)
    assert (sampling.patches, sampling.flips, sampling.scale, sampling.shift) == (4, True, 0.1, 0.1)
    assert (config.loss, config.federation.image.spacing) == ("dice", spacing)
    assert (sampling.crop, config.inference.window) == (crop, window)


def test_pfednet_trains_as_the_paper_says() -> None:
    images, slices = read("pfednet-classification"), read("pfednet-segmentation")
    for config, lr, batch, side in ((images, 0.01, 32, 32), (slices, 1e-3, 2, 64)):
        training = config.training
        assert (training.optimizer, training.lr, training.momentum) == ("sgd", lr, 0.9)
        assert (training.batch_size, training.local_epochs) == (batch, 10)
        assert config.federation.image.size == config.federation.sampling.crop == (side, side)
        assert config.loss == "ce"
    assert rounds_of("pfednet-classification") == 100
    assert rounds_of("pfednet-segmentation") == 50


def test_resfim_trains_as_the_paper_says() -> None:
    config = read("resfim")
    training = config.training
    assert (training.optimizer, training.lr, training.lr_decay) == ("adam", 1e-4, 1.0)
    assert (training.batch_size, training.local_epochs, rounds_of("resfim")) == (4, 4, 100)
    assert (config.loss, config.federation.image.size) == ("dice_ce", (384, 384))


def test_the_file_s_rounds_may_be_left_to_the_recipe() -> None:
    data = minimal(recipe="iop-fl")
    del data["rounds"]
    assert parse_config(data).rounds == 100
