"""The conformance tests share two worker processes, which take seconds to start."""

from collections.abc import Iterator

import pytest

from collegium.runtime.engines.inprocess import InProcess
from collegium.testing.toy import toy_workers


@pytest.fixture(scope="session")
def workers() -> Iterator[InProcess]:
    """An engine whose processes serve one toy federation after the other."""
    engine = toy_workers()
    yield engine
    engine.close()
