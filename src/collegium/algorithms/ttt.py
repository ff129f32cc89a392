"""TTT, its training (Sun et al., 2020, https://arxiv.org/abs/1909.13231)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Client, handler
from collegium.core.dataset import Batch
from collegium.core.lazy import nn, torch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, settings
from collegium.models.rotation import TURNS, attach_rotation_head, crop_square, rotation_loss

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.objectives import LiveNetwork, Objective


@settings
class TTT(FedAvg):
    """FedAvg whose clients also learn by how far an image was turned: L + lam L_rot (Eq. 2).

    L_rot is the cross-entropy of classifying turns by 0, 90, 180 and 270 degrees, by a head on the
    encoder's output; see `collegium.models.rotation`. The head is trained, sent and averaged
    like the rest of the network. At a site outside, the adapter ``ttt`` trains on this task alone.

    The task's loss sees the images as they are, L_rot the same images turned, cut to the square in
    their middle; labels are never turned. Volumes turn in the plane of their first two axes. The
    task can be learnt only if training images are upright: with ``sampling.rotations`` or
    ``sampling.flips`` the turn of an image cannot be recognised, and L_rot stays near log 4. So it
    does if crops are too small to show which way is up.

    Deviations: the paper uses group normalisation; if a network has batch normalisation, turned
    images are normalised by their own batch and leave the running statistics alone, which belong to
    images as they are. The pass of the turned images ends at the encoder and is computed in full
    precision.

    Attributes:
        lam: weight of the rotation loss. At 0 the network's own tensors are FedAvg's.
        rotations: "random" turns every image by one random number of quarter turns, "all" by each
            of the four, which takes four times as long.
    """

    neutral: ClassVar[Mapping[str, Any] | None] = None
    extension_predicts: ClassVar[bool] = False

    lam: NonNegative = 1.0
    rotations: Literal["random", "all"] = "random"

    def extend(self, module: nn.Module) -> None:
        """Add the rotation head."""
        attach_rotation_head(module)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model on both losses.

        Args:
            client: the site.
            request: ``model``, the global model.
        """
        objective = self.objective(client.rng("rotation")) if self.lam > 0 else None
        model = client.fit(request["model"], objective=objective)
        return Message.of(model=model, num_examples=client.num_examples)

    def objective(self, random: torch.Generator) -> Objective:
        """Return the objective of local training, whose turns are drawn from ``random``."""

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            loss = network.loss(network.forward(batch["image"]), batch)
            images = crop_square(batch["image"])
            if self.rotations == "all":
                turns = torch.arange(TURNS).repeat_interleave(len(images))
                images = images.repeat(TURNS, *[1] * (images.ndim - 1))
            else:
                turns = torch.randint(TURNS, (len(images),), generator=random)
            turned = rotation_loss(network.module, images, turns, learn_statistics=False)
            return loss, self.lam * turned

        return losses
