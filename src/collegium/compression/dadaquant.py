"""DAdaQuant, doubly adaptive quantisation (Hönig et al., 2022, https://arxiv.org/abs/2111.00465)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from collegium.compression._entropy import Decoder, Encoder
from collegium.compression._frame import Kind, Layout, seal, unseal, varint
from collegium.compression.base import Codec, Encoded, Report, State
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError

MOST = 1 << 15
"""Levels that a message may have."""

SMALL = 4096
"""Tensors of fewer numbers share one table of counts."""


@dataclass(frozen=True)
class DAdaQuant(Codec):
    """Numbers rounded at random to levels, of which there are more later and for larger clients.

    A number x of a tensor becomes sign(x) l s / q, with s the largest magnitude of its tensor and l
    one of the two whole numbers next to q |x| / s, drawn so that the mean is x; nothing is fed
    back. Levels are written by a range coder with counts for each tensor.

    Before round t the level of all, q_t, doubles if the running loss has not fallen for a while:
    with G_t the weighted mean of the clients' losses and H_t = psi H_{t-1} + (1 - psi) G_t,
    q_t = 2 q_{t-1} if q has stayed for phi rounds and H_{t-1} >= H_{t-1-phi}. Client k with the
    share w_k of all weights gets q_k = q_t sqrt(a / b) w_k^(2/3), a = sum w_j^(2/3), b = sum w_j^2,
    rounded and at least 1: of all choices with the same variance of the mean that of fewest levels.

    Deviations: losses and weights are those of the round before, since the server decides before it
    asks; no official code exists, and the paper's indices leave open whether the loss is compared
    over phi or phi - 1 rounds. The paper writes zeros as run lengths and levels in Elias code; a
    range coder is shorter.

    Attributes:
        minimum: levels of the first round (q_min).
        maximum: levels from which on q_t is not doubled any more.
        patience: rounds without improvement before q_t doubles (phi); a tenth of all rounds in the
            paper.
        smoothing: weight of the past in the running loss (psi).
        adapt: "both", "time" (one level for all), "clients" (q_t stays at the minimum) or "none".
        norm: what s is: "max", the largest magnitude of the tensor, or "l2", its Euclidean norm.
    """

    minimum: int = 1
    maximum: int = 256
    patience: int = 5
    smoothing: float = 0.9
    adapt: Literal["both", "time", "clients", "none"] = "both"
    norm: Literal["max", "l2"] = "max"

    def __post_init__(self) -> None:
        if not 1 <= self.minimum <= self.maximum <= MOST:
            raise ConfigError(
                f"dadaquant: minimum is {self.minimum} and maximum {self.maximum}; choose "
                f"1 <= minimum <= maximum <= {MOST}"
            )
        if self.patience < 1 or not 0 <= self.smoothing < 1:
            raise ConfigError(
                f"dadaquant: patience is {self.patience} and smoothing {self.smoothing}; choose at "
                f"least 1, and at least 0 and below 1"
            )

    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the levels as bytes, and what they decode to; ``order`` may say how many."""
        levels = order.get("levels", self.minimum)
        if not isinstance(levels, int) or not 1 <= levels <= MOST:
            raise ProtocolError(
                f"dadaquant: {levels!r} levels are ordered; 1 to {MOST} can be sent"
            )
        from collegium.compression import _levels

        layout = Layout(target)
        vectors = layout.vectors(target)
        scales = self._scales(layout, vectors)
        steps, flat = _steps(scales, levels), np.zeros(layout.total, np.float32)
        seed = int(torch.randint(0, (1 << 63) - 1, (1,), generator=rng))
        encoder = Encoder()
        for part in _parts(layout, scales):
            symbols = np.empty(sum(stop - start for _, start, stop in part), np.int32)
            first = 0
            for tensor, start, stop in part:
                here = symbols[first : first + stop - start]
                _levels.quantise(vectors[tensor], scales[tensor], levels, seed, start, here)
                _restore(here, levels, steps[tensor], flat[start:stop])
                first += len(here)
            encoder.counted(symbols, _levels.tally(symbols, 2 * levels + 1))
        head = varint(levels) + scales.astype("<f4").tobytes()
        data = seal(Kind.DADAQUANT, layout, head, encoder.finish())
        return Encoded(data, layout.restore(flat))

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return what the levels stand for; how many there are, the bytes say themselves."""
        layout = Layout(like)
        _, reader = unseal((Kind.DADAQUANT,), layout, data)
        levels = reader.varint()
        scales = reader.array("<f4", len(layout.names)).astype(np.float32)
        if not 1 <= levels <= MOST or not np.isfinite(scales).all() or (scales < 0).any():
            raise ProtocolError("encoded tensors are damaged: levels or scales are out of range")
        flat, steps = np.zeros(layout.total, np.float32), _steps(scales, levels)
        decoder = Decoder(reader.words())
        for part in _parts(layout, scales):
            sizes = [stop - start for _, start, stop in part]
            found = decoder.counted(sum(sizes))
            if found.max(initial=0) > 2 * levels:
                raise ProtocolError("encoded tensors are damaged: a level is out of range")
            pieces = np.split(found, np.cumsum(sizes)[:-1])
            for (tensor, start, stop), piece in zip(part, pieces, strict=True):
                _restore(piece, levels, steps[tensor], flat[start:stop])
        return layout.restore(flat)

    def plan(self, memory: State, reports: Mapping[str, Report]) -> dict[str, dict[str, Any]]:
        """Return the levels of each client that has ever reported; update the running loss."""
        memory.setdefault("levels", self.minimum)
        weights = memory.setdefault("weights", {})
        weights |= {client: report.weight for client, report in sorted(reports.items())}
        if self.adapt in ("both", "time"):
            self._follow_loss(memory, reports)
        base = memory["levels"]
        if self.adapt in ("time", "none"):
            return {client: {"levels": base} for client in weights}
        return {client: {"levels": q} for client, q in self._shares(base, weights).items()}

    def _follow_loss(self, memory: State, reports: Mapping[str, Report]) -> None:
        """Take in the losses of a round, and double the level if they have not fallen."""
        told = [
            (report.loss, report.weight)
            for _, report in sorted(reports.items())
            if report.loss is not None and isfinite(report.loss)
        ]
        total = sum(weight for _, weight in told)
        if total <= 0:
            return
        loss = sum(loss * weight for loss, weight in told) / total
        history = memory.setdefault("running", [])
        history.append(
            self.smoothing * history[-1] + (1 - self.smoothing) * loss if history else loss
        )
        if len(history) > self.patience:
            if history[-1] >= history[-1 - self.patience] and memory["levels"] < self.maximum:
                memory["levels"] = min(2 * memory["levels"], self.maximum)
                del history[:-1]
            else:
                del history[0]

    def _shares(self, base: int, weights: Mapping[str, float]) -> dict[str, int]:
        """Return the levels of each client whose mean has the variance of ``base`` for all."""
        total = sum(weights.values())
        if total <= 0:
            return dict.fromkeys(weights, base)
        shares = {client: weight / total for client, weight in weights.items()}
        a = sum(share ** (2 / 3) for share in shares.values())
        b = sum(share**2 for share in shares.values())
        wanted = {c: base * (a / b) ** 0.5 * share ** (2 / 3) for c, share in shares.items()}
        return {client: min(max(1, round(q)), MOST) for client, q in wanted.items()}

    def _scales(self, layout: Layout, vectors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
        """Return for each tensor what its highest level stands for."""
        if self.norm == "max":
            found = [np.abs(vector).max(initial=0) for vector in vectors]
        else:
            found = [np.sqrt(np.square(vector, dtype=np.float64).sum()) for vector in vectors]
        scales = np.array(found, np.float64)
        if not (scales <= np.finfo(np.float32).max).all():
            layout.refuse_infinite(vectors)
        return np.minimum(scales, np.finfo(np.float32).max).astype(np.float32)


def _parts(layout: Layout, scales: NDArray[np.float32]) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the tensors, but those of zeros, that share a table: their number, start and end."""
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
    """Return for each tensor what lies between two levels."""
    return (scales.astype(np.float64) / levels).astype(np.float32)


def _restore(
    symbols: NDArray[np.int32], levels: int, step: np.float32, out: NDArray[np.float32]
) -> None:
    """Write what the symbols of a tensor stand for."""
    np.subtract(symbols, levels, out=out, casting="unsafe")
    out *= step
