"""BIDS: subjects, sessions, modalities and derivatives."""

from pathlib import Path

import pytest

from collegium.data.importers.bids import from_bids, matches


def bids(folder: Path, *files: str) -> Path:
    for file in files:
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


SESSIONS = (
    "sub-01/ses-a/anat/sub-01_ses-a_T1w.nii.gz",
    "sub-01/ses-b/anat/sub-01_ses-b_T1w.nii.gz",
    "sub-02/anat/sub-02_T1w.nii.gz",
    "sub-02/anat/sub-02_T1w.json",
    "sub-02/func/sub-02_task-rest_bold.nii.gz",
    "derivatives/manual/sub-01/ses-a/anat/sub-01_ses-a_dseg.nii.gz",
    "derivatives/manual/sub-01/ses-b/anat/sub-01_ses-b_dseg.nii.gz",
    "derivatives/manual/sub-02/anat/sub-02_desc-lesion_mask.nii.gz",
    "derivatives/manual/sub-02/anat/sub-02_probseg.nii.gz",
)
TWO_KINDS = (
    "sub-1/anat/sub-1_T1w.nii.gz",
    "sub-1/anat/sub-1_FLAIR.nii.gz",
    "sub-2/anat/sub-2_T1w.nii.gz",
    "sub-2/anat/sub-2_FLAIR.nii.gz",
    "derivatives/sub-1/anat/sub-1_dseg.nii.gz",
    "derivatives/sub-2/anat/sub-2_dseg.nii.gz",
)


def test_the_sessions_of_a_subject_are_cases_of_one_patient(tmp_path: Path) -> None:
    folder = bids(tmp_path / "Köln #2 b", *SESSIONS)
    assert matches(folder)
    cases, problems = from_bids("A", folder)
    assert problems == []
    assert [(case.case, case.patient) for case in cases] == [
        ("sub-01_ses-a", "sub-01"), ("sub-01_ses-b", "sub-01"), ("sub-02", "sub-02"),
    ]  # fmt: skip
    derived = folder / "derivatives/manual"
    assert [case.label for case in cases] == [
        derived / "sub-01/ses-a/anat/sub-01_ses-a_dseg.nii.gz",
        derived / "sub-01/ses-b/anat/sub-01_ses-b_dseg.nii.gz",
        derived / "sub-02/anat/sub-02_desc-lesion_mask.nii.gz",
    ]


def test_several_modalities_are_listed_with_the_way_to_choose(tmp_path: Path) -> None:
    cases, problems = from_bids("A", bids(tmp_path, *TWO_KINDS))
    assert cases == []
    (problem,) = problems
    assert "holds images of the kinds FLAIR, T1w: choose one by modality: FLAIR" in problem
    assert "or several as channels by modality: 'FLAIR, T1w'" in problem


def test_a_modality_is_chosen_and_several_are_channels(tmp_path: Path) -> None:
    folder = bids(tmp_path, *TWO_KINDS)
    cases, problems = from_bids("A", folder, modality="T1w")
    assert [[path.name for path in case.images] for case in cases] == [
        ["sub-1_T1w.nii.gz"], ["sub-2_T1w.nii.gz"],
    ]  # fmt: skip
    assert problems == []
    cases, _ = from_bids("A", folder, modality="T1w, FLAIR")
    assert [path.name for path in cases[0].images] == ["sub-1_T1w.nii.gz", "sub-1_FLAIR.nii.gz"]
    (folder / "sub-2/anat/sub-2_FLAIR.nii.gz").unlink()
    cases, problems = from_bids("A", folder, modality="T1w, FLAIR")
    assert [case.case for case in cases] == ["sub-1"]
    assert problems[0].startswith("site A, case sub-2: channel FLAIR is missing (")
    assert "sub-2/anat/sub-2_FLAIR.nii.gz" in problems[0]
    assert "1 of 2 cases are complete" in problems[0]


def test_an_unknown_modality_lists_the_known(tmp_path: Path) -> None:
    cases, problems = from_bids("A", bids(tmp_path, *TWO_KINDS), modality="T2w")
    assert cases == []
    assert "holds no image T2w: set modality to one of FLAIR, T1w" in problems[0]


def test_several_images_of_one_kind_in_a_session_are_listed(tmp_path: Path) -> None:
    folder = bids(
        tmp_path,
        "sub-1/anat/sub-1_acq-ax_T1w.nii.gz",
        "sub-1/anat/sub-1_acq-sag_T1w.nii.gz",
        "derivatives/m/sub-1/anat/sub-1_acq-ax_dseg.nii.gz",
        "derivatives/m/sub-1/anat/sub-1_acq-sag_dseg.nii.gz",
    )
    cases, problems = from_bids("A", folder)
    assert cases == []
    assert "sub-1 in " in problems[0]
    assert "has 2 images T1w: acq-ax_T1w, acq-sag_T1w: choose one by modality" in problems[0]
    (case,), problems = from_bids("A", folder, modality="acq-sag_T1w")
    assert problems == []
    assert case.label is not None
    assert case.label.name == "sub-1_acq-sag_dseg.nii.gz"


@pytest.mark.parametrize("derivative", ["b", "desc-x_mask", "b/desc-x_mask", "b/mask", "mask"])
def test_several_labels_are_listed_and_one_is_chosen(tmp_path: Path, derivative: str) -> None:
    folder = bids(
        tmp_path,
        "sub-1/anat/sub-1_T1w.nii.gz",
        "derivatives/a/sub-1/anat/sub-1_dseg.nii.gz",
        "derivatives/b/sub-1/anat/sub-1_desc-x_mask.nii.gz",
    )
    cases, problems = from_bids("A", folder)
    assert cases == []
    expected = "case sub-1: it has the labels a/dseg, b/desc-x_mask: choose one by derivative"
    assert expected in problems[0]
    (case,), problems = from_bids("A", folder, derivative=derivative)
    assert problems == []
    assert case.label == folder / "derivatives/b/sub-1/anat/sub-1_desc-x_mask.nii.gz"


def test_a_subject_without_a_label_is_named(tmp_path: Path) -> None:
    folder = bids(tmp_path, *SESSIONS[:3], SESSIONS[5], SESSIONS[7])
    cases, problems = from_bids("A", folder)
    assert [case.case for case in cases] == ["sub-01_ses-a", "sub-02"]
    assert problems[0].startswith("site A, case sub-01_ses-b: it has no label *_dseg or *_mask in ")
    _, problems = from_bids("A", folder, derivative="other")
    assert len(problems) == 3
    assert "with the name other" in problems[0]


def test_masks_beside_the_images_are_labels_and_no_images(tmp_path: Path) -> None:
    folder = bids(
        tmp_path, "sub-1/anat/sub-1_T1w.nii", "sub-1/anat/sub-1_label-L_desc-T1lesion_mask.nii"
    )
    (case,), problems = from_bids("A", folder)
    assert problems == []
    assert case.images == (folder / "sub-1/anat/sub-1_T1w.nii",)
    assert case.label == folder / "sub-1/anat/sub-1_label-L_desc-T1lesion_mask.nii"


def test_a_folder_without_images_says_where_they_should_be(tmp_path: Path) -> None:
    (tmp_path / "sub-1").mkdir()
    assert from_bids("A", tmp_path)[1][0].startswith(f"site A: {tmp_path} holds no sub-*/anat/")
