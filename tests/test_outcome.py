from pathlib import Path

import pytest

from collegium.algorithms.resfim import ResFIM
from collegium.config import parse_config
from collegium.grid import cells_of
from collegium.outcome import cell_rows
from collegium.run import Run
from collegium.toy import ToyFederation

CONFIG = {
    "name": "toy",
    "federation": {"name": "toy", "root": ".", "sites": {name: {"folder": name} for name in "ABC"}},
    "model": {"name": "unet"},
    "algorithms": ["resfim"],
    "rounds": 2,
}


def test_numbers_that_clients_tell_of_a_round_become_rows(tmp_path: Path) -> None:
    federation = ToyFederation(ResFIM(delta=50), tmp_path).run(2)
    run = Run(federation.server, 2, "negative_loss")
    rows = [
        row
        for row in cell_rows(cells_of(parse_config(CONFIG))[0], run, {})
        if row.metric.startswith("masking_rates/")
    ]
    tensors = ("0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias")
    assert {row.metric for row in rows} == {f"masking_rates/{name}" for name in tensors}
    assert {(row.site, row.round) for row in rows} == {(s, t) for s in "ABC" for t in (1, 2)}
    assert {(row.split, row.model, row.case) for row in rows} == {("train", "", "")}
    sizes = dict(zip(tensors, (12, 4, 4, 4, 4, 1), strict=True))
    for site in "ABC":
        told = {
            row.metric.partition("/")[2]: row.value
            for row in rows
            if row.site == site and row.round == 2
        }
        kept = sum((told[name] or 0.0) * size for name, size in sizes.items())
        assert kept == pytest.approx(round(0.5 * 29))
