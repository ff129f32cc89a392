"""Finds cases that look like visits, sides or slices of one patient, by their names alone."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from collegium.data.site import Case
from collegium.errors import ConfigError

_START, _END = r"(?:(?<=[\W_])|^)", r"(?=[\W_]|$)"
_WORDS = (
    r"(?:sess?|session|visit|vis|tp|timepoint|fu|follow[\s_-]?up|baseline|bl|slice|slc|frame|"
    r"left|right|l|r|od|os|ou|lt|rt|cc|mlo|pre|post|preop|postop|ed|es)[\s_-]?\d{0,3}|"
    r"(?:19|20)\d{2}(?:0[1-9]|1[0-2])[0-3]\d"
)
_NUMBERED = r"(?:scan|exam|run|time|month|week|day|year|mr|t|v|m|w|d|y)-?\d{1,3}"
_SIDES = r"(?<=\d)(?:l|r|od|os)"

_FORMS: tuple[tuple[re.Pattern[str], float | None], ...] = (
    (re.compile(rf"(?:{_START}(?:{_WORDS}|{_NUMBERED})|{_SIDES}){_END}"), 2.0),
    (re.compile(rf"(?:{_START}(?:{_WORDS})|{_SIDES}){_END}"), None),
    (re.compile(r"(?<=[\W_])(?<=\d[\W_])\d{1,3}$"), 1.0),
)
"""What tells cases of one patient apart, in lower case, from the most to the least that counts.

The number is how many different ones there may be for each patient; None: any number. Cases of a
few groups that are numbered through, such as those of years, are thus no visits.
"""

_EXPRESSIONS = (r"(.+)_[^_]+", r"(.+)-[^-]+", r"(.+?)_.+", r"(.+?)-.+", r"(.+\d)[A-Za-z]+")


def patients_by_name(cases: Sequence[Case]) -> list[list[str]]:
    """Return the cases by patient, as their names suggest, if that is fewer patients than cases.

    Args:
        cases: The cases of a site. Where the patient of one is stated, or is not the case itself,
            somebody has said who the patients are, and the result is empty.

    Returns:
        The ids of the cases of each patient; empty if names suggest nothing.
    """
    if any(case.stated or case.patient != case.case for case in cases):
        return []
    names = [case.case for case in cases]
    for form, most in _FORMS:
        groups, parts = defaultdict(list), set()
        for name in names:
            stem = form.sub("", name.casefold())
            whole = not re.search(r"[^\W_]", stem)
            groups[name if whole else stem].append(name)
            parts |= set() if whole else {*form.findall(name.casefold())}
        few = most is None or len(parts) <= most * len(groups)
        if 1 < len(groups) < len(names) and few:
            return [*groups.values()]
    return []


def expression_of(groups: Iterable[Sequence[str]]) -> str | None:
    """Return a regular expression whose first group is the patient of each case; None if unknown.

    Args:
        groups: What `patients_by_name` returned.
    """
    groups = [*groups]
    for expression in _EXPRESSIONS:
        found = [{_first(expression, name) for name in names} for names in groups]
        one_each = all(len(own) == 1 and None not in own for own in found)
        if one_each and len(set().union(*found)) == len(groups):
            return expression
    return None


def patient_note(
    cases: Sequence[Case], kind: Literal["folder", "manifest", "table"]
) -> tuple[str, int] | None:
    """Return a note, and the number of patients, if cases look like those of fewer by their names.

    Args:
        cases: The cases of a site.
        kind: What the site has; the note names no row of a table.

    Returns:
        None if somebody has said who the patients are, or if names suggest nothing.
    """
    groups = patients_by_name(cases)
    if not groups:
        return None
    expression, some, own = expression_of(groups), "", ""
    columns = {
        "folder": "a manifest with the columns case and patient beside the folder",
        "manifest": "the column patient in the manifest",
        "table": "the column of patients as table.patient",
    }
    ways = [columns[kind]]
    if kind != "table":
        ways = [f"patient: '{expression}' at the site", *ways] if expression else ways
        some = f" ({', '.join(max(groups, key=len)[:3])})"
        own = "; patient: '(.+)' says that each case is of another"
    text = (
        f"{len(cases)} cases look like {len(groups)} patients by their names{some}, and splits "
        f"treat them as {len(cases)}, so that the same patient may be trained on and tested: say "
        f"who the patients are, by {' or by '.join(ways)}{own}"
    )
    return text, len(groups)


def check_expression(expression: str) -> None:
    """Refuse a regular expression that names no patient.

    Args:
        expression: See `with_patients`.

    Raises:
        ConfigError: It is not one, or has no group.
    """
    try:
        groups = re.compile(expression).groups
    except re.error as error:
        raise ConfigError(
            f"patient is {expression!r}, which is no regular expression ({error}): correct it"
        ) from error
    if groups < 1:
        raise ConfigError(
            f"patient is {expression!r}: put the part of a name that is the patient into brackets"
        )


def with_patients(cases: Sequence[Case], expression: str, problems: list[str]) -> list[Case]:
    """Return cases with the patients in their names.

    Args:
        cases: The cases of a site.
        expression: Matches the whole name of a case; its first group is the patient.
        problems: A sentence is appended for each case that is left out.
    """
    found = []
    for case in cases:
        match = re.fullmatch(expression, case.case)
        if case.stated:
            problems.append(
                f"{case}: its patient is stated, and the site has patient: {expression}: leave one "
                f"of them out"
            )
        elif match is None or not match[1]:
            problems.append(
                f"{case}: the site's patient {expression} does not match its name: correct it, or "
                f"name the patients in a manifest"
            )
        else:
            found.append(replace(case, patient=match[1]))
    return found


def _first(expression: str, name: str) -> str | None:
    match = re.fullmatch(expression, name)
    return match[1] if match else None
