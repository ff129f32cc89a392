"""The server's half: encodes requests, decodes replies, and knows what each client holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from collegium.compression.base import ClientReport, Codec
from collegium.compression.session.groups import (
    CODEC_KEY,
    Codecs,
    SplitGroup,
    decode_entry,
    decode_groups,
    encode_groups,
    is_lossless,
    origin,
    tensor_groups,
    wrap_bytes,
)
from collegium.compression.session.layout import ModelLayout
from collegium.core.algorithm import State
from collegium.core.message import HELD_KEY, Held, pack
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError


class ServerSession:
    """The server's half of a run.

    Args:
        codecs: the codecs.
        layout: of the model.
        seed: of the run.

    Attributes:
        state: the codecs' part of the server's state: by client and path the version that it holds
            ("held"), by path and version the tensors ("known"), the codec's own ("plan"), and the
            clients' reports in this round ("reports").
        options: the options of each client in this round, by the codec's plan.
    """

    def __init__(self, codecs: Codecs, layout: ModelLayout, *, seed: int) -> None:
        self.codecs, self.layout, self.seed = codecs, layout, seed
        self.state: State = {}
        self.options: Mapping[str, Mapping[str, Any]] = {}
        self._has_plan = codecs.up is not None and type(codecs.up).plan is not Codec.plan
        self._planned_round = 0

    def pruned_state(self) -> State:
        """Return the state, after removing the versions that no client holds any more."""
        used = {item for held in self.state.get("held", {}).values() for item in held.items()}
        for path, versions in self.state.get("known", {}).items():
            for version in [version for version in versions if (path, version) not in used]:
                del versions[version]
        return self.state

    def plan(self, number: int) -> None:
        """Plan a round before its first exchange; otherwise nothing changes."""
        if self.codecs.up is None or not self._has_plan or number == self._planned_round:
            return
        reports = {c: ClientReport(**r) for c, r in self.state.get("reports", {}).items()}
        self.options = self.codecs.up.plan(self.state.setdefault("plan", {}), reports)
        self.state["reports"], self._planned_round = {}, number

    def record_report(self, client: str, reply: Mapping[str, Any]) -> None:
        """Keep what the next plan may use of a reply.

        Args:
            client: the sender.
            reply: its decoded reply.
        """
        if self._has_plan:
            reports = self.state.setdefault("reports", {})
            report = reports.setdefault(client, {"loss": None, "weight": 1.0})
            if "progress" in reply and "loss" in reply["progress"]:
                report["loss"] = reply["progress"]["loss"]
            if "num_examples" in reply:
                report["weight"] = reply["num_examples"]

    def forget(self, client: str) -> None:
        """Record that it is no longer known what a client holds."""
        self.state.get("held", {}).pop(client, None)


class _Download(NamedTuple):
    """A group as it is sent to all clients that hold the same version.

    Attributes:
        version: the name of the version that they hold afterwards.
        tensors: the tensors that they hold afterwards.
        entry: the entry that they receive; None if none holds a version, so that all is sent.
    """

    version: str
    tensors: Tensors
    entry: dict[str, Any] | None


class Exchange:
    """The server's half of one exchange.

    Args:
        session: of the run.
        items: the parts that all clients receive.
        each: further parts for single clients.
        clients: the clients that are asked.
        position: the round, and the number of the exchange in it.
        held: what messages leave out, as the clients hold it; None: nothing.
    """

    def __init__(
        self,
        session: ServerSession,
        items: Mapping[str, Any],
        each: Mapping[str, Mapping[str, Any]] | None,
        clients: Collection[str],
        *,
        position: tuple[int, int],
        held: Held | None = None,
    ) -> None:
        session.plan(position[0])
        session.pruned_state()
        self._session, self._layout, self._position = session, session.layout, position
        self._items, self._each, self._left_out = items, each, held
        self._downloads: dict[Hashable, _Download] = {}
        self._packed: dict[str, bytes] = {}
        self._sent: dict[str, dict[str, Tensors]] = {}
        self._received: dict[str, dict[str, _Download]] = {}
        self._majority = self._majority_versions(clients) if session.state.get("held") else {}

    def _parts(self, client: str) -> dict[str, Any]:
        return {**self._items, **(self._each[client] if self._each is not None else {})}

    def _majority_versions(self, clients: Collection[str]) -> dict[Hashable, str | None]:
        """Return the version of every group that most of its receivers hold."""
        counts: dict[Hashable, Counter[str]] = {}
        for client in clients:
            for path, group in tensor_groups(self._parts(client)).items():
                held = self._held(client, path, self._layout.codable(group))
                counts.setdefault((path, id(group)), Counter()).update([held] if held else [])
        return {
            key: max(sorted(count), key=lambda version: count[version], default=None)
            for key, count in counts.items()
        }

    def _held(self, client: str, path: str, names: Collection[str]) -> str | None:
        """Return the version of a group that a client holds, if a difference can be sent to it."""
        version: str | None = self._session.state.get("held", {}).get(client, {}).get(path)
        known = self._session.state.get("known", {}).get(path, {})
        return version if version in known and known[version].keys() == set(names) else None

    def payload(self, client: str, *, whole: bool = False) -> bytes:
        """Return the packed request for a client.

        Args:
            client: the client.
            whole: whether it does not hold what messages leave out, and gets it.

        Raises:
            ProtocolError: a part cannot be encoded.
        """
        parts, down = self._parts(client), self._session.codecs.down
        originals = tensor_groups(parts)
        entries: dict[str, Any] = {}
        received: dict[str, _Download] = {}

        def encode(group: SplitGroup) -> Tensors:
            assert down is not None
            key = (group.path, id(originals[group.path]))
            if is_lossless(down):
                entries[group.path] = self._lossless_entry(down, group, key)
                return group.rest
            held = self._held(client, group.path, group.coded)
            download = self._download(down, group, key, held or self._majority.get(key))
            received[group.path] = download
            entries[group.path] = download.entry if held else {"version": download.version}
            return group.rest if held else self._layout.join(group.rest, download.tensors)

        rests = parts if down is None else encode_groups(parts, self._layout, encode)
        self._sent[client], self._received[client] = originals, received
        coding = {"order": dict(self._session.options.get(client, {})), "parts": entries}
        coding = {key: value for key, value in coding.items() if value}
        message = rests | ({CODEC_KEY: coding} if coding else {})
        if whole and self._left_out is not None:
            return pack({**message, HELD_KEY: self._left_out.tensors})
        return self._pack(message)

    def _pack(self, message: dict[str, Any]) -> bytes:
        """Pack a message, once for all clients with equal parts, options and versions."""
        if self._each is not None:
            return pack(message, self._left_out)
        coding = message.get(CODEC_KEY, {})
        versions = {
            path: ["data" in entry, entry.get("version")]
            for path, entry in coding.get("parts", {}).items()
        }
        key = json.dumps([coding.get("order"), versions])
        if key not in self._packed:
            self._packed[key] = pack(message, self._left_out)
        return self._packed[key]

    def _lossless_entry(self, down: Codec, group: SplitGroup, key: Hashable) -> dict[str, Any]:
        """Return the entry with a group's numbers as they are, made once for all clients."""
        if key not in self._downloads:
            data = down.encode(group.coded, self._rng(group.path), {}).data
            entry = {"names": self._layout.mask(group.coded), **wrap_bytes(data)}
            self._downloads[key] = _Download("", group.coded, entry)
        return self._downloads[key].entry or {}

    def _download(
        self, down: Codec, group: SplitGroup, group_key: Hashable, base: str | None
    ) -> _Download:
        """Return a group encoded against a version, once for all clients that hold it."""
        key = (group_key, base)
        if key in self._downloads:
            return self._downloads[key]
        version = "-".join(map(str, (*self._position, len(self._downloads))))
        now, entry = group.coded, None
        known = self._session.state.setdefault("known", {}).setdefault(group.path, {})
        if base is not None:
            before = self._layout.align(known[base], list(now))
            target = now.map(torch.sub, before)
            encoded = down.encode(target, self._rng(group.path, base), {})
            now = before.map(torch.add, encoded.decoded)
            mask = self._layout.mask(now)
            entry = {"names": mask, "base": base, "version": version, **wrap_bytes(encoded.data)}
        known[version] = now
        self._downloads[key] = _Download(version, now, entry)
        return self._downloads[key]

    def _rng(self, *path: str) -> torch.Generator:
        return generator(self._session.seed, "codec", "down", *self._position, *path)

    def decode_reply(self, client: str, parts: Mapping[str, Any], coded: Any) -> dict[str, Any]:
        """Return the parts of a client's reply, decoded.

        Args:
            client: the sender.
            parts: the parts without what is coded.
            coded: the entries of the coded groups, not trusted.

        Raises:
            ProtocolError: they are damaged.
        """
        return decode_groups(parts, coded, partial(self._decode_group, client))

    def _decode_group(
        self, client: str, path: str, rest: Tensors, entry: Mapping[str, Any]
    ) -> Tensors:
        layout, names = self._layout, self._layout.unmask(entry["names"])
        if "data" in entry:
            value = decode_entry(self._session.codecs.up, layout, entry)
            if value.keys() & rest.keys():
                raise ValueError(names)
        else:
            value = layout.align(rest.select(layout.codable(rest)), names)
        base = entry.get("base")
        if base is None:
            return layout.join(rest, value)
        group = self._sent[client][base]
        sent = layout.align(group.select(layout.codable(group)), names)
        download = self._received[client].get(base)
        received = layout.align(download.tensors, names) if download else sent
        if not entry.get("whole"):
            value = value.map(torch.add, sent if origin(path, base) else received)
        elif download is not None and download.entry is not None:
            value = value.map(torch.add, sent.map(torch.sub, received))
        return layout.join(rest, value)

    def record_reply(self, client: str, reply: Mapping[str, Any]) -> None:
        """Record that a client has answered, and what it holds now.

        Args:
            client: the sender.
            reply: its decoded reply.
        """
        self._session.record_report(client, reply)
        received = self._received.pop(client)
        if received:
            held = self._session.state.setdefault("held", {}).setdefault(client, {})
            held |= {path: download.version for path, download in received.items()}
        del self._sent[client]

    def record_failure(self, client: str) -> None:
        """Record that a client has not answered, so that it is not known what it holds."""
        self._session.forget(client)
        self._received.pop(client, None)
        self._sent.pop(client, None)


def decode_reply(
    exchange: Exchange | None, client: str, reply: dict[str, Any], entries: Any
) -> dict[str, Any]:
    """Return the parts of a client's reply, decoded.

    Args:
        exchange: of the reply; None: nothing is coded.
        client: the sender.
        reply: the parts that are not coded.
        entries: those of the others.

    Raises:
        ProtocolError: the reply is coded and should not be, or cannot be decoded.
    """
    if exchange is None:
        raise ProtocolError("it is coded, and the server has no codec; leave it out here")
    return exchange.decode_reply(client, reply, entries)
