"""A site process that is stopped, or does not read: others go on, and nobody waits for it."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("nvflare")

from tests.distributed.commands import Processes

from collegium.data.phantoms import make_federation
from collegium.distributed import connection as connections
from collegium.distributed.connection import Answer, Call, Connection
from collegium.distributed.frames import PIECE, Line, listen
from collegium.distributed.jobs import Coordinator
from collegium.distributed.kits import Provision, make_kits
from collegium.distributed.relay import SITE_SOCKET, SiteRelay
from collegium.runtime.records import Records


@pytest.fixture
def site(tmp_path, monkeypatch) -> Iterator[socket.socket]:
    """The listening socket of a site process."""
    with listen(tmp_path / "site.sock") as listening:
        monkeypatch.setenv(SITE_SOCKET, str(tmp_path / "site.sock"))
        yield listening


def push_all(relay: SiteRelay, pieces: list[bytes]) -> list[Any]:
    """Send a request of some pieces, all at once and the last first; return the reply."""
    relay.begin("key", json.dumps({"deadline": 0.5}), sum(map(len, pieces)))
    threads = [
        threading.Thread(target=relay.push, args=("key", index, piece))
        for index, piece in reversed(list(enumerate(pieces)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found: list[Any] = relay.reply("key")
    return found


def test_site_process_that_does_not_read_is_late_and_raises_nothing(site):
    assert push_all(SiteRelay(), [bytes(PIECE)] * 5) == [
        json.dumps({"late": "did not answer within 0.5 s"}), 0, b"",
    ]  # fmt: skip


def test_site_process_that_is_not_there_is_absent(site):
    site.close()
    assert push_all(SiteRelay(), [bytes(PIECE)] * 2) == [
        json.dumps({"absent": "its site process does not answer"}), 0, b"",
    ]  # fmt: skip


def test_pieces_that_arrive_in_another_order_are_put_in_order(site):
    def echo() -> None:
        line = Line(site.accept()[0])
        _, data = line.receive(1 << 30)
        line.send({"read": len(data)}, data)
        line.close()

    threading.Thread(target=echo, daemon=True).start()
    pieces = [bytes([k]) * PIECE for k in range(3)] + [b"end"]
    relay = SiteRelay()
    header, size, first = push_all(relay, pieces)
    assert (json.loads(header), size, first) == ({"read": 3 * PIECE + 3}, 3 * PIECE + 3, b"")
    assert [relay.pull("key", index) for index in range(4)] == pieces
    assert relay.pull("key", 4) == b""


class OneJob(Coordinator):
    """In place of FLARE: a job that carries over the connections that the test opens."""

    def __init__(self, path: Path, answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]]):
        self._path, self._answers, self.jobs = path, answers, 0

    def connected(self) -> dict[str, float]:
        return dict.fromkeys(self._answers, 9e12)

    def status(self, job: str) -> str:
        return "RUNNING"

    def left(self, job: str, sites: Collection[str]) -> set[str]:
        return set()

    def submit(self, sites: Collection[str]) -> str:
        self.jobs += 1
        for site in sites:
            threading.Thread(target=self._serve, args=(site,), daemon=True).start()
        return f"job {self.jobs}"

    def _serve(self, site: str) -> None:
        line = Line.connect(self._path, None)
        line.send({"site": site})
        while True:
            try:
                header, size = line.header()
            except EOFError:
                line.close()
                return
            line.read(size)
            line.send(self._answers[site](header))

    def close(self) -> None:
        """Nothing is held."""


def test_others_do_not_wait_for_a_stopped_site_which_comes_back_without_a_new_job(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.0)
    pinged, resumed, idle = threading.Event(), threading.Event(), threading.Event()

    def alder(header: dict[str, Any]) -> dict[str, Any]:
        if header["do"] == "state":
            pinged.set()
            assert resumed.wait(60)
            idle.set()
            return {"idle": True}
        return {"did": header["do"]} if resumed.is_set() else {"late": "did not answer"}

    job = OneJob(tmp_path / "s", {"alder": alder, "birch": lambda header: {"did": header["do"]}})
    connection = Connection(job, tmp_path / "s", ("alder", "birch"), deadline=1.0, patience=1.0)

    def ask() -> dict[str, Answer]:
        calls = (Call(site, {"do": "train"}) for site in ("alder", "birch"))
        return {answer.site: answer for answer in connection.ask(calls)}

    for _ in range(3):  # the second and third find the site late, and its ping unanswered
        found = ask()
        assert found["alder"].missing == "did not answer"
        assert found["birch"].header == {"did": "train"}
    assert pinged.wait(60)
    assert not idle.is_set()  # so nobody has waited for what it says of its state
    resumed.set()
    assert idle.wait(60)
    while ask()["alder"].missing:
        pass
    assert job.jobs == 1
    connection.close()


def left_out(server: Path) -> list[list[str]]:
    """The sites that each round went without, so far."""
    records = Records(server).read_all()
    return [[entry["client"] for entry in record.left_out] for record in records]


def wait_until(met: Callable[[], bool], run: subprocess.Popen[bytes]) -> None:
    """Wait for something that happens while a run goes on."""
    while not met():
        assert run.poll() is None
        time.sleep(0.2)


@pytest.mark.slow
def test_site_stopped_for_longer_than_the_deadline_is_skipped_until_it_has_finished(tmp_path):
    sites, port = ("alder", "birch"), 18390
    make_federation(tmp_path / "phantom", 2, cases=8, size=32)
    make_kits(tmp_path / "con", Provision("localhost", sites, port))
    federation = yaml.safe_load((tmp_path / "phantom" / "federation.yaml").read_text())
    experiment = {
        "name": "stop",
        "federation": {**federation, "sites": {site: {"remote": True} for site in sites}},
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 1},
        "algorithms": ["fedavg"],
        "rounds": 2000,
        "training": {"batch_size": 2, "local_steps": 10, "lr": 0.01},
        "participation": {"on_failure": "skip"},
        "evaluation": {"every": 4},
        "output": str(tmp_path / "run"),
        "engine": {"name": "flare", "folder": "con", "threads": 1, "deadline": 25, "patience": 60},
    }
    (tmp_path / "exp.yaml").write_text(json.dumps(experiment))
    processes = Processes(tmp_path)
    try:
        processes.start("server", "server", "start", "con/server")
        running = {}
        for site in sites:
            own = {"name": site, "root": "phantom", "state": f"s/{site}", "accept": "all"}
            file = tmp_path / f"{site}.yaml"
            file.write_text(json.dumps(own | {"data": {"manifest": f"{site}/manifest.csv"}}))
            kit = f"con/sites/{site}"
            running[site] = processes.start(site, "site", "start", file.name, "--kit", kit)
        run = processes.start("run", "run", "exp.yaml")
        server = tmp_path / "run" / "fedavg" / "seed-0" / "server"
        wait_until(lambda: len(left_out(server)) > 2, run)
        os.kill(running["alder"].pid, signal.SIGSTOP)
        wait_until(lambda: left_out(server)[-10:] == [["alder"]] * 10, run)
        os.kill(running["alder"].pid, signal.SIGCONT)
        wait_until(lambda: left_out(server)[-3:] == [[]] * 3, run)
    finally:
        processes.end()
    without = [names for names in left_out(server) if names]
    assert without == [["alder"]] * len(without)
    log = (tmp_path / "run.log").read_text()
    assert log.count("site alder: did not answer within 25 s") == 1
    jobs = [path.name for path in (tmp_path / "con" / "server").iterdir() if "-" in path.name]
    assert len(jobs) == 1  # it came back to the job that ran
