"""A toy site outside the federation, in numpy and as an adapter sees it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collegium.adaptation.base import AdaptationResult, Sources
from collegium.core.dataset import TensorDataset, UnlabelledDataset
from collegium.core.tensors import Tensors
from collegium.tasks import SegmentationTask

Predictions = dict[str, list[np.ndarray]]


class OutsideSite:
    """Five grey images of 4x4 pixels in two classes, and a way to adapt to them.

    All is float64, so that an adapter can be held against numpy to many digits.

    Attributes:
        images: (5, 1, 4, 4).
        task: two classes; images take one forward pass.
    """

    def __init__(self) -> None:
        self.images = np.random.default_rng(0).normal(0.4, 1.3, (5, 1, 4, 4))
        self.task = SegmentationTask(2)

    def cases(self, labels: int = 0, inside: np.ndarray | None = None) -> UnlabelledDataset:
        """The site's cases; ``labels`` is what every pixel of their hidden labels is.

        ``inside`` (5, 4, 4) is their field of view.
        """
        hidden = torch.full((5, 4, 4), labels)
        inputs = {"image": torch.from_numpy(self.images), "label": hidden}
        if inside is not None:
            inputs["mask"] = torch.from_numpy(inside)
        return UnlabelledDataset(TensorDataset(inputs))

    def sources(
        self, network: Callable[[], nn.Module], names: tuple[str, ...] = ("global",), seed: int = 0
    ) -> Sources:
        """Models of their own, with running statistics of their own, under the names given."""
        models = {}
        for k, name in enumerate(names):
            rng = torch.Generator().manual_seed(k)
            models[name] = Tensors(
                (key, _drawn(key, tensor, rng))
                for key, tensor in Tensors(network().state_dict()).items()
            )
        return Sources(models, network, self.task, seed=seed)

    def adapt(
        self,
        adapter: Any,
        sources: Sources,
        labels: int = 0,
        *,
        inside: np.ndarray | None = None,
    ) -> tuple[Predictions, AdaptationResult]:
        """Let an adapter work; give its predictions by model, and what it ended with."""
        found: dict[str, dict[int, np.ndarray]] = {}

        def deliver(name: str, index: int, prediction: torch.Tensor) -> None:
            assert index not in found.setdefault(name, {}), "a case was delivered twice"
            found[name][index] = prediction.numpy()

        adapted = adapter.adapt(sources, self.cases(labels, inside), deliver)
        return {name: [cases[i] for i in range(5)] for name, cases in found.items()}, adapted


def _drawn(key: str, tensor: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    if not tensor.is_floating_point():
        return tensor.clone()
    drawn = torch.randn(tensor.shape, generator=rng, dtype=tensor.dtype)
    return drawn.abs() + 0.5 if key.endswith("running_var") else drawn


@pytest.fixture
def outside() -> OutsideSite:
    """The toy site outside."""
    return OutsideSite()


class ByHand:
    """The network of `two_layers` in numpy, right for complex numbers too.

    Convolution 1x1, batch normalisation, ReLU, convolution 1x1; maps are (B, channels, pixels).
    """

    AFFINE = ("norm.weight", "norm.bias")

    @staticmethod
    def network() -> nn.Module:
        layers = nn.Sequential()
        layers.add_module("first", nn.Conv2d(1, 3, 1))
        layers.add_module("norm", nn.BatchNorm2d(3))
        layers.add_module("relu", nn.ReLU())
        layers.add_module("last", nn.Conv2d(3, 2, 1))
        return layers.double()

    @staticmethod
    def convolve(model: Any, name: str, maps: Any) -> Any:
        weight = model[f"{name}.weight"][:, :, 0, 0]
        return np.einsum("oi,bip->bop", weight, maps) + model[f"{name}.bias"][:, None]

    @staticmethod
    def normalise(model: Any, name: str, maps: Any, mean: Any, variance: Any) -> Any:
        normal = (maps - mean[:, None]) / np.sqrt(variance[:, None] + 1e-5)
        return model[f"{name}.weight"][:, None] * normal + model[f"{name}.bias"][:, None]

    @staticmethod
    def relu(maps: Any) -> Any:
        return np.where(maps.real > 0, maps, 0)

    @classmethod
    def logits(cls, model: Any, images: Any, *, batch_statistics: bool) -> Any:
        """(B, 2, pixels)."""
        maps = cls.convolve(model, "first", images.reshape(len(images), 1, -1))
        mean, variance = model["norm.running_mean"], model["norm.running_var"]
        if batch_statistics:
            mean = maps.mean((0, 2))
            variance = ((maps - mean[:, None]) ** 2).mean((0, 2))
        maps = cls.relu(cls.normalise(model, "norm", maps, mean, variance))
        return cls.convolve(model, "last", maps)

    @classmethod
    def classes(cls, model: Any, images: Any, *, batch_statistics: bool) -> np.ndarray:
        """The prediction, (B, 4, 4)."""
        logits = cls.logits(model, images, batch_statistics=batch_statistics)
        return np.asarray(logits.argmax(1).reshape(-1, 4, 4))

    @staticmethod
    def slopes(function: Callable[[Any], Any], model: Any, names: Any) -> dict[str, np.ndarray]:
        """The gradient by every entry, by a complex step: exact to the last digits."""
        found = {}
        for name in names:
            found[name] = np.zeros_like(model[name])
            for place in np.ndindex(model[name].shape):
                moved = model[name].astype(complex)
                moved[place] += 1e-30j
                found[name][place] = function({**model, name: moved}).imag / 1e-30
        return found


@pytest.fixture
def by_hand() -> type[ByHand]:
    """The two-layer network and its gradients in numpy."""
    return ByHand


@pytest.fixture
def in_numpy() -> Callable[[Tensors], dict[str, np.ndarray]]:
    """Turns a model into numpy arrays of its own."""
    return lambda model: {name: tensor.numpy().copy() for name, tensor in model.items()}
