"""Schemas of the parts that clients send: an algorithm declares one for each part.

``sends`` of an algorithm maps the name of each part that its clients send to one of the schemas
below. The site checks its own replies against its policy before they leave; the server checks every
part of a reply against its schema before it is used.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from collegium.core.lazy import torch
from collegium.core.model_parts import ModelParts
from collegium.core.tensors import Tensors, require_same_names
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Expected:
    """The context of a check: the model's tensors, their roles, the algorithm's fields."""

    model: Tensors
    parts: ModelParts
    fields: Mapping[str, Any]


class PartSchema(Protocol):
    """The schema of a part that clients may send."""

    @property
    def opt_in(self) -> bool:
        """Whether a site sends the part only if its policy names it."""

    @property
    def description(self) -> str:
        """A few words on the part, for `collegium list` and the report."""

    def check(self, value: Any, expected: Expected) -> None:
        """Check that a value meets the schema.

        Args:
            value: the part as received.
            expected: the model, its roles and the algorithm's fields.

        Raises:
            ProtocolError: the value does not meet the schema.
        """


@dataclass(frozen=True)
class ModelPart:
    """Tensors with the names, shapes and dtypes of the model, or of a part of it.

    Attributes:
        only: a role (a field of `ModelParts`), or the name of a submodule or tensor wherever it
            stands in the network, such as "lora_A", to which the tensors are limited; None: the
            whole model.
        without: a role or name whose tensors are left out.
        some: whether a reply may leave out any of the tensors.
        opt_in: see `PartSchema.opt_in`.
    """

    only: str | None = None
    without: str | None = None
    opt_in: bool = False
    some: bool = False

    @property
    def description(self) -> str:
        """See `PartSchema.description`."""
        which = f"the model's {self.only} tensors" if self.only else "the model"
        which = f"some of {which}" if self.some else which
        return f"{which} without {self.without}" if self.without else which

    def names(self, parts: ModelParts) -> frozenset[str]:
        """Return the names of its tensors in a model with these roles.

        Raises:
            ConfigError: there is no such role or name.
        """
        names = parts.named(self.only) if self.only else parts.names
        return names - parts.named(self.without) if self.without else names

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes, dtypes and finiteness. See `PartSchema.check`."""
        if not isinstance(value, Tensors):
            raise ProtocolError(f"expected tensors, found {type(value).__name__}")
        reference = expected.model.select(self.names(expected.parts))
        if self.some and value.keys() <= reference.keys():
            reference = reference.select(value)
        require_same_names(reference, value)
        for name, tensor in value.items():
            wanted = reference[name]
            if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
                found = f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ProtocolError(
                    f"{name} is {found}, expected {tuple(wanted.shape)} {wanted.dtype}"
                )
            _require_finite(name, tensor)


@dataclass(frozen=True)
class _Part:
    """A part that leaves a site unless it is `opt_in`; see `PartSchema`."""

    opt_in: bool = False


@dataclass(frozen=True)
class Count(_Part):
    """A whole number that is not negative, such as the number of training examples."""

    description: str = "a count"

    def check(self, value: Any, expected: Expected) -> None:
        """Check type and sign. See `PartSchema.check`."""
        if not _is_whole(value) or value < 0:
            raise ProtocolError(f"expected a count, found {value!r}")


@dataclass(frozen=True)
class Index(_Part):
    """A whole number from 0 up to, not including, the algorithm's field ``below``."""

    below: str = field(kw_only=True)
    description: str = "a choice"

    def check(self, value: Any, expected: Expected) -> None:
        """Check type and range. See `PartSchema.check`."""
        limit = expected.fields[self.below]
        if not _is_whole(value) or not 0 <= value < limit:
            raise ProtocolError(
                f"expected a whole number below {limit} ({self.below}), found {value!r}"
            )


@dataclass(frozen=True)
class Numbers(_Part):
    """Named finite numbers, such as the mean training loss.

    Attributes:
        record: whether the results hold them, round by round, as ``part/name``.
        least: the smallest that a number may be; None: any.
        most: the largest; None: any.
    """

    description: str = "numbers"
    record: bool = False
    least: float | None = None
    most: float | None = None

    def check(self, value: Any, expected: Expected) -> None:
        """Check that all are finite numbers in their range. See `PartSchema.check`."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"expected named numbers, found {type(value).__name__}")
        for name, number in value.items():
            if not _is_finite(number):
                raise ProtocolError(f"{name} is {number!r}, not a finite number")
            if self.least is not None and number < self.least:
                raise ProtocolError(f"{name} is {number!r}, expected at least {self.least:g}")
            if self.most is not None and number > self.most:
                raise ProtocolError(f"{name} is {number!r}, expected at most {self.most:g}")


@dataclass(frozen=True)
class Statistics(_Part):
    """Columns of numbers about the cases of a site, such as the volume of each label.

    ``{"unit": "mL", "cases": 12, "columns": {"1": [...]}}``. A column holds one number per case, or
    a summary of them: named lists of numbers, such as edges and counts.
    """

    description: str = "numbers about the cases"

    def check(self, value: Any, expected: Expected) -> None:
        """Check the form of the table and that its numbers are finite. See `PartSchema.check`."""
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
                raise ProtocolError(f"column {name} holds values that are no finite numbers")


@dataclass(frozen=True)
class Features(_Part):
    """One finite floating-point tensor of any shape, such as a mean image or embeddings."""

    description: str = "features of the images"

    def check(self, value: Any, expected: Expected) -> None:
        """Check that it is one finite floating-point tensor. See `PartSchema.check`."""
        if not isinstance(value, Tensors) or len(value) != 1:
            raise ProtocolError(f"expected one tensor, found {value!r}")
        for name, tensor in value.items():
            if not tensor.is_floating_point():
                raise ProtocolError(f"{name} is {tensor.dtype}, not floating-point")
            _require_finite(name, tensor)


@dataclass(frozen=True)
class Spectra(_Part):
    """Amplitudes of the lowest frequencies of images, and the size of the images.

    ``windows`` (images, channels, 2b + 1, ...), floating-point, finite and not negative; ``size``
    int64, the pixels along each transformed axis.
    """

    description: str = "amplitudes of the lowest frequencies of training images"

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, shapes and values. See `PartSchema.check`."""
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
class Bits(_Part):
    """One bit for each element of the trainable parameters, tied weights once.

    ``bits``, uint8, eight to a byte, the first in its highest bit; the last byte ends in zeros.
    """

    description: str = "one bit for each parameter"

    def check(self, value: Any, expected: Expected) -> None:
        """Check name, dtype, length and the padding of the last byte. See `PartSchema.check`."""
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


@dataclass(frozen=True)
class Scores(_Part):
    """Scores of cases under pseudonyms, e.g. ``{"global": [{"case": "c001", "dice": 0.8}]}``."""

    description: str = "scores of cases, under pseudonyms"

    def check(self, value: Any, expected: Expected) -> None:
        """Check the form of the table; an undefined score is None. See `PartSchema.check`."""
        if not isinstance(value, Mapping) or not all(isinstance(v, list) for v in value.values()):
            raise ProtocolError("expected lists of case scores by kind of model")
        for row in itertools.chain.from_iterable(value.values()):
            if not isinstance(row, Mapping):
                raise ProtocolError(f"a row of scores is a {type(row).__name__}")
            scores = [v for k, v in row.items() if k not in ("case", "patient")]
            if not all(score is None or _is_finite(score) for score in scores):
                raise ProtocolError("a score is neither a finite number nor undefined")


def may_leave(
    name: str,
    *,
    opt_in: bool,
    allow: Collection[str] | None,
    forbid: Collection[str],
    share: Collection[str] = (),
) -> bool:
    """Return whether a site's policy lets a part out.

    Args:
        name: name of the part.
        opt_in: whether the part leaves only if the policy names it.
        allow: names of the parts that may leave; None: all that do not need to be named.
        forbid: names of the parts that may not leave.
        share: names of further parts that may leave, in addition to ``allow``.
    """
    if name in forbid:
        return False
    return name in share or (name in allow if allow is not None else not opt_in)


def recorded_numbers(sends: Mapping[str, PartSchema], reply: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a checked reply that the results hold, as ``part/name``.

    Args:
        sends: schemas of the parts.
        reply: the parts by name.
    """
    return {
        f"{part}/{name}": float(number)
        for part, value in reply.items()
        if isinstance(schema := sends[part], Numbers) and schema.record
        for name, number in value.items()
    }


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(number: Any) -> bool:
    return isinstance(number, int | float) and math.isfinite(number)


def _require_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ProtocolError(f"{name} holds NaN or infinite values")
