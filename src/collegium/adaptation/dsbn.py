"""DSBN: domain-specific batch normalisation (Chang et al., 2019, arXiv:1906.03950)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from collegium.adaptation._losses import exclusive
from collegium.adaptation._norms import affine, batch_norms, require_batch_norms
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
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError
from collegium.tasks import Task

UNSURE = -1
"""The label of a pixel that takes no part."""


@dataclass(frozen=True)
class DSBN(Adapter):
    """Gives the site a batch normalisation of its own, and shares everything else.

    The body is the global model's; where there is none (FedBN), the mean of the personal models.
    Running statistics become those of the site's images, all of them; see `measure`. Scale and
    shift cannot be learnt without labels, and GRACE, which compares with DSBN at sites outside,
    does not say whose it takes; hence ``affine``. The result is an ordinary network that predicts
    in evaluation mode.

    Deviations: the paper trains with the new domain's images beside labelled ones of another; here
    training is over and the labelled images stay at their sites. So its second stage, which trains
    on labels that the first stage gave to the new images, keeps these labels instead of renewing
    them, uses only those that the network is sure of, and moves scale and shift alone.

    Attributes:
        affine: scale and shift: "global" the body's, "mean" the mean over the personal models,
            "nearest" those of the personal model whose statistics are nearest to the new ones; see
            `distance`.
        passes: over the images; see `measure`.
        pseudo_labels: epochs on the network's own labels; 0: none.
        threshold: the softmax from which on a label counts as sure.
        lr: learning rate of Adam on these labels.
        batch_size: cases, slices or windows in one batch.
    """

    affine: Literal["global", "mean", "nearest"] = "global"
    passes: int = 1
    pseudo_labels: int = 0
    threshold: float = 0.9
    lr: float = 1e-3
    batch_size: int = 4

    def __post_init__(self) -> None:
        if self.affine not in ("global", "mean", "nearest"):
            raise ConfigError(f"dsbn.affine is {self.affine!r}: write global, mean or nearest")
        if min(self.passes, self.batch_size) < 1 or self.pseudo_labels < 0:
            raise ConfigError(
                f"dsbn has passes {self.passes}, batch_size {self.batch_size} and pseudo_labels "
                f"{self.pseudo_labels}; give whole numbers, the first two from 1"
            )
        if not (0 <= self.threshold <= 1 and 0 < self.lr < math.inf):
            raise ConfigError(
                f"dsbn has threshold {self.threshold} and lr {self.lr}; give a threshold from 0 "
                f"to 1 and a positive lr"
            )

    @property
    def needs(self) -> Collection[str]:  # type: ignore[override]
        """Personal models where their scale and shift are asked for, and any model otherwise."""
        return () if self.affine == "global" else ("personal",)

    def check(self, module: nn.Module) -> None:
        """Refuse a network without batch normalisation."""
        require_batch_norms(module, "dsbn")

    def adapt(self, sources: Sources, cases: Images, deliver: Deliver) -> Adapted:
        """Measure the statistics, learn from pseudo-labels if asked to, then predict."""
        body, names = _body(sources)
        module = sources.open(body)
        require_batch_norms(module, "dsbn")
        site = _Site(module, sources.task.batched(self.batch_size), cases, self.batch_size)
        account = Account(names, over="pass")
        if self.affine == "nearest":
            self._take_nearest(site, sources, account)
        else:
            if self.affine == "mean":
                personal = sources.require_personal("dsbn")
                _set_affine(module, mean_model(sources.models, personal))
                account.sources = list(dict.fromkeys([*names, *personal]))
            measure(site, self.passes)
        if self.pseudo_labels:
            self._learn(site, account)
        for members, example in groups(cases, self.batch_size):
            for index, prediction in predict(site.task, module, members, example):
                deliver("", index, prediction)
        return Adapted(account, Tensors(module.state_dict()).clone())

    def _take_nearest(self, site: _Site, sources: Sources, account: Account) -> None:
        """Try the scale and shift of every personal model, and keep the nearest one's."""
        distances: dict[str, float] = {}
        best = Tensors()
        for name in sources.require_personal("dsbn"):
            model = sources.models[name]
            _set_affine(site.module, model)
            measure(site, self.passes)
            distances[name] = distance(site.module, model)
            if distances[name] == min(distances.values()):
                best = Tensors(site.module.state_dict()).select(_norm_names(site.module)).clone()
        site.module.load_state_dict(dict(best), strict=False)
        nearest = min(distances, key=distances.__getitem__)
        account.sources = list(dict.fromkeys([*account.sources, nearest]))
        found = ", ".join(f"{name} {value:.3g}" for name, value in distances.items())
        account.notes.append(
            f"Scale and shift are those of {nearest}, whose statistics are nearest ({found})."
        )

    def _learn(self, site: _Site, account: Account) -> None:
        """Move scale and shift so that sure predictions become surer."""
        site.module.requires_grad_(False)
        moving = [p.requires_grad_(True) for p in affine(batch_norms(site.module))]
        if not moving:
            raise ConfigError(
                "dsbn learns scale and shift from pseudo-labels, and the network's batch "
                "normalisation has none; set pseudo_labels to 0"
            )
        labels = [_label(site.logits(images), self.threshold) for images in site.batches()]
        confident = fmean(float((label != UNSURE).float().mean()) for label in labels)
        optimizer = torch.optim.Adam(moving, lr=self.lr)
        for epoch in range(self.pseudo_labels):
            losses = []
            for images, label in zip(site.batches(), labels, strict=True):
                if bool((label == UNSURE).all()):
                    continue
                target = label.to(images.device, torch.int64)
                output = site.logits(images)
                loss = functional.cross_entropy(output, target, ignore_index=UNSURE)
                losses.append(descend(optimizer, loss, "dsbn"))
            account.steps += len(losses)
            if losses:
                row = {"step": epoch, "total": fmean(losses), "confident": confident}
                account.losses.append(row)
        site.module.requires_grad_(False)
        if not account.losses:
            account.notes.append(
                f"No prediction reached the threshold {self.threshold:g}: nothing was learnt."
            )


@dataclass(frozen=True)
class _Site:
    """A network and the images that it adapts to."""

    module: nn.Module
    task: Task
    cases: Images
    batch_size: int

    def batches(self) -> Iterator[Tensor]:
        """Yield what enters the network at once, always in the same order."""
        for _, example in groups(self.cases, self.batch_size):
            yield from self.task.windows(self.module, example.batch["image"])

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits of the classes, see `exclusive`."""
        return exclusive(self.module(images), self.task, "dsbn")


@dataclass
class _Moments:
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


@torch.no_grad()
def measure(site: _Site, passes: int = 1) -> None:
    """Set every running mean and variance to those of the site's images.

    In the first pass each batch is normalised by its own statistics, as in training; mean and
    variance are those of all values that enter a layer, so that a shorter last batch counts for
    what it is, and differences between batches count. They are exact for the first layer of a path;
    what enters a later layer was normalised batch by batch, whereas a prediction uses statistics of
    all images. Each further pass normalises by those found so far, and makes one layer more of a
    path exact, up to as many passes as there are layers.

    Windows that overlap, and zeros around a smaller image, count as in a prediction.
    """
    layers = batch_norms(site.module)
    for number in range(passes):
        found = {name: _Moments() for name in layers}
        hooks = [
            layer.register_forward_pre_hook(partial(_record, found[name], number == 0))
            for name, layer in layers.items()
        ]
        try:
            for images in site.batches():
                site.module(images)
        finally:
            for hook in hooks:
                hook.remove()
        for name, layer in layers.items():
            if found[name].count:
                _set_statistics(layer, found[name].mean, found[name].variance)


def _record(moments: _Moments, own: bool, layer: _BatchNorm, inputs: tuple[Tensor, ...]) -> None:
    """Add what enters a layer; with ``own``, let the layer normalise by it."""
    values = inputs[0]
    axes = [axis for axis in range(values.ndim) if axis != 1]
    variance, mean = torch.var_mean(values, dim=axes, correction=0)
    moments.add(values.numel() // values.shape[1], mean.double().cpu(), variance.double().cpu())
    if own:
        _set_statistics(layer, mean, variance)


def _set_statistics(layer: _BatchNorm, mean: Tensor, variance: Tensor) -> None:
    """Write a layer's running statistics, in the type and place of what it holds."""
    for name, value in (("running_mean", mean), ("running_var", variance)):
        old = getattr(layer, name)
        setattr(layer, name, value.clone() if old is None else value.to(old))


@torch.no_grad()
def distance(module: nn.Module, model: Mapping[str, Tensor]) -> float:
    """Return how far a network's running statistics are from a model's.

    The Kullback-Leibler divergence of two Gaussians, both ways together: (v1 + d^2) / (2 v2) + (v2
    + d^2) / (2 v1) - 1, with d the difference of the means and the layer's eps added to both
    variances. It is the mean over a layer's channels and then over the layers, so that wide layers
    count no more than narrow ones.
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


def mean_model(models: Mapping[str, Tensors], names: Collection[str]) -> Tensors:
    """Return the mean of some models; integer counters keep the maximum."""
    running = Mean()
    for name in names:
        running.add(models[name], 1.0, source=f"the model {name!r}")
    return running.result()


def _body(sources: Sources) -> tuple[Tensors, list[str]]:
    """Return the model whose body is used, and the names of those that it was made from."""
    if GLOBAL in sources.models:
        return sources.models[GLOBAL], [GLOBAL]
    names = sources.require_personal("dsbn")
    return mean_model(sources.models, names), names


def _norm_names(module: nn.Module) -> set[str]:
    """Return the names of the tensors of batch normalisation."""
    kept = module.state_dict()
    return {n for n in kept if n.rpartition(".")[0] in batch_norms(module)}


@torch.no_grad()
def _set_affine(module: nn.Module, model: Mapping[str, Tensor]) -> None:
    """Take scales and shifts from a model."""
    for name, layer in batch_norms(module).items():
        for kind, parameter in layer.named_parameters(recurse=False):
            parameter.copy_(model[f"{name}.{kind}"])


@torch.no_grad()
def _label(output: Tensor, threshold: float) -> Tensor:
    """Return the most probable class, int16 on the CPU, or `UNSURE`."""
    sureness, label = output.softmax(dim=1).max(dim=1)
    return label.masked_fill(sureness < threshold, UNSURE).to("cpu", torch.int16)
