import json

import pytest
from tests.evaluation.figures.conftest import sweep_rows, write_run
from typer.testing import CliRunner

from collegium.cli import app
from collegium.data.phantoms import make_federation
from collegium.errors import ConfigError, DataError
from collegium.evaluation.figures.registry import list_figures
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.figures.writing import write_figures
from collegium.evaluation.report.html import write_report


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("figures") / "run", sweep_rows())


def call(*arguments):
    return CliRunner().invoke(app, ["figures", *map(str, arguments)])


def test_every_figure_is_a_file_of_each_format(run):
    names = [figure.name for figure in list_figures(FigureSource.read(run))]
    assert names == [
        "sweep-dice", "learning-curves", "learning-curves-lam_0.1", "learning-curves-lam_1",
        "loss-curves", "loss-curves-lam_0.1", "loss-curves-lam_1", "cases-dice",
        "joined-against-alone-lam_0.1", "joined-against-alone-lam_1", "bytes",
    ]  # fmt: skip
    written = write_figures(run)
    wanted = [f"{name}.{form}" for name in names for form in ("svg", "pdf")]
    assert [path.name for path in written] == [*wanted, "captions.md"]
    assert all(path.parent == run / "figures" and path.stat().st_size for path in written)
    captions = written[-1].read_text(encoding="utf-8")
    assert captions.count("## ") == len(names)
    assert "\n\nDice over lam. Left: Dice, mean over the patients" in captions


def test_one_figure_is_written_where_it_is_wanted(run, tmp_path):
    result = call(run, "--format", "svg", "--only", "bytes", "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert result.output.split() == [
        str(tmp_path / "new" / n) for n in ("bytes.svg", "captions.md")
    ]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "bytes.svg",
        "captions.md",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--format", "png"], 2, "--format: unknown format; there is svg, pdf"),
        (["--format", "svgz"], 2, "--format: unknown format; did you mean 'svg'?"),
        (["--format", ","], 2, "--format: no format is given; choose from svg, pdf"),
        (["--only", "sweep-dic"], 2, "--only: unknown figure; did you mean 'sweep-dice'?"),
    ],
)
def test_a_wrong_option_ends_with_one_sentence(run, tmp_path, arguments, code, words):
    result = call(run, *arguments, "--out", tmp_path / "new")
    assert result.exit_code == code
    assert result.stderr.strip() == f"error: {words}"
    assert not (tmp_path / "new").exists()


def test_the_figures_of_no_run_are_refused(tmp_path):
    result = call(tmp_path / "absent")
    assert result.exit_code == 3
    assert result.stderr.strip().endswith(
        "absent: no results to draw yet; give the output folder of a run, or run the experiment "
        "first."
    )


def test_a_run_with_nothing_to_draw_says_so(tmp_path):
    rows = [
        {"experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 0, "site": "a",
         "split": "selection", "metric": "events", "value": 3.0, "model": "global"}
    ]  # fmt: skip
    with pytest.raises(DataError, match="nothing to draw yet"):
        write_figures(write_run(tmp_path, rows))


def test_a_damaged_description_is_named(tmp_path):
    write_run(tmp_path, sweep_rows(seeds=1))
    (tmp_path / "run.json").write_text("{")
    result = call(tmp_path)
    assert result.exit_code == 3
    assert "run.json: the description of the run cannot be read" in result.stderr


def test_names_of_settings_become_names_of_files(tmp_path):
    names = ("a/b", "a?b")
    config = {"name": "e", "variations": {name: {"codec": name} for name in names}}
    run = write_run(tmp_path, sweep_rows(seeds=1, settings=names), config)
    found = [f.name for f in list_figures(FigureSource.read(run)) if f.name.startswith("loss")]
    assert found == ["loss-curves", "loss-curves-a_b", "loss-curves-a_b_2"]


def test_figures_without_a_description_are_drawn_too(tmp_path):
    run = write_run(tmp_path, sweep_rows(seeds=1))
    (run / "run.json").unlink()
    (figure,) = [f for f in list_figures(FigureSource.read(run)) if f.name == "sweep-dice"]
    assert figure.panels[0].x.names == ("lam 0.1", "lam 1")


def test_the_report_holds_the_figures_of_the_headline_metric(tmp_path):
    rows = sweep_rows()
    rows += [{**row, "metric": "iou"} for row in rows if row.get("case")]
    run = write_run(tmp_path, rows)
    figures = list_figures(FigureSource.read(run))
    assert [f.name for f in figures if not f.in_report] == ["sweep-iou", "cases-iou"]
    page = write_report(run).read_text(encoding="utf-8")
    for figure in figures:
        assert (f'id="figure-{figure.name}-panel-0"' in page) == figure.in_report
    assert page.count("<figcaption") >= len(figures) - 2
    assert json.dumps(figures[0].title).strip('"') in page


def test_an_unknown_name_is_refused_before_anything_is_written(run, tmp_path):
    with pytest.raises(ConfigError):
        write_figures(run, folder=tmp_path / "new", only=["bytes", "nothing"])
    assert not (tmp_path / "new").exists()


EXPERIMENT = """\
name: swept
federation: data/federation.yaml
model: {name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}
algorithms: [local, fedavg, {name: ditto, lam: 0.1}]
rounds: 2
seeds: [0, 1]
training: {batch_size: 2, local_steps: 1}
variations:
  little: {algorithms.2.lam: 0.01}
  much: {algorithms.2.lam: 1.0}
output: run
"""


@pytest.mark.slow
def test_a_sweep_from_an_experiment_file_is_drawn_over_its_value(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_federation(tmp_path / "data", 2, cases=10, size=32)
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    done = CliRunner().invoke(app, ["run", "x.yaml"])
    assert done.exit_code == 0, done.output
    drawn = call("run", "--format", "svg")
    assert drawn.exit_code == 0, drawn.output
    names = {name.removeprefix("run/figures/") for name in drawn.output.split()}
    assert {
        "sweep-dice.svg",
        "learning-curves.svg",
        "learning-curves-much.svg",
        "bytes.svg",
    } < names
    sweep = (tmp_path / "run" / "figures" / "sweep-dice.svg").read_text(encoding="utf-8")
    assert all(f">{text}</text>" in sweep for text in ("lam", "0.01", "1", "Ditto personal"))
    assert 'id="figure-sweep-dice-panel-0"' in (tmp_path / "run" / "report.html").read_text("utf-8")
