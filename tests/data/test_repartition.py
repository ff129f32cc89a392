"""Pools of tiny pictures and volumes, divided by what is drawn in them."""

import csv
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image

from collegium.data.federation import find_cases
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.preprocessing import preprocess
from collegium.data.repartition import PartitionRule, repartition
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.tables import TableConfig
from collegium.errors import ConfigError, DataError

SIZES = (1, 9, 2, 8, 3, 7, 4, 6)
"""Pixels of the foreground, by case; two cases in a row are of one patient."""


def pool(root: Path, sizes: tuple[int, ...] = SIZES, values: tuple[int, ...] = ()) -> Path:
    """Write pictures at a site with a manifest, cases c0, c1 of patient p0 and so on."""
    lines = ["Image,Label,Case,Patient,Scanner,Split"]
    (root / "old").mkdir(parents=True)
    for number, size in enumerate(sizes):
        label = np.zeros(20, np.uint8)
        label[:size] = values[number] if values else 1
        image = np.arange(20, dtype=np.uint8) + number
        for kind, array in (("i", image), ("l", label)):
            Image.fromarray(array.reshape(4, 5)).save(root / "old" / f"{kind}{number}.png")
        names = f"old/i{number}.png,old/l{number}.png,c{number},p{number // 2}"
        lines.append(f"{names},{'AB'[number // 2 % 2]},{'test' if number < 2 else 'train'}")
    (root / "old" / "m.csv").write_text("\n".join(lines) + "\n")
    return root


def federation(root: Path, task: TaskConfig | None = None) -> FederationConfig:
    sites = {"old": SiteConfig(manifest="old/m.csv")}
    return FederationConfig("pool", sites, str(root), task=task or TaskConfig())


def sites_of(manifest: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = defaultdict(set)
    with manifest.open() as file:
        for row in csv.DictReader(file):
            found[row["site"]].add(row["case"])
    return dict(found)


def test_patients_are_sorted_by_the_mean_volume_of_their_labels(tmp_path: Path) -> None:
    sizes = (9, 9, 1, 3, 1, 1, 5, 1)  # means of the patients: 9, 2, 1, 3
    counts = repartition(
        federation(pool(tmp_path, sizes)), PartitionRule("volume", 2), tmp_path / "n.csv"
    )
    assert sites_of(tmp_path / "n.csv") == {
        "site_1": {"c2", "c3", "c4", "c5"},
        "site_2": {"c0", "c1", "c6", "c7"},
    }
    assert counts == {"site_1": 4, "site_2": 4}


def test_sites_keep_the_sizes_that_are_given(tmp_path: Path) -> None:
    config = federation(pool(tmp_path, (9, 9, 1, 3, 1, 1, 5, 1)))  # by mean: p2, p1, p3, p0
    counts = repartition(config, PartitionRule("volume", sizes=(1, 3)), tmp_path / "n.csv")
    assert counts == {"site_1": 2, "site_2": 6}
    assert sites_of(tmp_path / "n.csv")["site_1"] == {"c4", "c5"}
    with pytest.raises(ConfigError, match="sizes 1, 2 do not add up to 4 patients"):
        repartition(config, PartitionRule("volume", sizes=(1, 2)), tmp_path / "n.csv")
    with pytest.raises(ConfigError, match="sizes are for a division by volume, not by ratio"):
        PartitionRule("ratio", sizes=(1, 3))


def test_a_column_that_cuts_through_a_patient_is_refused(tmp_path: Path) -> None:
    config = federation(pool(tmp_path))
    manifest = tmp_path / "old" / "m.csv"
    manifest.write_text(manifest.read_text().replace("c1,p0,A", "c1,p0,B"))
    with pytest.raises(DataError, match="1 of the patients have cases with different words"):
        repartition(config, PartitionRule("column", column="scanner"), tmp_path / "n.csv")
    assert not (tmp_path / "n.csv").exists()


def test_volumes_are_measured_in_millimetres(tmp_path: Path) -> None:
    for name, voxels, depth in (("a", 3, 4.0), ("b", 10, 1.0), ("c", 2, 9.0)):
        label = np.zeros((3, 4, 2), np.uint8)
        label.flat[:voxels] = 1
        for kind, array in (("images", label * 9), ("labels", label)):
            (tmp_path / "old" / kind).mkdir(parents=True, exist_ok=True)
            image = nib.Nifti1Image(array, np.diag([1.0, 1, depth, 1]))
            nib.save(image, tmp_path / "old" / kind / f"{name}.nii.gz")
    config = FederationConfig("pool", {"old": SiteConfig(folder="old")}, str(tmp_path))
    repartition(config, PartitionRule("volume", 3), tmp_path / "n.csv")
    assert sites_of(tmp_path / "n.csv") == {  # 10, 12 and 18 mm3
        "site_1": {"b"}, "site_2": {"a"}, "site_3": {"c"},
    }  # fmt: skip


def test_each_site_gets_its_ratio_of_patients_without_foreground(tmp_path: Path) -> None:
    sizes = (1, 0, 0, 5) + (0,) * 8  # patients p0 and p1 are positive, p2 to p5 negative
    config = federation(pool(tmp_path, sizes))
    repartition(config, PartitionRule("ratio", ratios=(1, 3)), tmp_path / "n.csv")
    patients = {
        site: {int(case[1:]) // 2 for case in cases}
        for site, cases in sites_of(tmp_path / "n.csv").items()
    }
    assert {site: len(found & {0, 1}) for site, found in patients.items()} == {
        "site_1": 1, "site_2": 1,
    }  # fmt: skip
    assert {site: len(found - {0, 1}) for site, found in patients.items()} == {
        "site_1": 1, "site_2": 3,
    }  # fmt: skip
    assert not patients["site_1"] & patients["site_2"]


def test_dirichlet_parts_the_most_frequent_structures(tmp_path: Path) -> None:
    values = (1, 1, 2, 2) * 4
    task = TaskConfig(classes=("background", "one", "two"))
    config = federation(pool(tmp_path, (5,) * 16, values), task)
    repartition(config, PartitionRule("dirichlet", 2, alpha=1e-3, seed=1), tmp_path / "n.csv")
    found = sites_of(tmp_path / "n.csv")
    kinds = {site: {values[int(case[1:])] for case in cases} for site, cases in found.items()}
    assert sorted(map(list, kinds.values())) == [[1], [2]]  # nearly no mixing at so small an alpha
    assert {len(cases) for cases in found.values()} == {8}


def test_the_new_sites_have_the_words_of_a_column_and_all_that_was_known(tmp_path: Path) -> None:
    config = federation(pool(tmp_path))
    old = {case.case: case for case in find_cases(config, "old")}
    assert repartition(config, PartitionRule("column", column="Scanner"), tmp_path / "n.csv") == {
        "A": 4, "B": 4,
    }  # fmt: skip
    new = FederationConfig("new", {s: SiteConfig(manifest="n.csv") for s in "AB"}, str(tmp_path))
    for site, numbers in (("A", "0145"), ("B", "2367")):
        found = {case.case: case for case in find_cases(new, site)}
        assert sorted(found) == [f"c{number}" for number in numbers]
        for name, case in found.items():
            assert (case.images, case.label) == (old[name].images, old[name].label)
            assert (case.patient, case.split) == (old[name].patient, old[name].split)
    with pytest.raises(ConfigError, match="has no column 'vendor'; choose one of image, label"):
        repartition(config, PartitionRule("column", column="vendor"), tmp_path / "x.csv")
    assert not (tmp_path / "x.csv").exists()


def test_classes_are_divided_as_they_are_written(tmp_path: Path) -> None:
    pool(tmp_path)
    lines = ["image,class", *(f"old/i{n}.png,{'ill' if n < 2 else 'well'}" for n in range(8))]
    (tmp_path / "old" / "m.csv").write_text("\n".join(lines) + "\n")
    task = TaskConfig("classification", ("well", "ill"))
    repartition(
        federation(tmp_path, task), PartitionRule("ratio", ratios=(2, 4)), tmp_path / "n.csv"
    )
    found = sites_of(tmp_path / "n.csv")
    assert {site: len(cases & {"i0", "i1"}) for site, cases in found.items()} == {
        "site_1": 1, "site_2": 1,
    }  # fmt: skip
    assert {site: len(cases) for site, cases in found.items()} == {"site_1": 3, "site_2": 5}


def test_doubled_ids_volumes_of_tables_and_ones_own_manifest_are_refused(
    tmp_path: Path,
) -> None:
    config = federation(pool(tmp_path))
    before = (tmp_path / "old" / "m.csv").read_text()
    with pytest.raises(ConfigError, match="is the manifest of site old, which is kept"):
        repartition(config, PartitionRule("volume"), tmp_path / "old" / "m.csv")
    assert (tmp_path / "old" / "m.csv").read_text() == before
    both = {name: SiteConfig(manifest="old/m.csv") for name in ("old", "older")}
    with pytest.raises(DataError, match="case c0 is at two sites"):
        repartition(
            FederationConfig("two", both, str(tmp_path)), PartitionRule("volume"), tmp_path / "n"
        )
    tables = FederationConfig(
        "t", {"a": SiteConfig(table="a.csv")}, str(tmp_path),
        task=TaskConfig("classification"), table=TableConfig(label="y", numeric=("x",)),
    )  # fmt: skip
    for division in (PartitionRule("volume"), PartitionRule("column", column="x", lack=True)):
        with pytest.raises(ConfigError, match="tables have neither volumes nor channels; divide"):
            repartition(tables, division, tmp_path / "n")
    folders = FederationConfig("f", {"a": SiteConfig(folder="a")}, str(tmp_path))
    for kind in ("images", "labels"):
        (tmp_path / "a" / kind).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "a" / kind / "x.png")
    with pytest.raises(ConfigError, match="site a has no manifest, whose columns"):
        repartition(folders, PartitionRule("column", column="scanner"), tmp_path / "n")
    assert not (tmp_path / "n").exists()


def test_channels_are_kept_as_they_are_measured(tmp_path: Path) -> None:
    config = FederationConfig(
        "pool", {"old": SiteConfig(manifest="old/m.csv")}, str(pool(tmp_path)),
        image=ImageConfig(inputs=3),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"the image has 1 channels .* image.inputs says 3"):
        repartition(config, PartitionRule("volume"), tmp_path / "n.csv")


def test_each_site_lacks_a_channel_of_images_in_several_files(tmp_path: Path) -> None:
    volumes = {}
    for place, name in enumerate(("a", "b", "c", "d")):
        volumes[name] = np.random.default_rng(place).normal(size=(2, 3, 4, 2)).astype(np.float32)
        label = np.zeros((3, 4, 2), np.uint8)
        label.flat[: 2 + place] = 1
        files = {f"images/{name}_000{k}": volumes[name][k] for k in (0, 1)}
        for file, array in (files | {f"labels/{name}": label}).items():
            path = tmp_path / "old" / f"{file}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    image = ImageConfig(inputs=2, normalise="none")
    old = FederationConfig("pool", {"old": SiteConfig(folder="old")}, str(tmp_path), image=image)
    repartition(old, PartitionRule("volume", 2, lack=True), tmp_path / "n.csv")
    sites = {name: SiteConfig(manifest="n.csv") for name in ("site_1", "site_2")}
    new = FederationConfig("new", sites, str(tmp_path), image=image)
    for site, names, kept in (("site_1", "ab", 1), ("site_2", "cd", 0)):
        cases = find_cases(new, site)
        assert [case.case for case in cases] == [*names]
        for case in cases:
            expected = np.zeros_like(volumes[case.case])
            expected[kept] = volumes[case.case][kept]
            arrays = preprocess(case, image, TaskConfig()).arrays
            np.testing.assert_array_equal(arrays.image, expected)
    with pytest.raises(ConfigError, match=r"set image\.inputs to the number of channels"):
        repartition(
            replace(old, image=ImageConfig()), PartitionRule("volume", 2, lack=True), tmp_path / "x"
        )
