"""Coded runs of three rounds: the shortest in which a stored, lossy download is built upon.

The first download goes in full, the second loses something, and the third starts from that.
"""

from collections.abc import Iterator

import pytest

from collegium.codecs.dadaquant import DAdaQuant
from collegium.codecs.stc import STC
from collegium.engines.inprocess import InProcess
from collegium.registry import load_algorithm
from collegium.testing import Conformance
from collegium.toy import toy_workers
from collegium.wire import Coding

RULES = ("interrupted_requests", "interrupted_saves", "repeated_requests")

CODED = {
    "stc both ways": Coding(STC(p=0.2), STC(p=0.2)),
    "dadaquant both ways": Coding(DAdaQuant(), DAdaQuant()),
}


@pytest.fixture(scope="module")
def workers() -> Iterator[InProcess]:
    engine = toy_workers()
    yield engine
    engine.close()


@pytest.mark.parametrize("codecs", CODED)
def test_coded_run_of_three_rounds_keeps_the_rules(codecs, workers, tmp_path):
    suite = Conformance(load_algorithm("fedavg")(), tmp_path, workers, 3, coding=CODED[codecs])
    for rule in RULES:
        getattr(suite, f"check_{rule}")()
