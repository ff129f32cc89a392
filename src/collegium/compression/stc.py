"""STC, sparse ternary compression (Sattler et al., 2019, https://arxiv.org/abs/1903.02891)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from collegium.compression._frame import Kind, Layout, seal, unseal
from collegium.compression.base import Codec, Encoded
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError

CODINGS = {"range": Kind.GROUPS, "adaptive": Kind.ADAPTIVE, "golomb": Kind.GOLOMB}


@dataclass(frozen=True)
class STC(Codec):
    """The numbers of largest magnitude, each as its sign times their mean magnitude (Algorithm 1).

    Of d numbers the k = max(1, round(p d)) largest by magnitude are kept, and of equal ones the
    first; zeros are never kept, nor counted in the mean. What is lost is fed back.

    The three codings decode to the same numbers. "golomb" is the paper's: gaps between positions in
    Golomb-Rice code with the one best parameter for the density p (Eq. 15). "adaptive" lets the
    parameter follow the gaps: as quick, and hardly ever longer. "range", the default, writes the
    patterns of kernels by a range coder: several times slower, and shorter than the entropy of the
    positions in each tensor, since kept numbers cluster in kernels (see
    `collegium.compression._groups`).

    Deviations: the mean's 32 bits travel, which the paper's count leaves out; the authors' code
    compares with a threshold and may keep more than k where magnitudes are equal, works on every
    tensor by itself (``scope="tensor"``), and counts bits without writing them. pFedNet's code
    calls "STC" a rule with one quantile and one mean for either sign and no feedback, which this is
    not.

    Attributes:
        p: share of the numbers that is kept.
        scope: "model" compares all numbers that are sent with each other; "tensor" keeps the share
            of every tensor, with a mean magnitude of its own.
        coding: how the kept numbers are written: "range", "adaptive" or "golomb".
    """

    feedback: ClassVar[bool] = True

    p: float = 1 / 400
    scope: Literal["model", "tensor"] = "model"
    coding: Literal["range", "adaptive", "golomb"] = "range"

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ConfigError(f"stc: p is {self.p}; choose a share above 0 and at most 1")

    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the kept numbers as bytes, and what they decode to."""
        from collegium.compression import _ternary

        layout = Layout(target)
        ternary = _ternary.ternarise(
            layout.vectors(target), layout, self.p, by_tensor=self.scope == "tensor"
        )
        kind = CODINGS[self.coding]
        data = seal(kind, layout, _ternary.write_ternary(ternary, layout, kind))
        return Encoded(data, layout.restore(_ternary.fill(ternary, layout)))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return tensors of zeros and the kept numbers; any of the three codings can be read."""
        from collegium.compression import _ternary

        layout = Layout(like)
        kind, reader = unseal(tuple(CODINGS.values()), layout, data)
        ternary = _ternary.read_ternary(kind, reader, layout)
        return layout.restore(_ternary.fill(ternary, layout))
