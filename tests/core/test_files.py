import errno
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from collegium.core.files import lock, storage_error, write_atomically
from collegium.errors import StorageError


def test_file_is_written_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "deep" / "file"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")
@pytest.mark.parametrize("leftover", [False, True])
def test_private_file_is_its_owner_s_alone_before_its_first_byte_is_there(
    tmp_path, monkeypatch, leftover
):
    """The mode is looked at while the file is written, and of the old file it does not matter."""
    path, modes, fsync = tmp_path / "file", [], os.fsync

    def look(descriptor: int) -> None:
        found = os.fstat(descriptor)
        if stat.S_ISREG(found.st_mode):
            modes.append((stat.S_IMODE(found.st_mode), found.st_size))
        fsync(descriptor)

    before = os.umask(0o022)
    try:
        write_atomically(path, b"old")
        assert stat.S_IMODE(path.stat().st_mode) == 0o644
        if leftover:
            path.with_name(f"file.{os.getpid()}.tmp").write_bytes(b"left by a process that died")
        monkeypatch.setattr(os, "fsync", look)
        write_atomically(path, b"se", b"cret", private=True)
    finally:
        os.umask(before)
    assert modes == [(0o600, 6)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes() == b"secret"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "is full; free some space"), (errno.EDQUOT, "is full; free some space"),
     (errno.EROFS, "no permission to write in"), (errno.EIO, "check the disk")],
)  # fmt: skip
def test_failed_write_leaves_the_old_content_and_no_rest(
    tmp_path, monkeypatch, call, number, words
):
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def fail(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", fail)
        else:
            patch.setattr(Path, call, fail)
        with pytest.raises(StorageError) as caught:
            write_atomically(path, b"new and longer")
    assert words in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_folder_without_permission_is_named(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StorageError, match=f"no permission to write in {tmp_path}"):
        write_atomically(tmp_path / "file", b"")


def test_file_in_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match=r"run/file: "):
        write_atomically(tmp_path / "run" / "file", b"")


def test_storage_error_of_an_unknown_kind_says_what_the_system_said():
    error = storage_error(OSError(errno.EIO, "Input/output error"), Path("/a/b"))
    assert str(error).startswith("/a/b: Input/output error; check the disk")


def test_folder_is_locked_for_one_at_a_time(tmp_path):
    folder = tmp_path / "new"
    with (
        lock(folder),
        pytest.raises(StorageError, match="another process is running"),
        lock(folder),
    ):
        pass
    with lock(folder):
        assert folder.is_dir()


HOLDER = """
import sys, time
from pathlib import Path
from collegium.core.files import lock

with lock(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(float(sys.argv[2]))
    Path(sys.argv[1], "done").touch()
"""


def holder(folder: Path, seconds: float) -> "subprocess.Popen[str]":
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


def test_a_lock_ends_with_its_process(tmp_path):
    with holder(tmp_path, 60) as process:
        with pytest.raises(StorageError, match=f"another process is running in {tmp_path}; wait"):
            lock(tmp_path).__enter__()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    with lock(tmp_path):
        assert not (tmp_path / "done").exists()


def test_a_lock_may_be_waited_for_and_taken_again_by_the_same_thread(tmp_path):
    with holder(tmp_path, 0.5), lock(tmp_path, wait=True), lock(tmp_path, wait=True):
        assert (tmp_path / "done").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    closed = Path("/sys") if os.geteuid() == 0 else tmp_path / "closed"
    if not closed.is_dir():
        closed.mkdir(mode=0o500)
    for wait in (False, True):
        with pytest.raises(StorageError, match=f"no permission to write in {closed}"):
            lock(closed, wait=wait).__enter__()
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="a file stands in the place of a folder"):
        lock(tmp_path / "run").__enter__()
