"""The test-time part of TTT (Sun et al., 2020, https://arxiv.org/abs/1909.13231)."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING

from collegium.adaptation.base import (
    GLOBAL,
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    Sources,
    copies_of,
    optimizer_step,
    overwrite,
    predict_batch,
)
from collegium.core.lazy import nn, torch
from collegium.core.model_parts import find_parts
from collegium.core.optimizers import unmarked
from collegium.core.randomness import generator
from collegium.core.settings import Positive, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.rotation import ROTATION, TURNS, rotation_head, rotation_loss

if TYPE_CHECKING:
    from torch import Tensor

CHANCE_LOSS = math.log(TURNS)
"""The rotation loss of a head that predicts at random."""


@settings
class TTTAdapter(Adapter):
    """Training of the encoder on rotations of each case before the case is predicted.

    The models must come from the algorithm ``ttt``, which trains the rotation head. For each case,
    in order: copies of it are cropped, flipped along the last axis and rotated at random; the
    encoder and the head take one step of SGD on the rotation loss; then the case is predicted. The
    network starts from the global model for every case, or continues from the case before
    (``online``).

    If a case consists of several slices, each copy is one of them. Batch normalisation keeps the
    global model's running statistics and dropout is off, in the step as in the prediction: the
    paper avoids batch normalisation, since copies of one image say little about a site.

    Attributes:
        lr: learning rate of plain SGD.
        steps: optimiser steps for each case, each on new copies.
        copies: rotated copies of a case in one step.
        crop: side of a copy in pixels; None, or a smaller image: the largest square.
        flips: whether copies are flipped at random.
        online: whether the network continues from the case before.
        batch_size: cases, slices or windows in one forward pass of the prediction.
        record_steps: whether the predictions of each case before and after each of its steps are
            scored for the record; see `collegium.adaptation.outside.adapt_and_score`.
    """

    lr: Positive = 1e-3
    steps: PositiveInt = 1
    copies: PositiveInt = 32
    crop: PositiveInt | None = 128
    flips: bool = True
    online: bool = False
    batch_size: PositiveInt = 4
    record_steps: bool = False

    def check(self, module: nn.Module) -> None:
        """Refuse a network without a rotation head."""
        rotation_head(module)

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Learn from rotations of each case, then predict it. See `Adapter.adapt`."""
        module = self._load(sources)
        trained = _select_trained(module)
        start = copies_of(trained)
        optimizer = unmarked(torch.optim.SGD)(trained, lr=self.lr)
        task = sources.task.with_batch_size(self.batch_size)
        record = AdaptationRecord([GLOBAL], losses_per="case")
        for index in range(len(cases)):
            example = cases.example(index)
            if not self.online:
                overwrite(trained, start)
            rng = generator(sources.seed, "ttt", index)
            predictions = partial(predict_batch, task, module, [index], example)
            if self.record_steps:
                sources.watch(0, predictions())
            losses = []
            for step in range(self.steps):
                images, turns = self._copies(example.batch["image"], rng)
                loss = rotation_loss(module, images.to(sources.device), turns)
                losses.append(optimizer_step(optimizer, loss, "ttt"))
                if self.record_steps:
                    sources.watch(step + 1, predictions())
            record.losses.append({"step": index, "total": losses[0], "rotation": losses[0]})
            record.steps += self.steps
            for number, prediction in predictions():
                deliver("", number, prediction)
        record.notes += self._notes(record)
        model = Tensors(module.state_dict()).clone() if self.online else None
        return AdaptationResult(record, model)

    def _load(self, sources: Sources) -> nn.Module:
        """Return the global model with its rotation head.

        Raises:
            ConfigError: it has none.
        """
        model = sources.require_global("ttt")
        if not any(name.startswith(f"{ROTATION}.") for name in model):
            raise ConfigError(
                "the global model has no rotation head, which ttt needs; train it with the "
                "algorithm ttt, or choose another adapter"
            )
        module = sources.load(model)
        rotation_head(module)
        return module

    def _copies(self, image: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw copies of a case, not yet rotated, and the quarter turns of each.

        Args:
            image: (B, C, *spatial); the copies are (copies, C, side, side, ...).
            rng: the case's generator.
        """
        size = image.shape[2:]
        sides = list(size)
        if len(size) > 1:
            sides[:2] = [min(size[:2])] * 2
        if self.crop is not None:
            sides = [min(side, self.crop) for side in sides]
        copies = []
        for _ in range(self.copies):
            copy = image[_randint(len(image), rng)]
            for axis, (length, side) in enumerate(zip(size, sides, strict=True), start=1):
                copy = copy.narrow(axis, _randint(length - side + 1, rng), side)
            if self.flips and _randint(2, rng):
                copy = copy.flip(-1)
            copies.append(copy)
        return torch.stack(copies), torch.randint(TURNS, (self.copies,), generator=rng)

    def _notes(self, record: AdaptationRecord) -> list[str]:
        notes = [
            f"The loss is that of each case before its first step; {CHANCE_LOSS:.2f} is chance."
        ]
        if fmean(row["total"] for row in record.losses) > 0.95 * CHANCE_LOSS:
            notes.append(
                "The rotation head is hardly better than chance, so that its gradient says "
                "little: training images were rotated or flipped (sampling.flips, "
                "sampling.rotations), or crops do not show which way is up."
            )
        if not self.online:
            notes.append("Every case had its own network, so that no adapted model is kept.")
        return notes


def _select_trained(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of encoder and rotation head, and freeze all others."""
    encoder = find_parts(module).encoder
    trained = []
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in encoder or name.startswith(f"{ROTATION}."))
        if parameter.requires_grad:
            trained.append(parameter)
    return trained


def _randint(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))
