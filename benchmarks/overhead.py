"""What the library costs over a bare training loop.

The work is that of a well-known comparison of federated frameworks: 6 clients with 96 synthetic
64x64 images each, batches of 16, one local epoch, SGD with learning rate 0.01, two threads. Every
run is a process of its own; bare and ours take turns, and medians are compared.

    python benchmarks/overhead.py [--quick] [--runs 5] [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

CLIENTS, EXAMPLES, SIZE, BATCH, LR = 6, 96, 64, 16, 0.01

TARGETS = {"later rounds": 1.05, "whole process": 1.2, "peak memory": 1.15}
START_UP_SECONDS = 2.0


def since_start() -> float:
    """Return the seconds since this process was made, imports included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def make_network() -> Any:
    """Return a U-Net with two levels and 8, 16 and 32 channels."""
    import torch
    from torch import nn

    def block(inputs: int, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [
                nn.Conv2d(channels, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(),
            ]
        return nn.Sequential(*layers)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down1, self.down2, self.bottom = block(1, 8), block(8, 16), block(16, 32)
            self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
            self.merge2, self.merge1 = block(32, 16), block(16, 8)
            self.out = nn.Conv2d(8, 1, 1)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            first = self.down1(image)
            second = self.down2(nn.functional.max_pool2d(first, 2))
            bottom = self.bottom(nn.functional.max_pool2d(second, 2))
            up = self.merge2(torch.cat([self.up2(bottom), second], 1))
            logits: torch.Tensor = self.out(self.merge1(torch.cat([self.up1(up), first], 1)))
            return logits

    torch.manual_seed(0)
    return Network()


def make_data(client: int) -> tuple[Any, Any]:
    """Return discs on noise, brighter from client to client, and their masks."""
    import torch

    rng = torch.Generator().manual_seed(1000 + client)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    x, y, radius = (
        torch.rand(3, EXAMPLES, 1, 1, generator=rng) * torch.tensor([32, 32, 8]).view(3, 1, 1, 1)
    ).unbind(0)
    mask = ((columns - x - 16) ** 2 + (rows - y - 16) ** 2 < (radius + 6) ** 2).float()[:, None]
    image = mask * (1 + 0.2 * client) + 0.5 * torch.randn(mask.shape, generator=rng)
    return image, mask


def run_bare(rounds: int) -> dict[str, Any]:
    """Train by the plainest loop that does the same."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    torch.set_num_threads(2)
    data = [TensorDataset(*make_data(client)) for client in range(CLIENTS)]
    network, loss = make_network(), torch.nn.BCEWithLogitsLoss()
    model = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    started, seconds = since_start(), []
    for _ in range(rounds):
        start = time.perf_counter()
        total: dict[str, Any] = {}
        for examples in data:
            network.load_state_dict(model)
            network.train()
            optimizer = torch.optim.SGD(network.parameters(), lr=LR)
            for image, mask in DataLoader(examples, batch_size=BATCH, shuffle=True):
                optimizer.zero_grad()
                loss(network(image), mask).backward()
                optimizer.step()
            for name, tensor in network.state_dict().items():
                total[name] = total.get(name, 0) + tensor.double() / CLIENTS
        model = {name: tensor.to(model[name].dtype) for name, tensor in total.items()}
        seconds.append(time.perf_counter() - start)
    return {"start": started, "rounds": seconds, "loss": final_loss(model)}


def run_ours(rounds: int) -> dict[str, Any]:
    """Train through the library, every round committed to disk."""
    import torch

    from collegium import FedAvg, Site, SupervisedTask, TensorDataset, TrainingConfig, simulate

    marks: list[float] = []

    class Timed(SupervisedTask):
        def loss(self, output: Any, batch: Any) -> Any:
            if not marks:
                marks.extend((since_start(), time.perf_counter()))
            return super().loss(output, batch)

    nothing = TensorDataset({})
    sites = [
        Site(
            f"site-{k}",
            TensorDataset(dict(zip(("image", "label"), make_data(k), strict=True))),
            nothing,
            nothing,
        )
        for k in range(CLIENTS)
    ]
    result = simulate(
        FedAvg(),
        sites,
        make_network,
        Timed(torch.nn.functional.binary_cross_entropy_with_logits),
        rounds=rounds,
        training=TrainingConfig(optimizer="sgd", lr=LR, batch_size=BATCH),
        evaluate_every=rounds,
        threads=2,
        observe=lambda record: marks.append(time.perf_counter()),
    )
    assert result.model is not None
    ends = marks[1 : rounds + 2]
    seconds = [end - start for start, end in pairwise(ends)]
    return {"start": marks[0], "rounds": seconds, "loss": final_loss(dict(result.model))}


def final_loss(model: dict[str, Any]) -> float:
    """Return the mean loss over all clients' data: the check that the work was done."""
    import torch

    network = make_network()
    network.load_state_dict(model)
    network.eval()
    total = 0.0
    with torch.no_grad():
        for client in range(CLIENTS):
            image, mask = make_data(client)
            total += float(
                torch.nn.functional.binary_cross_entropy_with_logits(network(image), mask)
            )
    return total / CLIENTS


def child(kind: str, rounds: int) -> None:
    """Run one kind and print what it took."""
    result = (run_bare if kind == "bare" else run_ours)(rounds)
    result["whole"] = since_start()
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps(result))


def measure(kind: str, rounds: int) -> dict[str, Any]:
    """Run one kind in a process of its own."""
    environment = os.environ | {
        "OMP_WAIT_POLICY": "passive",
        "OMP_NUM_THREADS": "2",
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, __file__, "--child", kind, "--rounds", str(rounds)]
    output = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    ).stdout
    return dict(json.loads(output.splitlines()[-1]))


def main() -> int:
    """Compare, print and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two runs of three rounds")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=("bare", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.rounds)
        return 0
    runs, rounds = (2, 3) if options.quick else (options.runs, options.rounds)
    found: dict[str, list[dict[str, Any]]] = {"bare": [], "ours": []}
    for number in range(runs):
        for kind in ("bare", "ours") if number % 2 == 0 else ("ours", "bare"):
            found[kind].append(measure(kind, rounds))
    median = {
        kind: {
            "later rounds": statistics.median(min(r["rounds"][1:]) for r in results),
            "whole process": statistics.median(r["whole"] for r in results),
            "peak memory": statistics.median(r["memory"] for r in results),
            "start": statistics.median(r["start"] for r in results),
            "loss": results[-1]["loss"],
        }
        for kind, results in found.items()
    }
    print(f"{'':14}{'bare':>10}{'ours':>10}{'ratio':>8}")
    for name in ("start", *TARGETS, "loss"):
        bare, ours = median["bare"][name], median["ours"][name]
        print(f"{name:14}{bare:10.3f}{ours:10.3f}{ours / bare:8.3f}")
    ratios = {name: median["ours"][name] / median["bare"][name] for name in TARGETS}
    start = median["ours"]["start"]
    good = (
        all(ratios[name] <= target for name, target in TARGETS.items())
        and start <= START_UP_SECONDS
    )
    figures = ", ".join(f"{name} {ratios[name]:.3f}" for name in TARGETS)
    targets = ", ".join(f"{target}" for target in TARGETS.values())
    print(
        f"overhead: {figures}, start-up {start:.2f} s "
        f"(target {targets}, {START_UP_SECONDS} s): {'ok' if good else 'short'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
