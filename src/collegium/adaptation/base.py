"""Adapters: they fit models to a site outside the federation, from its unlabelled cases alone.

An adapter gets the models that the federation deployed and the site's cases. It never sees a label:
the predictions that it delivers are scored elsewhere.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias

from collegium.core.dataset import Batch, Example, full_mask, join
from collegium.core.lazy import nn, torch
from collegium.core.randomness import ambient
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError, DivergedError
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor

GLOBAL = "global"
"""The name of the global model among the deployed models."""

Deliver: TypeAlias = "Callable[[str, int, Tensor], None]"
"""Takes the prediction of one case: the model's name ("" if there is only one), the index of the
case, and what `Task.predict` returns."""


Watch: TypeAlias = "Callable[[int, Iterable[tuple[int, Tensor]]], None]"
"""Takes the number of steps taken so far, and the predictions by index of the case as they are
after these steps. They are made while they are read, and their time is none of the adaptation's."""


def nobody_watches(step: int, predictions: Iterable[tuple[int, Tensor]]) -> None:
    """Make no predictions. See `Watch`."""


class Cases(Protocol):
    """The cases of a site, without labels."""

    def __len__(self) -> int:
        """Return the number of cases."""

    def example(self, index: int) -> Example:
        """Return a whole case; its batch holds "image" and, if the case has one, "mask"."""


@dataclass(frozen=True)
class Sources:
    """The models that the federation deployed, and what is needed to run them.

    Attributes:
        models: whole models by name; a personal model has the name of its site. Each access may
            read a file, so hold one model at a time.
        network: builds the network.
        task: how a case is predicted.
        device: the device to compute on.
        seed: seed of everything random.
        server: the names of the server's own models: `GLOBAL`, and those of methods that have
            several, such as one for each cluster.
        watch: called by adapters with ``record_steps`` after every step, and once before the first.
    """

    models: Mapping[str, Tensors]
    network: Callable[[], nn.Module]
    task: Task
    device: str = "cpu"
    seed: int = 0
    server: Collection[str] = (GLOBAL,)
    watch: Watch = nobody_watches

    @property
    def personal(self) -> list[str]:
        """The names of the personal models, sorted; those of the clusters if no site shared one.

        Sites of a cluster may have equal models; each site counts.
        """
        sites = sorted(name for name in self.models if name not in self.server)
        return sites or sorted(name for name in self.models if name != GLOBAL)

    def require_global(self, adapter: str) -> Tensors:
        """Return the global model.

        Raises:
            ConfigError: there is none.
        """
        if GLOBAL not in self.models:
            raise ConfigError(
                f"{adapter} starts from the global model, but the deployed models are "
                f"{', '.join(self.models) or 'none'}; choose a method that has a global model, or "
                f"one of the adapters ensemble and average"
            )
        return self.models[GLOBAL]

    def require_personal(self, adapter: str) -> list[str]:
        """Return the names of the personal models.

        Raises:
            ConfigError: there are none.
        """
        if not self.personal:
            raise ConfigError(
                f"{adapter} needs personal models, but no site shared one; let sites share theirs "
                f"(share: [personal] at the site), or choose a method that has personal models"
            )
        return self.personal

    def starting_model(self) -> tuple[Tensors, list[str]]:
        """Return a model to start from, and the names of the models that it is the mean of.

        It is the global model; without one, the mean of the server's other models or, without any,
        of the personal models.

        Raises:
            ConfigError: no model was deployed.
        """
        if GLOBAL in self.models:
            return self.models[GLOBAL], [GLOBAL]
        if not self.models:
            raise ConfigError("no model was deployed; finish the run first")
        names = sorted(name for name in self.models if name in self.server) or self.personal
        return mean_model(self.models, names), names

    def load(self, model: Tensors) -> nn.Module:
        """Return a new network that holds ``model``, in evaluation mode, on the device."""
        with ambient(0, "adaptation"):
            module = self.network()
        module.load_state_dict(dict(model))
        return module.to(self.device).eval()


@dataclass(frozen=True)
class LayerSpread:
    """The differences between cases in one routed layer; windows of large images count as cases.

    Standard deviations are those over all cases of the site, so that a single case has 0.

    Attributes:
        deviations: the standard deviation of the coefficient, by source.
        variation: mean of the weight variation, see
            `collegium.adaptation._routed_layers.weight_variation`.
        variation_deviation: standard deviation of the weight variation.
    """

    deviations: Mapping[str, float]
    variation: float
    variation_deviation: float


@dataclass
class AdaptationRecord:
    """The record of an adaptation.

    Attributes:
        sources: the names of the models that it used.
        steps: number of optimiser steps.
        losses: rows of losses by name, one for each `losses_per`; "step" counts the rows, "total"
            was minimised.
        chosen: the "step" of the row whose model predicts; None if none was chosen.
        coefficients: the mean over the cases of the routing coefficients, by layer in the order of
            the network, then by source.
        notes: other remarks for the reader, a sentence each.
        spreads: the differences between cases, by layer in the order of `coefficients`.
        losses_per: an optimiser "step", a "pass" over all cases, a "batch" of cases or a "case".
        loss_deviations: as `losses`, the standard deviations over samples; empty if they were not
            recorded.
    """

    sources: Sequence[str]
    steps: int = 0
    losses: list[dict[str, float]] = field(default_factory=list)
    chosen: int | None = None
    coefficients: dict[str, dict[str, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    spreads: dict[str, LayerSpread] = field(default_factory=dict)
    losses_per: str = "step"
    loss_deviations: list[dict[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON holds it in ``account.json``."""
        layers = self.coefficients
        sources = list(self.sources)
        coefficients: dict[str, Any] = {
            "layers": list(layers),
            "sources": sources,
            "values": [[values[source] for source in sources] for values in layers.values()],
        }
        if self.spreads:
            spreads = [self.spreads[layer] for layer in layers]
            coefficients |= {
                "deviations": [[spread.deviations[name] for name in sources] for spread in spreads],
                "variation": [spread.variation for spread in spreads],
                "variation_deviation": [spread.variation_deviation for spread in spreads],
            }
        return {
            "sources": sources,
            "steps": self.steps,
            "losses": self.losses,
            "chosen": self.chosen,
            "over": self.losses_per,
            "coefficients": coefficients if layers else None,
            "notes": self.notes,
            **({"loss_deviations": self.loss_deviations} if self.loss_deviations else {}),
        }


@dataclass(frozen=True)
class AdaptationResult:
    """The result of an adaptation, beside the predictions.

    Attributes:
        record: what was done.
        model: the tensors of the adapted network, by the network's names and those that the adapter
            adds; None if nothing was adapted.
    """

    record: AdaptationRecord
    model: Tensors | None = None


@dataclass(frozen=True)
class Adapter(ABC):
    """The base of all adapters; under `@settings` a subclass's fields are the hyper-parameters.

    Attributes:
        needs: the models that must have been deployed: "global", "personal", or both.
    """

    needs: ClassVar[Collection[str]] = ("global",)

    def check(self, module: nn.Module) -> None:  # noqa: B027  (most take any network)
        """Raise a `ConfigError` if such a network cannot be adapted."""

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:  # noqa: B027
        """Raise a `ConfigError` if such an output for such images cannot be adapted.

        Args:
            task: how a case is predicted.
            images: (B, C, *spatial) or rows (B, features), on the device "meta": shapes only.
            output: the network's output for them, likewise.
        """

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Adapt to the cases and deliver a prediction of every one.

        Args:
            sources: the deployed models.
            cases: the site's cases, one or more.
            deliver: called once for each model that predicts and each case.

        Raises:
            ConfigError: the adapter does not suit the models or the task.
            DivergedError: the loss became NaN or infinite.
        """


def mean_model(models: Mapping[str, Tensors], names: Collection[str]) -> Tensors:
    """Return the mean of some models; integer counters are their maximum.

    Args:
        models: models by name.
        names: the names of the models to average.
    """
    running = Mean()
    for name in names:
        running.add(models[name], 1.0, source=f"the model {name!r}")
    return running.result()


def case_batches(cases: Cases, size: int) -> Iterator[tuple[list[int], Example]]:
    """Yield the cases in order, neighbours of one shape joined to batches of at most ``size``.

    A case that is a batch of its own, such as the slices of a volume, is not joined with others. A
    vector is never alone if it has neighbours, since batch normalisation cannot distinguish one
    vector from its mean: ``size`` counts as 2 or more for vectors, and a last one joins those
    before it.

    Args:
        cases: the cases.
        size: cases in one batch, at most.

    Yields:
        The indices of the cases, and an example whose image is (B, C, *spatial), with a mask (B,
        *spatial) if one of the cases has one.
    """
    waiting: list[tuple[int, Example]] = []
    for index in range(len(cases)):
        example = cases.example(index)
        shape = example.batch["image"].shape
        alone = len(shape) == 2 and (len(waiting) == 1 or index == len(cases) - 1)
        full = len(waiting) >= size and not alone
        if waiting and (full or shape[0] > 1 or shape != waiting[0][1].batch["image"].shape):
            yield _join(waiting)
            waiting = []
        waiting.append((index, example))
    if waiting:
        yield _join(waiting)


def _join(batch: Sequence[tuple[int, Example]]) -> tuple[list[int], Example]:
    samples: list[Batch] = [
        {key: example.batch[key] for key in ("image", "mask") if key in example.batch}
        for _, example in batch
    ]
    return [index for index, _ in batch], replace(batch[0][1], batch=join(samples))


class Window(NamedTuple):
    """The images of one forward pass, and which of their pixels count.

    Attributes:
        images: (B, C, *spatial), or rows (B, features).
        inside: the pixels that count in a loss, bool (B, *spatial); None: all.
    """

    images: Tensor
    inside: Tensor | None = None

    @property
    def counts(self) -> bool:
        """Whether any pixel counts."""
        return self.inside is None or bool(self.inside.any())


def batch_windows(
    task: Task, module: nn.Module, batch: Batch, *, field_of_view: bool = False
) -> Iterator[Window]:
    """Yield the parts of a batch that enter a network.

    Args:
        task: how a case is predicted, which cuts images and masks alike.
        module: the network.
        batch: its image is (B, C, *spatial), its mask, if any, (B, *spatial).
        field_of_view: whether only pixels inside the mask count. Without a mask the whole image
            does; the zeros around an image smaller than the window never do.
    """
    image = batch["image"]
    if not field_of_view:
        yield from map(Window, task.windows(module, image))
        return
    mask = batch.get("mask", full_mask(image))
    masks = task.windows(module, mask.unsqueeze(1))
    for images, inside in zip(task.windows(module, image), masks, strict=True):
        yield Window(images, inside.squeeze(1))


def case_windows(
    task: Task, module: nn.Module, cases: Cases, size: int, *, field_of_view: bool = False
) -> Iterator[Window]:
    """Yield the windows of all cases, always in the same order.

    Args:
        task: how a case is predicted.
        module: the network.
        cases: the cases.
        size: cases in one batch, at most.
        field_of_view: see `batch_windows`.
    """
    for _, example in case_batches(cases, size):
        yield from batch_windows(task, module, example.batch, field_of_view=field_of_view)


def predict_batch(
    task: Task, module: nn.Module, indices: Sequence[int], example: Example
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the prediction of every case of a batch from `case_batches`.

    Args:
        task: how a case is predicted.
        module: the network.
        indices: the indices of the cases.
        example: the cases, joined.
    """
    with torch.no_grad():
        prediction = task.predict(module, example)
    if len(indices) == 1:
        yield indices[0], prediction
        return
    yield from zip(indices, torch.split(prediction, 1), strict=True)


def predict_cases(
    task: Task, module: nn.Module, cases: Cases, batch_size: int
) -> Iterator[tuple[int, Tensor]]:
    """Yield the index and the prediction of every case.

    Args:
        task: how a case is predicted.
        module: the network.
        cases: the cases.
        batch_size: cases, slices or windows in one forward pass.
    """
    task = task.with_batch_size(batch_size)
    for indices, example in case_batches(cases, batch_size):
        yield from predict_batch(task, module, indices, example)


def copies_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return detached copies of tensors."""
    return [tensor.detach().clone() for tensor in tensors]


def overwrite(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Overwrite tensors, which may be parameters, with the values of others.

    Args:
        tensors: the tensors to change.
        values: as many tensors of the same shapes.
    """
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)


def optimizer_step(optimizer: torch.optim.Optimizer, loss: Tensor, adapter: str) -> float:
    """Take one optimiser step on a loss, and return the loss.

    Args:
        optimizer: the optimiser of the adapted parameters.
        loss: a scalar.
        adapter: the adapter's name, for messages.

    Raises:
        DivergedError: the loss is NaN or infinite.
    """
    value = float(loss.detach())
    if not math.isfinite(value):
        raise DivergedError(
            f"the loss of {adapter} became {value}; lower its lr, or check the images"
        )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return value
