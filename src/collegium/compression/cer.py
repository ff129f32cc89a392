"""CER, communication-efficient regularisation, solved exactly.

From pFedNet (Zhao et al., 2023, https://arxiv.org/abs/2306.14483), Eq. 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from collegium.compression._frame import Kind, Layout, seal, unseal
from collegium.compression.base import Codec, Encoded
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError

STEPS = {"plain": Kind.STEPS, "entropy": Kind.CODED_STEPS}
RUNS = (Kind.RUNS, Kind.GROUPS)


@dataclass(frozen=True)
class CER(Codec):
    """The update smoothed until it is constant for long stretches, which take few bytes.

    Of an update g, argmin_v 1/2 ||v - g||^2 + gamma (sum_{i<d} |v_i - v_{i+1}| + |v_d|) is sent,
    which is what pFedNet's Eq. 4 asks for whatever the step size (`collegium.solvers.taut_string`).
    The d numbers of g stand in one fixed order: tensors by name, each row by row; the sum runs over
    the borders of tensors as well.

    Deviations: the minimum is exact, where the paper's ADMM stops far from it; its code moreover
    cuts g into chunks. ``gamma`` counts in means of |g|, since the paper's absolute values have no
    meaning for updates of another size (``absolute=True`` for those). What is lost is fed back,
    which the paper does not do (``feedback=False`` for that). With ``then="stc"``, the rule is that
    of `collegium.compression.stc`, not the one with two quantiles that pFedNet's code calls so.

    Attributes:
        gamma: strength of the smoothing, in means of |g| over all numbers; 0.1 to 10 make sense.
            From the largest partial sum of g on, nothing is left of it.
        absolute: whether gamma is taken as it is instead.
        then: how the result is written: "plain" (places of change in Golomb-Rice code and values as
            they are), "entropy" (places and exponents by a range coder) or "stc" (only the largest
            numbers, as signs times their mean magnitude, in runs or in kernels, whichever is
            shorter).
        p: for "stc", the share of the numbers that is kept.
        values: precision of the values otherwise: "float32" or, with half the bytes, "bfloat16".
        feedback: whether the sender adds what was lost to what it sends next.
    """

    gamma: float = 1.0
    absolute: bool = False
    then: Literal["plain", "entropy", "stc"] = "entropy"
    p: float = 0.2
    values: Literal["float32", "bfloat16"] = "float32"
    feedback: bool = field(default=True, kw_only=True)  # type: ignore[misc]

    def __post_init__(self) -> None:
        if not (self.gamma >= 0 and isfinite(self.gamma)):
            raise ConfigError(f"cer: gamma is {self.gamma}; choose a finite number, at least 0")
        if not 0 < self.p <= 1:
            raise ConfigError(f"cer: p is {self.p}; choose a share above 0 and at most 1")

    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the smoothed update as bytes, and what they decode to."""
        from collegium.compression import _ternary
        from collegium.compression._steps import write_steps

        layout = Layout(target)
        flat = self._smooth(layout.flatten(target))
        if self.then != "stc":
            if self.values == "bfloat16":
                flat = _rounded(flat)
            kind = STEPS[self.then]
            data = write_steps(flat, kind, short=self.values == "bfloat16")
            return Encoded(seal(kind, layout, data), layout.restore(flat))
        vectors = np.split(flat, layout.starts[1:-1])
        ternary = _ternary.ternarise(vectors, layout, self.p, by_tensor=False)
        writings = {kind: _ternary.write_ternary(ternary, layout, kind) for kind in RUNS}
        kind = min(RUNS, key=lambda kind: len(writings[kind]))
        sealed = seal(kind, layout, writings[kind])
        return Encoded(sealed, layout.restore(_ternary.fill(ternary, layout)))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the smoothed tensors; any ``then`` can be read."""
        from collegium.compression import _ternary
        from collegium.compression._steps import read_steps

        layout = Layout(like)
        kind, reader = unseal((*STEPS.values(), *RUNS), layout, data)
        if kind in RUNS:
            ternary = _ternary.read_ternary(kind, reader, layout)
            return layout.restore(_ternary.fill(ternary, layout))
        return layout.restore(read_steps(reader, kind, layout.total))

    def _smooth(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """Replace a vector by the minimiser, and return it without negative zeros."""
        from collegium.solvers.taut_string import solve

        unit = (
            1.0
            if self.absolute
            else float(np.abs(flat).mean(dtype=np.float64))
            if len(flat)
            else 0.0
        )
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
