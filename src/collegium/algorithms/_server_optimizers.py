"""Optimisers at the server, which take the mean of the clients' updates for a gradient.

Hsu, Qi and Brown, 2019, https://arxiv.org/abs/1909.06335 (momentum); Reddi et al., 2021,
https://arxiv.org/abs/2003.00295 (Adam, Yogi).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from collegium.core.algorithm import Algorithm, Server, State
from collegium.core.lazy import torch
from collegium.core.model_parts import ModelParts
from collegium.core.settings import Fraction, Positive, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

MOMENTS = "server_optimizer"
"""Where the server's state holds the optimiser's moments."""


class ServerOptimizer(Algorithm):
    """A mix-in; ``super()`` is a method whose rounds average models into the state's "model".

    Delta, the mean less the model before the round, is minus the gradient. Parameters alone take
    the optimiser's step; buffers are those of the mean. Rounds at home do not take it.
    """

    only_averaged: ClassVar[frozenset[str] | None] = None
    suffix: ClassVar[str]
    """The name of the optimiser, as in ``NAME+fedadam``."""

    @property
    def takes_mean(self) -> bool:
        """Whether the step leads to the mean, so that the optimiser changes nothing."""
        return False

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a method without a global model, and what the method refuses.

        See `Algorithm.check_setup`.
        """
        super().check_setup(clients, parts)
        if not self.has_global:
            raise ConfigError(
                "this method has no global model that a server could optimise; leave the server's "
                "optimiser out, or give it to one that averages, such as fedavg"
            )

    def same_as(self, parts: ModelParts) -> str | None:
        """Return the method that it is, with the optimiser unless that changes nothing.

        See `Algorithm.same_as`.
        """
        found: str | None = super().same_as(parts)
        return found if not found or self.takes_mean else f"{found}+{self.suffix}"

    def round(self, server: Server) -> None:
        """Run the method's round, and move from the model before it by the optimiser's step."""
        before: Tensors = server.state["model"]
        super().round(server)  # type: ignore[safe-super]
        mean: Tensors = server.state["model"]
        names = server.parts.trainable.intersection(mean)
        start = before.select(names)
        moments = server.state.setdefault(MOMENTS, {})
        server.state["model"] = mean | self.step(start, mean.select(names), moments)

    @abstractmethod
    def step(self, start: Tensors, mean: Tensors, moments: State) -> Tensors:
        """Return the parameters after the step, and update the moments in place.

        Args:
            start: the parameters before the round.
            mean: the mean of the clients' parameters.
            moments: empty before the first step.
        """


@settings
class FedAvgM(ServerOptimizer):
    """Momentum: v = momentum v + Delta; x = x + server_lr v (Hsu et al., Section 4.3).

    Attributes:
        server_lr: the server's learning rate.
        momentum: of the mean updates; the paper tries 0, 0.7, 0.9, 0.97, 0.99 and 0.997. At 0 with
            a rate of 1 the model is the mean, bit by bit.
    """

    suffix: ClassVar[str] = "fedavgm"

    server_lr: Positive = 1.0
    momentum: Fraction = 0.9

    @property
    def takes_mean(self) -> bool:
        """Whether there is no momentum at a rate of 1. See `ServerOptimizer.takes_mean`."""
        return self.momentum == 0 and self.server_lr == 1

    def step(self, start: Tensors, mean: Tensors, moments: State) -> Tensors:
        """Return the parameters after the step. See `ServerOptimizer.step`."""
        if self.takes_mean:
            return mean
        velocity: Tensors = mean - start
        if "velocity" in moments:
            velocity = self.momentum * moments["velocity"] + velocity
        moments["velocity"] = velocity
        return start + self.server_lr * velocity


@settings
class Adaptive(ServerOptimizer):
    """m = beta1 m + (1 - beta1) Delta; x = x + server_lr m / (sqrt(v) + tau) (Algorithm 2).

    Attributes:
        server_lr: the server's learning rate, eta; the paper searches powers of ten.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: degree of adaptivity; the larger, the less the steps differ between parameters. v
            starts at tau^2, the least that the paper allows.
    """

    server_lr: Positive = 0.1
    beta1: Fraction = 0.9
    beta2: Fraction = 0.99
    tau: Positive = 1e-3

    def step(self, start: Tensors, mean: Tensors, moments: State) -> Tensors:
        """Return the parameters after the step. See `ServerOptimizer.step`."""
        delta = mean - start
        if not moments:
            moments["m"] = 0.0 * delta
            moments["v"] = delta.map(lambda d: torch.full_like(d, self.tau**2))
        moments["m"] = self.beta1 * moments["m"] + (1 - self.beta1) * delta
        moments["v"] = moments["v"].map(self.second_moment, delta)
        move: Tensors = moments["m"].map(lambda m, v: m / (v.sqrt() + self.tau), moments["v"])
        return start + self.server_lr * move

    @abstractmethod
    def second_moment(self, v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the new second moment of a tensor.

        Args:
            v: the moment before.
            delta: the mean update.
        """


class FedAdam(Adaptive):
    """Adam: v = beta2 v + (1 - beta2) Delta^2."""

    suffix: ClassVar[str] = "fedadam"

    def second_moment(self, v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the new second moment. See `Adaptive.second_moment`."""
        return self.beta2 * v + (1 - self.beta2) * delta.square()


class FedYogi(Adaptive):
    """Yogi: v = v - (1 - beta2) Delta^2 sign(v - Delta^2)."""

    suffix: ClassVar[str] = "fedyogi"

    def second_moment(self, v: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the new second moment. See `Adaptive.second_moment`."""
        square = delta.square()
        return v - (1 - self.beta2) * square * torch.sign(v - square)
