"""A federation of FLARE's own processes on this machine, for the benchmark of engines."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from common.echoes import DRIVER_SOCKET, peak_bytes
from nvflare.fuel.flare_api.flare_api import new_secure_session

from collegium.distributed.frames import Line, listen
from collegium.distributed.jobs import Coordinator, write_job
from collegium.distributed.kits import ADMIN, Kit, Provision, make_kits, read_kit, write_settings
from collegium.distributed.processes import relay_command, server_command

BENCHMARKS = Path(__file__).resolve().parents[1]


class LocalFederation:
    """Kits, FLARE's server, its client at every site, and what listens at the site's socket.

    Args:
        folder: where everything is kept; its path is short, since sockets are in it.
        sites: the sites' names.
        port: of the server.
        scheme: the protocol below mutual TLS.
        module: what listens at a site's socket.
    """

    def __init__(
        self,
        folder: Path,
        sites: tuple[str, ...],
        port: int,
        scheme: str,
        *,
        module: str = "common.echoes",
    ) -> None:
        self.folder, self.sites, self._module = folder, sites, module
        wanted = Provision("localhost", sites, port, scheme)  # type: ignore[arg-type]
        make_kits(folder / "kits", wanted)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def kit(self, role: str, name: str = "") -> Kit:
        """Return a participant's kit.

        Args:
            role: server, site or admin.
            name: a site's name.
        """
        place = Path("sites") / name if role == "site" else Path(role)
        return read_kit(self.folder / "kits" / place, role)

    def start(self) -> None:
        """Start everything, and wait until every site is connected."""
        server = self.kit("server")
        self._start_flare("server", server, *server_command(server))
        for site in self.sites:
            command = [sys.executable, "-m", self._module, str(self.socket(site))]
            self.spawn(f"site {site}", command, {})
            kit = self.kit("site", site)
            self._start_flare(f"relay {site}", kit, *relay_command(kit, self.socket(site)))
        coordinator = Coordinator(self.kit("admin"))
        there = coordinator.wait(self.sites, 60.0, 60.0)
        coordinator.close()
        if there != set(self.sites):
            raise RuntimeError(f"sites did not connect; see the logs in {self.folder}")

    def socket(self, site: str) -> Path:
        """Return the socket of a site process.

        Args:
            site: its name.
        """
        return self.folder / site / "site.sock"

    def _start_flare(
        self, name: str, kit: Kit, command: list[str], environment: Mapping[str, str]
    ) -> None:
        """Start a process of FLARE, whose jobs may name the bare echo's classes too."""
        write_settings(kit)
        path = kit.folder / "local" / "resources.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        found["class_allow_list"].append("common.echoes.")
        path.write_text(json.dumps(found), encoding="utf-8")
        self.spawn(name, command, environment)

    def spawn(self, name: str, command: list[str], environment: Mapping[str, str]) -> None:
        """Start a process that ends with this federation.

        Args:
            name: of the process and its log.
            command: what runs.
            environment: beside this process's own.
        """
        places = [str(BENCHMARKS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        found = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, places))}
        found[DRIVER_SOCKET] = str(self.folder / "driver.sock")
        with (self.folder / f"{name.replace(' ', '-')}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=found, stdout=log, stderr=log, start_new_session=True
            )

    def peaks(self) -> dict[str, int]:
        """Return the peaks of memory in bytes: of each process, and of each job process of it."""
        found: dict[str, int] = {}
        for name, process in self.processes.items():
            found[name] = peak_bytes(process.pid)
            for child in _children(process.pid):
                found[f"{name} job"] = max(peak_bytes(child), found.get(f"{name} job", 0))
        return found

    def stop(self) -> None:
        """End all processes, and those of jobs, which are in groups of their own."""
        for process in self.processes.values():
            for number in (process.pid, *_children(process.pid)):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()


class BareEcho:
    """The bare job, which exchanges a size when told to.

    Args:
        federation: where it runs.
    """

    def __init__(self, federation: LocalFederation) -> None:
        self._listener = listen(federation.folder / "driver.sock")
        self._listener.settimeout(90.0)
        job = federation.folder / "bare"
        write_job(job, federation.sites)
        for path in (job / "app" / "config").iterdir():
            text = path.read_text(encoding="utf-8")
            for name in ("Server", "Site"):
                text = text.replace(
                    f"collegium.distributed.relay.{name}Relay", f"common.echoes.Bare{name}"
                )
            path.write_text(text, encoding="utf-8")
        meta = json.loads((job / "meta.json").read_text(encoding="utf-8"))
        (job / "meta.json").write_text(json.dumps({**meta, "name": "bare"}), encoding="utf-8")
        with redirect_stdout(io.StringIO()):
            self._session = new_secure_session(ADMIN, str(federation.kit("admin").folder))
            self._session.submit_job(str(job))
        self._line = Line(self._listener.accept()[0])
        self._line.header()

    def exchange(self, size: int) -> dict[str, Any]:
        """Send a message to every site and back; return the seconds and the server's peak.

        Args:
            size: bytes of a message.
        """
        self._line.send({"size": size})
        return self._line.header()[0]

    def close(self) -> None:
        """End the job, and the session, which would ask a server that has ended for ever."""
        self._line.close()
        self._listener.close()
        self._session.close()


def _children(process: int) -> list[int]:
    """Return the processes that a process started, by whichever of its threads."""
    lists = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for path in lists for child in path.read_text(encoding="ascii").split()]
