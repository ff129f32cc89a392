"""Half precision: two bytes for every number."""

from __future__ import annotations

from collections.abc import Mapping
from math import frexp
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from collegium.compression._frame import FlatLayout, FrameKind, read_frame, write_frame
from collegium.compression.base import Codec, Encoded
from collegium.core.lazy import torch
from collegium.core.settings import settings
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

FORMATS = ("bfloat16", "float16")
"""The formats, as torch names its types, in the order of their numbers in a frame."""

TOP_EXPONENT = 15
"""A scaled tensor's largest magnitude lies below two to this power, float16's just above it."""

MAX_SHIFT = 120
"""The largest power of two by which a tensor is scaled, up or down."""


@settings
class Half(Codec):
    """The numbers rounded to 16 bits.

    In float16 every tensor is first multiplied by a power of two, which loses nothing: no number
    becomes infinite, and the small numbers of updates do not vanish. A rounded number is off by at
    most 2^-11 of itself in float16 (unless it is 2^28 times smaller than the largest of its
    tensor), and by 2^-8 in bfloat16, which needs no scaling.

    Attributes:
        format: "float16" or "bfloat16".
    """

    format: Literal["float16", "bfloat16"] = "float16"

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the rounded numbers' bytes, and what they decode to. See `Codec.encode`."""
        layout = FlatLayout(target)
        dtype = self._dtype()
        halves, shifts, decoded = [], [], {}
        for name in layout.names:
            vector = target[name].detach().to("cpu", torch.float32).reshape(-1)
            shifts.append(self._shift(name, vector))
            halves.append((vector * 2.0 ** shifts[-1]).to(dtype))
            decoded[name] = _restore(halves[-1], shifts[-1], target[name])
        header = np.array(shifts if dtype == torch.float16 else [], "<i2").tobytes()
        raw = [half.view(torch.uint8).numpy().data for half in halves]
        frame = write_frame(FrameKind.HALF, layout, self._format_byte(), header, *raw)
        return Encoded(frame, layout.tie(decoded))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the rounded numbers; the sender's format must be the same. See `Codec.decode`."""
        layout = FlatLayout(like)
        _, reader = read_frame((FrameKind.HALF,), layout, data)
        if bytes(reader.take(1)) != self._format_byte():
            raise ProtocolError(
                f"the bytes are not in {self.format}; use the same format on both sides"
            )
        dtype, count = self._dtype(), len(layout.names)
        shifts = reader.array("<i2", count) if dtype == torch.float16 else np.zeros(count, np.int16)
        if (abs(shifts) > MAX_SHIFT).any():
            raise ProtocolError("encoded tensors are damaged: a scale is out of range")
        decoded = {}
        for name, shift in zip(layout.names, shifts.tolist(), strict=True):
            half = torch.empty(like[name].numel(), dtype=dtype)
            half.view(torch.uint8).numpy()[:] = reader.take(2 * len(half))
            decoded[name] = _restore(half, shift, like[name])
        reader.require_end()
        return layout.tie(decoded)

    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.format)
        return dtype

    def _format_byte(self) -> bytes:
        return bytes([FORMATS.index(self.format)])

    def _shift(self, name: str, vector: Tensor) -> int:
        """Return the power of two by which a tensor is scaled."""
        low, high = map(float, vector.aminmax()) if len(vector) else (0.0, 0.0)
        largest = max(-low, high)
        if not largest <= torch.finfo(torch.bfloat16).max:
            raise ProtocolError(
                f"{name} holds NaN, infinite or enormous values and cannot be sent; lower the "
                f"learning rate or clip the gradient"
            )
        if self.format == "bfloat16" or largest == 0:
            return 0
        return min(TOP_EXPONENT - frexp(largest)[1], MAX_SHIFT)


def _restore(half: Tensor, shift: int, like: Tensor) -> Tensor:
    """Return rounded numbers in the scale, shape and dtype of a tensor."""
    return (half.float() * 2.0**-shift).reshape(like.shape).to(like.dtype)
