import numpy as np
import pytest
from scipy import stats

from collegium.evaluation.comparisons import adapting_table, comparison_table


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
    table = adapting_table(rows, "dice", ["fedavg", "iopfl"])
    assert table.question == "Does adapting help this hospital?"
    assert [(c.site, c.name) for c in table.comparisons] == [
        ("A", "FedAvg + Tent"), ("A", "FedAvg + routing"), ("A", "IOP-FL + routing"),
        ("B", "FedAvg + Tent"), ("B", "FedAvg + routing"), ("B", "IOP-FL + routing"),
    ]  # fmt: skip
    for found in table.comparisons:
        adapted, plain = (
            values[found.site, found.algorithm, adapter] for adapter in (found.model, "none")
        )
        assert found.difference.mean == pytest.approx(np.mean(adapted - plain))
        assert found.local == pytest.approx(plain.mean())
        assert found.joined == pytest.approx(adapted.mean())
        assert found.p == pytest.approx(stats.wilcoxon(adapted - plain).pvalue)
    assert [c.answer for c in table.comparisons if c.algorithm == "fedavg"] == ["yes", "no"] * 2


def test_the_family_is_the_adapters_of_one_algorithm_at_one_site(adapted):
    found = adapting_table(adapted[0], "dice").comparisons
    assert [c.family for c in found] == [2, 2, 1] * 2
    assert all(c.p_holm == c.p for c in found if c.algorithm == "iopfl")
    # all of 7 or 8 patients go the same way, so p is 2 / 2**n, doubled by Holm
    fedavg = [c for c in found if c.algorithm == "fedavg"]
    assert [c.p_holm for c in fedavg] == pytest.approx([2 * 2 / 2**7] * 2 + [2 * 2 / 2**8] * 2)


def test_over_all_sites_the_difference_is_the_mean_of_the_sites(adapted):
    rows, values = adapted
    tent = adapting_table(rows, "dice").pooled[0]
    by_site = [values[s, "fedavg", "tent"] - values[s, "fedavg", "none"] for s in "AB"]
    assert (tent.site, tent.name) == ("average", "FedAvg + Tent")
    assert tent.difference.mean == pytest.approx(np.mean([d.mean() for d in by_site]))
    assert tent.difference.patients == 15
    assert tent.p == pytest.approx(stats.wilcoxon(np.concatenate(by_site)).pvalue)
    assert tent.local == pytest.approx(
        np.mean([values[site, "fedavg", "none"].mean() for site in "AB"])
    )


def test_a_method_without_scores_at_a_site_is_not_compared_over_all(adapted):
    rows = [r for r in adapted[0] if (r.site, r.algorithm, r.model) != ("A", "fedavg", "tent")]
    table = adapting_table(rows, "dice")
    assert [c.name for c in table.pooled] == ["FedAvg + routing", "IOP-FL + routing"]
    assert [c.family for c in table.comparisons if c.site == "A"] == [1, 1]


def test_adapting_names_the_algorithms_never_scored_unadapted(adapted, scores, outside):
    rows = [r for r in adapted[0] if (r.algorithm, r.model) != ("iopfl", "none")]
    table = adapting_table(rows, "dice")
    assert {c.algorithm for c in table.comparisons} == {"fedavg"}
    iopfl = (
        "There are no scores without an adapter of IOP-FL, so whether adapting helps cannot be "
        "said there. Add the adapter 'none'."
    )
    assert table.missing == iopfl
    # Inside, IOP-FL has a global model too; SiloBN and FedPer have personal ones alone.
    rows += outside("silobn", "dsbn", "A", [0.5]) + outside("fedper", "ensemble", "B", [0.5])
    rows += scores("silobn", "personal", "A", [0.5]) + scores("fedper", "personal", "A", [0.5])
    rows += scores("iopfl", "personal", "A", [0.5]) + scores("iopfl", "global", "A", [0.5])
    assert adapting_table(rows, "dice", ["silobn", "fedper"]).missing == (
        f"{iopfl} No global model comes from SiloBN, FedPer, so there is nothing unadapted to "
        "compare with."
    )
    inside = scores("fedavg", "global", "A", [0.5])
    assert "no scores of a site outside" in adapting_table(inside, "dice").missing
    assert adapting_table(adapted[0], "dice").missing == ""


def test_comparing_with_a_reference_of_ones_choice(adapted):
    table = comparison_table(adapted[0], "dice", ("fedavg", "tent"), where="outside")
    assert table.question == "Is it better than FedAvg + Tent?"
    assert {c.name for c in table.comparisons} == {
        "FedAvg", "FedAvg + routing", "IOP-FL", "IOP-FL + routing",
    }  # fmt: skip
    assert {c.family for c in table.comparisons} == {4}


def test_a_reference_without_scores_is_said_to_be_missing(adapted):
    table = comparison_table(adapted[0], "dice", ("fedavg", "global"))
    assert table.comparisons == ()
    assert "no scores of FedAvg global" in table.missing


def test_pairs_have_the_same_case_seed_and_fold(scores):
    rows = scores("fedavg", "global", "A", [0.5, 0.5]) + scores(
        "fedavg", "global", "A", [0.1, 0.1], fold=1
    )
    rows += scores("ditto", "personal", "A", [0.6, 0.8])
    rows += scores("ditto", "personal", "A", [0.9], seed=1)  # FedAvg has not run this seed
    (found,) = comparison_table(rows, "dice", ("fedavg", "global")).comparisons
    assert found.difference.mean == pytest.approx((0.1 + 0.3) / 2)
    assert found.difference.patients == 2


def test_patients_of_two_sites_with_one_name_are_two_patients(scores):
    rows = []
    for site, shift in (("A", 0.1), ("B", 0.3)):
        rows += scores("fedavg", "global", site, [0.5] * 4)
        rows += scores("ditto", "personal", site, [0.5 + shift] * 4)
    (pooled,) = comparison_table(rows, "dice", ("fedavg", "global")).pooled
    assert pooled.difference.patients == 8
    assert pooled.difference.mean == pytest.approx(0.2)
    assert pooled.p == pytest.approx(2 / 2**8)
    assert pooled.outcome == "helps"


def test_a_distance_helps_when_it_falls(outside):
    rows = outside("fedavg", "none", "A", [4.0] * 6, metric="hd95", unit="mm")
    rows += outside("fedavg", "tent", "A", [3.0] * 6, metric="hd95", unit="mm")
    (found,) = adapting_table(rows, "hd95").comparisons
    assert (found.answer, found.difference.mean) == ("yes", -1.0)


def test_comparisons_do_not_depend_on_the_order_of_rows(adapted):
    rows = adapted[0]
    mixed = [rows[place] for place in np.random.default_rng(1).permutation(len(rows))]
    assert adapting_table(mixed, "dice") == adapting_table(rows, "dice")
    reference = ("iopfl", "none")
    assert comparison_table(mixed, "dice", reference, where="outside") == comparison_table(
        rows, "dice", reference, where="outside"
    )
