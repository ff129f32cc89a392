import math

import torch

from collegium.compression._frame import HEADER_BYTES
from collegium.compression.identity import Identity
from collegium.core.tensors import Tensors


def test_every_bit_arrives_in_as_many_bytes(update: Tensors):
    odd = Tensors(
        {"odd": torch.tensor([math.nan, -0.0, math.inf, 1e-42]), "half": torch.ones(3).half()}
    )
    target = update | odd
    data, decoded = Identity().encode(target, torch.Generator(), {})
    assert decoded is target
    assert len(data) == HEADER_BYTES + 4 * (update.numel() + 4) + 2 * 3
    for name, tensor in Identity().decode(data, target * 0.0).items():
        assert tensor.numpy().tobytes() == target[name].numpy().tobytes()
