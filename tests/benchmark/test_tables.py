import pytest

from collegium.benchmark.significance import Interval
from collegium.benchmark.tables import (
    Cell,
    cell_html,
    interval_text,
    joining_table,
    method_name,
    method_table,
    number,
    to_markdown,
    to_text,
)
from collegium.results import Row


def scores(algorithm, model, site, values, *, seed=0, metric="dice", unit="", patients=None):
    """One test row per value; each case its own patient unless said otherwise."""
    patients = patients or [f"p{place}" for place in range(len(values))]
    return [
        Row(experiment="e", algorithm=algorithm, seed=seed, round=5, site=site,
            case=f"c{place}", patient=patient, split="test", model=model, metric=metric,
            value=value, unit=unit)
        for place, (value, patient) in enumerate(zip(values, patients, strict=True))
    ]  # fmt: skip


def three_methods():
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.02)):
        rows += scores("local", "personal", "A", [0.60 + shift, 0.70 + shift], seed=seed)
        rows += scores("local", "personal", "B", [0.50 + shift], seed=seed)
        rows += scores("fedavg", "global", "A", [0.80, 0.80 + shift], seed=seed)
        rows += scores("fedavg", "global", "B", [0.55], seed=seed)
        rows += scores("ditto", "personal", "A", [0.75, 0.75], seed=seed)
        rows += scores("ditto", "personal", "B", [0.70], seed=seed)
    return rows


def test_cells_are_mean_and_sample_sd_over_seeds():
    table = method_table(three_methods(), "dice")
    local = table.methods[0]
    assert local.name == "Local personal"
    # seed 0: (0.60 + 0.70) / 2; seed 1: 0.02 more; sd of two is the difference / sqrt 2
    assert local.cells["A"].mean == pytest.approx(0.66)
    assert local.cells["A"].sd == pytest.approx(0.02 / 2**0.5)
    assert local.cells["average"].mean == pytest.approx((0.66 + 0.51) / 2)


def test_a_patient_with_many_cases_counts_once():
    rows = scores("fedavg", "global", "A", [0.9, 0.9, 0.9, 0.5], patients=["p", "p", "p", "q"])
    assert method_table(rows, "dice").methods[0].cells["A"].mean == pytest.approx(0.7)


def test_worst_site_disparity_and_site_sd_come_from_the_site_means():
    fedavg = method_table(three_methods(), "dice", ["fedavg"]).methods[1]
    assert fedavg.name == "FedAvg global"
    # A: seeds 0.80 and 0.81, so 0.805; B: 0.55
    assert fedavg.cells["worst site"].mean == pytest.approx(0.55)
    assert fedavg.cells["worst site"].note == "B"
    assert fedavg.cells["disparity"].mean == pytest.approx(0.255)
    assert fedavg.cells["site sd"].mean == pytest.approx(0.1275)


def test_best_and_second_are_marked_in_each_column():
    table = method_table(three_methods(), "dice")
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


def test_what_prints_alike_ranks_alike():
    rows = scores("a", "global", "A", [0.80001]) + scores("b", "global", "A", [0.80004])
    rows += scores("c", "global", "A", [0.7])
    assert [m.cells["A"].rank for m in method_table(rows, "dice").methods] == [1, 1, 2]


def test_a_single_method_is_not_called_the_best():
    table = method_table(scores("fedavg", "global", "A", [0.8]), "dice")
    assert table.methods[0].cells["A"] == Cell(0.8)


def test_a_distance_is_better_when_lower():
    rows = scores("fedavg", "global", "A", [4.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "A", [2.0], metric="hd95", unit="mm")
    rows += scores("fedavg", "global", "B", [8.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "B", [3.0], metric="hd95", unit="mm")
    ditto, fedavg = method_table(rows, "hd95").methods
    assert (ditto.cells["A"].rank, fedavg.cells["A"].rank) == (1, 2)
    assert (fedavg.cells["worst site"].mean, fedavg.cells["worst site"].note) == (8.0, "B")


def test_undefined_scores_enter_no_mean_and_a_site_without_any_no_average():
    rows = scores("fedavg", "global", "A", [0.8, None]) + scores("fedavg", "global", "B", [None])
    rows += scores("ditto", "global", "A", [0.6]) + scores("ditto", "global", "B", [0.4])
    ditto, fedavg = method_table(rows, "dice").methods
    assert fedavg.cells["A"].mean == pytest.approx(0.8)
    assert [fedavg.cells[c].mean for c in ("B", "average", "worst site", "disparity")] == [None] * 4
    assert ditto.cells["average"].mean == pytest.approx(0.5)


def test_a_site_undefined_for_everyone_is_left_out_of_the_average():
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


def test_methods_stand_with_local_first_then_in_the_order_asked():
    table = method_table(three_methods(), "dice", ["fedavg", "ditto"])
    assert [m.algorithm for m in table.methods] == ["local", "fedavg", "ditto"]
    assert table.columns == ("A", "B", "average", "worst site", "disparity", "site sd")


def test_markdown_marks_best_and_second_and_escapes_bars():
    rows = scores("fedavg", "global", "A|B", [0.8]) + scores("ditto", "global", "A|B", [0.7])
    lines = to_markdown(method_table(rows, "dice", ["fedavg"])).splitlines()
    assert lines[0].startswith("| method | A\\|B | average |")
    assert lines[2].startswith("| FedAvg global | **0.800** |")
    assert lines[3].startswith("| Ditto global | <u>0.700</u> |")


def test_text_is_aligned_and_marks_best_and_second():
    lines = to_text(method_table(three_methods(), "dice", ["fedavg"])).splitlines()
    assert len({len(line) for line in lines[1:]}) == 1
    fedavg = next(line for line in lines if line.startswith("FedAvg global"))
    assert "0.805 \u00b1 0.007*" in fedavg
    assert "0.550 \u00b1 0.000+" in fedavg


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


def joined_rows():
    alone = [0.50, 0.52, 0.54, 0.56, 0.58, 0.60]
    rows = scores("local", "personal", "A", alone)
    rows += scores("fedavg", "global", "A", [value + 0.1 for value in alone])
    rows += scores("ditto", "personal", "A", [value - 0.1 for value in alone])
    rows += scores("ditto", "global", "A", [0.9, *[None] * 5])
    return rows


def test_joining_compares_each_method_with_local_by_patient():
    table = joining_table(joined_rows(), "dice", ["fedavg", "ditto"])
    found = {c.name: c for c in table.comparisons}
    assert list(found) == ["FedAvg global", "Ditto global", "Ditto personal"]
    fedavg = found["FedAvg global"]
    assert [fedavg.local, fedavg.joined] == pytest.approx([0.55, 0.65])
    assert fedavg.difference.mean == pytest.approx(0.1)
    assert fedavg.difference.low == pytest.approx(0.1)
    assert fedavg.outcome == "helps"
    assert found["Ditto personal"].outcome == "hurts"
    assert found["Ditto global"].outcome == "cannot tell"
    assert found["Ditto global"].difference.undefined == 5


def test_joining_pairs_by_case_and_seed_only_where_both_have_a_score():
    rows = scores("local", "personal", "A", [0.5, 0.7])
    rows += scores("fedavg", "global", "A", [0.6, 0.9])
    rows += scores("fedavg", "global", "A", [0.0, 0.0], seed=1)  # local has not run this seed
    (found,) = joining_table(rows, "dice").comparisons
    assert found.difference.mean == pytest.approx(0.15)
    assert found.difference.patients == 2


def test_joining_knows_local_by_its_label():
    rows = [r for r in joined_rows() if r.algorithm != "ditto"]
    (found,) = joining_table(rows, "dice", local="fedavg").comparisons
    assert found.name == "Local personal"
    assert found.outcome == "hurts"


def test_joining_says_so_when_nobody_trained_alone():
    rows = [r for r in joined_rows() if r.algorithm != "local"]
    table = joining_table(rows, "dice")
    assert table.comparisons == ()
    assert "'local'" in table.missing
    assert "cannot be said" in table.missing
