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
from collegium.runtime.secure.parts import KEY, MASKED, SIGNED, Layouts

logger = logging.getLogger(__name__)

Gather = Callable[[list[str], Mapping[str, Any]], Iterator[tuple[str, Message]]]
"""Asks clients for their masked part, given their names and what they are told."""


Accept = Callable[[list[str]], None]
"""Notes that the replies of clients have been used; see `Algorithm.commit_on_acknowledgement`."""

MakeReplies = Callable[
    [Iterator[tuple[str, Message]], Gather, Accept, tuple[int, int, str], Stage], Replies
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
        return lambda source, gather, accept, position, stage: Replies(source)
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
        accept: Accept,
        position: tuple[int, int, str],
        stage: Stage,
    ) -> Replies:
        if stage != "train" or not averaged:
            return Replies(source)
        number, exchange, method = position
        return SecureReplies(
            source,
            gather,
            accept,
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
        accept: notes whose replies are in a mean.
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
        accept: Accept,
        roster: partial[Roster],
        *,
        settings: SecureMean,
        algorithm: str,
        sends: Mapping[str, PartSchema],
        expected: Expected,
        where: str,
    ) -> None:
        super().__init__(source)
        self._gather, self._accept = gather, accept
        self._roster, self._settings = roster, settings
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
        """Return the mean of one part over the clients. See `means`."""
        return self.means([key], weight)[key]

    def means(
        self, keys: Collection[str], weight: str | None = "num_examples"
    ) -> dict[str, Tensors]:
        """Return the means of parts over the clients, of which each sends one masked summand.

        A client that is lost meanwhile makes the others send theirs again, under new masks.

        Args:
            keys: the parts to average.
            weight: the part that holds each client's weight; None: all weigh the same.

        Raises:
            ProtocolError: no reply arrived, or all weights are zero.
            MissingReply: too few clients are left.
        """
        self.averaged = True
        self.collect()
        assert self._collected is not None
        layouts = Layouts(keys, self._sends, self._expected)
        signed = {client: reply[KEY] for client, reply in self._collected.items()}
        public = {client: value["key"] for client, value in signed.items()}
        asked = sorted(public)
        while True:
            self._check_enough(asked, public)
            signatures = {c: {n: signed[c][n] for n in SIGNED if n in signed[c]} for c in public}
            roster = self._roster(secrets.token_hex(16), [*keys], weight, public, signatures)
            total = _Sum(layouts, self._settings)
            for client, reply in self._gather(sorted(public), {"roster": roster.to_dict()}):
                total.add(client, reply, roster.digest)
            if len(total.clients) == len(public):
                self.clients = sorted(public)
                self._accept(self.clients)
                return total.means()
            lost = sorted(public.keys() - {*total.clients})
            logger.warning("%s: the others mask again without %s", self._where, ", ".join(lost))
            public = {client: public[client] for client in total.clients}

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
    """The sum of masked replies, of which it holds one at a time.

    Args:
        layouts: of the parts.
        settings: of the experiment.
    """

    def __init__(self, layouts: Layouts, settings: SecureMean) -> None:
        self._layouts = layouts
        self._numbers = FixedPoint(settings.bits, settings.fraction_bits)
        self._total = np.zeros(layouts.count + 1, self._numbers.words)
        self._rest: dict[str, Mean] = {}
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
            self._layouts.check(value, self._dtype)
            if value["roster"] != digest:
                raise ProtocolError("it was masked for another sum")
        except ProtocolError as error:
            raise FaultyReply(f"{reply.sender}: part {MASKED!r}: {error}", client) from error
        self._total += value["sum"]["sum"].numpy().view(self._numbers.words)
        for name, rest in value["rest"].items():
            self._rest.setdefault(name, Mean()).add(rest)
        self.clients.append(client)

    def means(self) -> dict[str, Tensors]:
        """Return the means, by part.

        Raises:
            ProtocolError: all weights are zero.
        """
        numbers = torch.from_numpy(self._numbers.decode(self._total))
        total = float(numbers[-1])
        if total <= 0:
            raise ProtocolError(
                "nothing to average: every client reported 0 examples; the model stays as it was"
            )
        rest = {name: found.result() for name, found in self._rest.items()}
        return self._layouts.unflatten(numbers[:-1] / total, rest)
