"""Early stopping: when a run ends since its validation scores no longer improve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from collegium.core.settings import NonNegative, PositiveInt, settings
from collegium.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from collegium.data.site import Site


@settings
class EarlyStopping:
    """The rule by which a run ends before its last round.

    The score is the one by which `Selection` by "federation" selects: the mean over the validation
    cases of all sites, of the personal models where there are any and else of the global model;
    with "smoothed" the mean of three evaluated rounds.

    Attributes:
        patience: The run ends after so many evaluations in a row without an improvement.
        min_delta: A score is an improvement if it is higher by more than this than the last score
            that was one, in the unit of the metric.
    """

    patience: PositiveInt
    min_delta: NonNegative = 0.0

    def ends(self, scores: Sequence[float | None]) -> bool:
        """Return whether the last of some scores ends the run; an undefined one is passed over.

        Args:
            scores: of all evaluations so far, the higher the better.
        """
        best, waited = -float("inf"), 0
        for score in scores:
            if score is None:
                continue
            improved = score > best + self.min_delta
            best, waited = (score, 0) if improved else (best, waited + 1)
        return waited >= self.patience


def check_validation(sites: Iterable[Site]) -> None:
    """Check that sites have validation cases, by which training can be stopped.

    Args:
        sites: the sites that train.

    Raises:
        ConfigError: none has any.
    """
    if not any(len(site.val) for site in sites):
        raise no_validation()


def no_validation() -> ConfigError:
    """Return the error about early stopping without validation cases."""
    return ConfigError(
        "early_stopping needs validation cases, and no site that trains has any; give them some "
        "(federation.splits.validation is their share), or leave early_stopping out"
    )
