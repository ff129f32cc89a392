"""Splits by patient, their file, and leaks between sites."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from collegium.data.discovery import from_manifest
from collegium.data.importers import find_in_folder
from collegium.data.site import Case
from collegium.data.splits import (
    SplitConfig,
    check_across_sites,
    count_shared_patients,
    draw_splits,
    load_or_draw_splits,
)
from collegium.errors import ConfigError, DataError, StorageError


def case(name: str, patient: str = "", split: str | None = None, site: str = "A") -> Case:
    files = Path(f"{site}-{name}.png"), Path(f"{site}-{name}_label.png")
    return Case(site, name, patient or name, (files[0],), files[1], split=split)


def one_each(count: int) -> list[Case]:
    return [case(f"c{index:02}") for index in range(count)]


def sizes(splits: dict[str, str]) -> tuple[int, int, int]:
    counts = Counter(splits.values())
    return counts["train"], counts["val"], counts["test"]


@pytest.mark.parametrize(
    ("patients", "expected"),
    [(1, (1, 0, 0)), (2, (1, 1, 0)), (3, (1, 1, 1)), (5, (3, 1, 1)), (10, (6, 2, 2)),
     (14, (8, 3, 3))],
)  # fmt: skip
def test_shares_are_rounded_and_training_is_never_empty(patients, expected):
    assert sizes(draw_splits(one_each(patients), SplitConfig(0.2, 0.2), seed=0)) == expected


def test_a_share_of_zero_holds_nobody_out():
    assert sizes(draw_splits(one_each(5), SplitConfig(0, 0), seed=0)) == (5, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_a_patient_is_never_in_two_splits(seed):
    cases = [case(f"c{index:02}", f"p{index % 6}") for index in range(20)]
    splits = draw_splits(cases, SplitConfig(0.3, 0.3), seed)
    for patient in {each.patient for each in cases}:
        assert len({splits[each.case] for each in cases if each.patient == patient}) == 1
    assert set(splits.values()) == {"train", "val", "test"}


def test_splits_depend_on_seed_and_site_but_not_on_the_order_of_the_files():
    cases = one_each(30)
    first = draw_splits(cases, SplitConfig(), seed=1)
    assert draw_splits(cases[::-1], SplitConfig(), seed=1) == first
    assert draw_splits(cases, SplitConfig(), seed=2) != first
    elsewhere = [case(each.case, site="B") for each in cases]
    assert draw_splits(elsewhere, SplitConfig(), seed=1) != first


def test_splits_named_by_the_manifest_are_kept():
    named = {"a": "train", "b": "val", "c": "test", "d": "test"}
    cases = [case(name, split=split) for name, split in named.items()]
    assert draw_splits(cases, SplitConfig(0.5, 0.4), seed=0) == named


def test_validation_is_carved_from_the_manifests_training_patients():
    train = [case(f"{p}{eye}", f"{p}", "train") for p in range(10) for eye in "LR"]
    test = [case(f"{p}{eye}", f"{p}", "test") for p in range(10, 14) for eye in "LR"]
    splits = draw_splits([*train, *test], SplitConfig(0.2, 0.5), seed=0)
    assert sizes(splits) == (16, 4, 8)
    assert {name for name, split in splits.items() if split == "test"} == {c.case for c in test}
    assert all(splits[f"{p}L"] == splits[f"{p}R"] for p in range(14))


def test_a_site_of_one_patient_is_said_in_the_log(caplog):
    caplog.set_level(logging.INFO)
    assert draw_splits([case("only")], SplitConfig(), seed=0) == {"only": "train"}
    assert "site A has one patient to train on: train 1, val 0, test 0" in caplog.text


def test_a_site_without_cases_has_no_splits():
    assert draw_splits([], SplitConfig(), seed=0) == {}


def test_a_manifest_that_cuts_through_a_patient_is_refused():
    cases = [case("L", "p1", "train"), case("R", "p1", "test")]
    with pytest.raises(DataError, match=r"case R: its patient p1 is in the splits train and test"):
        draw_splits(cases, SplitConfig(), seed=0)


def test_a_manifest_that_names_some_splits_only_is_refused():
    with pytest.raises(DataError, match="case b: the manifest names no split for it"):
        draw_splits([case("a", split="train"), case("b")], SplitConfig(), seed=0)


@pytest.mark.parametrize(
    ("shares", "text"),
    [((1.0, 0.0), "SplitConfig.validation: should be at least 0 and below 1, not 1.0"),
     ((0.2, -0.1), "SplitConfig.test: should be at least 0 and below 1, not -0.1"),
     ((0.5, 0.5), "leave nobody to train on")],
)  # fmt: skip
def test_impossible_shares_are_refused(shares, text):
    with pytest.raises(ConfigError, match=text):
        SplitConfig(*shares)


def test_stored_splits_are_read_back_whatever_the_seed(tmp_path):
    file = tmp_path / "new" / "A.json"
    first = load_or_draw_splits(one_each(30), SplitConfig(), 1, file)
    assert load_or_draw_splits(one_each(30), SplitConfig(0.4, 0.1), 2, file) == first
    assert json.loads(file.read_text("utf-8"))["splits"] == first
    assert [path.name for path in file.parent.iterdir()] == ["A.json"]


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ({"c00": "train"}, r"lacks c01.*a new output folder"),
        ({"c00": "train", "c01": "val", "old": "val"}, r"has unknown old.*a new output folder"),
        ({"c00": "train", "c01": "holdout"}, r"has no train, val or test for c01"),
    ],
)
def test_stored_splits_that_do_not_fit_the_cases_are_refused(tmp_path, splits, text):
    file = tmp_path / "A.json"
    file.write_text(json.dumps({"splits": splits}), "utf-8")
    with pytest.raises(DataError, match=f"site A: the stored splits .*A.json {text}"):
        load_or_draw_splits(one_each(2), SplitConfig(), 0, file)


def test_stored_splits_that_cut_through_a_patient_are_refused(tmp_path):
    file = tmp_path / "A.json"
    file.write_text(json.dumps({"splits": {"L": "train", "R": "val"}}), "utf-8")
    with pytest.raises(DataError, match=r"patient p1 in two splits.*a new output folder"):
        load_or_draw_splits([case("L", "p1"), case("R", "p1")], SplitConfig(), 0, file)


@pytest.mark.parametrize("content", ["", "[]", '{"splits": 3}', '{"splits": {"c00": "tr'])
def test_a_damaged_splits_file_is_a_data_error(tmp_path, content):
    file = tmp_path / "A.json"
    file.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"A.json does not hold splits: restore it, or start"):
        load_or_draw_splits(one_each(2), SplitConfig(), 0, file)


def test_splits_that_cannot_be_stored_are_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(StorageError, match=r"A\.json: a file stands in the place of a folder"):
        load_or_draw_splits(one_each(2), SplitConfig(), 0, tmp_path / "file" / "A.json")


def test_splits_that_cannot_be_read_are_a_storage_error(tmp_path):
    (tmp_path / "A.json").mkdir()
    with pytest.raises(StorageError, match=r"A\.json cannot be read \(Is a directory\)"):
        load_or_draw_splits(one_each(2), SplitConfig(), 0, tmp_path / "A.json")


def test_identical_images_within_a_site_are_found(tmp_path):
    for name, content in {"a": b"same", "b": b"same", "c": b"size"}.items():
        (tmp_path / name).write_bytes(content)
    cases = [Case("A", name, name, (tmp_path / name,), tmp_path / "a") for name in ("a", "b", "c")]
    (finding,) = check_across_sites({"A": cases})
    assert (finding.kind, finding.sites) == ("identical_files", ("A",))
    assert finding.files == (tmp_path / "a", tmp_path / "b")


def test_one_file_used_by_two_cases_is_found(tmp_path):
    (tmp_path / "a").write_bytes(b"x")
    cases = [Case("A", name, name, (tmp_path / "a",), tmp_path / "m") for name in ("c1", "c2")]
    (finding,) = check_across_sites({"A": cases})
    assert "site A, case c1 and site A, case c2 have byte-identical images" in finding.text


LAYOUTS = {
    "pictures": ("{0}/images/p{1}.png", "{0}/labels/p{1}.png"),
    "slices": ("{0}/data_npy/Case0{1}_slice_1.npy", "{0}/data_npy/Case0{1}_slice_2.npy"),
    "arrays": ("{0}/Case0{1}.npy", "{0}/Case0{1}_segmentation.npy"),
    "classes": ("{0}/ill/p{1}.png", "{0}/well/q{1}.png"),
    "channels": ("{0}/imagesTr/p{1}_0000.nii.gz", "{0}/labelsTr/p{1}.nii.gz"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_named_alike_at_two_sites_are_no_shared_patients(tmp_path, layout):
    for site in ("A", "B"):
        for number in (1, 2, 3):
            for pattern in LAYOUTS[layout]:
                path = tmp_path / pattern.format(site, number)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(str(path).encode())
        if layout == "channels":
            about = {"channel_names": {"0": "x"}, "labels": {"background": 0, "y": 1}}
            about |= {"numTraining": 3, "file_ending": ".nii.gz"}
            (tmp_path / site / "dataset.json").write_text(json.dumps(about), "utf-8")
    folders = {site: find_in_folder(site, tmp_path / site) for site in ("A", "B")}
    assert [problems for _, problems in folders.values()] == [[], []]
    sites = {site: cases for site, (cases, _) in folders.items()}
    assert {case.patient for case in sites["A"]} == {case.patient for case in sites["B"]}
    assert check_across_sites(sites) == []
    assert count_shared_patients(sites, []) is None


def manifest(folder: Path, site: str, patients: list[str]) -> list[Case]:
    rows = [f"{site}{place}.png,x,{patient}" for place, patient in enumerate(patients)]
    for row in rows:
        (folder / row.partition(",")[0]).write_bytes(row.encode())
    (folder / f"{site}.csv").write_text("\n".join(["image,class,patient", *rows]), "utf-8")
    return from_manifest(site, folder, folder / f"{site}.csv")[0]


def test_the_stated_patients_of_two_sites_are_one_finding(tmp_path):
    shared = ["p1", "p2", "p3", "p4"]
    sites = {
        "A": manifest(tmp_path, "A", [*shared, "p1", ""]),
        "B": manifest(tmp_path, "B", [*shared, "q9"]),
        "C": manifest(tmp_path, "C", ["q9", "r", "p1"]),
    }
    findings = check_across_sites(sites)
    assert [(f.kind, f.sites, f.patients) for f in findings] == [
        ("shared_patient", ("A", "B"), tuple(shared)),
        ("shared_patient", ("A", "C"), ("p1",)),
        ("shared_patient", ("B", "C"), ("p1", "q9")),
    ]
    assert findings[0].text == (
        "by identifier, 4 patients are at both sites A and B (p1, p2, p3 and 1 more): keep each at "
        "one site, or give different ids if they are different people"
    )
    assert count_shared_patients(sites, findings) == 5


def test_bids_subjects_and_datalists_state_patients(tmp_path):
    for site in ("A", "B"):
        for kind in ("T1w", "dseg"):
            path = tmp_path / "bids" / site / "sub-07" / "anat" / f"sub-07_{kind}.nii.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(str(path).encode())
        (tmp_path / "list" / site).mkdir(parents=True)
        entries = []
        for name, more in (("x", {"patient": "p7"}), ("y", {})):
            image = tmp_path / "list" / site / f"{name}.png"
            image.write_bytes(str(image).encode())
            entries.append({"image": image.name, "label": "ill", **more})
        text = json.dumps({"training": entries})
        (tmp_path / "list" / site / "datalist.json").write_text(text, "utf-8")
    for kind, patient in (("bids", "sub-07"), ("list", "p7")):
        sites = {site: find_in_folder(site, tmp_path / kind / site)[0] for site in ("A", "B")}
        (finding,) = check_across_sites(sites)
        assert (finding.kind, finding.patients) == ("shared_patient", (patient,))


def test_sites_that_share_nothing_have_no_findings():
    sites = {"A": [case("a1", "p1")], "B": [case("b1", "p2", site="B")]}
    assert check_across_sites(sites) == []


def test_channels_of_one_case_that_are_one_image_are_no_two_cases(tmp_path):
    for name in ("t1", "flair", "t2"):
        (tmp_path / name).write_bytes(b"other" if name == "t2" else b"same!")
    t1, flair, t2 = (tmp_path / name for name in ("t1", "flair", "t2"))
    one = Case("A", "c1", "p1", (t1, t2, flair), tmp_path / "m")
    (finding,) = check_across_sites({"A": [one]})
    assert (finding.kind, finding.files) == ("equal_channels", (flair, t1))
    assert finding.text.startswith("site A, case c1: two of its channels are the same image (")
    assert "patient" not in finding.text
    two = Case("B", "c2", "p2", (t2, t1), tmp_path / "m")
    equal, *copies = check_across_sites({"A": [one], "B": [two]})
    assert equal == finding
    assert [copy.text.partition(" have ")[0] for copy in copies] == [
        "site A, case c1 and site B, case c2"
    ] * 2  # fmt: skip


def folds_of(cases, folds, validation=0.2):
    """The splits of every fold."""
    return [
        draw_splits(cases, SplitConfig(validation, folds=folds, fold=fold), seed=0)
        for fold in range(1, folds + 1)
    ]


def test_every_patient_is_tested_once_and_is_never_in_two_splits_of_a_fold():
    """Patients with one to three visits."""
    cases = [case(f"c{p:02}-{v}", f"p{p:02}") for p in range(23) for v in range(1 + p % 3)]
    found = folds_of(cases, 5)
    for splits in found:
        by_patient: dict[str, str] = {}
        for each in cases:
            assert by_patient.setdefault(each.patient, splits[each.case]) == splits[each.case]
        assert set(by_patient.values()) == {"train", "val", "test"}
    tested = Counter(each.patient for splits in found for each in cases
                     if splits[each.case] == "test")  # fmt: skip
    assert tested == {f"p{p:02}": 1 + p % 3 for p in range(23)}


def test_folds_are_of_equal_size_and_validation_goes_around():
    found = folds_of(one_each(10), 5, validation=0.25)
    assert [sizes(splits) for splits in found] == [(6, 2, 2)] * 5
    validated = Counter(name for splits in found for name in splits if splits[name] == "val")
    assert validated == dict.fromkeys(found[0], 1)


def test_folds_that_cannot_be_drawn_are_refused():
    with pytest.raises(DataError, match="site A has 4 patients, too few for 5 folds"):
        draw_splits([case(f"c{n}", f"p{n % 4}") for n in range(9)], SplitConfig(fold=1), seed=0)
    named = [case(f"c{n}", split="test" if n < 3 else "train") for n in range(9)]
    with pytest.raises(DataError, match="site A: its manifest names splits, and cross-validation"):
        draw_splits(named, SplitConfig(fold=1), seed=0)
    with pytest.raises(ConfigError, match="choose a fold from 1 to 3"):
        SplitConfig(folds=3, fold=4)
