"""The one local loop: every algorithm trains through `LocalTraining.fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from collegium.data.dataset import Batch, Dataset, Example
from collegium.errors import ConfigError, DivergedError
from collegium.models.parts import find_parts
from collegium.randomness import ambient, generator
from collegium.tasks import Task
from collegium.tensors import Tensors

logger = logging.getLogger(__name__)

Path = tuple[str | int, ...]
"""The name of a random generator."""


@dataclass(frozen=True)
class TrainingConfig:
    """How a client trains.

    Attributes:
        optimizer: "sgd", "adam" or "adamw".
        lr: learning rate of the first round.
        lr_decay: factor applied to the learning rate after every round.
        momentum: of SGD.
        weight_decay: L2 penalty (decoupled for adamw).
        amsgrad: of adam and adamw.
        batch_size: examples per optimiser step.
        local_epochs: passes over the site's training data per round.
        local_steps: optimiser steps per round instead of epochs, the same at every site whatever
            its size.
        clip_norm: largest Euclidean norm of the gradient; None: not clipped.
        optimizer_state: "reset" starts the optimiser anew in every round, "keep" carries its
            moments over at the client.
        autocast: forward passes in bfloat16; quicker on recent processors, and changes the numbers.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: float = 1e-3
    lr_decay: float = 1.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    amsgrad: bool = False
    batch_size: int = 8
    local_epochs: int = 1
    local_steps: int | None = None
    clip_norm: float | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    autocast: bool = False

    @property
    def optimizer_kind(self) -> str:
        """The optimiser by the name that `Algorithm.optimizers` uses."""
        return "sgd with momentum" if self.optimizer == "sgd" and self.momentum else self.optimizer

    def build_optimizer(
        self, parameters: Sequence[nn.Parameter], lr: float
    ) -> torch.optim.Optimizer:
        """Return a new optimiser over ``parameters``."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay
            )
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, lr=lr, weight_decay=self.weight_decay, amsgrad=self.amsgrad)


@dataclass(frozen=True)
class Progress:
    """What one call of `LocalTraining.fit` did."""

    loss: float
    steps: int


class _SampleGenerators(Sequence[torch.Generator]):
    """One generator per sample, made when it is used.

    Augmentation depends on the sample, not on who draws it or when.
    """

    def __init__(self, seed: int, path: Path, samples: Sequence[tuple[int, int]]) -> None:
        self._seed, self._path, self._samples = seed, path, samples

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, position: Any) -> Any:
        return generator(self._seed, *self._path, "sample", *self._samples[position])


def plan_batches(
    count: int, batch_size: int, *, epochs: int, steps: int | None, seed: int, path: Path
) -> Iterator[list[tuple[int, int]]]:
    """Yield batches of (epoch, index), each epoch in an order of its own.

    With ``epochs`` every epoch is cut into batches, and a last batch of one example is merged into
    the batch before it, since batch normalisation cannot learn from one value (a ``batch_size`` of
    1 means what it says). With ``steps`` the epochs follow each other without a cut, so that all
    batches are full.
    """

    def order(epoch: int) -> list[tuple[int, int]]:
        shuffled = torch.randperm(count, generator=generator(seed, *path, "order", epoch))
        return [(epoch, int(index)) for index in shuffled]

    if steps is not None:
        waiting: list[tuple[int, int]] = []
        epoch = 0
        for _ in range(steps):
            while len(waiting) < batch_size:
                waiting += order(epoch)
                epoch += 1
            yield waiting[:batch_size]
            waiting = waiting[batch_size:]
        return
    for epoch in range(epochs):
        samples = order(epoch)
        cuts = list(range(0, count, batch_size))
        if batch_size > 1 and len(cuts) > 1 and count - cuts[-1] == 1:
            cuts.pop()
        for start, end in zip(cuts, [*cuts[1:], count], strict=True):
            yield samples[start:end]


def count_steps(count: int, config: TrainingConfig) -> int:
    """Return how many optimiser steps one round takes with ``count`` examples."""
    if count == 0:
        return 0
    if config.local_steps is not None:
        return config.local_steps
    full, rest = divmod(count, config.batch_size)
    return config.local_epochs * (full + (rest > 1 or (rest == 1 and full == 0)))


class LocalTraining:
    """A network, a task and a recipe, with which all clients of a process train and are scored.

    Args:
        module: the network; its weights are overwritten by whatever model is trained or scored.
        task: loss, prediction and scores.
        config: the recipe.
        device: where to compute.
    """

    def __init__(
        self, module: nn.Module, task: Task, config: TrainingConfig, device: str = "cpu"
    ) -> None:
        self.module, self.task, self.config = module.to(device), task, config
        self.device = torch.device(device)
        self.parts = find_parts(module)
        self._warned = False

    def load(self, model: Tensors) -> None:
        """Put ``model`` into the network; every tensor must be there."""
        self.module.load_state_dict(dict(model))

    def current(self) -> Tensors:
        """Return a copy of what the network holds."""
        return Tensors(self.module.state_dict()).clone()

    def fit(
        self,
        model: Tensors,
        data: Dataset,
        *,
        seed: int,
        path: Path,
        lr: float,
        epochs: int | None = None,
        steps: int | None = None,
        penalty: Callable[[Tensors], Tensor] | None = None,
        correct: Callable[[Tensors, Tensors], Tensors] | None = None,
        trainable: Collection[str] | None = None,
        optimizer_state: dict[str, Any] | None = None,
    ) -> tuple[Tensors, Progress]:
        """Train ``model`` on ``data``.

        Args:
            model: start; left as it is.
            data: the training examples.
            seed: of the run.
            path: name of this fit; order, crops, augmentation and dropout follow from it.
            lr: learning rate.
            epochs: passes over the data; by default the recipe's.
            steps: optimiser steps instead; by default the recipe's, unless ``epochs`` is given.
            penalty: added to the loss, a function of the current parameters.
            correct: maps gradient and current parameters to the gradient that the optimiser
                receives.
            trainable: names of the parameters that move; all by default. Normalisation layers whose
                own parameters stay put use and keep their running statistics.
            optimizer_state: the optimiser's state by parameter name, read and replaced in place;
                None: started anew.

        Returns:
            The trained model and what was done.

        Raises:
            DivergedError: the loss became NaN or infinite.
            ConfigError: there is no example to train on.
        """
        if len(data) == 0:
            raise ConfigError("no training examples")
        config = self.config
        if epochs is None:
            epochs, steps = config.local_epochs, config.local_steps if steps is None else steps
        self.load(model)
        moving = {
            n: p
            for n, p in self.module.named_parameters()
            if p.requires_grad and (trainable is None or n in trainable)
        }
        optimizer = config.build_optimizer(list(moving.values()), lr)
        if optimizer_state:
            _restore(optimizer, moving, optimizer_state)
        total, taken = 0.0, 0
        with ambient(seed, *path, "ambient"), self._frozen(moving):
            for samples in plan_batches(
                len(data), config.batch_size, epochs=epochs, steps=steps, seed=seed, path=path
            ):
                batch = self._draw(data, samples, seed, path)
                total += self._step(batch, optimizer, moving, penalty, correct, taken, lr)
                taken += 1
        if optimizer_state is not None:
            optimizer_state.clear()
            optimizer_state.update(_extract(optimizer, moving))
        optimizer.zero_grad(set_to_none=True)
        return self.current(), Progress(total / max(taken, 1), taken)

    def _draw(
        self, data: Dataset, samples: Sequence[tuple[int, int]], seed: int, path: Path
    ) -> Batch:
        batch = data.batch([index for _, index in samples], _SampleGenerators(seed, path, samples))
        return {key: tensor.to(self.device) for key, tensor in batch.items()}

    def _step(
        self,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        moving: dict[str, nn.Parameter],
        penalty: Callable[[Tensors], Tensor] | None,
        correct: Callable[[Tensors, Tensors], Tensors] | None,
        step: int,
        lr: float,
    ) -> float:
        """Take one optimiser step and return the loss before it, penalty excluded."""
        single = len(batch["image"]) == 1
        if single:
            self._normalise_by_running_statistics()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast):
            output = self.module(batch["image"])
        loss = self.task.loss(output.float() if self.config.autocast else output, batch)
        value = float(loss.detach())
        if value != value or value in (float("inf"), float("-inf")):
            raise DivergedError(
                f"the loss became {value} at step {step + 1} (lr {lr:g}); lower "
                f"training.lr or set clip_norm"
            )
        if penalty:
            loss = loss + penalty(Tensors(moving))
        loss.backward()  # type: ignore[no-untyped-call]
        if correct:
            self._correct(moving, correct)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(moving.values()), self.config.clip_norm)
        optimizer.step()
        return value

    @staticmethod
    def _correct(
        moving: dict[str, nn.Parameter], correct: Callable[[Tensors, Tensors], Tensors]
    ) -> None:
        gradient = Tensors(
            (n, p.grad if p.grad is not None else torch.zeros_like(p)) for n, p in moving.items()
        )
        corrected = correct(gradient, Tensors((n, p.detach()) for n, p in moving.items()))
        for name, parameter in moving.items():
            parameter.grad = corrected[name]

    def _normalise_by_running_statistics(self) -> None:
        """Put batch normalisation in evaluation mode.

        One example has no batch statistics worth learning.
        """
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()
                if not self._warned:
                    self._warned = True
                    logger.warning(
                        "a batch of one example: batch normalisation uses its running statistics"
                    )

    def _frozen(self, moving: dict[str, nn.Parameter]) -> _Frozen:
        return _Frozen(self.module, {id(parameter) for parameter in moving.values()})

    def loss(self, model: Tensors, data: Dataset, *, seed: int, path: Path) -> float:
        """Return the mean loss over one pass of ``data`` in evaluation mode.

        Equal paths see equal crops.
        """
        self.load(model)
        self.module.eval()
        total, count = 0.0, 0
        with torch.no_grad(), ambient(seed, *path, "ambient"):
            for samples in plan_batches(
                len(data), self.config.batch_size, epochs=1, steps=None, seed=seed, path=path
            ):
                batch = self._draw(data, samples, seed, path)
                total += float(self.task.loss(self.module(batch["image"]), batch)) * len(samples)
                count += len(samples)
        return total / count

    def predictions(
        self, model: Tensors, data: Dataset, only: Collection[int] | None = None
    ) -> Iterator[tuple[int, Example, Tensor]]:
        """Yield index, example and prediction of every case, or of the cases ``only``."""
        self.load(model)
        self.module.eval()
        with (
            torch.no_grad(),
            torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.autocast),
        ):
            for index in range(len(data)) if only is None else sorted(only):
                example = data.example(index)
                on_device = {key: tensor.to(self.device) for key, tensor in example.batch.items()}
                example = replace(example, batch=on_device)
                yield index, example, self.task.predict(self.module, example)


class _Frozen:
    """Training mode in which only some parameters move; the network is as before afterwards."""

    def __init__(self, module: nn.Module, moving: set[int]) -> None:
        self._module, self._moving = module, moving
        self._stopped: list[nn.Parameter] = []

    def __enter__(self) -> None:
        self._module.train()
        for layer in self._module.modules():
            own = list(layer.parameters(recurse=False))
            still = [p for p in own if id(p) not in self._moving]
            if own and len(still) == len(own) and isinstance(layer, nn.modules.batchnorm._NormBase):
                layer.eval()
            self._stopped += [p for p in still if p.requires_grad]
        for parameter in self._stopped:
            parameter.requires_grad_(False)

    def __exit__(self, *_: object) -> None:
        for parameter in self._stopped:
            parameter.requires_grad_(True)


def _extract(optimizer: torch.optim.Optimizer, moving: dict[str, nn.Parameter]) -> dict[str, Any]:
    """Return the optimiser's state by parameter name."""
    return {
        name: Tensors(
            (key, value.clone())
            for key, value in optimizer.state[p].items()
            if isinstance(value, Tensor)
        )
        for name, p in moving.items()
        if p in optimizer.state
    }


def _restore(
    optimizer: torch.optim.Optimizer, moving: dict[str, nn.Parameter], state: dict[str, Any]
) -> None:
    """Put back what `_extract` returned; the step count stays on the CPU, where torch keeps it."""
    for name, parameter in moving.items():
        if name in state:
            optimizer.state[parameter] = {
                key: tensor.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, tensor in state[name].items()
            }
