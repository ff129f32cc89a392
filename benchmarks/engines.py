"""Measures time and memory of Collegium's engine over NVIDIA FLARE against FLARE alone.

Three sites are sent a message each, every one a different message, and send the same back; nothing
is trained. All of it is real: FLARE's server, its client at every site, mutual TLS on loopback, and
a process at every site's socket. "Bare" is a job of FLARE whose object at the server calls that of
the sites (`nvflare.collab`) with the whole message at once; it ends in FLARE's processes, where
ours goes on to `collegium run` and to the site processes. The two take turns in one federation.
Beside them stands the in-process engine with the same bytes, and Flower's simulation with --flower
(`python -m venv flower; flower/bin/pip install 'flwr[simulation]' numpy`).

Without --quick also: the peaks of memory with messages of 500 MB, of the relays and of site
processes that unpack the message and pack it again; and by how much the memory of `collegium run`
grows from six sites to nine; up to five messages are held at once, for fewer sites fewer.

    python benchmarks/engines.py [--quick] [--scheme grpc] [--port 18300] [--flower PYTHON]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from common.echoes import peak_bytes
from common.flare import BareEcho, LocalFederation
from common.measuring import in_turns, medians, verdict

from collegium.distributed.connection import Call, Connection
from collegium.distributed.jobs import Coordinator
from collegium.distributed.kits import read_kit
from collegium.distributed.processes import SOCKET
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.requests import Request

SITES = ("alder", "birch", "cedar", "dogwood", "elm", "fir", "ginkgo", "hazel", "ivy")
MB = 10**6
RATIO, SECONDS = 1.25, 0.1
BIG = 500
RELAY, SITE, GROWTH = 0.7, 4.0, 0.5
"""The most that a relay takes in GB, a site process in messages, one more site at the driver."""


def connect(kits: Path, sites: Iterable[str]) -> Connection:
    """Return a connection to sites, as `collegium run` makes it.

    Args:
        kits: the folder of the kits.
        sites: the sites' names.
    """
    return Connection(
        Coordinator(read_kit(kits / "admin", "admin")),
        kits / "server" / SOCKET,
        list(sites),
        deadline=600.0,
        patience=60.0,
    )


Messages = Iterable[tuple[str, bytes]]


def messages(sites: Iterable[str], size: int) -> Iterator[tuple[str, bytes]]:
    """Yield a message of its own for every site.

    Args:
        sites: their names.
        size: bytes of a message.
    """
    for number, site in enumerate(sites):
        yield site, bytes([number]) * size


def exchange(connection: Connection, sent: Messages) -> None:
    """Send messages, and check that they come back.

    Args:
        connection: to the sites.
        sent: the messages, by site.
    """
    ends: dict[str, tuple[int, bytes]] = {}

    def calls() -> Iterator[Call]:
        for site, payload in sent:
            ends[site] = len(payload), payload[:1]
            yield Call(site, {}, payload)

    for answer in connection.ask(calls()):
        assert not answer.missing, answer.missing
        assert (len(answer.data), answer.data[:1]) == ends.pop(answer.site)
        del answer
    assert not ends


class Echo:
    """A client of the in-process engine."""

    signed = None

    def handle(self, request: Request) -> bytes:
        """Return what came."""
        return request.payload


def exchange_in_process(sent: Messages) -> None:
    """Do the same as `exchange` by the in-process engine.

    Args:
        sent: the messages, by site.
    """
    engine = InProcess(lambda: {site: Echo() for site in SITES}, 1, 1)
    requests = (Request(site, 1, 0, "train", "echo", payload) for site, payload in sent)
    for response in engine.exchange(requests):
        assert response.data
    engine.close()


def measure_speed(federation: LocalFederation, sizes: Mapping[int, int]) -> bool:
    """Time the engines in turns, print, and return whether the targets are reached.

    Args:
        federation: where they run.
        sizes: the sizes in MB, and how often each is timed.
    """
    sites, good = federation.sites, True
    connection = connect(federation.folder / "kits", sites)
    exchange(connection, messages(sites, 1))  # the job starts
    bare = BareEcho(federation)
    print(f"{'MB':>4}{'bare':>9}{'flare':>9}{'more':>9}{'ratio':>7}{'in-process':>12}  seconds")
    for size, repetitions in sizes.items():
        sent = list(messages(sites, size * MB))  # as in the bare job, they are made before
        inside: list[float] = []  # what the object at the server measured
        works = {
            "bare": partial(_ask_bare, bare, size * MB, inside),
            "flare": partial(exchange, connection, sent),
            "in-process": partial(exchange_in_process, sent),
        }
        found = in_turns(works, repetitions)
        found["bare"] = inside[1:]
        took = medians(found)
        more, ratio = took["flare"] - took["bare"], took["flare"] / took["bare"]
        print(
            f"{size:4d}{took['bare']:9.3f}{took['flare']:9.3f}{more:9.3f}{ratio:7.2f}"
            f"{took['in-process']:12.4f}"
        )
        if size < 30:
            good &= verdict(f"engines, {size} MB, flare less bare", more, SECONDS, "s")
        else:
            good &= verdict(f"engines, {size} MB, flare by bare", ratio, RATIO)
    bare.close()
    connection.close()
    return good


def _ask_bare(bare: BareEcho, size: int, seconds: list[float]) -> None:
    seconds.append(float(bare.exchange(size)["seconds"]))


def drive(kits: Path, sites: list[str], size: int, kind: str) -> None:
    """Exchange messages twice as a process of its own, and print its peak of memory.

    Args:
        kits: the folder of the kits.
        sites: the sites' names.
        size: bytes of a message.
        kind: "bytes", or "model" for a message that sites can unpack.
    """
    connection = connect(kits, sites)
    for _ in range(2):
        if kind == "bytes":
            exchange(connection, messages(sites, size))
        else:
            exchange_models(connection, sites, size)
    connection.close()
    print(json.dumps(peak_bytes()))


def exchange_models(connection: Connection, sites: Iterable[str], size: int) -> None:
    """Send every site a model, which it unpacks, packs and sends back.

    Args:
        connection: to the sites.
        sites: their names.
        size: bytes of the model.
    """
    import torch

    from collegium.core.message import pack
    from collegium.core.tensors import Tensors

    layers = 50

    def calls() -> Iterator[Call]:
        for number, site in enumerate(sites):
            layer = torch.full((size // (4 * layers),), float(number))
            model = Tensors({f"layer{k}": layer.clone() for k in range(layers)})
            yield Call(site, {}, pack({"model": model}))

    for answer in connection.ask(calls()):
        assert not answer.missing, answer.missing
        assert len(answer.data) >= size
        del answer


def in_own_process(federation: LocalFederation, sites: Iterable[str], size: int, kind: str) -> int:
    """Return the peak of memory of a process that exchanges messages; see `drive`.

    Args:
        federation: where.
        sites: the sites that are asked.
        size: bytes of a message.
        kind: see `drive`.
    """
    kits = str(federation.folder / "kits")
    command = [sys.executable, __file__, "--drive", kits, ",".join(sites), str(size), kind]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def measure_growth(federation: LocalFederation, size: int) -> bool:
    """Print by how much the driver's memory grows from six sites to nine, in messages.

    Args:
        federation: nine sites.
        size: bytes of a message.
    """
    few, many = (in_own_process(federation, federation.sites[:n], size, "bytes") for n in (6, 9))
    print(f"peak of collegium run: {few / MB:.0f} MB with 6 sites, {many / MB:.0f} MB with 9")
    growth = (many - few) / size / 3
    return verdict("engines, collegium run, for a further site", growth, GROWTH, "messages")


def measure_big(federation: LocalFederation) -> bool:
    """Print the peaks of memory with big messages.

    Args:
        federation: three sites that pack and unpack.
    """
    start = time.perf_counter()
    driver = in_own_process(federation, federation.sites, BIG * MB, "model")
    seconds = time.perf_counter() - start
    peaks = federation.peaks()
    relay = max(peak for name, peak in peaks.items() if name.startswith("relay"))
    site = max(peak for name, peak in peaks.items() if name.startswith("site"))
    print(
        f"two exchanges of {BIG} MB: {seconds:.0f} s with the job's start; peaks in MB: collegium "
        f"run {driver / MB:.0f}, server's job {peaks['server job'] / MB:.0f}, server "
        f"{peaks['server'] / MB:.0f}, relays {relay / MB:.0f}, site processes {site / MB:.0f}"
    )
    good = verdict(f"engines, relay, {BIG} MB", relay / 1e9, RELAY, "GB")
    return verdict(f"engines, site process, {BIG} MB", site / (BIG * MB), SITE, "messages") and good


def measure(options: argparse.Namespace, folder: Path) -> bool:
    """Measure everything; return whether all targets are reached.

    Args:
        options: the command line's.
        folder: an empty folder.
    """
    parts: list[tuple[tuple[str, ...], str, Any]] = []
    sizes = {1: 9, 30: 5} if options.quick else {1: 15, 30: 9, 120: 7}
    parts.append((SITES[:3], "echoes", lambda where: measure_speed(where, sizes)))
    if not options.quick:
        parts.append((SITES, "echoes", lambda where: measure_growth(where, 120 * MB)))
        parts.append((SITES[:3], "packing", measure_big))
    good = True
    for number, (sites, module, work) in enumerate(parts):
        place = folder / str(number)
        place.mkdir()
        federation = LocalFederation(
            place, sites, options.port + number, options.scheme, module=f"common.{module}"
        )
        try:
            federation.start()
            good &= work(federation)
        finally:
            federation.stop()
    return good


def measure_flower(python: str, repetitions: int) -> None:
    """Print what Flower's simulation takes for the same messages.

    Args:
        python: the interpreter of the environment that holds it.
        repetitions: how often each size is timed.
    """
    script = Path(__file__).parent / "peers" / "flower_echo.py"
    command = [python, "-W", "ignore", str(script), "1,30,120", str(repetitions)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    for size, seconds in json.loads(lines[0]).items():
        print(f"Flower's simulation: {size} MB {seconds:.3f} s")


def main() -> int:
    """Compare, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1 and 30 MB, and no memory")
    parser.add_argument("--scheme", choices=("grpc", "tcp"), default="grpc")
    parser.add_argument("--port", type=int, default=18300)
    parser.add_argument("--flower", metavar="PYTHON", help="of an environment that holds Flower")
    parser.add_argument("--drive", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        kits, sites, size, kind = options.drive
        drive(Path(kits), sites.split(","), int(size), kind)
        return 0
    if options.flower:
        measure_flower(options.flower, 2 if options.quick else 9)
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        good = measure(options, Path(folder))
    print(f"engines: all of the above (target {RATIO}, {SECONDS} s): {'ok' if good else 'short'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
