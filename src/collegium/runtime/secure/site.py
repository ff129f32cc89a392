"""The site's half: keeps what is averaged, and sends it under masks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from collegium.core.failures import known_error
from collegium.core.files import write_atomically
from collegium.core.message import Held, pack, unpack
from collegium.core.payloads import Expected, PartSchema
from collegium.core.seals import check_seal, seal_tensors
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError
from collegium.runtime.secure.config import SecureMean, check_installed
from collegium.runtime.secure.identity import Identity
from collegium.runtime.secure.masks import FixedPoint, Roster, mask, new_private_key, public_key
from collegium.runtime.secure.parts import KEY, MASKED, Layouts

logger = logging.getLogger(__name__)

FILE = "unmasked.safetensors"
"""The file in a site's own folder with what is averaged of its last reply, and its private key."""


class SiteMasks:
    """The work of a site by which the server sees only the sum.

    Args:
        settings: of the experiment.
        site: the site's name.
        folder: the site's own folder.
        sends: the schemas of the algorithm's parts.
        averaged: the parts that the server reads by a mean alone; see
            `collegium.core.algorithm.Algorithm.averaged_parts`.
        expected: the model and its roles.
        held: what messages leave out; None: nothing.
        identity: by which this site signs its keys and checks those of the others; None: nobody
            signs, as in a simulation.
    """

    def __init__(
        self,
        settings: SecureMean,
        site: str,
        folder: Path,
        sends: Mapping[str, PartSchema],
        averaged: Collection[str],
        expected: Expected,
        held: Held | None,
        identity: Identity | None,
    ) -> None:
        self._identity = identity
        self._settings, self._site, self._file = settings, site, folder / FILE
        self._sends, self._averaged = sends, averaged
        self._expected, self._held = expected, held
        self._numbers = FixedPoint(settings.bits, settings.fraction_bits)

    def withhold(self, reply: Mapping[str, Any], number: int, exchange: int) -> dict[str, Any]:
        """Keep what is averaged of a reply; return the rest of it with a new public key.

        Args:
            reply: the reply of a handler, checked.
            number: the round.
            exchange: the exchange in it.

        Raises:
            NotInstalled: the package `cryptography` is missing.
        """
        kept = {name: part for name, part in reply.items() if name in self._averaged}
        if not kept:
            return dict(reply)
        check_installed()
        private = new_private_key()
        stored = {"round": number, "exchange": exchange, "private": private, "reply": kept}
        write_atomically(self._file, *seal_tensors(pack(stored)), private=True)
        others = {name: part for name, part in reply.items() if name not in kept}
        key = public_key(private)
        signed = self._identity.sign(self._site, number, exchange, key) if self._identity else {}
        return {**others, KEY: {"key": key, **signed}}

    def masked(
        self, asked: Mapping[str, Any], number: int, exchange: int
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Return kept parts under masks, and what the ledger holds of them beside their size.

        Args:
            asked: the roster, as the server sent it.
            number: the round of the request.
            exchange: the exchange of training that it is about.

        Raises:
            ProtocolError: the roster is not of what this site keeps.
            ClientError: the sites are too few, a key is not signed by its site, or the values are
                too large.
        """
        roster = self._roster(asked, number, exchange)
        self._check_signatures(roster)
        kept = self._kept(roster)
        layouts = Layouts(roster.parts, self._sends, self._expected)
        weight = 1.0 if roster.weight is None else float(kept[roster.weight])
        rest = layouts.rest(kept) if weight > 0 else {}
        for tensors in rest.values():
            self._check_rest(tensors)
        numbers = torch.cat([layouts.flat(kept) * weight, torch.tensor([weight]).double()])
        sites = len(roster.keys)
        try:
            words = self._numbers.encode(numbers.numpy(), sites)
        except OverflowError as error:
            limit = f"{self._numbers.limit(sites):.6g}"
            raise known_error(
                "secure_range",
                site=self._site,
                part=", ".join(roster.parts),
                limit=limit,
                sites=str(sites),
            ) from error
        words = words + mask(kept["private"], self._site, roster, len(words), self._numbers.words)
        vector = torch.from_numpy(words.view(f"<i{self._settings.bits // 8}"))
        value = {"roster": roster.digest, "sum": Tensors({"sum": vector}), "rest": rest}
        about = {"masked": [*roster.parts], "weight": roster.weight, "sites": sorted(roster.keys)}
        return {MASKED: value}, {MASKED: about}

    def _roster(self, asked: Mapping[str, Any], number: int, exchange: int) -> Roster:
        """Return the roster of a request, checked.

        Raises:
            ProtocolError: it is damaged or of another exchange.
            ClientError: it names too few sites.
        """
        try:
            roster = Roster(**asked["roster"])
            texts = (roster.nonce, *roster.parts, *roster.keys, *roster.keys.values())
            roster.signatures.get(self._site)
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError("the server did not say whose replies are added") from error
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("the server did not say whose replies are added")
        if (roster.round, roster.exchange) != (number, exchange):
            raise ProtocolError("the sites whose replies are added are those of another exchange")
        if len({*roster.keys.values()}) < self._settings.min_sites:
            raise known_error(
                "secure_few",
                site=self._site,
                sites=str(len({*roster.keys.values()})),
                least=str(self._settings.min_sites),
            )
        return roster

    def _check_signatures(self, roster: Roster) -> None:
        """Check that the other sites have signed their keys.

        Raises:
            ClientError: one has not.
        """
        if self._identity is None:
            return
        for other, key in sorted(roster.keys.items()):
            if other == self._site:
                continue
            try:
                signed = roster.signatures.get(other)
                self._identity.check(other, roster.round, roster.exchange, key, signed)
            except ProtocolError as error:
                logger.warning("site %r masks nothing: %s", self._site, error)
                raise known_error("secure_signature", site=self._site, other=other) from error

    def _kept(self, roster: Roster) -> dict[str, Any]:
        """Return what this site keeps of the exchange of a roster: parts, and the private key.

        Raises:
            ProtocolError: it keeps nothing of it, or another key.
        """
        try:
            data = self._file.read_bytes()
            check_seal(data)
            stored = unpack(data)
        except (OSError, ValueError) as error:
            raise ProtocolError("this site keeps no reply that could be masked") from error
        position = stored["round"], stored["exchange"]
        own = public_key(stored["private"])
        if position != (roster.round, roster.exchange) or roster.keys.get(self._site) != own:
            raise ProtocolError("this site keeps the reply to another request")
        wanted = {*roster.parts, *([] if roster.weight is None else [roster.weight])}
        if not wanted <= stored["reply"].keys():
            raise ProtocolError("this site's reply does not hold what is to be averaged")
        return {**stored["reply"], "private": stored["private"]}

    def _check_rest(self, rest: Tensors) -> None:
        """Check that what leaves without a mask is buffers of integers, and what nobody trains.

        Raises:
            ProtocolError: a tensor that nobody trains is not the one that all sites hold.
        """
        for name, tensor in rest.items():
            known = self._held is not None and self._held.mark(name, tensor) is not None
            if tensor.is_floating_point() and not known:
                raise ProtocolError(
                    f"{name} is frozen and has changed, so that it would leave without a mask"
                )
