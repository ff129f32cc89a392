"""What a method may minimise instead of the task's loss.

An objective is a function of the live network and a batch.

`collegium.training.loop.LocalTraining.fit` calls an `Objective` once per optimiser step and
differentiates what it returns. Everything that such a method needs of the network goes through
`LiveNetwork`: forward passes at other parameters, other models on the same images, and the features
that enter the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from collegium.core.dataset import Batch
from collegium.core.model_parts import head_layer
from collegium.core.tensors import Tensors
from collegium.tasks import Task


class Output(NamedTuple):
    """What a forward pass gives.

    Attributes:
        prediction: the network's output, e.g. logits (B, classes, *spatial).
        features: the tensor that enters the head, e.g. (B, channels, *spatial) or (B, features).
    """

    prediction: Tensor
    features: Tensor


class LiveNetwork:
    """The network in the middle of local training.

    Args:
        module: the network, in training mode.
        task: gives the loss.
        moving: the parameters that are trained.
        lr: learning rate of this round.
        autocast: whether forward passes run in bfloat16.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        moving: Mapping[str, nn.Parameter],
        *,
        lr: float,
        autocast: bool = False,
    ) -> None:
        self.module, self.task, self.moving, self.lr = module, task, moving, lr
        self._autocast = autocast

    @property
    def parameters(self) -> Tensors:
        """The parameters that are trained; what is computed from them can be differentiated."""
        return Tensors(self.moving)

    def forward(
        self, images: Tensor, parameters: Tensors | None = None, *, learn_statistics: bool = True
    ) -> Output:
        """Run the network in training mode.

        Args:
            images: (B, C, *spatial).
            parameters: in place of the network's own, name by name; the graph reaches through them.
            learn_statistics: whether running statistics of normalisation layers move.
        """
        replaced = dict(parameters or {})
        if not learn_statistics:
            replaced |= {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return self._run(images, replaced)

    @torch.no_grad()
    def reference(self, images: Tensor, model: Tensors) -> Output:
        """Run another model, in evaluation mode and without a graph; the network stays as it is."""
        modes = {layer: layer.training for layer in self.module.modules()}
        self.module.eval()
        try:
            return self._run(images, dict(model))
        finally:
            for layer, training in modes.items():
                layer.training = training

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Return the task's mean loss."""
        return self.task.loss(output.prediction, batch)

    def _run(self, images: Tensor, replaced: dict[str, Tensor]) -> Output:
        seen: list[Tensor] = []
        head = head_layer(self.module)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with torch.autocast(images.device.type, torch.bfloat16, enabled=self._autocast):
                prediction = functional_call(self.module, replaced, (images,))
        finally:
            hook.remove()
        if self._autocast:
            prediction, seen[0] = prediction.float(), seen[0].float()
        return Output(prediction, seen[0])


Objective = Callable[[LiveNetwork, Batch], tuple[Tensor, Tensor | None]]
"""Gives the task's loss, which is reported, and what is added to it, if anything."""
