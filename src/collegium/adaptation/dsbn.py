"""DSBN: domain-specific batch normalisation (Chang et al., 2019, arXiv:1906.03950)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Literal, TypeAlias

from collegium.adaptation._losses import class_logits, counted_pixels, masked_mean
from collegium.adaptation._norms import affine, batch_norms, require_batch_norms
from collegium.adaptation.base import (
    GLOBAL,
    AdaptationRecord,
    AdaptationResult,
    Adapter,
    Cases,
    Deliver,
    Sources,
    Window,
    case_windows,
    mean_model,
    optimizer_step,
    predict_cases,
)
from collegium.core.dataset import full_mask
from collegium.core.lazy import functional, nn, torch
from collegium.core.optimizers import unmarked
from collegium.core.settings import NonNegativeInt, Positive, PositiveInt, UnitInterval, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.modules.batchnorm import _BatchNorm

IGNORED = -1
"""The pseudo-label of a pixel that does not count in the loss."""

Batches: TypeAlias = "Callable[[], Iterable[Tensor]]"
"""Returns the batches of images (B, C, *spatial), the same ones at every call."""


@settings
class DSBN(Adapter):
    """Batch normalisation specific to the site; all other tensors are shared.

    The body is the global model's; if there is none (FedBN), the mean of the personal models. The
    running statistics become those of all of the site's images; see `measure_statistics`. Scale and
    shift cannot be learnt without labels, and GRACE, which compares with DSBN at sites outside,
    does not say whose it takes; hence ``affine``. The result is an ordinary network that predicts
    in evaluation mode.

    Deviations: the paper trains on the new domain's images together with labelled ones of another;
    here training is over and the labelled images stay at their sites. So its second stage, which
    trains on pseudo-labels that the first stage gave to the new images, keeps these labels instead
    of renewing them, uses only those with a high probability, and trains scale and shift alone.

    Attributes:
        affine: scale and shift: "global" the body's, "mean" the mean over the personal models,
            "nearest" those of the personal model whose statistics are nearest to the new ones; see
            `statistics_distance`.
        passes: passes over the images; see `measure_statistics`.
        pseudo_labels: epochs on pseudo-labels; 0: none.
        threshold: the lowest probability of a pseudo-label that counts.
        lr: learning rate of Adam on pseudo-labels.
        batch_size: cases, slices or windows in one batch.
        field_of_view: whether only pixels inside the field of view get pseudo-labels. Statistics
            are those of all pixels, as in a prediction.
        record_steps: whether the predictions before and after each epoch on pseudo-labels are
            scored for the record; see `collegium.adaptation.outside.adapt_and_score`.
    """

    affine: Literal["global", "mean", "nearest"] = "global"
    passes: PositiveInt = 1
    pseudo_labels: NonNegativeInt = 0
    threshold: UnitInterval = 0.9
    lr: Positive = 1e-3
    batch_size: PositiveInt = 4
    field_of_view: bool = False
    record_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse a field of view without pseudo-labels."""
        if self.field_of_view and not self.pseudo_labels:
            raise ConfigError(
                "field_of_view limits the pseudo-labels of dsbn, and pseudo_labels is 0; set it to "
                "1 or more, or field_of_view to false"
            )

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """Personal models if `affine` uses their scale and shift, and otherwise any model."""
        return () if self.affine == "global" else ("personal",)

    def check(self, module: nn.Module) -> None:
        """Refuse a network without batch normalisation."""
        require_batch_norms(module, "dsbn")

    def check_output(self, task: Task, images: Tensor, output: Tensor) -> None:
        """Refuse a field of view if the output has no pixels. See `Adapter.check_output`."""
        if self.field_of_view:
            counted_pixels(full_mask(images), class_logits(output, task, "dsbn"), "dsbn")

    def adapt(self, sources: Sources, cases: Cases, deliver: Deliver) -> AdaptationResult:
        """Measure the statistics, train on pseudo-labels if any, then predict.

        See `Adapter.adapt`.
        """
        body, names = _body(sources)
        module = sources.load(body)
        require_batch_norms(module, "dsbn")
        task = sources.task.with_batch_size(self.batch_size)
        windows = partial(case_windows, task, module, cases, self.batch_size)
        batches = partial(_images, windows)
        record = AdaptationRecord(names, losses_per="pass")
        if self.affine == "nearest":
            self._use_nearest(module, batches, sources, record)
        else:
            if self.affine == "mean":
                personal = sources.require_personal("dsbn")
                _copy_affine(mean_model(sources.models, personal), module)
                record.sources = list(dict.fromkeys([*names, *personal]))
            measure_statistics(module, batches, self.passes)
        predictions = partial(predict_cases, sources.task, module, cases, self.batch_size)

        def watch(step: int) -> None:
            if self.record_steps:
                sources.watch(step, predictions())

        watch(0)
        if self.pseudo_labels:
            fov = self.field_of_view
            self._train(module, partial(windows, field_of_view=fov), task, record, watch)
        for index, prediction in predictions():
            deliver("", index, prediction)
        return AdaptationResult(record, Tensors(module.state_dict()).clone())

    def _use_nearest(
        self, module: nn.Module, batches: Batches, sources: Sources, record: AdaptationRecord
    ) -> None:
        """Use the scale and shift of the personal model with the nearest statistics."""
        distances: dict[str, float] = {}
        best = Tensors()
        for name in sources.require_personal("dsbn"):
            model = sources.models[name]
            _copy_affine(model, module)
            measure_statistics(module, batches, self.passes)
            distances[name] = statistics_distance(module, model)
            if distances[name] == min(distances.values()):
                best = Tensors(module.state_dict()).select(_norm_names(module)).clone()
        module.load_state_dict(dict(best), strict=False)
        nearest = min(distances, key=distances.__getitem__)
        record.sources = list(dict.fromkeys([*record.sources, nearest]))
        listed = ", ".join(f"{name} {value:.3g}" for name, value in distances.items())
        record.notes.append(
            f"Scale and shift are those of {nearest}, whose statistics are nearest ({listed})."
        )

    def _train(
        self,
        module: nn.Module,
        windows: Callable[[], Iterable[Window]],
        task: Task,
        record: AdaptationRecord,
        watch: Callable[[int], None],
    ) -> None:
        """Train scale and shift on pseudo-labels."""
        module.requires_grad_(False)
        trained = [p.requires_grad_(True) for p in affine(batch_norms(module))]
        if not trained:
            raise ConfigError(
                "dsbn learns scale and shift from pseudo-labels, and the network's batch "
                "normalisation has none; set pseudo_labels to 0"
            )
        labels, shares = [], []
        for window in windows():
            output = class_logits(module(window.images), task, "dsbn")
            counted = counted_pixels(window.inside, output, "dsbn")
            labels.append(_pseudo_label(output, self.threshold, counted))
            if window.counts:
                shares.append(_confident_share(labels[-1], counted))
        confident = fmean(shares or [0.0])
        optimizer = unmarked(torch.optim.Adam)(trained, lr=self.lr)
        for epoch in range(self.pseudo_labels):
            losses = []
            for window, label in zip(windows(), labels, strict=True):
                if bool((label == IGNORED).all()):
                    continue
                target = label.to(window.images.device, torch.int64)
                output = class_logits(module(window.images), task, "dsbn")
                loss = functional.cross_entropy(output, target, ignore_index=IGNORED)
                losses.append(optimizer_step(optimizer, loss, "dsbn"))
            record.steps += len(losses)
            if losses:
                row = {"step": epoch, "total": fmean(losses), "confident": confident}
                record.losses.append(row)
            watch(epoch + 1)
        module.requires_grad_(False)
        if not record.losses:
            record.notes.append(
                f"No prediction reached the threshold {self.threshold:g}: nothing was learnt."
            )


@dataclass
class _RunningMoments:
    """The number, mean and sum of squared deviations of each channel's values so far."""

    count: int = 0
    mean: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, count: int, mean: Tensor, variance: Tensor) -> None:
        """Add a batch, as Chan, Golub and LeVeque (1979) merge two samples."""
        total, delta = self.count + count, mean - self.mean
        self.mean = self.mean + delta * (count / total)
        self.squares = self.squares + count * variance + delta**2 * (self.count * count / total)
        self.count = total

    @property
    def variance(self) -> Tensor:
        """The unbiased variance, as torch's running variance is."""
        return self.squares / max(self.count - 1, 1)


def measure_statistics(module: nn.Module, batches: Batches, passes: int = 1) -> None:
    """Set every running mean and variance to those of a site's images.

    In the first pass each batch is normalised by its own statistics, as in training; mean and
    variance are those of all values that enter a layer, so that a shorter last batch has its proper
    weight, and differences between batches count. They are exact for the first layer of a path; the
    input of a later layer was normalised batch by batch, whereas a prediction uses statistics of
    all images. Each further pass normalises by the statistics so far, and makes one more layer of a
    path exact, up to as many passes as there are layers.

    Windows that overlap, and zeros around a smaller image, count as in a prediction.

    Args:
        module: the network, in evaluation mode.
        batches: returns the batches of images (B, C, *spatial), the same ones at every call.
        passes: passes over the images, at least 1.
    """
    layers = batch_norms(module)
    for number in range(passes):
        moments = {name: _RunningMoments() for name in layers}
        hooks = [
            layer.register_forward_pre_hook(partial(_add_input, moments[name], number == 0))
            for name, layer in layers.items()
        ]
        try:
            with torch.no_grad():
                for images in batches():
                    module(images)
        finally:
            for hook in hooks:
                hook.remove()
        for name, layer in layers.items():
            if moments[name].count:
                _set_statistics(layer, moments[name].mean, moments[name].variance)


def _add_input(
    moments: _RunningMoments, own: bool, layer: _BatchNorm, inputs: tuple[Tensor, ...]
) -> None:
    """Add the input of a layer; with ``own``, make the layer normalise by its statistics."""
    values = inputs[0]
    axes = [axis for axis in range(values.ndim) if axis != 1]
    variance, mean = torch.var_mean(values, dim=axes, correction=0)
    moments.add(values.numel() // values.shape[1], mean.double().cpu(), variance.double().cpu())
    if own:
        _set_statistics(layer, mean, variance)


def _set_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Set a layer's running statistics, in the type and on the device of the present ones."""
    for name, value in (("running_mean", mean), ("running_var", variance)):
        old = getattr(layer, name)
        setattr(layer, name, value.clone() if old is None else value.to(old))


def statistics_distance(module: nn.Module, model: Mapping[str, Tensor]) -> float:
    """Return the distance between the running statistics of a network and those of a model.

    It is the symmetric Kullback-Leibler divergence of two Gaussians: (v1 + d^2) / (2 v2) + (v2 +
    d^2) / (2 v1) - 1, with d the difference of the means and the layer's eps added to both
    variances. It is averaged over a layer's channels and then over the layers, so that wide layers
    count no more than narrow ones.

    Args:
        module: the network.
        model: tensors by the network's names.
    """
    divergences = []
    for name, layer in batch_norms(module).items():
        mean, variance = layer.running_mean, layer.running_var
        keys = (f"{name}.running_mean", f"{name}.running_var")
        if mean is None or variance is None or not model.keys() >= {*keys}:
            continue
        squared = (mean.double().cpu() - model[keys[0]].double().cpu()) ** 2
        first, second = (v.double().cpu() + layer.eps for v in (variance, model[keys[1]]))
        divergence = ((first + squared) / second + (second + squared) / first) / 2 - 1
        divergences.append(float(divergence.mean()))
    return fmean(divergences)


def _body(sources: Sources) -> tuple[Tensors, list[str]]:
    """Return the model whose body is used, and the names of the models that it is the mean of."""
    if GLOBAL in sources.models:
        return sources.models[GLOBAL], [GLOBAL]
    names = sources.require_personal("dsbn")
    return mean_model(sources.models, names), names


def _norm_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors of batch normalisation."""
    layers = batch_norms(module)
    return {name for name in module.state_dict() if name.rpartition(".")[0] in layers}


def _copy_affine(model: Mapping[str, Tensor], module: nn.Module) -> None:
    """Copy scales and shifts from a model to a network."""
    with torch.no_grad():
        for name, layer in batch_norms(module).items():
            for kind, parameter in layer.named_parameters(recurse=False):
                parameter.copy_(model[f"{name}.{kind}"])


def _images(windows: Callable[[], Iterable[Window]]) -> Iterable[Tensor]:
    """Return the images of the windows."""
    return (window.images for window in windows())


def _pseudo_label(output: Tensor, threshold: float, counted: Tensor | None) -> Tensor:
    """Return the most probable class, int16 on the CPU.

    It is `IGNORED` below the threshold, and where a pixel does not count.
    """
    with torch.no_grad():
        probability, label = output.softmax(dim=1).max(dim=1)
        ignored = probability < threshold
        if counted is not None:
            ignored = ignored | ~counted
        return label.masked_fill(ignored, IGNORED).to("cpu", torch.int16)


def _confident_share(label: Tensor, counted: Tensor | None) -> float:
    """Return the share of the pixels that count which have a pseudo-label."""
    mask = None if counted is None else counted.cpu()
    return float(masked_mean((label != IGNORED).float(), mask))
