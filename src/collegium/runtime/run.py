"""One run of one algorithm: set-up, rounds with evaluation, and a test of the selected models."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from collegium.core.files import write_atomically
from collegium.core.tensors import Tensors
from collegium.runtime.participation import check_home_rounds
from collegium.runtime.selection import BestModel, mean_defined, scores_of
from collegium.runtime.server import ServerRuntime

GLOBAL = "global"
"""The name of the global model among those for sites outside."""


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
        numbers: other numbers that the clients reported, by client and name.
    """

    round: int
    losses: Mapping[str, float | None] = field(default_factory=dict)
    bytes_up: Mapping[str, int] = field(default_factory=dict)
    bytes_down: Mapping[str, int] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    left_out: list[dict[str, str]] = field(default_factory=list)
    scores: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Run:
    """Runs a `ServerRuntime` from its stored state to the end.

    Args:
        server: the server half.
        rounds: how many rounds to run.
        metric: the score on validation cases, the higher the better, by which the global model is
            selected.
        evaluate_every: rounds between two evaluations; the last round is always evaluated.
        home_rounds: how many rounds, the last ones, are trained at home; see
            `Algorithm.round_at_home`.

    Raises:
        ConfigError: all rounds would be at home.
    """

    def __init__(
        self,
        server: ServerRuntime,
        rounds: int,
        metric: str,
        evaluate_every: int = 1,
        *,
        home_rounds: int = 0,
    ) -> None:
        check_home_rounds(home_rounds, rounds)
        self.server, self.rounds, self.home_rounds = server, rounds, home_rounds
        self.metric, self.evaluate_every = metric, evaluate_every
        self._records = server.store.root / "records"
        self._best = BestModel(server.store.root / "kept")

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
            return dict(json.loads(finished.read_text()))
        server.begin(self._write_record)
        self._best.clean()
        self._evaluate_if_due()
        while server.round < self.rounds:
            at_home = server.round >= self.rounds - self.home_rounds
            server.advance(self._write_record, at_home=at_home)
            observe(self._evaluate_if_due())
        if server.round == self.rounds and not self.home_rounds:
            server.conclude(self._write_record)
            if self._record_path(server.round).exists():
                observe(self._evaluate_if_due())
        scores = self._test()
        write_atomically(finished, json.dumps(scores).encode())
        return scores

    def records(self) -> list[RoundRecord]:
        """Return the records of all rounds so far."""
        return [self._read_record(int(path.stem)) for path in sorted(self._records.glob("0*.json"))]

    def _write_record(self) -> None:
        server = self.server
        stats = server.client_stats
        if not 0 < server.round <= self.rounds and not stats:
            return  # a set-up or an end that asked no client
        record = RoundRecord(
            server.round,
            {client: found.loss for client, found in stats.items()},
            {client: found.bytes_up for client, found in stats.items()},
            {client: found.bytes_down for client, found in stats.items()},
            {client: found.seconds for client, found in stats.items()},
            server.left_out,
            numbers={client: found.numbers for client, found in stats.items() if found.numbers},
        )
        write_atomically(self._record_path(server.round), json.dumps(asdict(record)).encode())

    def _record_path(self, number: int) -> Path:
        return self._records / f"{number:06d}.json"

    def _read_record(self, number: int) -> RoundRecord:
        path = self._record_path(number)
        record = (
            RoundRecord(**json.loads(path.read_text())) if path.exists() else RoundRecord(number)
        )
        evaluation = self._records / f"evaluation-{number:06d}.json"
        if evaluation.exists():
            record = RoundRecord(**{**asdict(record), "scores": json.loads(evaluation.read_text())})
        return record

    def _evaluate_if_due(self) -> RoundRecord:
        """Evaluate the round just committed if it is due and was not done before a restart."""
        server, number = self.server, self.server.round
        due = number > 0 and (number % self.evaluate_every == 0 or number == self.rounds)
        if number > self.rounds:  # the end, in which most algorithms ask no client
            due = self._record_path(number).exists()
        path = self._records / f"evaluation-{number:06d}.json"
        if due and not path.exists():
            items = {"each": server.shared_with_each(), **server.shared()}
            replies = server.evaluate(server.algorithm.evaluate, **items)
            kinds = sorted({kind for reply in replies.values() for kind in reply["scores"]})
            scores = {kind: self._means(replies, kind) for kind in kinds}
            self._keep_best(replies)
            write_atomically(path, json.dumps(scores).encode())
        return self._read_record(number)

    def _means(self, replies: Mapping[str, Any], kind: str) -> dict[str, float | None]:
        return {
            client: mean_defined(scores_of(reply["scores"].get(kind, []), self.metric))
            for client, reply in replies.items()
        }

    def _keep_best(self, replies: Mapping[str, Any]) -> None:
        """Keep the global model with the best mean over all sites' validation cases so far."""
        if not self.server.algorithm.has_global:
            return
        rows = [row for reply in replies.values() for row in reply["scores"].get("global", [])]
        values = scores_of(rows, self.metric)
        self._best.offer(self.server.state["model"], values, number=self.server.round)

    def best(self) -> dict[str, Any] | None:
        """Return ``round``, ``score`` and ``model`` of the selected global model.

        None for an algorithm without one.
        """
        return self._best.load()

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
        selected = self.best()
        items = {"model": selected["model"]} if selected else {}
        replies = self.server.evaluate(self.server.algorithm.test, **items)
        return {client: dict(reply["scores"]) for client, reply in replies.items()}
