"""Collegium in a comparison of federated frameworks, whose other scripts lie in one folder.

Copy this file there, or put that folder on PYTHONPATH, and run it as its README says.
"""

import time
from itertools import pairwise
from typing import Any

import common as C  # noqa: N812  (the comparison's own name for it)
import torch

from collegium import FedAvg, Site, SupervisedTask, TensorDataset, TrainingConfig, simulate

marks: list[float] = []


class Timed(SupervisedTask):
    """Notes when the first training step begins."""

    def loss(self, output: Any, batch: Any) -> Any:
        """Give the loss."""
        if not marks:
            marks.extend((C.proc_start_s(), time.perf_counter()))
        return super().loss(output, batch)


nothing = TensorDataset({})
sites = []
for client in range(C.N_CLIENTS):
    image, label = C.make_data(client)
    sites.append(
        Site(f"site-{client}", TensorDataset({"image": image, "label": label}), nothing, nothing)
    )
result = simulate(
    FedAvg(),
    sites,
    C.make_model,
    Timed(torch.nn.functional.binary_cross_entropy_with_logits),
    rounds=C.ROUNDS,
    training=TrainingConfig(optimizer="sgd", lr=C.LR, batch_size=C.BATCH),
    evaluate_every=C.ROUNDS,
    threads=2,
    observe=lambda record: marks.append(time.perf_counter()),
)
ends = marks[1 : C.ROUNDS + 2]
rounds = [end - start for start, end in pairwise(ends)]
C.report("ours", marks[0], rounds, C.final_loss(dict(result.model)), torch=torch.__version__)
