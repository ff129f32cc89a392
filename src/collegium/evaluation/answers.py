"""The answers of a run as lines of text, for a terminal and for the report."""

from __future__ import annotations

from collegium.evaluation.comparisons import Comparison, ComparisonTable
from collegium.evaluation.wording import interval_text, number, title


def numbers_text(found: Comparison, sides: tuple[str, str]) -> str:
    """Return e.g. "FedBN personal, Dice 0.812 alone, 0.851 joined, difference +0.039 [...]".

    Args:
        found: The comparison.
        sides: What the reference and the method are called, see `ComparisonTable`.
    """
    verdict = found.verdict
    unit, (without, with_) = verdict.unit, sides
    metric = title(verdict.metric) + (f" in {unit}" if unit else "")
    difference = number(verdict.difference, unit, signed=True)
    if verdict.low is not None:
        difference += f" {interval_text(verdict.low, verdict.high, unit)}"
    return (
        f"{verdict.method}, {metric} {number(verdict.reference, unit)} {without}, "
        f"{number(verdict.joined, unit)} {with_}, difference {difference}"
    )


def answer_lines(table: ComparisonTable) -> list[str]:
    """Return the answers to single sites, a line each after the question; none without any site.

    Args:
        table: The comparisons with training alone, or with unadapted models.

    Returns:
        Lines such as "north: yes. FedBN personal, Dice ... Joining helps here: ...", and the notes.
    """
    lines = [
        f"{c.verdict.site}: {c.verdict.answer}. {numbers_text(c, table.sides)}. "
        f"{c.verdict.sentence}"
        for c in table.answers
    ]
    answered = {c.verdict.site for c in table.answers}
    lines += [
        f"{site}: no method was chosen, for no score on validation is defined there."
        for site in dict.fromkeys(c.verdict.site for c in table.by_site)
        if site not in answered
    ]
    return [table.question, *lines, *table.notes] if lines else []
