"""Words, sizes and durations in messages and reports."""

import difflib
import re
from collections.abc import Iterable, Sequence

_FORMULA = re.compile("'*[=+@\t\r\n\\-\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]", re.IGNORECASE)


def without_formula(cell: str) -> str:
    """Return a cell of a CSV file as text that spreadsheets do not take for a formula.

    What begins as a formula gets an apostrophe in front, except for numbers; `with_formula` takes
    it off.

    Args:
        cell: The text.
    """
    formula = _FORMULA.match(cell) and not _NUMBER.fullmatch(cell)
    return f"'{cell}" if formula else cell


def with_formula(cell: str) -> str:
    """Return the text of a cell that `without_formula` has written.

    Args:
        cell: The cell.
    """
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the option closest to a word, or an empty string.

    Args:
        word: the word as the user wrote it.
        options: the words that are known.
    """
    close = difflib.get_close_matches(word, list(options), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def unknown_word(what: str, word: str, options: Sequence[str], owner: str = "") -> str:
    """Return that a word is unknown, with the closest known one or, if none is close, all of them.

    Args:
        what: what the word should name, such as "field".
        word: the word as the user wrote it.
        options: the words that are known.
        owner: what has these options; may be empty.
    """
    of = f" for {owner}" if owner else ""
    near = did_you_mean(word, options) or f"; there is {', '.join(options) or 'none'}"
    return f"unknown {what}{of}{near}"


def short(value: object) -> str:
    """Return a value as it stands in a message, cut to 60 characters."""
    if value is None:
        return "nothing"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def format_bytes(count: float | None) -> str:
    """Return a number of bytes with a decimal unit: "512 B" or "2.1 MB"; None is a dash."""
    if count is None:
        return "\u2013"
    unit, factor = byte_unit(count)
    return f"{count / factor:.{0 if factor == 1 else 1}f} {unit}"


def byte_unit(count: float) -> tuple[str, int]:
    """Return the decimal unit that suits a number of bytes, and how many bytes it is.

    Args:
        count: The number of bytes.
    """
    units = ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)
    return next((unit for unit in units if count >= unit[1]), ("B", 1))


def format_duration(seconds: float) -> str:
    """Return a duration in a unit that suits it: "48 s", "12 min" or "3.4 h"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def printable(text: str, longest: int) -> str:
    """Return a text of another process as one line without control characters, and not too long.

    Args:
        text: the text, not trusted.
        longest: how many characters are kept.
    """
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in cut)
