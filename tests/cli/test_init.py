"""The file that `collegium init` writes, shown and run as it is, for each kind of data."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.phantoms import make_federation
from collegium.experiment.config.experiment import ExperimentConfig, load_config

ONE_ROUND = ("rounds=1", "home_rounds=0", "seeds=[0]", "training.local_steps=1")
TABLES = """\
name: risk
sites: {north: {table: north.csv}, south: {table: south.csv}}
task: {name: classification, classes: [well, ill], coding: {"0": well, "1": ill}}
table: {label: ill, numeric: [age, crea], categorical: {sex: [f, m]}}
"""


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, [*map(str, arguments)])


def init(federation: Path, experiment: Path) -> tuple[ExperimentConfig, str]:
    """The experiment that the command wrote, as it was loaded, and what was printed."""
    done = call("init", federation, experiment)
    assert done.exit_code == 0, done.output
    return load_config(experiment), done.output


def scored_algorithms(experiment: Path, *overrides: str) -> set[str]:
    """The methods with test scores after one round of the experiment."""
    output = experiment.parent / "run"
    done = call("run", experiment, *ONE_ROUND, *overrides, f"output={json.dumps(str(output))}")
    assert done.exit_code == 0, done.output
    frame = pd.read_csv(output / "results.csv")
    return set(frame[(frame["split"] == "test") & frame["value"].notna()]["algorithm"])


def assert_equal_and_certain(config: ExperimentConfig) -> None:
    """Five seeds, the same steps for all, and training alone beside two ways to join."""
    assert config.seeds == (0, 1, 2, 3, 4)
    assert config.training.local_steps is not None
    assert [algorithm.name for algorithm in config.algorithms] == ["local", "fedavg", "fedbn"]


def assert_at_home(config: ExperimentConfig) -> None:
    """The recipe of docs/recipes.md: a fifth of the rounds at home, moments kept."""
    assert (config.rounds, config.home_rounds) == (25, 5)
    assert config.training.optimizer_state == "keep"


def write_volumes(folder: Path, shape: Sequence[int], spacing: Sequence[float]) -> None:
    """Write six volumes with two structures, with values 1 and 3 in the masks."""
    rng = np.random.default_rng(len(folder.name))
    for number in range(6):
        label = np.zeros(shape, np.uint8)
        label[4:9, 4:9, 2:5], label[10:14, 10:14, 2:5] = 1, 3
        image = (rng.normal(size=shape) + label).astype(np.float32)
        for kind, values in (("images", image), ("labels", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            written = nib.Nifti1Image(values, np.diag([*spacing, 1.0]))
            nib.save(written, folder / kind / f"p{number}.nii.gz")


def write_pictures(folder: Path, counts: dict[str, int], size: tuple[int, int]) -> None:
    """Write pictures (columns, rows) in a folder for each class, the later ones brighter."""
    rng = np.random.default_rng(len(folder.name))
    for level, (name, count) in enumerate(counts.items()):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.normal(80 + 60 * level, 10, size[::-1]).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}{number}.png")


def write_tables(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        with (folder / f"{site}.csv").open("w", newline="") as file:
            rows = [("age", "crea", "sex", "ill")]
            for number in range(40):
                ill = number % 2
                rows.append((f"{rng.normal(60 + 5 * ill):.2f}", f"{rng.normal(1):.2f}",
                             "fm"[number % 3 == 0], str(ill)))  # fmt: skip
            csv.writer(file).writerows(rows)
    (folder / "federation.yaml").write_text(TABLES)
    return folder / "federation.yaml"


def test_pictures_with_masks_get_a_network_of_pictures_and_the_recipe(tmp_path: Path) -> None:
    federation = make_federation(tmp_path / "data", 2, cases=8, size=36)
    config, printed = init(federation, tmp_path / "x.yaml")
    assert config.model.name == "unet"
    assert (config.model.params["spatial_dims"], config.model.params["in_channels"]) == (2, 1)
    assert config.federation.sampling.crop == (32, 32)  # the multiple of 8 below 36
    assert config.federation.sampling.flips  # as the federation's file says
    assert config.federation.task.classes == ("background", "gland")
    # a site has 3 cases to train on, so that a batch of 8 is halved twice
    assert (config.loss, config.training.batch_size) == ("dice_ce", 2)
    assert_equal_and_certain(config)
    assert_at_home(config)
    assert "segmentation of background, gland at 2 sites" in printed
    assert "test patients, and a verdict needs 6" in printed
    assert printed.splitlines()[-1].startswith("next: collegium config show ")
    assert call("config", "show", tmp_path / "x.yaml").exit_code == 0
    assert scored_algorithms(tmp_path / "x.yaml") == {"local", "fedavg", "fedbn"}


def test_the_file_is_short_and_names_the_root_from_its_own_folder(tmp_path: Path) -> None:
    make_federation(tmp_path / "data", 2, cases=4, size=32)
    init(tmp_path / "data", tmp_path / "x.yaml")
    lines = (tmp_path / "x.yaml").read_text().splitlines()
    assert len(lines) < 35
    assert max(map(len, lines)) <= 110
    assert "  root: data" in lines
    assert sum("#" in line for line in lines) > 6


def test_a_folder_of_sites_is_enough(tmp_path: Path) -> None:
    make_federation(tmp_path / "data", 2, cases=8, size=32)
    for file in [*tmp_path.rglob("*.csv"), *tmp_path.rglob("*.yaml")]:
        file.unlink()
    config, _ = init(tmp_path / "data", tmp_path / "x.yaml")
    assert config.federation.task.classes == ("background", "foreground")
    assert all(site.folder == name for name, site in config.federation.sites.items())
    assert scored_algorithms(tmp_path / "x.yaml", "algorithms=[local]") == {"local"}


def test_volumes_get_a_network_of_volumes_and_the_classes_of_their_masks(tmp_path: Path) -> None:
    for site in ("north", "south-west"):
        write_volumes(tmp_path / "data" / site, (20, 27, 17), (1, 1, 1))
    config, _ = init(tmp_path / "data", tmp_path / "x.yaml")
    assert config.model.params["spatial_dims"] == 3
    assert config.federation.sampling.crop == (16, 24, 16)
    assert config.federation.task.classes == ("background", "class_1", "class_3")
    assert config.federation.task.label_map == {1: 1, 3: 2}
    # 75 and 48 voxels of 9180 are rare
    assert config.federation.sampling.foreground == 0.5
    assert_equal_and_certain(config)
    assert_at_home(config)
    assert scored_algorithms(tmp_path / "x.yaml", "algorithms=[local]") == {"local"}


def test_volumes_of_thick_slices_get_a_network_of_slices(tmp_path: Path) -> None:
    write_volumes(tmp_path / "data" / "north", (20, 20, 6), (1, 1, 5))
    write_volumes(tmp_path / "data" / "south", (20, 20, 6), (2, 2, 6))
    config, _ = init(tmp_path / "data", tmp_path / "x.yaml")
    assert config.model.params["spatial_dims"] == 2
    assert config.federation.image.slices_along == "acquisition"
    assert config.federation.image.spacing == (1.5, 1.5)  # the median of 1 and 2
    assert config.federation.sampling.crop == (16, 16)
    assert scored_algorithms(tmp_path / "x.yaml", "algorithms=[local]") == {"local"}


def test_classified_pictures_get_one_size_and_a_densenet(tmp_path: Path) -> None:
    write_pictures(tmp_path / "data" / "north", {"well": 8, "ill": 8}, (40, 30))
    write_pictures(tmp_path / "data" / "south-west", {"well": 8, "ill": 8}, (48, 34))
    config, _ = init(tmp_path / "data", tmp_path / "x.yaml")
    assert config.model.name == "densenet"
    assert config.model.params["stem"] == "small"
    assert config.federation.task.classes == ("ill", "well")
    assert config.federation.image.size == (32, 40)  # the lower medians 30 and 40, as multiples
    assert config.loss == "ce"
    assert_equal_and_certain(config)
    assert_at_home(config)
    small = ("algorithms=[local]", "model.blocks=[1]")
    assert scored_algorithms(tmp_path / "x.yaml", *small) == {"local"}


def test_a_rare_class_gets_the_focal_loss_and_balanced_accuracy(tmp_path: Path) -> None:
    for site in ("north", "south"):
        write_pictures(tmp_path / site, {"well": 29, "ill": 3}, (32, 32))
    config, _ = init(tmp_path, tmp_path / "x.yaml")  # 3 of 32 are 9 %
    assert (config.loss, config.federation.task.metric) == ("focal", "balanced_accuracy")
    assert config.federation.image.size is None


def test_tables_get_a_perceptron_and_no_rounds_at_home(tmp_path: Path) -> None:
    config, _ = init(write_tables(tmp_path), tmp_path / "x.yaml")
    assert config.model.name == "mlp"
    assert (config.rounds, config.home_rounds, config.loss) == (30, 0, "ce")
    # 24 of the 40 patients train: a batch of 32 would never be whole
    assert (config.training.batch_size, config.training.local_steps) == (16, 5)
    assert_equal_and_certain(config)
    assert scored_algorithms(tmp_path / "x.yaml") == {"local", "fedavg", "fedbn"}


def test_grey_pictures_beside_coloured_ones_become_coloured(tmp_path: Path) -> None:
    write_pictures(tmp_path / "north", {"well": 8, "ill": 8}, (32, 32))
    write_pictures(tmp_path / "south", {"well": 8, "ill": 8}, (32, 32))
    for file in (tmp_path / "south").rglob("*.png"):
        Image.open(file).convert("RGB").save(file)
    config, _ = init(tmp_path, tmp_path / "x.yaml")
    assert config.federation.image.channels == "rgb"
    assert config.model.params["in_channels"] == 3


def test_a_root_with_a_variable_stays_as_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSPITALS", str(tmp_path))
    federation = write_tables(tmp_path)
    federation.write_text(f"root: $HOSPITALS\n{TABLES}")
    init(federation, tmp_path / "x.yaml")
    assert "  root: $HOSPITALS\n" in (tmp_path / "x.yaml").read_text()


def test_a_file_that_exists_is_never_overwritten(tmp_path: Path) -> None:
    federation = write_tables(tmp_path)
    (tmp_path / "x.yaml").write_text("mine")
    done = call("init", federation, tmp_path / "x.yaml")
    assert done.exit_code == 2
    assert "x.yaml exists already: name another file" in done.output
    assert (tmp_path / "x.yaml").read_text() == "mine"


def test_an_experiment_is_no_federation_to_start_from(tmp_path: Path) -> None:
    init(write_tables(tmp_path), tmp_path / "x.yaml")
    done = call("init", tmp_path / "x.yaml", tmp_path / "y.yaml")
    assert done.exit_code == 2
    assert "is an experiment already: run it by collegium run" in done.output


def test_problems_of_the_data_are_named_and_nothing_is_written(tmp_path: Path) -> None:
    make_federation(tmp_path / "data", 2, cases=4, size=32)
    next(tmp_path.rglob("alder_001.png")).write_bytes(b"no picture")
    done = call("init", tmp_path / "data", tmp_path / "x.yaml")
    assert done.exit_code == 3
    assert "alder_001" in done.output
    assert not (tmp_path / "x.yaml").exists()
