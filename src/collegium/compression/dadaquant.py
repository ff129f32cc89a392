"""DAdaQuant, doubly adaptive quantisation (Hönig et al., 2022, https://arxiv.org/abs/2111.00465)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Annotated, Any, Literal

import numpy as np
from annotated_types import Ge, Le
from numpy.typing import NDArray

from collegium.compression._entropy import RangeDecoder, RangeEncoder
from collegium.compression._frame import FlatLayout, FrameKind, read_frame, varint, write_frame
from collegium.compression.base import ClientReport, Codec, Encoded
from collegium.core.algorithm import State
from collegium.core.lazy import torch
from collegium.core.settings import Fraction, PositiveInt, settings
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError

MAX_LEVELS = 1 << 15
"""Levels that a message may have."""

SMALL = 4096
"""Tensors of fewer numbers share one table of counts."""


@settings
class DAdaQuant(Codec):
    """Numbers rounded at random to levels, more of them in later rounds and for larger clients.

    A number x of a tensor becomes sign(x) l s / q, with s the largest magnitude of its tensor and l
    one of the two whole numbers next to q |x| / s, drawn so that the expected value is x; nothing
    is fed back. Levels are written by a range coder with counts for each tensor.

    Before round t the common level q_t doubles if the running loss has not fallen for a while:
    with G_t the weighted mean of the clients' losses and H_t = psi H_{t-1} + (1 - psi) G_t,
    q_t = 2 q_{t-1} if q has stayed for phi rounds and H_{t-1} >= H_{t-1-phi}. Client k with the
    share w_k of all weights gets q_k = q_t sqrt(a / b) w_k^(2/3), a = sum w_j^(2/3), b = sum w_j^2,
    rounded and at least 1: of all choices with the same variance of the mean, the fewest levels.

    Deviations: losses and weights are those of the previous round, since the server decides before
    it asks; no official code exists, and the paper's indices leave open whether the loss is
    compared over phi or phi - 1 rounds. The paper writes zeros as run lengths and levels in Elias
    code; a range coder is shorter.

    Attributes:
        minimum: levels of the first round (q_min).
        maximum: the largest q_t.
        patience: rounds without improvement before q_t doubles (phi); a tenth of all rounds in the
            paper.
        smoothing: weight of the past in the running loss (psi).
        adapt: "both", "time" (one level for all), "clients" (q_t stays at the minimum) or "none".
        norm: "max": s is the largest magnitude of the tensor; "l2": s is its Euclidean norm.
    """

    minimum: PositiveInt = 1
    maximum: Annotated[int, Ge(1), Le(MAX_LEVELS)] = 256
    patience: PositiveInt = 5
    smoothing: Fraction = 0.9
    adapt: Literal["both", "time", "clients", "none"] = "both"
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        if self.minimum > self.maximum:
            raise ConfigError(
                f"minimum is {self.minimum} and maximum {self.maximum}; choose a minimum that is "
                f"not larger"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether most numbers become zero in the first rounds. See `Codec.is_sparse`.

        A number does with the probability 1 - q |x| / s where that is not negative. With q = 3,
        half of the numbers of a normal distribution do if s is 4.5 of its deviations, as the
        largest magnitude of 100,000 is; their Euclidean norm is 316 deviations.
        """
        return self.minimum < 4 or self.norm == "l2"

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the levels as bytes, and what they decode to. See `Codec.encode`.

        ``options`` may hold the number of levels; otherwise it is `minimum`.
        """
        levels = options.get("levels", self.minimum)
        if not isinstance(levels, int) or not 1 <= levels <= MAX_LEVELS:
            raise ProtocolError(
                f"dadaquant: the server set {levels!r} levels; 1 to {MAX_LEVELS} can be sent"
            )
        from collegium.compression import _levels

        layout = FlatLayout(target)
        vectors = layout.vectors(target)
        scales = self._scales(layout, vectors)
        steps, flat = _steps(scales, levels), np.zeros(layout.total, np.float32)
        seed = int(torch.randint(0, (1 << 63) - 1, (1,), generator=rng))
        encoder = RangeEncoder()
        for part in _parts(layout, scales):
            symbols = np.empty(sum(stop - start for _, start, stop in part), np.int32)
            first = 0
            for tensor, start, stop in part:
                own = symbols[first : first + stop - start]
                _levels.quantise(vectors[tensor], scales[tensor], levels, seed, start, own)
                _restore(own, levels, steps[tensor], flat[start:stop])
                first += len(own)
            encoder.counted(symbols, _levels.tally(symbols, 2 * levels + 1))
        header = varint(levels) + scales.astype("<f4").tobytes()
        data = write_frame(FrameKind.DADAQUANT, layout, header, encoder.finish())
        return Encoded(data, layout.restore(flat))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the values of the levels, whose number is in the bytes. See `Codec.decode`."""
        layout = FlatLayout(like)
        _, reader = read_frame((FrameKind.DADAQUANT,), layout, data)
        levels = reader.varint()
        scales = reader.array("<f4", len(layout.names)).astype(np.float32)
        if not 1 <= levels <= MAX_LEVELS or not np.isfinite(scales).all() or (scales < 0).any():
            raise ProtocolError("encoded tensors are damaged: levels or scales are out of range")
        flat, steps = np.zeros(layout.total, np.float32), _steps(scales, levels)
        decoder = RangeDecoder(reader.words())
        for part in _parts(layout, scales):
            sizes = [stop - start for _, start, stop in part]
            symbols = decoder.counted(sum(sizes))
            if symbols.max(initial=0) > 2 * levels:
                raise ProtocolError("encoded tensors are damaged: a level is out of range")
            pieces = np.split(symbols, np.cumsum(sizes)[:-1])
            for (tensor, start, stop), piece in zip(part, pieces, strict=True):
                _restore(piece, levels, steps[tensor], flat[start:stop])
        return layout.restore(flat)

    def plan(self, state: State, reports: Mapping[str, ClientReport]) -> dict[str, dict[str, Any]]:
        """Return the levels of each client that has ever reported. See `Codec.plan`."""
        state.setdefault("levels", self.minimum)
        weights = state.setdefault("weights", {})
        weights |= {client: report.weight for client, report in sorted(reports.items())}
        if self.adapt in ("both", "time"):
            self._follow_loss(state, reports)
        base = state["levels"]
        if self.adapt in ("time", "none"):
            return {client: {"levels": base} for client in weights}
        return {client: {"levels": q} for client, q in self._shares(base, weights).items()}

    def _follow_loss(self, state: State, reports: Mapping[str, ClientReport]) -> None:
        """Update the running loss, and double the level if it has not fallen."""
        losses = [
            (report.loss, report.weight)
            for _, report in sorted(reports.items())
            if report.loss is not None and isfinite(report.loss)
        ]
        total = sum(weight for _, weight in losses)
        if total <= 0:
            return
        loss = sum(loss * weight for loss, weight in losses) / total
        history = state.setdefault("running", [])
        history.append(
            self.smoothing * history[-1] + (1 - self.smoothing) * loss if history else loss
        )
        if len(history) > self.patience:
            if history[-1] >= history[-1 - self.patience] and state["levels"] < self.maximum:
                state["levels"] = min(2 * state["levels"], self.maximum)
                del history[:-1]
            else:
                del history[0]

    def _shares(self, base: int, weights: Mapping[str, float]) -> dict[str, int]:
        """Return each client's levels; the variance of the mean is that of ``base`` for all."""
        total = sum(weights.values())
        if total <= 0:
            return dict.fromkeys(weights, base)
        shares = {client: weight / total for client, weight in weights.items()}
        a = sum(share ** (2 / 3) for share in shares.values())
        b = sum(share**2 for share in shares.values())
        exact = {c: base * (a / b) ** 0.5 * share ** (2 / 3) for c, share in shares.items()}
        return {client: min(max(1, round(q)), MAX_LEVELS) for client, q in exact.items()}

    def _scales(
        self, layout: FlatLayout, vectors: list[NDArray[np.float32]]
    ) -> NDArray[np.float32]:
        """Return the value of the highest level of each tensor."""
        if self.norm == "max":
            norms = [np.abs(vector).max(initial=0) for vector in vectors]
        else:
            norms = [np.sqrt(np.square(vector, dtype=np.float64).sum()) for vector in vectors]
        scales = np.array(norms, np.float64)
        if not (scales <= np.finfo(np.float32).max).all():
            layout.require_finite(vectors)
        return np.minimum(scales, np.finfo(np.float32).max).astype(np.float32)


def _parts(layout: FlatLayout, scales: NDArray[np.float32]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the tensors that share a table, except those of zeros: their index, start and end."""
    small = []
    for tensor in np.flatnonzero(scales).tolist():
        start, stop = layout.starts[tensor : tensor + 2].tolist()
        if stop - start >= SMALL:
            yield [(tensor, start, stop)]
        else:
            small.append((tensor, start, stop))
    if small:
        yield small


def _steps(scales: NDArray[np.float32], levels: int) -> NDArray[np.float32]:
    """Return the distance between two levels of each tensor."""
    return (scales.astype(np.float64) / levels).astype(np.float32)


def _restore(
    symbols: NDArray[np.int32], levels: int, step: np.float32, out: NDArray[np.float32]
) -> None:
    """Write the values of the symbols of a tensor."""
    np.subtract(symbols, levels, out=out, casting="unsafe")
    out *= step
