"""The cells of numeric columns: numbers, values beyond a limit, and what is neither."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

_BELOW = "=?(?:<|&lt;|[\u2264\u2266\u2a7d\uff1c])|(?:below|under|less than|lower than|at most)\\b"
_ABOVE = "=?(?:>|&gt;|[\u2265\u2267\u2a7e\uff1e])|(?:above|over|more than|greater than|at least)\\b"
_LIMITED = re.compile(rf"(?:(?P<below>{_BELOW})|(?P<above>{_ABOVE}))\s*=?\s*(?P<limit>.*)")
_BARE_LIMIT = re.compile(r"<?\s*(?:l?lo[dq]|blo?[dq]|bdl|blloq|below (?:detection|limit|lo[dq]).*)")

_MONTH = r"(?:jan|feb|mar|m\u00e4r|apr|may|mai|jun|jul|aug|sep|o[ck]t|nov|de[cz])[a-z]*"
_SPACES = " '\u2019\u00a0\u202f\u2009"  # that stand between thousands

_WRONG = (
    (
        r"\(?\++\)?|-{2,}|[1-4]\+|neg(?:ativ(?:e)?)?\.?|pos(?:itiv(?:e)?)?\.?|trace|tr\.?|spur(?:en)?",
        "holds a grade such as neg or +, not a number; name the column in table.categorical with "
        "all its words, as none of them is a missing value",
    ),
    (
        rf"\d{{1,2}}[-. /]*{_MONTH}[-. /]*\d*|{_MONTH}[-. /]*\d+",
        "holds a date, as spreadsheets make of numbers such as 5.1; format the column as text, "
        "enter its numbers again and export the table again",
    ),
    (
        r"\d{1,4}([-/.])\d{1,2}(?:\1\d{1,4})(?:[ t].*)?|\d{1,2}/\d{1,4}|\d{1,2}:\d{2}.*",
        "holds a date or a time, as spreadsheets make of numbers such as 5.1; format the column as "
        "text, enter its numbers again and export the table again",
    ),
    (
        r"#.*",
        "holds an error of a spreadsheet, or a number too wide for its column there; correct it "
        "there and export the table again",
    ),
    (
        r"=.*",
        "holds a formula; export the table with values instead",
    ),
    (
        rf"[-+\u2212]?\d{{1,3}}(?:[{_SPACES}]\d{{3}})+(?:[.,]\d+)?",
        "holds a mark between thousands; export numbers without it",
    ),
    (
        r"[-+\u2212]?\d[\d.,]*(?:\s*[^\W\d_].*|\s*[%\u2030\u00b0\u00b5*/$\u20ac^].*|\s+\S.*)",
        "holds a number with a unit or a sign; write numbers alone, in one unit at every site",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Limit:
    """A value of which only a limit is known.

    Attributes:
        side: "below" or "above" the limit.
        text: The limit as written.
    """

    side: str
    text: str


def limit_of(cell: str) -> Limit | None:
    """Return the limit that a cell such as <0.5, >= 30 or below 0.5 states; None if none.

    Args:
        cell: The cell; its text is empty in words such as <LOQ, which do not say how low it is.
    """
    text = cell.strip().lower()
    if _BARE_LIMIT.fullmatch(text):
        return Limit("below", "")
    found = _LIMITED.fullmatch(text)
    return found and Limit("below" if found["below"] else "above", found["limit"])


def is_numeric(cell: str) -> bool:
    """Return whether a cell, or the limit in it, has digits and the marks of a number alone."""
    limit = limit_of(cell)
    return (
        re.fullmatch(r"[-+]?[\d.,]+(e[-+]?\d+)?", limit.text if limit else cell.lower()) is not None
    )


def parse_number(cell: str, mark: str) -> float:
    """Return the number that a cell holds.

    Args:
        cell: The cell.
        mark: The decimal mark, "." or ",".

    Raises:
        ValueError: It holds none, or marks between thousands.
    """
    other = "." if mark == "," else ","
    if other in cell or "_" in cell:
        raise ValueError(cell)
    return float(cell.replace(mark, "."))


def may_be_thousands(cells: Sequence[str], mark: str, *, exact: bool) -> bool:
    """Return whether a mark in numbers may stand between thousands as well as before decimals.

    It may if three digits follow it in every cell that holds it, as in 1,234; a point only if there
    are also whole numbers of three digits, as spreadsheets write no decimals of some cells alone.

    Args:
        cells: The numbers of a table as written.
        mark: "." or ",".
        exact: Whether the numbers were stored as such, and not as text.
    """
    marked = [cell for cell in cells if mark in cell]
    grouped = rf"[-+]?[1-9]\d{{0,2}}(?:{re.escape(mark)}\d{{3}})+"
    if exact or not marked or not all(re.fullmatch(grouped, cell) for cell in marked):
        return False
    return mark == "," or any(re.fullmatch(r"[-+]?[1-9]\d{2}", cell) for cell in cells)


def what_is_wrong(cell: str, mark: str) -> str:
    """Return what a cell that is no number holds instead, by its kind alone, and what to do.

    Args:
        cell: The cell.
        mark: The decimal mark, "." or ",".
    """
    text = unicodedata.normalize("NFKC", cell).strip().lower()
    for pattern, sentence in _WRONG:
        if re.fullmatch(pattern, text):
            return sentence
    other = "." if mark == "," else ","
    if re.fullmatch(rf"[-+]?[\d{mark}{other}]+", text):
        return (
            f"holds no number (the decimal mark is {mark!r}, see table.decimal); write no marks "
            f"between thousands, and one decimal mark in the whole table"
        )
    return (
        "holds no number; correct it or, only if it says that nothing was measured, add the word "
        "there to table.missing"
    )
