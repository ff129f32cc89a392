import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from collegium.errors import ConfigError
from collegium.experiment.config.building import build_algorithm
from collegium.experiment.config.experiment import AlgorithmConfig
from collegium.experiment.config.registry import ALGORITHMS, CODECS

SOURCE = '''
"""Mine (Nobody, 2020, https://example.org/paper.)."""

from dataclasses import dataclass
from typing import ClassVar

from collegium.core.algorithm import Algorithm, Server
from collegium.core.payloads import Numbers


@dataclass(frozen=True)
class Mine(Algorithm):
    """Does nothing.

    Attributes:
        tau: rate.
    """

    sends: ClassVar = {"extra": Numbers(description="a number")}

    tau: float = 0.9
    steps: tuple[int, ...] = (1, 2)

    def round(self, server: Server) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Child(Mine):
    """Does nothing as well."""


class Thawed(Mine):
    """Not frozen by a decorator of its own."""


@dataclass(frozen=True)
class Roundless(Algorithm):
    """Has no round."""


class Other:
    """No algorithm."""
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package on the path, installed with one good and one broken entry point."""
    name = "hospital_algorithms"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / name / "mine.py").write_text(SOURCE)
    (tmp_path / name / "broken.py").write_text("1 / 0\n")
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = f"[collegium.algorithms]\nours = {name}.mine:Mine\nbad = {name}.broken:Mine\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    for module in [key for key in sys.modules if key.partition(".")[0] == name]:
        del sys.modules[module]


def test_built_in_names_are_the_files_of_the_package():
    spec = find_spec("collegium.algorithms")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    files = {p.stem for p in Path(folder).glob("*.py") if not p.stem.startswith("_")}
    assert files <= set(ALGORITHMS.names())
    assert "fedavg" in files


def test_names_are_listed_without_importing_any_algorithm():
    code = (
        "import sys; from collegium.experiment.config.registry import ALGORITHMS;"
        "ALGORITHMS.names();"
        "print([m for m in sys.modules if m.startswith('collegium.algorithms.')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_listed_algorithm_loads_and_is_described_by_its_name(name: str):
    kind = ALGORITHMS.load(name)
    try:
        algorithm = kind()
    except TypeError:
        pytest.skip(f"{name} has a hyper-parameter without a default")
    assert ALGORITHMS.describe(algorithm) == (name, algorithm.hyperparameters())


def test_an_algorithm_from_a_file_remembers_where_it_is_from(file: Path, monkeypatch):
    monkeypatch.chdir(file.parent)
    kind: Any = ALGORITHMS.load("mine.py:Mine")
    half = kind(tau=0.5)
    name, params = ALGORITHMS.describe(half)
    assert name == f"{file}:Mine"
    assert params == {"tau": 0.5, "steps": (1, 2)}
    assert ALGORITHMS.load(name) is kind
    assert build_algorithm(AlgorithmConfig(name, {"tau": 0.5, "steps": [1, 2]})) == half


def test_a_subclass_in_a_file_is_not_described_as_its_base(file: Path):
    ALGORITHMS.load(f"{file}:Mine")
    assert ALGORITHMS.describe(ALGORITHMS.load(f"{file}:Child")())[0] == f"{file}:Child"


def test_an_edited_file_is_loaded_anew(file: Path):
    before = ALGORITHMS.load(f"{file}:Mine")
    file.write_text(SOURCE.replace("0.9", "0.7"))
    after = ALGORITHMS.load(f"{file}:Mine")
    assert (before().hyperparameters()["tau"], after().hyperparameters()["tau"]) == (0.9, 0.7)


def test_an_algorithm_comes_from_a_module_or_an_entry_point(package: str):
    kind = ALGORITHMS.load(f"{package}.mine:Mine")
    assert ALGORITHMS.describe(kind()) == (f"{package}.mine:Mine", {"tau": 0.9, "steps": (1, 2)})
    assert ALGORITHMS.load("ours") is kind


def test_the_list_holds_summary_paper_and_parts_and_why_one_does_not_load(package: str):
    rows = {row.name: row for row in ALGORITHMS.list()}
    assert rows["ours"][:3] == ("ours", "Does nothing.", "https://example.org/paper")
    assert sorted(rows["ours"].kind.all_sends()) == ["extra", "personal", "progress", "scores"]
    assert rows["bad"].summary.startswith("cannot be loaded: algorithm 'bad', installed as")
    assert "ZeroDivisionError: division by zero" in rows["bad"].summary
    assert rows["fedavg"].paper == "https://arxiv.org/abs/1602.05629"
    assert "model" in rows["fedavg"].kind.all_sends()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fedavgg", "unknown algorithm 'fedavgg'; did you mean 'fedavg'?"),
        (
            "zzzz",
            r"unknown algorithm 'zzzz'; known are .*fedavg.*; your own is written file.py:Class",
        ),
        ("none.py:X", r"none\.py cannot be read \(No such file"),
        (
            "mine.py:Mien",
            "no class 'Mien'; the algorithms there are: Mine, Child, Thawed, Roundless",
        ),
        ("mine.py:Other", "not a subclass of collegium.core.algorithm.Algorithm"),
        ("mine.py:Algorithm", "not a subclass"),
        ("mine.py:Thawed", r"write @settings \(from collegium import settings\) above it"),
        ("mine.py:Roundless", "has no method 'round'; write it"),
        ("broken.py:X", r"broken\.py does not load: ZeroDivisionError: division by zero"),
        ("syntax.py:X", r"syntax\.py does not load: SyntaxError"),
        ("no_such_package.x:X", "there is no module 'no_such_package'"),
        ("needs.py:X", "ModuleNotFoundError: No module named 'absent_library'"),
        ("os:path", "not a subclass"),
        (":X", "the name before the colon is empty"),
    ],
)
def test_a_name_that_does_not_lead_to_an_algorithm_says_why(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, expected: str
):
    monkeypatch.chdir(file.parent)
    (file.parent / "broken.py").write_text("1 / 0\n")
    (file.parent / "syntax.py").write_text("def\n")
    (file.parent / "needs.py").write_text("import absent_library\n")
    with pytest.raises(ConfigError, match=expected):
        ALGORITHMS.load(name)


def test_a_file_that_does_not_load_leaves_no_module_behind(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    before = set(sys.modules)
    with pytest.raises(ConfigError):
        ALGORITHMS.load(f"{tmp_path / 'broken.py'}:X")
    assert set(sys.modules) == before


CODEC = """
from dataclasses import dataclass

from collegium.compression.base import Codec
from collegium.compression.half import Half


@dataclass(frozen=True)
class Mine(Half):
    \"\"\"A codec of a user.\"\"\"


@dataclass(frozen=True)
class Silent(Codec):
    \"\"\"Neither encodes nor decodes.\"\"\"
"""


def test_codecs_are_the_modules_that_are_no_helpers():
    assert CODECS.names() == ["cer", "dadaquant", "half", "identity", "stc"]
    assert [row.name for row in CODECS.list()] == CODECS.names()
    assert not [row.summary for row in CODECS.list() if "cannot be loaded" in row.summary]


@pytest.mark.parametrize("name", CODECS.names())
def test_every_listed_codec_loads_and_is_described_by_its_name(name: str):
    codec = CODECS.load(name)()
    assert CODECS.describe(codec) == (name, codec.hyperparameters())


def test_a_codec_from_a_file_is_described_by_its_place(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(CODEC)
    name, params = CODECS.describe(CODECS.load(f"{path}:Mine")("bfloat16"))  # type: ignore[call-arg]
    assert (name, params) == (f"{path}:Mine", {"format": "bfloat16"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stcc", "unknown codec 'stcc'; did you mean 'stc'?"),
        ("base", "unknown codec 'base'"),
        ("fedavg", "unknown codec 'fedavg'"),
        ("mine.py:Nine", "codec 'mine.py:Nine': there is no class 'Nine'; the codecs there are: "),
        ("mine.py:Silent", "codec 'mine.py:Silent' has no method 'decode' and 'encode'; write it"),
        (
            "collegium.algorithms.fedavg:FedAvg",
            "is not a subclass of collegium.compression.base.Codec",
        ),
    ],
)
def test_a_name_that_does_not_lead_to_a_codec_says_why(tmp_path: Path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODEC)
    with pytest.raises(ConfigError, match=expected):
        CODECS.load(name)
