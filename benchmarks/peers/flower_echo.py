"""Seconds that Flower's simulation takes to send three sites a message and to get it back.

It needs Flower alone (`pip install 'flwr[simulation]' numpy`), in an environment of its own, and is
called by `engines.py --flower PYTHON`; it prints a line of JSON.

    python flower_echo.py SIZES ROUNDS    (sizes in MB, separated by commas)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

SITES = 3
client, server = ClientApp(), ServerApp()


@client.train()
def echo(message: Message, _: Context) -> Message:
    """Return what came."""
    return Message(content=message.content, reply_to=message)


@server.main()
def drive(grid: Grid, _: Context) -> None:
    """Exchange messages of every size, each site another one, and print the medians."""
    while len(nodes := list(grid.get_node_ids())) < SITES:
        time.sleep(0.1)
    rng, found = np.random.default_rng(0), {}
    for size in map(int, sys.argv[1].split(",")):
        arrays = [np.frombuffer(rng.bytes(size * 10**6), dtype=np.uint8) for _ in nodes]
        times = []
        for _ in range(int(sys.argv[2]) + 1):
            start = time.perf_counter()
            sent = [
                Message(
                    content=RecordDict({"arrays": ArrayRecord({"model": Array(array)})}),
                    dst_node_id=node,
                    message_type="train",
                )
                for node, array in zip(nodes, arrays, strict=True)
            ]
            replies = list(grid.send_and_receive(sent))
            if len(replies) < SITES or any(reply.has_error() for reply in replies):
                raise SystemExit(f"Flower lost messages of {size} MB")
            times.append(time.perf_counter() - start)
        found[size] = statistics.median(times[1:])  # the first starts the sites' processes
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=SITES, backend_config=resources)
