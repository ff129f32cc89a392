"""The estimates that a site sends, instead of the scores of its patients, for verdicts elsewhere.

A site that lets no scores of single cases out estimates each method's difference itself, with the
code that would do so elsewhere. What it sends holds counts, means and variances; a verdict that is
made of it is the one in the site's own report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from collegium.core.files import write_atomically
from collegium.errors import DataError, ProtocolError
from collegium.evaluation.estimates import Estimate
from collegium.evaluation.quality import Arms
from collegium.evaluation.scores import MethodKey
from collegium.evaluation.verdicts import Question, as_record, from_record

if TYPE_CHECKING:
    from collegium.evaluation.comparisons import ComparisonTable

FOLDER = "estimates"
"""The folder of what sites sent, in the output folder of a run: a file for each site."""

MethodAtSite = tuple[MethodKey, str]
"""A method and a site."""


@dataclass(frozen=True)
class Sent:
    """The estimate of one method at a site, as it was sent.

    Attributes:
        estimate: Its estimate.
        collapsed: Which of the two models predicts the same of all test cases, see `Verdict`.
    """

    estimate: Estimate
    collapsed: Arms


_About = tuple[str, str, str]
"""Variation, question and metric."""

_NAMES = ("variation", "question", "metric", "algorithm", "model")


@dataclass(frozen=True, eq=False)
class SentEstimates:
    """The estimates that sites sent.

    Attributes:
        by_table: By variation, question and metric, what was sent of each method and site.
    """

    by_table: Mapping[_About, Mapping[MethodAtSite, Sent]] = field(default_factory=dict)

    def of(self, variation: str, question: Question, metric: str) -> Mapping[MethodAtSite, Sent]:
        """Return what is for one table of comparisons.

        Args:
            variation: The setting of a sweep.
            question: What the table answers.
            metric: What was measured.
        """
        return self.by_table.get((variation, question, metric), {})


NOTHING_SENT = SentEstimates()


def list_estimates(tables: Iterable[ComparisonTable]) -> list[dict[str, Any]]:
    """Return the estimates of a site's own tables of comparisons as it sends them.

    Args:
        tables: All of them.
    """
    return [
        {
            "variation": table.variation, "question": c.verdict.question, "metric": table.metric,
            "algorithm": c.algorithm, "model": c.model, "collapsed": c.verdict.collapsed,
            "estimate": as_record(c.estimate),
        }
        for table in tables
        for c in table.by_site
        if c.estimate is not None
    ]  # fmt: skip


def store(sent: Any, site: str, output: Path) -> None:
    """Check what a site sent, and store it in the output folder of a run.

    Args:
        sent: What it sent, see `list_estimates`.
        site: The site, of which alone these estimates are.
        output: The output folder.

    Raises:
        ProtocolError: These are no estimates.
    """
    try:
        for _ in _entries(sent):
            pass
    except DataError as error:
        raise ProtocolError(f"site {site}: {error}") from error
    write_atomically(output / FOLDER / f"{site}.json", json.dumps(sent).encode())


def read_estimates(output: Path) -> SentEstimates:
    """Read what sites sent.

    Args:
        output: The output folder of a run.

    Raises:
        DataError: A file holds no estimates.
    """
    found: dict[_About, dict[MethodAtSite, Sent]] = {}
    for path in sorted((output / FOLDER).glob("*.json")):
        try:
            for about, method, sent in _entries(json.loads(path.read_bytes())):
                found.setdefault(about, {})[method, path.stem] = sent
        except (OSError, ValueError, DataError) as error:
            raise DataError(
                f"{path}: this is not what a site sent ({error}); remove the file and resume the "
                f"run"
            ) from error
    return SentEstimates(found)


def _entries(sent: Any) -> Iterator[tuple[_About, MethodKey, Sent]]:
    """Yield checked entries: the table that one is for, its method, and what was sent of it.

    Raises:
        DataError: One cannot be an estimate.
    """
    try:
        entries = list(sent)
        named = [[str(entry[name]) for name in _NAMES] for entry in entries]
        found = [
            Sent(from_record(Estimate, entry["estimate"]), entry["collapsed"]) for entry in entries
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"these are no estimates of this version ({error!r})") from error
    for (variation, question, metric, *method), one in zip(named, found, strict=True):
        if not _is_possible(one.estimate) or one.collapsed not in get_args(Arms):
            raise DataError(f"its estimate of {' '.join(method)} cannot be one")
        yield (variation, question, metric), (method[0], method[1]), one


def _is_possible(estimate: Estimate) -> bool:
    """Return whether numbers that came from elsewhere could be those of an estimate."""
    numbers: list[Any] = [
        estimate.difference, estimate.centre, estimate.joined, estimate.reference,
        estimate.variance, estimate.df,
    ]  # fmt: skip
    variances = [estimate.variance or 0.0, *(arm.residual for arm in estimate.arms)]
    counts = [estimate.patients, estimate.undefined, estimate.fewest]
    scores = [score for arm in estimate.arms for score in arm.scores]
    return (
        all(isfinite(x) for x in [*scores, *variances, *(n for n in numbers if n is not None)])
        and min(*variances, *counts) >= 0
        and (estimate.df is None or estimate.df > 0)
        and (estimate.variance is None) == (estimate.df is None)
        and (estimate.variance is None or estimate.difference is not None)
        and (estimate.difference is None) == (estimate.centre is None)
        and len(estimate.arms) in (1, 2)
        and all(arm.scores for arm in estimate.arms)
        and min(estimate.trainings) >= 1
    )
