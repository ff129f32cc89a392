"""Under masks, too, a run has the same bits whatever stops it and in whatever order it goes.

Keys and masks are random, and differ in every one of these runs; states and scores do not.
"""

import pytest

from collegium.experiment.config.registry import ALGORITHMS
from collegium.runtime.secure.config import SecureMean
from collegium.testing.conformance import Conformance

RULES = (
    "it_runs",
    "it_learns",
    "order_does_not_matter",
    "workers_do_not_matter",
    "interrupted_requests",
    "interrupted_saves",
    "repeated_requests",
    "evaluation_changes_nothing",
    "it_keeps_nothing",
    "neutral_setting",
    "absent_client",
    "same_as",
)
"""All but two: of the parts, those that are averaged are not sent, and keys are; and a site that
answers under another's name does not find its own key among those of a sum, and refuses."""


@pytest.mark.parametrize(
    "name", ["fedavg", *(pytest.param(n, marks=pytest.mark.slow) for n in ("iopfl", "fedbn"))]
)
def test_rules_hold_under_masks(name, workers, tmp_path):
    """Of three sites one is absent once, so that two have to do."""
    secure = SecureMean(min_sites=2)
    suite = Conformance(ALGORITHMS.load(name)(), tmp_path, workers, secure=secure)
    for rule in RULES:
        getattr(suite, f"check_{rule}")()
