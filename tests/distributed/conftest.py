"""A federation of real processes on this machine: FLARE's server, relays, and site processes."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from collegium.core.settings import from_mapping
from collegium.data import phantoms
from collegium.distributed.frames import Line, listen
from collegium.distributed.kits import Provision, make_kits
from collegium.distributed.site import read_site_settings
from collegium.distributed.status import federation_status
from collegium.experiment.config.experiment import load_config
from collegium.experiment.runner import run_experiment
from collegium.runtime.secure.site import FILE

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("alder", "birch", "cedar")
SHARED = 65534
"""The group of every user that is not root."""

LIMIT = 120.0
"""Seconds after which a condition that does not come true is a failure."""

EXPERIMENT: dict[str, Any] = {
    "federation": "phantom/federation.yaml",
    "model": {"name": "unet", "in_channels": 1, "out_channels": 2, "channels": [4, 8],
              "num_res_units": 0, "norm": "batch"},
    "training": {"optimizer": "adam", "lr": 2e-3, "batch_size": 2, "local_steps": 2},
    "rounds": 2,
    "evaluation": {"every": 1},
}  # fmt: skip


def wait_until(condition: Callable[[], Any]) -> Any:
    """Wait until something is the case; return what the condition returned."""
    until = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.05)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(process: "subprocess.Popen[str]") -> tuple[int, str]:
    """Return the exit code of a command, and what it wrote to stderr."""
    _, text = process.communicate(timeout=5 * LIMIT)
    return process.returncode, text


class Tap:
    """Stands between a site's relay and its site process, and sees every frame.

    `script` is called with the header of a call and a function that carries the call to the site
    process and returns its answer; what it returns is sent on, None closes the connection.

    Args:
        path: where the relay connects to.
        site: where the site process listens.
    """

    def __init__(self, path: Path, site: Path) -> None:
        self._site = site
        self.script: Callable[[dict[str, Any], Callable[[], Any]], Any] = lambda _, carry: carry()
        self.answers: list[tuple[dict[str, Any], bytes]] = []
        self.calls: list[dict[str, Any]] = []
        self._listener = listen(path)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(Line(sock),), daemon=True).start()

    def _serve(self, line: Line) -> None:
        try:
            header, data = line.receive(1 << 32)
            self.calls.append(header)
            answer = self.script(header, lambda: self._carry(header, data))
            if answer is not None:
                self.answers.append(answer)
                line.send(*answer)
        except (OSError, EOFError):
            pass  # one of both ends is gone
        finally:
            line.close()

    def _carry(self, header: Mapping[str, Any], data: bytes) -> tuple[dict[str, Any], bytes]:
        line = Line.connect(self._site, None)
        try:
            line.send(header, data)
            return line.receive(1 << 32)
        finally:
            line.close()

    def close(self) -> None:
        self._listener.close()


class RealFederation:
    """Kits, data and processes of a federation, all below one folder.

    Args:
        folder: the folder.
        tapped: whether the relays reach the site processes through a `Tap`.
        names: the sites.
    """

    def __init__(
        self, folder: Path, *, tapped: bool = False, names: tuple[str, ...] = NAMES
    ) -> None:
        self.folder, self.names, self.tapped = folder, names, tapped
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.users: dict[str, int] = {}  # the number of the user that a process is of
        self.taps: dict[str, Tap] = {}
        wanted, problems = from_mapping(
            Provision, {"server": "localhost", "sites": list(names), "port": free_port()}
        )
        assert wanted is not None, problems
        make_kits(folder / "con", wanted)

    def draw_phantoms(self, place: str = "phantom", cases: int = 10) -> None:
        """Draw images; the sites share their personal models, for sites outside."""
        file = phantoms.make_federation(self.folder / place, len(self.names), cases=cases, size=32)
        words = yaml.safe_load(file.read_text())
        for name in self.names:
            words["sites"][name]["share"] = ["personal"]
            self.describe_site(name, words["sites"][name], root=place)
        file.write_text(yaml.safe_dump(words))

    def describe_site(self, name: str, data: Mapping[str, Any], **more: Any) -> None:
        """Write a site's own file."""
        about = {"name": name, "data": dict(data), "state": f"s/{name}", "accept": "all"}
        about |= {"release": ["scores"], **more}  # as a run in one process has them
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(about))
        about["state"] = f"t/{name}"  # the tap listens where the relay's file says
        (self.folder / f"{name}-tap.yaml").write_text(yaml.safe_dump(about))

    def start(self) -> None:
        self.start_server()
        for name in self.names:
            self.start_site(name)

    def start_server(self) -> None:
        self._spawn("server", "server", "start", "con/server")

    def start_site(self, name: str, kit: str = "") -> None:
        if not self.tapped:
            self._spawn(name, "site", "start", f"{name}.yaml", "--kit", f"con/sites/{name}")
            return
        self.start_site_process(name)
        here = self.folder / "t" / name / "site.sock"
        self.taps[name] = Tap(here, self.state(name) / "site.sock")
        self.start_relay(name)

    def start_site_process(self, name: str, most_bytes: int | None = None) -> None:
        """Start a site process alone, and wait until it listens.

        Args:
            name: the site.
            most_bytes: the longest file that it may write, as if its disk were full.
        """
        socket = read_site_settings(self.folder / f"{name}.yaml").socket
        socket.unlink(missing_ok=True)
        self._spawn(name, "site", "start", f"{name}.yaml", most_bytes=most_bytes)
        wait_until(socket.exists)

    def is_at_work(self, site: str) -> bool:
        """Return whether a site process works on a call."""
        line = Line.connect(self.state(site) / "site.sock", LIMIT)
        try:
            line.send({"do": "state"})
            return not line.receive(0)[0]["idle"]
        finally:
            line.close()

    def image_words(self, place: str = "phantom") -> dict[str, Any]:
        """Return what the federation's file says of its images, to write it again."""
        found = yaml.safe_load((self.folder / place / "federation.yaml").read_text())
        return {key: value for key, value in found.items() if key != "root"}

    def start_relay(self, name: str) -> None:
        file = f"{name}-tap.yaml" if self.tapped else f"{name}.yaml"
        self._spawn(f"{name} relay", "site", "relay", file, "--kit", f"con/sites/{name}")

    def kill(self, name: str) -> None:
        """Kill a process and its group by SIGKILL."""
        process = self.processes.pop(name)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def pids(self, *words: str) -> list[int]:
        """Return the processes of this federation whose command line holds all words."""
        found = []
        for place in Path("/proc").iterdir():
            if place.name.isdigit():
                with suppress(OSError):
                    command = (place / "cmdline").read_bytes().decode(errors="replace")
                    if str(self.folder) in command and all(word in command for word in words):
                        found.append(int(place.name))
        return found

    def stop(self) -> None:
        """Kill every process; FLARE's job processes have groups of their own."""
        for name in list(self.processes):
            self.kill(name)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for tap in self.taps.values():
            tap.close()

    def _spawn(self, name: str, *arguments: str, most_bytes: int | None = None) -> None:
        limit = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({most_bytes}, {most_bytes})); "
        if most_bytes is None:
            limit = ""
        # the log is a pipe that this process empties: it is no file that the limit holds for
        process = subprocess.Popen(
            self._command(*arguments, first=limit), cwd=self.folder, env=self._environment(name),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            user=self.users.get(name), group=SHARED if name in self.users else None,
            extra_groups=[] if name in self.users else None,
        )  # fmt: skip
        self.processes[name] = process
        threading.Thread(target=self._keep_log, args=(name, process), daemon=True).start()

    def _keep_log(self, name: str, process: "subprocess.Popen[bytes]") -> None:
        assert process.stdout is not None
        with process.stdout, (self.folder / f"{name}.log").open("ab") as log:
            while data := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]
                log.write(data)
                log.flush()

    def _command(self, *arguments: str, first: str = "") -> list[str]:
        code = f"{first}from collegium.cli import main; main()"
        return [sys.executable, "-c", code, *arguments]

    def _environment(self, name: str) -> dict[str, str]:
        cache = str(self.folder / "cache" / name)
        mine = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "COLLEGIUM_CACHE": cache}
        return {**os.environ, **mine}

    def call(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a command of `collegium`, in a group of its own."""
        process = subprocess.Popen(
            self._command(*arguments), cwd=self.folder, env=self._environment("command"),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.processes[f"command {process.pid}"] = process  # type: ignore[assignment]
        return process

    def wait(self) -> None:
        """Wait until every site is connected."""
        wait_until(
            lambda: all(
                site["state"] == "connected"
                for site in federation_status(self.folder / "con")["sites"]
            )
        )

    def write(self, name: str, **settings: Any) -> str:
        """Write an experiment; return its file's name."""
        data = {"name": name, "output": f"r/{name}", **EXPERIMENT, **settings}
        (self.folder / f"{name}.yaml").write_text(yaml.safe_dump(data))
        return f"{name}.yaml"

    def run(self, file: str, *overrides: str) -> tuple[int, str]:
        """Run an experiment over FLARE; return the exit code and what was written to stderr."""
        return finish(self.begin(file, *overrides))

    def begin(self, file: str, *overrides: str) -> "subprocess.Popen[str]":
        """Start to run an experiment over FLARE."""
        return self.call("run", file, "engine.name=flare", "engine.folder=con", *overrides)

    def resume(self, name: str) -> tuple[int, str]:
        return finish(self.call("resume", f"r/{name}"))

    def assess(self, file: str) -> tuple[int, str]:
        return finish(self.call("assess", file, "engine.name=flare", "engine.folder=con"))

    def accept(self, site: str, digits: str) -> tuple[int, str]:
        return finish(self.call("site", "accept", f"{site}.yaml", digits))

    def reference(self, file: str, *overrides: str) -> Path:
        """Run an experiment in this process; return the run's folder."""
        output = self.folder / "reference" / file.removesuffix(".yaml")
        config = load_config(self.folder / file, [*overrides, f"output={output}"])
        return run_experiment(config)

    def state(self, site: str) -> Path:
        return self.folder / "s" / site

    def bits(self, name: str) -> dict[str, bytes]:
        """Return all that decides a run's numbers, server and sites together."""
        found = decisive(self.folder / "r" / name)
        for site in self.names:
            found |= decisive(self.state(site) / "runs" / name)
        return found

    def check_equal(
        self, name: str, reference: Path, *, disturbed: bool = False
    ) -> dict[str, bytes]:
        """Check that a run has the bits of one in this process; return them.

        Args:
            name: the run.
            reference: the folder of the other run.
            disturbed: whether messages were repeated or signed, which ledgers and records tell.
        """
        found, wanted = self.bits(name), decisive(reference)
        if disturbed:
            found, wanted = map(without_accounts, (found, wanted))
        assert found.keys() == wanted.keys()
        assert not [path for path in wanted if found[path] != wanted[path]]
        return found


TIMES = {"seconds", "time", "previous", "hash", "sha256"}
"""What differs between equal runs: times, and what is computed from lines that hold them."""


def decisive(run: Path) -> dict[str, bytes]:
    """Return states, models, scores, records and ledgers of a run by their paths in it.

    Keys of masks are random and do not affect the results, so that their file is left out.
    """
    found: dict[str, bytes] = {}
    for path in sorted(run.rglob("*")):
        inside = path.relative_to(run)
        outside = "outside" in inside.parts and path.name == "scores.json"
        decides = outside or {"server", "clients"} & set(inside.parts)
        if path.is_file() and decides and path.name not in ("ledgers.json", FILE):
            data = path.read_bytes()
            if path.name in {"records.jsonl", "ledger.jsonl", "test.json", "scores.json"}:
                lines = [json.loads(line) for line in data.splitlines()]
                rest = [{k: v for k, v in line.items() if k not in TIMES} for line in lines]
                data = json.dumps(rest).encode()
            found[str(inside)] = data
    return found


def without_accounts(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Leave out what tells of messages, and of the run's name."""
    return {
        path: evaluations_in(data) if Path(path).name == "records.jsonl" else data
        for path, data in files.items()
        if Path(path).name not in {"ledger.jsonl", "settings.json"}
    }


def evaluations_in(records: bytes) -> bytes:
    """Leave the evaluations of the records that `decisive` returned."""
    return json.dumps([line for line in json.loads(records) if "scores" in line]).encode()


@pytest.fixture(scope="session")
def make_federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Make federations with drawn images, whose processes end with the session at the latest."""
    made: list[RealFederation] = []

    def make(place: str = "phantom", cases: int = 10, **options: Any) -> RealFederation:
        real = RealFederation(tmp_path_factory.mktemp("f"), **options)
        made.append(real)
        real.draw_phantoms(place, cases)
        return real

    yield make
    for real in made:
        real.stop()


@pytest.fixture(scope="session")
def federation(make_federation: Any) -> RealFederation:
    """A federation whose processes run: the server and three sites."""
    real: RealFederation = make_federation()
    real.start()
    return real
