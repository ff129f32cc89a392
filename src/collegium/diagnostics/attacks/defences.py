"""Defences of an update against inversion: clipping, noise and codecs, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from collegium.compression.base import Codec
from collegium.core.tensors import Tensors
from collegium.diagnostics.attacks.inversion import through_codec, with_noise
from collegium.errors import ConfigError
from collegium.experiment.config.registry import CODECS
from collegium.training.privacy import Generators, private_update

NONE = "none"
"""The name of no defence."""

UNITS = {
    "clip": "the largest norm that is sent, e.g. 'clip 1'",
    "noise": "the norm of the noise over that of the gradient, e.g. 'noise 0.1'",
    "dp": "the noise multiplier, e.g. 'clip 1 + dp 1.1'",
}
"""The meaning of the number after each word."""


@dataclass(frozen=True)
class Defence:
    """A clipping, noise and a codec that a gradient passes before it leaves, in this order.

    Attributes:
        clip: its largest norm; None: any.
        noise: the norm of Gaussian noise over that of the clipped gradient.
        multiplier: the noise multiplier z of differential privacy: every number has noise of the
            standard deviation z times ``clip``.
        codec: a codec; None: none.
    """

    clip: float | None = None
    noise: float = 0.0
    multiplier: float = 0.0
    codec: Codec | None = None

    def apply(self, gradient: Tensors, *, seed: int) -> Tensors:
        """Return what is left of a gradient.

        Args:
            gradient: the gradient.
            seed: names the generators.
        """
        if self.multiplier:
            assert self.clip is not None  # `defence_of` sees to it
            gradient = private_update(
                gradient.map(torch.zeros_like), gradient, [*gradient], noise=self.multiplier,
                max_norm=self.clip, generators=Generators(seed, ("attack",)),
            )  # fmt: skip
        elif self.clip is not None or self.noise:
            gradient = with_noise(gradient, self.noise, seed=seed, clip=self.clip)
        return gradient if self.codec is None else through_codec(gradient, self.codec, seed=seed)

    def noise_norm(self, left: Tensors) -> float:
        """Return the norm of the noise in what is left, as who knows the defence expects it.

        A codec's errors are not counted.

        Args:
            left: what `apply` returned.
        """
        if self.multiplier and self.clip is not None:
            return self.multiplier * self.clip * math.sqrt(left.numel())
        return self.noise / math.hypot(1, self.noise) * math.sqrt(left.dot(left))


def defence_of(name: str) -> Defence:
    """Return the defence that a name means.

    Args:
        name: "none", or one or more of these, joined by " + " in this order: "clip C" to a norm;
            "noise R", Gaussian noise of R times the gradient's norm, or "dp Z", noise of the
            multiplier Z of differential privacy, which follows a clipping; a codec.

    Raises:
        ConfigError: there is no such defence.
    """
    if name == NONE:
        return Defence()
    clip, noise, multiplier, codec = None, 0.0, 0.0, None
    ranks = []
    for part in name.split("+"):
        word, _, number = part.strip().partition(" ")
        ranks.append({"clip": 0, "noise": 1, "dp": 1}.get(word, 2))
        if word == "clip":
            clip = _number(name, word, number)
        elif word == "noise":
            noise = _number(name, word, number)
        elif word == "dp":
            multiplier = _number(name, word, number)
        else:
            codec = CODECS.load(part.strip())()
    if ranks != sorted(set(ranks)) or (1 in ranks and multiplier and clip is None):
        raise ConfigError(
            f"the defence {name!r} cannot be made; join a clipping, noise and a codec in this "
            f"order, each once at most, e.g. 'clip 1 + noise 0.1' or 'clip 1 + dp 1.1'"
        )
    return Defence(clip, noise, multiplier, codec)


def _number(name: str, word: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found < math.inf or (word == "clip" and found == 0):
        raise ConfigError(f"the defence {name!r} has no number after {word!r}; write {UNITS[word]}")
    return found


def defended(gradient: Tensors, defence: str, *, seed: int) -> Tensors:
    """Return what a defence leaves of a gradient.

    Args:
        gradient: the gradient.
        defence: its name, see `defence_of`.
        seed: names the generators.

    Raises:
        ConfigError: there is no such defence.
    """
    return defence_of(defence).apply(gradient, seed=seed)
