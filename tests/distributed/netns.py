"""Network namespaces with addresses of their own, and a slow, lossy wire between them.

Every namespace has a TUN device. This process carries the packets from one to the other, after a
delay and with some left out, so that nothing is asked of the kernel but namespaces and TUN.
"""

import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1500


class NotPermitted(Exception):  # noqa: N818
    """This machine makes no network namespaces for us."""


class Network:
    """Namespaces with an address each, ``10.77.0.1`` and so on, and the wire between them.

    Args:
        names: the namespaces' names; the first is that of the server.
        host: the name under which all of them find the first.
        delay: seconds that a packet is on its way.
        loss: the share of packets that get lost.
        seed: of the generator that says which.
    """

    def __init__(
        self, names: Sequence[str], host: str, *, delay: float, loss: float, seed: int = 0
    ) -> None:
        self.names, self._host = list(names), host
        self._delay, self._loss = delay, loss
        self._random = random.Random(seed)
        self._devices: dict[bytes, int] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.carried = self.lost = 0

    def __enter__(self) -> "Network":
        if os.geteuid() != 0:
            raise NotPermitted("only root makes network namespaces")
        try:
            for number, name in enumerate(self.names, 1):
                self._add(name, f"10.77.0.{number}")
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            said = getattr(error, "stderr", None) or str(error)
            raise NotPermitted(f"no network namespaces: {said.strip()}") from error
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()
        self._remove()

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in a namespace, under the same process number."""
        return ["ip", "netns", "exec", name, *command]

    def _add(self, name: str, address: str) -> None:
        _ip("netns", "add", name)
        hosts = Path("/etc/netns") / name / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n10.77.0.1 {self._host}\n", encoding="ascii")
        device = f"{name[:12]}-t"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._devices[bytes(map(int, address.split(".")))] = descriptor
        fcntl.ioctl(
            descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI)
        )
        _ip("link", "set", device, "netns", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "address", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "mtu", str(MTU), "up")

    def _remove(self) -> None:
        for descriptor in self._devices.values():
            os.close(descriptor)
        self._devices.clear()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
            place = Path("/etc/netns") / name
            with suppress(OSError):
                (place / "hosts").unlink()
                place.rmdir()

    def _carry(self) -> None:
        """Take packets in, and pass each on when its time has come."""
        waiting: list[tuple[float, int, int, bytes]] = []
        number = 0
        descriptors = list(self._devices.values())
        while not self._stopped.is_set():
            pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
            for descriptor in select.select(descriptors, [], [], pause)[0]:
                for packet in _packets(descriptor):
                    target = self._devices.get(packet[16:20])
                    if target is None or packet[0] >> 4 != 4:
                        continue
                    if self._random.random() < self._loss:
                        self.lost += 1
                        continue
                    number += 1
                    due = time.monotonic() + self._delay
                    heapq.heappush(waiting, (due, number, target, packet))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(waiting)
                with suppress(OSError):  # a full queue loses a packet, as queues do
                    os.write(target, packet)
                    self.carried += 1


def _packets(descriptor: int, most: int = 64) -> list[bytes]:
    """Return the packets that wait at a device, up to some number."""
    found: list[bytes] = []
    with suppress(BlockingIOError):
        while len(found) < most:
            found.append(os.read(descriptor, MTU + 100))
    return found


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
