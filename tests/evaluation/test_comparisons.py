from math import sqrt
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from collegium.evaluation.comparisons import adapting_table, joining_table
from collegium.evaluation.estimates import estimate_share
from collegium.evaluation.formats import to_latex, to_markdown, to_text
from collegium.evaluation.results import VerdictSettings, results_frame


def verdicts(
    rows: Any, table: Any = joining_table, metric: str = "dice", **options: Any
) -> dict[tuple[str, str], Any]:
    """The verdicts at single sites, by site and method."""
    found = table(results_frame(rows), metric, **options).by_site
    return {(c.verdict.site, c.verdict.method): c.verdict for c in found}


def t_interval(differences, tail=0.025):
    d = np.asarray(differences)
    half = stats.t.isf(tail, d.size - 1) * d.std(ddof=1) / sqrt(d.size)
    return d.mean() - half, d.mean() + half


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
    assert [(c.verdict.site, c.verdict.method) for c in table.by_site] == [
        ("A", "FedAvg + Tent"), ("A", "FedAvg + routing"), ("A", "IOP-FL + routing"),
        ("B", "FedAvg + Tent"), ("B", "FedAvg + routing"), ("B", "IOP-FL + routing"),
    ]  # fmt: skip
    for found in table.by_site:
        v = found.verdict
        adapted, plain = (
            values[v.site, found.algorithm, adapter] for adapter in (found.model, "none")
        )
        assert v.difference == pytest.approx(np.mean(adapted - plain))
        assert (v.reference, v.joined) == pytest.approx((plain.mean(), adapted.mean()))
        assert v.p == pytest.approx(stats.ttest_rel(adapted, plain).pvalue)
        assert (v.low, v.high) == pytest.approx(t_interval(adapted - plain))
        assert v.question == "adapting"
    assert [c.verdict.answer for c in table.by_site if c.algorithm == "fedavg"] == [
        "yes, this model", "no, this model",
        "yes, this model", "no, this model, both unusable",  # Dice below 0.5
    ]  # fmt: skip
    assert table.answers == table.by_site


def test_the_family_is_the_adapters_of_one_algorithm_at_one_site(adapted):
    found: Any = adapting_table(results_frame(adapted[0]), "dice").by_site
    assert [c.verdict.family for c in found] == [2, 2, 1] * 2
    assert all(c.verdict.p_holm == c.verdict.p for c in found if c.algorithm == "iopfl")
    for site in "AB":
        own = [c.verdict for c in found if c.verdict.site == site and c.algorithm == "fedavg"]
        small, large = sorted(v.p for v in own)
        assert sorted(v.p_holm for v in own) == pytest.approx([2 * small, max(2 * small, large)])


def test_over_all_sites_the_difference_is_the_mean_of_the_sites(adapted):
    rows, values = adapted
    tent: Any = adapting_table(results_frame(rows), "dice").over_sites[0].verdict
    by_site = [values[s, "fedavg", "tent"] - values[s, "fedavg", "none"] for s in "AB"]
    assert (tent.site, tent.method) == ("average", "FedAvg + Tent")
    assert tent.difference == pytest.approx(np.mean([d.mean() for d in by_site]))
    assert tent.patients == 15
    parts = np.array([d.var(ddof=1) / d.size / 4 for d in by_site])
    df = parts.sum() ** 2 / sum(v**2 / (d.size - 1) for v, d in zip(parts, by_site, strict=True))
    half = stats.t.isf(0.025, df) * sqrt(parts.sum())
    assert tent.high - tent.low == pytest.approx(2 * half)


def test_a_method_without_scores_at_a_site_is_not_compared_over_all(adapted):
    rows = [
        r for r in adapted[0] if (r["site"], r["algorithm"], r["model"]) != ("A", "fedavg", "tent")
    ]
    table = adapting_table(results_frame(rows), "dice")
    assert [c.verdict.method for c in table.over_sites] == ["FedAvg + routing", "IOP-FL + routing"]
    assert [c.verdict.family for c in table.by_site if c.verdict.site == "A"] == [1, 1]


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


def test_a_run_without_an_adapter_says_that_nothing_was_adapted(adapted):
    rows = [row for row in adapted[0] if row["model"] == "none"]
    table = adapting_table(results_frame(rows), "dice")
    assert table.comparisons == ()
    assert table.missing == (
        "Outside nothing was run but the adapter 'none', so there is nothing adapted to compare."
    )


def test_an_adapted_model_is_compared_with_itself_in_each_training(outside):
    rng, rows = np.random.default_rng(4), []
    plain = rng.uniform(0.4, 0.6, 8) + np.array([[0.0], [0.1], [-0.1], [0.05]])
    gains = 0.02 + rng.normal(0, 0.004, plain.shape)
    for seed in range(4):
        rows += outside("fedavg", "none", "A", plain[seed], seed=seed)
        rows += outside("fedavg", "tent", "A", (plain + gains)[seed], seed=seed)
    rows += outside("fedavg", "tent", "A", plain[0], seed=9)  # never scored unadapted
    verdict = verdicts(rows, adapting_table)["A", "FedAvg + Tent"]
    assert (verdict.trainings_joined, verdict.trainings_reference) == (4, 4)
    # the trainings' bar is that of the differences, in which what both share cancels
    assert verdict.answer == "yes"
    assert verdict.difference == pytest.approx(gains.mean())


def test_two_arms_may_differ_in_their_trainings(scores):
    rng = np.random.default_rng(0)
    alone, joined = rng.normal(0.5, 0.05, (3, 9)), rng.normal(0.6, 0.05, (5, 9))
    rows = []
    for seed, values in enumerate(alone):
        rows += scores("local", "personal", "A", values, seed=seed)
    for seed, values in enumerate(joined):
        rows += scores("fedavg", "global", "A", values, seed=seed)
    verdict = verdicts(rows)["A", "FedAvg global"]
    assert (verdict.trainings_joined, verdict.trainings_reference) == (5, 3)
    assert verdict.difference == pytest.approx(joined.mean() - alone.mean())


def test_the_folds_of_a_site_are_averaged_where_both_have_them(scores):
    rows = scores("local", "personal", "A", [0.5, 0.5])
    rows += scores("local", "personal", "A", [0.1, 0.3], fold=1)
    rows += scores("local", "personal", "A", [0.0, 0.0], fold=2)  # nobody else has it
    rows += scores("ditto", "personal", "A", [0.6, 0.8]) + scores(
        "ditto", "personal", "A", [0.2, 0.4], fold=1
    )
    rows += scores("ditto", "personal", "A", [0.9, 0.9], seed=1)  # fold 1 is not finished
    verdict = verdicts(rows)["A", "Ditto personal"]
    assert verdict.difference == pytest.approx((0.1 + 0.3 + 0.1 + 0.1) / 4)
    assert (verdict.trainings_joined, verdict.patients) == (1, 2)


def test_patients_of_two_sites_with_one_name_are_two_patients(scores):
    rows = []
    for site, shift in (("A", 0.1), ("B", 0.3)):
        rows += scores("fedavg", "global", site, [0.5] * 6)
        rows += scores("ditto", "personal", site, [0.5 + shift] * 5 + [0.51 + shift])
    (pooled,) = joining_table(results_frame(rows), "dice", local="fedavg").over_sites
    assert pooled.verdict.patients == 12
    assert pooled.verdict.difference == pytest.approx(0.2 + 0.01 / 6)
    assert pooled.verdict.outcome == "better"


def test_over_sites_the_trainings_are_those_that_all_have(scores):
    rows = []
    for site, seeds in (("A", 3), ("B", 2)):
        for seed in range(seeds):
            base = np.linspace(0.5, 0.6, 7) + 0.01 * seed
            rows += scores("local", "personal", site, base, seed=seed)
            rows += scores("fedavg", "global", site, base + np.linspace(0.1, 0.12, 7), seed=seed)
    table = joining_table(results_frame(rows), "dice")
    assert [c.verdict.trainings_joined for c in table.comparisons] == [3, 2, 2]


def test_a_distance_helps_when_it_falls(outside):
    rows = outside("fedavg", "none", "A", [4.0] * 6, metric="hd95", unit="mm")
    rows += outside("fedavg", "tent", "A", [3.0] * 5 + [3.1], metric="hd95", unit="mm")
    verdict = verdicts(rows, adapting_table, "hd95")["A", "FedAvg + Tent"]
    assert verdict.answer == "yes, this model"
    assert verdict.difference == pytest.approx(-5.9 / 6)
    assert verdict.unit == "mm"


def test_comparisons_do_not_depend_on_the_order_of_rows(adapted, scores):
    rows = adapted[0] + scores("local", "personal", "A", [0.5, 0.6, 0.7])
    rows += scores("fedavg", "global", "A", [0.6, 0.6, 0.8])
    mixed = [rows[place] for place in np.random.default_rng(1).permutation(len(rows))]
    for table in (adapting_table, joining_table):
        found, expected = (table(results_frame(some), "dice") for some in (mixed, rows))
        assert found.comparisons == expected.comparisons


def test_cases_are_averaged_within_a_patient_first(scores):
    patients = ["p1", "p1", "p1", "p2"]
    rows = scores("local", "personal", "A", [0.5, 0.5, 0.5, 0.6], patients=patients)
    rows += scores("fedavg", "global", "A", [0.9, 0.7, 0.8, 0.5], patients=patients)
    verdict = verdicts(rows)["A", "FedAvg global"]
    # p1: mean of 0.4, 0.2, 0.3 is 0.3; p2: -0.1; by hand (0.3 - 0.1) / 2
    assert verdict.difference == pytest.approx(0.1)
    assert verdict.patients == 2


def test_undefined_pairs_are_counted_and_enter_no_mean(scores):
    patients = ["p1", "p1", "p2", "p3", "p4"]
    rows = scores("local", "personal", "A", [0.7, 0.5, None, 0.5, 0.1], patients=patients)
    rows += scores("fedavg", "global", "A", [0.9, None, 0.8, 0.4, float("nan")], patients=patients)
    verdict = verdicts(rows)["A", "FedAvg global"]
    assert (verdict.undefined, verdict.patients) == (3, 2)
    assert verdict.difference == pytest.approx((0.2 - 0.1) / 2)


def test_a_method_that_shares_no_case_or_no_fold_with_the_reference_has_no_difference(scores):
    rows = scores("local", "personal", "A", [0.5]) + scores("fedavg", "global", "A", [0.6], fold=1)
    rows += [{**row, "case": "c99"} for row in scores("ditto", "global", "A", [0.6])]
    for verdict in verdicts(rows).values():
        assert (verdict.difference, verdict.patients) == (None, 0)
        assert verdict.sentence == "Cannot tell: no patient has a score with both."


def test_joining_compares_each_method_with_local_by_patient(joined_rows):
    found = verdicts(joined_rows, order=["fedavg", "ditto"])
    assert [method for _, method in found] == ["FedAvg global", "Ditto global", "Ditto personal"]
    fedavg, lone, personal = found.values()
    assert (fedavg.reference, fedavg.joined) == pytest.approx((0.57, 0.6725))
    assert fedavg.difference == pytest.approx(0.1025)
    assert [v.answer for v in found.values()] == [
        "yes, this model", "cannot tell", "no, this model",
    ]  # fmt: skip
    assert personal.outcome == "worse"
    assert (lone.undefined, lone.patients, lone.reference) == (7, 1, 0.5)


def test_joining_knows_local_by_its_label(joined_rows):
    rows = [r for r in joined_rows if r["algorithm"] != "ditto"]
    ((_, method),) = found = verdicts(rows, local="fedavg")
    assert method == "Local personal"
    assert found["A", method].outcome == "worse"


def test_joining_says_so_when_nobody_trained_alone(joined_rows):
    rows = [r for r in joined_rows if r["algorithm"] != "local"]
    table = joining_table(results_frame(rows), "dice")
    assert table.by_site == []
    assert "'local'" in table.missing
    assert "cannot be said" in table.missing


def test_p_values_are_corrected_for_the_distinct_models(scores):
    rng = np.random.default_rng(5)
    alone = rng.uniform(0.5, 0.7, 9)
    shifts = {"fedavg": 0.03, "fedprox": 0.01, "moon": -0.02}
    joined = {name: alone + shift + rng.normal(0, 0.02, 9) for name, shift in shifts.items()}
    joined["ditto"] = joined["iopfl"] = joined["fedavg"]  # three names of one model
    rows = scores("local", "personal", "A", alone)
    for name, values in joined.items():
        rows += scores(name, "global", "A", values)
    table = joining_table(results_frame(rows), "dice")
    p = {name: stats.ttest_rel(values, alone).pvalue for name, values in joined.items()}
    first, second, third = sorted(shifts, key=lambda name: p[name])
    holm = {first: min(1, 3 * p[first])}
    holm[second] = min(1, max(holm[first], 2 * p[second]))
    holm[third] = min(1, max(holm[second], p[third]))
    holm["ditto"] = holm["iopfl"] = holm["fedavg"]
    assert {c.algorithm: c.verdict.p for c in table.by_site} == pytest.approx(p)
    assert {c.algorithm: c.verdict.p_holm for c in table.by_site} == pytest.approx(holm)
    assert {c.verdict.family for c in table.by_site} == {3}
    same = {c.algorithm: c.verdict.same_as for c in table.by_site}
    assert sorted(same["fedavg"]) == ["Ditto global", "IOP-FL global"]
    assert same["moon"] == ()
    assert table.over_sites == []  # there is one site
    for shown in (to_text(table), to_markdown(table), to_latex(table)):
        (line,) = (line for line in shown.splitlines() if "IOP-FL global" in line)
        assert "(also " in line
        assert "FedAvg global" in line
        assert "Ditto global" in line
    assert len(table.frame) == len(joined)  # a row for each name


def test_models_are_the_same_only_if_all_scores_of_all_metrics_are(scores):
    alone = [0.5, 0.6, 0.7, 0.8, 0.6, 0.5]
    rows = scores("local", "personal", "A", alone) + scores("fedbn", "personal", "A", alone)
    assert verdicts(rows)["A", "FedBN personal"].sentence == (
        "FedBN personal and training alone are the same model."
    )
    rows += scores("local", "personal", "A", [1.0], metric="hd95", unit="mm")
    rows += scores("fedbn", "personal", "A", [np.nextafter(1.0, 2)], metric="hd95", unit="mm")
    assert verdicts(rows)["A", "FedBN personal"].sentence == (
        "FedBN personal and training alone score the same for every patient."
    )


def test_the_method_chosen_on_validation_has_the_interval_of_the_best_of_several(scores):
    rng, rows = np.random.default_rng(2), []
    sds = {"local": 0.003, "fedavg": 0.003, "fedprox": 0.003, "moon": 0.02, "pooled": 0.5}
    for name, sd in sds.items():
        for seed in range(4):
            values = 0.5 + rng.normal(0, sd) + rng.normal(0, 0.01, 10)
            rows += scores(name, "global", "A", values, seed=seed)
            last = scores(name, "global", "A", [0.5 + 0.1 * (name == "fedavg")], seed=seed)[0]
            rows.append({**last, "split": "val", "case": "", "patient": ""})
    rows += [{**r, "algorithm": "ditto"} for r in rows if r["algorithm"] == "fedavg"]
    table = joining_table(results_frame(rows), "dice", pooled=["pooled"])
    (answer,) = table.answers
    assert answer.key == ("fedavg", "global")
    # FedAvg under two names, FedProx, MOON; pooling is a bound and nobody's choice
    assert answer.verdict.candidates == 3
    assert answer.verdict.same_as == ("Ditto global",)
    ditto: Any = next(c.verdict for c in table.by_site if c.algorithm == "ditto")
    assert ditto.candidates == 1
    assert answer.verdict.difference == ditto.difference
    chosen: Any = answer.verdict
    assert chosen.high - chosen.low > ditto.high - ditto.low


def test_the_smallest_relevant_difference_is_a_setting(scores):
    alone = np.linspace(0.5, 0.64, 8)
    rows = scores("local", "personal", "A", alone)
    rows += scores("fedavg", "global", "A", alone + np.tile([0.003, 0.004], 4))
    assert verdicts(rows)["A", "FedAvg global"].answer == "no relevant difference"
    for relevant in ({}, {"dice": 0.003}):
        found = verdicts(rows, settings=VerdictSettings(relevant=relevant))["A", "FedAvg global"]
        assert found.outcome == "better"
    vessel = [{**row, "metric": "dice_vessel"} for row in rows]
    assert verdicts(vessel, metric="dice_vessel")["A", "FedAvg global"].relevant == 0.01


def classified(scores, algorithm, site, labels, chances, **options):
    """Rows of a classification: classes and probabilities of cases beside its metrics."""
    right = ((np.asarray(chances) > 0.5) == labels).astype(float)
    columns = {"_class": labels, "_p0": 1 - np.asarray(chances), "_p1": chances,
               "accuracy": right, "auc": right, "balanced_accuracy": right}  # fmt: skip
    model = "personal" if algorithm == "local" else "global"
    return [
        row
        for metric, values in columns.items()
        for row in scores(algorithm, model, site, values, metric=metric, **options)
    ]


@pytest.fixture
def two_sites(scores):
    """Three trainings of two methods at a site with two healthy patients and one with ten."""
    rng, rows, truth, chances = np.random.default_rng(11), [], {}, {}
    for site, healthy in (("A", 2), ("B", 10)):
        truth[site] = (np.arange(30) >= healthy).astype(float)
        for algorithm, noise in (("local", 0.6), ("fedavg", 0.05)):
            for seed in range(3):
                own = np.clip(0.3 + 0.4 * truth[site] + rng.normal(0, noise, 30), 0, 1)
                chances[site, algorithm, seed] = own
                rows += classified(scores, algorithm, site, truth[site], own, seed=seed)
    return rows, truth, chances


@pytest.mark.parametrize("metric", ["auc", "balanced_accuracy"])
def test_metrics_of_a_set_are_estimated_from_classes_and_probabilities(two_sites, metric):
    rows, truth, chances = two_sites
    few, enough = verdicts(rows, metric=metric).values()
    assert (few.answer, few.p, few.low) == ("cannot tell", None, None)
    assert few.sentence.startswith(
        "Cannot tell: 2 test patients with class 0; at least 6 are needed."
    )
    named = VerdictSettings(classes=("healthy", "ill"))
    sentence = verdicts(rows, metric=metric, settings=named)["A", few.method].sentence
    assert sentence.startswith("Cannot tell: 2 test patients with class healthy; at least")
    score = {
        "auc": roc_auc_score,
        "balanced_accuracy": lambda labels, p: balanced_accuracy_score(labels, p > 0.5),
    }[metric]
    for found in (few, enough):
        joined, alone = (
            np.mean([score(truth[found.site], chances[found.site, name, s]) for s in range(3)])
            for name in ("fedavg", "local")
        )
        assert (found.joined, found.reference) == pytest.approx((joined, alone))
    assert enough.answer == "yes"
    (pooled,) = joining_table(results_frame(rows), metric).over_sites
    assert (pooled.verdict.answer, pooled.verdict.fewest) == ("cannot tell", 2)
    assert pooled.verdict.fewest_of == "with class 0 at A"


def test_the_area_of_several_models_of_a_training_is_the_mean_of_theirs(outside):
    rng, truth = np.random.default_rng(0), np.repeat([0.0, 1.0], 8)
    first, second, plain = rng.random((3, 16))
    rows = []
    for adapter, columns in (
        ("none", {"_p0": 1 - plain, "_p1": plain}),
        ("average", {"_p0_0": 1 - first, "_p1_0": first, "_p0_1": 1 - second, "_p1_1": second}),
    ):
        for metric, values in {**columns, "_class": truth, "auc": truth}.items():
            rows += outside("fedavg", adapter, "A", values, metric=metric)
    verdict = verdicts(rows, adapting_table, "auc")["A", "FedAvg + Average"]
    mean = np.mean([roc_auc_score(truth, chance) for chance in (first, second)])
    assert verdict.joined == pytest.approx(mean)
    assert verdict.difference == pytest.approx(mean - roc_auc_score(truth, plain))


def test_results_without_classes_have_no_verdict_on_a_metric_of_a_set(scores):
    rows = scores("local", "personal", "A", [0.5] * 8, metric="auc")
    rows += scores("fedavg", "global", "A", [0.75] * 8, metric="auc")
    verdict = verdicts(rows, metric="auc")["A", "FedAvg global"]
    assert (verdict.reason, verdict.difference) == ("no classes", 0.25)
    assert verdict.sentence.startswith("Cannot tell: this run holds no classes and probabilities")


def test_six_patients_that_all_gain_clearly_are_enough_with_any_number_of_methods(scores):
    alone = [0.50, 0.55, 0.60, 0.58, 0.52, 0.61]
    rows = scores("local", "personal", "A", alone)
    gains = [0.10, 0.11, 0.09, 0.10, 0.12, 0.11]
    for number in range(10):
        joined = [a + g + number / 1000 for a, g in zip(alone, gains, strict=True)]
        rows += scores(f"m{number}", "global", "A", joined)
    found = verdicts(rows).values()
    assert {v.outcome for v in found} == {"better"}
    assert {v.family for v in found} == {10}
    assert all(v.p_holm < 0.05 for v in found)


def test_accuracy_is_a_share(scores):
    alone, joined = [1, 0, 1, 1, 0, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 0]
    rows = scores("local", "personal", "A", alone, metric="accuracy")
    rows += scores("fedavg", "global", "A", joined, metric="accuracy")
    verdict = verdicts(rows, metric="accuracy")["A", "FedAvg global"]
    # half an imaginary patient: two gain of 8, c = 2 / 8.5, V = (2 + 1/2 - 8.5 c^2) / (7.5 * 8.5)
    centre = 2 / 8.5
    half = stats.t.isf(0.025, 7.5) * sqrt((2.5 - 8.5 * centre**2) / (7.5 * 8.5))
    assert verdict.difference == pytest.approx(0.25)
    assert (verdict.low, verdict.high) == pytest.approx((centre - half, centre + half))


@pytest.mark.parametrize(
    ("metric", "classes", "words"),
    [
        ("sensitivity", ("well", "ill"), "5 test patients with class ill"),
        ("specificity", ("well", "ill"), "5 test patients with class well"),
        ("specificity", (), "5 test patients with class 0"),
        ("sensitivity_naevus", ("naevus", "mole", "wart"), "5 test patients with class naevus"),
        ("specificity_naevus", (), "5 test patients without class naevus"),
    ],
)
def test_a_share_of_one_class_depends_on_the_patients_of_that_class(scores, metric, classes, words):
    rows = scores("local", "personal", "A", [1, 0, 1, 0, 1], metric=metric)
    rows += scores("fedavg", "global", "A", [1, 1, 1, 1, 1], metric=metric)
    settings = VerdictSettings(classes=classes)
    (found,) = joining_table(results_frame(rows), metric, settings=settings).by_site
    assert words in found.verdict.sentence
    enough = scores("local", "personal", "A", [1, 0] * 10, metric=metric)
    enough += scores("fedavg", "global", "A", [1, 1] * 10, metric=metric)
    (found,) = joining_table(results_frame(enough), metric).by_site
    expected = estimate_share([1] * 20, [1, 0] * 10)
    assert found.verdict.difference == expected.difference == 0.5
    assert found.verdict.patients == 20
    assert found.verdict.undefined == 0
    assert np.mean([found.verdict.low, found.verdict.high]) == pytest.approx(expected.centre)
