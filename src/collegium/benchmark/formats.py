"""Tables as text: for a terminal, in Markdown, in LaTeX, and as CSV for other programs."""

import csv
import html
from collections.abc import Sequence
from io import StringIO

from collegium.benchmark.cells import Cell
from collegium.benchmark.paired import Comparison, ComparisonTable
from collegium.benchmark.tables import (
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
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}", MINUS: "$-$", PLUS_MINUS: r"$\pm$", DASH: "--", "\n": " ", "\r": " ",
}  # fmt: skip

_COLUMNS = ("method", "column", "mean", "sd", "rank", "unit", "note")
_COMPARISON_COLUMNS = (
    "site", "method", "algorithm", "model", "reference_mean", "method_mean", "difference", "low",
    "high", "patients", "undefined", "p", "p_holm", "family", "outcome", "unit",
)  # fmt: skip


def cell_text(cell: Cell, unit: str = "") -> str:
    """Return e.g. "0.812 ± 0.010 (note)"."""
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
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = [
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    ]
    rule = "-" * len(texts[0])
    legend = f"{_about(table)}: mean {PLUS_MINUS} sd over seeds; * best, + second"
    return "\n".join([legend, rule, texts[0], rule, *texts[1:], rule]) + "\n"


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
    head, *body = [f"    {' & '.join(line)} \\\\" for line in lines]
    parts = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex(caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * len(table.columns)}}}",
        r"    \toprule",
        head,
        r"    \midrule",
        *body,
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(parts) + "\n"


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


def comparisons_to_markdown(table: ComparisonTable) -> str:
    """Return the question, a line per comparison with its answer, and what could not be compared.

    The last column is the whole sentence. P-values are those of the signed-rank test, then the
    same corrected for all methods at the site; a dash where there are too few patients.
    """
    unit = f" ({table.unit})" if table.unit else ""
    better = "higher" if table.higher_is_better else "lower"
    head = [
        "site", "method", *table.sides, "difference", "95 % interval", "patients", "p",
        "p corrected", "answer", "verdict",
    ]  # fmt: skip
    parts = [
        f"**{_markdown(table.question)}** {_markdown(table.metric + unit)}, {better} is better"
    ]
    if table.missing:
        parts.append(_markdown(table.missing))
    lines = [_comparison_line(found, table.unit) for found in table.comparisons + table.pooled]
    if lines:
        left = ("site", "method", "answer", "verdict")
        parts.append(_markdown_table([_markdown(text) for text in head], lines, left).rstrip("\n"))
    return "\n\n".join(parts) + "\n"


def _comparison_line(found: Comparison, unit: str) -> list[str]:
    texts = [
        found.site,
        found.name,
        number(found.local, unit),
        number(found.joined, unit),
        number(found.difference.mean, unit, signed=True),
        interval_text(found.difference, unit),
        str(found.difference.patients),
        *(DASH if p is None else _p_number(p) for p in (found.p, found.p_holm)),
        found.answer,
        found.verdict,
    ]
    return [_markdown(text) for text in texts]


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
    """What the numbers of a table are."""
    unit = f" ({table.unit})" if table.unit else ""
    where = " at sites outside" if table.where == "outside" else ""
    setting = f", {table.variation}" if table.variation else ""
    over = ", average over sites" if table.variations else ""
    return f"{table.metric}{unit}{where}{setting}{over}"


def _p_number(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


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
