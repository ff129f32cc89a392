import csv
import re
from io import StringIO

import pytest

from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.formats import to_csv, to_latex, to_markdown, to_text
from collegium.evaluation.results import results_frame
from collegium.evaluation.tables import SUMMARIES, MethodTable, make_cells, method_table


def test_markdown_marks_best_and_second_and_escapes_bars(scores):
    rows = scores("fedavg", "global", "A|B", [0.8]) + scores("ditto", "global", "A|B", [0.7])
    lines = to_markdown(method_table(results_frame(rows), "dice", ["fedavg"])).splitlines()
    assert lines[0].startswith("| method | A\\|B | average |")
    assert lines[2].startswith("| FedAvg global | **0.800** |")
    assert lines[3].startswith("| Ditto global | <u>0.700</u> |")


def test_text_is_aligned_and_marks_best_and_second(three_methods):
    lines = to_text(method_table(results_frame(three_methods), "dice", ["fedavg"])).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    fedavg = next(line for line in lines if line.startswith("FedAvg global"))
    assert "0.805 \u00b1 0.007*" in fedavg
    assert "0.550 \u00b1 0.000+" in fedavg


@pytest.fixture
def small():
    """Two methods at one awkwardly named site."""
    cells = [
        cell
        for algorithm, model, first in (
            ("fedavg", "none", (0.8125, 0.0104)), ("50% & {x}", "tent", (-0.25, 0.1)),
        )
        for cell in (
            (algorithm, model, "a_b", *first, ""), (algorithm, model, "average", None, None, ""),
            (algorithm, model, "worst site", 0.5, None, "a_b"),
            (algorithm, model, "disparity", None, None, ""),
            (algorithm, model, "site sd", None, None, ""),
        )
    ]  # fmt: skip
    frame = make_cells(cells, "", "outside", higher=True)
    frame = frame.assign(rank=frame["rank"].where(frame["column"] == "a_b", 0))
    return MethodTable("dice", "", True, ("a_b",), ("a_b", *SUMMARIES), frame, "outside")


def test_latex_is_a_table_of_booktabs_letter_by_letter(small):
    assert to_latex(small).splitlines() == [
        r"\begin{table}",
        r"  \centering",
        r"  \caption{dice at sites outside: mean $\pm$ standard deviation over seeds; "
        r"best in bold, second underlined.}",
        r"  \begin{tabular}{lrrrrr}",
        r"    \toprule",
        r"    Method & a\_b & average & worst site & disparity & site sd \\",
        r"    \midrule",
        r"    FedAvg & \textbf{0.812} $\pm$ 0.010 & -- & 0.500 (a\_b) & -- & -- \\",
        r"    50\% \& \{x\} + Tent & \underline{$-$0.250} $\pm$ 0.100 "
        r"& -- & 0.500 (a\_b) & -- & -- \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


def test_a_caption_of_ones_own_is_escaped(small):
    text = to_latex(small, caption="Dice ~ 95 % #1 \\ $x$ ^ <2 mm>\n\u2212 \u00b1")
    assert (
        r"\caption{Dice \textasciitilde{} 95 \% \#1 \textbackslash{} \$x\$ "
        r"\textasciicircum{} \textless{}2 mm\textgreater{} $-$ $\pm$}"
    ) in text


def test_csv_has_every_digit_and_no_typographic_signs(small):
    text = to_csv(small)
    records = list(csv.DictReader(StringIO(text)))
    assert list(records[0]) == ["method", "column", "mean", "sd", "rank", "unit", "note"]
    assert records[0] == {
        "method": "FedAvg", "column": "a_b", "mean": "0.8125", "sd": "0.0104", "rank": "1",
        "unit": "", "note": "",
    }  # fmt: skip
    assert records[5]["mean"] == "-0.25"
    assert [record["mean"] for record in records if record["column"] == "average"] == ["", ""]
    assert text.isascii()


def test_csv_survives_commas_quotes_and_line_ends_in_names(scores):
    rows = scores("fedavg", "global", 'a,"b"\nc', [4.0], metric="hd95", unit="mm")
    (record, *_) = csv.DictReader(StringIO(to_csv(method_table(results_frame(rows), "hd95"))))
    assert (record["column"], record["unit"]) == ('a,"b"\nc', "mm")


def test_no_text_of_a_csv_is_a_formula(scores):
    rows = scores("=A1", "global", "-x", [-4.0], metric="hd95", unit="@mm")
    (record, *_) = csv.DictReader(StringIO(to_csv(method_table(results_frame(rows), "hd95"))))
    assert (record["column"], record["unit"], record["mean"]) == ("'-x", "'@mm", "-4.0")
    assert record["method"].startswith("'=A1")


def test_cells_as_text(scores):
    rows = scores("a", "global", "B", [12.5], metric="hd95", unit="mm")
    assert "12.50 (B)" in to_text(method_table(results_frame(rows), "hd95"))
    rows = [row for seed, value in enumerate((0.8, 0.825))
            for row in scores("a", "global", "B", [value], seed=seed)]  # fmt: skip
    assert "0.812 \u00b1 0.018" in to_text(method_table(results_frame(rows), "dice"))


def test_text_says_where_and_of_which_setting(outside):
    rows = outside("fedavg", "none", "A", [3.0], metric="hd95", unit="mm", variation="tau=0.5")
    text = to_text(method_table(results_frame(rows), "hd95", where="outside", variation="tau=0.5"))
    assert text.startswith("hd95 (mm) at sites outside, tau=0.5: mean")


def test_comparisons_in_markdown_ask_and_answer(joined_rows):
    lines = to_markdown(joining_table(results_frame(joined_rows), "dice", ["fedavg"])).splitlines()
    assert lines[0] == "**Does joining help this site?** dice, higher is better"
    assert lines[2].startswith("| site | method | alone | joined | difference | 95 % interval |")
    assert lines[4].startswith(
        "| A | FedAvg global | 0.570 | 0.672 | +0.102 | [+0.097, +0.108] | 8 | 1 | &lt; 0.001 | "
        "&lt; 0.001 | yes, this model | This model is relevantly better than the one "
    )
    assert "| no, this model | This model is relevantly worse than " in lines[6]
    assert "| \u2013 | \u2013 | cannot tell | Cannot tell: 1 test patient;" in lines[5]


def test_comparisons_in_markdown_say_what_is_missing():
    table = joining_table(results_frame([]), "dice", local="nobody | else")
    assert to_markdown(table) == (
        "**Does joining help this site?** dice, higher is better\n\n"
        "Nobody trained alone in this run: it holds no scores of an algorithm labelled 'nobody "
        "\\| else', so whether joining helps cannot be said. Add it to the algorithms.\n"
    )


def test_comparisons_for_a_terminal_have_the_cells_of_each_line(joined_rows):
    legend, *lines = to_text(joining_table(results_frame(joined_rows), "dice", ["fedavg"])).split(
        "\n"
    )
    assert legend == (
        "Does joining help this site? dice, higher is better; "
        "yes or no where the 95 % interval leaves out zero"
    )
    assert lines[0] == lines[2] == lines[6] == "-" * len(lines[1])
    assert {len(line) for line in lines[:7]} == {len(lines[1])}
    assert lines[7:] == [""]
    assert lines[3].startswith("A     FedAvg global   ")  # words stand left, the others right
    assert lines[3].endswith("      < 0.001  yes, this model")
    cells = [[cell.strip() for cell in re.split("  +", line)] for line in [lines[1], *lines[3:6]]]
    assert cells == [
        ["site", "method", "alone", "joined", "difference", "95 % interval", "patients",
         "trainings", "p", "p corrected", "answer"],
        ["A", "FedAvg global", "0.570", "0.672", "+0.102", "[+0.097, +0.108]", "8", "1",
         "< 0.001", "< 0.001", "yes, this model"],
        ["A", "Ditto global", "0.500", "0.900", "+0.400", "\u2013", "1", "1", "\u2013", "\u2013",
         "cannot tell"],
        ["A", "Ditto personal", "0.570", "0.468", "\u22120.103", "[\u22120.108, \u22120.097]",
         "8", "1", "< 0.001", "< 0.001", "no, this model"],
    ]  # fmt: skip


def test_comparisons_in_latex_are_a_table_of_booktabs_letter_by_letter(scores):
    rows = scores("local", "personal", "a_b", [9.0] * 12, metric="hd95_x", unit="mm")
    rows += scores("50% & {x}", "global", "a_b", [7.5] * 6 + [7.4] * 6, metric="hd95_x", unit="mm")
    assert to_latex(joining_table(results_frame(rows), "hd95_x")).splitlines() == [
        r"\begin{table}",
        r"  \centering",
        r"  \caption{Does joining help this site? hd95\_x (mm), lower is better; "
        r"yes or no where the 95 \% interval leaves out zero.}",
        r"  \begin{tabular}{llrrrrrrrrr}",
        r"    \toprule",
        r"    Site & Method & alone & joined & difference & 95 \% interval & patients & trainings "
        r"& p & p corrected & answer \\",
        r"    \midrule",
        r"    a\_b & 50\% \& \{x\} global & 9.00 & 7.45 & $-$1.55 & [$-$1.58, $-$1.52] & 12 & 1 "
        r"& \textless{} 0.001 & \textless{} 0.001 & yes, this model \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]


def test_comparisons_as_text_and_latex_say_what_is_missing():
    table = joining_table(results_frame([]), "dice", local="a_b", variation="tau=0.5")
    legend, missing = to_text(table).splitlines()
    assert legend.startswith("Does joining help this site? dice, tau=0.5, higher is better; yes")
    assert missing.startswith(
        "Nobody trained alone in this run: it holds no scores of an algorithm"
    )
    latex = to_latex(table)
    assert r"leaves out zero. Nobody trained alone in this run: " in latex
    assert r"labelled 'a\_b', so whether" in latex
    assert latex.count(r"\\") == 1  # the head alone
    assert r"\caption{50 \% of \_}" in to_latex(table, caption="50 % of _")
    assert r"\caption{a ''b''}" in to_latex(table, caption='a "b"')


def test_comparisons_in_csv_have_a_line_each_and_those_over_all_sites(scores):
    rows = []
    for site, shift in (("A", 0.25), ("B", 0.5)):
        rows += scores("fedavg", "global", site, [0.125] * 3)
        rows += scores("ditto", "personal", site, [0.125 + shift] * 3)
    text = to_csv(joining_table(results_frame(rows), "dice", local="fedavg"))
    records = list(csv.DictReader(StringIO(text)))
    assert [(r["site"], r["difference"], r["patients"]) for r in records] == [
        ("A", "0.25", "3"),
        ("B", "0.5", "3"),
        ("average", "0.375", "6"),
    ]
    assert [records[2][name] for name in ("reference", "joined", "p", "outcome", "answer")] == [
        "0.125", "0.5", "", "cannot tell", "cannot tell",
    ]  # fmt: skip
    assert records[0]["p"] == records[0]["p_holm"] == ""
