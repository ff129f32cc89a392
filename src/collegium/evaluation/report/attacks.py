"""Reads the results of attacks on a run, the files of its folder ``attack``, for the report."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from collegium.core.seals import digest_of, read_json
from collegium.errors import DataError

FOLDER = "attack"
"""The folder of the results of attacks in the output folder of an experiment."""

TITLES = {
    "inversion": "An image from an update",
    "membership": "Who was trained on",
    "shared": "What is shared beside models",
}
"""The titles of the kinds of attack that have one other than their name."""

BUDGET = 5_000_000
"""Bytes of pictures that a page may hold."""

Row = tuple[str, ...]


@dataclass(frozen=True)
class AttackPicture:
    """A picture of what an attacker rebuilds, beside the truth.

    Attributes:
        text: What it shows, in a sentence.
        source: The picture, as the address of an image that holds it.
    """

    text: str
    source: str


@dataclass(frozen=True)
class AttackFindings:
    """The results of one kind of attack.

    Attributes:
        title: What was attacked.
        sentences: What the numbers say.
        head: The head of the table; empty if there is none.
        rows: The rows of the table.
        words: Whether each column holds words.
        pictures: The pictures that found room.
        left_out: How many found none.
    """

    title: str
    sentences: Sequence[str]
    head: Row
    rows: Sequence[Row]
    words: Sequence[bool]
    pictures: Sequence[AttackPicture]
    left_out: int


def read_attacks(output: Path, *, pictures: bool = True) -> list[AttackFindings]:
    """Read the results of attacks on a run, each a sealed JSON file of its folder ``attack``.

    Such a file has ``results`` and ``sentences``; it may have a ``table``, a list of rows of texts
    whose first one is the head, and ``pictures``, each with the ``file`` beside it, its ``sha256``
    and what it ``shows``. Other files are passed over.

    Args:
        output: The output folder of an experiment.
        pictures: Whether to read pictures, which may be of patients.

    Raises:
        DataError: A file is damaged, absent or cannot be read.
    """
    found, room = list[AttackFindings](), BUDGET
    for path in sorted((output / FOLDER).glob("*.json")):
        try:
            data = read_json(path)
            if not {"results", "sentences"} <= data.keys():
                continue
            findings, room = _findings(path, data, room, pictures=pictures)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: the results of this attack cannot be read ({error}); attack again with "
                f"'collegium attack', or remove the file to make a report without it."
            ) from error
        found.append(findings)
    return found


def _findings(
    path: Path, data: Mapping[str, Any], room: int, *, pictures: bool
) -> tuple[AttackFindings, int]:
    """Return the results in a file, and how many bytes of pictures have room after its own."""
    head, *rows = [tuple(map(str, row)) for row in data.get("table") or [()]]
    head = tuple(name if len(name) == 1 else f"{name[:1].upper()}{name[1:]}" for name in head)
    shown, left_out = list[AttackPicture](), 0
    for entry in data.get("pictures", ()) if pictures else ():
        content = (path.parent / Path(entry["file"]).name).read_bytes()
        if digest_of(content) != entry["sha256"]:
            raise ValueError(f"the picture {entry['file']} is not as it was written")
        if len(content) > room:
            left_out += 1
            continue
        room -= len(content)
        encoded = base64.b64encode(content).decode()
        shown.append(AttackPicture(str(entry["shows"]), f"data:image/png;base64,{encoded}"))
    title = TITLES.get(path.stem, path.stem.capitalize())
    sentences = [str(sentence) for sentence in data["sentences"]]
    words = [not any(map(_is_number, column)) for column in zip(*rows, strict=True)]
    return AttackFindings(title, sentences, head, rows, words, shown, left_out), room


def _is_number(cell: str) -> bool:
    return cell.removeprefix("-")[:1].isdigit()
