"""STC, sparse ternary compression (Sattler et al., 2019, https://arxiv.org/abs/1903.02891)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from collegium.compression._frame import FlatLayout, FrameKind, read_frame, write_frame
from collegium.compression.base import Codec, Encoded
from collegium.core.lazy import torch
from collegium.core.settings import Share, settings
from collegium.core.tensors import Tensors

CODINGS = {
    "range": FrameKind.GROUPS, "adaptive": FrameKind.ADAPTIVE, "golomb": FrameKind.GOLOMB,
}  # fmt: skip


@settings
class STC(Codec):
    """The numbers of largest magnitude, each as its sign times their mean magnitude (Algorithm 1).

    Of d numbers the k = max(1, round(p d)) largest by magnitude are kept, and of equal ones the
    first; zeros are never kept, nor counted in the mean. The loss is fed back.

    The three codings decode to the same numbers. "golomb" is the paper's: gaps between positions in
    Golomb-Rice code with the one best parameter for the density p (Eq. 15). With "adaptive" the
    parameter follows the gaps: as fast, and hardly ever longer. "range", the default, writes the
    patterns of kernels by a range coder: several times slower, and shorter than the entropy of the
    positions in each tensor, since kept numbers cluster in kernels (see
    `collegium.compression._groups`).

    Deviations: the mean's 32 bits are sent and counted, which the paper's count omits; the authors'
    code compares with a threshold and may keep more than k if magnitudes are equal, treats every
    tensor separately (``scope="tensor"``), and counts bits without writing them. In pFedNet's code,
    "STC" is the name of another rule, with one quantile and one mean for either sign and without
    feedback.

    Attributes:
        p: share of the numbers that is kept.
        scope: "model" compares all numbers with each other; "tensor" keeps the share of every
            tensor, with a mean magnitude of its own.
        coding: the encoding of the kept positions: "range", "adaptive" or "golomb".
    """

    feedback: ClassVar[bool] = True

    p: Share = 1 / 400
    scope: Literal["model", "tensor"] = "model"
    coding: Literal["range", "adaptive", "golomb"] = "range"

    @property
    def is_sparse(self) -> bool:
        """Whether less than half of the numbers are kept. See `Codec.is_sparse`."""
        return self.p < 0.5

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the kept numbers as bytes, and what they decode to. See `Codec.encode`."""
        from collegium.compression import _ternary

        layout = FlatLayout(target)
        ternary = _ternary.ternarise(
            layout.vectors(target), layout, self.p, by_tensor=self.scope == "tensor"
        )
        kind = CODINGS[self.coding]
        data = write_frame(kind, layout, _ternary.write_ternary(ternary, layout, kind))
        return Encoded(data, layout.restore(_ternary.to_dense(ternary, layout)))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return zeros and the kept numbers; any coding can be read. See `Codec.decode`."""
        from collegium.compression import _ternary

        layout = FlatLayout(like)
        kind, reader = read_frame(tuple(CODINGS.values()), layout, data)
        ternary = _ternary.read_ternary(kind, reader, layout)
        return layout.restore(_ternary.to_dense(ternary, layout))
