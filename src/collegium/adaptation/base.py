"""What makes models fit a site outside the federation, from its unlabelled images alone.

An adapter gets the models that the federation handed out and the site's images. It never sees a
label: scores are taken elsewhere, from the predictions that it delivers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from collegium.core.dataset import Dataset, Example
from collegium.core.randomness import ambient
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.tasks import Task

GLOBAL = "global"
"""The name of the global model among those handed out."""

Deliver = Callable[[str, int, Tensor], None]
"""Takes the prediction of one case: the model's name ("" where there is one only), the case's
number, and what `Task.predict` gives."""


class Images(Protocol):
    """The cases of a site, without labels."""

    def __len__(self) -> int:
        """Give the number of cases."""

    def example(self, index: int) -> Example:
        """Give a whole case; its batch holds "image" and, where there is one, "mask"."""


class Unlabelled:
    """The cases of a data set, without their labels."""

    def __init__(self, data: Dataset) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def example(self, index: int) -> Example:
        """Give a whole case without its label."""
        example = self._data.example(index)
        kept = {key: tensor for key, tensor in example.batch.items() if key != "label"}
        return replace(example, batch=kept)


@dataclass(frozen=True)
class Sources:
    """The models that were handed out, and what it takes to run them.

    Attributes:
        models: whole models by name, one of the server's or that of the site whose personal model
            it is. They may be read from the disk at every look, so look at one at a time and let
            it go.
        network: makes the network.
        task: how a case is predicted.
        device: where to compute.
        seed: of everything random.
        server: which names are of the server's own models: `GLOBAL`, and those of methods that have
            several, such as one for each cluster.
    """

    models: Mapping[str, Tensors]
    network: Callable[[], nn.Module]
    task: Task
    device: str = "cpu"
    seed: int = 0
    server: Collection[str] = (GLOBAL,)

    @property
    def personal(self) -> list[str]:
        """The names of the personal models, sorted; where no site handed one out, of the clusters'.

        Sites of a cluster may have equal models; each site counts.
        """
        sites = sorted(name for name in self.models if name not in self.server)
        return sites or sorted(name for name in self.models if name != GLOBAL)

    def require_global(self, adapter: str) -> Tensors:
        """Return the global model.

        Raises:
            ConfigError: none was handed out.
        """
        if GLOBAL not in self.models:
            raise ConfigError(
                f"{adapter} starts from the global model, but what was handed out is "
                f"{', '.join(self.models) or 'nothing'}; choose a method that has one, or the "
                f"adapters ensemble or average"
            )
        return self.models[GLOBAL]

    def require_personal(self, adapter: str) -> list[str]:
        """Return the names of the personal models.

        Raises:
            ConfigError: none was handed out.
        """
        if not self.personal:
            raise ConfigError(
                f"{adapter} needs personal models, but no site handed one out; let sites share it "
                f"(share: [personal] at the site), or choose a method that has personal models"
            )
        return self.personal

    def starting_model(self) -> tuple[Tensors, list[str]]:
        """Return a model to start from, and the names of those that it is the mean of.

        The global one; without it, the mean of the server's others or, without any, of the personal
        models. Integer counters of a mean are the maximum.

        Raises:
            ConfigError: no model was handed out.
        """
        if GLOBAL in self.models:
            return self.models[GLOBAL], [GLOBAL]
        if not self.models:
            raise ConfigError("no model was handed out; finish the run first")
        running = Mean()
        names = sorted(name for name in self.models if name in self.server) or self.personal
        for name in names:
            running.add(self.models[name], 1.0, source=f"the model {name!r}")
        return running.result(), names

    def open(self, model: Tensors) -> nn.Module:
        """Return a new network that holds ``model``, in evaluation mode, on the device."""
        with ambient(0, "adaptation"):
            module = self.network()
        module.load_state_dict(dict(model))
        return module.to(self.device).eval()


@dataclass(frozen=True)
class Spread:
    """How the cases differ in one routed layer; a case is an image or, of a large one, a window.

    Deviations are those over all cases of the site, so that a single case has 0.

    Attributes:
        deviations: by source, the standard deviation of its coefficient.
        variation: mean of the weight variation, see `collegium.adaptation._variation`.
        variation_deviation: the standard deviation of the weight variation.
    """

    deviations: Mapping[str, float]
    variation: float
    variation_deviation: float


@dataclass
class Account:
    """What an adaptation did.

    Attributes:
        sources: the names of the models that it used.
        steps: optimiser steps taken.
        losses: a row for each `over`, by name; "step" counts them, "total" was minimised.
        chosen: the "step" of the row whose model predicts; None where none was chosen.
        coefficients: by layer in the order of the network, then by source, the mean over the cases
            of the routing coefficients.
        notes: what else a reader should know, a sentence each.
        spreads: by layer, in the order of `coefficients`, how the cases differ.
        over: what a row of losses is of: an optimiser "step", a "pass" over all cases, a "batch" of
            cases or a "case".
    """

    sources: Sequence[str]
    steps: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)
    chosen: int | None = None
    coefficients: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spreads: dict[str, Spread] = field(default_factory=dict)
    over: str = "step"


@dataclass(frozen=True)
class Adapted:
    """What an adaptation ends with.

    Attributes:
        account: what it did.
        model: the tensors of the adapted network, by the network's names and those that the adapter
            adds; None where nothing was adapted.
    """

    account: Account
    model: Tensors | None = None


@dataclass(frozen=True)
class Adapter(ABC):
    """Subclass as a frozen dataclass whose fields are the hyper-parameters.

    Attributes:
        needs: what must have been handed out: "global", "personal", or both.
    """

    needs: ClassVar[Collection[str]] = ("global",)

    def check(self, module: nn.Module) -> None:  # noqa: B027  (most take any network)
        """Raise a `ConfigError` if such a network cannot be adapted."""

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:  # noqa: B027
        """Raise a `ConfigError` if what such a network gives for such images cannot be adapted.

        Args:
            task: how a case is predicted.
            images: (B, C, *spatial) or rows (B, features), on the device "meta": shapes only.
            output: what the network gives for them, likewise.
        """

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Adapt to the cases and deliver a prediction of every one.

        Args:
            sources: the models that were handed out.
            cases: the site's cases, one or more.
            deliver: called once for each model that predicts and each case.

        Raises:
            ConfigError: the adapter does not suit the models or the task.
            DivergedError: the loss became NaN or infinite.
        """


def groups(cases: Images, size: int) -> Iterator[tuple[list[int], Example]]:
    """Yield the cases in order, neighbours of one shape joined to batches of at most ``size``.

    A case that is a batch of its own, such as the slices of a volume, is not joined with others. A
    vector is never alone where it has neighbours, since batch normalisation cannot tell one vector
    from its mean: ``size`` counts as 2 or more for vectors, and a last one joins those before it.

    Yields:
        The numbers of the cases, and an example whose image is (B, C, *spatial).
    """
    waiting: list[tuple[int, Example]] = []
    for index in range(len(cases)):
        example = cases.example(index)
        shape = example.batch["image"].shape
        alone = len(shape) == 2 and (len(waiting) == 1 or index == len(cases) - 1)
        full = len(waiting) >= size and not alone
        if waiting and (full or shape[0] > 1 or shape != waiting[0][1].batch["image"].shape):
            yield _joined(waiting)
            waiting = []
        waiting.append((index, example))
    if waiting:
        yield _joined(waiting)


def _joined(members: Sequence[tuple[int, Example]]) -> tuple[list[int], Example]:
    first = members[0][1]
    images = torch.cat([example.batch["image"] for _, example in members])
    return [index for index, _ in members], replace(first, batch={"image": images})


def predict(
    task: Task, module: nn.Module, members: Sequence[int], example: Example
) -> Iterator[tuple[int, Tensor]]:
    """Yield the number and the prediction of every case that `groups` joined."""
    with torch.no_grad():
        prediction = task.predict(module, example)
    if len(members) == 1:
        yield members[0], prediction
        return
    yield from zip(members, torch.split(prediction, 1), strict=True)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor, adapter: str) -> float:
    """Take one optimiser step on a loss, and return the loss.

    Raises:
        DivergedError: the loss is NaN or infinite.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise DivergedError(
            f"the loss of {adapter} became {value}; lower its lr, or look at the images"
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value
