"""Fixtures of all tests: reference numbers, field cases, and the folder of real data."""

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from collegium.evaluation.figures import registry
from collegium.evaluation.figures.data import Figure
from collegium.evaluation.figures.source import FigureSource
from collegium.evaluation.report import html

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="session", autouse=True)
def _separate_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared cases go to a folder of the test session, never to the user's cache."""
    os.environ["COLLEGIUM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


DRAWING = ("tests/evaluation/", "tests/test_cli.py")
"""Where reports are tested with their figures."""


@pytest.fixture(scope="session", autouse=True)
def _few_figures_in_reports() -> Iterator[None]:
    """Draw the figures of a report where they are tested; it takes longer than most runs here."""

    def list_figures(source: FigureSource) -> list[Figure]:
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        return registry.list_figures(source) if test.startswith(DRAWING) else []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "list_figures", list_figures)
        yield


@pytest.fixture(autouse=True)
def _separate_logging() -> None:
    """The command line sets how much is logged; the next test starts without that."""
    logging.getLogger("collegium").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _seeded_weights() -> None:
    """Networks that a test builds without a seed have the same weights in any order of tests."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def cases() -> Path:
    """The folder of field cases; a folder each, described by its `case.json`."""
    return HERE / "data" / "cases"


@pytest.fixture(scope="session")
def new_cases() -> Path:
    """The folder of the field cases that were collected later."""
    return HERE / "data" / "new_cases"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of numbers that were computed independently of this project."""
    return HERE / "data" / "reference"


@pytest.fixture(scope="session")
def golden(reference: Path) -> Callable[[str], dict[str, Any]]:
    """Cases of `golden.json` by name: inputs, params, expected values and their tolerance."""
    cases = json.loads((reference / "golden.json").read_text("utf-8"))["cases"]
    by_name: dict[str, dict[str, Any]] = {case["name"]: case for case in cases}
    return by_name.__getitem__


@pytest.fixture(scope="session")
def newer_golden(reference: Path) -> dict[str, Any]:
    """Cases of `newer_golden.json` by name: inputs and expected values, to a relative 1e-6."""
    found: dict[str, Any] = json.loads((reference / "newer_golden.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="session")
def cuda() -> str:
    """The CUDA device of tests that are marked `gpu`, with the settings of a process that trains.

    cuBLAS reads its setting when it is first used, so that these tests may run in any order.
    """
    import torch

    from collegium.runtime.process import prepare

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    prepare(torch.get_num_threads())
    return "cuda"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public research data; the repository holds none, so tests may be skipped."""
    folder = Path(os.environ.get("COLLEGIUM_SHARED", HERE.parents[1] / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"The real data are missing at {folder}: set COLLEGIUM_SHARED to their parent.")
    return folder
