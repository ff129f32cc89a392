"""What crosses the border of a site, written as safetensors and JSON, never pickle.

`pack` writes any nesting of dictionaries, lists, plain values and `Tensors` as one safetensors file
whose metadata holds the nesting as JSON. Equal values give equal bytes. Names that share one tensor
(tied weights) are stored once and come back tied.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from collegium.errors import ProtocolError
from collegium.tensors import Tensors, identity

MARK = "$tensors"
"""Key under which the nesting refers to a group of tensors.

No dictionary of a message may use it.
"""


def pack(value: Any) -> bytes:
    """Return ``value`` as bytes.

    Args:
        value: `Tensors`, None, bool, int, float, str, or lists, tuples and string-keyed
            dictionaries of these.

    Raises:
        ProtocolError: something else is in it.
    """
    places: dict[Hashable, int] = {}
    blobs: dict[str, Tensor] = {}
    kept: list[Tensor] = []  # keeps every tensor alive, since a place is known by its address

    def place(tensor: Tensor) -> int:
        key = identity(tensor)
        if key not in places:
            places[key] = len(places)
            kept.append(tensor)
            blobs[str(places[key])] = _alone(tensor)
        return places[key]

    def nest(item: Any) -> Any:
        if isinstance(item, Tensors):
            return {MARK: [[name, place(tensor)] for name, tensor in item.items()]}
        if item is None or isinstance(item, bool | int | float | str):
            return item
        if isinstance(item, list | tuple):
            return [nest(entry) for entry in item]
        if isinstance(item, Mapping) and all(isinstance(key, str) and key != MARK for key in item):
            return {key: nest(entry) for key, entry in item.items()}
        raise ProtocolError(
            f"a message cannot hold a {type(item).__name__}; put tensors into Tensors and "
            f"the rest into plain values"
        )

    nesting = json.dumps(nest(value), separators=(",", ":"))
    return safetensors.torch.save(blobs, metadata={"nesting": nesting})


def _alone(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU, contiguous, in memory that holds nothing else."""
    own = tensor.detach().to("cpu").contiguous()
    return (
        own if own.untyped_storage().nbytes() == own.numel() * own.element_size() else own.clone()
    )


def unpack(data: bytes, device: str | torch.device = "cpu") -> Any:
    """Return what `pack` wrote, its tensors on ``device``.

    Raises:
        ProtocolError: the bytes are damaged or not ours.
    """
    tensors: dict[str, Tensor] = {}

    def restore(item: Any) -> Any:
        if isinstance(item, list):
            return [restore(entry) for entry in item]
        if not isinstance(item, dict):
            return item
        if MARK in item:
            return Tensors((name, tensors[str(index)]) for name, index in item[MARK])
        return {key: restore(entry) for key, entry in item.items()}

    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        nesting = json.loads(header["__metadata__"]["nesting"])
        for name, tensor in safetensors.torch.load(data).items():
            tensors[name] = tensor.to(device)
        return restore(nesting)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ProtocolError(
            f"{len(data)} bytes are damaged or not a message ({type(error).__name__})"
        ) from error


@dataclass(frozen=True)
class Message(Mapping[str, Any]):
    """Named parts on their way between server and client.

    A part is `Tensors`, a plain value, or a list or dictionary of these.
    """

    parts: Mapping[str, Any] = field(default_factory=dict)
    sender: str = ""

    @staticmethod
    def of(**parts: Any) -> Message:
        """Return a message with these parts."""
        return Message(parts)

    def __getitem__(self, name: str) -> Any:
        if name not in self.parts:
            has = ", ".join(self.parts) or "nothing"
            raise ProtocolError(f"{self.sender or 'the message'}: no part {name!r} (has: {has})")
        return self.parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:
        return name in self.parts


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every distinct tensor anywhere in ``value``."""
    if isinstance(value, Tensors):
        for name, tensor in value.distinct().items():
            yield f"{path}.{name}" if path else name, tensor
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}[{index}]")
