"""The server's border: what arrives from a client is checked here before anything of it is used.

A reply that does not hold is its sender's fault, and says so; the sender alone is left out of the
exchange where the policy is to skip.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from collegium.core.algorithm import Algorithm
from collegium.core.failures import kind_and_sentence
from collegium.core.message import FaultyReply, Held, unpack
from collegium.core.payloads import (
    Expected,
    Features,
    ModelPart,
    PartSchema,
    Spectra,
    check_parts,
)
from collegium.core.text import short
from collegium.errors import ClientError, ProtocolError
from collegium.runtime.ledger import SignOff
from collegium.runtime.secure.identity import Identity
from collegium.runtime.secure.parts import KEY

logger = logging.getLogger(__name__)

ABSURD_PARAMETERS = 1e3
"""A root mean square of parameters, or a multiple of the others' median, that no training gives."""

ABSURD_NUMBERS = 1e15
"""The same for buffers, and for features of images, whose scale is that of the images."""

Decode = Callable[[dict[str, Any], Any], dict[str, Any]]
"""Returns the parts of a reply, given those that are not coded and the entries of the others."""


class Border:
    """Opens and checks the replies of clients.

    Args:
        algorithm: the algorithm.
        expected: what is known of every reply.
        cases: by client, how many cases it has; one that is missing may have any number.
        held: what messages leave out; None: nothing.
        also: schemas of parts that are not the algorithm's.
        identity: by which signatures of public keys are checked; None: nobody signs.

    Attributes:
        sends: the schemas of all parts.
        signed: by client, what it signed off of its ledger last.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        expected: Expected,
        cases: Mapping[str, int | None],
        held: Held | None,
        also: Mapping[str, PartSchema] = MappingProxyType({}),
        identity: Identity | None = None,
    ) -> None:
        self._identity = identity
        self._name, self.sends = type(algorithm).__name__, {**algorithm.all_sends(), **also}
        self._expected, self._cases, self._held = expected, cases, held
        self.signed: dict[str, SignOff] = {}

    def check_ledger(self, client: str, signed: SignOff | None, data: bytes) -> None:
        """Check that a message is recorded in its sender's ledger, after those before it.

        Args:
            client: the sender.
            signed: what it signed off with the message; None: the engine carries no such thing.
            data: the message.

        Raises:
            ProtocolError: it is not.
        """
        if signed is not None:
            signed.check_follows(self.signed.get(client), data)
            self.signed[client] = signed

    def open(
        self, data: bytes, client: str, origin: list[Any], decode: Decode, needs: tuple[str, ...]
    ) -> dict[str, Any]:
        """Return the checked parts of a reply.

        Args:
            data: the envelope, not trusted.
            client: its sender.
            origin: what it has to say of the request that it answers.
            decode: decodes what is coded.
            needs: the parts that it has to hold.

        Raises:
            ClientError: it tells of a failure.
            ProtocolError: it is not as the protocol demands.
        """
        try:
            return self._open(data, client, origin, decode, needs)
        except ClientError:
            raise
        except Exception as error:  # whatever a stranger's bytes lead to is the sender's fault
            logger.debug("client %r: its reply cannot be read", client, exc_info=True)
            raise ProtocolError(f"the reply cannot be read ({type(error).__name__})") from error

    def _open(
        self, data: bytes, client: str, origin: list[Any], decode: Decode, needs: tuple[str, ...]
    ) -> dict[str, Any]:
        envelope = unpack(data, held=self._held)
        if isinstance(envelope, dict) and isinstance(envelope.get("error"), dict):
            kind, sentence = kind_and_sentence(envelope["error"])
            raise (kind if issubclass(kind, ClientError) else ClientError)(sentence)
        if not isinstance(envelope, dict) or not isinstance(envelope.get("reply"), dict):
            raise ProtocolError("the response is not a reply")
        if unknown := sorted(envelope.keys() - {"reply", "of", "coded"}):
            raise ProtocolError(f"the response holds {short(unknown[0])}, which no reply does")
        if envelope.get("of") != origin:
            raise ProtocolError(f"the reply is to another request ({short(envelope.get('of'))})")
        reply: dict[str, Any] = envelope["reply"]
        if "coded" in envelope:
            reply = decode(reply, envelope["coded"])
        if missing := sorted({*needs} - reply.keys()):
            raise ProtocolError(f"the reply has no part {missing[0]!r}")
        expected = replace(self._expected, cases=self._cases.get(client))
        check_parts(self._name, self.sends, reply, expected)
        if self._identity is not None and KEY in reply:
            key = reply[KEY]
            signed = key if key.keys() > {"key"} else None
            self._identity.check(client, origin[1], origin[2], key["key"], signed)
        return reply

    def comparison(self, *, all_shapes: bool) -> Comparison:
        """Return what compares the replies to one exchange with one another.

        Args:
            all_shapes: whether features whose shape depends on the images are compared as well, of
                which a method says itself, otherwise, what sites have to agree on.
        """
        return Comparison(self.sends, self._expected, all_shapes=all_shapes)


class Comparison:
    """Compares the replies to one exchange with one another, without keeping them.

    Args:
        sends: the schemas of their parts.
        expected: what is known of every reply.
        all_shapes: see `Border.comparison`.
    """

    def __init__(self, sends: Mapping[str, Any], expected: Expected, *, all_shapes: bool) -> None:
        self._sends, self._trainable = sends, expected.parts.trainable
        self._all_shapes = all_shapes
        self._sizes: dict[tuple[str, str], dict[str, float]] = {}
        self._shapes: dict[str, dict[str, Any]] = {}

    def add(self, client: str, reply: Mapping[str, Any]) -> None:
        """Note the sizes and shapes of the tensors of a checked reply.

        Args:
            client: the sender.
            reply: its parts.
        """
        for name, value in reply.items():
            schema = self._sends[name]
            if isinstance(schema, ModelPart):
                trained = [t for n, t in value.distinct().items() if n in self._trainable]
                others = [t for n, t in value.distinct().items() if n not in self._trainable]
                self._note(client, name, "parameters", trained)
                self._note(client, name, "buffers", others)
            elif isinstance(schema, Features | Spectra):
                self._note(client, name, "numbers", [*value.values()])
                whole = isinstance(schema, Features) and not schema.by_case
                if not whole and not self._all_shapes:
                    continue
                shapes = {n: (*(t.shape if whole else t.shape[1:]),) for n, t in value.items()}
                size = value.get("size")
                shape = shapes, None if size is None else size.tolist()
                self._shapes.setdefault(name, {})[client] = shape

    def _note(self, client: str, part: str, what: str, tensors: list[torch.Tensor]) -> None:
        """Note the root mean square of all numbers of some tensors."""
        numbers = [t for t in tensors if t.is_floating_point() and t.numel()]
        if numbers:
            norm = math.hypot(*map(_norm, numbers))
            count = sum(t.numel() for t in numbers)
            self._sizes.setdefault((part, what), {})[client] = norm / math.sqrt(count)

    def odd_one(self) -> FaultyReply | None:
        """Return the error of a client whose reply cannot be used beside the others'; None: none.

        One client at a time: without it the others may look different.
        """
        for part, shapes in self._shapes.items():
            counts = Counter(map(str, shapes.values()))
            usual, most = counts.most_common(1)[0]
            odd = [client for client, shape in shapes.items() if str(shape) != usual]
            if odd and 2 * most > len(shapes):
                return FaultyReply(f"part {part!r} has another shape than the others'", odd[0])
        for (part, what), sizes in self._sizes.items():
            limit = ABSURD_PARAMETERS if what == "parameters" else ABSURD_NUMBERS
            largest = max(sizes, key=lambda client: sizes[client])
            others = [size for client, size in sizes.items() if client != largest]
            usual_size = max(statistics.median(others), 1.0) if others else 1.0
            if not sizes[largest] <= limit * usual_size:
                return FaultyReply(
                    f"part {part!r} has {what} with a root mean square of {sizes[largest]:.3g}, "
                    f"where the others' are {usual_size:.3g}",
                    largest,
                )
        return None


def _norm(tensor: torch.Tensor) -> float:
    """Return the length of a tensor; infinity where it is beyond what a float32 holds."""
    wide = tensor.dtype == torch.float64
    return float(torch.linalg.vector_norm(tensor, dtype=None if wide else torch.float32))
