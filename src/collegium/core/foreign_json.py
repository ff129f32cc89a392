"""JSON that others have written, read within bounds of size, depth and digits."""

import json
from pathlib import Path
from typing import Any

MOST_BYTES = 256_000_000
"""The largest file that is read; a list of a million cases is smaller."""

MOST_DIGITS = 20
"""Digits of a whole number, of which one of 64 bits has no more."""


def read_foreign_json(path: Path) -> Any:
    """Return what a JSON file holds.

    Args:
        path: the file, in UTF-8 with or without a mark.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not JSON, or exceeds a bound; with the reason.
    """
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"it has {size} bytes, and at most {MOST_BYTES} are read")
    try:
        return json.loads(path.read_text("utf-8-sig"), parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def whole_number(text: str) -> int:
    """Return a whole number.

    Args:
        text: its decimal digits, with or without a sign.

    Raises:
        ValueError: it has more than `MOST_DIGITS` digits.
    """
    digits = len(text.lstrip("+-"))
    if digits > MOST_DIGITS:
        raise ValueError(f"a number of {digits} digits, where {MOST_DIGITS} are the most")
    return int(text)
