"""Digests of data files, and when a file is hashed again."""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from collegium.data import digests
from collegium.data.cache import prepare
from collegium.data.digests import RECORD, file_digest
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import Case

MINUTE = 60 * 10**9


def write(path: Path, content: bytes, *, age: int = MINUTE) -> Path:
    """Write a file that was last modified so many nanoseconds ago."""
    path.write_bytes(content)
    stamp = time.time_ns() - age
    os.utime(path, ns=(stamp, stamp))
    return path


def expected(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=20).digest()


def forget() -> None:
    """Begin as a new process does."""
    digests._remembered.cache_clear()
    digests._read_record.cache_clear()


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed, as often as they are."""
    files: list[Path] = []

    original = digests._hash

    def spy(path: Path) -> bytes:
        files.append(path)
        return original(path)

    monkeypatch.setattr(digests, "_hash", spy)
    return files


def test_a_digest_is_that_of_the_content(tmp_path):
    path = write(tmp_path / "a.png", b"pixels")
    assert file_digest(path) == file_digest(path, tmp_path / "cache") == expected(b"pixels")


def test_a_file_that_stays_the_same_is_hashed_once(tmp_path, hashed, monkeypatch):
    path = write(tmp_path / "a.png", b"pixels")
    link = tmp_path / "b.png"
    link.symlink_to(path)
    monkeypatch.chdir(tmp_path)
    assert {file_digest(name) for name in (path, link, Path("a.png"))} == {expected(b"pixels")}
    assert len(hashed) == 1


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    ("content", "age"),
    [(b"PIXELS", MINUTE // 2), (b"more pixels", MINUTE), (b"pixels", MINUTE // 2)],
    ids=["content", "size", "time"],
)
def test_a_file_that_changes_is_hashed_again(content, age, recorded, tmp_path, hashed):
    path, cache = tmp_path / "a.png", tmp_path / "cache" if recorded else None
    write(path, b"pixels")
    assert file_digest(path, cache) == expected(b"pixels")
    write(path, content, age=age)
    assert file_digest(path, cache) == expected(content)
    assert len(hashed) == 2


def test_what_changes_at_equal_size_and_time_is_not_noticed(tmp_path):
    path = write(tmp_path / "a.png", b"pixels")
    before, stat = file_digest(path), path.stat()
    path.write_bytes(b"PIXELS")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(path) == before


@pytest.mark.parametrize("age", [0, -MINUTE])
def test_a_file_that_was_modified_just_now_is_never_remembered(age, tmp_path, hashed):
    path = write(tmp_path / "a.png", b"pixels", age=age)
    stat = path.stat()
    file_digest(path, tmp_path / "cache")
    path.write_bytes(b"PIXELS")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file_digest(path, tmp_path / "cache") == expected(b"PIXELS")
    assert not (tmp_path / "cache").exists()


def test_another_process_reads_the_record(tmp_path, hashed):
    path, cache = write(tmp_path / "ä b.png", b"pixels"), tmp_path / "cache"
    file_digest(path, cache)
    forget()
    assert file_digest(path, cache) == expected(b"pixels")
    assert len(hashed) == 1
    ((name, size, mtime, digest, _),) = map(json.loads, (cache / RECORD).read_text().splitlines())
    assert (name, size, mtime) == (str(path.resolve()), 6, path.stat().st_mtime_ns)
    assert bytes.fromhex(digest) == expected(b"pixels")


@pytest.mark.parametrize(
    "damage", [b"\xff\x00[\n", b'["/a", 6, 7', b"[]\n", b'["/a", 6, 7, "x"]\n']
)
def test_a_damaged_record_costs_no_more_than_its_lines(damage, tmp_path, hashed):
    path, cache = write(tmp_path / "a.png", b"pixels"), tmp_path / "cache"
    file_digest(path, cache)
    record = cache / RECORD
    record.write_bytes(record.read_bytes() + damage)
    forget()
    assert file_digest(path, cache) == expected(b"pixels")
    assert len(hashed) == 1


def test_without_a_place_for_the_record_files_are_hashed_all_the_same(tmp_path):
    path, place = write(tmp_path / "a.png", b"pixels"), tmp_path / "file"
    place.write_bytes(b"")
    assert file_digest(path, place) == expected(b"pixels")
    (tmp_path / "cache" / RECORD).mkdir(parents=True)
    assert file_digest(path, tmp_path / "cache") == expected(b"pixels")


def test_a_case_is_prepared_again_without_reading_its_files(tmp_path, hashed):
    from PIL import Image

    files = [tmp_path / name for name in ("image.png", "label.png")]
    for file in files:
        Image.new("L", (8, 6)).save(file)
        write(file, file.read_bytes())
    case = Case("A", "c", "p", (files[0],), files[1])
    first = prepare(case, ImageConfig(), TaskConfig(), tmp_path / "cache")
    forget()
    assert prepare(case, ImageConfig(), TaskConfig(), tmp_path / "cache") == first
    assert hashed == [file.resolve() for file in files]
