import numpy as np
import pytest
from sklearn.neighbors import NearestNeighbors

from collegium.errors import ConfigError, DataError
from collegium.heterogeneity.graphs import edges, incidence, neighbours


def test_the_network_and_its_incidence_matrix(golden):
    case = golden("knn_graph_Q")
    expected = case["expected"]
    near = neighbours(case["inputs"]["distance"], case["params"]["k"])
    found = edges(near)
    assert near == expected["neighbours"]
    assert [list(edge) for edge in found] == expected["edges"]
    assert [list(edge) for edge in found] != expected["private_code_edges"]
    assert [list(edge) for edge in found] != expected["directed_edges"]
    np.testing.assert_array_equal(incidence(5, found), expected["Q"])


@pytest.mark.parametrize("k", [1, 3, 7, 19])
def test_neighbours_equal_scikit_learn(k):
    points = np.random.default_rng(k).normal(size=(20, 3))
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    expected = NearestNeighbors(n_neighbors=k).fit(points).kneighbors(return_distance=False)
    assert neighbours(distance, k) == expected.tolist()


def test_equally_near_sites_come_by_index_and_nobody_is_its_own_neighbour():
    same = np.zeros((4, 4))
    assert neighbours(same, 2) == [[1, 2], [0, 2], [0, 1], [0, 1]]
    assert neighbours(np.full((3, 3), 5.0), 2) == [[1, 2], [0, 2], [0, 1]]


def test_all_neighbours_make_the_complete_network():
    count = 6
    distance = np.random.default_rng(0).uniform(1, 2, (count, count))
    found = edges(neighbours(distance, count - 1))
    assert len(found) == count * (count - 1) // 2
    matrix = incidence(count, found)
    laplacian = count * np.eye(count) - 1  # of the complete graph
    np.testing.assert_array_equal(matrix @ matrix.T, laplacian)


def test_columns_of_the_incidence_matrix_sum_to_zero():
    matrix = incidence(5, [(0, 4), (1, 2)])
    np.testing.assert_array_equal(matrix.sum(0), [0, 0])
    np.testing.assert_array_equal(np.abs(matrix).sum(1), [1, 1, 1, 0, 1])
    assert incidence(1, []).shape == (1, 0)


@pytest.mark.parametrize("k", [0, -1, 3, 10])
def test_a_site_has_at_least_one_neighbour_and_at_most_all_others(k):
    with pytest.raises(ConfigError, match=f"k is {k}, but with 3 sites a site has 1 to 2"):
        neighbours(np.ones((3, 3)), k)


def test_one_site_has_nobody_to_be_similar_to():
    with pytest.raises(ConfigError, match="nobody for it to be similar to"):
        neighbours([[0.0]], 1)


def test_an_unknown_distance_is_an_error():
    with pytest.raises(DataError, match="is nan"):
        neighbours([[0.0, float("nan")], [float("nan"), 0.0]], 1)


@pytest.mark.parametrize("edge", [(1, 1), (0, 3), (-1, 0)])
def test_an_edge_joins_two_sites(edge):
    with pytest.raises(ConfigError, match="does not join two of 3 sites"):
        incidence(3, [edge])
