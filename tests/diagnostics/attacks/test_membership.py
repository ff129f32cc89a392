from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import yaml

from collegium.data.phantoms import make_federation
from collegium.diagnostics.attacks.membership import (
    ALL_SITES,
    MembershipResult,
    confidence,
    infer_memberships,
    likelihood_scores,
    separate,
)
from collegium.errors import ConfigError, DataError
from collegium.experiment.config.experiment import load_config
from collegium.experiment.grid import TESTED
from collegium.experiment.runner import run_experiment


def tables(
    folder: Path, parts: Mapping[str, Sequence[str]] = MappingProxyType({}), **changes: Any
) -> Path:
    """A finished run on tables whose classes are drawn by lot, and can only be learnt by heart."""
    rng = np.random.default_rng(0)
    for site in "AB":
        own = parts.get(site, ["train"] * 30 + ["val"] * 6 + ["test"] * 30)
        x, y = rng.normal(size=(len(own), 6)), rng.integers(0, 2, len(own))
        rows = [
            f"{site}{n},{','.join(f'{v:.4f}' for v in x[n])},{'yes' if y[n] else 'no'},{split}"
            for n, split in enumerate(own)
        ]
        head = "patient,a,b,c,d,e,f,outcome,split"
        (folder / f"{site}.csv").write_text("\n".join([head, *rows]) + "\n")
    data: dict[str, Any] = {
        "name": "x",
        "federation": {
            "name": "x",
            "sites": {site: {"table": f"{site}.csv"} for site in "AB"},
            "table": {
                "label": "outcome", "numeric": [*"abcdef"], "patient": "patient", "split": "split",
            },
            "task": {"name": "classification", "classes": ["no", "yes"]},
        },
        "model": {"name": "mlp", "hidden": [32], "norm": "none"},
        "training": {"optimizer": "adam", "lr": 0.02, "batch_size": 10, "local_epochs": 20},
        "rounds": 2, "algorithms": ["fedavg", "ditto"], "seeds": [0],
        "selection": {"round": "last"}, "output": str(folder / "run"),
    }  # fmt: skip
    path = folder / "x.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    run_experiment(load_config(path, ()))
    return folder / "run"


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> list[MembershipResult]:
    return infer_memberships(tables(tmp_path_factory.mktemp("lots")), shadows=8, fpr=0.1)


def test_an_overfitted_model_tells_whom_it_was_trained_on(
    overfitted: list[MembershipResult],
) -> None:
    names = {(r.algorithm, r.site, r.model, r.attack) for r in overfitted}
    assert len(names) == len(overfitted)
    assert {(a, m) for a, _, m, _ in names} == {
        ("fedavg", "global"), ("ditto", "global"), ("ditto", "personal")
    }  # fmt: skip
    assert {(s, k) for _, s, _, k in names} == {
        (site, kind) for site in ("A", "B", ALL_SITES) for kind in ("threshold", "lira")
    }
    for result in overfitted:
        found, each = result.found, 60 if result.site == ALL_SITES else 30
        assert (found.members, found.others, found.fpr) == (each, each, 0.1)
        assert found.auc > 0.6
        assert found.p < 0.05
        assert found.tpr > 0.1


def test_a_model_that_learnt_nothing_tells_nothing(tmp_path: Path) -> None:
    still = {"optimizer": "sgd", "lr": 1e-9, "local_steps": 1}
    run = tables(tmp_path, training=still, algorithms=["fedavg"], rounds=1)
    for result in infer_memberships(run):
        assert result.attack == "threshold"
        assert 0.3 < result.found.auc < 0.7
        assert result.found.p > 0.01


def test_sites_too_small_for_themselves_count_among_all_sites(tmp_path: Path) -> None:
    """B has one test patient: alone nothing can be told of it, with A's there are 31 others."""
    run = tables(tmp_path, parts={"B": ["train"] * 3 + ["val"] + ["test"]}, algorithms=["fedavg"])
    found = {result.site: result.found for result in infer_memberships(run)}
    counts = {site: (separation.members, separation.others) for site, separation in found.items()}
    assert counts == {"A": (30, 30), ALL_SITES: (33, 31)}


def test_masks_are_attacked_by_the_loss_of_whole_cases(tmp_path: Path) -> None:
    make_federation(tmp_path / "data", 1, cases=12, size=32)
    data = {
        "name": "x", "federation": str(tmp_path / "data" / "federation.yaml"),
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "num_res_units": 0},
        "training": {"batch_size": 2, "local_steps": 1}, "rounds": 1, "algorithms": ["fedavg"],
        "output": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(data))
    run_experiment(load_config(tmp_path / "x.yaml", ()))
    results = infer_memberships(tmp_path / "run", shadows=2)
    assert [(r.site, r.attack) for r in results] == [("alder", "threshold"), ("alder", "lira")]
    assert results[0].found.members == results[0].found.others == 4


def test_separation_is_counted_by_pairs() -> None:
    found = separate(np.array([3.0, 1.0, 0.5]), np.array([2.0, 0.0]), fpr=0.4)
    assert found.auc == pytest.approx(4 / 6)  # 3 beats both, 1 and 0.5 beat one
    assert found.tpr == pytest.approx(1 / 3)  # only 3 without a false positive
    assert found.advantage == pytest.approx(1 / 2)  # all, with one of two false positives
    assert found.p == pytest.approx(4 / 10)  # of the 10 ways to place two others, 4 are as clear
    assert separate(np.array([3.0, np.inf]), np.array([2.0, 0.0])).tpr == 1
    with pytest.raises(DataError, match="name a site with at least 2 training and 2 test"):
        separate(np.array([1.0]), np.array([1.0, 2.0]))
    with pytest.raises(DataError, match="a loss is NaN"):
        separate(np.array([1.0, np.nan]), np.array([1.0, 2.0]))


def test_the_likelihood_ratio_compares_with_models_that_left_a_patient_out() -> None:
    shadow = np.array([[0.0, 9.0], [2.0, 9.0], [9.0, 1.0], [9.0, 3.0]])
    outside = np.array([[True, False], [True, False], [False, True], [False, True]])
    # means 1 and 2; deviations of 1, four of them with two means: a variance of 4 / 2
    found = likelihood_scores(np.array([1.0, 2.0 + np.sqrt(2.0)]), shadow, outside)
    assert found.tolist() == pytest.approx([0.5, 0.8413447460685429])
    with pytest.raises(DataError, match="every shadow model was trained on some patient"):
        likelihood_scores(np.zeros(2), shadow[:2], outside[:2])


def test_confidence_is_the_logit_of_the_probability() -> None:
    p = np.array([0.1, 0.5, 0.9])
    assert confidence(-np.log(p)) == pytest.approx(np.log(p / (1 - p)))
    assert np.isfinite(confidence(np.array([0.0, 1e4]))).all()


def test_what_cannot_be_inferred_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose 0 or more"):
        infer_memberships(tmp_path, shadows=-1)
    run = tables(tmp_path, rounds=1, algorithms=["fedavg"], training={"local_steps": 1})
    (run / "fedavg" / "seed-0" / TESTED).unlink()
    with pytest.raises(DataError, match="continue with 'collegium resume'"):
        infer_memberships(run)
