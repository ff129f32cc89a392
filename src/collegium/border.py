"""What may leave a site and what a server accepts: an algorithm declares it part by part.

``sends`` of an algorithm maps the name of each part that its clients send to one of the kinds
below. The site checks its own replies against its policy before they leave; the server checks every
reply against the kind before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from collegium.errors import ProtocolError
from collegium.models.parts import ModelParts
from collegium.tensors import Tensors, require_same_names


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
    """Named finite numbers, such as the mean training loss."""

    opt_in: bool = False
    says: str = "numbers"

    def check(self, value: Any, expected: Expected) -> None:
        """Check that all are finite numbers."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"expected named numbers, found {type(value).__name__}")
        for name, number in value.items():
            if not isinstance(number, int | float) or not math.isfinite(number):
                raise ProtocolError(f"{name} is {number!r}, not a finite number")


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
