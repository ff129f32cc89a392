"""Half precision: two bytes for every number."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import frexp
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from collegium.compression._frame import Kind, Layout, seal, unseal
from collegium.compression.base import Codec, Encoded
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

FORMATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOP = 15
"""A scaled tensor's largest magnitude lies below two to this power, float16's just above it."""

STEEPEST = 120


@dataclass(frozen=True)
class Half(Codec):
    """The numbers rounded to 16 bits.

    In float16 every tensor is multiplied by a power of two before, which loses nothing: no number
    becomes infinite, and the small numbers of updates do not vanish. A rounded number is off by at
    most 2^-11 of itself in float16 (unless it is 2^28 times smaller than the largest of its
    tensor), and by 2^-8 in bfloat16, which takes any size as it is.

    Attributes:
        format: "float16" or "bfloat16".
    """

    format: Literal["float16", "bfloat16"] = "float16"

    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the rounded numbers' bytes, and what they decode to."""
        layout = Layout(target)
        dtype = FORMATS[self.format]
        halves, shifts, found = [], [], {}
        for name in layout.names:
            vector = target[name].detach().to("cpu", torch.float32).reshape(-1)
            shifts.append(self._shift(name, vector))
            halves.append((vector * 2.0 ** shifts[-1]).to(dtype))
            found[name] = _restored(halves[-1], shifts[-1], target[name])
        head = np.array(shifts if dtype == torch.float16 else [], "<i2").tobytes()
        raw = [half.view(torch.uint8).numpy().data for half in halves]
        return Encoded(seal(Kind.HALF, layout, self._mark(), head, *raw), layout.tie(found))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the rounded numbers; the format must be that of the sender."""
        layout = Layout(like)
        _, reader = unseal((Kind.HALF,), layout, data)
        if bytes(reader.take(1)) != self._mark():
            raise ProtocolError(
                f"the bytes are not in {self.format}; use the same format on both sides"
            )
        dtype, count = FORMATS[self.format], len(layout.names)
        shifts = reader.array("<i2", count) if dtype == torch.float16 else np.zeros(count, np.int16)
        if (abs(shifts) > STEEPEST).any():
            raise ProtocolError("encoded tensors are damaged: a scale is out of range")
        found = {}
        for name, shift in zip(layout.names, shifts.tolist(), strict=True):
            half = torch.empty(like[name].numel(), dtype=dtype)
            half.view(torch.uint8).numpy()[:] = reader.take(2 * len(half))
            found[name] = _restored(half, shift, like[name])
        if len(reader):
            raise ProtocolError(f"encoded tensors are damaged: {len(reader)} bytes are left over")
        return layout.tie(found)

    def _mark(self) -> bytes:
        return bytes([sorted(FORMATS).index(self.format)])

    def _shift(self, name: str, vector: Tensor) -> int:
        """Return the power of two by which a tensor is scaled."""
        dtype = FORMATS[self.format]
        low, high = map(float, vector.aminmax()) if len(vector) else (0.0, 0.0)
        largest = max(-low, high)
        if not largest <= torch.finfo(torch.bfloat16).max:
            raise ProtocolError(
                f"{name} holds NaN, infinite or enormous values and cannot be sent; lower the "
                f"learning rate or clip the gradient"
            )
        if dtype == torch.bfloat16 or largest == 0:
            return 0
        return min(TOP - frexp(largest)[1], STEEPEST)


def _restored(half: Tensor, shift: int, like: Tensor) -> Tensor:
    """Return rounded numbers in the scale, shape and dtype of a tensor."""
    return (half.float() * 2.0**-shift).reshape(like.shape).to(like.dtype)
