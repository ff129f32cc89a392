"""The interface of a codec: named tensors to bytes and back, with losses that the sender knows.

A codec sees only the tensors that are sent, an update as a rule. It keeps no state: the residual of
error feedback belongs to the sender's state and is added by `collegium.compression.session`, and
whatever the server decides for the next round is written into its own state by `plan`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from collegium.core.algorithm import State
from collegium.core.lazy import torch
from collegium.core.tensors import Tensors


class Encoded(NamedTuple):
    """Encoded tensors.

    Attributes:
        data: the bytes that are sent.
        decoded: the tensors that the receiver will decode from them, bit by bit.
    """

    data: bytes
    decoded: Tensors


class ClientReport(NamedTuple):
    """The numbers that a client reported in the last round, for `Codec.plan`.

    Attributes:
        loss: mean training loss of the model that the client received; None if it has none.
        weight: its weight in the mean, not negative (e.g. its number of training examples).
    """

    loss: float | None
    weight: float


@dataclass(frozen=True)
class Codec(ABC):
    """Base class of codecs; under `@settings` the fields of a subclass are the hyper-parameters.

    Attributes:
        feedback: whether the sender keeps what was lost (target minus decoded) and adds it to the
            next tensors that it sends; a subclass may make it a field.
    """

    feedback: ClassVar[bool] = False

    @property
    def is_sparse(self) -> bool:
        """Whether most numbers are left out, which decode to zero."""
        return False

    def hyperparameters(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @abstractmethod
    def encode(self, target: Tensors, rng: torch.Generator, options: Mapping[str, Any]) -> Encoded:
        """Return the bytes for some tensors, and the tensors that they decode to.

        Args:
            target: floating-point tensors on the CPU; names that share a tensor are sent once.
            rng: for codecs that round at random; others leave it untouched.
            options: what `plan` chose for this sender in this round; empty if it chose nothing.

        Raises:
            ProtocolError: a tensor cannot be sent, for example because it holds NaN or infinite
                values.
        """

    @abstractmethod
    def decode(self, data: bytes, like: Tensors) -> Tensors:
        """Return the tensors that were encoded.

        Args:
            data: the result of `encode` of the same codec, not trusted.
            like: tensors with the names, shapes, dtypes and ties of those that were encoded.

        Raises:
            ProtocolError: the bytes are damaged, or were made for other tensors.
        """

    def plan(self, state: State, reports: Mapping[str, ClientReport]) -> dict[str, dict[str, Any]]:
        """Return the options of each client for a round; most codecs have none.

        Args:
            state: the codec's part of the server's state, changed in place.
            reports: the clients' reports of the last round; empty before the first.
        """
        return {}
