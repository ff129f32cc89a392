"""Tables as text: for a terminal, in Markdown, in LaTeX, and as CSV for other programs."""

import csv
import html
from collections.abc import Sequence
from io import StringIO

from collegium.evaluation.cells import Cell
from collegium.evaluation.paired import Comparison, ComparisonTable
from collegium.evaluation.significance import LEVEL
from collegium.evaluation.tables import (
    DASH,
    MINUS,
    PLUS_MINUS,
    Method,
    MethodTable,
    interval_text,
    number,
)

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#",
    "%": r"\%", "_": r"\_", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': "''",
    "`": r"\textasciigrave{}", MINUS: "$-$", PLUS_MINUS: r"$\pm$", DASH: "--", "\n": " ", "\r": " ",
}  # fmt: skip

_ANSWERED = f"yes or no where the interval leaves out zero and p corrected is below {LEVEL:g}"
_COLUMNS = ("method", "column", "mean", "sd", "rank", "unit", "note")
_COMPARISON_COLUMNS = (
    "site", "method", "algorithm", "model", "reference_mean", "method_mean", "difference", "low",
    "high", "patients", "undefined", "p", "p_holm", "family", "outcome", "unit",
)  # fmt: skip


def cell_text(cell: Cell, unit: str = "") -> str:
    """Return a cell as text, e.g. "0.812 ± 0.010 (note)".

    Args:
        cell: the cell.
        unit: the unit of the metric.
    """
    text = number(cell.mean, unit)
    if cell.sd is not None:
        text += f" {PLUS_MINUS} {number(cell.sd, unit)}"
    return f"{text} ({cell.note})" if cell.note else text


def to_text(table: MethodTable) -> str:
    """Return the table for a terminal; ``*`` marks the best and ``+`` the second."""
    marks = {0: " ", 1: "*", 2: "+"}
    lines = [["method", *(f"{column} " for column in table.columns)]]
    for method in table.methods:
        cells = _cells(table, method)
        lines.append([method.name, *(cell_text(c, table.unit) + marks[c.rank] for c in cells)])
    legend = f"{_about(table)}: mean {PLUS_MINUS} sd over seeds; * best, + second"
    return "\n".join([legend, *_text_table(lines)]) + "\n"


def to_markdown(table: MethodTable) -> str:
    """Return the table in Markdown: the best in bold, the second underlined."""
    marks = {0: ("", ""), 1: ("**", "**"), 2: ("<u>", "</u>")}
    lines = []
    for method in table.methods:
        cells = _cells(table, method)
        marked = [
            marks[cell.rank][0] + _markdown(cell_text(cell, table.unit)) + marks[cell.rank][1]
            for cell in cells
        ]
        lines.append([_markdown(method.name), *marked])
    return _markdown_table([_markdown(text) for text in ("method", *table.columns)], lines)


def to_latex(table: MethodTable, *, caption: str | None = None) -> str:
    r"""Return the table in LaTeX, for the package booktabs: best in bold, second underlined.

    Args:
        table: The table.
        caption: Plain text under which the table stands; by default what it shows. Every character
            that means something to LaTeX is escaped.

    Returns:
        A ``table`` environment that needs ``\usepackage{booktabs}``.
    """
    if caption is None:
        caption = (
            f"{_about(table)}: mean {PLUS_MINUS} standard deviation over seeds; "
            "best in bold, second underlined."
        )
    lines = [["Method", *map(_latex, table.columns)]]
    for method in table.methods:
        cells = [_latex_cell(cell, table.unit) for cell in _cells(table, method)]
        lines.append([_latex(method.name), *cells])
    return _latex_table(caption, lines)


def to_csv(table: MethodTable) -> str:
    """Return a line per cell with every digit: method, column, mean, sd, rank, unit, note."""
    return _csv(
        _COLUMNS,
        [
            [method.name, column, cell.mean, cell.sd, cell.rank, table.unit, cell.note]
            for method in table.methods
            for column, cell in zip(table.columns, _cells(table, method), strict=True)
        ],
    )


def comparisons_to_text(table: ComparisonTable) -> str:
    """Return the question, what could not be compared, and a line per comparison, for a terminal.

    The columns are those of `comparisons_to_markdown` without the sentence.
    """
    parts = [f"{table.question} {_compared(table)}; {_ANSWERED}"]
    if table.missing:
        parts.append(table.missing)
    if found := table.comparisons + table.pooled:
        lines = [_comparison_texts(one, table.unit) for one in found]
        parts += _text_table([_comparison_head(table), *lines], left=2)
    return "\n".join(parts) + "\n"


def comparisons_to_markdown(table: ComparisonTable) -> str:
    """Return the question, a line per comparison with its answer, and what could not be compared.

    The last column is the whole sentence. P-values are those of the signed-rank test, then the
    same corrected for all methods at the site; a dash where there are too few patients.
    """
    parts = [f"**{_markdown(table.question)}** {_markdown(_compared(table))}"]
    if table.missing:
        parts.append(_markdown(table.missing))
    lines = [
        [_markdown(text) for text in (*_comparison_texts(found, table.unit), found.verdict)]
        for found in table.comparisons + table.pooled
    ]
    if lines:
        left = ("site", "method", "answer", "verdict")
        head = [_markdown(text) for text in (*_comparison_head(table), "verdict")]
        parts.append(_markdown_table(head, lines, left).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def comparisons_to_latex(table: ComparisonTable, *, caption: str | None = None) -> str:
    r"""Return the comparisons in LaTeX, for the package booktabs.

    The columns are those of `comparisons_to_markdown` without the sentence.

    Args:
        table: The table.
        caption: Plain text under which the table stands; by default the question, how it is
            answered, and what could not be compared. Every character that means something to LaTeX
            is escaped.

    Returns:
        A ``table`` environment that needs ``\usepackage{booktabs}``.
    """
    if caption is None:
        caption = " ".join(
            filter(None, [f"{table.question} {_compared(table)}; {_ANSWERED}.", table.missing])
        )
    site, method, *head = _comparison_head(table)
    lines = [[site.capitalize(), method.capitalize(), *head]] + [
        _comparison_texts(found, table.unit) for found in table.comparisons + table.pooled
    ]
    return _latex_table(caption, [list(map(_latex, line)) for line in lines], left=2)


def _compared(table: ComparisonTable) -> str:
    """Return in words what is compared, and which direction is better."""
    unit = f" ({table.unit})" if table.unit else ""
    setting = f", {table.variation}" if table.variation else ""
    better = "higher" if table.higher_is_better else "lower"
    return f"{table.metric}{unit}{setting}, {better} is better"


def _comparison_head(table: ComparisonTable) -> list[str]:
    return [
        "site", "method", *table.sides, "difference", "95 % interval", "patients", "p",
        "p corrected", "answer",
    ]  # fmt: skip


def _comparison_texts(found: Comparison, unit: str) -> list[str]:
    return [
        found.site,
        found.name,
        number(found.local, unit),
        number(found.joined, unit),
        number(found.difference.mean, unit, signed=True),
        interval_text(found.difference, unit),
        str(found.difference.patients),
        *(DASH if p is None else _p_number(p) for p in (found.p, found.p_holm)),
        found.answer,
    ]


def comparisons_to_csv(table: ComparisonTable) -> str:
    """Return a line per comparison with every digit; those over all sites have the site "average".

    The columns: site, method, algorithm, model, reference_mean, method_mean, difference, low, high,
    patients, undefined, p, p_holm, family, outcome, unit.
    """
    return _csv(
        _COMPARISON_COLUMNS,
        [
            [
                c.site, c.name, c.algorithm, c.model, c.local, c.joined, c.difference.mean,
                c.difference.low, c.difference.high, c.difference.patients, c.difference.undefined,
                c.p, c.p_holm, c.family, c.outcome, table.unit,
            ]
            for c in table.comparisons + table.pooled
        ],
    )  # fmt: skip


def _cells(table: MethodTable, method: Method) -> list[Cell]:
    return [method.cells[column] for column in table.columns]


def _about(table: MethodTable) -> str:
    """Return in words what the numbers of a table are."""
    unit = f" ({table.unit})" if table.unit else ""
    where = " at sites outside" if table.where == "outside" else ""
    setting = f", {table.variation}" if table.variation else ""
    over = ", average over sites" if table.variations else ""
    return f"{table.metric}{unit}{where}{setting}{over}"


def _p_number(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _text_table(lines: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Align and rule the lines, the first of which is the head; ``left`` columns stand left."""
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


def _latex_table(caption: str, lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
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


def _markdown(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|").replace("\n", " ")


def _markdown_table(
    head: Sequence[str], lines: Sequence[Sequence[str]], left: Sequence[str] = ("method",)
) -> str:
    rule = ["---" if text in left else "---:" for text in head]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines]) + "\n"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def _latex_cell(cell: Cell, unit: str) -> str:
    text = _latex(number(cell.mean, unit))
    command = {1: r"\textbf", 2: r"\underline"}.get(cell.rank)
    if command:
        text = f"{command}{{{text}}}"
    if cell.sd is not None:
        text += rf" $\pm$ {_latex(number(cell.sd, unit))}"
    return f"{text} ({_latex(cell.note)})" if cell.note else text


def _csv(columns: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(lines)
    return text.getvalue()
