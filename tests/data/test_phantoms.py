"""The phantom federation, read back from the files with Pillow and csv as any reader would."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from collegium.data.phantoms import (
    ORGANS,
    SCANNERS,
    UNEQUAL,
    PhantomSite,
    ScannerModel,
    draw_case,
    make_federation,
    scanner_of,
)
from collegium.errors import ConfigError

SIZE = 48


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phantoms")
    return make_federation(folder, 4, cases=6, size=SIZE, seed=3).parent


def manifest(root: Path, site: str) -> list[dict[str, str]]:
    with (root / site / "manifest.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.array(image)


def digests(root: Path) -> dict[str, str]:
    files = sorted(path for path in root.rglob("*") if path.is_file())
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def draw(scanner: ScannerModel, size: int = SIZE, visit: int = 1) -> tuple[np.ndarray, np.ndarray]:
    return draw_case(
        scanner,
        size=size,
        patient=np.random.Generator(np.random.PCG64(5)),
        visit=np.random.Generator(np.random.PCG64(visit)),
    )


def test_every_file_of_a_manifest_exists_and_no_other(root):
    for site in ("alder", "birch", "cedar", "elm"):
        rows = manifest(root, site)
        assert len(rows) == 6
        named = {row[key] for row in rows for key in ("image", "label")}
        found = {str(path.relative_to(root)) for path in (root / site).rglob("*.png")}
        assert named == found


def test_the_fourth_patient_is_scanned_twice(root):
    patients = [row["patient"] for row in manifest(root, "alder")]
    assert patients == [f"alder_p{number:03d}" for number in (1, 2, 3, 4, 4, 5)]


def test_images_are_square_and_stored_in_the_bits_of_the_scanner(root):
    for site, bits in (("alder", 16), ("birch", 8), ("cedar", 16), ("elm", 8)):
        for row in manifest(root, site):
            image = pixels(root / row["image"])
            assert image.shape == (SIZE, SIZE)
            assert image.dtype.itemsize * 8 == bits
            assert image.max() <= SCANNERS[site].top


def test_masks_hold_only_0_and_255_and_a_gland_of_plausible_size(root):
    for site in ("alder", "birch", "cedar", "elm"):
        for row in manifest(root, site):
            mask = pixels(root / row["label"])
            assert set(np.unique(mask)) == {0, 255}
            assert 0.01 < (mask > 0).mean() < 0.12


def test_the_federation_file_names_the_sites_and_maps_the_labels(root):
    content = yaml.safe_load((root / "federation.yaml").read_text(encoding="utf-8"))
    assert list(content["sites"]) == ["alder", "birch", "cedar", "elm"]
    assert content["sites"]["elm"] == {"manifest": "elm/manifest.csv"}
    assert content["task"]["label_map"] == {0: 0, 255: 1}


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(root, tmp_path):
    again = make_federation(tmp_path / "again", 4, cases=6, size=SIZE, seed=3).parent
    assert digests(again) == digests(root)
    other = make_federation(tmp_path / "other", 1, cases=1, size=SIZE, seed=4).parent
    name = "alder/images/alder_001.png"
    assert digests(other)[name] != digests(root)[name]


def test_more_sites_and_cases_leave_the_others_as_they_are(root, tmp_path):
    small = digests(make_federation(tmp_path, 2, cases=3, size=SIZE, seed=3).parent)
    images = {name: digest for name, digest in small.items() if name.endswith(".png")}
    assert len(images) == 12
    assert images.items() <= digests(root).items()


def test_two_scans_of_a_patient_differ_but_share_their_anatomy(root):
    rows = {row["case"]: row for row in manifest(root, "alder")}
    first, second, other = (
        pixels(root / rows[f"alder_{number:03d}"]["label"]) > 0 for number in (4, 5, 6)
    )
    assert not np.array_equal(first, second)

    def overlap(a, b):
        return 2 * (a & b).sum() / (a.sum() + b.sum())

    assert overlap(first, second) > 0.8
    assert overlap(first, second) > overlap(first, other)


def test_the_margin_widens_the_outline_and_leaves_the_image():
    exact_image, exact = draw(ScannerModel())
    wide_image, wide = draw(ScannerModel(margin=1.0))
    np.testing.assert_array_equal(exact_image, wide_image)
    assert wide[exact > 0].all()
    assert wide.sum() > 1.1 * exact.sum()


def test_an_inverted_scanner_shows_the_gland_darker_than_the_body():
    for inverted in (False, True):
        image, mask = draw(ScannerModel(inverted=inverted, noise=0.0, bias=0.0), size=96)
        gland = image[mask > 0].mean()
        around = image[40:56, 20:76][mask[40:56, 20:76] == 0].mean()
        assert (gland < around) == inverted


def test_noise_in_air_is_rayleigh_distributed():
    scanner = ScannerModel(noise=0.05, bias=0.0, bits=16, top=12000)
    image, _ = draw(scanner, size=128)
    air = image[:16] / 10000.0
    # of a Rayleigh distribution: mean = sigma sqrt(pi / 2); var = (2 - pi / 2) sigma^2
    assert air.mean() == pytest.approx(0.05 * np.sqrt(np.pi / 2), rel=0.05)
    assert air.std() == pytest.approx(0.05 * np.sqrt(2 - np.pi / 2), rel=0.05)


def test_a_coarse_scanner_leaves_less_detail():
    fine, _ = draw(ScannerModel(noise=0.0), size=96)
    coarse, _ = draw(ScannerModel(noise=0.0, coarseness=3), size=96)

    def detail(image):
        return np.abs(np.diff(image.astype(float), axis=0)).max()

    assert detail(coarse) < 0.8 * detail(fine)


def test_sites_beyond_the_named_ones_draw_a_scanner_of_their_own():
    assert scanner_of("site_07", 0) == scanner_of("site_07", 0)
    assert scanner_of("site_07", 0) != scanner_of("site_08", 0)
    assert scanner_of("elm", 0) is SCANNERS["elm"]


def test_stated_patients_are_drawn_with_their_splits_in_the_manifest(tmp_path):
    site = PhantomSite(SCANNERS["birch"], train=3, validation=1, test=2)
    folder = make_federation(tmp_path, {"oak": site}, size=SIZE).parent
    rows = manifest(folder, "oak")
    # the fourth patient, the one of the validation, is scanned twice
    assert [row["split"] for row in rows] == ["train"] * 3 + ["val"] * 2 + ["test"] * 2
    assert [row["patient"] for row in rows] == [f"oak_p{n:03d}" for n in (1, 2, 3, 4, 4, 5, 6)]
    assert pixels(folder / rows[0]["image"]).dtype == np.uint8


def test_of_the_unequal_sites_one_learns_from_few_one_is_inverted_and_one_tests_few():
    assert list(UNEQUAL) == ["alder", "birch", "cedar", "elm"]
    assert min(UNEQUAL, key=lambda name: UNEQUAL[name].train) == "alder"
    assert [name for name, site in UNEQUAL.items() if site.scanner.inverted] == ["birch"]
    # a verdict needs six test patients, and so does choosing a round by validation patients
    assert [name for name, site in UNEQUAL.items() if site.test < 6] == ["cedar"]
    assert all(site.validation >= 6 for site in UNEQUAL.values())


@pytest.mark.parametrize(("key", "value"), [("sites", 0), ("cases", 0), ("size", 16)])
def test_too_small_a_federation_is_refused_by_name(tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"{key} is {value}; choose at least"):
        make_federation(tmp_path, **{key: value})


def test_a_federation_of_real_data_is_never_overwritten(tmp_path):
    description = tmp_path / "federation.yaml"
    description.write_text("name: real\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="describes other data"):
        make_federation(tmp_path, 1, cases=1, size=SIZE)
    assert description.read_text(encoding="utf-8") == "name: real\n"
    assert list(tmp_path.iterdir()) == [description]


def test_an_earlier_phantom_federation_is_drawn_anew(tmp_path):
    make_federation(tmp_path, 1, cases=1, size=SIZE, seed=1)
    make_federation(tmp_path, 1, cases=1, size=SIZE, seed=2)
    other = make_federation(tmp_path / "other", 1, cases=1, size=SIZE, seed=2).parent
    name = "alder/images/alder_001.png"
    assert digests(tmp_path)[name] == digests(other)[name]


@pytest.mark.parametrize(
    ("sites", "labelled"),
    [
        (1, [["gland", "liver", "spleen", "kidneys"]]),
        (2, [["gland", "spleen"], ["liver", "kidneys"]]),
        (3, [["gland", "kidneys"], ["liver"], ["spleen"]]),
        (5, [["gland"], ["liver"], ["spleen"], ["kidneys"], ["gland"]]),
    ],
)
def test_sites_with_organs_annotate_different_ones_which_are_all_of_them(tmp_path, sites, labelled):
    path = make_federation(tmp_path, sites, cases=2, size=SIZE, organs=True)
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    classes = content["task"]["classes"]
    assert classes == ["background", *ORGANS]
    assert [site["labelled"] for site in content["sites"].values()] == labelled
    for site, names in zip(content["sites"], labelled, strict=True):
        for row in manifest(tmp_path, site):
            found = set(np.unique(pixels(tmp_path / row["label"])))
            assert found == {0, *(classes.index(name) for name in names)}


def test_organs_leave_images_and_the_gland_as_they_are_and_do_not_overlap(root, tmp_path):
    folder = make_federation(tmp_path, 1, cases=3, size=SIZE, seed=3, organs=True).parent
    for row in manifest(folder, "alder"):
        assert (folder / row["image"]).read_bytes() == (root / row["image"]).read_bytes()
        mask = pixels(folder / row["label"])
        np.testing.assert_array_equal(mask == 1, pixels(root / row["label"]) > 0)
        middle = [np.argwhere(mask == value).mean(0) for value in (2, 3)]
        assert middle[0][1] < SIZE / 2 < middle[1][1]  # the liver is on the left of the image
        left, right = (mask[:, half] == 4 for half in (slice(SIZE // 2), slice(SIZE // 2, None)))
        assert left.sum() > 10
        assert right.sum() > 10
