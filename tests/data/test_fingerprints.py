"""Fingerprints of images' content."""

import hashlib
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from collegium.data.fingerprints import content_fingerprints, find_copies, fingerprint
from collegium.data.site import Case
from collegium.data.splits import LeakageFinding
from collegium.errors import ConfigError, DataError

SALT = "agreed upon by two hospitals"


def picture(path: Path, pixels: NDArray[np.uint8]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def case(site: str, *images: Path, label: Path | None = None) -> Case:
    name = images[0].stem
    return Case(site, name, name, images, label)


def grey() -> NDArray[np.uint8]:
    return np.arange(48, dtype=np.uint8).reshape(6, 8)


def test_a_fingerprint_is_the_keyed_hash_of_shape_and_float_pixels() -> None:
    image = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    key = hashlib.blake2b(SALT.encode()).digest()
    expected = hashlib.blake2b(b"(1, 2, 3)" + image.astype("<f4").tobytes(), key=key,
                               digest_size=32).hexdigest()  # fmt: skip
    assert fingerprint(image, SALT) == expected


def test_copies_in_other_formats_names_and_colours_have_one_fingerprint(tmp_path: Path) -> None:
    files = [
        picture(tmp_path / "ä #1.png", grey()),
        picture(tmp_path / "b.tif", grey()),
        picture(tmp_path / "c.bmp", np.repeat(grey()[..., None], 3, axis=2)),
    ]
    np.save(tmp_path / "d.npy", grey())
    found = content_fingerprints([case("A", f) for f in (*files, tmp_path / "d.npy")], SALT)
    assert len(found) == 4
    assert len(set(found.values())) == 1
    assert len({path.read_bytes() for path in files}) == 3


def test_a_volume_turned_on_disk_has_the_same_fingerprint(tmp_path: Path) -> None:
    values = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    nib.save(nib.Nifti1Image(values, np.diag([1.0, 2, 3, 1])), tmp_path / "a.nii.gz")
    flipped = nib.Nifti1Image(values[::-1].astype(np.float32), np.diag([-1.0, 2, 3, 1]))
    nib.save(flipped, tmp_path / "b.nii")
    found = content_fingerprints([case("A", tmp_path / n) for n in ("a.nii.gz", "b.nii")], SALT)
    assert len(set(found.values())) == 1


def test_other_pixels_shapes_channels_or_salts_differ(tmp_path: Path) -> None:
    image = grey()[None].astype(np.float32)
    one = image.copy()
    one[0, 0, 0] += 1
    others = [one, image.reshape(1, 8, 6), np.concatenate([image, one]), np.concatenate([one] * 3)]
    prints = [fingerprint(values, SALT) for values in (image, *others)]
    assert len(set(prints)) == 4  # the last is `one`, three times
    assert prints[1] == prints[4]
    assert fingerprint(image, SALT + "!") != prints[0]
    assert fingerprint(np.zeros((1, 2, 2)), SALT) == fingerprint(-np.zeros((1, 2, 2)), SALT)


def test_the_label_in_an_images_array_does_not_count(tmp_path: Path) -> None:
    colours = np.arange(6 * 8 * 3, dtype=np.float32).reshape(6, 8, 3)
    for name, value in (("a", 0), ("b", 1)):
        whole = np.concatenate([colours, np.full((6, 8, 1), value, np.float32)], axis=2)
        np.save(tmp_path / f"{name}.npy", whole)
    paths = [tmp_path / "a.npy", tmp_path / "b.npy"]
    found = content_fingerprints([case("A", path, label=path) for path in paths], SALT)
    assert len(set(found.values())) == 1


def test_a_short_salt_and_a_damaged_image_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the salt of fingerprints has 5 characters: agree on"):
        fingerprint(np.zeros((1, 2, 2)), "short")
    (tmp_path / "x.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match="site A, case x: "):
        content_fingerprints([case("A", tmp_path / "x.png")], SALT)


def test_copies_are_found_once_and_not_where_their_files_are_known() -> None:
    a, b, c, d = (case(site, Path(f"/{name}.png"))
                  for site, name in (("A", "a"), ("B", "b"), ("B", "c"), ("B", "d")))  # fmt: skip
    prints = {a: "1", b: "1", c: "2", d: "2"}
    known = LeakageFinding("identical_files", ("B",), ("c", "d"), (*c.images, *d.images), "")
    (finding,) = find_copies(prints, [known])
    assert (finding.kind, finding.sites, finding.patients) == (
        "identical_pixels", ("A", "B"), ("a", "b"),
    )  # fmt: skip
    assert finding.files == (Path("/a.png"), Path("/b.png"))
    assert finding.text.startswith("site A, case a and site B, case b have images of the same pix")
    assert len(find_copies(prints)) == 2
