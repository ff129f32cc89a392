"""What a data set says of itself beside its cases: names of labels and channels, and notes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class About:
    """What a data set says of itself.

    Attributes:
        source: What says so, in words that name no file of the site's own.
        labels: The stored values of each label by its name; several make a region.
        channels: The names of the channels, in the order of the files.
        notes: One sentence for each file that is there and not used.
    """

    source: str = ""
    labels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    channels: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def labels_of(labels: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Give the values of each label: names by values (nnU-Net 1, Decathlon) or the other way round.

    Raises:
        ValueError: A value is no whole number; or TypeError.
    """
    found: dict[str, tuple[int, ...]] = {}
    for key, value in labels.items():
        if isinstance(value, str) and not value.strip().isdecimal():
            found[value] = (*found.get(value, ()), int(key))
        else:
            found[key] = tuple(map(int, value)) if isinstance(value, list) else (int(value),)
    return found


def channels_of(channels: Mapping[str, Any]) -> tuple[str, ...]:
    """Give the names of the channels in the order of their numbers.

    Raises:
        ValueError: A key is no whole number.
    """
    return tuple(str(channels[key]) for key in sorted(channels, key=int))
