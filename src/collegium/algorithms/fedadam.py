"""FedAvg with Adam at the server (Reddi et al., 2021, https://arxiv.org/abs/2003.00295)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms import _server_optimizers
from collegium.algorithms._wrapping import wrapper
from collegium.algorithms.fedavg import FedAvg
from collegium.core.settings import settings


@settings
class FedAdam(_server_optimizers.FedAdam, FedAvg):
    """FedAvg whose server takes the mean update for a gradient in Adam (Algorithm 2).

    With Delta the mean of the clients' models less the model before the round,

        m = beta1 m + (1 - beta1) Delta,  v = beta2 v + (1 - beta2) Delta^2,
        x = x + server_lr m / (sqrt(v) + tau).

    There is no correction of the moments' bias, as in the paper; v starts at tau^2. Deviations: the
    paper's clients weigh by their examples or alike, here as the method says. Buffers are averaged.
    ``NAME+fedadam`` gives the same to any method that averages.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = None
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private_fits: ClassVar[int] = 1


on = wrapper(_server_optimizers.FedAdam, "Adam at the server", FedAdam.neutral)
"""Returns a method with this optimiser at the server, written ``NAME+fedadam``."""
