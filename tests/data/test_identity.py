"""Digests of a site's data beside a run's splits."""

from pathlib import Path

import numpy as np
import pytest

from collegium.data.identity import check_contents, contents_of_cases, record_contents
from collegium.data.site import NO_CASES, Case, Site
from collegium.data.splits import SplitConfig, load_or_draw_splits
from collegium.errors import DataError, StorageError


def cases_in(folder: Path, count: int = 20) -> list[Case]:
    for number in range(count):
        for kind in ("image", "mask"):
            np.save(folder / f"{kind}{number}.npy", np.full(4, number))
    return [
        Case("A", f"c{n:02d}", f"p{n}", (folder / f"image{n}.npy",), folder / f"mask{n}.npy")
        for n in range(count)
    ]


def test_what_changed_is_listed_by_kind_and_case(tmp_path: Path):
    cases, splits, cache = cases_in(tmp_path), tmp_path / "splits/A.json", tmp_path / "cache"
    before = contents_of_cases(cases, cache)
    load_or_draw_splits(cases, SplitConfig(), 0, splits)
    check_contents("A", {}, splits)  # nothing was trained on yet
    record_contents(Site("A", NO_CASES, NO_CASES, NO_CASES, contents=before), splits)
    check_contents("A", before, splits)
    for number in range(14):
        np.save(tmp_path / f"mask{number}.npy", np.zeros(4))
    np.save(tmp_path / "image3.npy", np.zeros(4))
    after = contents_of_cases(cases[:-1], cache)
    masks = ", ".join(f"c{number:02d}" for number in range(12))
    with pytest.raises(DataError) as caught:
        check_contents("A", {**after, "d": {}}, splits)
    assert str(caught.value) == (
        "site A: its data have changed since this run began to train (another image of c03; "
        f"another mask of {masks}, ... (14 in all); one case less, c19; one case more, d): put "
        "the old data back, or start the run in a new output folder"
    )
    record_contents(Site("A", NO_CASES, NO_CASES, NO_CASES, contents=after), splits)
    check_contents("A", before, splits)  # what training began with stays recorded


def test_splits_that_are_gone_are_named(tmp_path: Path):
    with pytest.raises(StorageError, match=r"A\.json: No such file"):
        check_contents("A", {}, tmp_path / "A.json")
