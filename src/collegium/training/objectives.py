"""Objectives that a method may minimise instead of the task's loss.

An objective is a function of the network in training and a batch.
`collegium.training.loop.LocalTraining.fit` calls it once per optimiser step and differentiates its
result. All access to the network is through `LiveNetwork`: forward passes at other parameters,
other models on the same images, and the features that enter the head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from collegium.core.dataset import Batch
from collegium.core.model_parts import head_layer
from collegium.core.tensors import Tensors
from collegium.tasks import Task
from collegium.training.compilation import CompiledNetwork


class Output(NamedTuple):
    """The output of a forward pass.

    Attributes:
        prediction: the network's output, e.g. logits (B, classes, *spatial).
        features: the tensor that enters the head, e.g. (B, channels, *spatial) or (B, features).
    """

    prediction: Tensor
    features: Tensor


class LiveNetwork:
    """The network during local training.

    Args:
        module: the network, in training mode.
        task: the task, for its loss.
        trained: the parameters that are trained, by name.
        lr: learning rate of this round.
        precision: of the forward passes; see `collegium.training.loop.TrainingConfig`.
        compiled: the compiled network, for `predict` on whole batches.
        whole: images of a whole batch.
    """

    def __init__(
        self,
        module: nn.Module,
        task: Task,
        trained: Mapping[str, nn.Parameter],
        *,
        lr: float,
        precision: Literal["fp32", "bf16"] = "fp32",
        compiled: CompiledNetwork | None = None,
        whole: int = 1,
    ) -> None:
        self.module, self.task, self.trained, self.lr = module, task, trained, lr
        self._rounds = precision == "bf16"
        self._compiled, self._whole = compiled, whole

    @property
    def parameters(self) -> Tensors:
        """The parameters that are trained, with gradients."""
        return Tensors(self.trained)

    def predict(self, images: Tensor) -> Tensor:
        """Return the network's output in training mode, in float32.

        Args:
            images: (B, C, *spatial).
        """
        with self._computing(images):
            prediction: Tensor = (self._graph(images) or self.module)(images)
        return prediction.float() if self._rounds else prediction

    def compiling(self, images: Tensor) -> AbstractContextManager[None]:
        """Return the context of a training step, in which a graph may be compiled.

        Args:
            images: (B, C, *spatial).
        """
        graph = self._graph(images)
        return nullcontext() if graph is None else graph.compiling(images)

    def _graph(self, images: Tensor) -> CompiledNetwork | None:
        """Return the compiled network for a batch, unless it is the rest of an epoch."""
        return self._compiled if len(images) == self._whole else None

    def _computing(self, images: Tensor) -> torch.autocast:
        """Return the context of a forward pass, which rounds to bfloat16 if the recipe says so."""
        return torch.autocast(images.device.type, torch.bfloat16, enabled=self._rounds)

    def forward(
        self, images: Tensor, parameters: Tensors | None = None, *, learn_statistics: bool = True
    ) -> Output:
        """Run the network in training mode.

        Args:
            images: (B, C, *spatial).
            parameters: replace the network's own, name by name; gradients flow through them.
            learn_statistics: whether running statistics of normalisation layers are updated.
        """
        replaced = dict(parameters or {})
        if not learn_statistics:
            replaced |= {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        return self._run(images, replaced)

    def call(self, name: str, inputs: Tensor) -> Tensor:
        """Return what a submodule makes of inputs, in the recipe's precision, as float32.

        Args:
            name: the submodule's name, such as that of a head that a method has added.
            inputs: what it takes.
        """
        with self._computing(inputs):
            output: Tensor = self.module.get_submodule(name)(inputs)
        return output.float() if self._rounds else output

    @torch.no_grad()
    def reference(self, images: Tensor, model: Tensors) -> Output:
        """Run another model, in evaluation mode and without gradients; the network is unchanged.

        Args:
            images: (B, C, *spatial).
            model: the whole model.
        """
        modes = {layer: layer.training for layer in self.module.modules()}
        self.module.eval()
        try:
            return self._run(images, dict(model))
        finally:
            for layer, training in modes.items():
                layer.training = training

    def loss(self, output: Output, batch: Batch) -> Tensor:
        """Return the task's mean loss.

        Args:
            output: of a forward pass.
            batch: with the labels.
        """
        return self.task.loss(output.prediction, batch)

    def _run(self, images: Tensor, replaced: dict[str, Tensor]) -> Output:
        features: list[Tensor] = []
        head = head_layer(self.module)
        hook = head.register_forward_pre_hook(lambda _, inputs: features.append(inputs[0]))
        try:
            with self._computing(images):
                prediction = functional_call(self.module, replaced, (images,))
        finally:
            hook.remove()
        if self._rounds:
            prediction, features[0] = prediction.float(), features[0].float()
        return Output(prediction, features[0])


Objective = Callable[[LiveNetwork, Batch], tuple[Tensor, Tensor | None]]
"""Returns the task's loss, which is reported, and a term that is added to it or None."""
