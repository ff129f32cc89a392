"""Gradient inversion: an image rebuilt from the update that a site made of it.

After Geiping et al., "Inverting gradients - how easy is it to break privacy in federated learning?"
(NeurIPS 2020, https://arxiv.org/abs/2003.14053). The attacker reads what a server reads, the model
that a site received and the update that it sent, and knows network, loss, learning rate, number of
local steps, and what the site did to the update before it sent it. The image is searched for whose
update is nearest:

    argmin_x  ||c(g(x)) - g||_w^2 / ||g||_w^2 + alpha TV(x)

with g the update divided by minus the learning rate, which is the gradient after one step of SGD,
c the clipping, and TV the mean absolute difference of neighbouring pixels. Adam's learning rate
falls to a tenth after 3/8, 5/8 and 7/8 of the steps, as in the paper.

Deviations from the paper, which has the cosine in place of the squared difference, a fixed alpha,
and the sign of the derivative in place of the derivative:

- The difference is that of Zhu et al., "Deep leakage from gradients" (NeurIPS 2019,
  https://arxiv.org/abs/1906.08935), as the scale of an update is known too.
- Each tensor of the gradient has the weight w = r^-2p, with r the root mean square of its numbers
  and p falling from 1 to 0 while the learning rate is largest: all layers count at first, also
  those with small gradients, and the likelihood under Gaussian noise decides at last. This is our
  own.
- alpha starts large, falls while the difference is larger than the noise that the attacker knows to
  be in the update, and rises while it is smaller: the discrepancy principle of Morozov (1966). So
  the noise decides how much an image is smoothed. Without noise alpha falls to the setting.
- ReLU has a second derivative, see `collegium.diagnostics.attacks.relu`.
- The image is not clipped to a range, since a network here sees normalised intensities whose range
  the attacker does not know.
- Several local steps are simulated on the same batch, as an attacker does not know their order.
- A mask that is not known is searched for with the image, as Zhu et al. do with labels: it is the
  softmax of logits that Adam moves too, and has a total variation as well.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.func import functional_call

from collegium.compression.base import Codec
from collegium.core.dataset import Batch
from collegium.core.model_parts import head_layer
from collegium.core.randomness import generator
from collegium.core.settings import NonNegative, Positive, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.relu import TwiceDifferentiableReLU
from collegium.errors import ConfigError, DataError
from collegium.tasks import ClassificationTask, SegmentationTask, Task

DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""The shares of the steps after which the learning rate falls to a tenth."""

TINY = 1e-30
"""Added to norms that divide, so that there is no NaN."""

SMALL = 1e-3
"""Tensors with a smaller root mean square, over that of all, have the weight of this one."""

STRONGEST = 1.0
"""The largest weight of the total variation."""

START = 0.1
"""The weight of the total variation that a search starts with."""

FALL = 0.8
"""The share of the steps after which the weight can have fallen from `START` to the setting."""


@settings
class Inversion:
    """The settings of a gradient inversion.

    Attributes:
        steps: steps of Adam.
        lr: learning rate, in units of the image that enters the network.
        total_variation: the smallest weight of the total variation (alpha).
        restarts: how many images of noise are started from; the smallest objective wins.
        label: "known"; or "inferred" from the gradient of the head, see `infer_label`; or, of a
            segmentation, "unknown": a mask is searched for with the image.
    """

    steps: PositiveInt = 1500
    lr: Positive = 0.2
    total_variation: NonNegative = 1e-4
    restarts: PositiveInt = 1
    label: Literal["known", "inferred", "unknown"] = "known"


DEFAULT = Inversion()
"""The settings that everything is attacked with unless others are asked for."""


@dataclass(frozen=True)
class KnownTraining:
    """Local training as an attacker knows it: plain SGD on one batch, from the model received.

    Attributes:
        module: the network; its weights are not used, its modes are changed.
        task: the loss.
        model: the whole model that the site received. What nobody sends is as the attacker guesses.
        lr: the site's learning rate.
        steps: its optimiser steps.
    """

    module: nn.Module
    task: Task
    model: Tensors
    lr: float
    steps: int = 1

    def gradient_of(self, update: Tensors) -> Tensors:
        """Return the update divided by minus the learning rate, of parameters alone.

        Args:
            update: what the site sent minus what it received, or a part of it.

        Raises:
            DataError: no parameter is in it.
        """
        found = update.select({name for name, _ in self.module.named_parameters()})
        if not found:
            raise DataError(
                "what the site sent holds no parameter that was trained, so that no gradient can "
                "be inverted; choose another algorithm"
            )
        return found * (-1 / self.lr)

    def gradient(self, batch: Batch, names: Collection[str], *, graph: bool = False) -> Tensors:
        """Return what `gradient_of` would return after the local training on a batch.

        Args:
            batch: image and label, and a mask where the loss has one.
            names: the parameters that are sent.
            graph: whether the result is differentiable by the image.
        """
        self._set_modes(len(batch["image"]))
        own = dict(self.module.named_parameters())
        start = {
            name: tensor.detach().requires_grad_()
            for name, tensor in self.model.items()
            if name in own and own[name].requires_grad
        }
        rest = self.model.without(start)
        now = dict(start)
        for _ in range(self.steps):
            tensors = {**rest.clone(), **now}  # running statistics change in place
            loss = self.task.loss(functional_call(self.module, tensors, (batch["image"],)), batch)
            found = torch.autograd.grad(
                loss, list(now.values()), create_graph=graph, materialize_grads=True
            )
            if self.steps == 1:
                return Tensors(zip(now, found, strict=True)).select(names)
            now = {n: p - self.lr * g for (n, p), g in zip(now.items(), found, strict=True)}
        return Tensors((n, (start[n] - now[n]) / self.lr) for n in now).select(names)

    def _set_modes(self, count: int) -> None:
        """Set training mode; batch statistics of one image and drawn dropout are nobody's."""
        self.module.train()
        for layer in self.module.modules():
            one = count == 1 and isinstance(layer, nn.modules.batchnorm._BatchNorm)
            if one or isinstance(layer, nn.modules.dropout._DropoutNd):
                layer.eval()


@dataclass(frozen=True)
class Rebuilt:
    """The result of an inversion.

    Attributes:
        image: (B, C, *spatial), as it enters the network.
        label: the label that was assumed or found, as in the batch.
        objective: the squared difference over the squared norm, but not less than the noise
            explains, plus the smallest weight times the total variation.
    """

    image: torch.Tensor
    label: torch.Tensor
    objective: float


def rebuild(
    training: KnownTraining,
    gradient: Tensors,
    shape: Sequence[int],
    known: Batch,
    settings: Inversion = DEFAULT,
    *,
    seed: int = 0,
    clip: float | None = None,
    noise: float = 0.0,
) -> Rebuilt:
    """Search for the image whose local training gives a gradient.

    Args:
        training: the local training.
        gradient: what `KnownTraining.gradient_of` made of what was sent, or of what a defence made
            of that.
        shape: of the batch of images, (B, C, *spatial).
        known: what the attacker knows of the batch beside the image: its "label", if that is known,
            and its "mask" if the loss has one.
        settings: the settings.
        seed: names the generator of the images that are started from.
        clip: the norm to which the site has clipped the gradient; None: it has not.
        noise: the norm of the noise that the site has added.

    Raises:
        ConfigError: the images are rows of a table, or the label cannot be found.
        DataError: the gradient is zero or not finite.
    """
    check(training, list(gradient), shape, settings)
    length = float(_norm(gradient))
    if not 0 < length < float("inf"):
        raise DataError("what the site sent has no direction: it is zero, or not finite")
    rest = {key: tensor for key, tensor in known.items() if key != "image"}
    if settings.label == "inferred":
        rest["label"] = infer_label(training, gradient, shape[0])
    search = _Search(training, gradient, rest, settings, clip, noise)
    starts = (generator(seed, "attack", "inversion", n) for n in range(settings.restarts))
    found = (search.run(torch.randn(*shape, generator=rng)) for rng in starts)
    return min(found, key=lambda rebuilt: rebuilt.objective)


@dataclass(frozen=True)
class _Search:
    """The searches of one attack; see `rebuild` for the attributes."""

    training: KnownTraining
    gradient: Tensors
    known: Batch
    settings: Inversion
    clip: float | None
    noise: float

    def run(self, image: torch.Tensor) -> Rebuilt:
        """Search from an image, (B, C, *spatial)."""
        settings, searched = self.settings, [image.requires_grad_()]
        if settings.label == "unknown":
            assert isinstance(self.training.task, SegmentationTask)  # `check` sees to it
            shape = len(image), self.training.task.classes, *image.shape[2:]
            searched.append(torch.zeros(*shape, requires_grad=True))
        optimizer = torch.optim.Adam(searched, lr=settings.lr)
        falls = [round(settings.steps * share) for share in DECAYS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
        least = min(max(settings.total_variation, TINY), STRONGEST)
        alpha = max(START, least)
        factor = (least / alpha) ** (1 / (FALL * settings.steps))
        for step in range(settings.steps):
            weights, unexplained = self._weights(max(0.0, 1 - step / max(falls[0], 1)))
            difference, variation = self._terms(searched, weights)
            found = torch.autograd.grad(difference + alpha * variation, searched)
            if float(difference.detach()) > unexplained:
                alpha = max(alpha * factor, least)
            else:
                alpha = min(alpha / factor, STRONGEST)
            for tensor, derivative in zip(searched, found, strict=True):
                tensor.grad = derivative
            optimizer.step()
            schedule.step()
        weights, unexplained = self._weights(0.0)
        last, rough = (float(term.detach()) for term in self._terms(searched, weights))
        label = searched[1].detach().argmax(1) if searched[1:] else self.known["label"]
        return Rebuilt(image.detach(), label, max(last, unexplained) + least * rough)

    def _weights(self, power: float) -> tuple[dict[str, float], float]:
        """Return the weight of each tensor, over the squared norm, and the part that is noise."""
        squares = {name: float(tensor.square().sum()) for name, tensor in self.gradient.items()}
        counts = {name: tensor.numel() for name, tensor in self.gradient.items()}
        total = sum(counts.values())
        least = SMALL**2 * sum(squares.values()) / total
        means = {name: max(squares[name] / counts[name], least) for name in counts}
        weights = {name: mean**-power for name, mean in means.items()}
        whole = sum(weights[name] * square for name, square in squares.items())
        variance = self.noise**2 / total
        unexplained = (
            sum(weights[name] * count for name, count in counts.items()) * variance / whole
        )
        return {name: weight / whole for name, weight in weights.items()}, unexplained

    def _terms(
        self, searched: Sequence[torch.Tensor], weights: dict[str, float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the difference of the gradients and the total variation."""
        batch, variation = {**self.known, "image": searched[0]}, total_variation(searched[0])
        for logits in searched[1:]:
            batch["label"] = logits.softmax(1)
            variation = variation + total_variation(batch["label"])
        with TwiceDifferentiableReLU():
            own = self.training.gradient(batch, list(self.gradient), graph=True)
        scale = 1.0 if self.clip is None else (self.clip / (_norm(own) + TINY)).clamp(max=1.0)
        terms = [weights[n] * (own[n] * scale - g).square().sum() for n, g in self.gradient.items()]
        return torch.stack(terms).sum(), variation


def check(
    training: KnownTraining, names: Collection[str], shape: Sequence[int], settings: Inversion
) -> None:
    """Raise the errors of `rebuild` that can be told before it.

    Args:
        training: the local training.
        names: of the parameters that are sent.
        shape: of the batch of images.
        settings: the settings.

    Raises:
        ConfigError: the images are rows of a table, or the label cannot be found.
    """
    if len(shape) < 4:
        raise ConfigError(
            "gradient inversion rebuilds images, and the cases here are rows of a table; choose "
            "--kind membership"
        )
    if settings.label == "inferred":
        _head(training, names, shape[0])
    if settings.label == "unknown" and not isinstance(training.task, SegmentationTask):
        raise ConfigError(
            "a label is searched for with the image where it is a mask; choose --label known or "
            "inferred"
        )
    if settings.label == "unknown" and getattr(training.task, "labelled", None) is not None:
        raise ConfigError(
            "the masks of this site annotate some of the classes only, so that none can be "
            "searched for; choose another site, or --label known"
        )


def total_variation(image: torch.Tensor) -> torch.Tensor:
    """Return the mean absolute difference of neighbouring pixels, summed over the spatial axes.

    Args:
        image: (B, C, *spatial).
    """
    return torch.stack([image.diff(dim=axis).abs().mean() for axis in range(2, image.ndim)]).sum()


def infer_label(training: KnownTraining, gradient: Tensors, count: int = 1) -> torch.Tensor:
    """Return the class of a single case, (1,), from the gradient of the head.

    The derivative of cross-entropy by the head's bias is softmax minus one-hot: of a single case it
    is negative at the true class alone. Without a bias the rows of the weights tell as much, since
    features after a ReLU are not negative. From Zhao et al., "iDLG" (2020,
    https://arxiv.org/abs/2001.02610).

    Args:
        training: the local training.
        gradient: see `rebuild`.
        count: how many cases are in the batch.

    Raises:
        ConfigError: there are several cases, the task is no classification, or the head was not
            sent.
    """
    tensor = gradient[_head(training, list(gradient), count)]
    return tensor.flatten(1).sum(1).argmin()[None] if tensor.ndim > 1 else tensor.argmin()[None]


def _head(training: KnownTraining, names: Collection[str], count: int) -> str:
    """Return the parameter from whose gradient a label is inferred, the bias if there is one."""
    if count != 1 or not isinstance(training.task, ClassificationTask):
        raise ConfigError(
            "a label can be inferred from the gradient of one case of a classification; choose "
            "--label known"
        )
    own = dict(training.module.named_parameters())
    inside = {id(parameter) for parameter in head_layer(training.module).parameters()}
    head = [name for name, p in own.items() if id(p) in inside and name in names]
    if not head:
        raise ConfigError(
            "the head of the network is not sent, so that the label cannot be inferred from it; "
            "choose --label known"
        )
    return next((name for name in head if own[name].ndim == 1), head[-1])


def with_noise(gradient: Tensors, ratio: float, *, seed: int, clip: float | None = None) -> Tensors:
    """Return a gradient, clipped, plus Gaussian noise whose norm is a multiple of its own.

    Differentially private training states the noise multiplier z instead, the standard deviation
    of each number over the clipping norm: of d numbers the noise has the norm z sqrt(d), so that
    ``ratio`` is about z sqrt(d) where clipping bites.

    Args:
        gradient: the gradient.
        ratio: the norm of the noise over that of the clipped gradient.
        seed: names the generator.
        clip: the largest norm; None: any.
    """
    if clip is not None:
        gradient = gradient * min(1.0, clip / (float(_norm(gradient)) + TINY))
    rng = generator(seed, "attack", "noise")
    noise = gradient.map(lambda tensor: torch.randn(tensor.shape, generator=rng))
    return gradient + noise * (ratio * float(_norm(gradient)) / float(_norm(noise)))


def through_codec(gradient: Tensors, codec: Codec, *, seed: int) -> Tensors:
    """Return what a server decodes of a gradient that a codec has encoded, the first time.

    Args:
        gradient: the gradient.
        codec: the codec.
        seed: names the generator of codecs that round at random.
    """
    encoded = codec.encode(gradient, generator(seed, "attack", "codec"), {})
    return codec.decode(encoded.data, gradient)


def _norm(tensors: Tensors) -> torch.Tensor:
    return torch.stack([tensor.square().sum() for tensor in tensors.values()]).sum().sqrt()
