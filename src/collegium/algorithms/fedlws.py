"""FedLWS (ICLR 2025, https://arxiv.org/abs/2503.15111)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Server
from collegium.core.settings import NonNegative, settings
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError


@settings
class FedLWS(FedAvg):
    """FedAvg whose server shrinks each layer, the more the less its clients agree.

    With w^ the mean of the clients' models, w the model that they received, N clients, and for each
    layer l the updates g_i = w_i - w and their plain mean gbar:

        tau_l = clip(beta/N sum_i ||g_i - gbar||, tau_min, tau_max)
        gamma_l = ||w_l|| / (||w_l|| + tau_l ||w^_l - w_l||),  w_l <- gamma_l w^_l

    A layer is one module's own trainable parameters, weight and bias together. Shrinking adds up
    over rounds, and norms grow with the size of a layer, so that beta has no scale of its own.

    What could be read: the abstract, a copy of the released code and a benchmark's version. The
    equations are the code's: summaries of the paper have the squared norm in tau_l and no clip.
    Deviations from the code. There a layer is all tensors up to the next bias, so that running
    statistics and counters are shrunk with the layer that follows: here buffers are FedAvg's and
    never shrunk. Normalisation layers have gamma = 1 unless ``shrink_norm`` is set. A layer whose
    w_l is 0, such as one that starts at 0, would stay there for ever: its gamma is 1. A client
    without training examples counts in no mean.

    Attributes:
        beta: strength.
        tau_min: least tau_l. With beta and tau_min at 0 the method is FedAvg.
        tau_max: largest tau_l.
        shrink_norm: whether scale and shift of normalisation layers are shrunk as well.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"beta": 0.0, "tau_min": 0.0}

    beta: NonNegative = 0.03
    tau_min: NonNegative = 0.01
    tau_max: NonNegative = 0.2
    shrink_norm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tau_min > self.tau_max:
            raise ConfigError(
                f"tau_min is {self.tau_min:g}, above tau_max, which is {self.tau_max:g}; exchange "
                f"them"
            )

    def round(self, server: Server) -> None:
        """Average and shrink; the gamma_l of the round stay in ``server.state["gamma"]``."""
        w = server.state["model"]
        replies = server.ask(self.train, model=w).collect()
        average = replies.mean("model", self.weight)  # w^
        counts = replies.weights(self.weight)
        models = [message["model"] for client, message in replies if counts[client] > 0]
        kept = frozenset() if self.shrink_norm else server.parts.norm
        layers: dict[str, list[str]] = {}
        for name in average.select(server.parts.trainable - kept).distinct():
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        server.state["gamma"] = {
            layer: self.gamma(
                [model.select(names) for model in models], average.select(names), w.select(names)
            )
            for layer, names in layers.items()
        }
        shrunk = {
            name: server.state["gamma"][layer] * average[name]
            for layer, names in layers.items()
            for name in names
        }
        first = average.first_names()  # tied weights are shrunk once, and stay tied
        server.state["model"] = Tensors(
            (name, shrunk.get(first[name], tensor)) for name, tensor in average.items()
        )

    def gamma(self, models: Sequence[Tensors], average: Tensors, w: Tensors) -> float:
        """Return gamma_l.

        Args:
            models: the layer's w_i.
            average: its w^.
            w: as the clients received it.
        """
        centre = mean(models)  # w_i - centre = g_i - gbar
        spread = sum(_norm(model - centre) for model in models) / len(models)
        tau = min(max(self.beta * spread, self.tau_min), self.tau_max)
        length = _norm(w)
        return length / (length + tau * _norm(average - w)) if length > 0 else 1.0


def _norm(tensors: Tensors) -> float:
    return math.sqrt(tensors.dot(tensors))
