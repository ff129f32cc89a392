import numpy as np
import pytest

from collegium.evaluation.cells import Cell
from collegium.evaluation.formats import to_markdown, to_text
from collegium.evaluation.sweeps import sweep_table, variations


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


def test_settings_stand_in_the_order_of_their_numbers(swept, scores):
    names = ["tau=0.25", "tau=0.5", "tau=0.05", "tau=1", "no loss", "clients-10", "clients-2", ""]
    rows = [row for name in names for row in scores("a", "global", "A", [0.1], variation=name)]
    assert variations(rows) == (
        "", "clients-2", "clients-10", "no loss", "tau=0.05", "tau=0.25", "tau=0.5", "tau=1",
    )  # fmt: skip
    assert variations([]) == ()


def test_cells_of_a_sweep_are_averages_over_the_sites_of_the_setting(swept):
    table = sweep_table(swept, "dice", ["fedavg"])
    assert table.columns == ("clients-2", "clients-10")
    fedavg, iopfl = table.methods
    assert (fedavg.name, iopfl.name) == ("FedAvg global", "IOP-FL personal")
    # two clients: A and B are 0.5 and 0.6; ten: A, B, C are 0.5, 0.6, 0.7; seeds 0.1 apart
    assert [fedavg.cells[c].mean for c in table.columns] == pytest.approx([0.6, 0.65])
    assert fedavg.cells["clients-2"].sd == pytest.approx(0.1 / 2**0.5)
    assert [iopfl.cells[c].rank for c in table.columns] == [1, 1]
    assert [fedavg.cells[c].rank for c in table.columns] == [2, 2]


def test_a_method_that_a_setting_lacks_has_an_empty_cell(swept):
    rows = [r for r in swept if (r.algorithm, r.variation) != ("iopfl", "clients-10")]
    table = sweep_table(rows, "dice", settings=["clients-10", "clients-2"])
    assert table.columns == ("clients-10", "clients-2")
    assert table.methods[1].cells["clients-10"] == Cell(None)
    assert "| IOP-FL personal | \u2013 | **0.700 \u00b1 0.000** |" in to_markdown(table)


def test_a_sweep_of_scores_outside_has_adapters(outside):
    rows = outside("fedavg", "tent", "A", [4.0], variation="t1", metric="hd95", unit="mm")
    rows += outside("fedavg", "tent", "B", [6.0], variation="t1", metric="hd95", unit="mm")
    table = sweep_table(rows, "hd95", where="outside")
    assert table.methods[0].name == "FedAvg + Tent"
    assert table.methods[0].cells["t1"].mean == pytest.approx(5.0)
    assert not table.higher_is_better
    text = to_text(table)
    assert text.startswith("hd95 (mm) at sites outside, average over sites: mean")


def test_rows_outside_the_sweep_are_no_column_and_order_changes_nothing(swept, scores):
    rows = swept + scores("fedavg", "global", "A", [0.99])
    mixed = [rows[place] for place in np.random.default_rng(0).permutation(len(rows))]
    assert sweep_table(mixed, "dice") == sweep_table(swept, "dice")
    assert sweep_table([], "dice").methods == ()
