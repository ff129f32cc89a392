"""CER, communication-efficient regularisation, solved exactly.

From pFedNet (Zhao et al., 2023, https://arxiv.org/abs/2306.14483), Eq. 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from math import isfinite
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from collegium.compression._frame import FlatLayout, FrameKind, read_frame, write_frame
from collegium.compression.base import Codec, Encoded
from collegium.core.lazy import torch
from collegium.core.settings import NonNegative, Share, settings
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

STEPS = {"plain": FrameKind.STEPS, "entropy": FrameKind.CODED_STEPS}
TERNARY = (FrameKind.RUNS, FrameKind.GROUPS)


@settings
class CER(Codec):
    """The update smoothed until it is constant for long stretches, which take few bytes.

    Of an update g, argmin_v 1/2 ||v - g||^2 + gamma (sum_{i<d} |v_i - v_{i+1}| + |v_d|) is sent,
    which is the minimum of pFedNet's Eq. 4 for any step size (`collegium.solvers.taut_string`). The
    d numbers of g have one fixed order: tensors by name, each row by row; the sum runs across the
    borders of tensors as well.

    Deviations: the minimum is exact, whereas the paper's ADMM stops far from it, and its code also
    cuts g into chunks. ``gamma`` is in units of the mean of |g|, since the paper's absolute values
    mean nothing for updates of another size (``absolute=True`` for those). The loss is fed back,
    which the paper does not do (``feedback=False`` for that). With ``then="stc"``, the rule is that
    of `collegium.compression.stc`, not the one with two quantiles of that name in pFedNet's code.

    Attributes:
        gamma: strength of the smoothing, in units of the mean of |g| over all numbers; 0.1 to 10
            make sense. From the largest partial sum of g on, nothing is left of it.
        absolute: whether gamma is used as it is instead.
        then: the encoding of the result: "plain" (positions of changes in Golomb-Rice code and
            values as they are), "entropy" (positions and exponents by a range coder) or "stc" (only
            the largest numbers, as signs times their mean magnitude, in runs or in kernels,
            whichever is shorter).
        p: for "stc", the share of the numbers that is kept.
        values: for the others, the precision: "float32" or, with half the bytes, "bfloat16".
        feedback: whether the sender adds what was lost to what it sends next.
    """

    gamma: NonNegative = 1.0
    absolute: bool = False
    then: Literal["plain", "entropy", "stc"] = "entropy"
    p: Share = 0.2
    values: Literal["float32", "bfloat16"] = "float32"
    feedback: bool = field(default=True, kw_only=True)  # type: ignore[misc]

    @property
    def is_sparse(self) -> bool:
        """Whether less than half of the numbers are kept. See `Codec.is_sparse`."""
        return self.then == "stc" and self.p < 0.5

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the smoothed update as bytes, and what they decode to. See `Codec.encode`."""
        from collegium.compression import _ternary
        from collegium.compression._steps import write_steps

        layout = FlatLayout(target)
        flat = self._smooth(layout.flatten(target))
        if self.then != "stc":
            if self.values == "bfloat16":
                flat = _rounded(flat)
            kind = STEPS[self.then]
            data = write_steps(flat, kind, short=self.values == "bfloat16")
            return Encoded(write_frame(kind, layout, data), layout.restore(flat))
        vectors = np.split(flat, layout.starts[1:-1])
        ternary = _ternary.ternarise(vectors, layout, self.p, by_tensor=False)
        written = {kind: _ternary.write_ternary(ternary, layout, kind) for kind in TERNARY}
        kind = min(TERNARY, key=lambda kind: len(written[kind]))
        frame = write_frame(kind, layout, written[kind])
        return Encoded(frame, layout.restore(_ternary.to_dense(ternary, layout)))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the smoothed tensors; any ``then`` can be read. See `Codec.decode`."""
        from collegium.compression import _ternary
        from collegium.compression._steps import read_steps

        layout = FlatLayout(like)
        kind, reader = read_frame((*STEPS.values(), *TERNARY), layout, data)
        if kind in TERNARY:
            ternary = _ternary.read_ternary(kind, reader, layout)
            return layout.restore(_ternary.to_dense(ternary, layout))
        return layout.restore(read_steps(reader, kind, layout.total))

    def _smooth(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the minimiser without negative zeros; the vector is overwritten."""
        from collegium.solvers.taut_string import solve

        unit = 1.0
        if not self.absolute:
            unit = float(np.abs(flat).mean(dtype=np.float64)) if len(flat) else 0.0
        if not isfinite(unit):
            raise ProtocolError(
                "the update holds NaN or infinite values and cannot be sent; lower the learning "
                "rate or clip the gradient"
            )
        solve(flat, self.gamma * unit, out=flat)
        return flat + np.float32(0)  # no negative zeros


def _rounded(flat: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return numbers rounded to the nearest finite bfloat16."""
    largest = torch.finfo(torch.bfloat16).max
    rounded = torch.from_numpy(flat).to(torch.bfloat16).float().clamp_(-largest, largest)
    return rounded.numpy() + np.float32(0)  # no negative zeros
