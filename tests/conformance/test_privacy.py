"""With private training, too, a run has the same bits whatever stops it and in whatever order."""

from dataclasses import replace

import pytest

from collegium.experiment.config.registry import ALGORITHMS
from collegium.testing.conformance import Conformance
from collegium.testing.kinds import KINDS
from collegium.testing.toy import TRAINING
from collegium.training.privacy import PrivacyConfig

RULES = (
    "it_learns",
    "order_does_not_matter",
    "workers_do_not_matter",
    "interrupted_requests",
    "interrupted_saves",
    "repeated_requests",
    "evaluation_changes_nothing",
    "rounds_at_home",
    "absent_client",
)

IMAGES = KINDS["images with classes"]
"""A kind whose network has instance normalisation."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("fedavg", "case"),
        ("fedavg", "site"),
        ("ditto", "case"),
        ("local", "case"),
        ("fedper", "case"),
    ],
)
def test_rules_hold_with_privacy(name, unit, workers, tmp_path):
    privacy = PrivacyConfig(unit=unit, noise_multiplier=1.0, max_grad_norm=1.0, noise_seed="run")
    training = replace(TRAINING, privacy=privacy)
    suite = Conformance(ALGORITHMS.load(name)(), tmp_path, workers, kind=IMAGES, training=training)
    for rule in RULES:
        getattr(suite, f"check_{rule}")()
