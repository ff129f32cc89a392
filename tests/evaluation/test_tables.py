from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from collegium.evaluation.cells import Cell
from collegium.evaluation.formats import to_text
from collegium.evaluation.results import Row
from collegium.evaluation.significance import Interval, p_text
from collegium.evaluation.tables import (
    cell_html,
    final_scores,
    interval_text,
    joining_table,
    method_name,
    method_table,
    number,
    scored_name,
)


def test_cells_are_mean_and_sample_sd_over_seeds(three_methods):
    table = method_table(three_methods, "dice")
    local = table.methods[0]
    assert local.name == "Local personal"
    # seed 0: (0.60 + 0.70) / 2; seed 1: 0.02 more; sd of two is the difference / sqrt 2
    assert local.cells["A"].mean == pytest.approx(0.66)
    assert local.cells["A"].sd == pytest.approx(0.02 / 2**0.5)
    assert local.cells["average"].mean == pytest.approx((0.66 + 0.51) / 2)


def test_a_patient_with_many_cases_counts_once(scores):
    rows = scores("fedavg", "global", "A", [0.9, 0.9, 0.9, 0.5], patients=["p", "p", "p", "q"])
    assert method_table(rows, "dice").methods[0].cells["A"].mean == pytest.approx(0.7)


def test_worst_site_disparity_and_site_sd_come_from_the_site_means(three_methods):
    fedavg = method_table(three_methods, "dice", ["fedavg"]).methods[1]
    assert fedavg.name == "FedAvg global"
    # A: seeds 0.80 and 0.81, so 0.805; B: 0.55
    assert fedavg.cells["worst site"].mean == pytest.approx(0.55)
    assert fedavg.cells["worst site"].note == "B"
    assert fedavg.cells["disparity"].mean == pytest.approx(0.255)
    assert fedavg.cells["site sd"].mean == pytest.approx(0.1275)


def test_best_and_second_are_marked_in_each_column(three_methods):
    table = method_table(three_methods, "dice")
    ranks = {method.name: {c: m.rank for c, m in method.cells.items()} for method in table.methods}
    assert [ranks[n]["A"] for n in ("FedAvg global", "Ditto personal", "Local personal")] == [
        1,
        2,
        0,
    ]
    assert [ranks[n]["B"] for n in ("Ditto personal", "FedAvg global", "Local personal")] == [
        1,
        2,
        0,
    ]
    # disparity: Ditto 0.05, Local 0.15, FedAvg 0.255; the smallest is the best
    assert [ranks[n]["disparity"] for n in ("Ditto personal", "Local personal")] == [1, 2]


def test_what_prints_alike_ranks_alike(scores):
    rows = scores("a", "global", "A", [0.80001]) + scores("b", "global", "A", [0.80004])
    rows += scores("c", "global", "A", [0.7])
    assert [m.cells["A"].rank for m in method_table(rows, "dice").methods] == [1, 1, 2]


def test_a_single_method_is_not_called_the_best(scores):
    table = method_table(scores("fedavg", "global", "A", [0.8]), "dice")
    assert table.methods[0].cells["A"] == Cell(0.8)


def test_a_distance_is_better_when_lower(scores):
    rows = scores("fedavg", "global", "A", [4.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "A", [2.0], metric="hd95", unit="mm")
    rows += scores("fedavg", "global", "B", [8.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "B", [3.0], metric="hd95", unit="mm")
    ditto, fedavg = method_table(rows, "hd95").methods
    assert (ditto.cells["A"].rank, fedavg.cells["A"].rank) == (1, 2)
    assert (fedavg.cells["worst site"].mean, fedavg.cells["worst site"].note) == (8.0, "B")


def test_undefined_scores_enter_no_mean_and_a_site_without_any_no_average(scores):
    rows = scores("fedavg", "global", "A", [0.8, None]) + scores("fedavg", "global", "B", [None])
    rows += scores("ditto", "global", "A", [0.6]) + scores("ditto", "global", "B", [0.4])
    ditto, fedavg = method_table(rows, "dice").methods
    assert fedavg.cells["A"].mean == pytest.approx(0.8)
    assert [fedavg.cells[c].mean for c in ("B", "average", "worst site", "disparity")] == [None] * 4
    assert ditto.cells["average"].mean == pytest.approx(0.5)


def test_a_site_undefined_for_everyone_is_left_out_of_the_average(scores):
    rows = scores("fedavg", "global", "A", [0.8]) + scores("fedavg", "global", "B", [None])
    rows += scores("fedavg", "global", "C", [0.6])
    cells = method_table(rows, "dice").methods[0].cells
    assert cells["B"].mean is None
    assert cells["average"].mean == pytest.approx(0.7)


def test_rows_of_rounds_are_no_final_scores():
    rows = [Row(experiment="e", algorithm="fedavg", seed=0, round=1, site="A", split="val",
                model="global", metric="dice", value=0.1)]  # fmt: skip
    table = method_table(rows, "dice")
    assert table.methods == ()
    assert "dice" in to_text(table)


def test_methods_stand_with_local_first_then_in_the_order_asked(three_methods):
    table = method_table(three_methods, "dice", ["fedavg", "ditto"])
    assert [m.algorithm for m in table.methods] == ["local", "fedavg", "ditto"]
    assert table.columns == ("A", "B", "average", "worst site", "disparity", "site sd")


def test_html_cells_mark_and_escape():
    assert cell_html(Cell(0.8125, 0.0104, 1)) == (
        '<td><strong>0.812</strong> <span class="sd">\u00b1 0.010</span></td>'
    )
    assert "<u>2.50</u>" in cell_html(Cell(2.5, None, 2), "mm")
    assert "&lt;b&gt;x" in cell_html(Cell(0.5, note="<b>x"))
    assert cell_html(Cell(None)) == "<td>\u2013</td>"


def test_numbers_have_sensible_digits_and_a_typographic_minus():
    assert number(0.8124) == "0.812"
    assert number(-0.0124, signed=True) == "\u22120.012"
    assert number(12.345, "mm") == "12.35"
    assert number(-0.0001) == "0.000"
    assert number(0.0001, signed=True) == "+0.000"
    assert number(0.0, signed=True) == "0.000"
    assert interval_text(Interval(0.01, -0.012, 0.034, 9, 0)) == "[\u22120.012, +0.034]"
    assert interval_text(Interval(0.01, None, None, 1, 0)) == "\u2013"


def test_names_are_spelled_as_in_the_field_and_own_labels_kept():
    assert method_name("fedavg", "global") == "FedAvg global"
    assert method_name("ditto lam=1", "personal") == "ditto lam=1 personal"


def test_joining_compares_each_method_with_local_by_patient(joined_rows):
    table = joining_table(joined_rows, "dice", ["fedavg", "ditto"])
    found = {c.name: c for c in table.comparisons}
    assert list(found) == ["FedAvg global", "Ditto global", "Ditto personal"]
    fedavg = found["FedAvg global"]
    assert [fedavg.local, fedavg.joined] == pytest.approx([0.57, 0.67])
    assert fedavg.difference.mean == pytest.approx(0.1)
    assert fedavg.difference.low == pytest.approx(0.1)
    assert fedavg.outcome == "helps"
    assert found["Ditto personal"].outcome == "hurts"
    assert found["Ditto global"].outcome == "cannot tell"
    assert found["Ditto global"].difference.undefined == 7


def test_joining_pairs_by_case_and_seed_only_where_both_have_a_score(scores):
    rows = scores("local", "personal", "A", [0.5, 0.7])
    rows += scores("fedavg", "global", "A", [0.6, 0.9])
    rows += scores("fedavg", "global", "A", [0.0, 0.0], seed=1)  # local has not run this seed
    (found,) = joining_table(rows, "dice").comparisons
    assert found.difference.mean == pytest.approx(0.15)
    assert found.difference.patients == 2


def test_joining_knows_local_by_its_label(joined_rows):
    rows = [r for r in joined_rows if r.algorithm != "ditto"]
    (found,) = joining_table(rows, "dice", local="fedavg").comparisons
    assert found.name == "Local personal"
    assert found.outcome == "hurts"


def test_joining_says_so_when_nobody_trained_alone(joined_rows):
    rows = [r for r in joined_rows if r.algorithm != "local"]
    table = joining_table(rows, "dice")
    assert table.comparisons == ()
    assert "'local'" in table.missing
    assert "cannot be said" in table.missing


def test_outside_a_row_is_an_algorithm_with_an_adapter(outside):
    rows = outside("fedavg", "none", "B", [0.5, 0.7]) + outside("fedavg", "tent", "B", [0.6, 0.9])
    rows += outside("iopfl", "routing", "B", [0.8]) + outside("iopfl", "own trick", "B", [0.4])
    table = method_table(rows, "dice", ["fedavg"], where="outside")
    assert [method.name for method in table.methods] == [
        "FedAvg", "FedAvg + Tent", "IOP-FL + routing", "IOP-FL + own trick",
    ]  # fmt: skip
    assert [method.cells["B"].mean for method in table.methods] == pytest.approx(
        [0.6, 0.75, 0.8, 0.4]
    )
    assert method_table(rows, "dice").methods == ()


def test_outside_each_site_comes_from_its_own_fold(outside, scores):
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.1)):
        for site, value in (("A", 0.5), ("B", 0.7), ("C", 0.3)):
            rows += outside("fedavg", "none", site, [value + shift], seed=seed)
            rows += scores("fedavg", "global", site, [0.99], seed=seed, fold=1)
    (method,) = method_table(rows, "dice", where="outside").methods
    # by hand: A 0.55, B 0.75, C 0.35; seeds average 0.5 and 0.6
    assert [method.cells[site].mean for site in "ABC"] == pytest.approx([0.55, 0.75, 0.35])
    assert method.cells["average"].mean == pytest.approx(0.55)
    assert method.cells["average"].sd == pytest.approx(0.1 / 2**0.5)
    assert method.cells["worst site"].mean == pytest.approx(0.35)
    assert method.cells["worst site"].note == "C"
    assert method.cells["disparity"].mean == pytest.approx(0.4)


def test_adapters_stand_in_the_order_of_the_field_without_one_first(outside):
    rows = []
    for adapter in ("routing", "ttt", "none", "dsbn", "average", "zzz", "tent", "ensemble"):
        rows += outside("fedavg", adapter, "A", [0.5])
    names = [method.name for method in method_table(rows, "dice", where="outside").methods]
    assert names == [
        "FedAvg", "FedAvg + Average", "FedAvg + Ensemble", "FedAvg + Tent", "FedAvg + TTT",
        "FedAvg + DSBN", "FedAvg + routing", "FedAvg + zzz",
    ]  # fmt: skip


def test_names_outside_leave_no_adapter_out():
    assert scored_name("scaffold", "none", "outside") == "SCAFFOLD"
    assert scored_name("my run", "tent lr=0.1", "outside") == "my run + tent lr=0.1"
    assert scored_name("ditto", "personal", "inside") == "Ditto personal"


def test_scores_of_different_settings_never_share_a_table(scores):
    rows = scores("fedavg", "global", "A", [0.5]) + scores(
        "fedavg", "global", "A", [0.9], variation="clients-2"
    )
    plain, two = method_table(rows, "dice"), method_table(rows, "dice", variation="clients-2")
    assert plain.methods[0].cells["A"] == Cell(0.5)
    assert two.methods[0].cells["A"] == Cell(0.9)
    assert two.variation == "clients-2"
    assert len(final_scores(rows)) == 2
    alone = scores("local", "personal", "A", [0.4]) + rows
    (found,) = joining_table(alone, "dice").comparisons
    assert found.difference.mean == pytest.approx(0.1)
    assert joining_table(alone, "dice", variation="clients-2").missing


def test_tables_do_not_depend_on_the_order_of_rows(three_methods, outside):
    rng = np.random.default_rng(0)
    rows = list(three_methods)
    for adapter in ("none", "tent", "routing"):
        for site in "ABC":
            patients = [f"p{place // 3}" for place in range(24)]
            rows += outside("fedavg", adapter, site, rng.random(24), patients=patients)
    expected = [
        method_table(rows, "dice"),
        method_table(rows, "dice", where="outside"),
        joining_table(rows, "dice"),
    ]
    for _ in range(3):
        mixed = [rows[place] for place in rng.permutation(len(rows))]
        assert [
            method_table(mixed, "dice"),
            method_table(mixed, "dice", where="outside"),
            joining_table(mixed, "dice"),
        ] == expected


def test_joining_holds_the_corrected_signed_rank_test(scores):
    rng = np.random.default_rng(5)
    alone = rng.uniform(0.5, 0.7, 9)
    shifts = {"fedavg": 0.03, "fedprox": 0.01, "moon": -0.02}
    joined = {name: alone + shift + rng.normal(0, 0.02, 9) for name, shift in shifts.items()}
    rows = scores("local", "personal", "A", alone)
    for name, values in joined.items():
        rows += scores(name, "global", "A", values)
    table = joining_table(rows, "dice")
    p = {name: stats.wilcoxon(values - alone).pvalue for name, values in joined.items()}
    first, second, third = sorted(p, key=lambda name: p[name])
    holm = {first: min(1, 3 * p[first])}
    holm[second] = min(1, max(holm[first], 2 * p[second]))
    holm[third] = min(1, max(holm[second], p[third]))
    assert {c.algorithm: c.p for c in table.comparisons} == pytest.approx(p)
    assert {c.algorithm: c.p_holm for c in table.comparisons} == pytest.approx(holm)
    assert {c.family for c in table.comparisons} == {3}
    assert all(f"corrected {p_text(holm[c.algorithm])}" in c.verdict for c in table.comparisons)
    assert table.pooled == ()  # there is one site


def test_joining_answers_yes_no_or_cannot_tell(joined_rows):
    answers = {c.name: c.answer for c in joining_table(joined_rows, "dice").comparisons}
    assert answers == {
        "FedAvg global": "yes",
        "Ditto personal": "no",
        "Ditto global": "cannot tell",
    }


@pytest.mark.parametrize("metric", ["auc", "balanced_accuracy"])
def test_joining_cannot_tell_where_a_class_has_few_patients(scores, metric):
    # As with two healthy patients of 37: the shares of all move by what two of them decide.
    alone, rows = np.linspace(0.30, 0.44, 8), []
    for site, shift in (("A", 0.5), ("B", 0.4)):
        rows += scores("local", "personal", site, alone, metric=metric)
        rows += scores("fedavg", "global", site, alone + shift, metric=metric)
    for site, count in (("A", 2), ("B", 6)):
        for model, split, value in (("personal", "test", count), ("none", "outside", 1)):
            (row,) = scores("local", model, site, [value], metric="rarest_class", split=split)
            rows.append(replace(row, case="", patient="", unit="patients"))
    few, enough = joining_table(rows, metric).comparisons
    assert (few.answer, few.p, few.difference.low) == ("cannot tell", None, None)
    assert few.difference.mean == pytest.approx(0.5)
    assert few.verdict == (
        "Cannot tell: 2 patients of the rarest class, and fewer than 6 can all point the same way "
        "by chance."
    )
    assert enough.answer == "yes"
    assert enough.p == pytest.approx(2 / 2**8)
    (pooled,) = joining_table(rows, metric).pooled
    assert (pooled.answer, pooled.difference.rarest) == ("cannot tell", 2)
    accuracy = [replace(row, metric="accuracy") if row.metric == metric else row for row in rows]
    assert {c.answer for c in joining_table(accuracy, "accuracy").comparisons} == {"yes"}
    one = [replace(row, value=1.0) if row.value == 2 else row for row in rows]
    assert joining_table(one, metric).comparisons[0].verdict.startswith("Cannot tell: 1 patient of")


def test_joining_cannot_tell_where_the_corrected_test_does_not_agree(scores):
    gains = [0.009, -0.002, 0.019, -0.003, -0.006, 0.014, 0.024, 0.023]
    alone = np.linspace(0.5, 0.64, 8)
    rows = scores("local", "personal", "A", alone)
    rows += scores("fedavg", "global", "A", alone + gains)
    rows += scores("fedbn", "personal", "A", alone - gains)
    up, down = joining_table(rows, "dice").comparisons
    p = stats.wilcoxon(gains).pvalue  # 0.109, so 0.219 for two methods
    assert up.difference.low is not None
    assert up.difference.low > 0
    assert (up.p, up.p_holm) == pytest.approx((p, 2 * p))
    assert [up.answer, down.answer] == ["cannot tell", "cannot tell"]
    assert up.verdict.endswith("but the signed-rank test does not confirm it "
                               "(p = 0.109, corrected p = 0.219).")  # fmt: skip
    assert down.verdict.startswith("Cannot tell: worse on average over 8 patients, and the")
    distances = [replace(row, metric="hd95", unit="mm") for row in rows]
    assert {c.answer for c in joining_table(distances, "hd95").comparisons} == {"cannot tell"}


def test_joining_cannot_tell_over_sites_where_the_corrected_test_does_not_agree(scores):
    # Six patients all lose with one of two methods: p is 2 / 2**6, but 0.06 for two methods.
    rows = []
    for site in "AB":
        rows += scores("local", "personal", site, [0.5, 0.6, 0.7])
        rows += scores("fedavg", "global", site, [0.4, 0.45, 0.65])
        rows += scores("fedbn", "personal", site, [0.5, 0.7, 0.6])
    found = {c.name: c for c in joining_table(rows, "dice").pooled}
    fedavg = found["FedAvg global"]
    assert fedavg.difference.high is not None
    assert fedavg.difference.high < 0
    assert (fedavg.p, fedavg.p_holm) == pytest.approx((2 / 2**6, 4 / 2**6))
    assert (fedavg.outcome, fedavg.answer) == ("cannot tell", "cannot tell")
    assert "does not survive the correction for 2 methods" in fedavg.verdict
