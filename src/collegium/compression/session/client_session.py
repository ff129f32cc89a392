"""The client's half: decodes a request, encodes a reply, and keeps what the next ones need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from collegium.compression.base import Codec
from collegium.compression.session.groups import (
    CODEC_KEY,
    Codecs,
    SplitGroup,
    decode_entry,
    decode_groups,
    encode_groups,
    is_lossless,
    leaving_parts,
    origin,
    tensor_groups,
    wrap_bytes,
)
from collegium.compression.session.layout import ModelLayout
from collegium.core.algorithm import State
from collegium.core.message import Held, tensors_in
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


class LostReference(ProtocolError):  # noqa: N818  (the field's own names read better so)
    """A client does not hold the version against which a request was encoded."""


class EncodedReply(NamedTuple):
    """A reply as it leaves a client.

    Attributes:
        parts: the parts of the message without what is coded.
        coded: the coded groups, by path.
        ledger: for the ledger, by part that is coded: the codec, and the bytes in total.
    """

    parts: dict[str, Any]
    coded: dict[str, Any]
    ledger: dict[str, dict[str, Any]]


class ClientSession:
    """The client's half, for one request.

    Args:
        codecs: the codecs.
        layout: of the model.
        state: the codecs' part of the client's state, changed in place: by path the version and the
            tensors last received ("down"), and what the codec lost ("up").
        seed: of the run.
        position: the client's name, the round and the exchange.
        held: what messages leave out, which counts nothing in the ledger; None: nothing.
    """

    def __init__(
        self,
        codecs: Codecs,
        layout: ModelLayout,
        state: State,
        *,
        seed: int,
        position: tuple[str | int, ...],
        held: Held | None = None,
    ) -> None:
        self._codecs, self._layout, self._state, self._held = codecs, layout, state, held
        self._rng = partial(generator, seed, "codec", "up", *position)
        self._options: Mapping[str, Any] = {}
        self._received: dict[str, Tensors] = {}

    def decode_request(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a request, decoded.

        Args:
            request: the unpacked request, on the CPU.

        Raises:
            LostReference: this client does not hold the version against which it was encoded.
            ProtocolError: it is damaged.
        """
        parts = dict(request)
        coding = parts.pop(CODEC_KEY, {})
        self._options = coding.get("order", {})
        decoded = decode_groups(parts, coding.get("parts", {}), self._decode_group)
        self._received = tensor_groups(decoded)
        return decoded

    def _decode_group(self, path: str, rest: Tensors, entry: Mapping[str, Any]) -> Tensors:
        """Return one group, and keep it if the next one will be encoded against it."""
        if "data" in entry and "base" not in entry:
            return self._layout.join(rest, decode_entry(self._codecs.down, self._layout, entry))
        held = self._state.setdefault("down", {})
        if "data" not in entry:
            tensors = self._layout.align(rest, self._layout.codable(rest))
            held[path] = {"version": entry["version"], "tensors": tensors}
            return rest
        old, names = held.get(path), self._layout.unmask(entry["names"])
        if old is None or old["version"] != entry["base"] or old["tensors"].keys() != set(names):
            raise LostReference("this site does not hold what it was encoded against")
        before = self._layout.align(old["tensors"], names)
        now = before.map(torch.add, decode_entry(self._codecs.down, self._layout, entry))
        held[path] = {"version": entry["version"], "tensors": now}
        return self._layout.join(rest, now)

    def encode_reply(self, reply: Mapping[str, Any]) -> EncodedReply:
        """Return the reply as it leaves, and keep what the codec lost.

        Raises:
            ProtocolError: a part cannot be encoded, for example because it holds NaN or infinite
                values.
        """
        up = self._codecs.up
        coded: dict[str, Any] = {}
        ledger: dict[str, dict[str, Any]] = {}

        def encode(group: SplitGroup) -> Tensors:
            if up is None or is_lossless(up):
                entry = self._lossless_entry(up, group)
            else:
                entry = self._lossy_entry(up, group)
            if entry:
                coded[group.path] = {"names": self._layout.mask(group.coded), **entry}
            if "data" not in entry:
                return self._layout.join(group.rest, group.coded)
            line = ledger.setdefault(group.path.partition("/")[0], {"bytes": 0})
            line |= {"codec": type(up).__name__, "bytes": line["bytes"] + len(entry["data"][""])}
            return group.rest

        parts = encode_groups(reply, self._layout, encode)
        leaving = leaving_parts({name: parts[name] for name in ledger}, self._held)
        for name, line in ledger.items():
            line["bytes"] += sum(t.numel() * t.element_size() for _, t in tensors_in(leaving[name]))
        return EncodedReply(parts, coded, ledger)

    def _lossless_entry(self, up: Codec | None, group: SplitGroup) -> dict[str, Any]:
        """Return an entry with the numbers as they are, or none if they need none.

        If a download lost something, the server has to know from which group they were made.
        """
        held = self._state.get("down", {})
        base = origin(group.path, self._find_base(group)) if held else None
        entry = {"base": base, "whole": True} if base in held else {}
        if up is None:
            return entry
        return entry | wrap_bytes(up.encode(group.coded, self._rng(group.path), {}).data)

    def _lossy_entry(self, up: Codec, group: SplitGroup) -> dict[str, Any]:
        """Return an entry with the difference from the base, previous losses included."""
        target, base, names = group.coded, self._find_base(group), list(group.coded)
        if base is not None:
            target = target.map(torch.sub, self._layout.align(self._received[base], names))
        lost = self._state.setdefault("up", {}) if up.feedback else {}
        key, start = f"{group.path} {self._layout.mask(names)}", origin(group.path, base)
        if key in lost and lost[key]["origin"] == start:
            target = target.map(torch.add, self._layout.align(lost[key]["residual"], names))
        encoded = up.encode(target, self._rng(group.path), self._options)
        if up.feedback:
            lost[key] = {"origin": start, "residual": target.map(torch.sub, encoded.decoded)}
        return {"base": base, **wrap_bytes(encoded.data)}

    def _find_base(self, group: SplitGroup) -> str | None:
        """Return the path of the received group from which the difference is taken, if any."""
        candidates = {
            path: received
            for path, received in self._received.items()
            if group.coded.keys() <= set(self._layout.codable(received))
        }
        if group.path in candidates:
            return group.path
        distances = {
            path: _squared_length(
                group.coded.map(torch.sub, self._layout.align(received, list(group.coded)))
            )
            for path, received in candidates.items()
        }
        best = min(distances, key=lambda path: distances[path], default=None)
        near = best is not None and distances[best] < _squared_length(group.coded) / 4
        return best if near else None


def _squared_length(tensors: Tensors) -> float:
    """Return the squared length of a group, summed in float64."""
    return sum(float(t.double().square().sum()) for t in tensors.distinct().values())
