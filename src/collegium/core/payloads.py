"""Schemas of the parts that clients send: an algorithm declares one for each part.

``sends`` of an algorithm maps the name of each part that its clients send to one of the schemas
below. Both ends check every part of a reply against its schema by `check_parts`: the site before it
leaves, the server before it is used.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from collegium.core.lazy import torch
from collegium.core.model_parts import ModelParts
from collegium.core.tensors import Tensors, require_same_names
from collegium.core.text import short
from collegium.errors import ProtocolError

if TYPE_CHECKING:
    from torch import Tensor


GLOBAL, PERSONAL = "global", "personal"
"""The kinds of model that a site may predict with."""

OTHER_GLOBAL: Mapping[str, str] = MappingProxyType(
    {"site": "global by federation", "federation": "global by site"}
)
"""By the rule that selects a round: the kind of the global model of the round selected otherwise.

See `collegium.runtime.selection.Selection`.
"""

MODELS = frozenset({GLOBAL, PERSONAL, *OTHER_GLOBAL.values()})
"""All kinds of model whose scores leave a site."""

CASES = "cases"
"""In a row that stands for several cases: how many of them have a score."""

EVENTS = "events"
"""In a row that stands for several cases: see `collegium.tasks.count_events`."""

ALL_CASES = "mean"
"""The case and the patient of a row that stands for all cases, whose scores stay at their site."""

LARGEST_COUNT = 1 << 53
"""The largest whole number that a float holds exactly; no count is larger."""

MOST_NUMBERS = 1 << 24
"""How many numbers features of the images may hold, unless an algorithm says otherwise."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
"""What a name that leaves a site looks like where the algorithm does not say it."""

_UNIT = re.compile(r"[A-Za-z0-9/^%]{0,12}")

_CASE, _PATIENT = (re.compile(rf"(?:train|val|test|outside)-{kind}\d{{3,9}}") for kind in "cp")
"""The pseudonyms of cases and patients.

See `collegium.runtime.client.ClientRuntime.score` and `collegium.adaptation.outside`.
"""


@dataclass(frozen=True)
class Metric:
    """The values that a metric of one case can have.

    Attributes:
        least: the smallest.
        most: the largest.
        of_set: whether it is the case's pseudo-value of a metric of all cases together, which grows
            with their number; the limits are those for one case then.
    """

    least: float = -math.inf
    most: float = math.inf
    of_set: bool = False

    def holds(self, value: float, rows: int) -> bool:
        """Return whether a value is possible in a table of so many rows.

        Args:
            value: the value.
            rows: the number of rows.
        """
        times = rows + 1 if self.of_set else 1
        return self.least * times - 1e-6 <= value <= self.most * times + 1e-6


@dataclass(frozen=True)
class Expected:
    """The context of a check.

    Attributes:
        model: the tensors of the model.
        parts: their roles.
        fields: the algorithm's fields.
        metrics: the scores that the task can give a case, by name; None: unknown.
        headline: the metric that every row of scores has; empty: unknown.
        cases: how many cases the sender has, in all splits together; None: unknown.
    """

    model: Tensors
    parts: ModelParts
    fields: Mapping[str, Any]
    metrics: Mapping[str, Metric] | None = None
    headline: str = ""
    cases: int | None = None

    def check_cases(self, what: str, number: int) -> None:
        """Check that a number is not above that of the sender's cases.

        Args:
            what: what the number counts, for the message.
            number: the number.

        Raises:
            ProtocolError: it is.
        """
        if self.cases is not None and number > self.cases:
            raise ProtocolError(f"{number} {what}, and the site has {self.cases} cases")


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
        difference: whether the tensors are differences between two models, so that variances and
            counters among them may be negative.
    """

    only: str | None = None
    without: str | None = None
    opt_in: bool = False
    some: bool = False
    difference: bool = False

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
        """Check names, shapes, dtypes, finiteness, variances, counters. See `PartSchema.check`."""
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
            if not self.difference and name in expected.parts.norm_statistics:
                _require_statistics(name, tensor)


Content = Literal["", "amplitudes", "moments", "embeddings", "latent", "image", "second moments"]
"""The contents of features.

"amplitudes": a window of amplitudes by the number of pixels, mean over images; "moments": mean and
deviation of each channel, mean over images; "embeddings": see
`collegium.heterogeneity.embeddings`, a row for each image or for their mean; "latent": the same of
what enters the head of the model that goes with it, or of its mean over space, also with a row for
the mean of each class; "image": a mean image on a grid; "second moments": of the pixels on a grid.
"""


@dataclass(frozen=True)
class _Part:
    """A part that leaves a site unless it is `opt_in`; see `PartSchema`."""

    opt_in: bool = False


@dataclass(frozen=True)
class Count(_Part):
    """A whole number that is not negative, such as the number of training examples.

    Attributes:
        of_cases: whether cases are counted, of which there are no more than the site has.
    """

    description: str = "a count"
    of_cases: bool = True

    def check(self, value: Any, expected: Expected) -> None:
        """Check type, sign and size. See `PartSchema.check`."""
        if not _is_whole(value) or not 0 <= value <= LARGEST_COUNT:
            raise ProtocolError(f"expected a count, found {short(value)}")
        if self.of_cases:
            expected.check_cases("are counted", value)


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
                f"expected a whole number below {limit} ({self.below}), found {short(value)}"
            )


@dataclass(frozen=True)
class Numbers(_Part):
    """Named finite numbers, such as the mean training loss.

    Attributes:
        record: whether the results hold them, round by round, as ``part/name``.
        least: the smallest that a number may be; None: any.
        most: the largest; None: any.
        names: the names that there may be; empty: any of letters, digits, dots, dashes and
            underscores, no more than the model has tensors, or 64.
        tensors: whether the names are those of trainable tensors of the model.
    """

    description: str = "numbers"
    record: bool = False
    least: float | None = None
    most: float | None = None
    names: tuple[str, ...] = ()
    tensors: bool = False

    def check(self, value: Any, expected: Expected) -> None:
        """Check that all are finite numbers in their range. See `PartSchema.check`."""
        if not isinstance(value, Mapping):
            raise ProtocolError(f"expected named numbers, found {type(value).__name__}")
        known = expected.parts.trainable if self.tensors else self.names
        _check_names(value, known, max(64, len(expected.parts.names)))
        for name, number in value.items():
            if not _is_finite(number):
                raise ProtocolError(f"{name} is {short(number)}, not a finite number")
            if self.least is not None and number < self.least:
                raise ProtocolError(f"{name} is {number!r}, expected at least {self.least:g}")
            if self.most is not None and number > self.most:
                raise ProtocolError(f"{name} is {number!r}, expected at most {self.most:g}")


@dataclass(frozen=True)
class Statistics(_Part):
    """Columns of numbers about the cases of a site, such as the volume of each label.

    ``{"unit": "mL", "cases": 12, "columns": {"1": [...]}}``. A column holds one number per case, or
    a summary of them: named lists of numbers, such as edges and counts.

    Attributes:
        columns: the algorithm's field that lists the columns; empty: any that look like names.
    """

    description: str = "numbers about the cases"
    columns: str = ""

    def check(self, value: Any, expected: Expected) -> None:
        """Check the form of the table and that its numbers are finite. See `PartSchema.check`."""
        if not isinstance(value, Mapping) or value.keys() != {"unit", "cases", "columns"}:
            raise ProtocolError("expected a unit, a number of cases and columns")
        unit, cases, columns = value["unit"], value["cases"], value["columns"]
        if not isinstance(unit, str) or not isinstance(columns, Mapping):
            raise ProtocolError("expected a text as unit and columns by name")
        if not _UNIT.fullmatch(unit):
            raise ProtocolError(f"{short(unit)} is no unit")
        Count().check(cases, expected)
        _check_names(columns, expected.fields[self.columns] if self.columns else (), 4096)
        for name, column in columns.items():
            if isinstance(column, list) and len(column) != cases:
                raise ProtocolError(f"column {name} has {len(column)} numbers for {cases} cases")
            if isinstance(column, Mapping):
                _check_names(column, (), 16)
            lists = [*column.values()] if isinstance(column, Mapping) else [column]
            if not all(isinstance(numbers, list) for numbers in lists):
                raise ProtocolError(f"column {name} is neither a list of numbers nor a summary")
            if sum(map(len, lists)) > max(cases, 4096):
                raise ProtocolError(f"column {name} has more numbers than its {cases} cases need")
            if not all(_is_finite(number) for numbers in lists for number in numbers):
                raise ProtocolError(f"column {name} holds values that are no finite numbers")


@dataclass(frozen=True)
class Features(_Part):
    """One finite floating-point tensor, such as a mean image or embeddings.

    Attributes:
        by_case: whether its first axis is that of cases, of which there are no more than the site
            has.
        most: how many numbers it may hold.
        holds: what the numbers are, by which an attack chooses how to invert them; see
            `collegium.diagnostics.attacks.shared`. Empty: something else.
    """

    description: str = "features of the images"
    by_case: bool = False
    most: int = MOST_NUMBERS
    holds: Content = ""

    def check(self, value: Any, expected: Expected) -> None:
        """Check that it is one finite floating-point tensor. See `PartSchema.check`."""
        if not isinstance(value, Tensors) or len(value) != 1:
            raise ProtocolError(f"expected one tensor, found {_kind_of(value)}")
        _check_names(value, (), 1)
        for name, tensor in value.items():
            if not tensor.is_floating_point():
                raise ProtocolError(f"{name} is {tensor.dtype}, not floating-point")
            if tensor.numel() > self.most:
                raise ProtocolError(
                    f"{name} holds {tensor.numel()} numbers, of {self.most} at most"
                )
            if self.by_case:
                expected.check_cases("rows", tensor.shape[0] if tensor.ndim else 0)
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
        if windows.numel() > MOST_NUMBERS:
            raise ProtocolError(
                f"windows holds {windows.numel()} numbers, of {MOST_NUMBERS} at most"
            )
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
    """Scores of cases by kind of model.

    ``{"global": [{"case": "val-c001", "patient": "val-p001", "dice": 0.8}]}``. Cases and patients
    have pseudonyms; or one row, whose case is `ALL_CASES`, stands for all.
    """

    description: str = "scores of cases, under pseudonyms"

    def check(self, value: Any, expected: Expected) -> None:
        """Check names, pseudonyms, numbers and their ranges. See `PartSchema.check`."""
        if not isinstance(value, Mapping) or not all(isinstance(v, list) for v in value.values()):
            raise ProtocolError("expected lists of case scores by kind of model")
        _check_names(value, MODELS, len(MODELS))
        for rows in value.values():
            expected.check_cases("cases are scored", len(rows))
            check_rows(rows, expected.metrics, expected.headline, expected.cases)


def check_rows(
    rows: Sequence[Any], metrics: Mapping[str, Metric] | None, headline: str, cases: int | None
) -> None:
    """Check scores of cases: their names, pseudonyms, numbers and ranges.

    Args:
        rows: a row for each case, or one for all, not trusted.
        metrics: see `Expected.metrics`.
        headline: see `Expected.headline`.
        cases: how many cases there are; None: unknown.

    Raises:
        ProtocolError: they are no scores of so many cases.
    """
    for row in rows:
        if not isinstance(row, Mapping):
            raise ProtocolError(f"a row of scores is a {type(row).__name__}")
        _check_row(row, len(rows), metrics or {}, headline, cases)
    if len({row["case"] for row in rows}) < len(rows):
        raise ProtocolError("two rows of scores are of one case")


def _check_row(
    row: Mapping[str, Any],
    rows: int,
    metrics: Mapping[str, Metric],
    headline: str,
    cases: int | None,
) -> None:
    case, patient = (str(row.get(name)) for name in ("case", "patient"))
    all_cases = rows == 1 and (case, patient) == (ALL_CASES, ALL_CASES)
    if not all_cases and not (_CASE.fullmatch(case) and _PATIENT.fullmatch(patient)):
        raise ProtocolError(f"{short(case)} of {short(patient)} is no pseudonym of a case")
    counts = (CASES, EVENTS) if all_cases else ()
    most = LARGEST_COUNT if cases is None else cases
    for name in counts:
        number: Any = row.get(name)
        if not _is_whole(number) or not 0 <= number <= most:
            raise ProtocolError(f"{name} is {short(number)}, and the site has {most} cases")
    scores = {k: v for k, v in row.items() if k not in ("case", "patient", *counts)}
    if headline and headline not in scores:
        raise ProtocolError(f"a row of scores has no {headline}")
    _check_names(scores, metrics, 4096)
    for name, score in scores.items():
        metric = metrics.get(name, Metric())
        if score is not None and not (_is_finite(score) and metric.holds(score, rows)):
            raise ProtocolError(f"{name} is {short(score)}, which no case can have")


def check_parts(
    algorithm: str, sends: Mapping[str, PartSchema], reply: Mapping[str, Any], expected: Expected
) -> None:
    """Check every part of a reply, as the site does before it leaves and the server as it arrives.

    Args:
        algorithm: the name of the algorithm, for errors.
        sends: the schemas of the parts that it declares.
        reply: the parts by name.
        expected: the context.

    Raises:
        ProtocolError: a part is not declared, or does not meet its schema; the sentence names it.
    """
    for name, value in reply.items():
        if name not in sends:
            raise ProtocolError(
                f"part {short(name)} is not among what {algorithm} declares to send"
            )
        try:
            sends[name].check(value, expected)
        except ProtocolError as error:
            raise ProtocolError(f"part {name!r}: {error}") from error


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
    if isinstance(number, bool) or not isinstance(number, int | float):
        return False
    return abs(number) <= LARGEST_COUNT if isinstance(number, int) else math.isfinite(number)


def _kind_of(value: Any) -> str:
    return f"{len(value)} of them" if isinstance(value, Tensors) else type(value).__name__


def _check_names(found: Iterable[Any], known: Collection[str], most: int) -> None:
    """Check names that a site chose: they are known ones or, if none are, look like names."""
    names: Sequence[Any] = [*found]
    if len(names) > most and not known:
        raise ProtocolError(f"{len(names)} names, of {most} at most")
    for name in names:
        if name not in known if known else not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ProtocolError(f"{short(name)} is not a name that may be sent")


def _require_statistics(name: str, tensor: Tensor) -> None:
    """Check that a buffer of a normalisation layer is no negative variance, nor a false counter."""
    counts = not tensor.is_floating_point()
    if (counts or name.endswith("running_var")) and (tensor < 0).any():
        raise ProtocolError(f"{name} is negative; a part of differences is declared as such")
    if counts and (tensor > LARGEST_COUNT).any():
        raise ProtocolError(f"{name} counts more than {LARGEST_COUNT}")


def _require_finite(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise ProtocolError(f"{name} holds NaN or infinite values")
