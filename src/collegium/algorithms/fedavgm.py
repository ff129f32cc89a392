"""FedAvg with momentum at the server (Hsu et al., 2019, https://arxiv.org/abs/1909.06335)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms import _server_optimizers
from collegium.algorithms._wrapping import wrapper
from collegium.algorithms.fedavg import FedAvg
from collegium.core.settings import settings


@settings
class FedAvgM(_server_optimizers.FedAvgM, FedAvg):
    """FedAvg whose server moves by a running sum of the mean updates.

    With Delta the mean of the clients' models less the model before the round,

        v = momentum v + Delta,  x = x + server_lr v  (Section 4.3).

    Buffers are averaged and take no step, since beyond their mean running variances could become
    negative. ``NAME+fedavgm`` gives the same to any method that averages.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"momentum": 0.0, "server_lr": 1.0}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private_fits: ClassVar[int] = 1


on = wrapper(_server_optimizers.FedAvgM, "momentum at the server", FedAvgM.neutral)
"""Returns a method with this optimiser at the server, written ``NAME+fedavgm``."""
