"""An update like those of networks, for the tests of codecs."""

import pytest
import torch

from collegium.core.tensors import Tensors

SHAPES = {
    "down.0.weight": (8, 3, 3, 3),
    "down.0.bias": (8,),
    "down.1.weight": (24, 16, 3, 3),
    "middle.weight": (16, 16, 5, 5),
    "up.weight": (24, 8, 2, 2),
    "volume.weight": (4, 4, 3, 3, 3),
    "head.weight": (10, 33),
    "head.scale": (),
    "unused": (0, 4),
}


def draw(seed: int = 0) -> Tensors:
    """Numbers of different size in every tensor and in every kernel, with heavy tails."""
    rng = torch.Generator().manual_seed(seed)
    drawn = {}
    for number, (name, shape) in enumerate(SHAPES.items()):
        kernels = torch.randn(shape[:2] + (1,) * max(0, len(shape) - 2), generator=rng)
        drawn[name] = 10.0 ** (number % 3 - 4) * kernels**3 * torch.randn(shape, generator=rng)
    return Tensors(drawn)


@pytest.fixture
def update() -> Tensors:
    """An update of a small network."""
    return draw()
