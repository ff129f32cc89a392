"""The relay at a site: pieces in their order, and what it says where the site process is not."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest

from collegium.distributed import relay as relay_module
from collegium.distributed.frames import Line, listen
from collegium.distributed.relay import SITE_SOCKET, SiteRelay

LIMIT = 30.0


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A site process whose one connection is served by a function."""
    monkeypatch.setenv(SITE_SOCKET, str(tmp_path / "s.sock"))
    monkeypatch.setattr(relay_module, "PIECE", 4)
    server = listen(tmp_path / "s.sock")
    threads = []

    def serve(function: Callable[[Line], Any]) -> None:
        def accept() -> None:
            line = Line(server.accept()[0])
            function(line)
            line.close()

        threads.append(threading.Thread(target=accept, daemon=True))
        threads[-1].start()

    yield serve
    for thread in threads:
        thread.join(LIMIT)
    server.close()


def header(**more: Any) -> str:
    return json.dumps({"deadline": LIMIT, **more})


def echo(line: Line) -> None:
    found, data = line.receive(1000)
    line.send({"asked": found["do"]}, data)


def test_a_short_request_is_carried_in_one_call(site):
    site(echo)
    head, size, data = SiteRelay().whole("k", header(do="open"), b"abc")
    assert (json.loads(head), size, data) == ({"asked": "open"}, 3, b"abc")


def test_a_long_reply_is_fetched_piece_by_piece(site):
    site(echo)
    relay = SiteRelay()
    head, size, data = relay.whole("k", header(do="x"), b"0123456789")
    assert (json.loads(head), size, data) == ({"asked": "x"}, 10, b"")
    assert [relay.pull("k", index) for index in range(3)] == [b"0123", b"4567", b"89"]
    assert relay.pull("k", 3) == b""  # nothing is left of the request


def test_pieces_that_arrive_out_of_turn_are_carried_in_their_order(site):
    site(echo)
    relay = SiteRelay()
    relay.begin("k", header(do="x"), 12)
    pieces = [(2, b"cccc"), (1, b"bbbb"), (0, b"aaaa")]
    threads = [threading.Thread(target=relay.push, args=("k", *piece)) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    relay.reply("k")
    found: dict[int, bytes] = {}

    def pull(index: int) -> None:
        found[index] = relay.pull("k", index)

    threads = [threading.Thread(target=pull, args=(index,)) for index in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert found == {0: b"aaaa", 1: b"bbbb", 2: b"cccc"}


def test_a_site_process_that_is_not_there_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv(SITE_SOCKET, str(tmp_path / "none.sock"))
    head, size, data = SiteRelay().whole("k", header(do="x"), b"abc")
    assert json.loads(head) == {"absent": "its site process does not answer"}
    assert (size, data) == (0, b"")


@pytest.mark.parametrize("sent", [b"", b"\x00\x00", b"\x00\x00\x00\x01" + bytes(8) + b"3"])
def test_a_site_process_that_ends_in_the_middle_is_absent(site, sent):
    def end(line: Line) -> None:
        line.receive(100)
        line.write(sent)

    site(end)
    head, _, _ = SiteRelay().whole("k", header(do="x"), b"abc")
    assert json.loads(head) == {"absent": "its site process does not answer"}


def test_a_reply_that_ends_in_the_middle_is_empty_from_there(site):
    def end(line: Line) -> None:
        line.receive(100)
        line.begin({}, 10)
        line.write(b"01234")

    site(end)
    relay = SiteRelay()
    assert relay.whole("k", header(do="x"), b"abc")[1] == 10
    assert [relay.pull("k", index) for index in range(3)] == [b"0123", b"", b""]


def test_a_site_process_that_takes_too_long_is_late(site):
    late = threading.Event()

    def wait(line: Line) -> None:
        line.receive(100)
        late.wait(LIMIT)

    site(wait)
    head, _, _ = SiteRelay().whole("k", header(do="x", deadline=0.05), b"abc")
    late.set()
    assert json.loads(head) == {"late": "did not answer within 0.05 s"}
