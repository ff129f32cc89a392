"""Codecs that the tests of this folder share."""

from collections.abc import Callable
from pathlib import Path

import pytest

from collegium.compression.base import Codec
from collegium.experiment.config.registry import CODECS


@pytest.fixture
def coarse() -> Callable[..., Codec]:
    """The class in coarse.py that truncates numbers."""
    return CODECS.load(f"{Path(__file__).with_name('coarse.py')}:Coarse")


@pytest.fixture
def planned() -> Callable[..., Codec]:
    """The class in coarse.py that draws and plans."""
    return CODECS.load(f"{Path(__file__).with_name('coarse.py')}:Planned")
