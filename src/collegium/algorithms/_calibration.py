"""LC-Fed's additions to a network: channels selected by site, and a head that sees all heads."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from collegium.core.model_parts import head_layer
from collegium.errors import ConfigError
from collegium.models.rotation import last_encoder_layer, output_layer

NAME, OWN = "calibration", "site_own"
"""The names of the additions, and of the part of them that stays at a site."""

WINDOW, SIGMA, LEAST = 31, 6.0, 0.2
"""Pixels of the windows, width of the Gaussian, and least disagreement of a peak."""

REDUCTION = 16
"""By how much the hidden channels of the selection are fewer."""


class Calibration(nn.Module):
    """The additions; called as a layer, they pass on what they are given.

    Args:
        channels: channels of the encoder's output.
        head: the network's head.
        sites: number of sites.

    Raises:
        ConfigError: the head has no convolution or linear layer.
    """

    def __init__(self, channels: int, head: nn.Module, sites: int) -> None:
        super().__init__()
        hidden = max(channels // REDUCTION, 1)
        self.site = nn.Linear(channels, channels, bias=False)
        self.squeeze = nn.Linear(2 * channels, hidden, bias=False)
        self.excite = nn.Linear(hidden, channels, bias=False)
        self.add_module(OWN, _SiteOwn(channels, head, sites))
        self._seen: tuple[Tensor, Tensor] | None = None

    @property
    def own(self) -> _SiteOwn:
        """The part that stays at a site."""
        own = self.get_submodule(OWN)
        assert isinstance(own, _SiteOwn)
        return own

    def forward(self, passed: Tensor) -> Tensor:
        """Return what it is given, as the last layer of an `nn.Sequential` has to."""
        return passed

    def selected(self, x: Tensor) -> Tensor:
        """Return features with each channel multiplied by a number from 1 to 2.

        Args:
            x: (B, C, *spatial) or (B, C).
        """
        flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(2)
        site = self.site(functional.relu(self.own.embedding)).expand(len(x), -1)
        pooled = [torch.cat([p, site], dim=1) for p in (flat.mean(2), flat.amax(2))]
        logits = [self.excite(functional.relu(self.squeeze(p))) for p in pooled]
        attention: Tensor = (logits[0] + logits[1]).sigmoid()
        return x + x * attention.reshape(*attention.shape, *[1] * (x.ndim - 2))

    def select_output(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """Select channels of a layer's output, as its forward hook.

        Args:
            layer: the layer.
            inputs: what it was given.
            output: what it returned.
        """
        return self.selected(output)

    def select_input(self, layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Select channels of a layer's input, as its forward hook before the pass.

        Args:
            layer: the layer.
            inputs: what it is given.
        """
        return (self.selected(inputs[0]), *inputs[1:])

    def remember(self, head: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the head's input and output for `calibrate`, as the head's forward hook.

        Args:
            head: the head.
            inputs: what it was given.
            output: what it returned.
        """
        self._seen = (inputs[0], output) if self.own.active else None

    def calibrate(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        """Return the calibrated output once it is active, as the network's forward hook.

        Args:
            module: the network.
            inputs: what it was given.
            output: what it returned.
        """
        seen, self._seen = self._seen, None
        return None if seen is None else self.own.calibrated(*seen).reshape(output.shape)


class _SiteOwn(nn.Module):
    """The part that stays at a site: embedding, the heads of other sites, the calibrated head."""

    active: Tensor

    def __init__(self, channels: int, head: nn.Module, sites: int) -> None:
        super().__init__()
        kinds = (nn.Linear, nn.modules.conv._ConvNd)
        layers = [layer for layer in head.modules() if isinstance(layer, kinds)]
        if not layers:
            raise ConfigError(
                f"LC-Fed calibrates heads with a convolution or a linear layer, and this is a "
                f"{type(head).__name__}"
            )
        first, last = layers[0], layers[-1]
        features = first.in_features if isinstance(first, nn.Linear) else first.in_channels
        classes = last.out_features if isinstance(last, nn.Linear) else last.out_channels
        kind = nn.Conv3d if isinstance(last, (nn.Conv3d, nn.ConvTranspose3d)) else nn.Conv2d
        self.embedding = nn.Parameter(torch.randn(channels) / math.sqrt(channels))
        self.heads = nn.ModuleList(copy.deepcopy(head) for _ in range(sites - 1))
        self.heads.requires_grad_(False)
        self.fuse = kind(2 * classes * features, classes, 3, padding=1)
        self.register_buffer("active", torch.zeros(()))

    def calibrated(self, features: Tensor, logits: Tensor) -> Tensor:
        """Return the calibrated logits, with a gradient by the calibrated head alone.

        Args:
            features: what enters the head, (B, F, *spatial) or (B, F).
            logits: what the site's own head makes of it, (B, classes, *spatial) or (B, classes).
        """
        with torch.no_grad():
            own = _probabilities(logits)
            gaps = [_probabilities(head(features)) - own for head in self.heads]
            disagreement = torch.stack(gaps).square().mean(0).sqrt()
            if logits.ndim == 2:
                own, disagreement, features = (
                    t[..., None, None] for t in (own, disagreement, features)
                )
            if features.shape[2:] != own.shape[2:]:
                features = functional.interpolate(features, own.shape[2:])
            maps = [smooth(peaks(disagreement)), smooth(own)]
            weighted = [features * (1 + m[:, c : c + 1]) for c in range(own.shape[1]) for m in maps]
        fused: Tensor = self.fuse(torch.cat(weighted, dim=1))
        return fused


def _probabilities(logits: Tensor) -> Tensor:
    return logits.softmax(1) if logits.shape[1] > 1 else logits.sigmoid()


def peaks(disagreement: Tensor) -> Tensor:
    """Return 1 where a map is the largest in its window and above a share of its maximum, else 0.

    Args:
        disagreement: (B, classes, *spatial), not negative.
    """
    largest = disagreement.flatten(2).amax(2).reshape(*disagreement.shape[:2], *[1] * (
        disagreement.ndim - 2
    ))  # fmt: skip
    relative = torch.where(largest > 0, disagreement / largest, 0.0)
    around = _by_axis(
        relative, lambda row: functional.max_pool1d(row, WINDOW, 1, padding=WINDOW // 2)
    )
    return ((relative == around) & (relative > LEAST)).to(disagreement)


def smooth(maps: Tensor) -> Tensor:
    """Return maps under a Gaussian window whose largest weight is 1.

    Args:
        maps: (B, classes, *spatial).
    """
    places = torch.arange(WINDOW).to(maps) - WINDOW // 2
    kernel = torch.exp(-places.square() / (2 * SIGMA**2))[None, None]
    return _by_axis(maps, lambda row: functional.conv1d(row, kernel, padding=WINDOW // 2))


def _by_axis(maps: Tensor, window: Callable[[Tensor], Tensor]) -> Tensor:
    """Return maps after a function of rows (n, 1, length) was applied along each spatial axis."""
    for axis in range(2, maps.ndim):
        moved = maps.movedim(axis, -1)
        rows = window(moved.reshape(-1, 1, moved.shape[-1]))
        maps = rows.reshape(moved.shape).movedim(-1, axis)
    return maps


def attach_calibration(module: nn.Module, sites: int) -> None:
    """Add a `Calibration` to a network, in place.

    Channels are selected at the encoder's output, and failing that where the head is entered.

    Args:
        module: the network as built.
        sites: number of sites.

    Raises:
        ConfigError: the network has no head, or something of that name.
    """
    if hasattr(module, NAME):
        raise ConfigError(f"{type(module).__name__} has something named {NAME!r}; rename it")
    head, encoder = head_layer(module), last_encoder_layer(module)
    layer, channels = output_layer(module)
    added = Calibration(channels, head, sites).to(layer.weight)
    module.add_module(NAME, added)
    if encoder is None:
        head.register_forward_pre_hook(added.select_input)
    else:
        encoder.register_forward_hook(added.select_output)
    head.register_forward_hook(added.remember)
    module.register_forward_hook(added.calibrate)
