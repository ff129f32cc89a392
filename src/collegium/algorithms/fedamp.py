"""FedAMP and HeurFedAMP (Huang et al., 2021, https://arxiv.org/abs/2007.03797)."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from collegium.algorithms._tied import TiedModels
from collegium.core.algorithm import Client, Server, handler
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.settings import NonNegative, Positive, UnitInterval, settings
from collegium.core.tensors import Tensors, mean


@settings
class FedAMP(TiedModels):
    """Pull every client's model towards a mean in which similar clients weigh more (Algorithm 1).

    The server keeps the parameters w_i that clients sent last and forms for each client a cloud
    model u_i = sum_j xi_ij w_j, with xi_ii = 1 - sum_{j != i} xi_ij and, for j != i,

        FedAMP:      xi_ij = alpha / (N - 1) exp(-||w_i - w_j||^2 / s),
        HeurFedAMP:  xi_ij = alpha exp(sigma cos(w_i, w_j)) / sum_{h != i} exp(sigma cos(w_i, w_h)).

    The client then trains its own model, from where it was, on L_i(w) + lam/2 ||w - u_i||^2.

    In the paper xi_ij is alpha_k A'(||w_i - w_j||^2), with A(x) = 1 - exp(-x / sigma) and a step
    alpha_k of its own, and the pull is lambda / (2 alpha_k). Here alpha = alpha_k (N - 1) / s and
    lam = lambda / alpha_k: no xi can be negative (with the settings of released code xi_ii is 2 - N
    in the first round), a change of the one leaves the other alone, and alpha_k does not shrink
    over the rounds. Squared distances of networks exceed a fixed sigma by far, so that all xi_ij
    vanish: s is sigma times the median of the squared distances, unless ``relative`` is false. The
    minimisation is the recipe's local training. Released code takes the distance without the square
    and computes the pull from detached weights, so that it has no gradient: its FedAMP is
    single-site training. Distances, means and the pull cover the parameters; running statistics
    stay at their site. The norm counts tied weights once. The paper was read in excerpts only.

    Attributes:
        attention: "distance" is FedAMP, "cosine" HeurFedAMP, the paper's for deep networks.
        alpha: weight of the other clients in u_i: all of it with "cosine", at most so much with
            "distance". 1 - alpha is HeurFedAMP's xi_ii.
        sigma: width of the attention ("distance") or its sharpness ("cosine").
        relative: whether sigma counts in medians of the squared distances between clients.
        lam: strength of the pull; at 0 the method is single-site training.
    """

    attention: Literal["distance", "cosine"] = "distance"
    alpha: UnitInterval = 0.8
    sigma: Positive = 1.0
    relative: bool = True
    lam: NonNegative = 0.1

    def same_as(self, parts: ModelParts) -> str | None:
        """Return "local" without a pull. See `Algorithm.same_as`."""
        return "local" if self.lam == 0 else None

    def round(self, server: Server) -> None:
        """Send every client its u_i, and keep the w_i that come back."""
        w = server.state["parameters"]
        rows = zip(w, self.weights(list(w.values())), strict=True)
        self.exchange(server, {i: {"cloud": _combined(list(w.values()), row)} for i, row in rows})

    def weights(self, w: Sequence[Tensors]) -> list[list[float]]:
        """Return xi, whose rows sum to 1.

        Args:
            w: the parameters of each client.
        """
        w, others = [w_i.distinct() for w_i in w], ~np.eye(len(w), dtype=bool)
        if self.attention == "cosine":
            gram = np.array([[w_i.dot(w_j) for w_j in w] for w_i in w])
            norms = np.sqrt(np.diag(gram))
            cosines = gram / np.maximum(np.outer(norms, norms), np.finfo(float).tiny)
            similar = np.exp(self.sigma * (cosines - 1)) * others
            xi = self.alpha * similar / similar.sum(axis=1, keepdims=True)
        else:
            apart = np.array([[(d := w_i - w_j).dot(d) for w_j in w] for w_i in w])
            s = self.sigma * (np.median(apart[others]) if self.relative else 1.0)
            similar = np.exp(-apart / s) if s > 0 else 1.0 * (apart == 0)
            xi = self.alpha / (len(w) - 1) * similar * others
        rows: list[list[float]] = (xi + np.diag(1 - xi.sum(axis=1))).tolist()
        return rows

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the client's own model, pulled towards its cloud model.

        Args:
            client: the site.
            request: ``cloud``, u_i.
        """
        return self.fit(client, request["cloud"], self.lam)


def _combined(w: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return sum_j weights_j w_j; the weights sum to 1 and none is negative."""
    counted = [(w_j, weight) for w_j, weight in zip(w, weights, strict=True) if weight > 0]
    return mean([w_j for w_j, _ in counted], [weight for _, weight in counted])
