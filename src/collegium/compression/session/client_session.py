"""The client's half: decodes a request, encodes a reply, and keeps what the next ones need."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from collegium.compression.base import Codec, State
from collegium.compression.session.groups import (
    KEY,
    Coding,
    Group,
    as_content,
    code_groups,
    decode,
    decode_groups,
    groups,
    is_exact,
    origin,
)
from collegium.compression.session.layout import Form
from collegium.core.message import tensors_in
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


class LostReference(ProtocolError):  # noqa: N818  (the field's own names read better so)
    """A client does not hold what a request was encoded against."""


class Sent(NamedTuple):
    """What leaves a client.

    Attributes:
        parts: the parts of the message without what is coded.
        coded: what is coded, by path.
        about: for the ledger, by part that is coded: the codec, and the bytes in all.
    """

    parts: dict[str, Any]
    coded: dict[str, Any]
    about: dict[str, dict[str, Any]]


class ClientSession:
    """The client's half, for one request.

    Args:
        coding: the codecs.
        form: of the model.
        memory: what the client's state keeps for the codecs, changed in place: by path the version
            and the tensors last received ("down"), and what the codec lost ("up").
        seed: of the run.
        place: the client's name, the round and the exchange.
    """

    def __init__(
        self, coding: Coding, form: Form, memory: State, *, seed: int, place: tuple[str | int, ...]
    ) -> None:
        self._coding, self._form, self._memory = coding, form, memory
        self._rng = partial(generator, seed, "codec", "up", *place)
        self._order: Mapping[str, Any] = {}
        self._received: dict[str, Tensors] = {}

    def receive(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of a request, decoded.

        Args:
            request: as it was unpacked, on the CPU.

        Raises:
            LostReference: this client does not hold what it was encoded against.
            ProtocolError: it is damaged.
        """
        parts = dict(request)
        about = parts.pop(KEY, {})
        self._order = about.get("order", {})
        decoded: dict[str, Any] = decode_groups(parts, about.get("parts", {}), self._whole)
        self._received = groups(decoded)
        return decoded

    def _whole(self, path: str, rest: Tensors, entry: Mapping[str, Any]) -> Tensors:
        """Decode one group, and remember it where the next one will build upon it."""
        if "data" in entry and "base" not in entry:
            return self._form.joined(rest, decode(self._coding.down, self._form, entry))
        held = self._memory.setdefault("down", {})
        if "data" not in entry:
            tensors = self._form.aligned(rest, self._form.codable(rest))
            held[path] = {"version": entry["version"], "tensors": tensors}
            return rest
        old, names = held.get(path), self._form.unmask(entry["names"])
        if old is None or old["version"] != entry["base"] or old["tensors"].keys() != set(names):
            raise LostReference("this site does not hold what it was encoded against")
        before = self._form.aligned(old["tensors"], names)
        now = before.map(torch.add, decode(self._coding.down, self._form, entry))
        held[path] = {"version": entry["version"], "tensors": now}
        return self._form.joined(rest, now)

    def send(self, reply: Mapping[str, Any]) -> Sent:
        """Return what leaves, and remember what the codec lost.

        Raises:
            ProtocolError: a part cannot be encoded: it holds NaN or infinite values, say.
        """
        up = self._coding.up
        coded: dict[str, Any] = {}
        about: dict[str, dict[str, Any]] = {}

        def one(group: Group) -> Tensors:
            entry = self._exact(up, group) if up is None or is_exact(up) else self._lossy(up, group)
            if entry:
                coded[group.path] = {"names": self._form.mask(group.coded), **entry}
            if "data" not in entry:
                return self._form.joined(group.rest, group.coded)
            line = about.setdefault(group.path.partition("/")[0], {"bytes": 0})
            line |= {"codec": type(up).__name__, "bytes": line["bytes"] + len(entry["data"][""])}
            return group.rest

        parts: dict[str, Any] = code_groups(reply, self._form, one)
        for name, line in about.items():
            line["bytes"] += sum(t.numel() * t.element_size() for _, t in tensors_in(parts[name]))
        return Sent(parts, coded, about)

    def _exact(self, up: Codec | None, group: Group) -> dict[str, Any]:
        """Return an entry with the numbers as they are, or none where they need none.

        Where a download lost something, the server has to know from which group they came.
        """
        held = self._memory.get("down", {})
        base = origin(group.path, self._base(group)) if held else None
        about = {"base": base, "whole": True} if base in held else {}
        if up is None:
            return about
        return about | as_content(up.encode(group.coded, self._rng(group.path), {}).data)

    def _lossy(self, up: Codec, group: Group) -> dict[str, Any]:
        """Return an entry with what is new to the server, what was lost before included."""
        target, base, names = group.coded, self._base(group), list(group.coded)
        if base is not None:
            target = target.map(torch.sub, self._form.aligned(self._received[base], names))
        if not up.feedback:
            encoded = up.encode(target, self._rng(group.path), self._order)
            return {"base": base, **as_content(encoded.data)}
        kept = self._memory.setdefault("up", {})
        key, start = f"{group.path} {self._form.mask(names)}", origin(group.path, base)
        if key in kept and kept[key]["origin"] == start:
            target = target.map(torch.add, self._form.aligned(kept[key]["residual"], names))
        encoded = up.encode(target, self._rng(group.path), self._order)
        kept[key] = {"origin": start, "residual": target.map(torch.sub, encoded.decoded)}
        return {"base": base, **as_content(encoded.data)}

    def _base(self, group: Group) -> str | None:
        """Return the path of the group from which the difference is taken."""
        near = {
            path: received
            for path, received in self._received.items()
            if group.coded.keys() <= set(self._form.codable(received))
        }
        if group.path in near:
            return group.path
        distances = {
            path: _squares(
                group.coded.map(torch.sub, self._form.aligned(received, list(group.coded)))
            )
            for path, received in near.items()
        }
        best = min(distances, key=lambda path: distances[path], default=None)
        near_enough = best is not None and distances[best] < _squares(group.coded) / 4
        return best if near_enough else None


def _squares(tensors: Tensors) -> float:
    """Return the squared length of a group, summed in float64."""
    return sum(float(t.double().square().sum()) for t in tensors.distinct().values())
