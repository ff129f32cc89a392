"""Prepared cases on the disk: their names, and how they survive accidents and other processes."""

import errno
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collegium.data import cache as cache_module
from collegium.data.cache import entry_name, prepare
from collegium.data.digests import RECORD
from collegium.data.preprocessing import preprocess
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case
from collegium.errors import DataError, StorageError

PLAIN = ImageConfig(normalise="none")
TASK = TaskConfig()


@pytest.fixture
def case(tmp_path) -> Case:
    return make_case(tmp_path / "data")


def make_case(folder: Path, value: int = 0) -> Case:
    folder.mkdir(parents=True)
    pixels = (np.arange(48) + value).reshape(6, 8).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "image.png")
    Image.fromarray((pixels % 2 * 255).astype(np.uint8)).save(folder / "label.png")
    Image.fromarray(((pixels > 7) * 255).astype(np.uint8)).save(folder / "fov.png")
    return Case(
        "C", "Case12", "p7", (folder / "image.png",), folder / "label.png", folder / "fov.png"
    )


def content(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != RECORD)


def test_a_prepared_case_holds_the_files_arrays(case, tmp_path):
    prepared = prepare(case, PLAIN, TASK, tmp_path / "cache")
    arrays = prepared.arrays()
    assert arrays.label is not None
    assert arrays.mask is not None
    expected = np.arange(48).reshape(6, 8)
    assert (prepared.case, prepared.patient, prepared.shape) == ("Case12", "p7", (1, 6, 8))
    np.testing.assert_array_equal(arrays.image, expected[None].astype(np.float32))
    np.testing.assert_array_equal(arrays.label, expected % 2)
    np.testing.assert_array_equal(arrays.mask, expected > 7)
    kinds = [array.dtype for array in (arrays.image, arrays.label, arrays.mask)]
    assert kinds == [np.float32, np.uint8, np.uint8]
    assert not arrays.image.flags.writeable


def test_a_second_time_nothing_is_decoded_again(case, tmp_path, monkeypatch):
    first = prepare(case, PLAIN, TASK, tmp_path / "cache")
    monkeypatch.setattr(cache_module, "preprocess", None)
    assert prepare(case, PLAIN, TASK, tmp_path / "cache") == first


def test_the_entry_is_named_by_contents_and_recipe_only(case, tmp_path):
    moved = make_case(tmp_path / "elsewhere")
    other = make_case(tmp_path / "other", value=1)
    name = entry_name(case, PLAIN, TASK)
    assert entry_name(replace(moved, case="x", patient="y"), PLAIN, TASK) == name
    one = ImageConfig(normalise="none", inputs=1)
    named = replace(one, modalities=("t1",))
    assert entry_name(case, named, TASK) == entry_name(case, one, TASK)
    different = {
        entry_name(other, PLAIN, TASK),
        entry_name(replace(case, fov=None), PLAIN, TASK),
        entry_name(case, ImageConfig(normalise="minmax"), TASK),
        entry_name(case, ImageConfig(normalise="none", size=4), TASK),
        entry_name(case, PLAIN, TaskConfig(label_map={1: 0})),
        entry_name(case, PLAIN, TaskConfig(regions={"a": (1,)})),
        entry_name(case, PLAIN, TaskConfig(regions={"b": (1,)})),
    }
    assert len(different | {name}) == 8


@pytest.mark.parametrize("file", ["image.npy", "label.npy", "mask.npy", "case.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_entry_is_made_anew(case, tmp_path, file, damage):
    first = prepare(case, PLAIN, TASK, tmp_path / "cache")
    whole = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    if damage == "remove":
        (first.folder / file).unlink()
    else:
        os.truncate(first.folder / file, 20)
    assert prepare(case, PLAIN, TASK, tmp_path / "cache") == first
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == whole
    assert content(tmp_path / "cache") == [first.folder.name]


def test_an_entry_that_another_process_finished_first_is_used(case, tmp_path, monkeypatch):
    def overtaken(*arguments):
        monkeypatch.setattr(cache_module, "preprocess", preprocess)
        prepare(case, PLAIN, TASK, tmp_path / "cache")
        (tmp_path / "cache" / entry_name(case, PLAIN, TASK) / "theirs").touch()
        return preprocess(*arguments)

    monkeypatch.setattr(cache_module, "preprocess", overtaken)
    prepared = prepare(case, PLAIN, TASK, tmp_path / "cache")
    assert "theirs" in content(prepared.folder)
    assert content(tmp_path / "cache") == [prepared.folder.name]


def prepare_when_told(case: Case, cache: Path, barrier, answers) -> None:
    barrier.wait()
    prepared = prepare(case, PLAIN, TASK, cache)
    answers.put((prepared.folder.name, float(prepared.arrays().image.sum())))


def test_two_processes_that_prepare_one_case_at_once_leave_one_entry(case, tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(2), context.Queue()
    processes = [
        context.Process(target=prepare_when_told, args=(case, tmp_path / "cache", barrier, answers))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    got = [answers.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    name = entry_name(case, PLAIN, TASK)
    assert got == [(name, float(np.arange(48).sum()))] * 2
    assert content(tmp_path / "cache") == [name]


def test_a_full_disk_is_one_sentence_and_leaves_nothing_behind(case, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(StorageError, match=r"cache .*\(No space left on device\): free space"):
        prepare(case, PLAIN, TASK, tmp_path / "cache")
    assert content(tmp_path / "cache") == []


def test_a_cache_that_cannot_be_made_is_a_storage_error(case, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"the cache .*file/cache cannot be written"):
        prepare(case, PLAIN, TASK, tmp_path / "file" / "cache")


def test_an_entry_that_vanished_is_a_storage_error(case, tmp_path):
    prepared = prepare(case, PLAIN, TASK, tmp_path / "cache")
    (prepared.folder / "label.npy").unlink()
    with pytest.raises(StorageError, match="cannot be read: start again"):
        prepared.arrays()


def test_a_missing_file_names_site_case_and_file(case, tmp_path):
    case.label.unlink()
    with pytest.raises(DataError, match=r"site C, case Case12: .*label.png cannot be read"):
        prepare(case, PLAIN, TASK, tmp_path / "cache")


def test_what_was_noticed_is_kept_with_the_entry(case, tmp_path):
    for _ in range(2):
        prepared = prepare(case, PLAIN, TASK, tmp_path / "cache")
        assert any("0 and 255 were read as classes 0 and 1" in note for note in prepared.notes)
    stored = json.loads((prepared.folder / "case.json").read_text("utf-8"))
    assert stored["shape"] == [1, 6, 8]
