"""Data that the server holds, as a federation's file names them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from collegium.data.federation_config import FederationConfig, PublicConfig, SiteConfig
from collegium.data.public import open_public
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.tables import TableConfig
from collegium.errors import ConfigError, DataError


def picture(path: Path, seed: int = 0, *, mask: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 2 if mask else 256, (8, 8), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


def images(root: Path, **public: Any) -> FederationConfig:
    return FederationConfig(
        "f",
        {"north": SiteConfig(folder="north")},
        str(root),
        image=ImageConfig(channels="grey"),
        public=PublicConfig(**public),
    )


def test_without_any_there_are_none(tmp_path: Path) -> None:
    config = FederationConfig("f", {"north": SiteConfig(folder="north")}, str(tmp_path))
    assert open_public(config, tmp_path / "cache") is None


def test_images_have_labels_where_a_folder_of_masks_is_named(tmp_path: Path) -> None:
    for number in range(3):
        picture(tmp_path / "pub" / f"{number}.png", number)
        picture(tmp_path / "masks" / f"{number}.png", number, mask=True)
    plain = open_public(images(tmp_path, images="pub"), tmp_path / "cache")
    assert plain is not None
    assert len(plain) == 3
    assert {*plain.example(0).batch} == {"image"}
    assert plain.example(0).batch["image"].shape == (1, 1, 8, 8)
    with_labels = open_public(images(tmp_path, images="pub", labels="masks"), tmp_path / "cache")
    assert with_labels is not None
    wanted = np.random.default_rng(1).integers(0, 2, (8, 8), dtype=np.uint8)
    found = {e.case: e.batch["label"] for e in map(with_labels.example, range(3))}
    np.testing.assert_array_equal(found["1"][0].numpy(), wanted)


def test_a_table_is_encoded_as_the_sites_are(tmp_path: Path) -> None:
    (tmp_path / "pub.csv").write_text("a,y\n1,no\n5,yes\n3,\n")
    config = FederationConfig(
        "f",
        {"north": SiteConfig(table="north.csv")},
        str(tmp_path),
        task=TaskConfig("classification", ("no", "yes")),
        table=TableConfig("y", ("a",)),
        public=PublicConfig(table="pub.csv"),
    )
    data = open_public(config, tmp_path / "cache")
    assert data is not None
    values = [float(data.example(index).batch["image"]) for index in range(3)]
    rows = np.array([1.0, 5.0, 3.0])
    assert values == pytest.approx((rows - rows.mean()) / rows.std(), rel=1e-6)
    assert "label" not in data.example(0).batch  # one row has none


def test_what_is_elsewhere_is_an_empty_dataset(tmp_path: Path) -> None:
    data = open_public(images(tmp_path, remote=True), tmp_path / "cache")
    assert data is not None
    assert len(data) == 0


def test_a_missing_folder_is_said_to_be_of_the_public_data(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^federation.public: .*there is no such folder"):
        open_public(images(tmp_path, images="nowhere"), tmp_path / "cache")


@pytest.mark.parametrize(
    ("public", "words"),
    [
        ({}, "either images or a table"),
        ({"images": "a", "table": "b.csv"}, "either images or a table"),
        ({"labels": "masks", "table": "b.csv"}, "name the images"),
    ],
)
def test_images_or_a_table_are_named(public: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PublicConfig(**public)


def test_they_are_what_the_sites_hold(tmp_path: Path) -> None:
    config = images(tmp_path, images="pub")
    with pytest.raises(ConfigError, match="name a table there if they have tables"):
        replace(config, public=PublicConfig(table="pub.csv"))
