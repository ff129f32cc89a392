"""No compression: the reference for every other codec."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from collegium.compression._frame import Kind, Layout, seal, unseal
from collegium.compression.base import Codec, Encoded
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


@dataclass(frozen=True)
class Identity(Codec):
    """The numbers as they are, in their own precision, without loss."""

    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the numbers' bytes; what they decode to is ``target`` itself."""
        layout = Layout(target)
        raw = [
            target[name].detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
            for name in layout.names
        ]
        return Encoded(seal(Kind.IDENTITY, layout, *raw), target)

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the numbers that were sent."""
        layout = Layout(like)
        _, reader = unseal((Kind.IDENTITY,), layout, data)
        found = {}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            tensor = torch.empty(shape, dtype=like[name].dtype)
            raw = reader.take(tensor.numel() * tensor.element_size())
            if len(raw):
                tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
            found[name] = tensor
        if len(reader):
            raise ProtocolError(f"encoded tensors are damaged: {len(reader)} bytes are left over")
        return layout.tie(found)
