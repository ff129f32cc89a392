from typing import Any

from collegium.evaluation.report.traffic import Traffic, count_traffic
from collegium.evaluation.results import Row


def round_row(algorithm="fedavg", seed=0, site="A", number=1, **changes):
    return Row(experiment="e", algorithm=algorithm, seed=seed, site=site, round=number,
               split="train", metric="loss", value=1.0, **changes)  # fmt: skip


def test_traffic_is_summed_over_sites_and_rounds_and_averaged_over_seeds():
    rows = [
        round_row(seed=seed, site=site, number=number, bytes_up=up, bytes_down=10, seconds=0.5)
        for seed, up in ((0, 100), (1, 300))
        for site in ("A", "B")
        for number in (1, 2)
    ]
    (found,) = count_traffic(rows, ["fedavg", "never ran"])
    # seed 0: 2 sites x 2 rounds x 100 = 400; seed 1: 1200; mean 800, per round half of it
    assert found == Traffic("fedavg", up=800, down=40, seconds=2.0, up_round=400, down_round=20)
    assert found.name == "FedAvg"


def test_folds_are_averaged_like_seeds():
    rows = [round_row(fold=fold, site=site, bytes_up=100) for fold, site in ((0, "A"), (1, "B"))]
    (found,) = count_traffic(rows, ["fedavg"])
    assert (found.up, found.up_round) == (100, 100)


def test_totals_of_the_case_rows_count_what_went_before_and_after_the_rounds():
    rows = [round_row(bytes_up=100), round_row(bytes_up=100, number=2)]
    about: dict[str, Any] = {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 2,
             "site": "A", "case": "c001", "patient": "p001", "metric": "dice",
             "value": 0.5}  # fmt: skip
    rows.append(Row(**about, split="test", model="global", bytes_up=260))
    rows.append(Row(**about, split="outside", model="tent", seconds=99.0))  # no training
    (found,) = count_traffic(rows, ["fedavg"])
    assert (found.up, found.up_round, found.seconds) == (260, 100, 0)
