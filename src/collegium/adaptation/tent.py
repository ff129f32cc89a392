"""Tent: test-time entropy minimisation (Wang et al., 2021, https://arxiv.org/abs/2006.10726)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collegium.adaptation._losses import entropy_loss, exclusive
from collegium.adaptation._norms import affine, require_batch_norms, use_batch_statistics
from collegium.adaptation.base import (
    GLOBAL,
    Account,
    Adapted,
    Adapter,
    Deliver,
    Images,
    Sources,
    descend,
    groups,
    predict,
)
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError


@dataclass(frozen=True)
class Tent(Adapter):
    """Moves scale and shift of batch normalisation so that predictions become surer.

    Batch normalisation uses each batch's own statistics. For every batch of cases, in order: the
    prediction is made, then one step of Adam is taken on the mean entropy of the softmax over batch
    and pixels. So a prediction knows of the cases before it, not of those after it.

    Deviation: a case larger than the inference window is predicted window by window and then
    learnt from window by window; the released code has no windows. Vectors are never alone in a
    batch where the site has two or more, see `collegium.adaptation.base.groups`.

    Attributes:
        lr: learning rate.
        beta: Adam's first one.
        steps: optimiser steps for each batch.
        episodic: whether every batch starts from the model handed out, instead of going on from the
            batch before (online).
        batch_size: cases, slices or windows in one batch.
    """

    lr: float = 1e-3
    beta: float = 0.9
    steps: int = 1
    episodic: bool = False
    batch_size: int = 4

    def __post_init__(self) -> None:
        good = self.lr > 0 and 0 <= self.beta < 1 and self.steps >= 1 and self.batch_size >= 1
        if not good:
            raise ConfigError(
                f"tent has lr {self.lr}, beta {self.beta}, steps {self.steps} and batch_size "
                f"{self.batch_size}; give a positive lr, a beta in [0, 1), and whole numbers from 1"
            )

    def check(self, module: nn.Module) -> None:
        """Refuse a network without batch normalisation."""
        require_batch_norms(module, "tent")

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Predict and learn batch by batch."""
        module = sources.open(sources.require_global("tent"))
        layers = require_batch_norms(module, "tent")
        use_batch_statistics(module)
        module.requires_grad_(False)
        moving = list(affine(layers))
        if not moving:
            raise ConfigError(
                "tent moves scale and shift, and the network's batch normalisation has none; "
                "choose dsbn, or train with them"
            )
        start = [parameter.clone() for parameter in moving]
        task, account = sources.task.batched(self.batch_size), Account([GLOBAL])
        optimizer = self._optimizer(moving)
        for members, example in groups(cases, self.batch_size):
            if self.episodic:
                for parameter, value in zip(moving, start, strict=True):
                    parameter.data.copy_(value)
                optimizer = self._optimizer(moving)
            for index, prediction in predict(task, module, members, example):
                deliver("", index, prediction)
            for _ in range(self.steps):
                for images in task.windows(module, example.batch["image"]):
                    logits = exclusive(module(images), task, "tent")
                    loss = entropy_loss(logits.softmax(dim=1))
                    entropy = descend(optimizer, loss, "tent")
                    row = {"step": account.steps, "total": entropy, "entropy": entropy}
                    account.losses.append(row)
                    account.steps += 1
        return Adapted(account, Tensors(module.state_dict()).clone())

    def _optimizer(self, moving: list[Tensor]) -> torch.optim.Optimizer:
        for parameter in moving:
            parameter.requires_grad_(True)
        return torch.optim.Adam(moving, lr=self.lr, betas=(self.beta, 0.999))
