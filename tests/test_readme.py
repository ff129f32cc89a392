"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

from collegium.experiment.config.registry import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs_and_scores_every_site(tmp_path: Path):
    example = re.search(r"```python\n(.*?)```", README, re.S)
    assert example
    done = subprocess.run(
        [sys.executable, "-c", example[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scores = eval(done.stdout)
    assert sorted(scores) == ["alder", "birch", "cedar", "elm"]
    assert all(0 <= dice <= 1 for cases in scores.values() for dice in cases)
    assert all(cases for cases in scores.values())


def test_the_table_lists_every_algorithm_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.M)
    assert sorted(rows) == ALGORITHMS.names()


def test_the_documentation_has_a_page_section_for_every_algorithm():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert (
        sorted(re.findall(r"^::: collegium\.algorithms\.(\w+)$", page, re.M)) == ALGORITHMS.names()
    )
