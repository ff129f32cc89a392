"""Peak memory of the server side with 400 clients against 4: a model of 8 million parameters.

The clients answer at once, all with the same bytes, so that what is measured is the server. Every
measurement is a process of its own, in which large blocks of memory go back to the system when they
are freed; otherwise the C library keeps up to two models of them, from some 20 clients on. Medians
of three are compared.

    python benchmarks/server_memory.py [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

MODELS = 1.5
PARAMETERS = 8_000_000


def child(clients: int) -> None:
    """Run two rounds of FedAvg with clients that answer at once, and print the peak memory."""
    import torch

    from collegium import FedAvg
    from collegium.core.message import pack
    from collegium.core.model_parts import find_parts
    from collegium.core.tensors import Tensors
    from collegium.runtime.process import prepare
    from collegium.runtime.requests import Request, Response, origin_of
    from collegium.runtime.server import ServerRuntime

    prepare(threads=2)
    network = torch.nn.Sequential(
        *(torch.nn.Linear(1000, 1000, bias=False) for _ in range(PARAMETERS // 1_000_000))
    )

    parts = {"model": Tensors(network.state_dict()), "num_examples": 10}

    class Clients:
        def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
            for request in requests:
                reply = pack({"reply": parts, "of": origin_of(request)})
                yield Response(request.client, reply, 0.0)

        def close(self) -> None:
            pass

    with tempfile.TemporaryDirectory() as folder:
        server = ServerRuntime(
            FedAvg(),
            [f"site-{k:03d}" for k in range(clients)],
            lambda k: Tensors(network.state_dict()),
            find_parts(network),
            Clients(),
            Path(folder),
        )
        server.begin()
        server.advance()
        server.advance()
    print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))


def measure(clients: int) -> int:
    """Return the peak memory in bytes with this many clients."""
    command = [sys.executable, __file__, "--child", str(clients)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )  # fmt: skip
    return int(done.stdout)


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 clients instead of 400")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return 0
    many = 100 if options.quick else 400
    model = 4 * PARAMETERS
    found = [(measure(4), measure(many)) for _ in range(2 if options.quick else 3)]
    few, lots = (statistics.median(peaks) for peaks in zip(*found, strict=True))
    print(f"  4 clients: peak {few / 1e6:.0f} MB")
    print(f"{many:3d} clients: peak {lots / 1e6:.0f} MB; a model is {model / 1e6:.0f} MB")
    more = (lots - few) / model
    good = more <= MODELS
    print(f"server_memory: {more:.2f} models more (target {MODELS}): {'ok' if good else 'short'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
