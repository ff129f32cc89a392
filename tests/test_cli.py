import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from collegium import __version__, cli
from collegium.data.phantoms import make_federation
from collegium.errors import ClientError, ConfigError, DataError, StorageError

ROOT = Path(__file__).resolve().parents[1]

EXPERIMENT = """\
name: tiny
federation: data/federation.yaml
model: {name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}
algorithms: [local, fedavg]
rounds: 2
training: {batch_size: 2, local_steps: 1}
output: run
"""


@pytest.fixture(scope="session")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("phantoms")
    return make_federation(folder, 2, cases=6, size=32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phantoms: Path) -> Path:
    """The current folder: a tiny experiment on two drawn sites."""
    (tmp_path / "data").symlink_to(phantoms.parent)
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Leave the library's logger as it was found."""
    level = cli.logger.level
    yield
    cli.logger.setLevel(level)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


@contextmanager
def shell(*arguments: str, cwd: Path) -> "Iterator[subprocess.Popen[str]]":
    """A command line in a process group of its own, as a terminal gives it; none of it is left."""
    command = [sys.executable, "-c", "from collegium.cli import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(
        command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_help_imports_nothing_heavy_and_documents_the_exit_codes(tmp_path: Path):
    code = (
        "import sys; from collegium.cli import app\n"
        "try: app(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'monai', 'pydantic', 'pandas') if m in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert found.stdout.splitlines()[-1] == "[]"
    text = " ".join(found.stdout.split())
    for words in ("2 the command line or the configuration", "3 data", "4 a client", "5 the disk"):
        assert words in text
    for command in ("run", "resume", "report", "list", "check", "inspect", "config", "demo"):
        assert re.search(rf"(?m)^  {command} ", found.stdout)


def test_the_version_is_the_packages():
    assert call("--version").stdout == f"collegium {__version__}\n"


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "x.yaml", "--nope"]])
def test_a_wrong_command_line_ends_with_2(arguments: list[str]):
    assert call(*arguments).exit_code == 2


def test_a_wrong_configuration_ends_with_2_and_one_paragraph(folder: Path):
    result = call("config", "show", "x.yaml", "rounds=0")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == "error: rounds: should be at least 1, not 0 (override rounds=0)\n"


def test_debug_shows_the_traceback_as_well(folder: Path):
    result = call("--debug", "config", "show", "x.yaml", "rounds=0")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("(override rounds=0)\n")


def test_config_show_writes_what_runs_to_the_same_again(folder: Path):
    shown = call("config", "show", "x.yaml", "rounds=7")
    assert shown.exit_code == 0
    (folder / "y.yaml").write_text(shown.stdout)
    assert call("config", "show", "y.yaml").stdout == shown.stdout
    data = yaml.safe_load(shown.stdout)
    assert data["rounds"] == 7
    assert data["training"]["lr"] == 0.001
    assert [a["name"] for a in data["algorithms"]] == ["local", "fedavg"]


def test_the_list_has_a_row_for_every_algorithm_codec_and_model():
    rows = json.loads(call("list", "--json").stdout)
    assert {"name", "summary", "paper", "sends"} == set(rows[0])
    assert {"fedavg", "local"} <= {row["name"] for row in rows}
    table = call("list").stdout.splitlines()
    assert len(table) == len(rows) + 1
    assert table[0].split() == ["name", "summary", "paper", "sends"]
    codecs = json.loads(call("list", "codecs", "--json").stdout)
    assert [row["name"] for row in codecs] == ["cer", "dadaquant", "half", "identity", "stc"]
    models = json.loads(call("list", "models", "--json").stdout)
    assert "unet" in {row["name"] for row in models}
    adapters = json.loads(call("list", "adapters", "--json").stdout)
    known = ["average", "dsbn", "ensemble", "none", "routing", "tent", "ttt"]
    assert [row["name"] for row in adapters] == known
    assert not [row for row in [*rows, *codecs, *adapters] if "cannot be" in row["summary"]]
    assert "there is no list of 'modles'" in call("list", "modles").stderr


def test_inspect_counts_the_cases_of_every_site(folder: Path):
    for file in ("x.yaml", "data/federation.yaml"):
        result = call("inspect", file)
        assert result.exit_code == 0, result.output
        rows = {line.split()[0]: line.split() for line in result.stdout.splitlines()}
        assert rows["alder"][1] == "6"
    found = json.loads(call("inspect", "x.yaml", "federation.outside=[birch]", "--json").stdout)
    assert [(s["name"], s["cases"], s["inside"]) for s in found["sites"]] == [
        ("alder", 6, True),
        ("birch", 6, False),
    ]


def test_inspect_ends_with_3_if_there_is_a_problem(folder: Path):
    result = call("inspect", "x.yaml", "federation.sites.c={folder: nowhere}")
    assert result.exit_code == 3
    assert re.search(r"(?m)^problem: site c: there is no folder", result.stdout)


def test_phantoms_are_drawn_where_asked(tmp_path: Path):
    result = call("phantoms", str(tmp_path / "p"), "--sites", "1", "--cases", "2", "--size", "32")
    assert result.stdout.split() == [
        str(tmp_path / "p" / "federation.yaml"), str(tmp_path / "p" / "experiment.yaml"),
    ]  # fmt: skip
    shown = call("config", "show", str(tmp_path / "p" / "experiment.yaml"))
    assert shown.exit_code == 0, shown.output
    assert len(list((tmp_path / "p").rglob("*.png"))) == 4
    assert call("phantoms", str(tmp_path / "q"), "--sites", "0").exit_code == 2


def test_the_unequal_sites_of_the_demo_are_drawn_whole_or_not_at_all(tmp_path: Path):
    result = call("phantoms", str(tmp_path / "p"), "--unequal", "--size", "32")
    assert result.exit_code == 0, result.output
    splits = (tmp_path / "p" / "alder" / "manifest.csv").read_text().count(",train\n")
    assert splits == 2
    refused = call("phantoms", str(tmp_path / "q"), "--unequal", "--cases", "8")
    assert refused.exit_code == 2
    assert "leave out --sites and --cases" in refused.output


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("wrong key"), 2, "error: wrong key\n"),
        (DataError("no mask"), 3, "error: no mask\n"),
        (ClientError("client died"), 4, "error: client died\n"),
        (StorageError("damaged"), 5, "error: damaged\n"),
        (OSError(errno.ENOSPC, "No space", "/x/run"), 5, "the disk that holds /x/run is full"),
        (PermissionError(errno.EACCES, "No", "/x/run"), 5, "/x/run may not be read or written"),
        (KeyboardInterrupt(), 130, "error: stopped\n"),
        (OSError(errno.EIO, "I/O error"), 1, "This is a bug in collegium; please report it"),
        (ValueError("odd"), 1, "ValueError: odd"),
    ],
)
def test_every_kind_of_error_has_its_exit_code(capsys, error, code: int, words: str):
    import typer

    @cli.guarded
    def command() -> None:
        raise error

    with pytest.raises(typer.Exit) as caught:
        command()
    assert caught.value.exit_code == code
    text = capsys.readouterr().err
    assert words in text
    assert ("Traceback" in text) == (code == 1)


def test_a_log_message_appears_under_debug_only():
    for arguments, enabled in ((["--debug"], True), ([], False)):
        call(*arguments, "list", "models")
        assert cli.logger.isEnabledFor(logging.INFO) is enabled


@pytest.mark.slow
def test_check_writes_a_line_for_every_rule_that_is_kept():
    result = call("check", "fedprox", "mu=0.5")
    assert result.exit_code == 0, result.output
    *passed, last = result.stdout.splitlines()
    assert last == "fedprox keeps every rule"
    assert len(passed) > 5
    assert all(line.startswith("ok  ") for line in passed)


def test_check_names_the_rule_that_is_broken(tmp_path: Path):
    (tmp_path / "loose.py").write_text(LOOSE)
    result = call("check", f"{tmp_path / 'loose.py'}:Loose")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_check_refuses_a_hyperparameter_that_is_none():
    assert "write key=value" in call("check", "fedprox", "mu").stderr
    result = call("check", "fedprox", "muu=1")
    assert result.exit_code == 2
    assert "algorithm.muu: unknown field for fedprox; did you mean 'mu'?" in result.stderr


MISTAKEN = '''
"""An algorithm with a mistake (https://example.org)."""

from collegium import FedAvg, handler, settings


@settings
class AtTheServer(FedAvg):
    """FedAvg whose server looks for a state that it has never written."""

    neutral = None

    def round(self, server):
        server.state["momentum"] += 1


@settings
class AtTheClient(FedAvg):
    """FedAvg whose client looks for a state that it has never written."""

    neutral = None

    @handler
    def train(self, client, request):
        return client.state["momentum"]
'''
"""Lines 14 and 25 of it raise."""


@pytest.mark.parametrize(("name", "line", "code"), [("AtTheServer", 14, 2), ("AtTheClient", 25, 4)])
def test_mistake_in_a_users_file_is_reported_with_its_line(folder, name, line, code):
    (folder / "mistaken.py").write_text(MISTAKEN)
    place = f"({folder / 'mistaken.py'}, line {line}, in "
    run = call("run", "x.yaml", f"algorithms=[mistaken.py:{name}]", "rounds=1")
    check = call("check", f"mistaken.py:{name}")
    for result, expected in ((run, code), (check, 1)):
        assert result.exit_code == expected, result.output
        assert "KeyError: 'momentum' " + place in result.stderr
        assert result.stderr.rstrip().endswith("correct the code there")
        assert "bug in collegium" not in result.stderr
        assert "Traceback" not in result.stderr


LOOSE = '''
from dataclasses import dataclass

from collegium.core.algorithm import Client, Message, Server, handler
from collegium.algorithms.fedavg import FedAvg


@dataclass(frozen=True)
class Loose(FedAvg):
    """FedAvg whose clients send a part that nobody declared, which must be found."""

    @handler
    def train(self, client: Client, request: Message) -> Message:
        """Train, and tell too much."""
        model = client.fit(request["model"])
        return Message.of(model=model, num_examples=client.num_examples, secret=model)
'''


# With the experiment


def test_a_run_writes_its_report_and_is_not_run_twice(folder: Path):
    first = call("run", "x.yaml")
    assert first.exit_code == 0, first.output
    question, *answers, rule, few, too, other, path = first.stdout.splitlines()
    assert question == "Does joining help this site?"
    assert len(answers) == 2
    for site, answer in zip(("alder", "birch"), answers, strict=True):
        assert re.match(rf"{site}: cannot tell(, both unusable)?\. FedAvg global, Dice ", answer)
    assert rule.startswith("The round of each model is the one that was best on its site's own")
    assert few.startswith("At alder it is the last round instead, since the choice would depend on")
    assert too.startswith("At birch it is the last round instead")
    assert other.startswith('"global by federation" is the global model of the federation')
    assert path == "run/report.html"
    assert (folder / "run" / "report.html").stat().st_size > 1000
    assert re.search(r"(?m)^local seed 0  round 2/2  loss \d", first.stderr)
    assert not re.search(r"[\x00-\x08\x0b-\x1f]", first.stderr)
    again = call("run", "x.yaml")
    assert again.exit_code == 0, again.output
    assert "loss" not in again.stderr
    (folder / "run" / "report.html").unlink()
    assert call("report", "run").stdout.strip() == "run/report.html"
    assert (folder / "run" / "report.html").is_file()


def test_another_configuration_in_the_same_folder_is_refused(folder: Path):
    first = call("run", "x.yaml", "algorithm=local", "rounds=1")
    assert first.exit_code == 0, first.output
    result = call("run", "x.yaml", "algorithm=local", "rounds=2")
    assert result.exit_code == 5
    assert "rounds=1, now 2" in result.stderr
    assert "choose another output folder" in result.stderr


def test_the_report_of_no_run_says_so(tmp_path: Path):
    result = call("report", str(tmp_path))
    assert result.exit_code == 3
    assert "no results to report yet" in result.stderr


def interrupt(process: "subprocess.Popen[str]", pattern: str) -> tuple[int, str]:
    """Press Ctrl-C once a line matches; give the number in it and all that was written after it."""
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(pattern, line):
            os.killpg(process.pid, signal.SIGINT)
            return int(found[1]), process.communicate(timeout=60)[1]
    raise AssertionError(f"no line matches {pattern}")


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 2])
def test_an_interrupted_run_says_how_to_go_on_and_resumes(folder: Path, jobs: int):
    with shell("run", "x.yaml", "rounds=400", f"engine.jobs={jobs}", cwd=folder) as process:
        _, text = interrupt(process, r"local seed 0  round (2)/400")
        assert process.returncode == 130
    assert text.endswith(
        "error: stopped; finished rounds are kept, continue with: collegium resume run\n"
    )
    assert "Traceback" not in text
    with shell("resume", "run", cwd=folder) as process:
        number, _ = interrupt(process, r"local seed 0  round (\d+)/400")
        assert process.returncode == 130
    assert number > 2
