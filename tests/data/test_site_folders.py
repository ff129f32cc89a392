"""A federation out of a folder of sites."""

import json
from pathlib import Path

import pytest

from collegium.data.site_folders import federation_of_folder
from collegium.errors import DataError


def touch(folder: Path, *files: str) -> None:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def test_masks_make_a_segmentation_of_every_subfolder(tmp_path: Path) -> None:
    touch(tmp_path, "north/images/a.png", "north/labels/a.png", "notes.txt", ".hidden/x")
    touch(tmp_path, "south/images/b.png", "south/masks/b.png")
    found = federation_of_folder(tmp_path)
    assert {name: site.folder for name, site in found.sites.items()} == {
        "north": "north",
        "south": "south",
    }
    assert found.task.name == "segmentation"
    assert found.task.classes == ("background", "foreground")
    assert found.root == str(tmp_path.resolve())


def test_folders_of_classes_make_a_classification_with_the_classes_of_all_sites(
    tmp_path: Path,
) -> None:
    touch(tmp_path, "north/well/a.png", "north/ill/b.png", "south/well/c.png", "south/dead/d.png")
    found = federation_of_folder(tmp_path)
    assert found.task.name == "classification"
    assert found.task.classes == ("dead", "ill", "well")


def test_a_manifest_in_a_folder_is_the_sites(tmp_path: Path) -> None:
    touch(tmp_path, "north/a.png")
    (tmp_path / "north" / "manifest.csv").write_text("image,class\na.png,ill\n")
    touch(tmp_path, "south/ill/b.png", "south/well/c.png")
    found = federation_of_folder(tmp_path)
    assert (found.sites["north"].manifest, found.sites["north"].folder) == (
        "north/manifest.csv",
        None,
    )
    assert found.task.classes == ("ill", "well")


@pytest.mark.parametrize(
    ("labels", "classes", "regions"),
    [
        ({"background": 0, "left": 2, "right": 1}, ("background", "right", "left"), None),
        (
            {"background": 0, "whole": [1, 2], "core": 2},
            ("background", "class_1", "class_2"),
            {"whole": (1, 2), "core": (2,)},
        ),
    ],
)
def test_classes_are_those_that_a_data_set_describes(
    tmp_path: Path, labels: dict[str, object], classes: object, regions: object
) -> None:
    touch(tmp_path, "north/imagesTr/a_0000.png", "north/labelsTr/a.png")
    description = {"channel_names": {"0": "T1"}, "labels": labels, "file_ending": ".png"}
    (tmp_path / "north" / "dataset.json").write_text(json.dumps(description))
    task = federation_of_folder(tmp_path).task
    assert (task.classes, task.regions) == (classes, regions)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["images/a.png", "labels/a.png"], "is the folder of one site"),
        (["a.csv", "b.csv"], "holds tables, whose columns have to be named"),
        (["a.png"], "holds no folders"),
    ],
)
def test_other_folders_are_refused(tmp_path: Path, files: list[str], sentence: str) -> None:
    touch(tmp_path, *files)
    with pytest.raises(DataError, match=sentence):
        federation_of_folder(tmp_path)


def test_a_single_class_is_nothing_to_learn(tmp_path: Path) -> None:
    touch(tmp_path, "north/a.png")
    (tmp_path / "north" / "manifest.csv").write_text("image,class\na.png,ill\n")
    with pytest.raises(DataError, match="are of the class 'ill'"):
        federation_of_folder(tmp_path)
