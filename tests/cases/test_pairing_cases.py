"""The field cases of names and paths, and for each a sibling of the same kind."""

import unicodedata
from pathlib import Path
from typing import Any, Literal

import nibabel as nib
import numpy as np
import pytest

from collegium.data.pairing import Pairing, pair_cases
from collegium.data.reading import read_image, read_label


def pair(folder: Path) -> Pairing:
    return pair_cases(*(list((folder / name).iterdir()) for name in ("images", "masks")))


def means(pairing: Pairing) -> dict[str, float]:
    """The mean intensity of every case under its own mask."""
    result = {}
    for case in pairing.cases:
        assert case.mask is not None
        inside = read_label(case.mask, classes=2).array == 1
        result[case.case] = float(read_image(case.image).array[0][inside].mean())
    return result


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array.astype("int16"), np.eye(4)), path)


def test_geo08_pairing_by_sorted_order(folder: Path, values: dict[str, Any]):
    pairing = pair(folder)
    assert len(pairing.cases) == values["pairs"]
    assert means(pairing) == {f"case_{key}": mean for key, mean in values["fg_mean"].items()}
    assert list(pairing.unpaired_images) == values["unpaired_images"]
    assert pairing.unpaired_masks == ()
    assert any("case_3" in note for note in pairing.notes)


@pytest.mark.parametrize(
    ("image", "mask"),
    [("pat{}.nii", "pat{:03}_label.nii"), ("{:02}_train.nii.gz", "{}_gt.nii.gz"),
     ("CT {}.nii", "ct {:02} manual1.nii")],
)  # fmt: skip
def test_geo08_siblings_with_other_names(tmp_path: Path, image: str, mask: str):
    for number in (1, 2, 3, 9, 10, 11):
        inside = np.zeros((4, 4, 4), bool)
        inside.flat[number * 3 : number * 3 + 5] = True
        save(tmp_path / "images" / image.format(number), np.where(inside, 300 + number, 10))
        if number != 3:
            save(tmp_path / "masks" / mask.format(number), inside)
    pairing = pair(tmp_path)
    assert sorted(means(pairing).values()) == [301, 302, 309, 310, 311]
    assert pairing.unpaired_images == (image.format(3).partition(".")[0],)


def test_run01_odd_paths(folder: Path, values: dict[str, Any]):
    (images,) = folder.rglob("images")
    pairing = pair(images.parent)
    assert len(pairing.cases) == values["cases"]
    assert means(pairing) == {"pat 01_seg": values["fg_mean"]}
    (case,) = pairing.cases
    assert case.mask is not None
    assert read_label(case.mask, classes=2).array.sum() == values["fg_voxels"]
    assert pairing.unpaired_images == pairing.unpaired_masks == ()


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_run01_siblings_with_other_letters_and_forms(tmp_path: Path, form: Literal["NFC", "NFD"]):
    folder = tmp_path / "Hôpital & Söhne; $HOME 100%" / "日本 [1]"
    inside = np.arange(27).reshape(3, 3, 3) % 9 == 4
    image, mask = unicodedata.normalize(form, "Müller's_mask.nii.gz"), "Müller's_mask.nii.gz"
    save(folder / "images" / image, np.where(inside, 500, 3))
    save(folder / "masks" / mask, inside)
    assert means(pair(folder)) == {image.removesuffix(".nii.gz"): 500}
