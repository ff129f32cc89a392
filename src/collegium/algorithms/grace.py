"""GRACE (Zhang et al., MICCAI 2023, https://doi.org/10.1007/978-3-031-43898-1_2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.dataset import Batch
from collegium.core.message import Message
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError
from collegium.solvers.gram import cosines, gram, gram_by_name
from collegium.training.alignment import (
    DomainClassifier,
    contrastive,
    coral,
    mmd,
    pick_pixels,
    pixels_at,
    pool,
)
from collegium.training.objectives import LiveNetwork, Output

Array = NDArray[Any]

FLOOR = 1e-3
"""Least consistency where some are negative."""


@dataclass(frozen=True)
class Grace(FedAvg):
    """Correct gradients twice: at clients by a look ahead, at the server by their consistency.

    A client splits every batch in two halves, tr and te (Eq. 1-2):
        theta' = theta - inner_lr grad L(theta; tr)
        the optimiser's gradient, at theta, is d/dtheta [L(theta'; te) + beta A(h_g(te), h'(te))]
    where A compares the features that enter the head, h_g of the model received and h' of theta'.
    The server, with delta_m = theta_m - theta_g (Eq. 3-5):
        sigma_mn = cos(delta_m, delta_n), c_m = mean over n of sigma_mn, p'_m ~ c_m p_m
        theta_g <- theta_g + global_lr sum_m p'_m delta_m
    The personal model is theta_m after training and before averaging. `docs/algorithms/grace.md`
    lists what the paper and its released code, whose client files are empty, do otherwise: first of
    all the paper prints theta_g - eta_g delta, which moves away from the clients.

    Attributes:
        client: "meta" looks ahead as above; "plain" is L(theta) + beta A(h_g, h) on whole batches.
        order: 1 takes the gradient at theta' as it is; 2 multiplies it by I - inner_lr Hessian.
        inner_lr: step of the look ahead, plain gradient descent; None: this round's learning rate.
        alignment: A: "coral", "mmd", "adversarial" or "none".
        beta: weight of A; 1 in the paper, 0.1 in the commands of the released code.
        features: "pooled" compares examples by the mean of their features over space, "pixels" the
            features of single pixels.
        pixels: how many pixels are drawn from a batch.
        adversary_lr: learning rate of the classifier that "adversarial" misleads (Adam).
        base: "moon" adds MOON's mu L_con to the loss at theta'.
        mu: weight of L_con.
        temperature: tau of L_con.
        server: "consistency" weighs as above; "plain" as FedAvg does.
        similarity: "total" is the cosine over all parameters at once, "split" the mean of the
            tensors' own cosines, "reweight" that with weights that fall linearly from the first
            tensor to 0 at the last.
        include_self: whether c_m counts sigma_mm = 1 (the paper) or not (the released code).
        negative: what becomes of negative c: "shift" raises all by -min c + 0.001 (the released
            code), "relu" raises what is below 0.001 to it.
        global_lr: the server's step, eta_g.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = {
        "client": "plain", "alignment": "none", "base": "fedavg", "server": "plain",
        "global_lr": 1.0,
    }  # fmt: skip

    client: Literal["meta", "plain"] = "meta"
    order: Literal[1, 2] = 1
    inner_lr: float | None = None
    alignment: Literal["coral", "mmd", "adversarial", "none"] = "coral"
    beta: float = 1.0
    features: Literal["pooled", "pixels"] = "pooled"
    pixels: int = 512
    adversary_lr: float = 7e-4
    base: Literal["fedavg", "moon"] = "fedavg"
    mu: float = 1.0
    temperature: float = 0.5
    server: Literal["consistency", "plain"] = "consistency"
    similarity: Literal["total", "split", "reweight"] = "total"
    include_self: bool = False
    negative: Literal["shift", "relu"] = "shift"
    global_lr: float = 1.0

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self)).items():
            if get_origin(hint) is Literal and getattr(self, name) not in get_args(hint):
                options = ", ".join(map(str, get_args(hint)))
                raise ConfigError(
                    f"grace.{name} is {getattr(self, name)!r}: write one of {options}"
                )
        for name in ("beta", "mu", "inner_lr"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ConfigError(f"grace.{name} is {value!r}: it should be at least 0")
        for name in ("adversary_lr", "temperature", "global_lr"):
            if not 0 < getattr(self, name) < inf:
                raise ConfigError(f"grace.{name} is {getattr(self, name)!r}: it should be above 0")
        if self.pixels < 2:
            raise ConfigError(f"grace.pixels is {self.pixels!r}: it should be at least 2")

    def round(self, server: Server) -> None:
        """Move the global model by the clients' updates, weighted by their consistency.

        theta_g + eta_g sum p' delta is computed as theta_g + eta_g (mean - theta_g), mean = sum p'
        theta_m, which is the mean itself at eta_g = 1. Buffers are averaged with p'. The weights
        p' of the round are kept in ``server.state["weights"]``.
        """
        start = server.state["model"]
        replies = server.ask(self.train, model=start)
        if self.server == "plain":
            mean = replies.mean("model", self.weight)
        else:
            mean = self._consistent_mean(server, replies.items())
        moved = mean.select(server.parts.trainable)
        if self.global_lr != 1:
            begin = start.select(moved)
            moved = begin + self.global_lr * (moved - begin)
        server.state["model"] = mean | moved

    def _consistent_mean(self, server: Server, replies: Sequence[tuple[str, Message]]) -> Tensors:
        """Average the models with the weights p'."""
        names = server.parts.trainable
        shares = [float(m[self.weight]) if self.weight else 1.0 for _, m in replies]
        updated = [message["model"].select(names) for _, message in replies]
        weights = self.weights(updated, server.state["model"].select(names), shares)
        running = Mean()
        for (client, message), weight in zip(replies, weights, strict=True):
            running.add(message["model"], weight, f"client {client!r}, part 'model'")
        server.state["weights"] = dict(zip((c for c, _ in replies), weights, strict=True))
        return running.result()

    def weights(
        self, models: Sequence[Tensors], start: Tensors, shares: Sequence[float]
    ) -> list[float]:
        """Return p' of every client.

        Args:
            models: the parameters that the clients returned.
            start: those that they received.
            shares: p up to a factor; a client whose share is 0 is not compared with the others.
        """
        heard = [index for index, share in enumerate(shares) if share > 0]
        if not heard:
            return list(shares)
        sigma = self.similarities([models[index] for index in heard], start)
        c = raised(consistency(sigma, include_self=self.include_self), self.negative)
        weights = dict(zip(heard, reweighted([shares[i] for i in heard], c), strict=True))
        return [float(weights.get(index, 0.0)) for index in range(len(shares))]

    def similarities(self, models: Sequence[Tensors], start: Tensors) -> Array:
        """Return sigma, (M, M): how alike the models' differences from ``start`` are."""
        if self.similarity == "total":
            return cosines(gram(models, start))
        by_tensor = [cosines(products) for products in gram_by_name(models, start).values()]
        last = 1.0 if self.similarity == "split" else 0.0
        sigma: Array = np.average(by_tensor, axis=0, weights=np.linspace(1, last, len(by_tensor)))
        return sigma

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on the corrected objective, and keep it as the personal one."""
        received = request["model"]
        objective = _Objective(self, client, received) if self.corrects(client) else None
        model = client.fit(received, objective=objective)
        client.state["personal"] = model
        if objective is not None and objective.adversary is not None:
            client.state["adversary"] = objective.adversary.weights
        return Message.of(model=model, num_examples=client.num_examples)

    def corrects(self, client: Client) -> bool:
        """Whether this client's objective differs from the task's loss in this round."""
        return self.client == "meta" or self.aligns or self.contrasts(client)

    @property
    def aligns(self) -> bool:
        """Whether features are aligned."""
        return self.alignment != "none" and self.beta > 0

    def contrasts(self, client: Client) -> bool:
        """Whether MOON's loss takes part: it needs a local model of an earlier round."""
        return self.base == "moon" and self.mu > 0 and "personal" in client.state

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """The client's model as trained; before its first round the received one."""
        model: Tensors = client.state.get("personal", request["model"])
        return model


def consistency(sigma: Array, *, include_self: bool) -> Array:
    """Return c, (M,): the mean of each row of sigma, (M, M), with or without its diagonal.

    A client that is alone agrees with itself: its c is 1.
    """
    if len(sigma) == 1:
        return np.ones(1)
    counted = sigma if include_self else sigma - np.diag(np.diagonal(sigma))
    c: Array = counted.sum(axis=1) / (len(sigma) if include_self else len(sigma) - 1)
    return c


def raised(c: Array, negative: str) -> Array:
    """Return c without negative values; see `Grace.negative`.

    The released code then divides by max c where that exceeds 1, which the normalisation of the
    weights undoes.
    """
    if negative == "relu":
        return np.maximum(c, FLOOR)
    return c - c.min() + FLOOR if c.min() < 0 else c


def reweighted(shares: Sequence[float], c: Array) -> Array:
    """Return p' = c p / sum c p, (M,); p itself where every c is 0 and says nothing.

    Args:
        shares: p up to a factor, such as numbers of examples.
        c: consistencies, none negative.
    """
    p = np.asarray(shares, dtype=float)
    weights = c * p if (c * p).sum() > 0 else p
    normalised: Array = weights / weights.sum()
    return normalised


def halves(batch: Batch) -> tuple[Batch, Batch]:
    """Return the first and second half of a batch, by position; the second may have one more.

    Fewer than four examples are not divided, since a half of one has neither batch statistics nor a
    covariance: the whole batch serves as both halves.
    """
    count = len(batch["image"])
    if count < 4:
        return batch, batch
    middle = count // 2
    return (
        {key: value[:middle] for key, value in batch.items()},
        {key: value[middle:] for key, value in batch.items()},
    )


def look_ahead(network: LiveNetwork, batch: Batch, *, lr: float, order: int) -> Tensors:
    """Return theta' = theta - lr grad L(theta): functions of theta, one plain gradient step ahead.

    Running statistics learn here, at theta, and nowhere else: the virtual theta' is not a model
    that anybody keeps.

    Args:
        network: at theta.
        batch: the meta-training half.
        lr: step.
        order: 1: the step is a constant; 2: it depends on theta.
    """
    theta = network.parameters
    loss = network.loss(network.forward(batch["image"]), batch)
    gradients = torch.autograd.grad(
        loss, list(theta.values()), create_graph=order == 2, allow_unused=True
    )
    return Tensors(
        (name, parameter if step is None else parameter - lr * step)
        for (name, parameter), step in zip(theta.items(), gradients, strict=True)
    )


class _Objective:
    """What a client minimises in one round; holds the classifier that is to be misled."""

    def __init__(self, method: Grace, client: Client, received: Tensors) -> None:
        self.method, self.received = method, received
        self.adversary: DomainClassifier | None = None
        self._previous: Tensors | None = (
            client.state["personal"] if method.contrasts(client) else None
        )
        self._weights: Tensors | None = client.state.get("adversary")
        self._random = client.rng("alignment")

    def __call__(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor | None]:
        if self.method.client == "plain":
            return self._losses(network, network.forward(batch["image"]), batch)
        first, second = halves(batch)
        lr = network.lr if self.method.inner_lr is None else self.method.inner_lr
        ahead = look_ahead(network, first, lr=lr, order=self.method.order)
        output = network.forward(second["image"], ahead, learn_statistics=False)
        return self._losses(network, output, second)

    def _losses(
        self, network: LiveNetwork, output: Output, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        """Return the task's loss, and the weighted terms beside it."""
        loss, terms = network.loss(output, batch), []
        if self.method.aligns or self._previous is not None:
            received = network.reference(batch["image"], self.received).features
            if self.method.aligns:
                terms.append(self.method.beta * self._alignment(received, output.features))
            if self._previous is not None:
                previous = network.reference(batch["image"], self._previous).features
                terms.append(
                    self.method.mu
                    * contrastive(
                        pool(output.features), pool(received), pool(previous),
                        temperature=self.method.temperature,
                    )
                )  # fmt: skip
        return loss, sum(terms, torch.zeros_like(loss)) if terms else None

    def _alignment(self, received: Tensor, local: Tensor) -> Tensor:
        if self.method.features == "pooled":
            received, local = pool(received), pool(local)
        else:
            local, positions = pick_pixels(local, self.method.pixels, self._random)
            received = pixels_at(received, positions)
        if self.method.alignment == "coral":
            return coral(received, local)
        if self.method.alignment == "mmd":
            return mmd(received, local)
        return self._classifier(local).confusion(received, local)

    def _classifier(self, local: Tensor) -> DomainClassifier:
        if self.adversary is None:
            weights = self._weights
            if weights is None:
                weights = DomainClassifier.initial(local.shape[1], self._random)
            self.adversary = DomainClassifier(
                weights.map(lambda tensor: tensor.to(local)), lr=self.method.adversary_lr
            )
        return self.adversary
