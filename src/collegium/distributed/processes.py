"""The commands that FLARE's processes are started by, and the environment that they run in."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from collegium.distributed.kits import Kit, read_kit, write_settings
from collegium.distributed.relay import SERVER_SOCKET, SITE_SOCKET
from collegium.errors import StorageError

SOCKET = "collegium.sock"
"""The file of a server's kit on which `collegium run` listens."""

PROGRESS = "progress.json"
"""The file of a server's kit in which `collegium run` writes where it stands."""

RELAY_PAUSE = 5.0
"""Seconds before a relay that ended is started again."""

ALLOCATOR = {
    "MALLOC_ARENA_MAX": "4",
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}
"""glibc keeps the memory of pieces for the next ones, instead of asking the system for each."""


def server_command(kit: Kit) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs FLARE's server in the foreground, and its environment.

    Args:
        kit: the server's kit.
    """
    command = _command(kit, "server.server_train", "fed_server.json", {})
    return command, _environment({SERVER_SOCKET: str(kit.folder / SOCKET)})


def relay_command(kit: Kit, socket: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs FLARE's client at a site, and its environment.

    Args:
        kit: the site's kit.
        socket: the socket of the site process.
    """
    command = _command(kit, "client.client_train", "fed_client.json", {"uid": kit.name})
    return command, _environment({SITE_SOCKET: str(socket.resolve())})


@contextmanager
def relay_beside(kit: Kit, socket: Path) -> Iterator[None]:
    """Run a site's relay beside this process, started again where it ends.

    A relay that runs already, of a site process that ended, is left in place.

    Args:
        kit: the site's kit.
        socket: the socket of the site process.
    """
    stopped = threading.Event()
    running: list[subprocess.Popen[bytes]] = []

    def keep_running() -> None:
        while not stopped.is_set():
            with suppress(StorageError):  # it runs already
                os.close(hold(kit))
                command = [sys.executable, "-m", "collegium.distributed.processes"]
                running[:] = [subprocess.Popen([*command, str(kit.folder), str(socket.resolve())])]
                running[0].wait()
            stopped.wait(RELAY_PAUSE)

    threading.Thread(target=keep_running, daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        for process in running:
            process.terminate()


def replace_process(kit: Kit, command: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Write the kit's settings, and become FLARE's process.

    Only one process may use a kit: two would take each other's messages.

    Args:
        kit: the kit.
        command: the command.
        environment: its environment.

    Raises:
        StorageError: another process uses the kit.
    """
    hold(kit)
    write_settings(kit)
    os.chdir(kit.folder)
    os.execve(command[0], command, dict(environment))


def hold(kit: Kit) -> int:
    """Take a kit's lock for this process and the one that it becomes; return its descriptor.

    Args:
        kit: the kit.

    Raises:
        StorageError: another process holds it.
    """
    import fcntl

    descriptor = os.open(kit.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StorageError(f"another process uses the kit {kit.folder}; end it first") from error
    os.set_inheritable(descriptor, True)
    return descriptor


def _command(kit: Kit, module: str, config: str, settings: Mapping[str, str]) -> list[str]:
    given = {"secure_train": "true", **settings, "org": "collegium", "config_folder": "config"}
    return [
        sys.executable,
        "-u",
        "-m",
        f"nvflare.private.fed.app.{module}",
        "-m",
        str(kit.folder),
        "-s",
        config,
        "--set",
        *(f"{key}={value}" for key, value in given.items()),
    ]


def _environment(values: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **ALLOCATOR, **values}


if __name__ == "__main__":  # the relay of `relay_beside`
    site_kit = read_kit(Path(sys.argv[1]), "site")
    replace_process(site_kit, *relay_command(site_kit, Path(sys.argv[2])))
