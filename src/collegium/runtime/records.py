"""Records of the rounds of a run, in one file of JSON lines to which every round is appended."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collegium.core.files import append_durably
from collegium.core.seals import START_AGAIN, open_json, seal_json
from collegium.errors import CheckpointError
from collegium.runtime.selection import FEDERATION, Choices

logger = logging.getLogger(__name__)

FILE = "records.jsonl"
"""The name of the file in the server's folder."""

TEST_FILE = "test.json"
"""The name of the file of test scores in the server's folder, with which a run is finished."""

SERVER = ""
"""Stands for the server in `RoundRecord.numbers`, and as the site of its rows in the results."""

_EARLIER = "records"
"""The folder in which earlier versions kept a file per round."""


@dataclass
class ClientStats:
    """Measurements of one client in one round.

    Attributes:
        bytes_up: bytes that left the client.
        bytes_down: bytes sent to it.
        seconds: time that it worked.
        loss: its mean training loss.
        numbers: other numbers that it reported; see `collegium.core.payloads.Numbers`.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    loss: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundRecord:
    """The record of one round.

    Attributes:
        round: its number; 0 is the set-up, and the number after the last round is the algorithm's
            work at the end.
        losses: mean training loss by client.
        bytes_up: bytes that left each client.
        bytes_down: bytes sent to each client.
        seconds: seconds that each client worked.
        left_out: clients that failed and were left out, and why.
        scores: mean validation score by kind of model and client; empty if the round was not
            evaluated, None if undefined.
        choices: the rounds chosen so far; empty if the round was not evaluated.
        numbers: other numbers that the clients reported, by client and name; and what the algorithm
            recorded at the server, by `SERVER` and name.
        stopped: whether the run was stopped early by the evaluation after this round; rounds at
            home may follow.
    """

    round: int
    losses: Mapping[str, float | None] = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    bytes_down: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    scores: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choices: Choices = field(default_factory=dict)
    stopped: bool = False


_ENDED = {"ended": True}
"""The last line of a run whose models were tested."""

_EVALUATED = {"scores", "choices", "stopped"}
"""The fields that are known once a round was evaluated, in a line of their own."""


def choices_of(records: Iterable[RoundRecord]) -> Choices:
    """Return the rounds chosen in a run, or so far.

    Args:
        records: the records of its rounds, in order.
    """
    return next((found.choices for found in reversed([*records]) if found.choices), {})


def stopped_at(records: Iterable[RoundRecord]) -> int | None:
    """Return the round after which a run was stopped early; None if it was not.

    Args:
        records: the records of its rounds.
    """
    return next((found.round for found in records if found.stopped), None)


class Records:
    """The stored records of a run.

    A round has a line for its work and one for its evaluation, and the run one for its end. If a
    round is repeated after a restart, its last line counts. Each line holds its SHA-256.

    Args:
        root: the server's folder.

    Raises:
        CheckpointError: a line is damaged, or the file is cut short. The last line of a run that
            has not ended may be damaged, or unfinished: it is written again.
    """

    def __init__(self, root: Path) -> None:
        self.path = root / FILE
        self._work: dict[int, tuple[int, int]] = {}
        self._evaluations: dict[int, tuple[int, int]] = {}
        self._end = 0
        if (root / _EARLIER).is_dir():
            raise CheckpointError(
                f"{root} belongs to a run of an earlier version of Collegium; finish it with that "
                f"version, or start the run again in a new output folder"
            )
        self._load(ended=(root / TEST_FILE).exists())

    def _load(self, *, ended: bool) -> None:
        data = self.path.read_bytes() if self.path.exists() else b""
        lines = data[: data.rfind(b"\n") + 1].splitlines(keepends=True)
        last: dict[str, Any] = {}
        for number, line in enumerate(lines, 1):
            try:
                last = open_json(line[:-1])
                self._note(last, len(line))
            except (ValueError, KeyError) as error:
                if number < len(lines) or ended:
                    raise self.damaged(f"line {number} was changed") from error
                logger.warning("line %d of %s is damaged and is written again", number, self.path)
        if ended and last != _ENDED:
            raise self.damaged("lines at its end are missing")

    def _note(self, entry: Mapping[str, Any], size: int) -> None:
        place = (self._end, size)
        if "scores" in entry:
            self._evaluations[entry["round"]] = place
        elif entry != _ENDED:
            self._work[entry["round"]] = place
        self._end += size

    def damaged(self, what: str) -> CheckpointError:
        """Return the error that says what is wrong with the file.

        Args:
            what: a part of the sentence.
        """
        return CheckpointError(f"{self.path} is damaged: {what}; {START_AGAIN}")

    def check_holds(self, committed: int) -> None:
        """Check that all rounds of the committed state have their records.

        Args:
            committed: the number of its round.

        Raises:
            CheckpointError: one has not.
        """
        missing = min({*range(1, committed + 1)} - self._work.keys(), default=None)
        if missing is not None:
            raise self.damaged(f"round {missing} is missing")

    def add(self, record: RoundRecord) -> None:
        """Store what a round's work left.

        Args:
            record: the record; its evaluation is left out.

        Raises:
            StorageError: it could not be written.
        """
        self._append({k: v for k, v in asdict(record).items() if k not in _EVALUATED})

    def add_evaluation(self, number: int, found: Mapping[str, Any]) -> None:
        """Store the evaluation of a round.

        Args:
            number: the round.
            found: ``scores``, ``choices`` and, where the run was stopped, ``stopped``.

        Raises:
            StorageError: it could not be written.
        """
        self._append({"round": number, **found})

    def add_end(self) -> None:
        """Store that no round follows.

        Raises:
            StorageError: it could not be written.
        """
        self._append(_ENDED)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = seal_json(json.dumps(entry)) + b"\n"
        append_durably(self.path, line, at=self._end)
        self._note(entry, len(line))

    def has_work(self, number: int) -> bool:
        """Return whether the work of a round is recorded.

        Args:
            number: the round.
        """
        return number in self._work

    def is_evaluated(self, number: int) -> bool:
        """Return whether the evaluation of a round is recorded.

        Args:
            number: the round.
        """
        return number in self._evaluations

    def evaluations(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the stored evaluations and the numbers of their rounds, in order."""
        for number in sorted(self._evaluations):
            yield number, self._evaluation(number)

    def read(self, number: int) -> RoundRecord:
        """Return the record of a round, with its evaluation if there was one.

        Args:
            number: the round.
        """
        found = self._entry(self._work[number]) if number in self._work else {"round": number}
        if number in self._evaluations:
            evaluation = self._evaluation(number)
            for by_site in evaluation["scores"].values():
                del by_site[FEDERATION]
            found |= evaluation
        return RoundRecord(**found)

    def read_all(self) -> list[RoundRecord]:
        """Return the records of all rounds so far, in order."""
        return [self.read(number) for number in sorted(self._work)]

    def _evaluation(self, number: int) -> dict[str, Any]:
        entry = self._entry(self._evaluations[number])
        del entry["round"]
        return entry

    def _entry(self, place: tuple[int, int]) -> dict[str, Any]:
        offset, size = place
        with self.path.open("rb") as file:
            file.seek(offset)
            try:
                return open_json(file.read(size)[:-1])
            except ValueError as error:
                raise self.damaged("a line was changed") from error
