"""Fed-ISIC2019 as FLamby publishes it."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collegium.data.federation import open_federation
from collegium.data.importers import find_in_folder, find_with_manifest
from collegium.data.importers.isic import from_isic, matches
from collegium.data.inspection import inspect_federation
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.experiment import load_federation

CSV = """image,MEL,NV,target,center,fold,fold2
ISIC_1,1.0,0.0,0,0,train,train_0
ISIC_2_downsampled,0.0,1.0,1,0,train,train_0
ISIC_3,0.0,1.0,1,4,train,train_4
ISIC_4,1.0,0.0,0,0,train,train_0
ISIC_5,0.0,1.0,1,0,test,test_0
ISIC_6,1.0,0.0,0,4,test,test_4
ISIC_7,0.0,1.0,1,4,train,train_4
"""
YAML = """
name: dermoscopy
sites:
  barcelona: {folder: pictures, manifest: train_test_split, options: {center: 0}}
  vienna: {folder: pictures, manifest: train_test_split, layout: isic, options: {center: "4"}}
task: {name: classification, classes: [MEL, NV], coding: {"0": MEL, "1": NV}}
"""


def published(root: Path, text: str = CSV) -> tuple[Path, Path]:
    """Write a table and its pictures, each of a grey of its own."""
    (root / "pictures").mkdir(parents=True)
    for number, line in enumerate(text.splitlines()[1:]):
        picture = Image.fromarray(np.full((3, 4, 3), 20 * number, np.uint8))
        picture.save(root / "pictures" / f"{line.split(',')[0]}.jpg")
    (root / "train_test_split").write_text(text, "utf-8")
    return root / "pictures", root / "train_test_split"


def test_a_centre_has_its_rows_with_their_class_and_fold(tmp_path: Path) -> None:
    folder, table = published(tmp_path)
    assert matches(table)
    cases, problems = from_isic("A", folder, table, center="0")
    assert problems == []
    assert [(case.case, case.patient, case.target, case.split) for case in cases] == [
        ("ISIC_1", "ISIC_1", "0", "train"),
        ("ISIC_2_downsampled", "ISIC_2_downsampled", "1", "train"),
        ("ISIC_4", "ISIC_4", "0", "train"), ("ISIC_5", "ISIC_5", "1", "test"),
    ]  # fmt: skip
    assert cases[1].images == (folder / "ISIC_2_downsampled.jpg",)
    assert find_with_manifest("A", folder, table, options={"center": "0"}) == (cases, [])


def test_a_federation_of_the_published_files_is_opened(tmp_path: Path) -> None:
    published(tmp_path)
    (tmp_path / "f.yaml").write_text(YAML, "utf-8")
    config = load_federation(tmp_path / "f.yaml")
    found = inspect_federation(config)
    assert found.good
    assert [site.targets for site in found.sites] == [{"0": 2, "1": 2}, {"0": 1, "1": 2}]
    sites = open_federation(config, tmp_path / "cache", 0, None)
    assert {name: len(site.test) for name, site in sites.items()} == {"barcelona": 1, "vienna": 1}
    (tested,) = sites["vienna"].test.cases  # type: ignore[attr-defined]
    assert (tested.case, tested.target) == ("ISIC_6", 0)


def test_a_column_patient_keeps_pictures_of_one_patient_together(tmp_path: Path) -> None:
    folder, table = published(tmp_path, "image,target,center,patient\na,0,1,p\nb,1,1,p\n")
    cases, _ = from_isic("A", folder, table)
    assert [(case.patient, case.stated, case.split) for case in cases] == [("p", True, None)] * 2


@pytest.mark.parametrize(
    ("center", "text", "message"),
    [
        (None, CSV, r"site A: .* holds the centres 0, 4: choose .* options: \{center: '0'\}"),
        ("1", CSV, "holds no picture of center 1: set the option to one of 0, 4"),
        ("0", "image,target\na,1\n", "has no column center: add it to the columns image, target"),
    ],
)
def test_a_centre_that_is_not_clear_is_refused(
    tmp_path: Path, center: str | None, text: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        from_isic("A", *published(tmp_path, text), center=center)


def test_rows_that_are_wrong_are_named_with_their_place(tmp_path: Path) -> None:
    text = CSV + "ISIC_1,0,1,1,0,train,x\nISIC_8,0,1,,0,train,x\nISIC_9,0,1,1,0,fold3,x\n"
    folder, table = published(tmp_path, text)
    (folder / "ISIC_4.jpg").unlink()
    cases, problems = from_isic("A", folder, table, center="0")
    assert len(cases) == 3
    assert [problem.partition(":")[0] for problem in problems] == [
        f"site A, row 4 of {table}", f"site A, row 8 of {table}",
        f"site A, row 9 of {table}", f"site A, row 10 of {table}",
    ]  # fmt: skip
    assert "has no picture ISIC_4: restore it" in problems[0]
    assert "twice" in problems[1]
    assert "picture ISIC_8 has no target" in problems[2]
    assert "the split fold3 is unknown" in problems[3]


def test_the_layout_needs_its_table_and_knows_its_options(tmp_path: Path) -> None:
    folder, table = published(tmp_path)
    with pytest.raises(ConfigError, match="name the table as the site's manifest"):
        find_in_folder("A", folder, layout="isic")
    with pytest.raises(ConfigError, match="the option 'centre' is unknown: choose among"):
        find_with_manifest("A", folder, table, options={"centre": "0"})
    with pytest.raises(DataError, match="site A: there is no folder"):
        from_isic("A", tmp_path / "no", table, center="0")
    with pytest.raises(DataError, match="site A: no: there is no such table"):
        from_isic("A", folder, tmp_path / "no")
    assert not matches(tmp_path / "no")
