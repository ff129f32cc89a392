"""What each algorithm sent and how long the sites worked, for the report."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import add
from statistics import fmean

from collegium.evaluation.results import Row
from collegium.evaluation.tables import method_name


@dataclass(frozen=True)
class Traffic:
    """Bytes and seconds of an algorithm, summed over sites, mean over seeds and folds.

    Attributes:
        algorithm: Its label.
        up: Bytes that left the sites.
        down: Bytes that came to them.
        seconds: Seconds that the sites worked.
        up_round: Bytes that left the sites in a round, mean over rounds.
        down_round: Bytes that came to them in a round, mean over rounds.
    """

    algorithm: str
    up: float
    down: float
    seconds: float
    up_round: float
    down_round: float

    @property
    def name(self) -> str:
        """The algorithm as a reader calls it."""
        return method_name(self.algorithm, "")


def count_traffic(rows: Iterable[Row], order: Sequence[str]) -> list[Traffic]:
    """Count what each algorithm sent: round by round, and in total where case rows say more.

    Args:
        rows: Rows of results; of a single site they give what that site sent.
        order: Labels of the algorithms.

    Returns:
        One entry per algorithm that has trained.
    """
    rounds: dict[tuple[str, int, int], set[int]] = defaultdict(set)
    sums: dict[tuple[str, int, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    totals: dict[tuple[str, int, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        numbers = [row.bytes_up, row.bytes_down, row.seconds]
        key = (row.algorithm, row.seed, row.fold, row.site)
        if row.case and row.split == "test":
            totals[key] = list(map(max, totals[key], numbers))
        elif row.metric == "loss" and row.split == "train":
            rounds[key[:3]].add(row.round)
            sums[key] = list(map(add, sums[key], numbers))
    found = []
    for label in order:
        runs = []
        for run in sorted(key for key in rounds if key[0] == label):
            sites = [key for key in sums if key[:3] == run]
            whole = [sum(max(sums[key][i], totals[key][i]) for key in sites) for i in range(3)]
            per_round = [sum(sums[key][i] for key in sites) / len(rounds[run]) for i in range(2)]
            runs.append(whole + per_round)
        if runs:
            found.append(Traffic(label, *map(fmean, zip(*runs, strict=True))))
    return found
