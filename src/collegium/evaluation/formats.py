"""Tables as text: for a terminal, in Markdown and LaTeX, and as CSV."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from math import isnan
from typing import Any

from collegium.evaluation.comparisons import ComparisonTable
from collegium.evaluation.entries import distinct, names_of
from collegium.evaluation.results import frame_to_csv
from collegium.evaluation.tables import MethodTable
from collegium.evaluation.verdicts import Verdict, as_record
from collegium.evaluation.wording import (
    DASH,
    MINUS,
    PLUS_MINUS,
    interval_text,
    number,
    p_value,
)

_LATEX = str.maketrans({
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    "`": r"\textasciigrave{}", MINUS: "$-$", PLUS_MINUS: r"$\pm$", DASH: "--", "\n": " ", "\r": " ",
})  # fmt: skip

_ANSWERED = "yes or no where the 95 % interval leaves out zero"
_METHOD_CSV = ["method", "column", "mean", "sd", "rank", "unit", "note"]
_COMPARISON_CSV = [
    "site", "method", "algorithm", "model", "chosen", "reference", "joined", "difference", "low",
    "high", "patients", "undefined", "trainings_joined", "trainings_reference", "p", "p_holm",
    "family", "outcome", "answer", "reason", "smallest_detectable", "unit",
    "unusable", "collapsed", "rising",
]  # fmt: skip


def _cell_text(cell: Any, unit: str) -> str:
    """Return a cell of a `MethodTable`, e.g. "0.812 ± 0.010 (note)"."""
    text = number(cell.mean, unit)
    if not isnan(cell.sd):
        text += f" {PLUS_MINUS} {number(cell.sd, unit)}"
    return f"{text} ({cell.note})" if cell.note else text


def to_text(table: MethodTable | ComparisonTable) -> str:
    """Return a table for a terminal.

    Of methods, ``*`` marks the best and ``+`` the second. Of comparisons, the question and what
    could not be compared stand above; the columns are those of `to_markdown` without the sentence.
    """
    if isinstance(table, ComparisonTable):
        parts = [f"{table.question} {_about(table)}; {_ANSWERED}"]
        parts += [table.missing] if table.missing else []
        lines = _comparison_lines(table)
        parts += aligned(lines, left=2) if len(lines) > 1 else []
        return "\n".join([*parts, *table.notes]) + "\n"

    lines = [["method", *(f"{column} " for column in table.columns)]]
    for name, cells in table.methods:
        lines.append([name, *(_cell_text(c, table.unit) + " *+"[c.rank] for c in cells)])
    legend = f"{_about(table)}: mean {PLUS_MINUS} sd over seeds; * best, + second"
    return "\n".join([legend, *aligned(lines, left=1), *table.notes]) + "\n"


def to_markdown(table: MethodTable | ComparisonTable) -> str:
    """Return a table in Markdown.

    Of methods, the best is bold and the second underlined. Of comparisons, the question and what
    could not be compared stand above, and the last column is the whole sentence; p-values are the
    level at which the interval would reach zero, then the same corrected for all distinct methods
    at the site, a dash without an interval.
    """
    if isinstance(table, ComparisonTable):
        parts = [f"**{_markdown(table.question)}** {_markdown(_about(table))}"]
        parts += [_markdown(table.missing)] if table.missing else []
        sentences = ["verdict", *(c.verdict.sentence for c in distinct(table.comparisons))]
        lines = [
            [_markdown(text) for text in (*line, sentence)]
            for line, sentence in zip(_comparison_lines(table), sentences, strict=True)
        ]
        left = ("site", "method", "answer", "verdict")
        parts += [markdown_table(lines, left)] if len(lines) > 1 else []
        parts += [_markdown(" ".join(table.notes))] if table.notes else []
        return "\n\n".join(parts) + "\n"

    marks = ("{}", "**{}**", "<u>{}</u>")
    lines = [[_markdown(text) for text in ("method", *table.columns)]]
    for name, cells in table.methods:
        texts = [marks[c.rank].format(_markdown(_cell_text(c, table.unit))) for c in cells]
        lines.append([_markdown(name), *texts])
    notes = [_markdown(" ".join(table.notes))] if table.notes else []
    return "\n\n".join([markdown_table(lines, ("method",)), *notes]) + "\n"


def to_latex(table: MethodTable | ComparisonTable, *, caption: str | None = None) -> str:
    r"""Return a table in LaTeX, for the package booktabs.

    Of methods, the best is bold and the second underlined. The columns of comparisons are those of
    `to_markdown` without the sentence.

    Args:
        table: The table.
        caption: Plain text under which the table stands; by default what it shows and, of
            comparisons, how they are answered and what could not be compared. Every character that
            means something to LaTeX is escaped.

    Returns:
        A ``table`` environment that needs ``\usepackage{booktabs}``.
    """
    if isinstance(table, ComparisonTable):
        about = f"{table.question} {_about(table)}; {_ANSWERED}."
        default = " ".join(filter(None, (about, table.missing, *table.notes)))
        lines = [[_latex(text) for text in line] for line in _comparison_lines(table)]
        lines[0][:2] = "Site", "Method"
        return _latex_table(default if caption is None else caption, lines, left=2)
    default = (
        f"{_about(table)}: mean {PLUS_MINUS} standard deviation over seeds; "
        "best in bold, second underlined."
    )
    default = " ".join((default, *table.notes))
    lines = [["Method", *map(_latex, table.columns)]]
    for name, cells in table.methods:
        lines.append([_latex(name), *(_latex_cell(cell, table.unit) for cell in cells)])
    return _latex_table(default if caption is None else caption, lines, left=1)


def to_csv(table: MethodTable | ComparisonTable) -> str:
    """Return a table as CSV, with every digit; see `frame_to_csv`.

    Of methods, a line per cell: method, column, mean, sd, rank, unit, note. Of comparisons, a line
    each, those over all sites with the site "average".
    """
    if isinstance(table, ComparisonTable):
        frame = table.frame.reindex(columns=_COMPARISON_CSV)
    else:
        frame = table.cells.assign(unit=table.unit)[_METHOD_CSV]
    return frame_to_csv(frame)


def to_json(tables: Iterable[ComparisonTable]) -> str:
    """Return all verdicts of some tables as JSON.

    An entry for each: algorithm, model, variation, over_sites and chosen as in `Comparison` and
    `ComparisonTable`; answer, sentence and which of the two models is unusable in words; and
    verdict, which `from_record` reads.
    """
    entries = [
        {
            "variation": table.variation, "algorithm": c.algorithm, "model": c.model,
            "over_sites": c.over_sites, "chosen": c.chosen, "answer": c.verdict.answer,
            "unusable": c.verdict.unusable,
            "sentence": c.verdict.sentence, "verdict": as_record(c.verdict),
        }
        for table in tables
        for c in table.comparisons
    ]  # fmt: skip
    return json.dumps(entries, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _about(table: MethodTable | ComparisonTable) -> str:
    """Return what the numbers of a table are and, of comparisons, which way is better."""
    unit = f" ({table.unit})" if table.unit else ""
    setting = f", {table.variation}" if table.variation else ""
    if isinstance(table, ComparisonTable):
        better = "higher" if table.higher_is_better else "lower"
        return f"{table.metric}{unit}{setting}, {better} is better"
    where = " at sites outside" if table.where == "outside" else ""
    over = ", average over sites" if table.over_sites else ""
    cases = f", {table.cases}" if table.cases else ""
    return f"{table.metric}{unit}{where}{setting}{cases}{over}"


def _comparison_lines(table: ComparisonTable) -> list[list[str]]:
    """Return the head and a line for each distinct model at a site, with all of its names."""
    unit = table.unit
    head = [
        "site", "method", *table.sides, "difference", "95 % interval", "patients", "trainings", "p",
        "p corrected", "answer",
    ]  # fmt: skip
    return [head] + [
        [
            v.site, names_of(c), number(v.reference, unit),
            number(v.joined, unit), number(v.difference, unit, signed=True),
            interval_text(v.low, v.high, unit), str(v.patients or DASH), _trainings(v),
            p_value(v.p), p_value(v.p_holm), v.answer,
        ]
        for c in distinct(table.comparisons)
        for v in (c.verdict,)
    ]  # fmt: skip


def _trainings(verdict: Verdict) -> str:
    """Return how many trainings both have, such as "3" or "5 : 3"."""
    if not verdict.patients:
        return DASH
    joined, reference = verdict.trainings_joined, verdict.trainings_reference
    return str(joined) if joined == reference else f"{joined} : {reference}"


def aligned(lines: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return lines aligned and ruled, for a terminal.

    Args:
        lines: the cells, the head first.
        left: how many columns stand left.
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            cell.ljust(width) if place < left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    rule = "-" * len(texts[0])
    return [rule, texts[0], rule, *texts[1:], rule]


def _markdown(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


def markdown_table(lines: Sequence[Sequence[str]], left: Sequence[str]) -> str:
    """Return lines as a table in Markdown.

    Args:
        lines: the cells, the head first.
        left: the heads of columns that stand left.
    """
    rule = ["---" if text in left else "---:" for text in lines[0]]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])


def _latex(text: str) -> str:
    return text.translate(_LATEX)


def _latex_table(caption: str, lines: Sequence[Sequence[str]], *, left: int) -> str:
    """Set lines of LaTeX, the first of which is the head; the caption is plain text."""
    head, *body = [f"    {' & '.join(line)} \\\\" for line in lines]
    parts = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex(caption)}}}",
        rf"  \begin{{tabular}}{{{'l' * left}{'r' * (len(lines[0]) - left)}}}",
        r"    \toprule",
        head,
        r"    \midrule",
        *body,
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


def _latex_cell(cell: Any, unit: str) -> str:
    text = _latex(number(cell.mean, unit))
    text = ("%s", r"\textbf{%s}", r"\underline{%s}")[cell.rank] % text
    if not isnan(cell.sd):
        text += rf" $\pm$ {_latex(number(cell.sd, unit))}"
    return f"{text} ({_latex(cell.note)})" if cell.note else text
