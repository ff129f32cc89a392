import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from collegium import cli
from collegium.data.phantoms import make_federation

EXPERIMENT = """\
name: tiny
federation: {federation}
model: {{name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}}
algorithms: [fedavg, grace]
training: {{batch_size: 4, local_steps: 1}}
rounds: 2
output: {output}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """The file of an experiment on four drawn sites."""
    places = make_federation(tmp_path / "data", 4, cases=8, size=32), tmp_path / "run"
    federation, output = (json.dumps(str(place)) for place in places)
    path = tmp_path / "x.yaml"
    path.write_text(EXPERIMENT.format(federation=federation, output=output))
    return path


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["drift", *arguments])


def test_drift_writes_a_page_and_says_where(experiment: Path) -> None:
    result = call(str(experiment), "--rounds", "2", "--windows", "3", "--images", "train")
    assert result.exit_code == 0, result.output
    page = experiment.parent / "run" / "drift" / "drift.html"
    assert result.stdout == f"{page}\n"
    assert "fedavg seed 0  round 2/2" in result.stderr
    assert "grace seed 0  done, 2 of 2" in result.stderr
    data = json.loads(page.with_name("drift.json").read_text())
    assert data["sites"] == ["alder", "birch", "cedar", "elm"]
    assert {moment["windows"]["elm"] for moment in data["moments"]} == {3}


def test_wrong_words_end_with_2(experiment: Path) -> None:
    for arguments, words in (
        (["--images", "all"], "choose train, val, test"),
        (["--rounds", "1;2"], "the rounds are '1;2'; write whole numbers"),
        (["--rounds", "9"], "choose some from 1 to 2"),
        (["algorithm=local"], "leave it out, e.g. with algorithm=fedavg"),
    ):
        result = call(str(experiment), *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
