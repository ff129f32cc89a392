import json
from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner, Result

from collegium import cli
from collegium.diagnostics.assessment.survey import Assessment
from collegium.diagnostics.assessment.writing import assess
from collegium.experiment.config.experiment import ExperimentConfig

Configure = Callable[..., ExperimentConfig]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["assess", *arguments])


def test_numbers_and_page_are_written_and_come_out_the_same_again(
    configure: Configure, tmp_path: Path
) -> None:
    folder = assess(configure(), Assessment(grid=16))
    assert folder == tmp_path / "run" / "assessment"
    first = {name: (folder / name).read_bytes() for name in ("assessment.json", "assessment.html")}
    data = json.loads(first["assessment.json"])
    assert data["sites"] == ["alder", "birch", "cedar", "elm"]
    assert data["verdict"]["level"] in ("differ", "perhaps", "alike", "cannot tell")
    assert [geometry["key"] for geometry in data["findings"]["geometries"]] == [
        "metadata",
        "normalised",
        "embeddings",
    ]
    angles = data["findings"]["angles"]
    assert angles["sites"] == data["sites"]
    assert all(0 <= angle <= 90 for row in angles["matrix"] for angle in row)
    assert "Angles between the sites" in first["assessment.html"].decode()
    assess(configure(), Assessment(grid=16))
    assert first == {name: (folder / name).read_bytes() for name in first}


def test_the_command_writes_a_table_and_where_the_page_is(experiment: Path) -> None:
    result = call(str(experiment), "--summary", "histogram")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].split()[:2] == ["site", "cases"]
    assert [line.split()[0] for line in lines[1:5]] == ["alder", "birch", "cedar", "elm"]
    assert "Distances are known, but not whether chance alone explains them." in result.stdout
    assert lines[-1].endswith("assessment.html")
    assert Path(lines[-1]).is_file()


def test_one_site_and_nobody_that_tells_are_sentences(experiment: Path, drawn: Path) -> None:
    others = json.dumps(["birch", "cedar", "elm"])
    alone = call(str(experiment), f"federation.outside={others}")
    assert alone.exit_code == 0
    assert "alder is the only site: there is no other to compare it with." in alone.stdout
    silent = [f"federation.sites.{name}.allow=[]" for name in ("alder", "birch", "cedar", "elm")]
    nobody = call(str(experiment), *silent)
    assert nobody.exit_code == 0
    assert "Fewer than two sites told enough to be compared." in nobody.stdout
    assert "intensity_maxima, label_volumes" in nobody.stdout


def test_wrong_words_end_with_2(experiment: Path) -> None:
    summary = call(str(experiment), "--summary", "means")
    assert summary.exit_code == 2
    assert "summary is 'means'; choose one of cases, histogram, quantiles" in summary.stderr
    encoder = call(str(experiment), "--encoder", "nowhere.py:net")
    assert encoder.exit_code == 2
    assert "nowhere.py" in encoder.stderr
