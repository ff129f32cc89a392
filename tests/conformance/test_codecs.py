"""With codecs on, too, a run has the same bits whatever stops it and in whatever order it goes."""

import pytest

from collegium.compression.cer import CER
from collegium.compression.dadaquant import DAdaQuant
from collegium.compression.half import Half
from collegium.compression.session.groups import Codecs
from collegium.compression.stc import STC
from collegium.experiment.config.registry import ALGORITHMS
from collegium.testing.conformance import Conformance

RULES = (
    "it_learns",
    "order_does_not_matter",
    "workers_do_not_matter",
    "interrupted_requests",
    "interrupted_saves",
    "repeated_requests",
    "evaluation_changes_nothing",
    "absent_client",
)
"""The rules that could break when messages are coded."""

RESUMED = ("interrupted_requests", "interrupted_saves", "repeated_requests")
"""Those that are held in three rounds as well.

The first download goes in full, the second loses something, and the third starts from what is
stored of that.
"""

STC_BOTH = Codecs(up=STC(p=0.3), down=STC(p=0.3))

CASES = [
    ("fedavg", STC_BOTH),
    ("fedavg", Codecs(up=DAdaQuant(), down=Half())),
    ("fedavg", Codecs(up=CER(gamma=0.3))),
    ("scaffold", STC_BOTH),
    ("fedbn", STC_BOTH),
    ("ifca", STC_BOTH),
    ("ditto", STC_BOTH),
    ("pfednet", STC_BOTH),
]


@pytest.mark.parametrize(
    ("name", "codecs"),
    [
        pytest.param(*case, id=f"{case[0]}-{i}", marks=[pytest.mark.slow] if i > 2 else [])
        for i, case in enumerate(CASES)
    ],
)
def test_rules_hold_with_codecs(name, codecs, workers, tmp_path):
    suite = Conformance(ALGORITHMS.load(name)(), tmp_path, workers, codecs=codecs)
    for rule in RULES:
        getattr(suite, f"check_{rule}")()


@pytest.mark.parametrize(
    "codecs",
    [Codecs(STC(p=0.2), STC(p=0.2)), Codecs(DAdaQuant(), DAdaQuant())],
    ids=["stc both ways", "dadaquant both ways"],
)
def test_rules_hold_where_a_stored_lossy_download_is_built_upon(codecs, workers, tmp_path):
    suite = Conformance(ALGORITHMS.load("fedavg")(), tmp_path, workers, 3, codecs=codecs)
    for rule in RESUMED:
        getattr(suite, f"check_{rule}")()
