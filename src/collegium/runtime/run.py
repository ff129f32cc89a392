"""One run of one algorithm: set-up, rounds with evaluation, and a test of the selected models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.core.payloads import GLOBAL, PERSONAL
from collegium.core.seals import read_json, read_sealed, seal_json
from collegium.core.tensors import Tensors
from collegium.runtime.early_stopping import EarlyStopping, no_validation
from collegium.runtime.ledger import SignOff
from collegium.runtime.participation import check_home_rounds
from collegium.runtime.records import SERVER, TEST_FILE, Records, RoundRecord
from collegium.runtime.selection import (
    DEFAULT,
    FEDERATION,
    KEPT,
    KeptModels,
    Selection,
    Selector,
    choices_at,
)
from collegium.runtime.server import ServerRuntime

logger = logging.getLogger(__name__)


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
        self._records = Records(server.store.root)
        self._kept = KeptModels(server.store.root / KEPT)
        self._selector = Selector(selection, metric)
        for number, found in self._records.evaluations():
            if found.pop("stopped", False):
                self._stopped = number
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
        finished = server.store.root / TEST_FILE
        if finished.exists():
            try:
                return read_json(finished)
            except ValueError:
                logger.warning("%s is damaged; the selected models are tested again", finished)
        server.begin(self._write_record)
        self._records.check_holds(min(server.round, self.last))
        server.border.signed = self._signed()
        self._kept.clean()
        self._evaluate_if_due()
        while server.round < self.last:
            at_home = server.round >= self.last - self.home_rounds
            server.advance(self._write_record, at_home=at_home)
            observe(self._evaluate_if_due())
        if server.round == self.last and not self.home_rounds:
            server.conclude(self._write_record)
            if self._records.has_work(server.round):
                observe(self._evaluate_if_due())
        scores = self._test()
        self._records.add_end()
        write_atomically(finished, seal_json(json.dumps(scores)))
        return scores

    def records(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        return self._records.read_all()

    def _write_record(self) -> None:
        server = self.server
        stats = server.client_stats
        if not 0 < server.round <= self.last and not stats:
            return  # a set-up or an end that asked no client
        numbers = {client: found.numbers for client, found in stats.items() if found.numbers}
        if server.recorded:
            numbers[SERVER] = dict(server.recorded)
        record = RoundRecord(
            server.round,
            {client: found.loss for client, found in stats.items()},
            {client: found.bytes_up for client, found in stats.items()},
            {client: found.bytes_down for client, found in stats.items()},
            {client: found.seconds for client, found in stats.items()},
            server.left_out,
            numbers=numbers,
        )
        self._store_signed()
        self._records.add(record)

    @property
    def _ledgers(self) -> Path:
        return self.server.store.root / "ledgers.json"

    def _store_signed(self) -> None:
        """Store what the clients have signed off of their ledgers so far."""
        signed = {client: found.to_dict() for client, found in self.server.border.signed.items()}
        if signed:
            write_atomically(self._ledgers, seal_json(json.dumps(signed)))

    def _signed(self) -> dict[str, SignOff]:
        """Return what the clients had signed off of their ledgers before a restart."""
        if not self._ledgers.exists():
            return {}
        found = read_sealed(
            self._ledgers,
            "restore it from a copy, or remove it: whether a ledger was changed before its next "
            "message is not checked then",
        )
        return {client: SignOff(**signed) for client, signed in found.items()}

    def _evaluate_if_due(self) -> RoundRecord:
        """Evaluate the round just committed if it is due and was not done before a restart."""
        server, number = self.server, self.server.round
        due = number > 0 and (number % self.evaluate_every == 0 or number == self.last)
        if number > self.last:  # the end, in which most algorithms ask no client
            due = self._records.has_work(number)
        if due and not self._records.is_evaluated(number):
            replies = server.evaluate_models(self._personal())
            rows = {client: reply["scores"] for client, reply in replies.items()}
            scores = self._selector.add(number, rows)
            self._keep_global()
            found = {"scores": scores, "choices": self._selector.choices}
            if self._ends_early(number, rows):
                found["stopped"], self._stopped = True, number
            self._records.add_evaluation(number, found)
        return self._records.read(number)

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
