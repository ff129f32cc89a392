"""The rules by which an experiment is started with."""

from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.errors import ConfigError
from collegium.experiment.starting import StartingValues, starting_values


def pictures(root: Path, *shapes: tuple[int, int]) -> FederationConfig:
    """A site for each shape (rows, columns), with eight pictures that a mask covers half."""
    sites = {}
    for site, shape in zip("abc", shapes, strict=False):
        for kind in ("images", "labels"):
            (root / site / kind).mkdir(parents=True)
        for number in range(8):
            pixels = np.full(shape, 10 + number, np.uint8)
            pixels[: shape[0] // 2, 0] = ord(site)
            Image.fromarray(pixels).save(root / site / "images" / f"{number}.png")
            mask = np.zeros(shape, np.uint8)
            mask[shape[0] // 2 :] = 1
            Image.fromarray(mask).save(root / site / "labels" / f"{number}.png")
        sites[site] = SiteConfig(folder=site)
    return FederationConfig("drawn", sites, root=str(root))


def volumes(
    root: Path, shape: tuple[int, int, int], sampling: SamplingConfig | None = None
) -> FederationConfig:
    """One site with six volumes of 1 mm that a mask covers half."""
    for kind in ("images", "labels"):
        (root / "a" / kind).mkdir(parents=True)
    for number in range(6):
        label = np.zeros(shape, np.uint8)
        label[: shape[0] // 2] = 1
        for kind, values in (("images", label * 2.0 + number), ("labels", label)):
            written = nib.Nifti1Image(values.astype(np.uint8), np.eye(4))
            nib.save(written, root / "a" / kind / f"{number}.nii.gz")
    return FederationConfig(
        "drawn",
        {"a": SiteConfig(folder="a")},
        root=str(root),
        sampling=sampling or SamplingConfig(),
    )


def chosen(start: StartingValues, key: str) -> object:
    """The value that was chosen for a key; None if the key was left alone."""
    return next((choice.value for choice in start.choices if choice.key == key), None)


def test_large_pictures_are_cropped_and_predicted_in_windows(tmp_path: Path) -> None:
    start = starting_values(pictures(tmp_path, (200, 100), (300, 520), (240, 110)))
    # sides at most 128, and the medians are 240 and 110
    assert start.federation.sampling.crop == (128, 104)
    assert chosen(start, "inference") == {"window": [512, 512]}
    assert start.federation.sampling.foreground == 0  # half of every image is foreground


def test_steps_are_an_epoch_of_the_median_site_within_limits(tmp_path: Path) -> None:
    start = starting_values(pictures(tmp_path, (32, 32)))
    training = chosen(start, "training")
    assert isinstance(training, dict)
    # 8 patients, of whom 2 test and 2 validate: 4 train, fewer than 8; two batches are below 20
    assert (training["batch_size"], training["local_steps"]) == (4, 20)


def test_a_large_volume_halves_the_batch_and_a_long_one_is_predicted_in_windows(
    tmp_path: Path,
) -> None:
    start = starting_values(volumes(tmp_path, (64, 70, 100)))
    assert start.federation.sampling.crop == (64, 64, 64)
    training = chosen(start, "training")
    assert isinstance(training, dict)
    assert training["batch_size"] == 2  # 64^3 is more than 2^17
    assert chosen(start, "inference") == {"window": [96, 96, 96]}


def test_volumes_with_few_slices_are_cut_along_their_shortest_axis(tmp_path: Path) -> None:
    start = starting_values(volumes(tmp_path, (12, 40, 33)))
    assert start.federation.image.slices_along == "x"
    assert start.federation.sampling.crop == (40, 32)
    model = chosen(start, "model")
    assert isinstance(model, dict)
    assert model["spatial_dims"] == 2


@pytest.mark.parametrize("crop", [(16, 16), (16, 16, 8)])
def test_a_stated_crop_stays_and_decides_on_the_network(
    tmp_path: Path, crop: tuple[int, ...]
) -> None:
    stated = SamplingConfig(crop, rotations=True)
    start = starting_values(volumes(tmp_path, (20, 20, 12), sampling=stated))
    assert start.federation.sampling == stated
    model = chosen(start, "model")
    assert isinstance(model, dict)
    assert model["spatial_dims"] == len(crop)


def test_neighbouring_slices_count_as_inputs(tmp_path: Path) -> None:
    stated = SamplingConfig((16, 16), neighbours=1)
    start = starting_values(volumes(tmp_path, (20, 20, 12), sampling=stated))
    model = chosen(start, "model")
    assert isinstance(model, dict)
    assert model["in_channels"] == 3


def test_sites_outside_do_not_count(tmp_path: Path) -> None:
    federation = replace(pictures(tmp_path, (32, 32), (48, 48), (96, 96)), outside=("c",))
    assert starting_values(federation).federation.sampling.crop == (32, 32)


def test_a_federation_without_a_site_inside_is_refused(tmp_path: Path) -> None:
    federation = replace(pictures(tmp_path, (32, 32)), outside=("a",))
    with pytest.raises(ConfigError, match="leave one in to train on"):
        starting_values(federation)


def test_a_stated_scale_of_classified_pictures_is_cropped_not_resized(tmp_path: Path) -> None:
    federation = pictures(tmp_path, (60, 30), (80, 60))
    for site in "ab":
        rows = [f"{site}/images/{n}.png,{'ill' if n % 2 else 'well'}" for n in range(8)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["image,class", *rows]) + "\n")
    classified = replace(
        federation,
        sites={site: SiteConfig(manifest=f"{site}.csv") for site in "ab"},
        task=TaskConfig("classification", ("ill", "well")),
        image=ImageConfig(size=40),
    )
    start = starting_values(classified)
    assert start.federation.image == classified.image
    # the median 60 x 30, brought to 40 x 20, and multiples of 8 within
    assert start.federation.sampling.crop == (40, 16)
