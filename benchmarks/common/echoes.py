"""Echoes on a site's socket and in FLARE's processes, for the benchmark of engines.

FLARE's processes import it by name, so it needs the standard library and FLARE only.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

DRIVER_SOCKET = "COLLEGIUM_BENCHMARK_SOCKET"
"""The environment variable that names the socket on which the benchmark waits for `BareServer`."""

if DRIVER_SOCKET in os.environ:
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # as in Collegium's relays

from nvflare.collab import collab  # noqa: E402

from collegium.distributed.frames import Line, listen  # noqa: E402

SECONDS = 600.0
"""How long anything may take."""


class BareSite:
    """The site's side of the bare job: returns what it is sent."""

    @collab.publish
    def handle(self, header: str, payload: bytes) -> list[Any]:
        """Return what came.

        Args:
            header: a text.
            payload: the message.
        """
        return [header, payload]


class BareServer:
    """The server's side of the bare job: sends every site a message of the requested size."""

    @collab.main
    def run(self) -> str:
        """Answer every line of the benchmark, which holds a size, by the seconds it took."""
        line = Line.connect(os.environ[DRIVER_SOCKET], None)
        line.send({"ready": True})
        with suppress(EOFError):
            while True:
                header, _ = line.header()
                payloads = [bytes([k]) * header["size"] for k in range(len(collab.clients))]
                line.send({"seconds": self._exchange(payloads), "peak": peak_bytes()})
        return ""

    def _exchange(self, payloads: list[bytes]) -> float:
        good: list[bool] = []

        def ask(site: Any, payload: bytes) -> None:
            found = site(timeout=SECONDS).handle("{}", payload)[1]
            good.append(len(found) == len(payload) and found[:1] == payload[:1])

        start = time.perf_counter()
        threads = [
            threading.Thread(target=ask, args=(site, payload))
            for site, payload in zip(collab.clients, payloads, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert good == [True] * len(payloads)
        return time.perf_counter() - start


def serve_echo(path: Path) -> None:
    """Listen at a site's socket, and send back what comes.

    Args:
        path: the socket.
    """
    server = listen(path)
    while True:
        sock, _ = server.accept()
        threading.Thread(target=_echo, args=(sock,), daemon=True).start()


def _echo(sock: socket.socket) -> None:
    line = Line(sock)
    with suppress(OSError, EOFError):
        _, data = line.receive(1 << 32)
        line.send({}, data)
    line.close()


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak of a process's memory, in bytes.

    Args:
        process: its number.
    """
    text = Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    serve_echo(Path(sys.argv[1]))
