"""What a codec is: named tensors to bytes and back, with losses that the sender knows.

A codec sees what is to be sent (an update, or whatever the runtime hands to it) and nothing else.
It keeps no state: the residual of error feedback belongs to the sender's state and is added by the
runtime, and what the server decides for the next round is written into its own state by `plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch

from collegium.core.tensors import Tensors

State = dict[str, Any]
"""Tensors, plain values, and lists or dictionaries of these: what a message can hold."""


class Encoded(NamedTuple):
    """What travels, and what arrives.

    Attributes:
        data: the bytes that travel.
        decoded: what the receiver will decode from them, bit by bit.
    """

    data: bytes
    decoded: Tensors


class Report(NamedTuple):
    """What a client told in the last round that a plan may use.

    Attributes:
        loss: mean training loss of the model that the client received; None where it has none.
        weight: its weight in the mean, not negative (e.g. its number of training examples).
    """

    loss: float | None
    weight: float


@dataclass(frozen=True)
class Codec(ABC):
    """Subclass as a frozen dataclass whose fields are the hyper-parameters.

    Attributes:
        feedback: whether the sender keeps what was lost (target minus decoded) and adds it to what
            it sends next; a subclass may make it a field.
    """

    feedback: ClassVar[bool] = False

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def encode(self, target: Tensors, rng: torch.Generator, order: Mapping[str, Any]) -> Encoded:
        """Return the bytes that stand for ``target``, and what they decode to.

        Args:
            target: floating-point tensors on the CPU; names that share a tensor are sent once.
            rng: for codecs that round at random; others leave it untouched.
            order: what `plan` decided for this sender; empty where it decided nothing.

        Raises:
            ProtocolError: a tensor cannot be sent: it holds NaN or infinite values, say.
        """

    @abstractmethod
    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the tensors that ``data`` stands for.

        Args:
            data: what `encode` of the same codec gave; it comes from elsewhere and is not trusted.
            like: tensors with the names, shapes, dtypes and ties of what was encoded.

        Raises:
            ProtocolError: the bytes are damaged, or were made for other tensors.
        """

    def plan(self, memory: State, reports: Mapping[str, Report]) -> dict[str, dict[str, Any]]:
        """Return the order for each client before a round; most codecs give none.

        Args:
            memory: the codec's part of the server's state, changed in place.
            reports: what the clients reported in the last round; empty before the first.
        """
        return {}
