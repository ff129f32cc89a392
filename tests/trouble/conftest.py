"""A tiny experiment on disk, to which the tests of this folder do what goes wrong in life."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from collegium import cli
from collegium.data.phantoms import make_federation

EXPERIMENT = """\
name: tiny
federation: data/federation.yaml
model: {name: unet, in_channels: 1, channels: [4, 8], num_res_units: 0}
algorithm: ditto
rounds: 2
training: {batch_size: 2, local_steps: 1}
output: run
"""


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A federation of two sites with six cases of five patients each."""
    return make_federation(tmp_path_factory.mktemp("drawn"), 2, cases=6, size=32).parent


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[None]:
    """A cache of the tests' own; and the library's logger is left as it was found."""
    monkeypatch.setenv("COLLEGIUM_CACHE", str(cache))
    level = cli.logger.level
    yield
    cli.logger.setLevel(level)


@pytest.fixture(scope="session")
def experiment() -> str:
    """The text of a tiny experiment over the federation in the folder data."""
    return EXPERIMENT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: Path) -> Path:
    """The current folder: a tiny experiment, with a copy of the data that may be damaged."""
    shutil.copytree(drawn, tmp_path / "data")
    (tmp_path / "x.yaml").write_text(EXPERIMENT)
    monkeypatch.chdir(tmp_path)
    return tmp_path
