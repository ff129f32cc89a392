"""The parts of messages that stand for what is averaged, and the layout of a masked part."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    """Masked parts: the digest of their roster, the masked integers, and what no mask can hide.

    ``{"roster": "...", "sum": Tensors, "rest": {part: Tensors}}``; ``sum`` holds one vector named
    "sum". Its length, its type and ``rest`` are checked by `Layouts.check`, which knows the parts.
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
        rest = value["rest"]
        if not isinstance(rest, Mapping) or not all(isinstance(t, Tensors) for t in rest.values()):
            raise ProtocolError("expected tensors of every part as the rest")


PARTS: Mapping[str, PartSchema] = MappingProxyType({KEY: PublicKey(), MASKED: MaskedPart()})
"""The schemas of both."""


class Layouts:
    """The order of several parts' numbers in the vector that is masked; both ends make the same.

    Args:
        names: the parts' names.
        sends: the schemas of the algorithm's parts.
        expected: the model and its roles.

    Raises:
        ProtocolError: one is not a fixed group of the model's tensors.
    """

    def __init__(
        self, names: Iterable[str], sends: Mapping[str, PartSchema], expected: Expected
    ) -> None:
        self._layouts = {name: Layout(name, sends.get(name), expected) for name in names}
        self.count = sum(layout.count for layout in self._layouts.values())

        self._rest = {name: one for name, one in self._layouts.items() if one.rest}

    def rest(self, parts: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Return what leaves without a mask, of those parts that have such tensors.

        Args:
            parts: the parts, checked.
        """
        return {name: parts[name].select(one.rest) for name, one in self._rest.items()}

    def flat(self, parts: Mapping[str, Tensors]) -> torch.Tensor:
        """Return the numbers to mask in one vector of float64.

        Args:
            parts: the parts, checked.
        """
        return torch.cat([one.flat(parts[name]) for name, one in self._layouts.items()])

    def unflatten(self, numbers: torch.Tensor, rest: Mapping[str, Tensors]) -> dict[str, Tensors]:
        """Return the parts from a vector and the rest, each tied as the model's tensors are.

        Args:
            numbers: what `flat` returns.
            rest: what `rest` returns.
        """
        pieces = torch.split(numbers, [layout.count for layout in self._layouts.values()])
        return {
            name: layout.unflatten(piece, rest.get(name, Tensors()))
            for (name, layout), piece in zip(self._layouts.items(), pieces, strict=True)
        }

    def check(self, value: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Check masked parts that meet `MaskedPart`.

        Args:
            value: the parts.
            dtype: the type of the integers, signed, as messages hold them.

        Raises:
            ProtocolError: they are not as these layouts demand.
        """
        vector, rest = value["sum"]["sum"], value["rest"]
        if vector.dtype != dtype or vector.shape != (self.count + 1,):
            raise ProtocolError(
                f"the masked sum is {tuple(vector.shape)} {vector.dtype}, expected "
                f"({self.count + 1},) {dtype}"
            )
        if not rest:  # of a site of weight 0
            return
        if rest.keys() != self._rest.keys():
            raise ProtocolError(f"what is not masked is of {short(sorted(rest))}")
        for name, layout in self._rest.items():
            layout.check_rest(rest[name])


class Layout:
    """The order of a part's numbers in the vector that is masked.

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

    def check_rest(self, rest: Tensors) -> None:
        """Check the tensors that are not masked.

        Args:
            rest: the tensors.

        Raises:
            ProtocolError: they are not those of this layout.
        """
        require_same_names(self.model.select(self.rest), rest)
        self._schema.check(rest, self._expected)

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
