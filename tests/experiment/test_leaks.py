"""Who was trained on, on the road of the documentation: its script, its experiments, its commands.

The bounds are those within which differential privacy has to do its work: an overfitted model tells
training patients from others with an area under the curve above 0.6, a private one below 0.55.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from typer.testing import CliRunner

from collegium import cli
from collegium.core.seals import read_json
from collegium.diagnostics.attacks.membership import ALL_SITES

ROOT = Path(__file__).resolve().parents[2]
PRIVATE = "epsilon 8"


def call(*arguments: str) -> None:
    result = CliRunner().invoke(cli.app, [*arguments])
    assert result.exit_code == 0, result.output


def check_leaks(run: Path, *, seeds: int, least: float) -> None:
    """Check both bounds, and that both models have learnt something."""
    found: list[dict[str, Any]] = read_json(run / "attack" / "membership.json")["results"]
    whole = [r for r in found if r["site"] == ALL_SITES and r["attack"] == "threshold"]
    by_label = {
        label: [r for r in whole if r["algorithm"] == label] for label in ("fedavg", PRIVATE)
    }
    assert [len(group) for group in by_label.values()] == [seeds, seeds]
    for result in by_label["fedavg"]:
        assert result["found"]["auc"] > 0.6
        assert result["found"]["p"] < 0.001
    for result in by_label[PRIVATE]:
        assert result["found"]["auc"] < 0.55
    for result in whole:
        assert result["metric"] == "accuracy"
        assert result["score"] > least
    results = pd.read_csv(run / "results.csv")
    epsilons = results[results.metric == "epsilon"]
    assert {*epsilons.algorithm} == {PRIVATE}
    assert 7.5 < epsilons.value.max() <= 8


@pytest.mark.slow
def test_phantoms_show_who_was_trained_on_unless_training_is_private(tmp_path: Path) -> None:
    script = ROOT / "docs" / "results" / "members.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True)
    call("run", str(tmp_path / "members.yaml"), "seeds=[0,1]")
    call("attack", str(tmp_path / "members"), "--kind", "membership")
    check_leaks(tmp_path / "members", seeds=2, least=0.6)


@pytest.mark.slow
def test_heart_tables_show_who_was_trained_on_unless_training_is_private(
    tmp_path: Path, shared_data: Path
) -> None:
    file, run = str(ROOT / "configs" / "leaks-heart.yaml"), tmp_path / "run"
    call("run", file, f"federation.root={shared_data}", "seeds=[0,1]", f"output={run}")
    call("attack", str(run), "--kind", "membership")
    check_leaks(run, seeds=2, least=0.7)
