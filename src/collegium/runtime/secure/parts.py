"""The parts of messages that stand for what is averaged, and the layout of a masked part."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from collegium.core.lazy import torch
from collegium.core.payloads import Expected, ModelPart, PartSchema
from collegium.core.tensors import Tensors, require_same_names
from collegium.core.text import short
from collegium.errors import ProtocolError

KEY, MASKED = "$key", "$masked"
"""The names of a public key and of a masked part; no algorithm's part has such a name.

The second one is also the method of a request for it.
"""

SIGNED = ("certificate", "signature")
"""The fields of a public key that is signed, beside the key."""

LONGEST = 16_384
"""Characters of a certificate or a signature at most."""

_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class PublicKey:
    """A public key of X25519, in hexadecimal digits, with its signature where there is one.

    ``{"key": "...", "certificate": PEM, "signature": "..."}``; see `Identity.sign`.
    """

    opt_in: bool = False
    description: str = "a public key"

    def check(self, value: Any, expected: Expected) -> None:
        """Check that it looks like one. See `PartSchema.check`."""
        if not isinstance(value, Mapping) or value.keys() not in ({"key"}, {"key", *SIGNED}):
            raise ProtocolError(f"expected a public key, found {short(value)}")
        if not isinstance(value["key"], str) or not _HEX.fullmatch(value["key"]):
            raise ProtocolError(f"expected a public key, found {short(value['key'])}")
        signed = [value[name] for name in SIGNED if name in value]
        if not all(isinstance(text, str) and len(text) <= LONGEST for text in signed):
            raise ProtocolError("a public key comes with no usable signature")


@dataclass(frozen=True)
class MaskedPart:
    """A masked part: the digest of its roster, the masked integers, and what no mask can hide.

    ``{"roster": "...", "sum": Tensors, "rest": Tensors}``; ``sum`` holds one vector named "sum".
    Its length, its type and ``rest`` are checked by `Layout.check`, which knows the part.
    """

    opt_in: bool = False
    description: str = "weight times model, and the weight, under masks"

    def check(self, value: Any, expected: Expected) -> None:
        """Check the form. See `PartSchema.check`."""
        if not isinstance(value, Mapping) or value.keys() != {"roster", "sum", "rest"}:
            raise ProtocolError("expected a roster, a sum and the rest")
        if not isinstance(value["roster"], str) or not _HEX.fullmatch(value["roster"]):
            raise ProtocolError(f"{short(value['roster'])} is no roster")
        if not isinstance(value["sum"], Tensors) or value["sum"].keys() != {"sum"}:
            raise ProtocolError("expected one tensor named sum")
        if not isinstance(value["rest"], Tensors):
            raise ProtocolError("expected tensors as the rest")


PARTS: Mapping[str, PartSchema] = MappingProxyType({KEY: PublicKey(), MASKED: MaskedPart()})
"""The schemas of both."""


class Layout:
    """The order of a part's numbers in the vector that is masked; both ends make the same.

    Integer and boolean buffers, of which a mean keeps the largest, and tensors that nobody trains
    are not in the vector: they leave as they are, or not at all from a site of weight 0, which does
    not count.

    Args:
        name: the part's name.
        schema: its schema.
        expected: the model and its roles.

    Raises:
        ProtocolError: the part is not a fixed group of the model's tensors.
    """

    def __init__(self, name: str, schema: PartSchema | None, expected: Expected) -> None:
        if not isinstance(schema, ModelPart) or schema.some:
            raise ProtocolError(
                f"part {name!r} is no fixed group of the model's tensors, and no other is averaged "
                f"under masks"
            )
        self._schema, self._expected = replace(schema, some=True), expected
        self.model = expected.model.select(schema.names(expected.parts))
        frozen = expected.parts.frozen
        self.masked = [
            n for n, t in self.model.items() if t.is_floating_point() and n not in frozen
        ]
        self.rest = [n for n in self.model if n not in {*self.masked}]
        self.count = sum(self.model[name].numel() for name in self.masked)

    def check(self, value: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Check a masked part that meets `MaskedPart`.

        Args:
            value: the part.
            dtype: the type of its integers, signed, as messages hold them.

        Raises:
            ProtocolError: it is not as this layout demands.
        """
        vector = value["sum"]["sum"]
        if vector.dtype != dtype or vector.shape != (self.count + 1,):
            raise ProtocolError(
                f"the masked sum is {tuple(vector.shape)} {vector.dtype}, expected "
                f"({self.count + 1},) {dtype}"
            )
        if value["rest"]:  # a site of weight 0 leaves it out
            require_same_names(self.model.select(self.rest), value["rest"])
        self._schema.check(value["rest"], self._expected)

    def flat(self, tensors: Tensors) -> torch.Tensor:
        """Return the numbers to mask in one vector of float64.

        Args:
            tensors: the part, checked.
        """
        vectors = [tensors[n].detach().to("cpu", torch.float64).reshape(-1) for n in self.masked]
        return torch.cat(vectors) if vectors else torch.zeros(0, dtype=torch.float64)

    def unflatten(self, numbers: torch.Tensor, rest: Tensors) -> Tensors:
        """Return the part from a vector and the rest, tied as the model's tensors are.

        Args:
            numbers: what `flat` returns.
            rest: the tensors that were not masked.
        """
        sizes = [self.model[name].numel() for name in self.masked]
        pieces = dict(zip(self.masked, torch.split(numbers, sizes), strict=True))
        found = {
            name: pieces[name].to(t.dtype).reshape(t.shape) if name in pieces else rest[name]
            for name, t in self.model.items()
        }
        first = self.model.first_names()
        return Tensors(
            (name, found[first[name]] if torch.equal(found[first[name]], tensor) else tensor)
            for name, tensor in found.items()
        )
