"""What the README shows works as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from collegium.experiment.config.registry import ALGORITHMS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("number", "sites"), [(0, ["alder", "birch", "cedar", "elm"]), (1, ["a", "b"])]
)
def test_the_python_examples_run_and_score_every_site(
    tmp_path: Path, number: int, sites: list[str]
):
    example = re.findall(r"```python\n(.*?)```", README, re.S)[number]
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    scores = eval(done.stdout)
    assert sorted(scores) == sites
    assert all(0 <= score <= 1 for cases in scores.values() for score in cases)
    assert all(cases for cases in scores.values())


def test_someone_with_torch_datasets_and_a_module_needs_few_lines():
    example = re.findall(r"```python\n(.*?)```", README, re.S)[1]
    assert len([line for line in example.splitlines() if line]) <= 12


@pytest.mark.slow
def test_every_command_runs_from_an_empty_folder(tmp_path: Path):
    blocks = re.findall(r"```bash\n(.*?)```", README, re.S)
    commands = [
        line.partition(" #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if line.startswith("collegium ")
    ]
    assert len(commands) > 15
    for command in commands:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("collegium")), *command.split()[1:]],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_table_lists_every_algorithm_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \|", README, re.M)
    assert sorted(rows) == ALGORITHMS.names()


def test_the_documentation_has_a_page_section_for_every_algorithm():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    assert (
        sorted(re.findall(r"^::: collegium\.algorithms\.(\w+)$", page, re.M)) == ALGORITHMS.names()
    )
