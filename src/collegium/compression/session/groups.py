"""The codecs of a run, and the groups of tensors in its messages that they code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collegium.compression.base import Codec
from collegium.compression.identity import Identity
from collegium.compression.session.layout import ModelLayout
from collegium.core.algorithm import Algorithm
from collegium.core.message import Held, pack
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, ProtocolError

CODEC_KEY = "$codec"
"""The key of a stored state and of a coded request under which the codecs' own data are.

In a request these are the options of the client ("order") and the coded groups by path ("parts").
"""

RESEND_REQUEST = pack(
    {"error": {"kind": "ProtocolError", "text": "the site lost what it held; send all"}}
)
"""The answer of a client that does not hold the version against which a request was encoded."""


@dataclass(frozen=True)
class Codecs:
    """The codecs of a run; false if there is none, so that messages are sent as they are.

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


NO_CODECS = Codecs()


def check_codecs(algorithm: Algorithm, codecs: Codecs) -> None:
    """Check that a mean that ranks the sites' numbers does not meet a codec that leaves most out.

    Of a number that one site sends and the others leave out the median is zero, and the site's
    codec, which takes it for delivered, does not send it again.

    Args:
        algorithm: the algorithm.
        codecs: the codecs with which it is to run.

    Raises:
        ConfigError: it does.
    """
    up = codecs.up
    if up is not None and up.is_sparse and algorithm.ranks_coordinates:
        raise ConfigError(
            f"the codec {type(up).__name__} leaves out most numbers of what a site sends, and of "
            f"those the median of the sites is that nothing has changed; code what sites send with "
            f"half, or choose the rule norm_bound"
        )


class SplitGroup(NamedTuple):
    """A group of tensors in a message, split into the coded ones and the rest.

    Attributes:
        path: its place in the message, such as ``model`` or ``models/0``.
        coded: the tensors that a codec takes, on the CPU.
        rest: those that are sent as they are.
    """

    path: str
    coded: Tensors
    rest: Tensors


def is_lossless(codec: Codec | None) -> bool:
    """Return whether numbers are sent as they are, so that differences would only add rounding."""
    return codec is None or isinstance(codec, Identity)


def origin(path: str, base: str | None) -> str | None:
    """Return the path of the group from which another was made; None if it is only near.

    It was made from it if both have one name, or if the base is one of a list or dictionary of
    models from which the client chose.

    Args:
        path: of the group in a reply.
        base: the path of the group in the request from which its difference is taken, if any.
    """
    return base if base is not None and (base == path or "/" in base) else None


def tensor_groups(value: Any) -> dict[str, Tensors]:
    """Return the groups of tensors anywhere in ``value`` by path.

    Those below a key with a slash are omitted.
    """
    groups = {}

    def collect(path: str | None, group: Tensors) -> Tensors:
        if path is not None:
            groups[path] = group
        return group

    map_groups(value, collect)
    return groups


def on_device(parts: Any, device: torch.device) -> Any:
    """Return parts of a message with their tensors on a device.

    Args:
        parts: the parts.
        device: the device.
    """
    return map_groups(parts, lambda _, group: group.map(lambda tensor: tensor.to(device)))


def leaving_parts(parts: Mapping[str, Any], held: Held | None) -> dict[str, Any]:
    """Return parts of a message without the tensors that it leaves out.

    Args:
        parts: the parts.
        held: what the receiver holds; None: nothing is left out.
    """
    if held is None:
        return dict(parts)
    return dict(map_groups(parts, lambda _, group: held.rest(group)))


def map_groups(
    value: Any, fn: Callable[[str | None, Tensors], Tensors], path: str | None = ""
) -> Any:
    """Return a part of a message with every group of tensors replaced.

    Args:
        value: the part.
        fn: returns the new group, given the path and the group; the path is None below a key with a
            slash.
        path: path of the value itself.
    """

    def below(key: str) -> str | None:
        return None if path is None or "/" in key else f"{path}/{key}" if path else key

    if isinstance(value, Tensors):
        return fn(path, value)
    if isinstance(value, Mapping):
        return {key: map_groups(item, fn, below(str(key))) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_groups(item, fn, below(str(index))) for index, item in enumerate(value)]
    return value


def encode_groups(
    parts: Mapping[str, Any], layout: ModelLayout, encode: Callable[[SplitGroup], Tensors]
) -> dict[str, Any]:
    """Return the parts of a message with every group replaced in which a codec takes something.

    Args:
        parts: the parts.
        layout: of the model.
        encode: returns the tensors of a group that are sent as they are.

    Raises:
        ProtocolError: ``encode`` raised it; the sentence names the part.
    """

    def encode_one(path: str | None, group: Tensors) -> Tensors:
        names = layout.codable(group) if path is not None else []
        if path is None or not names:
            return group
        with _naming_part(path):
            return encode(SplitGroup(path, layout.align(group, names), group.without(names)))

    return dict(map_groups(parts, encode_one))


def decode_groups(
    parts: Mapping[str, Any],
    entries: Any,
    decode: Callable[[str, Tensors, Mapping[str, Any]], Tensors],
) -> dict[str, Any]:
    """Return the parts of a message with every group replaced that has an entry.

    Args:
        parts: the parts without what is coded.
        entries: the coded groups by path, not trusted.
        decode: returns the whole group, given its path, its tensors that are not coded, and its
            entry.

    Raises:
        ProtocolError: there is an entry without a group, or it is damaged.
    """
    if not isinstance(entries, dict) or not entries.keys() <= tensor_groups(parts).keys():
        raise ProtocolError("what is coded is not what the message holds")

    def decode_one(path: str | None, rest: Tensors) -> Tensors:
        if path is None or path not in entries:
            return rest
        try:
            with _naming_part(path):
                return decode(path, rest, entries[path])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolError(f"part {path!r}: its coded form is damaged") from error

    return dict(map_groups(parts, decode_one))


@contextmanager
def _naming_part(path: str) -> Iterator[None]:
    """Raise a `ProtocolError` from within again, with the name of the part."""
    try:
        yield
    except ProtocolError as error:
        raise type(error)(f"part {path!r}: {error}") from error


def wrap_bytes(data: bytes) -> dict[str, Tensors]:
    """Return encoded bytes in the form in which an entry holds them."""
    content = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)
    return {"data": Tensors({"": content.to(torch.uint8)})}


def decode_entry(codec: Codec | None, layout: ModelLayout, entry: Mapping[str, Any]) -> Tensors:
    """Return the tensors that an entry holds.

    Args:
        codec: the codec of this direction.
        layout: of the model.
        entry: of a coded group, not trusted.

    Raises:
        ProtocolError: the bytes are damaged, or this side has no codec.
        ValueError: the entry is damaged.
    """
    if codec is None:
        raise ProtocolError("it is coded, and this side has no codec; use the same on both sides")
    content = entry["data"][""]
    if content.dtype != torch.uint8 or content.ndim != 1:
        raise ValueError(content.dtype)
    template = layout.template(layout.unmask(entry["names"]))
    return codec.decode(content.cpu().numpy().tobytes(), template)
