"""nnU-Net's raw data, in both versions, and the Decathlon's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from collegium.data.importers.nnunet import from_nnunet, matches, read_dataset_json
from collegium.errors import DataError

TWO = {"channel_names": {"0": "T2", "1": "ADC"}, "labels": {"background": 0, "gland": 1}}


def dataset(folder: Path, files: list[str], about: dict[str, Any]) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    (folder / "dataset.json").write_text(json.dumps(about), "utf-8")
    return folder


def two_channels(*cases: str) -> list[str]:
    images = [f"imagesTr/{case}_{channel:04d}.nii.gz" for case in cases for channel in (0, 1)]
    return [*images, *(f"labelsTr/{case}.nii.gz" for case in cases)]


def test_channels_are_in_order_and_every_case_is_a_patient(tmp_path: Path) -> None:
    about = {**TWO, "file_ending": ".nii.gz", "numTraining": 2}
    folder = dataset(tmp_path / "Fälle #1", two_channels("köln 1", "a_0007"), about)
    assert matches(folder)
    cases, problems = from_nnunet("A", folder)
    assert problems == []
    assert [(case.case, case.patient, case.split) for case in cases] == [
        ("a_0007", "a_0007", None), ("köln 1", "köln 1", None),
    ]  # fmt: skip
    assert [path.name for path in cases[1].images] == ["köln 1_0000.nii.gz", "köln 1_0001.nii.gz"]
    assert cases[1].label == folder / "labelsTr" / "köln 1.nii.gz"


def test_a_case_without_a_channel_is_named_with_its_file_and_the_count(tmp_path: Path) -> None:
    files = [file for file in two_channels("b1", "b2", "b3") if file != "imagesTr/b2_0001.nii.gz"]
    cases, problems = from_nnunet("A", dataset(tmp_path, files, {**TWO, "numTraining": 3}))
    assert [case.case for case in cases] == ["b1", "b3"]
    (problem,) = problems
    assert problem.startswith("site A, case b2: channel 0001 is missing (")
    assert "imagesTr/b2_0001.nii.gz" in problem
    assert "2 of 3 cases are complete" in problem


def test_channels_are_counted_by_the_description_and_not_by_the_files(tmp_path: Path) -> None:
    few = ["imagesTr/c_0000.nii.gz", "labelsTr/c.nii.gz"]
    _, problems = from_nnunet("A", dataset(tmp_path / "few", few, TWO))
    assert "case c: channel 0001 is missing" in problems[0]
    many = [*two_channels("c"), "imagesTr/c_0002.nii.gz"]
    cases, problems = from_nnunet("A", dataset(tmp_path / "many", many, TWO))
    assert len(cases[0].images) == 2
    assert "holds files of channel 0002, and dataset.json names 2 channels" in problems[0]


def test_labelled_test_images_are_the_split_test(tmp_path: Path) -> None:
    files = [
        *two_channels("a"), "imagesTs/t_0000.nii.gz", "imagesTs/t_0001.nii.gz",
        "imagesTs/u_0000.nii.gz", "imagesTs/u_0001.nii.gz",
    ]  # fmt: skip
    folder = dataset(tmp_path, files, TWO)
    assert [case.split for case in from_nnunet("A", folder)[0]] == [None]
    dataset(tmp_path, ["labelsTs/t.nii.gz"], TWO)
    cases, problems = from_nnunet("A", folder)
    assert [(case.case, case.split) for case in cases] == [("a", "train"), ("t", "test")]
    assert problems == []


def test_other_endings_are_read_as_the_description_says(tmp_path: Path) -> None:
    about = {"channel_names": {"0": "R", "1": "G"}, "labels": {}, "file_ending": ".png"}
    files = [file.replace(".nii.gz", ".png") for file in two_channels("x.y")]
    cases, problems = from_nnunet("A", dataset(tmp_path, [*files, "imagesTr/.hid.png"], about))
    assert (cases[0].case, len(cases[0].images), problems) == ("x.y", 2, [])


def test_upper_and_lower_case_of_the_folders_do_not_count(tmp_path: Path) -> None:
    files = [*two_channels("a"), *(file.replace("Tr/", "Ts/") for file in two_channels("t"))]
    files = [file.replace("images", "Images").replace("labelsT", "LABELST") for file in files]
    folder = dataset(tmp_path / "x", [*files, "ImagesTr/b_0000.nii.gz"], TWO)
    assert matches(folder)
    cases, problems = from_nnunet("A", folder)
    assert [(case.case, case.split, len(case.images)) for case in cases] == [
        ("a", "train", 2), ("t", "test", 2),
    ]  # fmt: skip
    assert cases[1].label == folder / "LABELSTs" / "t.nii.gz"
    assert f"case b: channel 0001 is missing ({folder / 'ImagesTr' / 'b_0001.nii.gz'})" in "".join(
        problems
    )
    assert f"has no label {folder / 'LABELSTr' / 'b.nii.gz'}" in problems[1]
    (same,), _ = from_nnunet("A", dataset(tmp_path / "y", two_channels("c"), TWO))
    dataset(tmp_path / "y", ["IMAGESTR/d_0000.nii.gz"], TWO)
    assert from_nnunet("A", tmp_path / "y")[0] == [same]


def test_what_has_no_partner_or_is_not_there_is_named(tmp_path: Path) -> None:
    files = [*two_channels("a"), "imagesTr/i_0000.nii.gz", "imagesTr/i_0001.nii.gz",
             "labelsTr/l.nii.gz"]  # fmt: skip
    about = {**TWO, "numTraining": 5}
    cases, problems = from_nnunet("A", dataset(tmp_path, files, about))
    assert [case.case for case in cases] == ["a"]
    assert [problem.partition(":")[0] for problem in problems] == [
        "site A, case i", "site A, case l", "site A",
    ]  # fmt: skip
    assert "labelsTr/i.nii.gz: add the label" in problems[0]
    assert "imagesTr/l_0000.nii.gz: add the image" in problems[1]
    assert "dataset.json says 5 training cases" in problems[2]
    assert "holds 3 with the ending .nii.gz" in problems[2]


def test_version_1_and_the_decathlon_are_understood(tmp_path: Path) -> None:
    files = ["imagesTr/la_0003.nii.gz", "imagesTr/._la_0003.nii.gz", "labelsTr/la_0003.nii.gz"]
    about = {
        "modality": {"0": "MRI"},
        "labels": {"0": "background", "1": "left atrium"},
        "numTraining": 2,
        "training": [
            {"image": f"./imagesTr/la_{i:04d}.nii.gz", "label": f"./labelsTr/la_{i:04d}.nii.gz"}
            for i in (3, 4)
        ],
        "test": ["./imagesTs/la_0001.nii.gz"],
    }
    folder = dataset(tmp_path, files, about)
    assert read_dataset_json("A", folder).labels == {"background": (0,), "left atrium": (1,)}
    cases, problems = from_nnunet("A", folder)
    assert [(case.case, case.images[0].name) for case in cases] == [
        ("la_0003", "la_0003.nii.gz")
    ]  # fmt: skip
    assert len(problems) == 1
    assert problems[0].startswith("site A, case la_0004: dataset.json lists it")


def test_regions_are_lists_of_values_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "collegium")
    labels = {"background": 0, "whole": [1, 2, 3], "core": [2, 3], "edge": 3}
    folder = dataset(tmp_path, two_channels("a"), {**TWO, "labels": labels})
    from_nnunet("A", folder)
    found = read_dataset_json("A", folder)
    assert found.labels == {"background": (0,), "whole": (1, 2, 3), "core": (2, 3), "edge": (3,)}
    assert found.channels == ("T2", "ADC")
    assert "the labels background 0, whole 1+2+3, core 2+3, edge 3" in caplog.text


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{", r"site A: .*dataset\.json is not JSON"),
        ("[]", "holds no JSON object with keys"),
        ("{}", "names no channel_names"),
        ('{"channel_names": {"a": "T1"}, "labels": {}}', "is not as nnU-Net writes it"),
        ('{"channel_names": {"0": "T1"}, "labels": {"x": null}}', "is not as nnU-Net writes it"),
    ],
)
def test_a_description_that_is_none_is_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "dataset.json").write_text(text, "utf-8")
    with pytest.raises(DataError, match=error):
        from_nnunet("A", tmp_path)


def test_a_folder_without_a_description_is_refused(tmp_path: Path) -> None:
    assert not matches(tmp_path)
    with pytest.raises(DataError, match=r"site A: there is no .*dataset\.json: restore it"):
        from_nnunet("A", tmp_path)
