"""Distance-aware federated averaging for sites that differ.

Alekseenko, Karargyris and Padoy, MIDL 2024, https://proceedings.mlr.press/v250/alekseenko24a.html
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

from collegium.algorithms._distance_aware import DistanceAware
from collegium.algorithms._wrapping import wrap
from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Algorithm
from collegium.core.settings import settings


@settings
class Distance(DistanceAware, FedAvg):
    """FedAvg that measures the distances of the sites' data and trusts the most distant site less.

    Before training every site sends its cases' largest intensity per channel and volume per label
    (or embeddings). D_ij is the distance of sites i and j: the mean of the Wasserstein distances of
    the channel and of the label that differ most, or the Euclidean distance of mean embeddings.
    i_max = argmax_i sum_j D_ij is the most distant site. Then either (mode "weights")

        w = sum_i a_i w_i,  a_i = omega_i n_i / sum_j omega_j n_j,

    with omega_i = omega for i_max and 1 for the others, or (mode "clusters") i_max and its nearest
    sites train apart from the rest, each cluster by itself. Clusters may be written by hand.

    Deviations. Eq. 2 as printed is not normalised, which would shrink the model: a_i sums to 1.
    Eq. 1 is undefined for sites with different numbers of cases: the distance of the means is
    taken. Algorithm 1 as printed does not give the paper's own clusters of KITS (``cluster_rule``).
    The paper names no units (``units``, ``normalise``). Its omega of 0.1, 0.3 and 0.5 were chosen
    on the cases it reports: choose on validation cases.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"omega": 1.0, "mode": "weights"}


@cache
def on(method: type[Algorithm]) -> type[Algorithm]:
    """Return a method with the weights or clusters of `Distance`.

    In an experiment it is written with ``+distance`` after its name: ``fedprox+distance``. Weights
    need a method that averages by `collegium.core.algorithm.Replies.mean`.

    Raises:
        ConfigError: the method needs all data in one place, or is distance-aware already.
    """
    return wrap(method, DistanceAware, "distance-aware weights or clusters", {"omega": 1.0})
