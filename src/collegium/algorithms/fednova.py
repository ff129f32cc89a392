"""FedNova (Wang et al., NeurIPS 2020, https://arxiv.org/abs/2007.07481)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.message import Message
from collegium.core.payloads import Numbers, PartSchema
from collegium.core.settings import Fraction, NonNegative, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@settings
class FedNova(FedAvg):
    """FedAvg of normalised updates: a client does not weigh more because it takes more steps.

    With w_i what client i returns, p_i its share of the examples and tau_i its number of steps:

        w <- w + tau_eff sum_i p_i (w_i - w) / a_i

    where a_i is the sum of the coefficients with which the gradients of the tau_i steps enter
    w_i - w: tau_i in plain SGD. With momentum rho and proximal strength mu, each step does
    c <- rho c + 1, a <- (1 - lr mu) a + c, from c = a = 0. If all a_i are equal this is FedAvg.

    With an equal number of passes over the data p_i is proportional to tau_i: the method is then
    uniform averaging with a server step of at least 1. That is its definition, not a mistake.

    What could be read: the abstract, the released code, a benchmark's and Flower's version.
    Deviations from them. The released code counts 1 twice per step with momentum and mu together,
    and adds the proximal term to the momentum in place: here the proximal term stays outside of the
    momentum, and a_i is exact. Flower divides by the sum of the scales, which cancels tau_eff. The
    benchmark extrapolates running variances, which can become negative: here buffers are averaged
    with p_i (the released code leaves them at the clients). The server's momentum is left to
    ``fednova+fedavgm``, which adds up updates as they are, not divided by the learning rate of
    their round. Only plain SGD has such a_i, so that other optimisers are refused; the momentum of
    local steps is the field ``momentum`` and not that of the recipe. Weight decay counts as part of
    the gradient, outside of the momentum.

    Attributes:
        momentum: rho, of the local steps; the velocity begins at 0 in every round.
        mu: strength of the pull towards the received model, as in FedProx; lr * mu below 1.
        effective: tau_eff: "coefficients" is sum_i p_i a_i, "steps" sum_i p_i tau_i, "auto" the
            latter if mu is above 0, as in the released code.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "local_work": Numbers(
            description="steps, and the sum of their coefficients",
            least=1.0,
            names=("steps", "coefficients"),
        )
    }
    optimizers: ClassVar[frozenset[str] | None] = frozenset({"sgd"})
    neutral: ClassVar[Mapping[str, Any] | None] = None

    momentum: Fraction = 0.0
    mu: NonNegative = 0.0
    effective: Literal["auto", "coefficients", "steps"] = "auto"

    def round(self, server: Server) -> None:
        """Move the parameters by the normalised updates, and average the buffers.

        sum_i p_i (w_i - w) / a_i is computed as s (mean - w), with s = sum_i p_i / a_i and the mean
        of the w_i under the weights p_i / a_i.
        """
        w = server.state["model"]
        replies = server.ask(self.train, model=w).collect()
        buffers = replies.mean("model", self.weight)
        p = replies.weights(self.weight)
        work = {client: m["local_work"] for client, m in replies if m["local_work"]}
        scales = {client: p[client] / work[client]["coefficients"] for client in work}
        scales = dict.fromkeys(p, 0.0) | scales  # p_i / a_i; 0 without a step
        mean = Replies(iter(replies), scales).mean("model", None).select(server.parts.trainable)
        counted = self.effective
        if counted == "auto":
            counted = "steps" if self.mu > 0 else "coefficients"
        tau_eff = sum(p[client] * work[client][counted] for client in work) / sum(p.values())
        start = w.select(mean)
        update = (tau_eff * sum(scales.values()) / sum(p.values())) * (mean - start)
        server.state["model"] = buffers | (start + update)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model, and count the coefficients of the steps.

        Args:
            client: the site.
            request: ``model``, w.

        Raises:
            ConfigError: lr * mu is 1 or more.
        """
        if client.lr * self.mu >= 1:
            raise ConfigError(
                f"FedNova's mu of {self.mu:g} times the learning rate of {client.lr:g} is not "
                f"below 1, so that steps overshoot the received model; lower mu or training.lr"
            )
        changes = self.momentum > 0 or self.mu > 0
        received, steps = request["model"], client.num_steps
        model = client.fit(received, correct=self.corrected(received) if changes else None)
        work = {"steps": steps, "coefficients": self.coefficients(steps, client.lr)}
        return Message.of(
            model=model, num_examples=client.num_examples, local_work=work if steps else {}
        )

    def corrected(self, received: Tensors) -> Callable[[Tensors, Tensors], Tensors]:
        """Return what turns the gradients of one round into v + mu (w - received)."""
        velocity: Tensors | None = None

        def correct(gradient: Tensors, now: Tensors) -> Tensors:
            nonlocal velocity
            velocity = gradient if velocity is None else self.momentum * velocity + gradient
            return velocity + self.mu * (now - received.select(now))

        return correct

    def coefficients(self, steps: int, lr: float) -> float:
        """Return a_i.

        Args:
            steps: tau_i.
            lr: learning rate.
        """
        total = current = 0.0
        for _ in range(steps):
            current = self.momentum * current + 1
            total = (1 - lr * self.mu) * total + current
        return total
