"""Splits by patient, their file, and leaks between sites."""

import json
import logging
from collections import Counter
from pathlib import Path

import pytest

from collegium.data.site import Case
from collegium.data.splits import (
    SplitConfig,
    check_across_sites,
    draw_splits,
    splits_of,
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
    [((1.0, 0.0), "splits.validation is 1.0"), ((0.2, -0.1), "splits.test is -0.1"),
     ((0.5, 0.5), "leave nobody to train on")],
)  # fmt: skip
def test_impossible_shares_are_refused(shares, text):
    with pytest.raises(ConfigError, match=text):
        SplitConfig(*shares)


def test_stored_splits_are_read_back_whatever_the_seed(tmp_path):
    file = tmp_path / "new" / "A.json"
    first = splits_of(one_each(30), SplitConfig(), 1, file)
    assert splits_of(one_each(30), SplitConfig(0.4, 0.1), 2, file) == first
    assert json.loads(file.read_text("utf-8"))["splits"] == first
    assert [path.name for path in file.parent.iterdir()] == ["A.json"]


@pytest.mark.parametrize(
    ("splits", "text"),
    [
        ({"c00": "train"}, r"lacks c01.*delete the file"),
        ({"c00": "train", "c01": "val", "old": "val"}, r"has unknown old.*delete the file"),
        ({"c00": "train", "c01": "holdout"}, r"has no train, val or test for c01"),
    ],
)
def test_stored_splits_that_do_not_fit_the_cases_are_refused(tmp_path, splits, text):
    file = tmp_path / "A.json"
    file.write_text(json.dumps({"splits": splits}), "utf-8")
    with pytest.raises(DataError, match=f"site A: the stored splits .*A.json {text}"):
        splits_of(one_each(2), SplitConfig(), 0, file)


def test_stored_splits_that_cut_through_a_patient_are_refused(tmp_path):
    file = tmp_path / "A.json"
    file.write_text(json.dumps({"splits": {"L": "train", "R": "val"}}), "utf-8")
    with pytest.raises(DataError, match="patient p1 in two splits"):
        splits_of([case("L", "p1"), case("R", "p1")], SplitConfig(), 0, file)


@pytest.mark.parametrize("content", ["", "[]", '{"splits": 3}', '{"splits": {"c00": "tr'])
def test_a_damaged_splits_file_is_a_data_error(tmp_path, content):
    file = tmp_path / "A.json"
    file.write_text(content, "utf-8")
    with pytest.raises(DataError, match=r"A.json does not hold splits: delete it"):
        splits_of(one_each(2), SplitConfig(), 0, file)


def test_splits_that_cannot_be_stored_are_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("", "utf-8")
    with pytest.raises(StorageError, match=r"A.json cannot be written"):
        splits_of(one_each(2), SplitConfig(), 0, tmp_path / "file" / "A.json")


def test_splits_that_cannot_be_read_are_a_storage_error(tmp_path):
    (tmp_path / "A.json").mkdir()
    with pytest.raises(StorageError, match=r"A\.json cannot be read \(Is a directory\)"):
        splits_of(one_each(2), SplitConfig(), 0, tmp_path / "A.json")


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


def test_sites_that_share_nothing_have_no_findings():
    sites = {"A": [case("a1", "p1")], "B": [case("b1", "p2", site="B")]}
    assert check_across_sites(sites) == []
