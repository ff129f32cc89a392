"""L2GD (Hanzely and Richtarik, 2020, https://arxiv.org/abs/2002.05516)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from collegium.core.algorithm import Algorithm, Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart, PartSchema
from collegium.core.settings import Fraction, NonNegative, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class L2GD(Algorithm):
    """Personal models that are pulled to their mean at random times (Algorithm 1).

    The clients' models w_i minimise (1/N) sum_i L_i(w_i) + lam/(2N) sum_i ||w_i - wbar||^2, with
    wbar their mean. In every iteration one coin, the same for all, shows with probability p the
    mean, and otherwise the data:

        data:  w_i <- w_i - lr grad L_i(w_i)
        mean:  w_i <- (1 - s) w_i + s wbar,  s = lr lam (1 - p) / p

    where lr is the recipe's learning rate, the paper's alpha / (N (1 - p)), for which s is its
    alpha lam / (N p). wbar does not change while the coin shows the mean, so that models are sent
    only where the mean follows the data: a round here is a run of one or more iterations on the
    mean and the run on the data after it, 1/p optimiser steps in expectation, whatever the recipe
    says. The first round has no mean before it. The server draws the coins of all.

    Deviations. Optimisers other than plain SGD take the place of the gradient step, and batches
    that of the whole data. Running statistics are pulled as parameters are; integer counters are
    the client's own. s above 1 would overshoot and is refused. The global model is wbar.

    Attributes:
        p: probability of the mean.
        lam: strength of the pull.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"model": ModelPart()}
    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model"})

    p: Fraction = 0.1
    lam: NonNegative = 1.0

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse p = 0, at which nothing is ever exchanged. See `Algorithm.check_setup`."""
        if self.p == 0:
            raise ConfigError("l2gd's p is 0, at which no site ever trains with others; raise p")

    def round(self, server: Server) -> None:
        """Draw the coins of a round, pull and train, and average."""
        coins = server.rng("coins")
        pulls = 0 if server.round == 1 else self.run_length(1 - self.p, coins)
        steps = self.run_length(self.p, coins)
        mean = server.state["model"]
        replies = server.ask(self.train, model=mean, pulls=pulls, steps=steps)
        server.state["model"] = replies.mean("model", weight=None)

    @staticmethod
    def run_length(end: float, coins: torch.Generator) -> int:
        """Draw how many times in a row a coin shows the same.

        Args:
            end: the probability with which each is the last.
            coins: the generator.
        """
        left = 1 - float(torch.rand((), dtype=torch.float64, generator=coins))  # in (0, 1]
        return 1 + math.floor(math.log(left) / math.log1p(-end))

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Pull the client's own model to the mean, and train it.

        Args:
            client: the site.
            request: ``model``, wbar; ``pulls`` and ``steps``, the iterations on either.

        Raises:
            ConfigError: s is above 1.
        """
        pull = client.lr * self.lam * (1 - self.p) / self.p
        if pull > 1:
            raise ConfigError(
                f"l2gd's step to the mean, lr lam (1 - p) / p, is {pull:g}, above 1; lower "
                f"training.lr or lam, or raise p"
            )
        mean, own = request["model"], self.personal_model(client, request)
        kept = (1 - pull) ** request["pulls"]
        floats = {name for name, tensor in own.items() if tensor.is_floating_point()}
        start = own | (mean + kept * (own - mean)).select(floats)
        client.state["model"] = client.fit(start, steps=request["steps"])
        return Message.of(model=client.state["model"])

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return w_i. See `Algorithm.personal_model`."""
        model: Tensors = client.state.get("model", request["model"])
        return model
