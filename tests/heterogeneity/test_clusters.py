from itertools import combinations

import numpy as np
import pytest

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.clusters import clusters, most_distant, printed_clusters

TABLES = [
    "table2_FeTS_EMD",
    "table2_FeTS_EUC",
    "table2_Prostate_EMD",
    "table2_Prostate_EUC",
    "table2_KITS_EMD",
]


def numbered(found):
    """Clusters with sites counted from 1, as the paper counts them."""
    return [[site + 1 for site in members] for members in found]


def within(distance, found):
    return sum(distance[i][j] for members in found for i, j in combinations(members, 2))


@pytest.mark.parametrize("name", TABLES)
def test_all_clusters_of_the_paper_come_out(golden, name):
    case = golden(name)
    distance, expected = case["inputs"]["D"], case["expected"]
    assert most_distant(distance) + 1 == expected["i_max"]
    found = numbered(clusters(distance))
    assert found == expected["recommended"]
    assert found == expected["paper_table4"]
    chosen = [c for c in expected["candidates"] if c["clusters"] == found]
    assert within(distance, clusters(distance)) == pytest.approx(chosen[0]["total"])


@pytest.mark.parametrize("name", TABLES)
def test_the_loop_as_printed(golden, name):
    case = golden(name)
    found = numbered(printed_clusters(case["inputs"]["D"]))
    assert found == case["expected"]["printed_algorithm1"]
    matches = found == case["expected"]["paper_table4"]
    assert matches == case["expected"]["printed_matches_paper"]


@pytest.mark.parametrize("name", TABLES)
def test_sums_are_over_all_other_sites_unlike_those_printed(golden, name):
    case = golden(name)
    expected = case["expected"]
    sums = np.sum(case["inputs"]["D"], axis=1)
    np.testing.assert_allclose(sums, expected["column_sums"], atol=case["atol"])
    if expected["printed_sums"] is not None:
        assert np.abs(sums - expected["printed_sums"]).max() > 1


def test_on_the_printed_tables_the_two_rules_differ_once(golden):
    differ = [
        name
        for name in TABLES
        if clusters(golden(name)["inputs"]["D"]) != printed_clusters(golden(name)["inputs"]["D"])
    ]
    assert differ == ["table2_KITS_EMD"]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count", [4, 5, 6, 9])
def test_the_rule_is_the_best_of_the_nearest_m(count, seed):
    rng = np.random.default_rng(seed)
    distance = rng.integers(1, 30, (count, count)).astype(float)
    distance = np.triu(distance, 1) + np.triu(distance, 1).T
    start = max(range(count), key=lambda i: (sum(distance[i]), -i))
    nearest = sorted(set(range(count)) - {start}, key=lambda j: (distance[start][j], j))
    candidates = []
    for m in range(1, count - 2):
        members = sorted([start, *nearest[:m]])
        rest = sorted(nearest[m:])
        candidates.append((within(distance, [members, rest]), m, sorted([members, rest])))
    assert clusters(distance) == min(candidates)[2]
    members = sorted([start, *nearest[:-2]])
    assert printed_clusters(distance) == sorted([members, sorted(nearest[-2:])])
    assert all(len(part) >= 2 for part in clusters(distance))


def test_equal_distances_are_settled_by_index():
    assert most_distant(np.ones((5, 5))) == 0
    assert clusters(np.ones((5, 5))) == [[0, 1], [2, 3, 4]]
    assert printed_clusters(np.ones((5, 5))) == [[0, 1, 2], [3, 4]]


def test_the_best_of_all_partitions_is_another_rule():
    better = 0
    for seed in range(20):
        distance = np.random.default_rng(seed).integers(1, 30, (5, 5))
        distance = np.triu(distance, 1) + np.triu(distance, 1).T
        pairs = [[list(part), sorted({*range(5)} - {*part})] for part in combinations(range(5), 2)]
        best = min(within(distance, found) for found in pairs)
        assert within(distance, clusters(distance)) >= best
        better += within(distance, clusters(distance)) > best
    assert better


@pytest.mark.parametrize("rule", [clusters, printed_clusters])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_fewer_than_four_sites_are_no_two_clusters(rule, count):
    with pytest.raises(ConfigError, match=f"need 4 sites, but there are {count}"):
        rule(np.ones((count, count)))


def test_of_one_or_two_sites_the_first_is_returned():
    assert most_distant([[0.0]]) == 0
    assert most_distant([[0.0, 3.0], [3.0, 0.0]]) == 0
    assert most_distant([[0, 1, 1], [1, 0, 2], [1, 2, 0]]) == 1


def test_an_unknown_distance_is_an_error():
    distance = np.ones((4, 4))
    distance[1, 3] = float("nan")
    for function in (most_distant, clusters, printed_clusters):
        with pytest.raises(DataError, match="sites 2 and 4, in sorted order, is nan"):
            function(distance)
