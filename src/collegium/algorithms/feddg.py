"""FedDG, episodic learning in continuous frequency space (Liu et al., CVPR 2021).

https://arxiv.org/abs/2103.06030; also known as ELCFS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from collegium.algorithms._spectra import SpectraExchange, interpolated
from collegium.core.algorithm import Client, Server, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import PartSchema, Spectra
from collegium.core.settings import NonNegative, Positive, Share, settings
from collegium.core.tensors import Tensors
from collegium.training.alignment import boundary_contrast

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective


@settings
class FedDG(SpectraExchange):
    """FedAvg whose steps also fit images in the style of other sites, after a step on their own.

    Once, before training, clients exchange low-frequency amplitudes of their images. Then a step on
    a batch x, with x' the same images under amplitudes between their own and those of another
    site's image, descends (Eq. 4, 7)

        L(w; x) + L(w'; x') + gamma L_boundary(w, w'),  w' = w - inner_lr clip(grad L(w; x)),

    where w' depends on w by itself alone (first order), and L_boundary is that of
    `collegium.training.alignment.boundary_contrast`, on the features of x at w and of x' at w'.

    Deviations. Released code replaces the amplitude of one single frequency, the mean intensity,
    and does not interpolate, in spite of the paper; here the window has a size and amplitudes are
    interpolated. It sends whole spectra of all images; here the windows alone, of a share of them.
    It averages parameters alone: here running statistics, which learn on x, are averaged too. One
    other site is drawn per image. Without class maps as labels there is no L_boundary. The task's
    loss stands for Dice.

    Attributes:
        spectra_share: share of a site's training images whose amplitudes are sent; the released
            code takes an eighth.
        inner_lr: the step to w'.
        clip: the largest entry of the gradient of that step.
        gamma: weight of L_boundary.
        temperature: of L_boundary.
    """

    sends: ClassVar[Mapping[str, PartSchema]] = {"spectra": Spectra()}

    spectra_share: Share = 0.125
    inner_lr: Positive = 1e-3
    clip: Positive = 100.0
    gamma: NonNegative = 0.1
    temperature: Positive = 0.05

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse a single site. See `Algorithm.check_setup`."""
        self.require_others(clients)

    def setup(self, server: Server) -> None:
        """Exchange amplitudes.

        Raises:
            ProtocolError: fewer than two sites have training images, or their sizes differ.
        """
        super().setup(server)
        self.exchange_spectra(server)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on both styles.

        Args:
            client: the site.
            request: ``model``, w.
        """
        objective = None
        if client.num_examples:
            others = [one["windows"] for one in self.spectra_of_others(client)]
            objective = self.objective(others, client.rng("style"))
        model = client.fit(request["model"], objective=objective)
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, others: Sequence[Tensor], random: torch.Generator) -> Objective:
        """Return the objective of local training.

        Args:
            others: by site its windows.
            random: the generator of styles.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            images, label, w = batch["image"], batch["label"], network.parameters
            seen = network.forward(images)
            loss = network.loss(seen, batch)
            found = torch.autograd.grad(
                loss, list(w.values()), retain_graph=True, materialize_grads=True
            )
            moved = Tensors(  # w'
                (n, w[n] - self.inner_lr * gradient.clamp(-self.clip, self.clip))
                for n, gradient in zip(w, found, strict=True)
            )
            styled = interpolated(images, others, self.window, random)
            after = network.forward(styled, moved, learn_statistics=False)
            added = network.loss(after, batch)
            if self.gamma and not label.is_floating_point() and label.ndim > 2:
                features = (seen.features, after.features)
                contrast = boundary_contrast(
                    features, label, batch.get("mask"), temperature=self.temperature
                )
                added = added + self.gamma * contrast
            return loss, added

        return losses
