"""Robust means on a user's road: with codecs, some sites a round, sites that fail, and a stop."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from collegium.cli import app
from collegium.core.seals import read_json
from collegium.data.phantoms import make_federation
from collegium.experiment.config.experiment import load_config
from collegium.experiment.jobs import Event
from collegium.experiment.runner import run_experiment

STC = {"up": {"name": "stc", "p": 0.05}, "down": "half"}
METHODS: list[dict[str, Any]] = [
    {"name": "robust", "label": "median", "codec": {"up": "half", "down": "half"}},
    {"name": "fedbn+robust", "label": "trimmed", "rule": "trimmed_mean", "trim": 0.34},
    {"name": "robust", "label": "bounded", "rule": "norm_bound", "factor": 0.9, "codec": STC},
    {"name": "fedavgm+robust", "label": "krum", "rule": "krum", "hostile": 0, "codec": STC},
]
FAILING = '''"""Sites that fail in the second round."""
from collegium import FedAvg, settings
from collegium.core.algorithm import handler


@settings
class Failing(FedAvg):
    """FedAvg at which some sites fail.

    Attributes:
        sites: which.
    """

    only_averaged = frozenset({"model", "num_examples"})
    sites: tuple[str, ...] = ()

    @handler
    def train(self, client, request):
        """Train, or fail."""
        if client.id in self.sites and client.round == 2:
            raise ValueError("the disk is full")
        return super().train(client, request)
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of four sites, an experiment, and a method of a user's own."""
    found = tmp_path_factory.mktemp("robust")
    make_federation(found / "data", 4, cases=6, size=32)
    settings = {
        "name": "tiny",
        "federation": "data/federation.yaml",
        "model": {"name": "unet", "in_channels": 1, "channels": [4, 8], "norm": "batch"},
        "algorithms": METHODS,
        "rounds": 3,
        "training": {"optimizer": "adam", "lr": 5e-3, "batch_size": 2, "local_steps": 2},
    }
    (found / "tiny.yaml").write_text(yaml.safe_dump(settings))
    (found / "failing.py").write_text(FAILING)
    return found


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("COLLEGIUM_CACHE", str(folder / "cache"))


def run(folder: Path, name: str, *overrides: str) -> tuple[int, str]:
    arguments = ["run", str(folder / "tiny.yaml"), f"output={folder / name}", *overrides]
    result = CliRunner().invoke(app, arguments)
    return result.exit_code, " ".join(result.output.split())


def bits(output: Path) -> dict[str, bytes]:
    """The models of server and sites, and the scores."""
    kinds = ("*.safetensors", "test.json")
    return {
        str(p.relative_to(output)): p.read_bytes() for kind in kinds for p in output.rglob(kind)
    }


@pytest.mark.slow
def test_a_stopped_run_with_codecs_and_three_sites_a_round_is_resumed_with_equal_bits(folder):
    some = "participation.clients_per_round=3"
    assert run(folder, "whole", some)[0] == 0
    config = load_config(folder / "tiny.yaml", [f"output={folder / 'stopped'}", some])

    class StoppedError(Exception):
        pass

    def stop(event: Event) -> None:
        if event.algorithm == "krum" and event.round == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_experiment(config, observe=stop)
    assert "krum/seed-0/server/test.json" not in bits(folder / "stopped")
    assert CliRunner().invoke(app, ["resume", str(folder / "stopped")]).exit_code == 0
    found, wanted = bits(folder / "stopped"), bits(folder / "whole")
    assert found == wanted
    assert {f"{each['label']}/seed-0/server/test.json" for each in METHODS} <= {*found}


def test_a_codec_that_leaves_most_numbers_out_is_refused_for_a_median(folder):
    words = "robust: the codec STC leaves out most numbers of what a site sends, and of those the"
    for rule in ("median", "trimmed_mean"):
        algorithm = f"algorithms=[{{name: robust, rule: {rule}}}]"
        code, text = run(folder, "sparse", algorithm, "codec={up: {name: stc, p: 0.05}}")
        assert (code, words in text) == (2, True), text
    smoothed = "codec={up: {name: cer, then: stc, p: 0.05}}"
    assert (
        "the codec CER leaves out" in run(folder, "sparse", "algorithm=ditto+robust", smoothed)[1]
    )
    assert not (folder / "sparse" / "robust").exists()
    # what the sentence recommends, and what it does not mean
    for codec in ("codec={up: half}", "codec={down: {name: stc, p: 0.05}}"):
        code, text = run(folder, f"remedy-{codec[7:9]}", "algorithm=robust", codec, "rounds=1")
        assert code == 0, text


def failing(folder: Path, name: str, sites: str) -> tuple[int, str]:
    method = f"{{name: '{folder / 'failing.py'}:Failing+robust', sites: [{sites}], label: failing}}"
    return run(folder, name, f"algorithms=[{method}]", "participation.on_failure=skip")


def test_a_site_that_fails_is_left_out_while_enough_are_left_and_then_the_run_stops(folder, caplog):
    with caplog.at_level(logging.WARNING):
        code, text = failing(folder, "one", "elm")
    assert code == 0, text
    assert (folder / "one/failing/seed-0/server/test.json").exists()
    code, text = failing(folder, "two", "elm, cedar")
    assert code == 4, text
    assert (
        "round 2: the rule median needs 3 sites or more (of two, nobody can tell which is "
        "hostile), and 2 trained and answered (not cedar, elm); the finished rounds are kept"
    ) in text
    assert "Traceback" not in text


def test_the_median_of_the_sites_that_are_left_is_that_of_a_run_without_the_other(folder):
    assert failing(folder, "skipped", "elm")[0] == 0
    away = "participation.absent={elm: [2]}"
    method = f"algorithms=[{{name: '{folder / 'failing.py'}:Failing+robust', label: failing}}]"
    assert run(folder, "away", method, away)[0] == 0
    model = "failing/seed-0/server/global.safetensors"
    assert bits(folder / "skipped")[model] == bits(folder / "away")[model]
    assert read_json(folder / "away/failing/seed-0/server/test.json")
