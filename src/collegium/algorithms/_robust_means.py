"""The server as a method with a robust mean sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from collegium.algorithms import _robust_rules as rules
from collegium.algorithms._distance_groups import GroupServer
from collegium.core.algorithm import Algorithm, Replies, Server
from collegium.core.message import Message
from collegium.core.model_parts import ModelParts
from collegium.core.payloads import ModelPart
from collegium.core.settings import NonNegativeInt, Positive, PositiveInt, Share, settings
from collegium.core.tensors import Tensors, mean
from collegium.errors import ConfigError, MissingReply, ProtocolError

OWN_SETTINGS = {
    "trim": "trimmed_mean",
    "factor": "norm_bound",
    "bound": "norm_bound",
    "hostile": "krum",
    "selected": "krum",
}
"""The settings that belong to one rule."""


@settings
class RobustMean(Algorithm):
    """A mix-in; ``super()`` is a method whose rounds use means of models.

    `collegium.algorithms.robust.Robust` has the rules.

    Attributes:
        rule: "median", "trimmed_mean", "norm_bound" or "krum".
        trim: of "trimmed_mean", the share of the sites left out at either end, below one half.
        factor: of "norm_bound", how many times the median norm an update may have.
        bound: of "norm_bound", the norm that an update of the parameters may have, in place of a
            multiple of the median; buffers keep that.
        hostile: of "krum", the number of hostile sites that it has to stand, f.
        selected: of "krum", how many models are averaged, m: 1 is Krum, more is Multi-Krum.
    """

    only_averaged: ClassVar[frozenset[str] | None] = None
    compares_replies: ClassVar[bool] = True

    rule: Literal["median", "trimmed_mean", "norm_bound", "krum"] = "median"
    trim: Share = 0.25
    factor: Positive = 3.0
    bound: Positive | None = None
    hostile: NonNegativeInt = 1
    selected: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, rule in OWN_SETTINGS.items():
            if rule != self.rule and getattr(self, name) != getattr(RobustMean, name):
                raise ConfigError(
                    f"{name} belongs to the rule {rule}, and rule is {self.rule}; leave it out, or "
                    f"set rule to {rule}"
                )
        if self.trim >= 0.5:
            raise ConfigError(
                f"trim is {self.trim:g}, which leaves no site; give less than 0.5, or set rule to "
                f"median"
            )

    @property
    def ranks_coordinates(self) -> bool:  # type: ignore[override]
        """Whether the rule is one of those that treat every coordinate by itself."""
        return self.rule in ("median", "trimmed_mean")

    @property
    def fewest_clients(self) -> int:
        """The fewest clients with which the rule can leave one out, or the method can do with."""
        return max(super().fewest_clients, self.rule_needs[0])

    @property
    def rule_needs(self) -> tuple[int, str]:
        """The fewest clients that the rule needs, and why."""
        if self.rule == "krum":
            least = max(2 * self.hostile + 3, self.hostile + self.selected)
            return least, f"2 hostile + 3, and hostile + selected, at hostile: {self.hostile}"
        if self.rule == "trimmed_mean":
            least = next(n for n in range(1, 10**6) if rules.trimmed_count(self.trim, n))
            return max(least, 3), f"at trim: {self.trim:g}, so that one is left out at either end"
        return 3, "of two, nobody can tell which is hostile"

    def check_setup(self, clients: Sequence[str], parts: ModelParts) -> None:
        """Refuse too few sites, a method that does not average, and what the method refuses.

        See `Algorithm.check_setup`.
        """
        super().check_setup(clients, parts)
        if not self.averaged_parts() or self.commit_on_acknowledgement:
            raise ConfigError(
                "the server of this method does more with the sites' models than to average them, "
                "or adds up what they hold, so that a robust mean would protect nothing; leave "
                "+robust out, or give it to a method that averages, such as fedavg"
            )
        if len(clients) < self.fewest_clients:
            raise ConfigError(
                f"{self.need()}, and {len(clients)} train; add sites or choose another rule"
            )

    def same_as(self, parts: ModelParts) -> str | None:
        """Return the method that it is, with a robust mean. See `Algorithm.same_as`."""
        found: str | None = super().same_as(parts)
        return f"{found}+robust" if found else None

    def need(self) -> str:
        """Return in words how many sites the rule needs, and why."""
        least, why = self.rule_needs
        return f"the rule {self.rule} needs {least} sites or more ({why})"

    def round(self, server: Server) -> None:
        """Run the method's round, in which every mean of models is a robust one."""
        super().round(RobustServer(server, self))  # type: ignore[safe-super]


class RobustServer(GroupServer):
    """A `Server` whose replies have robust means.

    Args:
        server: the server.
        method: the method, with the rule and its settings.
    """

    def __init__(self, server: Server, method: RobustMean) -> None:
        super().__init__(server, server.state, server.clients, {})
        self.method = method

    def ask(
        self,
        method: Callable[..., Message],
        *,
        to: Collection[str] | None = None,
        each: Mapping[str, Mapping[str, Any]] | None = None,
        **items: Any,
    ) -> Replies:
        """Ask clients. See `Server.ask`."""
        replies = super().ask(method, to=to, each=each, **items)
        sent = {client: {**items, **own} for client, own in (each or {}).items()}
        return RobustReplies(iter(replies), self, lambda client: sent.get(client, items))


class RobustReplies(Replies):
    """Replies whose mean is a robust one, which needs all of them at once.

    Args:
        source: pairs of client and reply, as they arrive.
        server: the server.
        sent: returns the parts that a client received.
    """

    def __init__(
        self,
        source: Iterator[tuple[str, Message]],
        server: RobustServer,
        sent: Callable[[str], Mapping[str, Any]],
    ) -> None:
        super().__init__(source)
        self._server, self._sent = server, sent

    def mean(self, key: str, weight: str | None = "num_examples") -> Tensors:
        """Return the robust mean of one part. See `Replies.mean`.

        Raises:
            MissingReply: fewer clients with training examples answered than the rule needs.
            ProtocolError: the part is not among the means that the method declares.
        """
        method, weights = self._server.method, self.weights(weight)
        if key not in method.averaged_parts():
            raise ProtocolError(
                f"the part {key!r} is averaged, and only_averaged does not name it; write it "
                f"into them"
            )
        models = {c: reply[key] for c, reply in self.collect() if weights[c] > 0}
        if len(models) < method.fewest_clients:
            others = ", ".join(c for c in self._server.clients if c not in models)
            raise MissingReply(
                f"round {self._server.round}: {method.need()}, and {len(models)} trained and "
                f"answered (not {others}); the finished rounds are kept, resume when more of the "
                f"sites are back"
            )
        if method.rule == "median":
            return rules.median([*models.values()])
        if method.rule == "trimmed_mean":
            cut = rules.trimmed_count(method.trim, len(models))
            return rules.trimmed_mean([*models.values()], cut)
        if method.rule == "krum":
            return self._krum(models)
        return self._bounded_mean(key, models, weights)

    def _krum(self, models: Mapping[str, Tensors]) -> Tensors:
        """Return the mean of the selected models, and record which they are."""
        method, names, trainable = self._server.method, [*models], self._server.parts.trainable
        chosen = {
            names[position]
            for position in rules.krum(
                [*models.values()], trainable, hostile=method.hostile, selected=method.selected
            )
        }
        for client in names:
            self._server.record(f"krum/{client}", client in chosen)
        return mean([model for client, model in models.items() if client in chosen])

    def _bounded_mean(
        self, key: str, models: Mapping[str, Tensors], weights: Mapping[str, float]
    ) -> Tensors:
        """Return the mean of models whose updates are not too long, and record who was bounded."""
        method, schema = self._server.method, self._server.method.all_sends()[key]
        is_update = isinstance(schema, ModelPart) and schema.difference
        starts = {
            client: 0.0 * model if is_update else self._sent(client)[key].select(model)
            for client, model in models.items()
        }
        trainable = self._server.parts.trainable
        clipped, scales = rules.clip_updates(
            models, starts, trainable, factor=method.factor, bound=method.bound
        )
        for client, scale in scales.items():
            self._server.record(f"norm_bound/{client}", scale)
        return mean([*clipped.values()], [weights[client] for client in clipped])
