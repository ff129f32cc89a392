"""Masks find their images by name, whatever the order, the padding and the extra words."""

import itertools
import unicodedata
from pathlib import Path

import pytest

from collegium.data.pairing import case_id, pair_cases
from collegium.errors import DataError


def files(folder: str, *names: str) -> list[Path]:
    return [Path(folder) / name for name in names]


def pairs(images: list[str], masks: list[str]) -> dict[str, str]:
    """Pair names; return the mask's name of every case."""
    pairing = pair_cases(files("images", *images), files("masks", *masks))
    return {case.case: case.mask.name for case in pairing.cases if case.mask is not None}


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("a.png", "a"),
        ("a.nii.gz", "a"),
        ("a.NII.GZ", "a"),
        ("a.b.nii.gz", "a.b"),
        ("1.2.840.png", "1.2.840"),
        ("pat 01_seg.nii", "pat 01_seg"),
        ("a.mha", "a"),
    ],
)
def test_the_case_is_the_stem_as_it_stands(name: str, stem: str):
    assert case_id(Path("x.d") / name) == stem


@pytest.mark.parametrize(
    ("images", "masks"),
    [
        (["a.png", "b.png"], ["a.png", "b.png"]),
        (["a.jpg", "b.jpg"], ["a_mask.png", "b_mask.png"]),
        (["a.nii.gz", "b.nii.gz"], ["a-Seg.nii.gz", "b-Seg.nii.gz"]),
        (["case_1.png", "case_2.png", "case_10.png"],
         ["case_01.png", "case_02.png", "case_10.png"]),
        (["img1.png", "img2.png", "img10.png"], ["label01.png", "label02.png", "label10.png"]),
        (["img_01.png", "img_02.png"], ["mask_1.png", "mask_2.png"]),
        (["21_training.tif", "22_training.tif"], ["21_manual1.gif", "22_manual1.gif"]),
        (["01_test.tif", "02_test.tif"], ["01_test_mask.gif", "02_test_mask.gif"]),
        (["Image_01L.jpg", "Image_01R.jpg"], ["Image_01L_1stHO.png", "Image_01R_1stHO.png"]),
        (["im0001.png", "im0002.png"], ["im0001.ah.png", "im0002.ah.png"]),
        (["ISIC_0000001.jpg", "ISIC_0000002.jpg"],
         ["ISIC_0000001_segmentation.png", "ISIC_0000002_Segmentation.png"]),
        (["benign (1).png", "benign (2).png"], ["benign (1)_mask.png", "benign (2)_mask.png"]),
        (["hip_001_0000.nii.gz", "hip_002_0000.nii.gz"], ["hip_001.nii.gz", "hip_002.nii.gz"]),
        (["pat1_T1.nii", "pat2_T1.nii"], ["pat01_lesion.nii", "pat02_lesion.nii"]),
        (["pat 01_seg.nii", "pat 02_seg.nii"], ["pat 01_seg.nii", "pat 02_seg.nii"]),
        (["image.nii"], ["mask.nii"]),
        (["1_test.png", "1_train.png"], ["1_test_gt.png", "1_train_gt.png"]),
        (["p1_1st.png", "p1_2nd.png"], ["p1_1st_gt.png", "p1_2nd_gt.png"]),
        (["x_1.png", "x_01.png"], ["x_1.png", "x_01.png"]),
        (["fälle #1.png", "fälle #2.png"], ["Fälle #01 Label.png", "Fälle #02 Label.png"]),
    ],
)  # fmt: skip
def test_masks_find_their_images_in_any_order(images: list[str], masks: list[str]):
    expected = {case_id(Path(image)): mask for image, mask in zip(images, masks, strict=True)}
    for order in itertools.islice(itertools.permutations(masks), 6):
        assert pairs(images, list(order)) == expected
    assert pairs(images[::-1], masks) == expected


def test_composed_and_decomposed_umlauts_are_equal():
    name = "Zürich_1.png"
    composed, decomposed = (unicodedata.normalize(form, name) for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert pairs([decomposed], [composed]) == {case_id(Path(decomposed)): composed}
    with pytest.raises(DataError, match="are all called case"):
        pair_cases(files("images", composed, decomposed), [])


def test_cases_are_sorted_with_numbers_as_numbers():
    names = ["case_10.png", "case_9.png", "case_100.png", "a.png", "case_1.png"]
    assert list(pairs(names, names)) == ["a", "case_1", "case_9", "case_10", "case_100"]


def test_what_is_left_over_is_reported_by_name():
    pairing = pair_cases(
        files("images", "a.png", "b.png", "c.png"),
        files("masks", "c_seg.png", "a_seg.png", "z_seg.png"),
    )
    assert [case.case for case in pairing.cases] == ["a", "c"]
    assert pairing.unpaired_images == ("b",)
    assert pairing.unpaired_masks == ("z_seg.png",)
    assert any("case b has no mask" in note for note in pairing.notes)


def test_without_masks_every_image_is_a_case():
    pairing = pair_cases(files("images", "b.png", "a.png"), [])
    assert [(case.case, case.mask) for case in pairing.cases] == [("a", None), ("b", None)]
    assert pairing.unpaired_images == ()


def test_fields_of_view_are_paired_too_and_missing_ones_named():
    pairing = pair_cases(
        files("images", "21_training.tif", "22_training.tif"),
        files("manual", "22_manual1.gif", "21_manual1.gif"),
        files("mask", "22_training_mask.gif"),
    )
    assert [case.fov and case.fov.name for case in pairing.cases] == [None, "22_training_mask.gif"]
    assert "case 21_training has no field of view" in pairing.notes
    case, image, mask, fov = pairing.cases[1]
    assert (case, image.name) == ("22_training", "22_training.tif")
    assert mask == Path("manual/22_manual1.gif")
    assert fov == Path("mask/22_training_mask.gif")


def test_two_masks_for_an_image_are_refused_by_name():
    with pytest.raises(DataError) as caught:
        pairs(["21_training.tif"], ["21_manual1.gif", "21_manual2.gif"])
    for word in ("21_manual1.gif", "21_manual2.gif", "21_training.tif", "manifest"):
        assert word in str(caught.value)


def test_two_masks_for_one_of_several_images_are_refused_too():
    with pytest.raises(DataError, match=r"b_1stHO\.png, b_2ndHO\.png"):
        pairs(["a.png", "b.png"], ["a.png", "b_1stHO.png", "b_2ndHO.png"])


def test_two_images_for_a_mask_are_refused_by_name():
    with pytest.raises(DataError, match=r"case_01\.png, case_1\.png|case_1\.png, case_01\.png"):
        pairs(["case_1.png", "case_01.png"], ["case_1_seg.png"])


def test_two_images_with_one_stem_are_refused_by_name():
    for masks in ([], ["a.png"]):
        with pytest.raises(DataError, match=r"a\.jpg, a\.png in images are all called case a"):
            pairs(["a.png", "a.jpg", "b.png"], masks)


def test_the_leading_part_does_not_override_other_numbers():
    pairing = pair_cases(
        files("images", "1_2.png", "2_1.png"), files("masks", "1_2.png", "2_9.png")
    )
    assert [case.case for case in pairing.cases] == ["1_2"]
    assert pairing.unpaired_images == ("2_1",)
    assert pairing.unpaired_masks == ("2_9.png",)
    assert pairing.notes[0].endswith("by equal names")  # the strictest rule that finds as many


def test_a_second_channel_is_no_second_case_of_the_mask():
    pairing = pair_cases(files("images", "p_0000.nii", "p_0001.nii"), files("masks", "p.nii"))
    assert [case.image.name for case in pairing.cases] == ["p_0000.nii"]
    assert pairing.unpaired_images == ("p_0001",)


def test_names_that_share_nothing_are_refused_with_an_example():
    with pytest.raises(DataError, match=r"no mask in masks .*\(for instance x\.png and a\.png\)"):
        pairs(["a.png", "b.png"], ["x.png", "y.png"])


def test_droppings_of_operating_systems_are_ignored(tmp_path: Path):
    names = (
        ".DS_Store", "Thumbs.db", "desktop.ini", "._a.png", ".hidden.png", "README.txt",
        "dataset.json", "Icon\r", "a", "a.png",
    )  # fmt: skip
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).touch()
    pairing = pair_cases(*(sorted((tmp_path / folder).iterdir()) for folder in ("images", "masks")))
    assert [case.image.name for case in pairing.cases] == ["a.png"]
    assert pairing.unpaired_masks == ()


def test_unread_kinds_are_kept_for_the_reader_to_name():
    assert pairs(["a.mha"], ["a_seg.mha"]) == {"a": "a_seg.mha"}


def test_folders_without_images_or_masks_are_refused():
    with pytest.raises(DataError, match="images: there is no image"):
        pairs(["README.txt"], ["a.png"])
    with pytest.raises(DataError, match="masks: there is no mask"):
        pairs(["a.png"], [".DS_Store"])
    with pytest.raises(DataError, match="no image"):
        pair_cases([], [])


def test_the_rule_is_said():
    notes = pair_cases(files("images", "case_1.png"), files("masks", "case_01.png")).notes
    assert notes == (
        "1 of 1 files of kind mask were paired by equal names, with numbers compared as numbers",
    )
