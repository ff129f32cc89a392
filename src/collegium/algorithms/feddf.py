"""FedDF (Lin et al., NeurIPS 2020, https://arxiv.org/abs/2006.07242)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from collegium.algorithms.fedavg import FedAvg
from collegium.core.algorithm import Server
from collegium.core.lazy import torch
from collegium.core.settings import NonNegativeInt, Positive, settings
from collegium.core.tensors import Tensors
from collegium.training.distillation import divergence

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.core.dataset import Batch
    from collegium.training.objectives import LiveNetwork, Objective


@settings
class FedDF(FedAvg):
    """FedAvg whose mean the server then trains to predict as all clients' models do together.

    The student starts as the mean of the clients' models (Algorithm 1). On public images, whose
    labels are not looked at, it descends

        KL(softmax(mean_k z_k / T) || softmax(z / T)),

    with z its logits and z_k those of client k's model in evaluation mode. The public images must
    not be of a patient on whom anything is scored: declare where they come from. The server holds
    all models of a round at once.

    Deviations. The steps have one learning rate and a fixed number; the paper has up to 10,000 with
    a cosine, ended by the student's accuracy on validation data, which a server here does not have.
    The student's normalisation layers use and learn the statistics of the public images. All sites
    have one architecture. Masks (fields of view) of the public images count. A model of a client
    without training examples is no teacher.

    Attributes:
        steps: of the distillation in a round; at 0 it is FedAvg.
        lr: its learning rate, the same in all rounds.
        optimizer: its optimiser.
        temperature: T.
        average: what is averaged over the clients: their "logits", as the paper has it, or their
            "losses".
    """

    needs_public: ClassVar[Literal["images", "labels"] | None] = "images"
    neutral: ClassVar[Mapping[str, Any] | None] = {"steps": 0}

    steps: NonNegativeInt = 100
    lr: Positive = 1e-3
    optimizer: Literal["adam", "adamw", "sgd"] = "adam"
    temperature: Positive = 1.0
    average: Literal["logits", "losses"] = "logits"

    def round(self, server: Server) -> None:
        """Average the clients' models, and distil what they predict into the mean."""
        replies = server.ask(self.train, model=server.state["model"]).collect()
        student = replies.mean("model", self.weight)
        teachers = [reply["model"] for _, reply in replies if reply["num_examples"] > 0]
        if self.steps:
            recipe = {
                "optimizer": self.optimizer,
                "lr": self.lr,
                "schedule": "constant",
                "lr_decay": 1.0,
                "warm_up": 0,
                "compile": "off",
            }
            student = server.public.fit(
                student, objective=self.objective(teachers), steps=self.steps, recipe=recipe
            )
        server.state["model"] = student

    def objective(self, teachers: Sequence[Tensors]) -> Objective:
        """Return the objective of the distillation.

        Args:
            teachers: the clients' models.
        """

        def losses(network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
            images = batch["image"]
            known = [network.reference(images, model).prediction for model in teachers]
            student = network.predict(images)
            if self.average == "logits":  # summed in float64, so that no order of clients shows
                targets = [torch.stack(known).double().mean(0).to(student)]
            else:
                targets = known
            apart = [
                divergence(
                    student,
                    target,
                    network.task,
                    temperature=self.temperature,
                    mask=batch.get("mask"),
                )
                for target in targets
            ]
            return torch.stack(apart).mean(), None

        return losses
