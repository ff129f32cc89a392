"""The connection to the sites, with relays that are threads of the test and speak in frames."""

import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

from collegium.distributed import connection as connection_module
from collegium.distributed.connection import RESTARTS, SENDING, Answer, Call, Connection
from collegium.distributed.frames import PIECE, SIZES, Line
from collegium.distributed.jobs import Coordinator, ServerUnreachable
from collegium.errors import ClientError, MissingReply

SITES = ("alder", "birch", "cedar")
LIMIT = 30.0
"""Seconds after which something that does not happen is a failure."""

Behaviour = Callable[["Relay", dict[str, Any], bytes], bool]


def echo(relay: "Relay", header: dict[str, Any], data: bytes) -> bool:
    """Answer with the site's name and what was asked."""
    relay.reply({"from": relay.site, "asked": header.get("do")}, data)
    return True


class Relay(threading.Thread):
    """What FLARE's job does for one site: takes calls, and behaves as it was told to.

    Args:
        path: the socket of the connection.
        site: the site's name.
        behaviour: answers a call; false closes the line.
    """

    def __init__(self, path: Path, site: str, behaviour: Behaviour) -> None:
        super().__init__(daemon=True)
        self.site, self._path, self._behaviour = site, path, behaviour
        self.line: Line = Line.connect(path, LIMIT)

    def run(self) -> None:
        self.line.send({"site": self.site})
        try:
            while self._behaviour(self, *self.line.receive(1 << 30)):
                pass
        except (OSError, EOFError):
            pass
        self.line.close()

    def reply(self, header: dict[str, Any], data: bytes = b"") -> None:
        """Send a reply; a long one waits until there is room for it."""
        self.line.begin(header, len(data))
        if len(data) > PIECE:
            self.line.header()
        if data:
            self.line.write(data)


class FakeCoordinator(Coordinator):
    """A server of FLARE that starts relays at once, and knows when sites were last seen.

    Args:
        path: the socket of the connection.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen = {site: time.time() for site in SITES}
        self.jobs: list[set[str]] = []
        self.enters = set(SITES)
        self.behaviours: dict[str, Behaviour] = {}
        self.outside: set[str] = set()
        self.unreachable = False
        self.finished = False
        self.closed = False

    def connected(self) -> dict[str, float]:
        if self.unreachable:
            raise ServerUnreachable("the server does not answer")
        return dict(self.seen)

    def submit(self, sites: Collection[str]) -> str:
        self.jobs.append(set(sites))
        for site in sorted(set(sites) & self.enters):
            Relay(self.path, site, self.behaviours.get(site, echo)).start()
        return f"job {len(self.jobs)}"

    def status(self, job: str) -> str:
        return "FINISHED:EXCEPTION" if self.finished else "RUNNING"

    def left(self, job: str, sites: Collection[str]) -> set[str]:
        return self.outside & set(sites)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def flare(tmp_path):
    return FakeCoordinator(tmp_path / "c.sock")


@pytest.fixture
def connection(flare):
    made = Connection(flare, flare.path, SITES, deadline=7.0, patience=0.0)
    yield made
    made.close()


@pytest.fixture
def quick(monkeypatch):
    """No pause between two looks, and none until a job is given up."""
    monkeypatch.setattr(connection_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(connection_module, "START_SECONDS", 0.0)


def ask(connection, sites=SITES, payload=b"", do="handle"):
    found = {}
    for answer in connection.ask(Call(site, {"do": do}, payload) for site in sites):
        assert answer.site not in found
        found[answer.site] = answer
    assert set(found) == set(sites)
    return found


def test_every_site_is_asked_and_answers_with_what_it_was_sent(connection, flare):
    calls = [Call(site, {"do": "handle"}, site.encode() * 9) for site in SITES]
    found = {answer.site: answer for answer in connection.ask(iter(calls))}
    for site in SITES:
        wanted = {"from": site, "asked": "handle"}
        assert found[site] == Answer(site, wanted, site.encode() * 9)
    assert flare.jobs == [set(SITES)]


def test_a_site_is_told_how_long_it_may_work(connection, flare):
    told = []

    def note(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        told.append(header)
        return echo(relay, header, data)

    flare.behaviours["alder"] = note
    ask(connection, ["alder"])
    assert told == [{"do": "handle", "deadline": 7.0}]


def test_one_job_carries_exchange_after_exchange(connection, flare):
    for _ in range(5):
        ask(connection)
    ask(connection, ["birch"])
    assert len(flare.jobs) == 1


def test_answers_come_as_they_arrive_not_in_the_order_of_the_calls(connection, flare):
    others = threading.Event()

    def wait(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        assert others.wait(LIMIT)
        return echo(relay, header, data)

    flare.behaviours["alder"] = wait
    order = []
    for answer in connection.ask(Call(site, {}) for site in SITES):
        order.append(answer.site)
        if set(order) == {"birch", "cedar"}:
            others.set()
    assert order[-1] == "alder"


def test_long_replies_are_whole_and_wait_until_there_is_room(connection):
    data = bytes(range(256)) * ((PIECE >> 8) + 1)
    assert len(data) > PIECE
    found = ask(connection, payload=data)
    assert all(answer.data == data for answer in found.values())


def test_no_more_payloads_are_held_than_are_being_sent(connection, flare):
    """The calls are built as they are sent, and dropped when they have been."""
    ask(connection)
    lock, alive, most = threading.Lock(), 0, 0
    sites = [f"site-{number}" for number in range(12)]

    class Payload(bytearray):
        def __init__(self) -> None:
            nonlocal alive, most
            super().__init__(1 << 20)
            with lock:
                alive += 1
                most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            with lock:
                alive -= 1

    flare.seen = {site: time.time() for site in sites}
    flare.enters = set(sites)
    many = Connection(flare, flare.path.with_name("d.sock"), sites, deadline=7.0, patience=0.0)
    flare.path = flare.path.with_name("d.sock")
    flare.behaviours = dict.fromkeys(sites, lambda relay, *_: relay.reply({}) or True)
    try:
        calls = (Call(site, {}, Payload()) for site in sites)  # type: ignore[arg-type]
        assert {answer.site for answer in many.ask(calls)} == set(sites)
    finally:
        many.close()
    # one more is built before it waits for its turn
    assert 1 <= most <= SENDING + 1
    assert alive == 0


@pytest.mark.parametrize("kind", ["absent", "late", "gone"])
def test_why_a_site_did_not_answer_is_told(connection, flare, kind):
    flare.behaviours["birch"] = lambda relay, *_: relay.reply({kind: "is asleep"}) or True
    found = ask(connection)
    assert found["birch"] == Answer("birch", {}, missing="is asleep")
    assert not found["alder"].missing
    assert len(flare.jobs) == 1


def test_a_site_that_is_late_is_not_asked_until_it_has_finished(connection, flare, quick):
    asked, idle = [], False

    def late(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        asked.append(header.get("do"))
        if header.get("do") == "state":
            relay.reply({"idle": idle})
        elif not idle:
            relay.reply({"late": "did not answer within 7 s"})
        else:
            echo(relay, header, data)
        return True

    flare.behaviours["birch"] = late
    assert ask(connection)["birch"].missing == "did not answer within 7 s"
    assert ask(connection)["birch"].missing == "did not answer within 7 s"
    idle = True  # which it says to a question that nobody waits for
    answers = (ask(connection)["birch"] for _ in range(1000))
    assert next(answer for answer in answers if not answer.missing).header["from"] == "birch"
    assert (asked[0], asked[-1]) == ("handle", "handle")
    assert set(asked[1:-1]) == {"state"}
    assert len(flare.jobs) == 1


@pytest.mark.parametrize("when", ["before", "header", "in the middle"])
def test_a_line_that_breaks_means_once_more_and_another_job(connection, flare, when):
    broken: list[str] = []

    def break_once(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        if broken:
            return echo(relay, header, data)
        broken.append(relay.site)
        if when == "header":
            relay.line.write(b"\x00\x00")
        elif when == "in the middle":
            relay.line.begin({}, 100)
            relay.line.write(b"x" * 50)
        return False

    flare.behaviours["birch"] = break_once
    found = ask(connection)
    assert found["birch"] == Answer("birch", {}, again=True)
    assert found["alder"].header["from"] == "alder"
    assert ask(connection, ["birch"])["birch"].header["from"] == "birch"
    assert len(flare.jobs) == 2


@pytest.mark.parametrize("size", [1 << 40, (1 << 64) - 1])
def test_a_reply_that_says_it_is_huge_is_not_taken_in(connection, flare, size):
    def claim(relay: Relay, *_: Any) -> bool:
        relay.line.begin({}, size)
        relay.line.header()
        return False

    flare.behaviours["birch"] = claim
    found = ask(connection)
    assert found["birch"].header["error"]["kind"] == "ProtocolError"
    assert str(size) in found["birch"].header["error"]["text"]
    assert found["alder"].header["from"] == "alder"


@pytest.mark.parametrize("head", [b"garbage", b"3", b"[" * 10_000])
def test_a_reply_that_is_no_frame_means_another_job(connection, flare, head):
    def answer(relay: Relay, *_: Any) -> bool:
        relay.line.write(SIZES.pack(len(head), 0) + head)
        return False

    flare.behaviours["birch"] = answer
    assert ask(connection)["birch"].again


def test_an_absent_site_is_not_in_the_job_and_the_others_are_asked(connection, flare):
    del flare.seen["birch"]
    found = ask(connection)
    assert found["birch"] == Answer("birch", {}, missing="is not connected")
    assert found["cedar"].header["from"] == "cedar"
    assert flare.jobs == [{"alder", "cedar"}]


def test_a_site_that_was_not_heard_from_is_absent(connection, flare):
    flare.seen["birch"] -= 60
    assert ask(connection)["birch"].missing == "is not connected"


def test_a_site_that_comes_back_enters_with_another_job(connection, flare, quick):
    del flare.seen["birch"]
    ask(connection)
    ask(connection)
    assert len(flare.jobs) == 1
    flare.seen["birch"] = time.time() + 5
    assert ask(connection)["birch"].header["from"] == "birch"
    assert flare.jobs == [{"alder", "cedar"}, set(SITES)]


def test_a_site_that_does_not_enter_the_job_is_absent(connection, flare, quick):
    flare.enters = {"alder", "cedar"}
    found = ask(connection)
    assert found["birch"].missing == "did not enter the job"
    assert found["alder"].header["from"] == "alder"


def test_a_site_that_vanishes_while_it_works_is_given_up(connection, flare, quick, monkeypatch):
    monkeypatch.setattr(connection_module, "LOOK_SECONDS", 0.05)
    left = threading.Event()

    def vanish(relay: Relay, *_: Any) -> bool:
        flare.seen["birch"] -= 60
        return left.wait(LIMIT)

    flare.behaviours["birch"] = vanish
    found = ask(connection)
    left.set()
    assert found["birch"].missing == "was not heard from for 40 s"
    assert found["alder"].header["from"] == "alder"
    assert not connection._ended  # the others' job goes on


def test_a_relay_that_was_started_again_is_asked_in_another_job(connection, flare, monkeypatch):
    monkeypatch.setattr(connection_module, "LOOK_SECONDS", 0.05)
    left = threading.Event()

    def restart(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        if len(flare.jobs) > 1:
            return echo(relay, header, data)
        flare.outside = {"birch"}
        return left.wait(LIMIT)

    flare.behaviours["birch"] = restart
    assert ask(connection)["birch"].again
    left.set()
    flare.outside = set()
    assert ask(connection, ["birch"])["birch"].header["from"] == "birch"
    assert len(flare.jobs) == 2


def test_a_server_that_does_not_answer_while_sites_work_is_waited_for(
    connection, flare, monkeypatch
):
    monkeypatch.setattr(connection_module, "LOOK_SECONDS", 0.05)
    asked = threading.Event()

    def connected() -> dict[str, float]:
        asked.set()
        raise ServerUnreachable("the server does not answer")

    def slow(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        flare.connected = connected
        assert asked.wait(LIMIT)
        return echo(relay, header, data)

    flare.behaviours["birch"] = slow
    assert ask(connection, ["birch"])["birch"].header["from"] == "birch"


def test_without_any_site_it_says_which_and_what_to_do(connection, flare):
    flare.seen = {"dogwood": time.time()}
    with pytest.raises(MissingReply, match=r"no site is connected \(alder, birch, cedar\); start"):
        ask(connection)
    assert not flare.jobs


def test_without_a_server_it_says_so(connection, flare):
    flare.unreachable = True
    with pytest.raises(ServerUnreachable):
        ask(connection)


def test_server_and_sites_that_appear_late_are_waited_for(flare):
    """The server answers late, then goes away once more, and last comes a site."""
    flare.seen["cedar"] = time.time() - 3600
    answers = iter([None, {"alder", "birch"}, None, set(SITES)])

    def connected() -> dict[str, float]:
        there = next(answers, set(SITES))
        if there is None:
            raise ServerUnreachable("the server does not answer")
        return {site: time.time() if site in there else flare.seen[site] for site in SITES}

    flare.connected = connected
    patient = Connection(flare, flare.path, SITES, deadline=7.0, patience=LIMIT)
    assert set(ask(patient)) == set(SITES)
    assert flare.jobs == [set(SITES)]
    patient.close()


def test_jobs_that_end_one_after_the_other_are_given_up(connection, flare):
    flare.behaviours = dict.fromkeys(SITES, lambda *_: False)
    for _ in range(RESTARTS):
        assert all(answer.again for answer in ask(connection).values())
    with pytest.raises(ClientError, match=f"{RESTARTS} jobs ended one after the other"):
        ask(connection)
    assert len(flare.jobs) == RESTARTS


def test_jobs_that_end_before_any_site_enters_are_given_up(connection, flare):
    flare.enters, flare.finished = set(), True
    with pytest.raises(ClientError, match=f"{RESTARTS} jobs ended one after the other"):
        ask(connection)
    assert len(flare.jobs) == RESTARTS


def test_a_reply_starts_the_count_of_jobs_anew(connection, flare):
    def seldom(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        if len(flare.jobs) % 3:
            return False
        echo(relay, header, data)
        return False

    flare.behaviours = dict.fromkeys(SITES, seldom)
    for _ in range(4 * RESTARTS):
        ask(connection)
    assert len(flare.jobs) > 2 * RESTARTS


def test_a_site_whose_line_breaks_each_time_is_given_up_though_others_answer(connection, flare):
    flare.behaviours["birch"] = lambda *_: False
    for _ in range(RESTARTS):
        found = ask(connection)
        assert found["birch"].again
        assert found["alder"].header["from"] == "alder"
    found = ask(connection)
    wanted = f"its connection broke {RESTARTS + 1} times, one after the other"
    assert found["birch"] == Answer("birch", {}, missing=wanted)
    flare.behaviours["birch"] = echo
    assert ask(connection)["birch"].header["from"] == "birch"


def test_whoever_stops_asking_ends_the_job(connection, flare):
    silent: list[str] = []

    def never_once(relay: Relay, header: dict[str, Any], data: bytes) -> bool:
        if silent:
            return echo(relay, header, data)
        silent.append(relay.site)
        return True

    flare.behaviours["birch"] = never_once
    answers = connection.ask(Call(site, {}) for site in ("birch", "alder"))
    assert next(answers).site == "alder"
    answers.close()
    assert {answer.missing for answer in ask(connection).values()} == {""}
    assert len(flare.jobs) == 2


def test_a_call_that_cannot_be_built_ends_the_job_and_is_told(connection, flare):
    def calls():
        yield Call("alder", {})
        raise ValueError("no such message")

    with pytest.raises(ValueError, match="no such message"):
        list(connection.ask(calls()))
    assert ask(connection)["alder"].header["from"] == "alder"


def test_what_connects_without_a_name_does_no_harm(connection, flare):
    ask(connection)
    for header in ({}, {"name": "x"}):
        stranger = Line.connect(flare.path, LIMIT)
        stranger.send(header)
        with pytest.raises(EOFError):
            stranger.header()
        stranger.close()
    assert ask(connection)["alder"].header["from"] == "alder"


def test_closing_ends_every_thread(connection, flare):
    before = set(threading.enumerate())
    ask(connection)
    started = set(threading.enumerate()) - before
    assert started
    connection.close()
    for thread in started:
        thread.join(LIMIT)
        assert not thread.is_alive()


def test_closing_leaves_no_socket_and_no_session(connection, flare):
    ask(connection)
    assert flare.path.exists()
    connection.close()
    assert not flare.path.exists()
    assert flare.closed
