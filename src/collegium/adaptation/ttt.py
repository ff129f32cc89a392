"""TTT, its test time (Sun et al., 2020, https://arxiv.org/abs/1909.13231)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from collegium.adaptation.base import (
    GLOBAL,
    Account,
    Adapted,
    Adapter,
    Deliver,
    Images,
    Sources,
    descend,
    predict,
)
from collegium.core.model_parts import find_parts
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.models.rotation import ROTATION, TURNS, rotation_head, rotation_loss

CHANCE = math.log(TURNS)
"""The rotation loss of a head that knows nothing."""


@dataclass(frozen=True)
class TTTAdapter(Adapter):
    """Trains the encoder on the turns of each case before the case is predicted.

    The models must come from the algorithm ``ttt``, which trains the rotation head. For each case,
    in order: copies of it are cropped, mirrored along the last axis and turned at random; the
    encoder and the head take one step of SGD on the rotation loss; then the case is predicted. The
    network starts anew for every case, or goes on from the case before (``online``).

    Where a case is several slices, each copy is one of them. Batch normalisation keeps the global
    model's running statistics and dropout is off, in the step as in the prediction: the paper
    avoids batch normalisation, since copies of one image tell little about a site.

    Attributes:
        lr: learning rate of plain SGD.
        steps: optimiser steps for each case, each on new copies.
        copies: turned copies of a case in one step.
        crop: side of a copy in pixels; None, or a smaller image: the largest square.
        flips: whether copies are mirrored at random.
        online: whether the network goes on from the case before.
        batch_size: cases, slices or windows in one forward pass of the prediction.
    """

    lr: float = 1e-3
    steps: int = 1
    copies: int = 32
    crop: int | None = 128
    flips: bool = True
    online: bool = False
    batch_size: int = 4

    def __post_init__(self) -> None:
        counts = {"steps": self.steps, "copies": self.copies, "batch_size": self.batch_size}
        if self.crop is not None:
            counts["crop"] = self.crop
        for name, count in counts.items():
            if count < 1:
                raise ConfigError(f"ttt.{name} is {count}; give a whole number from 1")
        if not 0 < self.lr < math.inf:
            raise ConfigError(f"ttt.lr is {self.lr}; give a positive number")

    def check(self, module: nn.Module) -> None:
        """Refuse a network without a rotation head."""
        rotation_head(module)

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Learn from each case's turns, then predict it."""
        module = self._open(sources)
        moving = _moving(module)
        start = [parameter.detach().clone() for parameter in moving]
        optimizer = torch.optim.SGD(moving, lr=self.lr)
        task, account = sources.task.batched(self.batch_size), Account([GLOBAL], over="case")
        for index in range(len(cases)):
            example = cases.example(index)
            if not self.online:
                _restore(moving, start)
            rng = generator(sources.seed, "ttt", index)
            losses = []
            for _ in range(self.steps):
                images, turns = self._copies(example.batch["image"], rng)
                loss = rotation_loss(module, images.to(sources.device), turns)
                losses.append(descend(optimizer, loss, "ttt"))
            account.losses.append({"step": index, "total": losses[0], "rotation": losses[0]})
            account.steps += self.steps
            for number, prediction in predict(task, module, [index], example):
                deliver("", number, prediction)
        account.notes += self._notes(account)
        model = Tensors(module.state_dict()).clone() if self.online else None
        return Adapted(account, model)

    def _open(self, sources: Sources) -> nn.Module:
        """Return the global model with its rotation head.

        Raises:
            ConfigError: it has none.
        """
        model = sources.require_global("ttt")
        if not any(name.startswith(f"{ROTATION}.") for name in model):
            raise ConfigError(
                "the global model has no rotation head, which ttt adapts it by; train it with the "
                "algorithm ttt, or choose another adapter"
            )
        module = sources.open(model)
        rotation_head(module)
        return module

    def _copies(self, image: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw copies of a case, not yet turned, and by how much to turn each.

        Args:
            image: (B, C, *spatial); the copies are (copies, C, side, side, ...).
            rng: the case's generator.
        """
        space = image.shape[2:]
        sides = list(space)
        if len(space) > 1:
            sides[:2] = [min(space[:2])] * 2
        if self.crop is not None:
            sides = [min(side, self.crop) for side in sides]
        copies = []
        for _ in range(self.copies):
            copy = image[_draw(len(image), rng)]
            for axis, (have, side) in enumerate(zip(space, sides, strict=True), start=1):
                copy = copy.narrow(axis, _draw(have - side + 1, rng), side)
            if self.flips and _draw(2, rng):
                copy = copy.flip(-1)
            copies.append(copy)
        return torch.stack(copies), torch.randint(TURNS, (self.copies,), generator=rng)

    def _notes(self, account: Account) -> list[str]:
        notes = [f"Loss is that of each case before its first step; {CHANCE:.2f} is chance."]
        if fmean(row["total"] for row in account.losses) > 0.95 * CHANCE:
            notes.append(
                "The rotation head does hardly better than chance, so that its gradient says "
                "little: training images were turned or mirrored (sampling.flips, "
                "sampling.rotations), or crops do not show which way is up."
            )
        if not self.online:
            notes.append("Every case had a network of its own, so that no adapted model is kept.")
        return notes


def _moving(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of encoder and rotation head, and let no other move."""
    encoder = find_parts(module).encoder
    moving = []
    for name, parameter in module.named_parameters():
        moves = name in encoder or name.startswith(f"{ROTATION}.")
        parameter.requires_grad_(moves)
        if moves:
            moving.append(parameter)
    return moving


@torch.no_grad()
def _restore(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _draw(count: int, rng: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=rng))
