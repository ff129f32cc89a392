from math import isnan

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from scipy import stats

from collegium.evaluation.comparisons import adapting_table, joining_table
from collegium.evaluation.results import results_frame
from collegium.evaluation.significance import p_text


@pytest.fixture
def adapted(outside):
    """FedAvg with two adapters, IOP-FL with one, at two sites outside of 8 and 7 patients."""
    rng = np.random.default_rng(3)
    rows, values = [], {}
    for site, count in (("B", 8), ("A", 7)):
        for algorithm, shifts in (
            ("fedavg", {"tent": 0.05, "routing": -0.04}),
            ("iopfl", {"routing": 0.02}),
        ):
            base = rng.uniform(0.4, 0.6, count)
            values[site, algorithm, "none"] = base
            for adapter, shift in shifts.items():
                values[site, algorithm, adapter] = base + shift + rng.normal(0, 0.01, count)
    for (site, algorithm, adapter), scored in values.items():
        rows += outside(algorithm, adapter, site, scored)
    return rows, values


def test_adapting_compares_each_adapter_with_the_same_algorithm_without_one(adapted):
    rows, values = adapted
    table = adapting_table(results_frame(rows), "dice", ["fedavg", "iopfl"])
    assert table.question == "Does adapting help this hospital?"
    assert [(c.site, c.method) for c in table.by_site] == [
        ("A", "FedAvg + Tent"), ("A", "FedAvg + routing"), ("A", "IOP-FL + routing"),
        ("B", "FedAvg + Tent"), ("B", "FedAvg + routing"), ("B", "IOP-FL + routing"),
    ]  # fmt: skip
    for found in table.by_site:
        adapted, plain = (
            values[found.site, found.algorithm, adapter] for adapter in (found.model, "none")
        )
        assert found.difference == pytest.approx(np.mean(adapted - plain))
        assert found.reference_mean == pytest.approx(plain.mean())
        assert found.method_mean == pytest.approx(adapted.mean())
        assert found.p == pytest.approx(stats.wilcoxon(adapted - plain).pvalue)
    assert [c.answer for c in table.by_site if c.algorithm == "fedavg"] == ["yes", "no"] * 2


def test_the_family_is_the_adapters_of_one_algorithm_at_one_site(adapted):
    found = adapting_table(results_frame(adapted[0]), "dice").by_site
    assert [c.family for c in found] == [2, 2, 1] * 2
    assert all(c.p_holm == c.p for c in found if c.algorithm == "iopfl")
    # all of 7 or 8 patients go the same way, so p is 2 / 2**n, doubled by Holm
    fedavg = [c for c in found if c.algorithm == "fedavg"]
    assert [c.p_holm for c in fedavg] == pytest.approx([2 * 2 / 2**7] * 2 + [2 * 2 / 2**8] * 2)


def test_over_all_sites_the_difference_is_the_mean_of_the_sites(adapted):
    rows, values = adapted
    tent = adapting_table(results_frame(rows), "dice").over_sites[0]
    by_site = [values[s, "fedavg", "tent"] - values[s, "fedavg", "none"] for s in "AB"]
    assert (tent.site, tent.method) == ("average", "FedAvg + Tent")
    assert tent.difference == pytest.approx(np.mean([d.mean() for d in by_site]))
    assert tent.patients == 15
    assert tent.p == pytest.approx(stats.wilcoxon(np.concatenate(by_site)).pvalue)
    assert tent.reference_mean == pytest.approx(
        np.mean([values[site, "fedavg", "none"].mean() for site in "AB"])
    )


def test_a_method_without_scores_at_a_site_is_not_compared_over_all(adapted):
    rows = [
        r for r in adapted[0] if (r["site"], r["algorithm"], r["model"]) != ("A", "fedavg", "tent")
    ]
    table = adapting_table(results_frame(rows), "dice")
    assert [c.method for c in table.over_sites] == ["FedAvg + routing", "IOP-FL + routing"]
    assert [c.family for c in table.by_site if c.site == "A"] == [1, 1]


def test_adapting_names_the_algorithms_never_scored_unadapted(adapted, scores, outside):
    rows = [r for r in adapted[0] if (r["algorithm"], r["model"]) != ("iopfl", "none")]
    table = adapting_table(results_frame(rows), "dice")
    assert {c.algorithm for c in table.by_site} == {"fedavg"}
    iopfl = (
        "There are no scores without an adapter of IOP-FL, so whether adapting helps cannot be "
        "said there. Add the adapter 'none'."
    )
    assert table.missing == iopfl
    # Inside, IOP-FL has a global model too; SiloBN and FedPer have personal ones alone.
    rows += outside("silobn", "dsbn", "A", [0.5]) + outside("fedper", "ensemble", "B", [0.5])
    rows += scores("silobn", "personal", "A", [0.5]) + scores("fedper", "personal", "A", [0.5])
    rows += scores("iopfl", "personal", "A", [0.5]) + scores("iopfl", "global", "A", [0.5])
    assert adapting_table(results_frame(rows), "dice", ["silobn", "fedper"]).missing == (
        f"{iopfl} No global model comes from SiloBN, FedPer, so there is nothing unadapted to "
        "compare with."
    )
    inside = scores("fedavg", "global", "A", [0.5])
    assert "no scores of a site outside" in adapting_table(results_frame(inside), "dice").missing
    assert adapting_table(results_frame(adapted[0]), "dice").missing == ""


def test_pairs_have_the_same_case_seed_and_fold(scores):
    rows = scores("fedavg", "global", "A", [0.5, 0.5]) + scores(
        "fedavg", "global", "A", [0.1, 0.1], fold=1
    )
    rows += scores("ditto", "personal", "A", [0.6, 0.8])
    rows += scores("ditto", "personal", "A", [0.9], seed=1)  # FedAvg has not run this seed
    (found,) = joining_table(results_frame(rows), "dice", local="fedavg").by_site
    assert found.difference == pytest.approx((0.1 + 0.3) / 2)
    assert found.patients == 2


def test_patients_of_two_sites_with_one_name_are_two_patients(scores):
    rows = []
    for site, shift in (("A", 0.1), ("B", 0.3)):
        rows += scores("fedavg", "global", site, [0.5] * 4)
        rows += scores("ditto", "personal", site, [0.5 + shift] * 4)
    (pooled,) = joining_table(results_frame(rows), "dice", local="fedavg").over_sites
    assert pooled.patients == 8
    assert pooled.difference == pytest.approx(0.2)
    assert pooled.p == pytest.approx(2 / 2**8)
    assert pooled.outcome == "helps"


def test_a_distance_helps_when_it_falls(outside):
    rows = outside("fedavg", "none", "A", [4.0] * 6, metric="hd95", unit="mm")
    rows += outside("fedavg", "tent", "A", [3.0] * 6, metric="hd95", unit="mm")
    (found,) = adapting_table(results_frame(rows), "hd95").by_site
    assert (found.answer, found.difference) == ("yes", -1.0)


def test_comparisons_do_not_depend_on_the_order_of_rows(adapted, scores):
    rows = adapted[0] + scores("local", "personal", "A", [0.5, 0.6, 0.7])
    rows += scores("fedavg", "global", "A", [0.6, 0.6, 0.8])
    mixed = [rows[place] for place in np.random.default_rng(1).permutation(len(rows))]
    for table in (adapting_table, joining_table):
        found, expected = (table(results_frame(some), "dice") for some in (mixed, rows))
        assert_frame_equal(found.comparisons, expected.comparisons, check_exact=True)


def test_seeds_and_cases_are_averaged_within_a_patient_first(scores):
    patients = ["p1", "p1", "p1", "p2"]
    rows = scores("local", "personal", "A", [0.5, 0.5, 0.5, 0.6], patients=patients)
    rows += scores("fedavg", "global", "A", [0.9, 0.7, 0.8, 0.5], patients=patients)
    (found,) = joining_table(results_frame(rows), "dice").by_site
    # p1: mean of 0.4, 0.2, 0.3 is 0.3; p2: -0.1; by hand (0.3 - 0.1) / 2
    assert found.difference == pytest.approx(0.1)
    assert found.patients == 2


def test_undefined_pairs_are_counted_and_enter_no_mean(scores):
    patients = ["p1", "p1", "p2", "p3", "p4"]
    rows = scores("local", "personal", "A", [0.7, 0.5, None, 0.5, 0.1], patients=patients)
    rows += scores("fedavg", "global", "A", [0.9, None, 0.8, 0.4, float("nan")], patients=patients)
    (found,) = joining_table(results_frame(rows), "dice").by_site
    assert found.undefined == 3
    assert found.patients == 2
    assert found.difference == pytest.approx((0.2 - 0.1) / 2)


def test_a_method_that_shares_no_case_with_the_reference_has_no_difference(scores):
    rows = scores("local", "personal", "A", [0.5]) + scores("fedavg", "global", "A", [0.6], seed=1)
    (found,) = joining_table(results_frame(rows), "dice").by_site
    assert (found.reference_mean, found.method_mean, found.patients) == (0.5, 0.6, 0)
    assert isnan(found.difference)
    assert found.verdict == "Cannot tell: no patient has a score with both."


def test_joining_compares_each_method_with_local_by_patient(joined_rows):
    table = joining_table(results_frame(joined_rows), "dice", ["fedavg", "ditto"])
    found = {c.method: c for c in table.by_site}
    assert list(found) == ["FedAvg global", "Ditto global", "Ditto personal"]
    fedavg = found["FedAvg global"]
    assert [fedavg.reference_mean, fedavg.method_mean] == pytest.approx([0.57, 0.67])
    assert fedavg.difference == pytest.approx(0.1)
    assert fedavg.low == pytest.approx(0.1)
    assert fedavg.outcome == "helps"
    assert found["Ditto personal"].outcome == "hurts"
    assert found["Ditto global"].outcome == "cannot tell"
    assert found["Ditto global"].undefined == 7


def test_joining_pairs_by_case_and_seed_only_where_both_have_a_score(scores):
    rows = scores("local", "personal", "A", [0.5, 0.7])
    rows += scores("fedavg", "global", "A", [0.6, 0.9])
    rows += scores("fedavg", "global", "A", [0.0, 0.0], seed=1)  # local has not run this seed
    (found,) = joining_table(results_frame(rows), "dice").by_site
    assert found.difference == pytest.approx(0.15)
    assert found.patients == 2


def test_joining_knows_local_by_its_label(joined_rows):
    rows = [r for r in joined_rows if r["algorithm"] != "ditto"]
    (found,) = joining_table(results_frame(rows), "dice", local="fedavg").by_site
    assert found.method == "Local personal"
    assert found.outcome == "hurts"


def test_joining_says_so_when_nobody_trained_alone(joined_rows):
    rows = [r for r in joined_rows if r["algorithm"] != "local"]
    table = joining_table(results_frame(rows), "dice")
    assert table.by_site == []
    assert "'local'" in table.missing
    assert "cannot be said" in table.missing


def test_joining_holds_the_corrected_signed_rank_test(scores):
    rng = np.random.default_rng(5)
    alone = rng.uniform(0.5, 0.7, 9)
    shifts = {"fedavg": 0.03, "fedprox": 0.01, "moon": -0.02}
    joined = {name: alone + shift + rng.normal(0, 0.02, 9) for name, shift in shifts.items()}
    rows = scores("local", "personal", "A", alone)
    for name, values in joined.items():
        rows += scores(name, "global", "A", values)
    table = joining_table(results_frame(rows), "dice")
    p = {name: stats.wilcoxon(values - alone).pvalue for name, values in joined.items()}
    first, second, third = sorted(p, key=lambda name: p[name])
    holm = {first: min(1, 3 * p[first])}
    holm[second] = min(1, max(holm[first], 2 * p[second]))
    holm[third] = min(1, max(holm[second], p[third]))
    assert {c.algorithm: c.p for c in table.by_site} == pytest.approx(p)
    assert {c.algorithm: c.p_holm for c in table.by_site} == pytest.approx(holm)
    assert {c.family for c in table.by_site} == {3}
    assert all(f"corrected {p_text(holm[c.algorithm])}" in c.verdict for c in table.by_site)
    assert table.over_sites == []  # there is one site


def test_joining_answers_yes_no_or_cannot_tell(joined_rows):
    answers = {
        c.method: c.answer for c in joining_table(results_frame(joined_rows), "dice").by_site
    }
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
            rows.append({**row, "case": "", "patient": "", "unit": "patients"})
    few, enough = joining_table(results_frame(rows), metric).by_site
    assert few.answer == "cannot tell"
    assert isnan(few.p)
    assert isnan(few.low)
    assert few.difference == pytest.approx(0.5)
    assert few.verdict == (
        "Cannot tell: 2 patients of the rarest class, and fewer than 6 can all point the same way "
        "by chance."
    )
    assert enough.answer == "yes"
    assert enough.p == pytest.approx(2 / 2**8)
    (pooled,) = joining_table(results_frame(rows), metric).over_sites
    assert (pooled.answer, pooled.rarest) == ("cannot tell", 2)
    accuracy = [{**row, "metric": "accuracy"} if row["metric"] == metric else row for row in rows]
    assert {c.answer for c in joining_table(results_frame(accuracy), "accuracy").by_site} == {"yes"}
    one = [{**row, "value": 1.0} if row["value"] == 2 else row for row in rows]
    (first, _) = joining_table(results_frame(one), metric).by_site
    assert first.verdict.startswith("Cannot tell: 1 patient of")


def test_joining_cannot_tell_where_the_corrected_test_does_not_agree(scores):
    gains = [0.009, -0.002, 0.019, -0.003, -0.006, 0.014, 0.024, 0.023]
    alone = np.linspace(0.5, 0.64, 8)
    rows = scores("local", "personal", "A", alone)
    rows += scores("fedavg", "global", "A", alone + gains)
    rows += scores("fedbn", "personal", "A", alone - gains)
    up, down = joining_table(results_frame(rows), "dice").by_site
    p = stats.wilcoxon(gains).pvalue  # 0.109, so 0.219 for two methods
    assert up.low > 0
    assert (up.p, up.p_holm) == pytest.approx((p, 2 * p))
    assert [up.answer, down.answer] == ["cannot tell", "cannot tell"]
    assert up.verdict.endswith("but the signed-rank test does not confirm it "
                               "(p = 0.109, corrected p = 0.219).")  # fmt: skip
    assert down.verdict.startswith("Cannot tell: worse on average over 8 patients, and the")
    distances = [{**row, "metric": "hd95", "unit": "mm"} for row in rows]
    assert {c.answer for c in joining_table(results_frame(distances), "hd95").by_site} == {
        "cannot tell"
    }


def test_joining_cannot_tell_over_sites_where_the_corrected_test_does_not_agree(scores):
    # Six patients all lose with one of two methods: p is 2 / 2**6, but 0.06 for two methods.
    rows = []
    for site in "AB":
        rows += scores("local", "personal", site, [0.5, 0.6, 0.7])
        rows += scores("fedavg", "global", site, [0.4, 0.45, 0.65])
        rows += scores("fedbn", "personal", site, [0.5, 0.7, 0.6])
    found = {c.method: c for c in joining_table(results_frame(rows), "dice").over_sites}
    fedavg = found["FedAvg global"]
    assert fedavg.high < 0
    assert (fedavg.p, fedavg.p_holm) == pytest.approx((2 / 2**6, 4 / 2**6))
    assert (fedavg.outcome, fedavg.answer) == ("cannot tell", "cannot tell")
    assert "does not survive the correction for 2 methods" in fedavg.verdict
