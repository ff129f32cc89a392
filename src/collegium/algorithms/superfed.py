"""SuPerFed (Hahn, Jeong and Lee, KDD 2022, https://arxiv.org/abs/2109.07628)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from collegium.algorithms._private_addition import PrivateAddition
from collegium.core.algorithm import Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, PositiveInt, UnitInterval, settings
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.models.mixture import SECOND, attach_second_network

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective

OWN = f"{SECOND}.network."


@settings
class SuPerFed(PrivateAddition):
    """Train the federated model w and the client's own theta so that all between them are good.

    theta starts from other weights than w and joins after a share of the rounds. From then on every
    batch draws lambda from U(0, 1), and the loss at the mixture (1 - lambda) w + lambda theta is
    descended by both (Algorithm 1), with

        mu sum_l ||w_l - w^t_l|| + nu cos(w, theta)^2

    added: w^t is what was received, l a tensor, and the cosine is over all parameters. Before, w
    trains alone, with the first term. w is averaged as in FedAvg; the client predicts with the
    mixture whose lambda is best on its validation cases.

    Deviations. Released code takes the best lambda on test cases, and averages tensors named
    "weight" only: biases and statistics of w are averaged here. All parameters are mixed, biases
    and normalisation included; running statistics are those of w, which learn at the mixtures. A
    norm of 0 has no gradient. Where lambda is equally good several times, the smallest is taken.

    Attributes:
        mixing: "model" draws one lambda for a batch, "layer" one for every tensor.
        start: the share of all rounds after which theta joins; the paper's L is 0.2.
        mu: strength of the pull to the received model.
        nu: strength by which w and theta are kept at right angles.
        grid: between how many lambdas from 0 to 1, less one, the client chooses.
    """

    only_averaged: ClassVar[frozenset[str] | None] = frozenset({"model", "num_examples"})

    mixing: Literal["model", "layer"] = "model"
    start: UnitInterval = 0.2
    mu: NonNegative = 0.01
    nu: NonNegative = 2.0
    grid: PositiveInt = 10

    def extend(self, module: nn.Module) -> None:
        """Add theta, which starts from weights of its own."""
        attach_second_network(module, alike=False)

    def is_mixed(self, client: Client) -> bool:
        """Return whether theta has joined."""
        return client.round > math.floor(self.start * client.rounds)

    def setup(self, server: Server) -> None:
        """Start with the common w, and give every client its theta."""
        super().setup(server)
        server.ask(self.start_own, theta=server.initial_model.select(server.parts.added))

    @handler
    def start_own(self, client: Client, request: Message) -> Message:
        """Keep the initial theta.

        Args:
            client: the site.
            request: ``theta``.
        """
        client.state["own"] = request["theta"]
        return Message.of()

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train w, and once it has joined theta beside it.

        Args:
            client: the site.
            request: ``model``, w^t.

        Raises:
            ProtocolError: the site missed the set-up.
        """
        if "own" not in client.state:
            raise ProtocolError(
                f"site {client.id!r} never received the initial weights of its own network; start "
                f"the run again while it answers"
            )
        received: Tensors = request["model"]
        own: Tensors = client.state["own"]
        names = client.parts.trainable - client.parts.added
        mixed = self.is_mixed(client)
        objective = self.objective(received.select(names), client.rng("lambda"), mixed=mixed)
        trained = client.fit(
            received | own, objective=objective, trainable=None if mixed else names
        )
        return self.split(client, trained)

    def objective(self, received: Tensors, random: torch.Generator, *, mixed: bool) -> Objective:
        """Return the objective of local training.

        Args:
            received: the parameters of w^t.
            random: lambda's generator.
            mixed: whether theta has joined.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            w = network.parameters.select(received)
            terms = [self.mu * _norm(w[name] - received[name]) for name in received]
            if not mixed:
                output = network.forward(batch["image"])
                return network.loss(output, batch), torch.stack(terms).sum()
            theta = Tensors((name, network.parameters[OWN + name]) for name in w)
            output = network.forward(batch["image"], mixture(w, theta, self.draw(w, random)))
            dot, squares = _sum(w, theta), _sum(w, w) * _sum(theta, theta)
            terms.append(self.nu * dot**2 / squares.clamp_min(1e-30))
            return network.loss(output, batch), torch.stack(terms).sum()

        return losses

    def personal_model(self, client: Client, request: Message) -> Tensors:
        """Return the mixture that is best on validation cases; w before theta has joined.

        See `Algorithm.personal_model`.
        """
        model = super().personal_model(client, request)
        if not self.is_mixed(client) or "own" not in client.state:
            return model
        w = model.select(client.parts.trainable - client.parts.added)
        theta = Tensors((name, model[OWN + name]) for name in w)
        shares = [step / self.grid for step in range(self.grid + 1)]
        mixed = [model | mixture(w, theta, dict.fromkeys(w, share)) for share in shares]
        scores = [client.validate(one) for one in mixed]
        defined = [-math.inf if score is None else score for score in scores]
        return mixed[defined.index(max(defined))]

    def draw(self, w: Tensors, random: torch.Generator) -> dict[str, float]:
        """Draw lambda for every tensor, the same for all unless layers have their own.

        Args:
            w: the tensors.
            random: the generator.
        """
        count = len(w) if self.mixing == "layer" else 1
        drawn = torch.rand(count, dtype=torch.float64, generator=random).tolist()
        return dict(zip(w, drawn if self.mixing == "layer" else drawn * len(w), strict=True))


def mixture(w: Tensors, theta: Tensors, shares: Mapping[str, float]) -> Tensors:
    """Return (1 - lambda) w + lambda theta.

    Args:
        w: the federated parameters.
        theta: the client's own, by the same names.
        shares: lambda by name.
    """
    return Tensors((n, (1 - shares[n]) * w[n] + shares[n] * theta[n]) for n in w)


def _norm(difference: Tensor) -> Tensor:
    """Return the Euclidean norm; 0 with a gradient of 0 where the difference is 0."""
    length: Tensor = torch.linalg.vector_norm(difference)
    return length


def _sum(a: Tensors, b: Tensors) -> Tensor:
    """Return the inner product, with its gradient."""
    return torch.stack([(a[name] * b[name]).sum() for name in a]).sum()
