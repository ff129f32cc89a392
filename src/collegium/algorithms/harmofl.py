"""HarmoFL (Jiang, Wang and Dou, AAAI 2022, https://arxiv.org/abs/2112.10775)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, Replies, Server, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import nn, torch
from collegium.core.message import Message
from collegium.core.payloads import Features, PartSchema
from collegium.core.settings import NonNegative, NonNegativeInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork

AMPLITUDE = "amplitude_norm.amplitude"
"""The name of A in a model; see `collegium.algorithms._amplitude_norm.AmplitudeNorm`."""


@settings
class HarmoFL(FedAvg):
    """FedAvg on images of equal amplitudes, with local steps that seek flat optima.

    Amplitudes: before training every site sends the mean amplitude spectrum of its images, and the
    server their mean A. A layer before the network replaces the amplitude of every image by A and
    keeps its phase, in training and in prediction. Weights: with g the gradient of a batch's loss
    at w, the optimiser takes the gradient of the same batch at

        w + alpha g / ||g||.

    What could be read: the abstract and the released code. There the layer replaces the zero
    frequency alone, the mean intensity, although the paper speaks of the whole spectrum: ``radius``
    widens the window. The whole spectrum would need all images, crops and windows of one size.
    Deviations from the code. There an integer momentum leaves A at a site's first batch, and sites
    normalise by their own A in the first round: here A is the mean over one training sample of each
    case, before the first round. Amplitudes are divided by the number of pixels, so that image
    sizes may differ. Rows of a table count as images of one row, of which only the mean can be
    normalised. Normalisation layers are the network's own (the code's have neither parameters nor
    running statistics); the pass at the perturbed weights leaves running statistics alone. Sites
    keep all their examples (the code cuts them to the smallest site's number). A step takes two
    forward and backward passes; the loss that is reported is that at w.

    Attributes:
        alpha: length of the perturbation.
        amplitudes: "low" normalises the amplitudes of a window of low frequencies, "none" nothing.
        radius: half-width of the window, in cycles per image; 0: the mean intensity alone.
        weighting: as in FedAvg; all sites alike in the paper.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {
        "amplitude": Features(
            description="mean low-frequency amplitudes of the training images", holds="amplitudes"
        )
    }
    neutral: ClassVar[Mapping[str, Any] | None] = {
        "alpha": 0.0, "amplitudes": "none", "weighting": "examples"
    }  # fmt: skip

    alpha: NonNegative = 0.05
    amplitudes: Literal["low", "none"] = "low"
    radius: NonNegativeInt = 0
    weighting: Literal["examples", "uniform"] = "uniform"

    def unused_sends(self) -> Collection[str]:
        """Return "amplitude" where nothing is normalised. See `Algorithm.unused_sends`."""
        return ["amplitude"] if self.amplitudes == "none" else []

    def extend(self, module: nn.Module) -> None:
        """Add the layer before the network."""
        if self.amplitudes != "none":
            from collegium.algorithms._amplitude_norm import attach_amplitude_norm

            attach_amplitude_norm(module, self.radius)

    def setup(self, server: Server) -> None:
        """Start with the common model, and with A in its layer.

        Raises:
            ConfigError: the images of the sites are not what the layer was made for.
        """
        super().setup(server)
        if self.amplitudes == "none":
            return
        replies = server.ask(self.measure).collect()
        found = [(client, message) for client, message in replies if "amplitude" in message]
        mean = Replies(iter(found), replies.weights(self.weight)).mean("amplitude", None)
        own, measured = server.state["model"][AMPLITUDE], mean["amplitude"]
        if measured.shape != own.shape:
            raise ConfigError(
                f"HarmoFL found {own.shape[0]} channels and {own.ndim - 1} axes in the network's "
                f"first layer, and images of {measured.shape[0]} and {measured.ndim - 1}; set "
                f"amplitudes to none, or let the first layer be the one that takes the images"
            )
        server.state["model"] |= Tensors({AMPLITUDE: measured.to(own)})

    @handler
    def measure(self, client: Client, request: Message) -> Message:
        """Send the mean amplitudes of one training sample of each case, if there is any.

        Args:
            client: the site.
            request: empty.
        """
        from collegium.algorithms._amplitude_norm import amplitudes_of

        rng, count = client.rng("amplitude"), client.num_examples
        samples = (client.examples.batch([i], [rng])["image"] for i in range(count))
        found = [amplitudes_of(sample, self.radius) for sample in samples]
        if not found:
            return Message.of(num_examples=0)
        total = sum(found[1:], found[0])
        return Message.of(amplitude=Tensors({"amplitude": total / count}), num_examples=count)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model with perturbed weights.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        objective = self.objective if self.alpha > 0 else None
        model = client.fit(request["model"], objective=objective)
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the loss at w, without gradient, and what makes it that at the perturbed weights.

        Args:
            network: the network in training.
            batch: the batch.
        """
        loss = network.loss(network.forward(batch["image"]), batch)
        w = network.parameters
        found = torch.autograd.grad(loss, [*w.values()], allow_unused=True)
        g = Tensors((n, d) for n, d in zip(w, found, strict=True) if d is not None)
        length = float(torch.stack([d.norm() for d in g.values()]).norm())
        perturbed = w.select(g) + self.alpha / (length + 1e-12) * g
        output = network.forward(batch["image"], perturbed, learn_statistics=False)
        loss = loss.detach()
        return loss, network.loss(output, batch) - loss
