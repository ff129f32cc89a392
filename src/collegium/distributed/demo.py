"""A federation on one machine: a server and three hospitals as processes of their own.

Every process is a command that somebody types on a machine of theirs in a real federation, and what
crosses between them crosses by NVIDIA FLARE over mutual TLS, here on the loopback interface.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from importlib.resources import files
from pathlib import Path

from collegium.core.files import write_atomically
from collegium.data.phantoms import make_federation
from collegium.distributed.frames import MAX_PATH
from collegium.distributed.jobs import Coordinator, ServerUnreachable
from collegium.distributed.kits import SETTINGS, Provision, make_kits, read_kit
from collegium.distributed.processes import SOCKET
from collegium.errors import ClientError, ConfigError

SITES = ("alder", "birch", "cedar")
"""The hospitals, as `collegium phantoms --sites 3` names them."""

HOST = "localhost"
"""Where the server listens: nobody outside this machine reaches it."""

CONNECT_SECONDS = 120.0
"""How long the sites may take until they are connected."""

STOP_SECONDS = 20.0
"""How long a process may take to end before it is killed."""

JOB_SECONDS = 2.0
"""How long FLARE's job processes may take to see that their parent has ended."""

SITE = """\
# What hospital {name} says of itself. Only its own process reads this file and the images.
name: {name}
data: {{manifest: {name}/manifest.csv}}
state: state/{name} # trained models, ledger, key to the pseudonyms
accept: all # every experiment; "listed": those that `collegium site accept` names
"""


def run_demo(folder: Path, say: Callable[[str], None], *, port: int | None = None) -> Path:
    """Run a federation in a folder, from its images to the report; what is there already stays.

    Args:
        folder: the folder of images, kits, logs, and of the run.
        say: called with every line about what is done.
        port: the server's; None: one that is free.

    Returns:
        The report.

    Raises:
        ConfigError: the folder's path is too long or holds something else, or the port is taken.
        ClientError: a process ended, the sites did not connect, or the run failed.
    """
    _check_length(folder)
    kits, hospitals, experiment = folder / "kits", folder / "hospitals", folder / "experiment.yaml"
    say(f"1. Three hospitals with images of their own: {hospitals}")
    _write_hospitals(hospitals)
    say(f"2. Start-up kits, which hold certificates and keys: {kits}")
    _make_kits(kits, port)
    _write_once(experiment, (files("collegium.distributed") / "demo.yaml").read_text("utf-8"))
    with Processes(folder / "logs", say) as processes:
        say(f"3. The server at {HOST}, port {read_kit(kits / 'server', 'server').port}")
        processes.start("server", "server", "start", kits / "server")
        say("4. The hospitals: a process that trains, and a relay that connects to the server")
        for name in SITES:
            arguments = (hospitals / f"{name}.yaml", "--kit", kits / "sites" / name)
            processes.start(name, "site", "start", *arguments)
        say("   they connect, which takes about 20 s")
        _wait_until_connected(kits / "admin", processes)
        say("5. The experiment")
        processes.run("run", experiment, f"output={folder / 'run'}")
    say("6. Server and hospitals are stopped; the report:")
    return folder / "run" / "report.html"


class Processes:
    """Commands that run beside this process, and end with the context at the latest.

    Each has a session of its own, so that Ctrl-C reaches this process alone, which ends the others
    in their order.

    Args:
        logs: the folder of what they say.
        say: called with every command.
    """

    def __init__(self, logs: Path, say: Callable[[str], None]) -> None:
        self._logs, self._say = logs, say
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *error: object) -> None:
        with _without_interrupts():
            _end([*reversed(self._running.values())])

    def start(self, name: str, *arguments: str | Path) -> None:
        """Start a command of `collegium` that goes on until it is ended.

        Args:
            name: the name of its log.
            *arguments: the command.
        """
        log = self._log(name)
        self._say(f"   collegium {' '.join(map(str, arguments))}   (log: {log})")
        with log.open("wb") as file:
            self._running[name] = _popen(arguments, stdout=file, stderr=subprocess.STDOUT)

    def run(self, *arguments: str | Path) -> None:
        """Run a command of `collegium` to its end; it writes where this process does.

        Args:
            *arguments: the command.

        Raises:
            ClientError: it failed.
        """
        self._say(f"   collegium {' '.join(map(str, arguments))}")
        process = self._running["run"] = _popen(arguments, stdout=subprocess.DEVNULL)
        code = process.wait()
        if code:
            raise ClientError(f"the run ended with exit code {code}; the logs are in {self._logs}")

    def check(self) -> None:
        """Check that all commands that were started run still.

        Raises:
            ClientError: one has ended.
        """
        for name, process in self._running.items():
            if process.poll() is not None:
                lines = self._log(name).read_text("utf-8", errors="replace").strip().splitlines()
                raise ClientError(
                    f"the process {name!r} ended with exit code {process.returncode} "
                    f"({lines[-1] if lines else 'it said nothing'}); see {self._log(name)}"
                )

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _popen(
    arguments: tuple[str | Path, ...],
    *,
    stdout: int | object,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "collegium.cli", *map(str, arguments)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,  # type: ignore[arg-type]
        stderr=stderr,
        start_new_session=True,
    )


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """End processes and all that they started; those that do not end when asked are killed."""
    import psutil  # FLARE needs it too

    started = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            started += psutil.Process(process.pid).children(recursive=True)
        process.terminate()
    until = time.monotonic() + STOP_SECONDS
    for process in processes:
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, until - time.monotonic()))
        process.kill()
        process.wait()
    for left in psutil.wait_procs(started, timeout=JOB_SECONDS)[1]:
        with suppress(psutil.NoSuchProcess):
            left.kill()


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore a second Ctrl-C, so that all processes are ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _check_length(folder: Path) -> None:
    sockets = [folder / "kits" / "server" / SOCKET]
    sockets += [folder / "hospitals" / "state" / name / "site.sock" for name in SITES]
    over = max(len(os.fsencode(path.resolve())) for path in sockets) - MAX_PATH
    if over > 0:
        raise ConfigError(
            f"the path of {folder} is {over} characters too long for the Unix sockets in it; name "
            f"a folder with a shorter path"
        )


def _write_hospitals(folder: Path) -> None:
    if not (folder / "federation.yaml").exists():
        make_federation(folder, len(SITES), cases=16, size=64)
    for name in SITES:
        _write_once(folder / f"{name}.yaml", SITE.format(name=name))


def _make_kits(folder: Path, port: int | None) -> None:
    if (folder / "server" / SETTINGS).exists():
        port = read_kit(folder / "server", "server").port
    chosen = _free_port(port)
    make_kits(folder, Provision(HOST, SITES, port=chosen))


def _free_port(port: int | None) -> int:
    """Return the port if nobody listens there; for None one that is free."""
    with closing(socket.socket()) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((HOST, port or 0))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"port {port} of {HOST} cannot be used ({error}); end what listens there, or name "
                f"another port and another folder"
            ) from error
        return int(tried.getsockname()[1])


def _write_once(path: Path, text: str) -> None:
    """Write a file unless it is there; who changed it keeps the change."""
    if not path.exists():
        write_atomically(path, text.encode())


def _wait_until_connected(admin: Path, processes: Processes) -> None:
    coordinator = Coordinator(read_kit(admin, "admin"))
    until = time.monotonic() + CONNECT_SECONDS
    seen: Mapping[str, float] = {}
    try:
        while set(SITES) - set(seen):
            processes.check()
            if time.monotonic() > until:
                raise ClientError(
                    f"{', '.join(sorted(set(SITES) - set(seen)))} did not connect within "
                    f"{CONNECT_SECONDS:g} s; see the logs"
                )
            time.sleep(0.5)
            with suppress(ServerUnreachable):
                seen = coordinator.connected()
    finally:
        coordinator.close()
