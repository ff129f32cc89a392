"""The server's half: replies of which it sees only the means."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from collegium.core.algorithm import Algorithm, Replies
from collegium.core.message import FaultyReply, Message
from collegium.core.payloads import Expected, PartSchema
from collegium.core.tensors import Mean, Tensors
from collegium.errors import ConfigError, MissingReply, ProtocolError
from collegium.runtime.participation import Participation
from collegium.runtime.requests import Stage
from collegium.runtime.secure.config import SecureMean, check_secure
from collegium.runtime.secure.masks import FixedPoint, Roster
from collegium.runtime.secure.parts import KEY, MASKED, SIGNED, Layout

logger = logging.getLogger(__name__)

Gather = Callable[[list[str], Mapping[str, Any]], Iterator[tuple[str, Message]]]
"""Asks clients for their masked part, given their names and what they are told."""


MakeReplies = Callable[
    [Iterator[tuple[str, Message]], Gather, tuple[int, int, str], Stage], Replies
]
"""Makes the replies to an exchange of their source, its round, number and method, and its stage."""


def replies_maker(
    settings: SecureMean | None,
    algorithm: Algorithm,
    expected: Expected,
    clients: int,
    coded: bool,
    participation: Participation,
    diagnostics: Collection[str],
) -> MakeReplies:
    """Return what makes the replies to exchanges, of training those of which means are masked.

    Args:
        settings: of the experiment; None: nothing is masked.
        algorithm: the algorithm.
        expected: the model and its roles.
        clients: how many clients take part.
        coded: whether messages are coded.
        participation: who takes part in a round.
        diagnostics: what is recorded of single replies.

    Raises:
        ConfigError: see `check_secure`.
    """
    if settings is None:
        return lambda source, gather, position, stage: Replies(source)
    check_secure(
        algorithm,
        clients,
        least=settings.min_sites,
        coded=coded,
        participation=participation,
        diagnostics=diagnostics,
    )
    averaged = algorithm.averaged_parts()

    def make(
        source: Iterator[tuple[str, Message]],
        gather: Gather,
        position: tuple[int, int, str],
        stage: Stage,
    ) -> Replies:
        if stage != "train" or not averaged:
            return Replies(source)
        number, exchange, method = position
        return SecureReplies(
            source,
            gather,
            partial(Roster, number, exchange),
            settings=settings,
            algorithm=type(algorithm).__name__,
            sends=algorithm.all_sends(),
            expected=expected,
            where=f"round {number}, {method}",
        )

    return make


class SecureReplies(Replies):
    """The replies to one `Server.ask`, of which only `mean` can be had.

    Args:
        source: pairs of client and reply, the averaged parts in which are replaced by a key.
        gather: asks for masked parts.
        roster: makes the roster of a sum from nonce, part, weight, keys and signatures.
        settings: of the experiment.
        algorithm: the algorithm's name, for errors.
        sends: the schemas of its parts.
        expected: the model and its roles.
        where: the round and the method, for errors.
    """

    def __init__(
        self,
        source: Iterator[tuple[str, Message]],
        gather: Gather,
        roster: partial[Roster],
        *,
        settings: SecureMean,
        algorithm: str,
        sends: Mapping[str, PartSchema],
        expected: Expected,
        where: str,
    ) -> None:
        super().__init__(source)
        self._gather, self._roster, self._settings = gather, roster, settings
        self._algorithm, self._sends, self._expected = algorithm, sends, expected
        self._where = where

    def __iter__(self) -> Iterator[tuple[str, Message]]:
        raise self._refusal()

    def collect(self) -> Replies:
        """Wait for all replies, and return this object."""
        if self._collected is None:
            self._collected = dict(super().__iter__())
        return self

    def items(self) -> list[tuple[str, Message]]:
        """Refuse to return single replies."""
        raise self._refusal()

    def values(self) -> list[Message]:
        """Refuse to return single replies."""
        raise self._refusal()

    def weights(self, weight: str | None = "num_examples") -> dict[str, float]:
        """Refuse to return single weights. See `Replies.weights`."""
        raise self._refusal()

    def _refusal(self) -> ConfigError:
        return ConfigError(
            f"{self._algorithm} reads the replies of single sites, which secure_mean hides; leave "
            f"secure_mean out, or choose an algorithm that only averages, such as fedavg"
        )

    def mean(self, key: str, weight: str | None = "num_examples") -> Tensors:
        """Return the mean of one part over the clients, of which each sends a masked summand.

        A client that is lost meanwhile makes the others send theirs again, under new masks.

        Args:
            key: the part to average.
            weight: the part that holds each client's weight; None: all weigh the same.

        Raises:
            ProtocolError: no reply arrived, or all weights are zero.
            MissingReply: too few clients are left.
        """
        self.averaged = True
        self.collect()
        assert self._collected is not None
        layout = Layout(key, self._sends.get(key), self._expected)
        found = {client: reply[KEY] for client, reply in self._collected.items()}
        keys = {client: value["key"] for client, value in found.items()}
        asked = sorted(keys)
        while True:
            self._check_enough(asked, keys)
            signatures = {c: {n: found[c][n] for n in SIGNED if n in found[c]} for c in keys}
            roster = self._roster(secrets.token_hex(16), key, weight, keys, signatures)
            total = _Sum(layout, self._settings)
            for client, reply in self._gather(sorted(keys), {"roster": roster.to_dict()}):
                total.add(client, reply, roster.digest)
            if len(total.clients) == len(keys):
                self.clients = sorted(keys)
                return total.mean()
            lost = sorted(keys.keys() - {*total.clients})
            logger.warning("%s: the others mask again without %s", self._where, ", ".join(lost))
            keys = {client: keys[client] for client in total.clients}

    def _check_enough(self, asked: list[str], keys: Mapping[str, str]) -> None:
        """Check that there are enough summands.

        Raises:
            MissingReply: there are not.
        """
        least = self._settings.min_sites
        if len(keys) < least:
            lost = sorted({*asked} - keys.keys())
            raise MissingReply(
                f"{self._where}: {len(keys)} sites answered ({', '.join(sorted(keys)) or 'none'}"
                f"{'; lost: ' + ', '.join(lost) if lost else ''}), and secure_mean.min_sites is "
                f"{least}; the finished rounds are kept, resume when more of them are back"
            )


class _Sum:
    """The sum of masked parts, of which it holds one at a time.

    Args:
        layout: of the part.
        settings: of the experiment.
    """

    def __init__(self, layout: Layout, settings: SecureMean) -> None:
        self._layout = layout
        self._numbers = FixedPoint(settings.bits, settings.fraction_bits)
        self._total = np.zeros(layout.count + 1, self._numbers.words)
        self._rest = Mean()
        self._dtype = {32: torch.int32, 64: torch.int64}[settings.bits]
        self.clients: list[str] = []

    def add(self, client: str, reply: Message, digest: str) -> None:
        """Add the masked part of one client.

        Args:
            client: the client.
            reply: its reply.
            digest: that of the roster.

        Raises:
            FaultyReply: it is not as the layout demands, or was masked for another sum.
        """
        value = reply[MASKED]
        try:
            self._layout.check(value, self._dtype)
            if value["roster"] != digest:
                raise ProtocolError("it was masked for another sum")
        except ProtocolError as error:
            raise FaultyReply(f"{reply.sender}: part {MASKED!r}: {error}", client) from error
        self._total += value["sum"]["sum"].numpy().view(self._numbers.words)
        if value["rest"]:
            self._rest.add(value["rest"])
        self.clients.append(client)

    def mean(self) -> Tensors:
        """Return the mean.

        Raises:
            ProtocolError: all weights are zero.
        """
        numbers = torch.from_numpy(self._numbers.decode(self._total))
        total = float(numbers[-1])
        if total <= 0:
            raise ProtocolError(
                "nothing to average: every client reported 0 examples; the model stays as it was"
            )
        rest = self._rest.result() if self._layout.rest else Tensors()
        return self._layout.unflatten(numbers[:-1] / total, rest)
