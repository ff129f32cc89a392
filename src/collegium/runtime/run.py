"""One run of one algorithm: set-up, rounds with evaluation, and a test of the selected models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.core.payloads import GLOBAL, PERSONAL
from collegium.core.seals import START_AGAIN, read_json, read_sealed, seal_json
from collegium.core.tensors import Tensors
from collegium.errors import CheckpointError
from collegium.runtime.early_stopping import EarlyStopping, no_validation
from collegium.runtime.ledger import SignOff
from collegium.runtime.participation import check_home_rounds
from collegium.runtime.selection import (
    DEFAULT,
    FEDERATION,
    KEPT,
    Choices,
    KeptModels,
    Selection,
    Selector,
    choices_at,
)
from collegium.runtime.server import ServerRuntime

logger = logging.getLogger(__name__)


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
        numbers: other numbers that the clients reported, by client and name.
        stopped: whether the run was stopped early by the evaluation after this round; rounds at
            home may follow.
        ledgers: what each client had signed off of its ledger by the end of the round; see
            `collegium.runtime.ledger.SignOff`.
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
    ledgers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


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


class Run:
    """Runs a `ServerRuntime` from its stored state to the end.

    Args:
        server: the server half.
        rounds: how many rounds to run.
        metric: the score on validation cases, the higher the better, by which models are selected.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
        selection: the rule that selects the round of each model.
        home_rounds: how many rounds, the last ones, are trained at home; see
            `Algorithm.round_at_home`.
        early_stopping: ends the rounds together, after which those at home follow; None: none does.

    Raises:
        ConfigError: all rounds would be at home.
    """

    def __init__(
        self,
        server: ServerRuntime,
        rounds: int,
        metric: str,
        evaluate_every: int = 1,
        selection: Selection = DEFAULT,
        *,
        home_rounds: int = 0,
        early_stopping: EarlyStopping | None = None,
    ) -> None:
        check_home_rounds(home_rounds, rounds)
        self.server, self.rounds, self.home_rounds = server, rounds, home_rounds
        self.evaluate_every, self.selection = evaluate_every, selection
        self._early_stopping = early_stopping
        self._stopped: int | None = None
        self._records = server.store.root / "records"
        self._kept = KeptModels(server.store.root / KEPT)
        self._selector = Selector(selection, metric)
        for path in sorted(self._records.glob("evaluation-*.json")):
            found = self._stored_evaluation(path)
            if found is None:
                break
            if found.pop("stopped", False):
                self._stopped = int(path.stem.rpartition("-")[2])
            self._selector.restore(**found)

    @property
    def last(self) -> int:
        """The last round: the planned one or, where the run was stopped early, one before it."""
        return self.rounds if self._stopped is None else self._stopped + self.home_rounds

    def execute(
        self, observe: Callable[[RoundRecord], None] = lambda record: None
    ) -> dict[str, Any]:
        """Run the remaining rounds and return the test scores by client, kind of model and case.

        Args:
            observe: called after every round, and after the end if a client was asked there.
        """
        server = self.server
        finished = self._records / "test.json"
        if finished.exists():
            try:
                return read_json(finished)
            except ValueError:
                logger.warning("%s is damaged; the selected models are tested again", finished)
        server.begin(self._write_record)
        server.border.signed = self._signed()
        self._kept.clean()
        self._evaluate_if_due()
        while server.round < self.last:
            at_home = server.round >= self.last - self.home_rounds
            server.advance(self._write_record, at_home=at_home)
            observe(self._evaluate_if_due())
        if server.round == self.last and not self.home_rounds:
            server.conclude(self._write_record)
            if self._record_path(server.round).exists():
                observe(self._evaluate_if_due())
        scores = self._test()
        write_atomically(finished, seal_json(json.dumps(scores)))
        return scores

    def records(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        return [self._read_record(int(path.stem)) for path in sorted(self._records.glob("0*.json"))]

    def _write_record(self) -> None:
        server = self.server
        stats = server.client_stats
        if not 0 < server.round <= self.last and not stats:
            return  # a set-up or an end that asked no client
        record = RoundRecord(
            server.round,
            {client: found.loss for client, found in stats.items()},
            {client: found.bytes_up for client, found in stats.items()},
            {client: found.bytes_down for client, found in stats.items()},
            {client: found.seconds for client, found in stats.items()},
            server.left_out,
            numbers={client: found.numbers for client, found in stats.items() if found.numbers},
            ledgers={client: found.to_dict() for client, found in server.border.signed.items()},
        )
        write_atomically(self._record_path(server.round), seal_json(json.dumps(asdict(record))))

    def _signed(self) -> dict[str, SignOff]:
        """Return what the clients had signed off of their ledgers by the newest record."""
        numbers = [int(path.stem) for path in self._records.glob("0*.json")]
        newest = max((n for n in numbers if n <= self.server.round), default=0)
        ledgers = self._read_record(newest).ledgers
        return {client: SignOff(**found) for client, found in ledgers.items()}

    def _record_path(self, number: int) -> Path:
        return self._records / f"{number:06d}.json"

    def _read_record(self, number: int) -> RoundRecord:
        path = self._record_path(number)
        record = (
            RoundRecord(**read_sealed(path, START_AGAIN)) if path.exists() else RoundRecord(number)
        )
        evaluation = self._records / f"evaluation-{number:06d}.json"
        if evaluation.exists():
            found = read_sealed(evaluation, START_AGAIN)
            for by_site in found["scores"].values():
                del by_site[FEDERATION]
            record = RoundRecord(**{**asdict(record), **found})
        return record

    def _stored_evaluation(self, path: Path) -> dict[str, Any] | None:
        """Return a stored evaluation; None for a damaged one that is made again.

        It is, if the models that it evaluated are still those of the newest state.
        """
        try:
            return read_sealed(path, START_AGAIN)
        except CheckpointError:
            number = path.stem.rpartition("-")[2]
            states = (name for name in self.server.store.names() if name.isdigit())
            if number != max(states, default="") or (self._records / "test.json").exists():
                raise
            logger.warning("%s is damaged; the round is evaluated again", path)
            path.unlink()
            return None

    def _evaluate_if_due(self) -> RoundRecord:
        """Evaluate the round just committed if it is due and was not done before a restart."""
        server, number = self.server, self.server.round
        due = number > 0 and (number % self.evaluate_every == 0 or number == self.last)
        if number > self.last:  # the end, in which most algorithms ask no client
            due = self._record_path(number).exists()
        path = self._records / f"evaluation-{number:06d}.json"
        if due and not path.exists():
            replies = server.evaluate_models(self._personal())
            rows = {client: reply["scores"] for client, reply in replies.items()}
            scores = self._selector.add(number, rows)
            self._keep_global()
            found = {"scores": scores, "choices": self._selector.choices}
            if self._ends_early(number, rows):
                found["stopped"], self._stopped = True, number
            write_atomically(path, seal_json(json.dumps(found)))
        return self._read_record(number)

    def _ends_early(self, number: int, rows: Mapping[str, Mapping[str, Any]]) -> bool:
        """Return whether the scores, the last of them in ``rows``, end the rounds together."""
        together = self.last - self.home_rounds
        if self._early_stopping is None or number >= together:
            return False
        scored = any(cases for kinds in rows.values() for cases in kinds.values())
        if not scored and rows.keys() == {*self.server.clients}:
            raise no_validation()
        return self._early_stopping.ends(self._selector.federation_scores())

    def _personal(self) -> dict[str, int]:
        """Return the round chosen so far of each site's personal model."""
        chosen = {site: self._selector.of(PERSONAL, site) for site in self.server.clients}
        return {site: found["round"] for site, found in chosen.items() if found}

    def _keep_global(self) -> None:
        """Keep the global models that the federation or a site has chosen so far."""
        server, choices = self.server, self._selector.choices.get(GLOBAL, {})
        wanted = {chosen["round"] for chosen in choices.values()}
        if server.round in wanted:
            self._kept.keep(server.state["model"], server.round)
        self._kept.drop_all_but(wanted)

    def best(self) -> dict[str, Any] | None:
        """Return ``round``, ``score`` and ``model`` of the global model chosen by the federation.

        None for an algorithm without one.
        """
        chosen = self._selector.choices.get(GLOBAL, {}).get(FEDERATION)
        return chosen and {**chosen, "model": self._kept.load(chosen["round"])}

    def global_model(self, site: str) -> Tensors | None:
        """Return the global model that a site uses; None for an algorithm without one."""
        chosen = self._selector.of(GLOBAL, site) or self._selector.of(GLOBAL, FEDERATION)
        return chosen and self._kept.load(chosen["round"])

    def deploy(self) -> dict[str, Tensors]:
        """Return the models for sites outside, by name; the global one is the selected one."""
        if not self.server.state:
            self.server.begin()
        models, selected = self.server.deploy(), self.best()
        if selected and GLOBAL in models:
            models[GLOBAL] = selected["model"]
        return models

    def _test(self) -> dict[str, Any]:
        """Score the selected models on the test cases, once."""
        self._log_few_events()
        models: dict[int, Tensors | None] = {}
        each: dict[str, dict[str, Any]] = {}
        personal = self._personal()
        for site in self.server.clients:
            found = choices_at(self._selector.choices, site, self.selection)
            kinds = {kind: f["round"] for kind, f in found.items() if kind != PERSONAL}
            models |= {n: self._kept.load(n) for n in kinds.values() if n not in models}
            each[site] = {
                "chosen": personal.get(site),
                "models": {str(number): models[number] for number in kinds.values()},
                "kinds": {kind: str(number) for kind, number in kinds.items()},
            }
        replies = self.server.evaluate(self.server.algorithm.test, each=each)
        return {client: dict(reply["scores"]) for client, reply in replies.items()}

    def _log_few_events(self) -> None:
        """Log where the last round is taken since a choice would depend on too few patients."""
        rule, events = self.selection, dict[str, int]()
        for kind in self._selector.choices if rule.round != "last" else ():
            for site in self.server.clients:
                chosen = self._selector.of(kind, site)
                if chosen and chosen["events"] < rule.min_events:
                    events[site] = chosen["events"]
        if events:
            logger.info(
                "the last round is taken, since a choice by validation cases would depend on too "
                "few patients (%s; at least %d are needed)",
                ", ".join(f"{site}: {count}" for site, count in sorted(events.items())),
                rule.min_events,
            )
