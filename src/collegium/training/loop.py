"""The one local loop: every algorithm trains through `LocalTraining.fit`."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from collegium.core.dataset import Batch, Dataset, Example, full_mask
from collegium.core.lazy import nn, torch
from collegium.core.model_parts import MemoryFormat, find_parts, orders_of_weights, undecayed
from collegium.core.optimizers import unmarked
from collegium.core.randomness import ambient
from collegium.core.settings import (
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    settings,
)
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.tasks import Task
from collegium.training.compilation import CompiledNetwork
from collegium.training.privacy import CaseNoise, PrivacyConfig

if TYPE_CHECKING:
    from torch import Tensor

    from collegium.training.batches import Path
    from collegium.training.objectives import LiveNetwork, Objective, Output

Seen = TypeVar("Seen")
logger = logging.getLogger(__name__)


@settings
class TrainingConfig:
    """The recipe of local training.

    Attributes:
        optimizer: "sgd", "adam" or "adamw".
        lr: learning rate of the first round, or of the first after the warm-up.
        lr_decay: factor applied to the learning rate after every ``decay_every`` rounds.
        decay_every: how many rounds have the same power of ``lr_decay``.
        schedule: what else lowers the learning rate from round to round: "constant" nothing,
            "cosine" half a cosine over all rounds from ``lr`` towards 0, "polynomial" a power of
            the share of rounds that are left; see `lr_of`.
        power: of "polynomial"; 1 is a straight line.
        warm_up: how many rounds, the first ones, raise the learning rate to ``lr`` in equal steps;
            schedule and decay begin after them.
        momentum: of SGD.
        weight_decay: L2 penalty (decoupled for adamw), of all parameters but those that their layer
            exempts; see `collegium.core.model_parts.undecayed`.
        amsgrad: of adam and adamw.
        freeze: parts of the network that are not trained, each a role ("encoder", "head", "norm",
            ...) or the name of a submodule or tensor; their running statistics stay as they are.
        batch_size: examples per optimiser step.
        local_epochs: passes over the site's training data per round.
        local_steps: optimiser steps per round instead of epochs, the same at every site whatever
            its size.
        clip_norm: largest Euclidean norm of the gradient; None: not clipped.
        optimizer_state: "reset" starts every round with a new optimiser, "keep" keeps its moments
            at the client.
        precision: of training's forward passes: "fp32", or "bf16" for convolutions and matrix
            products in bfloat16, with weights, losses and updates in float32. It is faster on
            processors and cards that compute in it. Models are always scored in float32.
        memory_format: the order of the network's weights in memory: "channels_last", "contiguous",
            or "auto" by the kind of network; see `collegium.core.model_parts.set_memory_format`.
        compile: "on" compiles the network for training steps on whole batches of the task's loss,
            where all parameters are trained; "auto" is decided by an experiment, see
            `collegium.experiment.compilation.decide_compilation`, and "off" otherwise.
        privacy: differential privacy of what leaves a site; None: none.
    """

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    lr: Positive = 1e-3
    lr_decay: Positive = 1.0
    decay_every: PositiveInt = 1
    schedule: Literal["constant", "cosine", "polynomial"] = "constant"
    power: Positive = 1.0
    warm_up: NonNegativeInt = 0
    momentum: Fraction = 0.0
    weight_decay: NonNegative = 0.0
    amsgrad: bool = False
    freeze: tuple[str, ...] = ()
    batch_size: PositiveInt = 8
    local_epochs: PositiveInt = 1
    local_steps: PositiveInt | None = None
    clip_norm: Positive | None = None
    optimizer_state: Literal["reset", "keep"] = "reset"
    precision: Literal["fp32", "bf16"] = "fp32"
    memory_format: MemoryFormat = "auto"
    compile: Literal["auto", "on", "off"] = "auto"
    privacy: PrivacyConfig | None = None

    @property
    def optimizer_kind(self) -> str:
        """The optimiser by the name that `Algorithm.optimizers` uses."""
        return "sgd with momentum" if self.optimizer == "sgd" and self.momentum else self.optimizer

    def lr_of(self, number: int, rounds: int) -> float:
        """Return the learning rate of a round.

        In round n of N with W rounds of warm-up it is ``lr`` n / (W + 1) up to round W. After that,
        with k = n - W - 1 and K = N - W, it is ``lr`` ``lr_decay`` ^ floor(k / ``decay_every``)
        times 1 for "constant", (1 + cos(pi k / K)) / 2 for "cosine", and (1 - k / K) ^ ``power``
        for "polynomial".

        Args:
            number: the round; work before the first has its rate, with a cosine or a polynomial
                work after the last has that of the last.
            rounds: how many rounds there are.
        """
        before = max(number - 1, 0)
        if before < self.warm_up:
            return self.lr * (before + 1) / (self.warm_up + 1)
        k, total = before - self.warm_up, max(rounds - self.warm_up, 1)
        lr: float = self.lr * self.lr_decay ** (k // self.decay_every)
        if self.schedule == "constant":
            return lr
        k = min(k, total - 1)
        if self.schedule == "cosine":
            return lr * (1 + math.cos(math.pi * k / total)) / 2
        return lr * float((1 - k / total) ** self.power)

    def build_optimizer(
        self, trained: Mapping[str, nn.Parameter], lr: float, undecayed: Collection[str] = ()
    ) -> torch.optim.Optimizer:
        """Return a new optimiser; on a processor one kernel takes its steps.

        Args:
            trained: the parameters that are trained, by name.
            lr: learning rate.
            undecayed: the names of those that weight decay leaves alone.
        """
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in trained.items() if n not in undecayed]},
            {"params": [p for n, p in trained.items() if n in undecayed], "weight_decay": 0.0},
        ]
        parameters = [group for group in groups if group["params"]]
        own: dict[str, Any] = {"lr": lr, "weight_decay": self.weight_decay}
        own["fused"] = all(p.device.type == "cpu" for p in trained.values()) or None
        if self.optimizer == "sgd":
            return unmarked(torch.optim.SGD)(parameters, momentum=self.momentum, **own)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return unmarked(kind)(parameters, amsgrad=self.amsgrad, **own)


def check_warm_up(config: TrainingConfig, rounds: int) -> None:
    """Check that rounds are left after the warm-up of the learning rate.

    Args:
        config: the recipe.
        rounds: how many rounds there are in all.

    Raises:
        ConfigError: none is.
    """
    if config.warm_up >= rounds:
        raise ConfigError(
            f"warm_up is {config.warm_up}, of {rounds} rounds in all; give a number from 0 to "
            f"{rounds - 1}"
        )


@dataclass(frozen=True)
class Progress:
    """The result of one call of `LocalTraining.fit` beside the model.

    Attributes:
        loss: mean training loss.
        steps: optimiser steps.
    """

    loss: float
    steps: int


@dataclass(frozen=True)
class Fit:
    """A call of `LocalTraining.fit` by a method that changes nothing in the local loop.

    Attributes:
        local: network, task and recipe.
        model: see `LocalTraining.fit`, as are all below.
        data: the training examples.
        seed: of the run.
        path: name of this fit.
        lr: learning rate.
        epochs: passes over the data.
        steps: optimiser steps instead.
        optimizer_state: the optimiser's state by parameter name, replaced in place.
    """

    local: LocalTraining
    model: Tensors
    data: Dataset
    seed: int
    path: Path
    lr: float
    epochs: int | None
    steps: int | None
    optimizer_state: dict[str, Any] | None

    def alone(self) -> tuple[Tensors, Progress]:
        """Train on its own; see `LocalTraining.fit`."""
        return self.local.fit(
            self.model,
            self.data,
            seed=self.seed,
            path=self.path,
            lr=self.lr,
            epochs=self.epochs,
            steps=self.steps,
            optimizer_state=self.optimizer_state,
        )

    def plan(self) -> Iterator[list[tuple[int, int]]]:
        """Return the batches as pairs of epoch and index; see `plan_batches`."""
        from collegium.training.batches import plan_batches

        config, epochs, steps = self.local.config, self.epochs, self.steps
        if epochs is None:
            epochs, steps = config.local_epochs, config.local_steps if steps is None else steps
        count, size = len(self.data), config.batch_size
        return plan_batches(count, size, epochs=epochs, steps=steps, seed=self.seed, path=self.path)


WAITING: ContextVar[Callable[[Fit], tuple[Tensors, Progress]] | None] = ContextVar(
    "WAITING", default=None
)
"""Where handlers of several sites run in turns: waits until a fit is done, perhaps with others."""


def count_steps(count: int, config: TrainingConfig, *, epochs: int | None = None) -> int:
    """Return the number of optimiser steps of one round, or of other work of so many epochs.

    Args:
        count: number of training examples.
        config: the recipe.
        epochs: passes of other work; with ``local_steps`` that many times these. None: a round.
    """
    if count == 0:
        return 0
    if config.local_steps is not None:
        return config.local_steps * (1 if epochs is None else epochs)
    full, rest = divmod(count, config.batch_size)
    return (config.local_epochs if epochs is None else epochs) * (
        full + (rest > 1 or (rest == 1 and full == 0))
    )


class LocalTraining:
    """A network, a task and a recipe, shared by all clients of a process for training and scoring.

    Args:
        module: the network; every model that is trained or scored overwrites its weights.
        task: loss, prediction and scores.
        config: the recipe.
        device: where to compute.
    """

    def __init__(
        self, module: nn.Module, task: Task, config: TrainingConfig, device: str = "cpu"
    ) -> None:
        self.module, self.task, self.config = module.to(device), task, config
        self.device = torch.device(device)
        self.parts, self.undecayed = find_parts(module), undecayed(module)
        self._orders = orders_of_weights(module)
        self._added = Tensors(module.state_dict()).select(self.parts.added).clone()
        self._compiled = CompiledNetwork(self.module) if config.compile == "on" else None
        self._warned = False

    def under(self, settings: Mapping[str, Any]) -> LocalTraining:
        """Return the training of the same network under a recipe that differs in some settings.

        Args:
            settings: fields of `TrainingConfig`; without any this object is returned.

        Raises:
            ConfigError: there is no such setting, or a value is out of range.
        """
        if not settings:
            return self
        found = copy.copy(self)
        found.config = replace(self.config, **settings)
        return found

    def with_task(self, task: Task) -> LocalTraining:
        """Return the same network and recipe with another task, such as that of one site."""
        other = copy.copy(self)
        other.task = task
        return other

    def load(self, model: Tensors) -> None:
        """Load ``model``, which must be whole, into the network.

        What a method has added is as initialised where the model has nothing of it.
        """
        if self._added.keys().isdisjoint(model):
            model = model | self._added
        self.module.load_state_dict(dict(model))

    def current(self) -> Tensors:
        """Return a copy of the network's tensors."""
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
        objective: Objective | None = None,
        trainable: Collection[str] | None = None,
        optimizer_state: dict[str, Any] | None = None,
        private: CaseNoise | None = None,
    ) -> tuple[Tensors, Progress]:
        """Train ``model`` on ``data``.

        Args:
            model: the start; it is not changed.
            data: the training examples.
            seed: of the run.
            path: name of this fit; order, crops, augmentation and dropout follow from it.
            lr: learning rate.
            epochs: passes over the data; by default the recipe's.
            steps: optimiser steps instead; by default the recipe's, unless ``epochs`` is given.
            penalty: added to the loss, a function of the current parameters.
            correct: maps gradient and current parameters to the gradient that the optimiser
                receives.
            objective: minimised instead of the task's loss; see `collegium.training.objectives`.
            trainable: names of the parameters that are trained; by default all. Normalisation
                layers whose own parameters are not trained use and keep their running statistics.
            optimizer_state: the optimiser's state by parameter name, read and replaced in place;
                None: a new one.
            private: how the gradients of single cases are clipped, and their noise; None: they are
                not. `collegium.runtime.local_work.LocalWork.fit` makes it of the recipe.

        Returns:
            The trained model, and its mean loss and number of steps.

        Raises:
            DivergedError: the loss became NaN or infinite.
            ConfigError: there is no example to train on, or noise would not cover the objective.
        """
        from collegium.training.objectives import LiveNetwork

        if len(data) == 0:
            raise ConfigError("no training examples")
        config, wait = self.config, WAITING.get()
        call = Fit(self, model, data, seed, path, lr, epochs, steps, optimizer_state)
        if private is not None and not (penalty is None and objective is None):
            raise ConfigError(
                "training.privacy: noise covers the task's loss alone, and this method minimises "
                "another objective; choose another method"
            )
        if wait and all(own is None for own in (penalty, correct, objective, trainable, private)):
            return wait(call)
        self.load(model)
        trained = {
            n: p
            for n, p in self.module.named_parameters()
            if p.requires_grad and (trainable is None or n in trainable)
        }
        whole = trainable is None and not self.parts.frozen
        optimizer = config.build_optimizer(trained, lr, self.undecayed)
        if optimizer_state:
            restore_state(optimizer, trained, optimizer_state)
        network = LiveNetwork(
            self.module,
            self.task,
            trained,
            lr=lr,
            precision=config.precision,
            compiled=self._compiled if whole and objective is None and private is None else None,
            whole=config.batch_size,
        )
        hooks = _Hooks(objective or self._task_loss, penalty, correct)
        total, taken = 0.0, 0
        mode = training_mode(self.module, trained, self.parts.frozen)
        with ambient(seed, *path, "ambient"), mode:
            if private is not None:
                from collegium.training.private_steps import take_private_steps

                total, taken = take_private_steps(call, network, optimizer, correct, private)
            else:
                for taken, samples in enumerate(call.plan(), start=1):
                    batch = self.draw(data, samples, seed, path)
                    with network.compiling(batch["image"]):
                        total += self._step(batch, optimizer, network, hooks, taken)
        if optimizer_state is not None:
            optimizer_state.clear()
            optimizer_state.update(state_by_name(optimizer, trained))
        optimizer.zero_grad(set_to_none=True)
        return self.current(), Progress(total / max(taken, 1), taken)

    def draw(
        self, data: Dataset, samples: Sequence[tuple[int, int]], seed: int, path: Path
    ) -> Batch:
        """Return a batch where the network computes, in the order of its weights; see `draw_batch`.

        A CUDA device works on what is left of the step before meanwhile: nothing here waits for it,
        and it copies the batch from pinned memory when it comes to it.

        Args:
            data: the examples.
            samples: pairs of epoch and index.
            seed: of the run.
            path: name from which the generators follow.
        """
        from collegium.training.batches import draw_batch

        batch = draw_batch(data, samples, seed, path)
        if self.device.type == "cuda":
            batch = {key: tensor.pin_memory() for key, tensor in batch.items()}
        return self._placed(batch)

    def _step(
        self,
        batch: Batch,
        optimizer: torch.optim.Optimizer,
        network: LiveNetwork,
        hooks: _Hooks,
        number: int,
    ) -> float:
        """Take one optimiser step and return the task's loss before it."""
        if len(batch["image"]) == 1:
            self.normalise_by_running_statistics()
        optimizer.zero_grad(set_to_none=True)
        loss, added = hooks.objective(network, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise diverged(value, number, network.lr)
        if added is not None:
            loss = loss + added
        if hooks.penalty:
            loss = loss + hooks.penalty(network.parameters)
        loss.backward()  # type: ignore[no-untyped-call]
        if hooks.correct:
            correct_gradients(network.trained, hooks.correct)
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(list(network.trained.values()), self.config.clip_norm)
        optimizer.step()
        return value

    def _task_loss(self, network: LiveNetwork, batch: Batch) -> tuple[Tensor, None]:
        """The objective of a method that has none of its own."""
        return self.task.loss(network.predict(batch["image"]), batch), None

    def normalise_by_running_statistics(self) -> None:
        """Put batch normalisation in evaluation mode: one example has no useful statistics."""
        for layer in self.module.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.eval()
                if not self._warned:
                    logger.warning(
                        "a batch of one example: batch normalisation uses its running statistics"
                    )
                self._warned = True

    def loss(self, model: Tensors, data: Dataset, *, seed: int, path: Path) -> float:
        """Return the mean loss over one pass of the data in evaluation mode.

        Args:
            model: a whole model.
            data: the examples.
            seed: of the run.
            path: name from which the crops follow.
        """
        self.load(model)
        self.module.eval()
        total, count = 0.0, 0
        with torch.no_grad(), ambient(seed, *path, "ambient"):
            for batch in self._one_pass(data, seed, path):
                number = len(batch["image"])
                total += float(self.task.loss(self.module(batch["image"]), batch)) * number
                count += number
        return total / count

    def collect(
        self,
        model: Tensors,
        look: Callable[[Batch, Output], Seen],
        data: Dataset,
        *,
        seed: int,
        path: Path,
        whole: bool = False,
    ) -> list[Seen]:
        """Return what a function makes of every batch of one pass of the data in evaluation mode.

        Args:
            model: a whole model.
            look: receives a batch and the network's output for it, without gradients.
            data: the examples.
            seed: of the run.
            path: name from which the crops follow.
            whole: whether batches are windows of whole cases; see
                `collegium.core.algorithm.Client.collect`.

        Raises:
            ConfigError: the network has no head.
        """
        from collegium.training.objectives import LiveNetwork

        self.load(model)
        self.module.eval()
        network = LiveNetwork(self.module, self.task, {}, lr=0.0)
        with torch.no_grad(), ambient(seed, *path, "ambient"):
            batches = self._windows(data) if whole else self._one_pass(data, seed, path)
            return [look(batch, network.forward(batch["image"])) for batch in batches]

    def _one_pass(self, data: Dataset, seed: int, path: Path) -> Iterator[Batch]:
        """Yield the batches of one pass of the data."""
        from collegium.training.batches import plan_batches

        for samples in plan_batches(
            len(data), self.config.batch_size, epochs=1, steps=None, seed=seed, path=path
        ):
            yield self.draw(data, samples, seed, path)

    def _windows(self, data: Dataset) -> Iterator[Batch]:
        """Yield the windows of whole cases, and where their pixels count."""
        cut = partial(self.task.windows, self.module)
        for index in range(len(data)):
            batch = data.example(index).batch
            mask = batch.get("mask", full_mask(batch["image"])).unsqueeze(1)
            for image, inside in zip(cut(batch["image"]), cut(mask), strict=True):
                yield {"image": image, "mask": inside.squeeze(1)}

    def predictions(
        self, model: Tensors, data: Dataset, only: Collection[int] | None = None
    ) -> Iterator[tuple[int, Example, Tensor]]:
        """Yield index, example and prediction of cases.

        Args:
            model: a whole model.
            data: the cases.
            only: indices of the cases; None: all.
        """
        self.load(model)
        self.module.eval()
        with torch.no_grad():
            indices = range(len(data)) if only is None else sorted(only)
            cases = map(data.example, indices)
            examples = (replace(case, batch=self._placed(case.batch)) for case in cases)
            found = self.task.predict_all(self.module, examples)
            for index, (example, prediction) in zip(indices, found, strict=True):
                yield index, example, prediction

    def _placed(self, batch: Batch) -> Batch:
        """Return a batch where the network computes, its images in the order of the weights.

        Each convolution that takes images in another order copies them, once more for its gradient.
        """
        placed = {key: tensor.to(self.device, non_blocking=True) for key, tensor in batch.items()}
        order = self._orders.get(placed["image"].dim(), torch.preserve_format)
        return placed | {"image": placed["image"].to(memory_format=order)}


def diverged(value: float, number: int, lr: float) -> DivergedError:
    """Return the error of a loss that is not finite.

    Args:
        value: the loss.
        number: of the step.
        lr: learning rate.
    """
    return DivergedError(
        f"the loss became {value} at step {number} (lr {lr:g}); lower training.lr or set clip_norm"
    )


@dataclass(frozen=True)
class _Hooks:
    """The parts of the local loop that a method may define."""

    objective: Objective
    penalty: Callable[[Tensors], Tensor] | None
    correct: Callable[[Tensors, Tensors], Tensors] | None


def correct_gradients(
    trained: Mapping[str, nn.Parameter], correct: Callable[[Tensors, Tensors], Tensors]
) -> None:
    """Replace the gradients by what a method makes of them.

    Args:
        trained: the parameters that are trained, by name.
        correct: see `LocalTraining.fit`.
    """
    gradient = Tensors(
        (n, torch.zeros_like(p) if p.grad is None else p.grad) for n, p in trained.items()
    )
    corrected = correct(gradient, Tensors((n, p.detach()) for n, p in trained.items()))
    for name, parameter in trained.items():
        parameter.grad = corrected[name]


@contextmanager
def training_mode(
    module: nn.Module, trained: Mapping[str, nn.Parameter], frozen: Collection[str] = ()
) -> Iterator[None]:
    """Put a network in training mode, with gradients for the trained parameters alone.

    Args:
        module: the network.
        trained: the parameters that are trained, by name.
        frozen: the tensors that never are; see `ModelParts.frozen`.
    """
    fixed = {*module.parameters()} - {*trained.values()}
    stopped = [parameter for parameter in fixed if parameter.requires_grad]
    module.train()
    for place, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase):
            own = {*layer.parameters(recurse=False)}
            buffers = {f"{place}.{name}" for name, _ in layer.named_buffers(recurse=False)}
            if own <= fixed if own else not buffers.isdisjoint(frozen):
                layer.eval()
    for parameter in stopped:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in stopped:
            parameter.requires_grad_(True)


def state_by_name(
    optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]
) -> dict[str, Any]:
    """Return a copy of the optimiser's state by parameter name.

    Args:
        optimizer: the optimiser.
        trained: its parameters by name.
    """
    from torch import Tensor

    return {
        name: Tensors(
            (key, value.clone())
            for key, value in optimizer.state[p].items()
            if isinstance(value, Tensor)
        )
        for name, p in trained.items()
        if p in optimizer.state
    }


def restore_state(
    optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter], state: dict[str, Any]
) -> None:
    """Load the result of `state_by_name`; the step count stays on the CPU, as torch keeps it.

    Args:
        optimizer: the optimiser.
        trained: its parameters by name.
        state: the state by parameter name.
    """
    for name, parameter in trained.items():
        if name in state:
            optimizer.state[parameter] = {
                key: tensor.to("cpu" if key == "step" else parameter.device, copy=True)
                for key, tensor in state[name].items()
            }
