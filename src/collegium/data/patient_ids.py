"""Ids of patients that look like one id written in several ways."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence

from collegium.data.site import Case
from collegium.data.splits import LeakageFinding


def similar_ids(sites: Mapping[str, Sequence[Case]], *, named: bool = True) -> list[LeakageFinding]:
    """Find stated ids of patients that may be those of one patient, or of several.

    Ids that differ in upper and lower case, leading zeros or the form of Unicode alone may be one
    patient, whom splits then take for two; ids such as 1.23E+15 are what a spreadsheet leaves of
    long numbers, so that several patients may have one.

    Args:
        sites: The cases of each site.
        named: Whether the sentences name the ids.
    """
    known: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    rounded: dict[str, list[str]] = defaultdict(list)
    for name in sorted(sites):
        for case in sites[name]:
            if case.stated:
                known[_key(case.patient)][case.patient].add(name)
                if re.fullmatch(r"\d([.,]\d+)?e\+\d+", case.patient.casefold()):
                    rounded[name].append(case.patient)
    groups: dict[tuple[str, ...], list[list[str]]] = defaultdict(list)
    for written in known.values():
        if len(written) > 1:
            groups[tuple(sorted(set().union(*written.values())))].append(sorted(written))
    return [
        *(_alike(where, found, named=named) for where, found in sorted(groups.items())),
        *(_rounded(name, ids, named=named) for name, ids in rounded.items()),
    ]


def _key(patient: str) -> str:
    text = unicodedata.normalize("NFKC", patient).casefold().strip()
    return _without_zeros(text)


def _without_zeros(text: str) -> str:
    return re.sub(r"(?<![\d.,])0+(?=\d)", "", text)


def _alike(
    where: tuple[str, ...], groups: Sequence[Sequence[str]], *, named: bool
) -> LeakageFinding:
    ids = [patient for group in groups for patient in group]
    shown = "; ".join([", ".join(group) for group in groups[:3]] + ["..."] * (len(groups) > 3))
    without = {
        "upper and lower case": str.casefold,
        "leading zeros": _without_zeros,
        "the form of Unicode": lambda word: unicodedata.normalize("NFKC", word),
    }
    differences = [
        words
        for words, plain in without.items()
        if any(len(set(map(plain, group))) < len(group) for group in groups)
    ] or [*without][:2]
    text = (
        f"{len(ids)} ids of patients at {' and '.join(where)} {f'({shown}) ' * named}differ in "
        f"{' and '.join(differences)} alone: splits take them for as many patients; if some are "
        f"one patient, write one id for each"
    )
    return LeakageFinding("similar_ids", where, tuple(ids), (), text)


def _rounded(name: str, ids: Sequence[str], *, named: bool) -> LeakageFinding:
    text = (
        f"{len(ids)} cases at {name} have ids of patients {f'such as {ids[0]} ' * named}that a "
        f"spreadsheet has rounded, so that different patients may have one: format the column as "
        f"text, enter the ids again and export the table again"
    )
    return LeakageFinding("rounded_ids", (name,), tuple(sorted(set(ids))), (), text)
