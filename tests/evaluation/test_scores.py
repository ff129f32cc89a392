import pytest

from collegium.evaluation.scores import mean_over_seeds, position, seed_values, site_means, unit_of


def test_means_are_over_cases_then_patients_by_seed_and_site(scores):
    rows = scores("a", "global", "A", [0.2, 0.4, 0.9, None], patients=["p", "p", "q", "r"])
    rows += scores("a", "global", "B", [None]) + scores("a", "global", "A", [0.8], seed=1)
    means = site_means(rows)
    assert means[0] == {"A": pytest.approx((0.3 + 0.9) / 2), "B": None}
    assert seed_values(means, "A") == pytest.approx([0.6, 0.8])
    assert seed_values(means, "B") == []
    assert mean_over_seeds(row for row in rows if row.site == "A") == pytest.approx(0.7)
    assert mean_over_seeds(row for row in rows if row.site == "B") is None


def test_training_alone_stands_first_then_the_order_given_then_names():
    keys = [("x", "global"), ("ditto", "personal"), ("ditto", "global"), ("local", "personal"),
            ("fedavg", "tent"), ("fedavg", "none")]  # fmt: skip
    assert sorted(keys, key=lambda key: position(key, ["fedavg", "ditto"])) == [
        ("local", "personal"), ("fedavg", "none"), ("fedavg", "tent"), ("ditto", "global"),
        ("ditto", "personal"), ("x", "global"),
    ]  # fmt: skip


def test_the_unit_is_that_of_the_scores(scores):
    assert unit_of(scores("a", "global", "A", [3.0], metric="hd95", unit="mm")) == "mm"
    assert unit_of([]) == ""
