"""FedAWA (CVPR 2025, https://arxiv.org/abs/2503.15842)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Replies, Server
from collegium.core.settings import Fraction, NonNegativeInt, Positive, UnitInterval, settings
from collegium.core.tensors import Tensors, mean
from collegium.solvers.gram import gram

Array = NDArray[Any]

EPS = 1e-8
"""Adam's, of the weights."""


@settings
class FedAWA(FedAvg):
    """FedAvg whose weights the server learns: clients near the merged update weigh more.

    With D_k = w_k - w the update of client k, n_k its examples, q = softmax(T) and m the sum of
    q_k D_k, the server takes steps of Adam on the logits T, with the gradient through q and m, of

        F(q) = sum_k q_k ||D_k - m|| + sum_k q_k c_k,  c_k = 1 - cos(w, w_k)

    over the trainable parameters; then w <- sum_k q_k w_k, buffers included. No data is needed.

    Known limits. F has no minimum inside: at every q that trusts one client alone its first term is
    0. The method lives on few small steps (``inner_steps`` times ``lr``), and ``floor`` bounds the
    damage. A client that hardly trained looks aligned. As Adam starts again in every round, one
    step moves each logit by lr, whatever the size of the gradient.

    What could be read: the abstract, a benchmark's version and two ports; the authors' repository
    could not. Deviations from them. T_k starts at log n_k, so that q starts at FedAvg's weights
    (the versions start the logits at the fractions themselves: 0.9 and 0.1 become weights of 0.69
    and 0.31). q is that after the step, not before it. A client's learnt part of T is kept by its
    name; one that is missing or without examples keeps it. Where D_k = m the norm has no gradient.

    Attributes:
        lr: of Adam on the logits.
        inner_steps: its steps in a round.
        betas: Adam's decay rates.
        regulariser: c_k: "cosine" as above, "euclidean" the mean of (w - w_k)^2 over all entries.
        floor: least weight of a client, in shares of 1/N: q <- (1 - floor) q + floor / N.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {"inner_steps": 0, "floor": 0.0}

    lr: Positive = 1e-3
    inner_steps: NonNegativeInt = 1
    betas: tuple[Fraction, Fraction] = (0.5, 0.999)
    regulariser: Literal["cosine", "euclidean"] = "cosine"
    floor: UnitInterval = 0.0

    def round(self, server: Server) -> None:
        """Learn the weights and average; those of the round stay in ``server.state["weights"]``."""
        w = server.state["model"]
        replies = server.ask(self.train, model=w).collect()
        n = {client: count for client, count in replies.weights(self.weight).items() if count > 0}
        learnt = server.state.get("learnt", {})  # T_k - log n_k
        logits = {client: math.log(n[client]) + learnt.get(client, 0.0) for client in n}
        if n and self.inner_steps:
            models = [m["model"].select(server.parts.trainable) for c, m in replies if c in n]
            moves = self.moves(np.array([*logits.values()]), models, w.select(models[0]))
            moved = {c: learnt.get(c, 0.0) + move for c, move in zip(n, moves, strict=True)}
            learnt = learnt | moved
        largest = max((learnt.get(client, 0.0) for client in n), default=0.0)
        q = {client: n[client] * math.exp(learnt.get(client, 0.0) - largest) for client in n}
        total = sum(q.values())
        if self.floor > 0:
            q = {c: (1 - self.floor) * q[c] / total + self.floor / len(q) for c in q}
            total = 1.0
        server.state["learnt"] = learnt
        server.state["weights"] = {client: share / total for client, share in q.items()}
        weighted = Replies(iter(replies), dict.fromkeys(replies.clients, 0.0) | q)
        server.state["model"] = weighted.mean("model", None)

    def moves(self, logits: Array, models: Sequence[Tensors], w: Tensors) -> list[float]:
        """Return how far Adam moves every logit.

        Args:
            logits: (N,), T before the steps.
            models: w_k, N of them.
            w: the parameters that the clients received.
        """
        products = gram(models, mean(models))  # differences of updates are those of models
        costs = np.array(
            [self.cost(model.distinct(), w.select(model.distinct())) for model in models]
        )
        first, second, moved = (np.zeros(len(models)) for _ in range(3))
        for step in range(1, self.inner_steps + 1):
            slope = gradient(logits + moved, products, costs)
            first = self.betas[0] * first + (1 - self.betas[0]) * slope
            second = self.betas[1] * second + (1 - self.betas[1]) * slope**2
            root = np.sqrt(second / (1 - self.betas[1] ** step))
            moved = moved - self.lr * first / (1 - self.betas[0] ** step) / (root + EPS)
        found: list[float] = moved.tolist()
        return found

    def cost(self, model: Tensors, w: Tensors) -> float:
        """Return c_k.

        Args:
            model: w_k.
            w: the parameters that the clients received.
        """
        if self.regulariser == "euclidean":
            return (model - w).dot(model - w) / model.numel()
        lengths = math.sqrt(model.dot(model) * w.dot(w))
        return 1 - model.dot(w) / lengths if lengths > 0 else 1.0


def gradient(logits: Array, products: Array, costs: Array) -> Array:
    """Return dF/dT.

    Args:
        logits: (N,), T.
        products: (N, N), inner products of the updates, or of their differences from any vector.
        costs: (N,), c_k.
    """
    q = np.exp(logits - logits.max())
    q /= q.sum()
    with_mean = products @ q  # <D_i, m>
    squares = products.diagonal() - 2 * with_mean + q @ with_mean  # ||D_k - m||^2
    apart = squares > 0
    d = np.where(apart, np.sqrt(np.where(apart, squares, 1.0)), 0.0)
    slopes = np.where(apart, q / np.where(apart, d, 1.0), 0.0)
    h = d + costs - slopes @ (products - with_mean)  # dF/dq up to a constant
    found: Array = q * (h - q @ h)
    return found
