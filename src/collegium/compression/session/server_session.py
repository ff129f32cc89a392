"""The server's half: encodes requests, decodes replies, and knows what each client holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import torch

from collegium.compression.base import Codec, Report, State
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
from collegium.core.message import pack
from collegium.core.randomness import generator
from collegium.core.tensors import Tensors


class ServerSession:
    """The server's half.

    Args:
        coding: the codecs.
        form: of the model.
        seed: of the run.

    Attributes:
        memory: what the server's state keeps for the codecs: by client and path the version that it
            holds ("held"), by path and version the tensors ("known"), the codec's own ("plan"), and
            what the clients reported in this round ("reports").
        orders: what the codec's plan says to each client in this round.
    """

    def __init__(self, coding: Coding, form: Form, *, seed: int) -> None:
        self.coding, self.form, self.seed = coding, form, seed
        self.memory: State = {}
        self.orders: Mapping[str, Mapping[str, Any]] = {}
        self._plans = coding.up is not None and type(coding.up).plan is not Codec.plan
        self._planned = 0

    def stored(self) -> State:
        """Return the memory, without the versions that nobody holds any more."""
        used = {item for held in self.memory.get("held", {}).values() for item in held.items()}
        for path, versions in self.memory.get("known", {}).items():
            for version in [version for version in versions if (path, version) not in used]:
                del versions[version]
        return self.memory

    def exchange(
        self,
        items: Mapping[str, Any],
        each: Mapping[str, Mapping[str, Any]] | None,
        clients: Collection[str],
        *,
        place: tuple[int, int],
    ) -> Exchange:
        """Begin an exchange.

        Args:
            items: the parts that all clients receive.
            each: further parts for single clients.
            clients: all that are asked.
            place: the round, and the number of the exchange in it.
        """
        self._plan(place[0])
        self.stored()
        return Exchange(self, items, each, clients, place)

    def _plan(self, number: int) -> None:
        """Let the codec give its orders, before the first exchange of every round."""
        if self.coding.up is None or not self._plans or number == self._planned:
            return
        reports = {c: Report(**r) for c, r in self.memory.get("reports", {}).items()}
        self.orders = self.coding.up.plan(self.memory.setdefault("plan", {}), reports)
        self.memory["reports"], self._planned = {}, number

    def note(self, client: str, reply: Mapping[str, Any]) -> None:
        """Remember what the next plan may use."""
        if self._plans:
            reports = self.memory.setdefault("reports", {})
            report = reports.setdefault(client, {"loss": None, "weight": 1.0})
            if "progress" in reply and "loss" in reply["progress"]:
                report["loss"] = reply["progress"]["loss"]
            if "num_examples" in reply:
                report["weight"] = reply["num_examples"]

    def forget(self, client: str) -> None:
        """Note that nothing is known any more of what a client holds."""
        self.memory.get("held", {}).pop(client, None)


class _Step(NamedTuple):
    """A group on its way to all that hold the same.

    Attributes:
        version: what they hold afterwards is called.
        tensors: what they hold afterwards.
        entry: what they get; None: nobody holds anything, so that it goes in full.
    """

    version: str
    tensors: Tensors
    entry: dict[str, Any] | None


class Exchange:
    """The server's half of one exchange; see `ServerSession.exchange`."""

    def __init__(
        self,
        side: ServerSession,
        items: Mapping[str, Any],
        each: Mapping[str, Mapping[str, Any]] | None,
        clients: Collection[str],
        place: tuple[int, int],
    ) -> None:
        self._side, self._form, self._place = side, side.form, place
        self._items, self._each = items, each
        self._steps: dict[Hashable, _Step] = {}
        self._packed: dict[str, bytes] = {}
        self._sent: dict[str, dict[str, Tensors]] = {}
        self._received: dict[str, dict[str, _Step]] = {}
        self._most = self._majorities(clients) if side.memory.get("held") else {}

    def _parts(self, client: str) -> dict[str, Any]:
        return {**self._items, **(self._each[client] if self._each is not None else {})}

    def _majorities(self, clients: Collection[str]) -> dict[Hashable, str | None]:
        """Return for every group which version most of those hold who will get it."""
        counts: dict[Hashable, Counter[str]] = {}
        for client in clients:
            for path, group in groups(self._parts(client)).items():
                held = self._held(client, path, self._form.codable(group))
                counts.setdefault((path, id(group)), Counter()).update([held] if held else [])
        return {
            whole: max(sorted(count), key=lambda version: count[version], default=None)
            for whole, count in counts.items()
        }

    def _held(self, client: str, path: str, names: Collection[str]) -> str | None:
        """Return the version of a group that a client holds, if one can build upon it."""
        version: str | None = self._side.memory.get("held", {}).get(client, {}).get(path)
        known = self._side.memory.get("known", {}).get(path, {})
        return version if version in known and known[version].keys() == set(names) else None

    def payload(self, client: str) -> bytes:
        """Return the packed request for a client.

        Raises:
            ProtocolError: a part cannot be encoded.
        """
        parts, down = self._parts(client), self._side.coding.down
        originals = groups(parts)
        entries: dict[str, Any] = {}
        received: dict[str, _Step] = {}

        def one(group: Group) -> Tensors:
            assert down is not None
            whole = (group.path, id(originals[group.path]))
            if is_exact(down):
                entries[group.path] = self._exactly(down, group, whole)
                return group.rest
            held = self._held(client, group.path, group.coded)
            step = self._step(down, group, whole, held or self._most.get(whole))
            received[group.path] = step
            entries[group.path] = step.entry if held else {"version": step.version}
            return group.rest if held else self._form.joined(group.rest, step.tensors)

        rests = parts if down is None else code_groups(parts, self._form, one)
        self._sent[client], self._received[client] = originals, received
        about = {"order": dict(self._side.orders.get(client, {})), "parts": entries}
        about = {key: value for key, value in about.items() if value}
        return self._pack(rests | ({KEY: about} if about else {}))

    def _pack(self, message: dict[str, Any]) -> bytes:
        """Pack a message; where clients differ in nothing but their orders and versions, once."""
        if self._each is not None:
            return pack(message)
        about = message.get(KEY, {})
        versions = {
            path: ["data" in entry, entry.get("version")]
            for path, entry in about.get("parts", {}).items()
        }
        key = json.dumps([about.get("order"), versions])
        if key not in self._packed:
            self._packed[key] = pack(message)
        return self._packed[key]

    def _exactly(self, down: Codec, group: Group, whole: Hashable) -> dict[str, Any]:
        """Return the entry with a group's numbers as they are, made once for all clients."""
        if whole not in self._steps:
            data = down.encode(group.coded, self._rng(group.path), {}).data
            entry = {"names": self._form.mask(group.coded), **as_content(data)}
            self._steps[whole] = _Step("", group.coded, entry)
        return self._steps[whole].entry or {}

    def _step(self, down: Codec, group: Group, whole: Hashable, base: str | None) -> _Step:
        """Return how a group goes on from a version, made once for all who hold it."""
        key = (whole, base)
        if key in self._steps:
            return self._steps[key]
        version = "-".join(map(str, (*self._place, len(self._steps))))
        now, entry = group.coded, None
        known = self._side.memory.setdefault("known", {}).setdefault(group.path, {})
        if base is not None:
            before = self._form.aligned(known[base], list(now))
            target = now.map(torch.sub, before)
            encoded = down.encode(target, self._rng(group.path, base), {})
            now = before.map(torch.add, encoded.decoded)
            mask = self._form.mask(now)
            entry = {"names": mask, "base": base, "version": version, **as_content(encoded.data)}
        known[version] = now
        self._steps[key] = _Step(version, now, entry)
        return self._steps[key]

    def _rng(self, *path: str) -> torch.Generator:
        return generator(self._side.seed, "codec", "down", *self._place, *path)

    def reply(self, client: str, parts: Mapping[str, Any], coded: Any) -> dict[str, Any]:
        """Return the parts of a client's reply, decoded.

        Args:
            client: who sent it.
            parts: those that are not coded.
            coded: the entries of those that are, not trusted.

        Raises:
            ProtocolError: they are damaged.
        """
        found: dict[str, Any] = decode_groups(
            parts, coded, lambda path, rest, entry: self._whole(client, path, rest, entry)
        )
        return found

    def _whole(self, client: str, path: str, rest: Tensors, entry: Mapping[str, Any]) -> Tensors:
        """Decode one group of a reply."""
        form, names = self._form, self._form.unmask(entry["names"])
        if "data" in entry:
            value = decode(self._side.coding.up, form, entry)
            if value.keys() & rest.keys():
                raise ValueError(names)
        else:
            value = form.aligned(rest.select(form.codable(rest)), names)
        base = entry.get("base")
        if base is None:
            return form.joined(rest, value)
        group = self._sent[client][base]
        sent = form.aligned(group.select(form.codable(group)), names)
        step = self._received[client].get(base)
        received = form.aligned(step.tensors, names) if step else sent
        if not entry.get("whole"):
            value = value.map(torch.add, sent if origin(path, base) else received)
        elif step is not None and step.entry is not None:
            value = value.map(torch.add, sent.map(torch.sub, received))
        return form.joined(rest, value)

    def done(self, client: str, reply: Mapping[str, Any]) -> None:
        """Note that a client has answered, and what it holds now."""
        self._side.note(client, reply)
        received = self._received.pop(client)
        if received:
            held = self._side.memory.setdefault("held", {}).setdefault(client, {})
            held |= {path: step.version for path, step in received.items()}
        del self._sent[client]

    def failed(self, client: str) -> None:
        """Note that a client has not answered."""
        self._side.forget(client)
        self._received.pop(client, None)
        self._sent.pop(client, None)
