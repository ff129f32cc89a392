"""FedAvg with Adam at the server (Reddi et al., 2021, https://arxiv.org/abs/2003.00295)."""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from collegium.algorithms import _server_optimizers
from collegium.algorithms._wrapping import wrap
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Algorithm
from collegium.core.settings import settings

NEUTRAL: Mapping[str, Any] | None = None


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

    neutral: ClassVar[Mapping[str, Any] | None] = NEUTRAL


@cache
def on(method: type[Algorithm]) -> type[Algorithm]:
    """Return a method with this optimiser at the server, written ``NAME+fedadam``.

    Raises:
        ConfigError: the method needs all data in one place, or has one already.
    """
    return wrap(method, _server_optimizers.FedAdam, "Adam at the server", NEUTRAL)
