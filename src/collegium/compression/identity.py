"""No compression: the reference for every other codec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from collegium.compression._frame import FlatLayout, FrameKind, read_frame, write_frame
from collegium.compression.base import Codec, Encoded
from collegium.core.lazy import torch
from collegium.core.settings import settings
from collegium.core.tensors import Tensors, raw_bytes


@settings
class Identity(Codec):
    """The numbers as they are, in their own precision, without loss."""

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the numbers' bytes; they decode to ``target`` itself. See `Codec.encode`."""
        layout = FlatLayout(target)
        raw = [raw_bytes(target[name].detach().to("cpu")) for name in layout.names]
        return Encoded(write_frame(FrameKind.IDENTITY, layout, *raw), target)

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the numbers that were sent. See `Codec.decode`."""
        layout = FlatLayout(like)
        _, reader = read_frame((FrameKind.IDENTITY,), layout, data)
        decoded = {}
        for name, shape in zip(layout.names, layout.shapes, strict=True):
            tensor = torch.empty(shape, dtype=like[name].dtype)
            raw = reader.take(tensor.numel() * tensor.element_size())
            if len(raw):
                tensor.reshape(-1).view(torch.uint8).numpy()[:] = raw
            decoded[name] = tensor
        reader.require_end()
        return layout.tie(decoded)
