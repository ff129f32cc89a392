"""Words of tables that a federation does not know, site by site."""

import re
from collections import Counter
from collections.abc import Mapping

from collegium.data.columns import spelling_key
from collegium.data.decoded_image import listed
from collegium.data.settings import TaskConfig
from collegium.data.tables import MISSING, Table, TableConfig

SHOWN_FROM = 3
"""The number of rows from which a label that is no class is shown: a rarer one may be a name."""

_CODE = re.compile(
    r"-?\d{1,2}|y|n|yes|no|ja|nein|j|oui|non|s[i\u00ed]|true|false|t|f|[+-]|pos|neg|positive|negative"
)
"""Words that are shown however rare they are."""


def word_notes(tables: Mapping[str, Table], config: TableConfig, task: TaskConfig) -> list[str]:
    """Return a sentence for each column with words that are taken as unknown, or are refused.

    These are labels that are no class; and categories that are spelt like one of the vocabulary, or
    that are all there is at a site. Other unknown words are told of by the site's own notes.

    Args:
        tables: The rows of each site, in the words of the federation.
        config: The columns.
        task: The classes.
    """
    notes = _label_notes(tables, config, task)
    for place, (column, words) in enumerate((config.categorical or {}).items()):
        spelt = {spelling_key(word): word for word in words}
        for name, table in sorted(tables.items()):
            unknown = table.unknown.get(column, {})
            alike = {w: spelt[spelling_key(w)] for w in unknown if spelling_key(w) in spelt}
            if alike:
                told = listed(f"{word!r} for {meant!r}" for word, meant in alike.items())
                notes.append(
                    f"{column}: site {name} writes {told}, which is taken as unknown; if it means "
                    f"the same, set coding: {{{column}: {alike}}} there"
                )
            elif unknown and (table.codes[:, place] == len(words)).all():
                notes.append(
                    f"{column}: site {name} writes {_counted(unknown)} and no word of its "
                    f"vocabulary ({listed(words)}), so that all are taken as unknown; say what "
                    f"they mean in coding.{column} there"
                )
    return notes


def _label_notes(tables: Mapping[str, Table], config: TableConfig, task: TaskConfig) -> list[str]:
    """Return a note on all labels that are no class, by site."""
    found = {}
    for name, table in sorted(tables.items()):
        counts = Counter(table.targets)
        odd = {
            word: counts[word]
            for word in sorted(counts)
            if task.find_class(word) is None and word.lower() not in MISSING
        }
        if odd:
            shown = {w: n for w, n in odd.items() if n >= SHOWN_FROM or _CODE.fullmatch(w.lower())}
            rest = sum(odd.values()) - sum(shown.values())
            others = [f"other words ({rest})"] if rest else []
            found[name] = ", ".join([*([_counted(shown)] if shown else []), *others])
    if not found:
        return []
    told = "; ".join(f"{words} at {name}" for name, words in found.items())
    return [
        f"{config.label}: none of task.classes ({listed(task.classes)}) is {told}; say what they "
        f"mean in task.coding or, if it is so at one site alone, in coding.{config.label} there"
    ]


def _counted(words: Mapping[str, int]) -> str:
    return listed(f"{word!r} ({count})" for word, count in words.items())
