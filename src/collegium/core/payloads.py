"""What may leave a site and what a server accepts: an algorithm declares it part by part.

``sends`` of an algorithm maps the name of each part that its clients send to one of the kinds
below. The site checks its own replies against its policy before they leave; the server checks every
reply against the kind before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from collegium.core.model_parts import ModelParts
from collegium.core.tensors import Tensors, require_same_names
from collegium.errors import ProtocolError


@dataclass(frozen=True)
class Expected:
    """What a reply is held against: the model's tensors, their roles, the algorithm's fields."""

    model: Tensors
    parts: ModelParts
    fields: Mapping[str, Any]


class Part(Protocol):
    """A kind of content that a client may send."""

    @property
    def opt_in(self) -> bool:
        """Whether a site sends it only where its policy names it."""

    @property
    def says(self) -> str:
        """What it is, in a few words, for `collegium list` and the report."""

    def check(self, value: Any, expected: Expected) -> None:
        """Raise a `ProtocolError` that says what is wrong with ``value``."""


@dataclass(frozen=True)
class ModelPart:
    """Tensors with the names, shapes and dtypes of the model, or of a part of it.

    Attributes:
        only: a role (a field of `ModelParts`) to which the tensors are limited; None: the whole
            model.
        without: a role that is left out.
        opt_in: whether a site's policy must name it.
    """

    only: str | None = None
    without: str | None = None
    opt_in: bool = False

    @property
    def says(self) -> str:
        """What it is, in a few words."""
        which = f"the model's {self.only} tensors" if self.only else "the model"
        return f"{which} without {self.without}" if self.without else which

    def names(self, parts: ModelParts) -> frozenset[str]:
        """Return the names of the tensors that belong to it."""
        names: frozenset[str] = getattr(parts, self.only or "names")
        return names - getattr(parts, self.without) if self.without else names

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes, dtypes and finiteness."""
        if not isinstance(value, Tensors):
            raise ProtocolError(f"expected tensors, found {type(value).__name__}")
        reference = expected.model.select(self.names(expected.parts))
        require_same_names(reference, value)
        for name, tensor in value.items():
            wanted = reference[name]
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ProtocolError(
                    f"{name} is {found}, expected {tuple(wanted.shape)} {wanted.dtype}"
                )
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise ProtocolError(f"{name} holds NaN or infinite values")


@dataclass(frozen=True)
class Count:
    """A whole number that is not negative, such as the number of training examples."""

    opt_in: bool = False
    says: str = "a count"

    def check(self, value: Any, expected: Expected) -> None:
        """Check type and sign."""
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ProtocolError(f"expected a count, found {value!r}")


@dataclass(frozen=True)
class Index:
    """A choice: a whole number from 0 up to, not including, the algorithm's field ``below``."""

    below: str
    opt_in: bool = False
    says: str = "a choice"

    def check(self, value: Any, expected: Expected) -> None:
        """Check type and range."""
        limit = expected.fields[self.below]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise ProtocolError(
                f"expected a whole number below {limit} ({self.below}), found {value!r}"
            )


@dataclass(frozen=True)
class Numbers:
    """Named finite numbers, such as the mean training loss.

    Attributes:
        opt_in: whether a site's policy must name it.
        says: what it is.
        record: whether the results hold them, round by round, as ``part/name``.
    """

    opt_in: bool = False
    says: str = "numbers"
    record: bool = False

    def check(self, value: Any, expected: Expected) -> None:
        """Check that all are finite numbers."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"expected named numbers, found {type(value).__name__}")
        for name, number in value.items():
            if not isinstance(number, int | float) or not math.isfinite(number):
                raise ProtocolError(f"{name} is {number!r}, not a finite number")


@dataclass(frozen=True)
class Statistics:
    """Numbers about the cases of a site, in columns, such as the volume of each label.

    ``{"unit": "mL", "cases": 12, "columns": {"1": [...]}}``. A column holds one number per case, or
    a summary of them: named lists of numbers, such as edges and counts.
    """

    opt_in: bool = False
    says: str = "numbers about the cases"

    def check(self, value: Any, expected: Expected) -> None:
        """Check the shape of the table, and that its numbers are finite."""
        if not isinstance(value, Mapping) or value.keys() != {"unit", "cases", "columns"}:
            raise ProtocolError("expected a unit, a number of cases and columns")
        unit, cases, columns = value["unit"], value["cases"], value["columns"]
        if not isinstance(unit, str) or not isinstance(columns, Mapping):
            raise ProtocolError("expected a text as unit and columns by name")
        Count().check(cases, expected)
        for name, column in columns.items():
            if isinstance(column, list) and len(column) != cases:
                raise ProtocolError(f"column {name} has {len(column)} numbers for {cases} cases")
            lists = column.values() if isinstance(column, Mapping) else [column]
            if not all(isinstance(numbers, list) for numbers in lists):
                raise ProtocolError(f"column {name} is neither a list of numbers nor a summary")
            if not all(_is_finite(number) for numbers in lists for number in numbers):
                raise ProtocolError(f"column {name} holds something else than finite numbers")


@dataclass(frozen=True)
class Features:
    """One floating-point tensor of any shape, finite: an average of images, say, or embeddings."""

    opt_in: bool = False
    says: str = "features of the images"

    def check(self, value: Any, expected: Expected) -> None:
        """Check that it is one finite floating-point tensor."""
        if not isinstance(value, Tensors) or len(value) != 1:
            raise ProtocolError(f"expected one tensor, found {value!r}")
        for name, tensor in value.items():
            if not tensor.is_floating_point():
                raise ProtocolError(f"{name} is {tensor.dtype}, not floating-point")
            if not torch.isfinite(tensor).all():
                raise ProtocolError(f"{name} holds NaN or infinite values")


@dataclass(frozen=True)
class Spectra:
    """Amplitudes of the lowest frequencies of images, and the size of these.

    ``windows`` (images, channels, 2b + 1, ...), floating-point, finite and not negative; ``size``
    int64, the pixels along each of the axes transformed.
    """

    opt_in: bool = False
    says: str = "amplitudes of the lowest frequencies of training images"

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes and values."""
        if not isinstance(value, Tensors) or value.keys() != {"windows", "size"}:
            raise ProtocolError("expected tensors named windows and size")
        windows, size = value["windows"], value["size"]
        sides = set(windows.shape[2:])
        square = windows.ndim > 2 and len(sides) == 1 and min(sides) % 2 == 1
        if not windows.is_floating_point() or not square:
            raise ProtocolError(
                f"windows is {tuple(windows.shape)} {windows.dtype}, not images, channels and "
                f"sides of one odd length in floating-point numbers"
            )
        if size.dtype != torch.int64 or size.shape != (windows.ndim - 2,):
            raise ProtocolError("size does not give the pixels along each axis")
        if not torch.isfinite(windows).all() or (windows < 0).any():
            raise ProtocolError("windows holds NaN, infinite or negative values")


@dataclass(frozen=True)
class Bits:
    """One bit for each element of the trainable parameters, tied weights once.

    ``bits``, uint8, eight to a byte, the first in its highest bit; the last byte ends in zeros.
    """

    opt_in: bool = False
    says: str = "one bit for each parameter"

    def check(self, value: Any, expected: Expected) -> None:
        """Check name, type, length and the bits that fill the last byte."""
        if not isinstance(value, Tensors) or value.keys() != {"bits"}:
            raise ProtocolError("expected a tensor named bits")
        bits, count = value["bits"], expected.model.select(expected.parts.trainable).numel()
        length = -(-count // 8)
        if bits.dtype != torch.uint8 or bits.shape != (length,):
            raise ProtocolError(
                f"bits is {tuple(bits.shape)} {bits.dtype}, expected ({length},) torch.uint8 for "
                f"{count} parameters"
            )
        if count % 8 and int(bits[-1]) % (1 << (8 - count % 8)):
            raise ProtocolError(f"bits marks more than the {count} parameters there are")


def may_leave(
    name: str,
    *,
    opt_in: bool,
    allow: Collection[str] | None,
    forbid: Collection[str],
    share: Collection[str] = (),
) -> bool:
    """Return whether a policy lets the part ``name`` out."""
    if name in forbid:
        return False
    return name in share or (name in allow if allow is not None else not opt_in)


def recorded(sends: Mapping[str, Part], reply: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a checked reply that the results hold, as ``part/name``."""
    return {
        f"{part}/{name}": float(number)
        for part, value in reply.items()
        if isinstance(kind := sends[part], Numbers) and kind.record
        for name, number in value.items()
    }


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


@dataclass(frozen=True)
class Scores:
    """Scores of cases under pseudonyms, e.g. ``{"global": [{"case": "c001", "dice": 0.8}]}``."""

    opt_in: bool = False
    says: str = "scores of cases, under pseudonyms"

    def check(self, value: Any, expected: Expected) -> None:
        """Check the shape of the table; an undefined score is None."""
        if not isinstance(value, Mapping) or not all(
            isinstance(rows, list) for rows in value.values()
        ):
            raise ProtocolError("expected lists of case scores by kind of model")
        for rows in value.values():
            for row in rows:
                if not isinstance(row, Mapping):
                    raise ProtocolError(f"a row of scores is a {type(row).__name__}")
                numbers = [v for k, v in row.items() if k not in ("case", "patient")]
                if not all(
                    v is None or (isinstance(v, int | float) and math.isfinite(v)) for v in numbers
                ):
                    raise ProtocolError("a score is neither a finite number nor undefined")
