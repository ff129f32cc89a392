"""Which codecs a run uses, and the groups of tensors in its messages that they code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collegium.compression.base import Codec
from collegium.compression.identity import Identity
from collegium.compression.session.layout import Form
from collegium.core.message import pack
from collegium.core.tensors import Tensors
from collegium.errors import ProtocolError

KEY = "$codec"
"""Where a stored state and a coded request keep what belongs to the codecs."""

AGAIN = pack({"error": {"kind": "ProtocolError", "text": "the site lost what it held; send all"}})
"""The answer of a client that does not hold what a request was encoded against."""


@dataclass(frozen=True)
class Coding:
    """The codecs of a run; without any, messages are what they are without this package.

    Attributes:
        up: codes what clients send.
        down: codes what the server sends.
    """

    up: Codec | None = None
    down: Codec | None = None

    def __bool__(self) -> bool:
        return self.up is not None or self.down is not None

    def describe(self) -> dict[str, Any]:
        """Return the codecs' classes and hyper-parameters as plain values."""
        sides = {"up": self.up, "down": self.down}
        return {
            side: {"name": type(codec).__name__, **codec.hyperparameters()}
            for side, codec in sides.items()
            if codec is not None
        }


NO_CODECS = Coding()


class Group(NamedTuple):
    """What a codec takes of a group of tensors in a message, and what it leaves.

    Attributes:
        path: where it stands, such as ``model`` or ``models/0``.
        coded: the tensors that a codec takes, on the CPU.
        rest: those that travel as they are.
    """

    path: str
    coded: Tensors
    rest: Tensors


def is_exact(codec: Codec | None) -> bool:
    """Whether numbers travel as they are, so that nothing is lost and differences only round."""
    return codec is None or isinstance(codec, Identity)


def origin(path: str, base: str | None) -> str | None:
    """Return ``base`` if what stands at ``path`` was made from it; None: it is merely near.

    It was where both have one name, or where the base is one of a list or dictionary of models from
    which the client chose.
    """
    return base if base is not None and (base == path or "/" in base) else None


def groups(value: Any) -> dict[str, Tensors]:
    """Return the groups of tensors anywhere in ``value`` by path.

    Those below a key with a slash are left out.
    """
    found = {}

    def note(path: str | None, group: Tensors) -> Tensors:
        if path is not None:
            found[path] = group
        return group

    each_group(value, note)
    return found


def each_group(value: Any, fn: Callable[[str | None, Tensors], Tensors]) -> Any:
    """Return ``value`` with every group replaced by what ``fn`` makes of its path and itself."""
    return _walk(value, fn, "")


def on_device(parts: Any, device: torch.device) -> Any:
    """Return parts of a message with their tensors on a device."""
    return each_group(parts, lambda _, group: group.map(lambda tensor: tensor.to(device)))


def _walk(value: Any, fn: Callable[[str | None, Tensors], Tensors], path: str | None) -> Any:
    def below(key: str) -> str | None:
        return None if path is None or "/" in key else f"{path}/{key}" if path else key

    if isinstance(value, Tensors):
        return fn(path, value)
    if isinstance(value, Mapping):
        return {key: _walk(item, fn, below(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_walk(item, fn, below(str(index))) for index, item in enumerate(value)]
    return value


def code_groups(parts: Mapping[str, Any], form: Form, fn: Callable[[Group], Tensors]) -> Any:
    """Return ``parts`` with ``fn`` applied to every group in which a codec takes something.

    Raises:
        ProtocolError: ``fn`` did; the sentence names the part.
    """

    def one(path: str | None, group: Tensors) -> Tensors:
        names = form.codable(group) if path is not None else []
        if path is None or not names:
            return group
        found = Group(path, form.aligned(group, names), group.without(names))
        return _for_part(path, lambda: fn(found))

    return each_group(parts, one)


def decode_groups(
    parts: Mapping[str, Any], entries: Any, fn: Callable[[str, Tensors, Mapping[str, Any]], Tensors]
) -> Any:
    """Return ``parts`` with ``fn`` applied to every group that has an entry.

    Raises:
        ProtocolError: there is an entry without a group, or it is damaged.
    """
    if not isinstance(entries, dict) or not entries.keys() <= groups(parts).keys():
        raise ProtocolError("what is coded is not what the message holds")

    def one(path: str | None, rest: Tensors) -> Tensors:
        if path is None or path not in entries:
            return rest
        try:
            return _for_part(path, lambda: fn(path, rest, entries[path]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"part {path!r}: its coded form is damaged") from error

    return each_group(parts, one)


def _for_part(path: str, work: Callable[[], Tensors]) -> Tensors:
    """Do something with a part; a `ProtocolError` is raised again with the part's name."""
    try:
        return work()
    except ProtocolError as error:
        raise type(error)(f"part {path!r}: {error}") from error


def as_content(data: bytes) -> dict[str, Tensors]:
    """Return bytes as an entry holds them."""
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return {"data": Tensors({"": content.to(torch.uint8)})}


def decode(codec: Codec | None, form: Form, entry: Mapping[str, Any]) -> Tensors:
    """Return the tensors that an entry stands for.

    Raises:
        ProtocolError: the bytes are damaged, or this side has no codec.
        ValueError: the entry is damaged.
    """
    if codec is None:
        raise ProtocolError("it is coded, and this side has no codec; use the same on both sides")
    content = entry["data"][""]
    if content.dtype != torch.uint8 or content.ndim != 1:
        raise ValueError(content.dtype)
    return codec.decode(content.cpu().numpy().tobytes(), form.like(form.unmask(entry["names"])))
