"""Gradient inversion: an image rebuilt from the update that a site made of it.

After Geiping et al., "Inverting gradients - how easy is it to break privacy in federated learning?"
(NeurIPS 2020, https://arxiv.org/abs/2003.14053). The attacker reads what a server reads, the model
that a site received and the update that it sent, and knows network, loss, learning rate and number
of local steps. The image is searched for whose update has the same direction:

    argmin_x  1 - <g(x), g> / (||g(x)|| ||g||) + alpha TV(x)

with g the update divided by minus the learning rate, which is the gradient after one step of SGD,
and TV the mean absolute difference of neighbouring pixels. Adam sees the sign of the derivative
only, and its learning rate falls to a tenth after 3/8, 5/8 and 7/8 of the steps, as in the paper.

Deviations: the image is not clipped to a range, since a network here sees normalised intensities
whose range the attacker does not know. Of the images on the way the one with the smallest objective
is kept. Several local steps are simulated on the same batch, as an attacker does not know their
order.
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
from collegium.errors import ConfigError, DataError
from collegium.tasks import ClassificationTask, Task

DECAYS = (3 / 8, 5 / 8, 7 / 8)
"""The shares of the steps after which the learning rate falls to a tenth."""

TINY = 1e-30
"""Added to products of norms, so that a gradient of zeros has no direction and no NaN either."""


@settings
class Inversion:
    """The settings of a gradient inversion.

    Attributes:
        steps: steps of Adam.
        lr: learning rate, in units of the image that enters the network.
        total_variation: weight of the total variation (alpha).
        restarts: how many images of noise are started from; the smallest objective wins.
        label: "known", or "inferred" from the gradient of the head, see `infer_label`.
    """

    steps: PositiveInt = 1500
    lr: Positive = 0.1
    total_variation: NonNegative = 1e-4
    restarts: PositiveInt = 1
    label: Literal["known", "inferred"] = "known"


DEFAULT = Inversion()
"""The settings of the paper."""


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
        label: the label that was assumed, as in the batch.
        objective: its cosine distance and weighted total variation.
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
) -> Rebuilt:
    """Search for the image whose local training gives a gradient.

    Args:
        training: the local training.
        gradient: what `KnownTraining.gradient_of` made of what was sent, or of what a defence made
            of that.
        shape: of the batch of images, (B, C, *spatial).
        known: what the attacker knows of the batch beside the image: its "label", unless that is
            inferred, and its "mask" if the loss has one.
        settings: the settings.
        seed: names the generator of the images that are started from.

    Raises:
        ConfigError: the images are rows of a table, or the label cannot be inferred.
        DataError: the gradient is zero or not finite.
    """
    if len(shape) < 4:
        raise ConfigError("gradient inversion rebuilds images; choose a federation of images")
    length = _norm(gradient)
    if not 0 < float(length) < float("inf"):
        raise DataError("what the site sent has no direction: it is zero, or not finite")
    rest = {key: tensor for key, tensor in known.items() if key != "image"}
    if settings.label == "inferred":
        rest["label"] = infer_label(training, gradient, shape[0])
    best = Rebuilt(torch.zeros(*shape), rest["label"], float("inf"))
    for number in range(settings.restarts):
        rng = generator(seed, "attack", "inversion", number)
        image = torch.randn(*shape, generator=rng).requires_grad_()
        optimizer = torch.optim.Adam([image], lr=settings.lr)
        falls = [round(settings.steps * share) for share in DECAYS]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, falls, gamma=0.1)
        for _ in range(settings.steps):
            own = training.gradient({**rest, "image": image}, list(gradient), graph=True)
            products = [(own[n] * g).sum() for n, g in gradient.items()]
            cosine = torch.stack(products).sum() / (_norm(own) * length + TINY)
            objective = 1 - cosine + settings.total_variation * total_variation(image)
            value = float(objective.detach())
            if value < best.objective:
                best = Rebuilt(image.detach().clone(), rest["label"], value)
            (image.grad,) = torch.autograd.grad(objective, [image])
            image.grad.sign_()
            optimizer.step()
            schedule.step()
    return best


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
    if count != 1 or not isinstance(training.task, ClassificationTask):
        raise ConfigError(
            "a label can be inferred from the gradient of one case of a classification; choose "
            "label known"
        )
    inside = {id(parameter) for parameter in head_layer(training.module).parameters()}
    head = [n for n, p in training.module.named_parameters() if id(p) in inside and n in gradient]
    if not head:
        raise ConfigError(
            "the head of the network was not sent, so that the label cannot be inferred from it; "
            "choose label known"
        )
    tensor = gradient[next((name for name in head if gradient[name].ndim == 1), head[-1])]
    return tensor.flatten(1).sum(1).argmin()[None] if tensor.ndim > 1 else tensor.argmin()[None]


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
