import pytest

from collegium.evaluation.cells import Cell, cell_of, method_cells, ranked
from collegium.evaluation.scores import SiteMeans


def test_a_cell_is_mean_and_sample_sd_over_seeds():
    cell = cell_of([0.5, 0.7, 0.9])
    assert [cell.mean, cell.sd] == pytest.approx([0.7, 0.2])
    assert cell_of([0.5]) == Cell(0.5)
    assert cell_of([]) == Cell(None)


def test_a_seed_that_lacks_a_site_enters_no_average():
    means: SiteMeans = {0: {"A": 0.4, "B": 0.6}, 1: {"A": 0.9}, 2: {"A": 0.5, "B": 0.9}}
    cells = method_cells(means, ["A", "B"], ["A", "B"], higher=True)
    assert cells["average"].mean == pytest.approx((0.5 + 0.7) / 2)
    assert cells["A"].mean == pytest.approx(0.6)


def test_zero_can_be_the_best_and_numbers_that_print_alike_share_a_rank():
    rows = [{"A": Cell(0.0)}, {"A": Cell(0.004)}, {"A": Cell(1.0)}, {"A": Cell(None)}]
    found = ranked(rows, "mm", higher=False)
    assert [row["A"].rank for row in found] == [1, 1, 2, 0]
    assert ranked([], "", higher=True) == []
