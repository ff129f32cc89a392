"""FedAvg with a robust mean: the median, the trimmed mean, a bound on the norm, or Krum.

Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498 (median, trimmed mean); Sun et al., 2019,
https://arxiv.org/abs/1911.07963 (bounded norm); Blanchard et al., NeurIPS 2017,
https://papers.nips.cc/paper/6617-machine-learning-with-adversaries-byzantine-tolerant-gradient-descent
(Krum).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from collegium.algorithms._robust_means import RobustMean
from collegium.algorithms._wrapping import wrapper
from collegium.algorithms.fedavg import FedAvg
from collegium.core.settings import settings


@settings
class Robust(RobustMean, FedAvg):
    """FedAvg whose server takes a robust mean, so that a few hostile sites cannot move it at will.

    The rule is one of these, over the models of the n sites that trained and answered:

    - "median": of each coordinate the median. Sites weigh alike.
    - "trimmed_mean": of each coordinate the mean without the floor(trim n) largest and as many
      smallest values. Sites weigh alike.
    - "norm_bound": updates longer than M are shortened to M, and the mean is that of the method,
      weighted by examples unless ``weighting`` says otherwise. M is ``factor`` times the median
      length of the round's updates, or ``bound``.
    - "krum": the model with the least sum of squared distances to its n - hostile - 2 closest
      ones, or the mean of the ``selected`` such models (Multi-Krum), which weigh alike; equal sums
      are told apart by the further distances, not by names. Needs 2 hostile + 3 sites.

    The first two and Krum ignore how many examples a site says it has, as in the papers: the count
    is a site's own word, and with it one site could outweigh the rest. Sites without training
    examples do not count. All need all replies at once: the memory of n models instead of one
    sum. `NAME+robust` gives the same to any method whose server uses nothing but means of models.

    Deviations. The papers take rules of gradients or updates; medians, trimmed means and distances
    of models are the same, since all sites start from one model. They have no buffers: running
    statistics are treated as parameters by median and trimmed mean, have a bound of their own
    (always ``factor`` times their median) in "norm_bound", and in Krum the squared distances of
    parameters and of buffers are divided by their medians over all pairs and added. Integer
    counters are never averaged: the lower median by "median" and "trimmed_mean", otherwise the
    maximum over the sites that count. Sun et al. also add noise; nothing is added here.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = None
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    private_fits: ClassVar[int] = 1


on = wrapper(RobustMean, "a robust mean", None)
"""Returns a method with a robust mean at the server, written ``NAME+robust``."""
