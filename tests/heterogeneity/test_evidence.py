from itertools import combinations
from typing import Any

import numpy as np
import pytest

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.evidence import energy_test, holm, smallest_p, stability


def within_by_hand(groups: list[Any]) -> float:
    return sum(
        sum(float(np.linalg.norm(np.subtract(a, b))) for a in group for b in group)
        / (2 * len(group))
        for group in groups
    )


def test_p_is_the_share_of_all_ways_to_deal_out_the_cases() -> None:
    values = np.array([0.1, 0.4, 1.3, 0.9, 2.2, 2.0, 3.1])
    ways = [
        within_by_hand([values[list(first)], np.delete(values, list(first))])
        for first in combinations(range(7), 3)
    ]
    found = within_by_hand([values[:3], values[3:]])
    exact = np.mean(np.array(ways) <= found + 1e-12)
    evidence = energy_test({"A": values[:3], "B": values[3:]}, permutations=4000)
    assert evidence.p == pytest.approx(exact, abs=0.02)
    assert 0.03 < exact < 0.2
    assert evidence.cases == 7
    total = sum(abs(a - b) for a in values for b in values) / 14
    effect = (np.mean(ways) - found) / np.mean(ways)
    assert found < total
    assert evidence.effect == pytest.approx(effect, abs=0.02)


def test_embeddings_are_compared_by_their_euclidean_distance() -> None:
    rng = np.random.default_rng(5)
    a, b, c = (rng.normal(shift, 1.0, (size, 4)) for shift, size in ((0, 9), (0, 12), (2, 10)))
    evidence = energy_test({"A": a, "B": b, "C": c})
    assert evidence.p == 0.001
    alike = energy_test({"A": a, "B": b})
    assert alike.p > 0.05
    assert abs(alike.effect) < 0.1 < evidence.effect
    one = energy_test({"A": a[:, :1], "C": c[:, :1]})
    assert one == energy_test({"A": a[:, 0], "C": c[:, 0]})


def test_a_difference_in_spread_alone_is_seen() -> None:
    rng = np.random.default_rng(2)
    samples = {"A": rng.normal(0, 1, 60), "B": rng.normal(0, 4, 60)}
    assert energy_test(samples).p < 0.01


def test_alike_sites_are_called_different_as_rarely_as_promised() -> None:
    rng = np.random.default_rng(11)
    found = [
        energy_test({"A": rng.normal(size=8), "B": rng.normal(size=6)}, permutations=99).p
        for _ in range(300)
    ]
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(0.05, abs=0.035)
    assert np.mean(found) == pytest.approx(0.5, abs=0.06)


def test_equal_cases_everywhere_are_no_difference() -> None:
    evidence = energy_test({"A": [2.0] * 3, "B": [2.0] * 4})
    assert evidence.p == 1.0
    assert evidence.effect == 0.0


def test_names_and_order_do_not_matter_but_for_chance() -> None:
    values = {"A": [0.0, 1.0, 2.0], "B": [5.0, 6.0]}
    again = {"B": [5.0, 6.0], "A": [0.0, 1.0, 2.0]}
    assert energy_test(values) == energy_test(again)


def test_few_cases_cannot_give_a_small_p() -> None:
    assert smallest_p([3, 3], 999) == pytest.approx(1 / 10)
    assert smallest_p([2, 3], 999) == pytest.approx(1 / 10)
    assert smallest_p([2, 2, 2], 999) == pytest.approx(1 / 15)
    assert smallest_p([20, 20], 999) == pytest.approx(1 / 1000)
    far = energy_test({"A": [0.0, 0.1, 0.2], "B": [9.0, 9.1, 9.2]})
    assert far.smallest_p == pytest.approx(1 / 10)
    assert far.p == pytest.approx(1 / 10, abs=0.03)


def test_of_many_cases_a_share_takes_part() -> None:
    rng = np.random.default_rng(0)
    samples = {"A": rng.normal(size=300), "B": rng.normal(1, 1, size=100), "C": rng.normal(size=3)}
    evidence = energy_test(samples, permutations=99, limit=100)
    assert evidence.cases == 300 * 100 // 403 + 100 * 100 // 403 + 2
    assert evidence == energy_test(samples, permutations=99, limit=100)


def test_several_p_values_are_adjusted_as_holm_does() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.2, 0.6, 0.5]) == pytest.approx([0.6, 1.0, 1.0])
    assert holm([]) == []


def test_resampling_counts_how_often_each_site_is_chosen() -> None:
    values = {"A": np.array([0.0, 1.0]), "B": np.array([0.6]), "C": np.array([0.1])}

    def largest(rows: Any) -> str:
        return max(values, key=lambda site: values[site][rows[site]].mean())

    found = stability({site: len(column) for site, column in values.items()}, largest, draws=4000)
    assert found == pytest.approx({"A": 0.25, "B": 0.75, "C": 0.0}, abs=0.03)


def test_what_cannot_be_compared_is_told() -> None:
    with pytest.raises(ConfigError, match="a difference takes two sites"):
        energy_test({"A": [1.0, 2.0]})
    for wrong in ([], [float("nan")]):
        with pytest.raises(DataError, match="site 'B' has no cases to compare"):
            energy_test({"A": [1.0, 2.0], "B": wrong})
