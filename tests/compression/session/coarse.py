"""Codecs so simple that a test can do their arithmetic by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from collegium.compression.base import ClientReport, Codec, Encoded
from collegium.core.algorithm import State
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


@dataclass(frozen=True)
class Coarse(Codec):
    """Numbers truncated to whole multiples of a step, four bytes each.

    Attributes:
        step: the distance of two numbers that can be sent.
        feedback: whether the truncated parts are sent later.
    """

    step: float = 0.25
    feedback: bool = True  # type: ignore[misc]  # a field here, fixed in the base class

    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the multiples."""
        pieces = []
        for name, tensor in target.distinct().items():
            if not torch.isfinite(tensor).all():
                raise ProtocolError(f"{name} is not finite")
            pieces.append(self.multiples(tensor, rng, options).numpy().ravel())
        data = np.concatenate(pieces).astype("<i4").tobytes()
        return Encoded(data, self.decode(data, target))

    def multiples(
        self, tensor: torch.Tensor, rng: torch.Generator, options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return the numbers that are sent of a tensor."""
        return torch.trunc(tensor / self.step)

    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the multiples of the step."""
        if len(data) != 4 * like.numel():
            raise ProtocolError(f"{len(data)} bytes for {like.numel()} numbers")
        rest = torch.from_numpy(np.frombuffer(data, "<i4").astype(np.float32)) * self.step
        place = [0]

        def take(tensor: torch.Tensor) -> torch.Tensor:
            place[0] += tensor.numel()
            return rest[place[0] - tensor.numel() : place[0]].reshape(tensor.shape)

        return like.map(take)


@dataclass(frozen=True)
class Planned(Coarse):
    """The same, shifted by a number that is drawn and by one that the plan sets.

    The plan writes down the reports, and sets for each client the number of its letter.
    """

    def multiples(
        self, tensor: torch.Tensor, rng: torch.Generator, options: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return nothing but the two numbers."""
        drawn = int(torch.randint(0, 1000, (1,), generator=rng))
        return torch.full(tensor.shape, float(drawn + 1000 * options.get("shift", 0)))

    def plan(self, state: State, reports: Mapping[str, ClientReport]) -> dict[str, dict[str, Any]]:
        """Write down the reports, and return the options."""
        state.setdefault("reports", []).append({c: list(report) for c, report in reports.items()})
        return {client: {"shift": 1 + "ABC".index(client)} for client in "ABC"}
