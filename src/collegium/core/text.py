"""Words that several messages share."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` with the option that is closest to a word, or nothing."""
    close = difflib.get_close_matches(word, list(options), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
