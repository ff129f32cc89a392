from math import isnan

import numpy as np
import pytest

from collegium.evaluation.comparisons import joining_table
from collegium.evaluation.formats import to_csv, to_markdown, to_text
from collegium.evaluation.results import results_frame
from collegium.evaluation.tables import mean_and_sd, method_table, sweep_table, undefined_notes


def test_a_cell_is_mean_and_sample_sd_over_seeds():
    assert mean_and_sd([0.5, 0.7, 0.9]) == pytest.approx((0.7, 0.2))
    assert mean_and_sd([0.5]) == pytest.approx((0.5, np.nan), nan_ok=True)
    assert all(map(isnan, mean_and_sd([])))


def test_a_seed_that_lacks_a_site_enters_no_average(scores, cells_of):
    rows = scores("a", "global", "A", [0.4]) + scores("a", "global", "B", [0.6])
    rows += scores("a", "global", "A", [0.9], seed=1)
    rows += scores("a", "global", "A", [0.5], seed=2) + scores("a", "global", "B", [0.9], seed=2)
    cells = cells_of(method_table(results_frame(rows), "dice"))["a global"]
    assert cells["average"].mean == pytest.approx((0.5 + 0.7) / 2)
    assert cells["A"].mean == pytest.approx(0.6)


def test_zero_can_be_the_best_and_numbers_that_print_alike_share_a_rank(scores, cells_of):
    rows = []
    for name, value in {"a": 0.0, "b": 0.004, "c": 1.0, "d": None}.items():
        rows += scores(name, "global", "A", [value], metric="hd95", unit="mm")
    cells = cells_of(method_table(results_frame(rows), "hd95"))
    assert [found["A"].rank for found in cells.values()] == [1, 1, 2, 0]
    assert method_table(results_frame([]), "hd95").cells.empty


def test_cells_are_mean_and_sample_sd_over_seeds(three_methods, cells_of):
    name, local = next(iter(cells_of(method_table(results_frame(three_methods), "dice")).items()))
    assert name == "Local personal"
    # seed 0: (0.60 + 0.70) / 2; seed 1: 0.02 more; sd of two is the difference / sqrt 2
    assert local["A"].mean == pytest.approx(0.66)
    assert local["A"].sd == pytest.approx(0.02 / 2**0.5)
    assert local["average"].mean == pytest.approx((0.66 + 0.51) / 2)


def test_a_patient_with_many_cases_counts_once(scores, cells_of):
    rows = scores("fedavg", "global", "A", [0.9, 0.9, 0.9, 0.5], patients=["p", "p", "p", "q"])
    (cells,) = cells_of(method_table(results_frame(rows), "dice")).values()
    assert cells["A"].mean == pytest.approx(0.7)


def test_worst_site_disparity_and_site_sd_come_from_the_site_means(three_methods, cells_of):
    table = method_table(results_frame(three_methods), "dice", ["fedavg"])
    fedavg = cells_of(table)["FedAvg global"]
    # A: seeds 0.80 and 0.81, so 0.805; B: 0.55
    assert fedavg["worst site"].mean == pytest.approx(0.55)
    assert fedavg["worst site"].note == "B"
    assert fedavg["disparity"].mean == pytest.approx(0.255)
    assert fedavg["site sd"].mean == pytest.approx(0.1275)


def test_the_worst_of_equal_sites_is_the_first_by_name(scores, cells_of):
    rows = scores("a", "global", "B", [0.7]) + scores("a", "global", "A", [0.7])
    (cells,) = cells_of(method_table(results_frame(rows), "dice")).values()
    assert (cells["worst site"].note, cells["worst site"].mean) == ("A", 0.7)


def test_a_metric_without_better_and_worse_has_no_ranks_and_no_worst_site(scores, cells_of):
    rows = []
    for name, by_site in {"a": {"A": -2.0, "B": 4.0}, "b": {"A": 1.0, "B": 1.0}}.items():
        for site, value in by_site.items():
            rows += scores(name, "global", site, [value], metric="volume_difference", unit="ml")
    table = method_table(results_frame(rows), "volume_difference")
    cells = cells_of(table)["a global"]
    assert not table.ranked
    assert set(table.cells["rank"]) == {0}
    assert (cells["average"].mean, cells["disparity"].mean) == (1.0, 6.0)
    assert isnan(cells["worst site"].mean)
    assert "*" not in to_text(table).split("second")[1]


def test_disparity_is_range_and_population_sd(scores, cells_of):
    rows = []
    for site, value in {"A": 0.6, "B": 0.8, "C": 1.0, "D": None}.items():
        rows += scores("a", "global", site, [value])
    (cells,) = cells_of(method_table(results_frame(rows), "dice")).values()
    assert cells["disparity"].mean == pytest.approx(0.4)
    assert cells["site sd"].mean == pytest.approx(np.sqrt(0.08 / 3))
    (one,) = cells_of(method_table(results_frame(rows[:1]), "dice")).values()
    assert isnan(one["disparity"].mean)
    assert isnan(one["site sd"].mean)


def test_best_and_second_are_marked_in_each_column(three_methods, cells_of):
    cells = cells_of(method_table(results_frame(three_methods), "dice"))
    ranks = {name: {c: m.rank for c, m in found.items()} for name, found in cells.items()}
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


def test_what_prints_alike_ranks_alike(scores, cells_of):
    rows = scores("a", "global", "A", [0.80001]) + scores("b", "global", "A", [0.80004])
    rows += scores("c", "global", "A", [0.7])
    cells = cells_of(method_table(results_frame(rows), "dice"))
    assert [found["A"].rank for found in cells.values()] == [1, 1, 2]


def test_a_single_method_is_not_called_the_best(scores, cells_of):
    table = method_table(results_frame(scores("fedavg", "global", "A", [0.8])), "dice")
    (cells,) = cells_of(table).values()
    assert (cells["A"].mean, cells["A"].rank, cells["A"].note) == (0.8, 0, "")
    assert isnan(cells["A"].sd)


def test_a_distance_is_better_when_lower(scores, cells_of):
    rows = scores("fedavg", "global", "A", [4.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "A", [2.0], metric="hd95", unit="mm")
    rows += scores("fedavg", "global", "B", [8.0], metric="hd95", unit="mm")
    rows += scores("ditto", "personal", "B", [3.0], metric="hd95", unit="mm")
    ditto, fedavg = cells_of(method_table(results_frame(rows), "hd95")).values()
    assert (ditto["A"].rank, fedavg["A"].rank) == (1, 2)
    assert (fedavg["worst site"].mean, fedavg["worst site"].note) == (8.0, "B")


def test_undefined_scores_enter_no_mean_and_a_site_without_any_no_average(scores, cells_of):
    rows = scores("fedavg", "global", "A", [0.8, None]) + scores("fedavg", "global", "B", [None])
    rows += scores("ditto", "global", "A", [0.6]) + scores("ditto", "global", "B", [0.4])
    ditto, fedavg = cells_of(method_table(results_frame(rows), "dice")).values()
    assert fedavg["A"].mean == pytest.approx(0.8)
    assert all(isnan(fedavg[c].mean) for c in ("B", "average", "worst site", "disparity"))
    assert ditto["average"].mean == pytest.approx(0.5)


def test_a_table_says_where_a_metric_is_undefined_of_all_methods_or_of_some(scores):
    rows = scores("fedavg", "global", "A", [0.8, None]) + scores("fedavg", "global", "B", [None])
    rows += scores("ditto", "global", "A", [0.6]) + scores("ditto", "global", "B", [0.4])
    rows += scores("ditto", "global", "C", [None, None])
    assert undefined_notes(results_frame(rows[:2]), "dice") == ()
    assert undefined_notes(results_frame(rows), "dice") == (
        "dice is undefined in every test case at C.",
        "dice is undefined in every test case of some methods at B; they have no average.",
    )
    assert undefined_notes(results_frame(rows), "dice", variation="other") == ()


def test_a_site_undefined_for_everyone_is_left_out_of_the_average(scores, cells_of):
    rows = scores("fedavg", "global", "A", [0.8]) + scores("fedavg", "global", "B", [None])
    rows += scores("fedavg", "global", "C", [0.6])
    (cells,) = cells_of(method_table(results_frame(rows), "dice")).values()
    assert isnan(cells["B"].mean)
    assert cells["average"].mean == pytest.approx(0.7)


def test_a_metric_without_a_defined_score_has_a_table_of_dashes(scores):
    rows = scores("fedavg", "global", "A", [None]) + scores("ditto", "global", "A", [None])
    table = method_table(results_frame(rows), "dice")
    assert len(table.cells) == 2 * len(table.columns)
    assert table.cells["mean"].isna().all()
    assert set(table.cells["rank"]) == {0}
    assert "FedAvg global,A,,,0,," in to_csv(table)


def test_rows_of_rounds_are_no_final_scores():
    about = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1, "site": "A",
             "split": "val", "model": "global", "metric": "dice", "value": 0.1}  # fmt: skip
    table = method_table(results_frame([about]), "dice")
    assert table.methods == []
    assert "dice" in to_text(table)


def test_methods_stand_with_local_first_then_in_the_order_asked(three_methods):
    table = method_table(results_frame(three_methods), "dice", ["fedavg", "ditto"])
    assert table.cells["algorithm"].unique().tolist() == ["local", "fedavg", "ditto"]
    assert table.columns == ("A", "B", "average", "worst site", "disparity", "site sd")


def test_outside_a_row_is_an_algorithm_with_an_adapter(outside, cells_of):
    rows = outside("fedavg", "none", "B", [0.5, 0.7]) + outside("fedavg", "tent", "B", [0.6, 0.9])
    rows += outside("iopfl", "routing", "B", [0.8]) + outside("iopfl", "own trick", "B", [0.4])
    cells = cells_of(method_table(results_frame(rows), "dice", ["fedavg"], where="outside"))
    assert list(cells) == [
        "FedAvg", "FedAvg + Tent", "IOP-FL + routing", "IOP-FL + own trick",
    ]  # fmt: skip
    means = [found["B"].mean for found in cells.values()]
    assert means == pytest.approx([0.6, 0.75, 0.8, 0.4])
    assert method_table(results_frame(rows), "dice").methods == []


def test_outside_each_site_comes_from_its_own_fold(outside, scores, cells_of):
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.1)):
        for site, value in (("A", 0.5), ("B", 0.7), ("C", 0.3)):
            rows += outside("fedavg", "none", site, [value + shift], seed=seed)
            rows += scores("fedavg", "global", site, [0.99], seed=seed, fold=1)
    table = method_table(results_frame(rows), "dice", where="outside")
    (cells,) = cells_of(table).values()
    # by hand: A 0.55, B 0.75, C 0.35; seeds average 0.5 and 0.6
    assert [cells[site].mean for site in "ABC"] == pytest.approx([0.55, 0.75, 0.35])
    assert cells["average"].mean == pytest.approx(0.55)
    assert cells["average"].sd == pytest.approx(0.1 / 2**0.5)
    assert cells["worst site"].mean == pytest.approx(0.35)
    assert cells["worst site"].note == "C"
    assert cells["disparity"].mean == pytest.approx(0.4)


def test_adapters_stand_in_the_order_of_the_field_without_one_first(outside):
    rows = []
    for adapter in ("routing", "ttt", "none", "dsbn", "average", "zzz", "tent", "ensemble"):
        rows += outside("fedavg", adapter, "A", [0.5])
    table = method_table(results_frame(rows), "dice", where="outside")
    assert [name for name, _ in table.methods] == [
        "FedAvg", "FedAvg + Average", "FedAvg + Ensemble", "FedAvg + Tent", "FedAvg + TTT",
        "FedAvg + DSBN", "FedAvg + routing", "FedAvg + zzz",
    ]  # fmt: skip


def test_scores_of_different_settings_never_share_a_table(scores, cells_of):
    rows = scores("fedavg", "global", "A", [0.5]) + scores(
        "fedavg", "global", "A", [0.9], variation="clients-2"
    )
    results = results_frame(rows)
    plain, two = method_table(results, "dice"), method_table(results, "dice", variation="clients-2")
    assert cells_of(plain)["FedAvg global"]["A"].mean == 0.5
    assert cells_of(two)["FedAvg global"]["A"].mean == 0.9
    assert two.variation == "clients-2"


def test_tables_do_not_depend_on_the_order_of_rows(three_methods, outside):
    rng = np.random.default_rng(0)
    rows = list(three_methods)
    for adapter in ("none", "tent", "routing"):
        for site in "ABC":
            patients = [f"p{place // 3}" for place in range(24)]
            rows += outside("fedavg", adapter, site, rng.random(24), patients=patients)

    def tables(found):
        results = results_frame(found)
        inside = method_table(results, "dice"), method_table(results, "dice", where="outside")
        return [*map(to_csv, inside), to_csv(joining_table(results, "dice"))]

    expected = tables(rows)
    for _ in range(3):
        assert tables([rows[place] for place in rng.permutation(len(rows))]) == expected


@pytest.fixture
def swept(scores):
    """Two methods, two settings, two seeds; with two clients there is no site C."""
    rows = []
    for seed, shift in ((0, 0.0), (1, 0.1)):
        for name, sites in (("clients-2", "AB"), ("clients-10", "ABC")):
            for place, site in enumerate(sites):
                about = {"seed": seed, "variation": name}
                rows += scores("fedavg", "global", site, [0.5 + 0.1 * place + shift], **about)
                rows += scores("iopfl", "personal", site, [0.7], **about)
    return rows


def test_cells_of_a_sweep_are_averages_over_the_sites_of_the_setting(swept, cells_of):
    table = sweep_table(results_frame(swept), "dice", ["fedavg"])
    assert table.columns == ("clients-2", "clients-10")
    cells = cells_of(table)
    assert list(cells) == ["FedAvg global", "IOP-FL personal"]
    fedavg, iopfl = cells.values()
    # two clients: A and B are 0.5 and 0.6; ten: A, B, C are 0.5, 0.6, 0.7; seeds 0.1 apart
    assert [fedavg[c].mean for c in table.columns] == pytest.approx([0.6, 0.65])
    assert fedavg["clients-2"].sd == pytest.approx(0.1 / 2**0.5)
    assert [iopfl[c].rank for c in table.columns] == [1, 1]
    assert [fedavg[c].rank for c in table.columns] == [2, 2]


def test_a_method_that_a_setting_lacks_has_an_empty_cell(swept, cells_of):
    rows = [r for r in swept if (r["algorithm"], r["variation"]) != ("iopfl", "clients-10")]
    table = sweep_table(results_frame(rows), "dice", settings=["clients-10", "clients-2"])
    assert table.columns == ("clients-10", "clients-2")
    assert isnan(cells_of(table)["IOP-FL personal"]["clients-10"].mean)
    assert "| IOP-FL personal | \u2013 | **0.700 \u00b1 0.000** |" in to_markdown(table)


def test_a_sweep_of_scores_outside_has_adapters(outside, cells_of):
    rows = outside("fedavg", "tent", "A", [4.0], variation="t1", metric="hd95", unit="mm")
    rows += outside("fedavg", "tent", "B", [6.0], variation="t1", metric="hd95", unit="mm")
    table = sweep_table(results_frame(rows), "hd95", where="outside")
    assert cells_of(table)["FedAvg + Tent"]["t1"].mean == pytest.approx(5.0)
    assert not table.higher_is_better
    text = to_text(table)
    assert text.startswith("hd95 (mm) at sites outside, average over sites: mean")


def test_rows_outside_the_sweep_are_no_column_and_order_changes_nothing(swept, scores):
    rows = swept + scores("fedavg", "global", "A", [0.99])
    mixed = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    found, expected = (sweep_table(results_frame(some), "dice") for some in (mixed, swept))
    assert (found.columns, to_csv(found)) == (expected.columns, to_csv(expected))
    assert sweep_table(results_frame([]), "dice").methods == []
