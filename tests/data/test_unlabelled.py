from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collegium.data.unlabelled import list_images
from collegium.errors import DataError


def picture(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(path)
    return path


def cases(place: Path, labels: Path | None = None) -> dict[str, tuple[list[str], str | None]]:
    found, problems = list_images(place, labels)
    assert not problems
    return {
        case.case: ([path.name for path in case.images], case.label.name if case.label else None)
        for case in found
    }


def test_a_folder_of_images_without_labels(tmp_path: Path) -> None:
    for name in ("b.png", "a.tif", ".hidden.png"):
        picture(tmp_path / name)
    (tmp_path / "notes.txt").write_text("hello")
    assert cases(tmp_path) == {"a": (["a.tif"], None), "b": (["b.png"], None)}


def test_a_folder_with_images_and_fields_of_view(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "a.png")
    picture(tmp_path / "fov" / "a_fov.png")
    picture(tmp_path / "labels" / "a.png")
    (case,), problems = list_images(tmp_path)
    assert not problems
    assert case.fov == tmp_path / "fov" / "a_fov.png"
    assert case.label is None  # labels are used only where they are asked for


def test_labels_are_paired_by_name_and_none_may_be_missing(tmp_path: Path) -> None:
    for name in ("images/a.png", "images/b.png", "truth/a_mask.png", "truth/b_mask.png"):
        picture(tmp_path / name)
    assert cases(tmp_path, tmp_path / "truth") == {
        "a": (["a.png"], "a_mask.png"),
        "b": (["b.png"], "b_mask.png"),
    }
    (tmp_path / "truth/b_mask.png").unlink()
    _, problems = list_images(tmp_path, tmp_path / "truth")
    assert problems == [
        f"case b: it has no mask in {tmp_path / 'truth'}; add it, or adapt without labels"
    ]


def test_the_channels_of_an_image_are_one_case(tmp_path: Path) -> None:
    for name in ("p1_0000.png", "p1_0001.png", "p2_0000.png", "p2_0001.png"):
        picture(tmp_path / name)
    assert cases(tmp_path) == {
        "p1": (["p1_0000.png", "p1_0001.png"], None),
        "p2": (["p2_0000.png", "p2_0001.png"], None),
    }
    (tmp_path / "p2_0001.png").unlink()
    found, problems = list_images(tmp_path)
    assert [case.case for case in found] == ["p1"]
    assert problems == ["case p2: channel 0001 is missing; add it or leave it out"]


def test_a_manifest_may_name_labels_or_not(tmp_path: Path) -> None:
    for name in ("x/a.png", "x/b.png", "y/a.png", "y/b.png"):
        picture(tmp_path / name)
    plain, full = tmp_path / "plain.csv", tmp_path / "full.csv"
    plain.write_text("\ufeffImage;Patient\nx/a.png;007\nx/b.png;007\n")
    full.write_text("image,label,case\nx/a.png,y/a.png,one\nx/b.png,y/b.png,two\n")
    assert cases(plain) == {"a": (["a.png"], None), "b": (["b.png"], None)}
    assert {case.patient for case in list_images(plain)[0]} == {"007"}
    assert cases(full) == {"one": (["a.png"], "a.png"), "two": (["b.png"], "b.png")}
    full.write_text("image\nx/a.png\nx/c.png\nx/a.png\n")
    found, problems = list_images(full)
    assert len(found) == 1
    assert [text.partition(": ")[0] for text in problems] == [f"{full}, line 3", f"{full}, line 4"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([], "holds no image; add some of the kinds .png"),
        (["scan.dcm"], "holds no image; add some of the kinds .png"),
        (["a.png", "a.tif"], "a.png and a.tif are both the case a; rename one"),
    ],
)
def test_what_cannot_be_used_is_said(tmp_path: Path, files: list[str], says: str) -> None:
    for name in files:
        if name.endswith(".dcm"):
            (tmp_path / name).write_bytes(b"DICM")
        else:
            picture(tmp_path / name)
    with pytest.raises(DataError, match=says):
        list_images(tmp_path)


def test_a_place_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such folder or manifest"):
        list_images(tmp_path / "nowhere")
