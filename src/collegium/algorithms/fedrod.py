"""FedRoD (Chen and Chao, ICLR 2022, https://arxiv.org/abs/2107.00778)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from collegium.algorithms._private_addition import PrivateAddition
from collegium.core.algorithm import Client, handler
from collegium.core.lazy import torch
from collegium.core.message import Message
from collegium.core.settings import NonNegative, settings
from collegium.core.tensors import Tensors
from collegium.models.heads import SECOND_HEAD, attach_second_head, second_head_of

if TYPE_CHECKING:
    from torch import Tensor, nn

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective, Output


@settings
class FedRoD(PrivateAddition):
    """Two heads on one body: a generic one that is shared, and one of the client's own.

    With z_G the generic head's logits, z_P the own head's on the same features, and n_c the pixels
    (or cases) of class c at the client, a step descends

        L(z_G + gamma log n)  by body and generic head (balanced softmax, Eq. 8),
        L(z_G + z_P)          by the own head alone, body and z_G held fixed (Eq. 9).

    The global model predicts by z_G, a client by z_G + z_P.

    Deviations. n_c are counted on one pass over the training crops, plus 1 each, so that a class
    which a site lacks has a logarithm. L is the task's loss, Dice included, of the shifted logits;
    labels that are not class numbers are not shifted. z_P comes from a copy of the generic head
    behind a gate that starts at 0, where the paper has a linear head that starts at 0: a head of
    several layers, all of them 0, would never learn. The hypernetwork variant is not here.

    Attributes:
        gamma: strength of the balance; at 0 the generic part learns as in FedAvg.
    """

    gamma: NonNegative = 1.0

    def extend(self, module: nn.Module) -> None:
        """Add the client's own head."""
        attach_second_head(module)

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train the received model with the balanced loss, and the own head beside it.

        Args:
            client: the site.
            request: ``model``, body and generic head.
        """
        received: Tensors = request["model"]
        if "shift" not in client.state:
            client.state["shift"] = self.shift(client, self.whole(client, received))
        shift = client.state["shift"]["logits"]
        model = client.fit(self.whole(client, received), objective=self.objective(shift))
        return self.split(client, model)

    def whole(self, client: Client, received: Tensors) -> Tensors:
        """Return the received part with the client's own head, at first a copy of the generic one.

        Args:
            client: the site.
            received: body and generic head.
        """
        own: Tensors | None = client.state.get("own")
        return received | (second_head_of(received, client.parts) if own is None else own)

    def shift(self, client: Client, model: Tensors) -> Tensors:
        """Return gamma log n_c as ``logits``, (C,).

        Args:
            client: the site.
            model: any whole model, of which the number of classes is seen.
        """

        def count(batch: Batch, output: Output) -> Tensor:
            label, classes = batch["label"], output.prediction.shape[1]
            if label.is_floating_point() or label.ndim != output.prediction.ndim - 1:
                return output.prediction.new_zeros(classes)
            inside = label[batch["mask"]] if "mask" in batch else label
            return torch.bincount(inside.flatten(), minlength=classes)[:classes]

        counts = torch.stack(client.collect(model, count)).sum(0).double()
        balanced = self.gamma * torch.log(counts + 1) if counts.any() else 0.0 * counts
        return Tensors({"logits": balanced})

    def objective(self, shift: Tensor) -> Objective:
        """Return the objective of local training.

        Args:
            shift: gamma log n, (C,).
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, Tensor]:
            output = network.forward(batch["image"])
            generic = output.prediction
            moved = shift.to(generic).reshape(-1, *[1] * (generic.ndim - 2))
            own = network.call(f"{SECOND_HEAD}.layer", output.features.detach())
            gate = network.parameters[f"{SECOND_HEAD}.gate"]
            personal = generic.detach() + gate * own
            balanced = network.task.loss(generic + moved, batch)
            return balanced, network.task.loss(personal, batch)

        return losses
