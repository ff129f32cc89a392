"""Who takes part in which round, and what happens where a client does not answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from collegium.core.lazy import torch
from collegium.core.randomness import generator
from collegium.core.settings import NonNegative, PositiveInt, settings
from collegium.errors import ConfigError

OnFailure = Literal["fail", "retry", "skip"]


@settings
class Participation:
    """The clients that a round asks, and the consequence where one does not answer.

    Attributes:
        on_failure: "fail" ends the run at the first client that fails or does not answer; "retry"
            asks one that does not answer again, and ends the run where it fails; "skip" leaves it
            out of that exchange and records it.
        min_clients: the fewest clients whose answers an exchange needs.
        clients_per_round: how many clients take part in each round, drawn for every round from the
            run's seed; None: all. Every client takes part in the set-up, in the work after the
            last round, in evaluations and in the test.
        absent: by client the rounds in which it is known to be away; it is not asked for an
            evaluation after them either.
        retry_seconds: how long "retry" goes on asking.
    """

    on_failure: OnFailure = "fail"
    min_clients: PositiveInt = 1
    clients_per_round: PositiveInt | None = None
    absent: Mapping[str, tuple[PositiveInt, ...]] = field(default_factory=dict)
    retry_seconds: NonNegative = 600.0

    def check(self, clients: Sequence[str]) -> None:
        """Check that there are such clients, and so many.

        Args:
            clients: the names of all clients.

        Raises:
            ConfigError: there are not.
        """
        unknown = sorted(set(self.absent) - set(clients))
        if unknown:
            raise ConfigError(
                f"absent names {', '.join(unknown)}, which is not among the sites that train "
                f"({', '.join(sorted(clients))}); correct the name"
            )
        for name in ("clients_per_round", "min_clients"):
            if (getattr(self, name) or 1) > len(clients):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}, and {len(clients)} sites train; lower it"
                )

    def decisive(self) -> dict[str, Any]:
        """Return what determines the numbers of a run, where it differs from everybody's part."""
        data: dict[str, Any] = {}
        if self.clients_per_round is not None:
            data["clients_per_round"] = self.clients_per_round
        if self.absent:
            data["absent"] = {name: list(rounds) for name, rounds in self.absent.items()}
        return data

    def among(self, clients: Sequence[str]) -> Participation:
        """Return the same for some of the clients, such as those of a fold.

        Args:
            clients: their names.
        """
        return replace(self, absent={n: r for n, r in self.absent.items() if n in clients})

    def present(self, clients: Sequence[str], number: int) -> list[str]:
        """Return the clients that are not known to be away in a round, sorted.

        Args:
            clients: the names of all clients.
            number: the round.
        """
        return [name for name in sorted(clients) if number not in self.absent.get(name, ())]

    def drawn(self, clients: Sequence[str], number: int, seed: int) -> list[str]:
        """Return the clients that train in a round, sorted.

        Args:
            clients: the names of all clients.
            number: the round.
            seed: of the run.
        """
        present = self.present(clients, number)
        if self.clients_per_round is None or self.clients_per_round >= len(present):
            return present
        order = torch.randperm(len(present), generator=generator(seed, "participants", number))
        return sorted(present[place] for place in order[: self.clients_per_round].tolist())


EVERYBODY = Participation()
"""Every client takes part in every round, and the first that fails ends the run."""

SKIPPING = Participation(on_failure="skip")
"""Every client takes part, and one that fails is left out of the exchange."""


def check_home_rounds(home_rounds: int, rounds: int) -> None:
    """Check that a run has rounds together before those at home.

    Args:
        home_rounds: how many rounds are trained at home.
        rounds: how many rounds there are in all.

    Raises:
        ConfigError: it has not.
    """
    if home_rounds and not 0 < home_rounds < rounds:
        raise ConfigError(
            f"home_rounds is {home_rounds}, of {rounds} rounds in all; give a number from 0 to "
            f"{rounds - 1}, or train alone with the algorithm local"
        )
