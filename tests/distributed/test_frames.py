"""Frames on Unix sockets: what is whole, what is not, and who may connect."""

import os
import socket
import stat
import struct

import pytest

from collegium.distributed import frames
from collegium.distributed.frames import MAX_HEADER, MAX_PATH, SIZES, Line, listen


@pytest.fixture
def ends():
    """The two ends of a connection: a line, and a plain socket."""
    one, other = socket.socketpair()
    line = Line(one)
    yield line, other
    line.close()
    other.close()


@pytest.fixture
def lines():
    one, other = map(Line, socket.socketpair())
    yield one, other
    one.close()
    other.close()


def test_a_frame_arrives_as_it_was_sent(lines):
    one, other = lines
    one.send({"do": "handle", "é": [1, None]}, b"\x00\xff" * 1000)
    one.send({})
    assert other.receive(2000) == ({"do": "handle", "é": [1, None]}, b"\x00\xff" * 1000)
    assert other.receive(0) == ({}, b"")


def test_the_bytes_are_two_sizes_a_header_and_a_payload(ends):
    line, raw = ends
    line.send({"a": 1}, b"xyz")
    assert raw.recv(100) == struct.pack(">IQ", 8, 3) + b'{"a": 1}' + b"xyz"


def test_a_frame_that_arrives_byte_by_byte_is_whole(ends):
    line, raw = ends
    for byte in SIZES.pack(2, 3) + b"{}" + b"xyz":
        raw.send(bytes([byte]))
    assert line.receive(3) == ({}, b"xyz")


def test_a_payload_is_read_in_pieces(lines, monkeypatch):
    monkeypatch.setattr(frames, "PIECE", 4)
    one, other = lines
    one.send({}, b"0123456789")
    _, size = other.header()
    assert list(other.pieces(size)) == [b"0123", b"4567", b"89"]
    assert list(other.pieces(0)) == []


@pytest.mark.parametrize("length", [0, 5, SIZES.size, SIZES.size + 1, SIZES.size + 4])
def test_a_frame_whose_other_end_closed_is_no_frame(ends, length):
    line, raw = ends
    raw.sendall((SIZES.pack(2, 3) + b"{}xyz")[:length])
    raw.close()
    with pytest.raises(EOFError, match="closed the connection"):
        line.receive(10)


def test_a_frame_over_a_limit_is_refused_before_it_is_read(ends):
    line, raw = ends
    raw.sendall(SIZES.pack(2, 11) + b"{}")
    with pytest.raises(ValueError, match="11 bytes is over the limit of 10"):
        line.receive(10)


@pytest.mark.parametrize("size", [MAX_HEADER + 1, 0xFFFFFFFF])
def test_a_header_that_is_too_long_is_refused_before_it_is_read(ends, size):
    line, raw = ends
    raw.sendall(SIZES.pack(size, 0))
    with pytest.raises(ValueError, match=f"{size} bytes is longer than"):
        line.header()


@pytest.mark.parametrize(
    "head", [b"no JSON", b"\xff\xfe", b"3", b"null", b'"ab"', b"[1]", b'[["a", 2]]', b"[" * 100_000]
)
def test_what_is_no_mapping_is_no_header(ends, head):
    line, raw = ends
    raw.sendall(SIZES.pack(len(head), 0) + head)
    with pytest.raises(ValueError, match=r"header|Expecting|decode"):
        line.header()


def test_whoever_reads_is_woken_when_the_line_is_closed(lines):
    one, other = lines
    other.close()
    with pytest.raises(EOFError):
        one.header()


def test_a_read_waits_no_longer_than_it_may(lines):
    one, _ = lines
    one.wait_at_most(0.01)
    with pytest.raises(TimeoutError):
        one.header()


def test_only_its_owner_may_open_a_socket(tmp_path):
    before = os.umask(0)
    try:
        with listen(tmp_path / "new" / "a.sock") as server:
            mode = (tmp_path / "new" / "a.sock").stat().st_mode
            assert (stat.S_IMODE(mode), stat.S_ISSOCK(mode)) == (0o600, True)
            line = Line.connect(tmp_path / "new" / "a.sock", 1.0)
            line.send({"hello": 1})
            other = Line(server.accept()[0])
            assert other.receive(0) == ({"hello": 1}, b"")
            line.close()
            other.close()
        assert os.umask(0) == 0
    finally:
        os.umask(before)


def test_a_socket_of_a_process_that_ended_is_taken_over(tmp_path):
    listen(tmp_path / "a.sock").close()
    assert (tmp_path / "a.sock").exists()
    with pytest.raises(OSError, match="refused"):
        Line.connect(tmp_path / "a.sock", 1.0)
    with listen(tmp_path / "a.sock"):
        Line.connect(tmp_path / "a.sock", 1.0).close()


def test_a_file_that_is_no_socket_stays(tmp_path):
    (tmp_path / "a.sock").write_text("mine")
    with pytest.raises(OSError, match="is not a socket"):
        listen(tmp_path / "a.sock")
    assert (tmp_path / "a.sock").read_text() == "mine"


def test_a_path_that_is_too_long_is_refused_with_its_length(tmp_path):
    path = tmp_path / ("x" * (MAX_PATH - len(os.fsencode(tmp_path)) - 1))
    with listen(path):
        assert path.exists()
    with pytest.raises(OSError, match=f"too long for a Unix socket \\(at most {MAX_PATH} bytes\\)"):
        listen(tmp_path / (path.name + "x"))
