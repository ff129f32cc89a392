"""pFedMe (Dinh, Tran and Nguyen, 2020, https://arxiv.org/abs/2006.08848)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Server, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.settings import Positive, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.training.meta import gradient_at

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork


@settings
class PFedMe(FedAvg):
    """Train the global model on Moreau envelopes of the clients' losses (Algorithm 1).

    A local step on one batch finds the personal model theta near the local w, and moves w to it:

        theta ~ argmin L(theta) + lam/2 ||theta - w||^2, by ``inner_steps`` steps of inner_lr,
        w <- w - lr lam (w - theta), lam (w - theta) being the gradient of the envelope at w.

    The server takes w <- (1 - global_lr) w + global_lr mean_i w_i. The personal model is the theta
    of a round's last batch; the paper reports both.

    All inner steps of a batch use that batch, as in the paper; the authors' code adds 0.001 theta
    to their gradient (a weight decay), which the paper does not have, and neither has this. theta
    starts a round at the w received and continues from batch to batch, as in that code. The inner
    steps are plain gradient descent; the gradient of the envelope goes to the recipe's optimiser,
    with plain SGD the paper's step. lr lam must be below 1, otherwise w would pass theta. Running
    statistics learn once for each batch, in its first inner step; they are averaged whatever the
    server's step, and theta and w share them. PFLlib's server step is 0 by default: its global
    model never moves. Local work is ``inner_steps`` times that of FedAvg.

    Attributes:
        weighting: "uniform" (the paper) or "examples", for the mean of the w_i.
        lam: strength of the pull between theta and w.
        inner_steps: K; more of them solve for theta more exactly.
        inner_lr: the step for theta; inner_lr lam must be below 2.
        global_lr: the server's step, beta.
    """

    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})
    neutral: ClassVar[Mapping[str, Any] | None] = None

    weighting: Literal["examples", "uniform"] = "uniform"
    lam: Positive = 15.0
    inner_steps: PositiveInt = 5
    inner_lr: Positive = 0.09
    global_lr: Positive = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner_lr * self.lam >= 2:
            raise ConfigError(
                f"inner_lr times lam is {self.inner_lr * self.lam:g}, and theta moves away from w "
                f"if it is 2 or more; lower one of them"
            )

    def round(self, server: Server) -> None:
        """Move w to the mean of the w_i, by global_lr."""
        w = server.state["model"]
        update = server.ask(self.train, model=w).mean("model", self.weight) - w
        step = self.global_lr * update.select(server.parts.trainable)
        server.state["model"] = w + (update | step)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train w on the Moreau envelope and keep theta as the personal model.

        Args:
            client: the site.
            request: ``model``, w.

        Raises:
            ConfigError: lr lam is 1 or more.
        """
        if client.lr * self.lam >= 1:
            raise ConfigError(
                f"pfedme moves w by training.lr times lam of its way to theta, which is "
                f"{client.lr * self.lam:g} and must be below 1; lower one of them"
            )
        envelope = Envelope(self)
        model = client.fit(request["model"], objective=envelope)
        client.state["personal"] = model | envelope.theta
        return Message.of(model=model, num_examples=client.num_examples)

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return theta, or the received model before the client's first round.

        See `Algorithm.personal_model`.
        """
        model: Tensors = client.state.get("personal", request["model"])
        return model


class Envelope:
    """The Moreau envelope of the loss, as an objective of local training that keeps theta.

    Args:
        method: its hyper-parameters.
    """

    def __init__(self, method: PFedMe) -> None:
        self._method = method
        self.theta = Tensors()

    def __call__(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss at theta before the batch, and lam/2 ||w - theta||^2 after it.

        Args:
            network: the network at w.
            batch: of all inner steps.
        """
        lam, lr = self._method.lam, self._method.inner_lr
        w = network.parameters.map(torch.Tensor.detach)
        theta, losses = self.theta or w, []
        for step in range(self._method.inner_steps):
            loss, gradient = gradient_at(network, batch, theta, learn_statistics=step == 0)
            theta = theta - lr * (gradient + lam * (theta - w))
            losses.append(loss)
        self.theta = theta
        apart = network.parameters - theta
        squares = torch.stack([(difference**2).sum() for difference in apart.values()])
        return losses[0], lam / 2 * squares.sum()
