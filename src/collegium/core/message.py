"""Messages between sites and server, written as safetensors and JSON, never pickle.

`pack` writes any nesting of dictionaries, lists, plain values and `Tensors` as one safetensors file
whose metadata holds the nesting as JSON. Equal values give equal bytes. Names that share one tensor
(tied weights) are stored once and come back tied.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import safetensors

from collegium.core.lazy import torch
from collegium.core.tensors import Tensors, identity, raw_bytes
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor

MARK = "$tensors"
"""Key under which the nesting refers to a group of tensors.

No dictionary of a message may use it.
"""


HELD_KEY = "$held"
"""The key of a request under which a site gets the tensors that later messages leave out."""

_EQUAL, _ZERO = -1, -2
"""In the place of a tensor's index: that it is the one held, or zero in its shape."""


class FaultyReply(ProtocolError):  # noqa: N818  (the field's own names read better so)
    """A reply that was accepted turns out to be of no use; its sender can be left out.

    Args:
        text: what is wrong with it.
        client: its sender; empty if it is no reply of a client.
    """

    def __init__(self, text: str, client: str) -> None:
        super().__init__(text)
        self.client = client


class NotHeldError(ProtocolError):
    """A message leaves out tensors that its receiver does not hold."""


class Held:
    """Tensors that both ends of a message hold, so that it leaves them out: what nobody trains.

    A tensor of one of their names is left out where it is equal to the one held, or zero, as its
    update is; any other is sent.

    Attributes:
        tensors: the tensors, on the CPU.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors.map(lambda tensor: tensor.detach().to("cpu"))

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the tensors, by which both ends know that they hold the same."""
        return hashlib.sha256(pack(self.tensors)).hexdigest()

    def rest(self, group: Tensors) -> Tensors:
        """Return the tensors of a group that a message holds."""
        return Tensors((name, t) for name, t in group.items() if self.mark(name, t) is None)

    def mark(self, name: str, tensor: Tensor) -> int | None:
        """Return what stands for a tensor in a message; None if the tensor itself does.

        Args:
            name: its name.
            tensor: the tensor, on any device.
        """
        own = self.tensors.get(name)
        if own is None or tensor.shape != own.shape or tensor.dtype != own.dtype:
            return None
        if torch.equal(tensor.detach().to("cpu"), own):
            return _EQUAL
        return None if tensor.any() else _ZERO

    def restore(self, name: str, mark: int) -> Tensor:
        """Return the tensor for which a mark stands.

        Args:
            name: its name.
            mark: see `mark`.

        Raises:
            KeyError: there is no such tensor.
        """
        own = self.tensors[name]
        return own if mark == _EQUAL else torch.zeros_like(own)


def pack(value: Any, held: Held | None = None) -> bytes:
    """Return ``value`` as bytes.

    Args:
        value: `Tensors`, None, bool, int, float, str, or lists, tuples and string-keyed
            dictionaries of these.
        held: what the receiver holds, which is left out; None: all is written.

    Raises:
        ProtocolError: something else is in it, or numbers of a type without a name in the format.
    """
    collector = _TensorCollector(held)
    nesting = json.dumps(collector.replace(value), separators=(",", ":"))
    about = {"nesting": nesting, **({"held": held.digest} if held else {})}
    return _written(collector.tensors, about)


_TYPES = {
    "uint64": "U64", "int64": "I64", "float64": "F64", "complex64": "C64", "float32": "F32",
    "uint32": "U32", "int32": "I32", "bfloat16": "BF16", "float16": "F16", "uint16": "U16",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""The types of numbers in the order in which a file holds them, and their names there."""


def _written(tensors: Mapping[str, Tensor], about: Mapping[str, str]) -> bytes:
    """Return the bytes that `safetensors.torch.save` writes, which takes twice their memory."""
    codes = {getattr(torch, name): code for name, code in _TYPES.items()}
    ranks = {dtype: rank for rank, dtype in enumerate(codes)}
    unknown = next((t.dtype for t in tensors.values() if t.dtype not in codes), None)
    if unknown is not None:
        raise ProtocolError(f"a message cannot hold numbers of type {unknown}")
    header: dict[str, Any] = {"__metadata__": about}
    data, end = [], 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (ranks[item[1].dtype], item[0])):
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entry = {"dtype": codes[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [begin, end]}
        data.append(raw_bytes(tensor))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *data])


class _TensorCollector:
    """Collects the tensors of a value, and replaces them by their indices."""

    def __init__(self, held: Held | None = None) -> None:
        self._held = held
        self.tensors: dict[str, Tensor] = {}
        self._indices: dict[Hashable, int] = {}
        self._alive: list[Tensor] = []  # an index is found by the address of its tensor

    def replace(self, item: Any) -> Any:
        """Return ``item`` with its tensors replaced by their indices."""
        if isinstance(item, Tensors):
            return {MARK: [[name, self._index(name, tensor)] for name, tensor in item.items()]}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        if isinstance(item, list | tuple):
            return [self.replace(entry) for entry in item]
        if isinstance(item, Mapping) and all(isinstance(key, str) and key != MARK for key in item):
            return {key: self.replace(entry) for key, entry in item.items()}
        raise ProtocolError(
            f"a message cannot hold a {type(item).__name__}; put tensors into Tensors and the rest "
            f"into plain values"
        )

    def _index(self, name: str, tensor: Tensor) -> int:
        mark = self._held.mark(name, tensor) if self._held else None
        if mark is not None:
            return mark
        key = identity(tensor)
        if key not in self._indices:
            self._indices[key] = len(self._indices)
            self._alive.append(tensor)
            self.tensors[str(self._indices[key])] = tensor.detach().to("cpu").contiguous()
        return self._indices[key]


def unpack(data: bytes, device: str | torch.device = "cpu", held: Held | None = None) -> Any:
    """Return the value that `pack` wrote.

    Args:
        data: the bytes.
        device: where the tensors go.
        held: what the message may leave out.

    Raises:
        ProtocolError: the bytes are damaged or not written by `pack`.
        NotHeldError: something else than ``held`` was left out.
    """
    from safetensors.torch import load

    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = header["__metadata__"]
        nesting, digest = json.loads(about["nesting"]), about.get("held")
        if digest is not None and (held is None or held.digest != digest):
            raise NotHeldError("the message leaves out tensors that are not held here; send them")
        tensors = {name: t.to(device) for name, t in load(data).items()}
        return _restore(nesting, tensors, held, device)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProtocolError(
            f"{len(data)} bytes are damaged or not a message ({type(error).__name__})"
        ) from error


def _restore(
    item: Any, tensors: Mapping[str, Tensor], held: Held | None, device: str | torch.device
) -> Any:
    """Return a nesting with its indices replaced by tensors."""
    if isinstance(item, list):
        return [_restore(entry, tensors, held, device) for entry in item]
    if not isinstance(item, dict):
        return item
    if MARK in item:
        return Tensors(
            (name, held.restore(name, index).to(device))
            if held is not None and index in (_EQUAL, _ZERO)
            else (name, tensors[str(index)])
            for name, index in item[MARK]
        )
    return {key: _restore(entry, tensors, held, device) for key, entry in item.items()}


@dataclass(frozen=True)
class Message(Mapping[str, Any]):
    """Named parts sent between server and client.

    Attributes:
        parts: by name `Tensors`, a plain value, or a list or dictionary of these.
        sender: the sender, named in errors.
        client: the client that sent it; empty for what a server sends.
    """

    parts: Mapping[str, Any] = field(default_factory=dict)
    sender: str = ""
    client: str = ""

    @staticmethod
    def of(**parts: Any) -> Message:
        """Return a message with these parts."""
        return Message(parts)

    def __getitem__(self, name: str) -> Any:
        if name not in self.parts:
            has = ", ".join(self.parts) or "nothing"
            where = self.sender or "the message"
            raise FaultyReply(f"{where}: no part {name!r} (has: {has})", self.client)
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield path and tensor of every distinct tensor anywhere in a value.

    Args:
        value: see `pack`.
        path: path of the value itself.
    """
    if isinstance(value, Tensors):
        for name, tensor in value.distinct().items():
            yield f"{path}.{name}" if path else name, tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{index}]")
