"""Selection of the round whose model is tested and used, by scores on validation cases.

The server decides, for every site and for the federation as a whole, as it receives the scores of a
round; a site keeps the models of the rounds that the server names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from collegium.core.payloads import (
    ALL_CASES,
    CASES,
    EVENTS,
    GLOBAL,
    OTHER_GLOBAL,
    PERSONAL,
)
from collegium.core.settings import NonNegativeInt, settings
from collegium.core.tensors import Tensors
from collegium.runtime.state import Store
from collegium.tasks import NON_SCORE_KEYS, count_events, is_hidden

KEPT = "kept"
"""The folder of kept models, of the server and of a site."""

FEDERATION = ""
"""Among the names of sites: all of them together."""

WINDOW = 3
"""How many evaluated rounds a smoothed score is the mean of."""


@settings
class Selection:
    """The rule that selects the round of a model, the same for all methods and sites.

    Attributes:
        by: "site": every site takes, of each model that it may use, the round that did best on its
            own validation cases, as it would if it trained alone. "federation": all sites take the
            round with the best mean over the validation cases of all sites, of global models and of
            personal ones. For sites outside the global model is the federation's choice always.
        round: "best": the best of the evaluated rounds, the earlier of equals. "last": the last of
            them. "smoothed": the round with the best mean of its own score and the scores of the
            two evaluated rounds before it; until a third one is evaluated, the last.
        min_events: The last round is taken if the validation cases of whoever chooses hold fewer
            patients of the rarer class or, without classes, fewer patients with a defined score;
            "federation" adds them up over the sites.
    """

    by: Literal["site", "federation"] = "site"
    round: Literal["best", "last", "smoothed"] = "best"
    min_events: NonNegativeInt = 6


DEFAULT = Selection()
"""Every site takes its own best round."""


class Chosen(TypedDict):
    """A round that was chosen.

    ``score`` is what it was chosen by, None if undefined; ``events`` how many patients that depends
    on, see `collegium.tasks.count_events`.
    """

    round: int
    score: float | None
    events: int


Choices = Mapping[str, Mapping[str, Chosen]]
"""By kind of model the choice of each site, and of `FEDERATION`."""


def judged(rule: Selection, scores: Sequence[float | None]) -> float | None:
    """Return the score by which the last of the evaluated rounds is compared with the others.

    Args:
        rule: the rule.
        scores: the mean scores of all evaluated rounds; None is undefined.
    """
    return mean_defined(scores[-WINDOW:]) if rule.round == "smoothed" else scores[-1]


def choose(
    rule: Selection,
    chosen: Chosen | None,
    scores: Sequence[float | None],
    *,
    number: int,
    events: int,
) -> Chosen:
    """Return the choice between the round just evaluated and the one chosen before.

    An undefined score never replaces a defined one; among undefined ones the newest is taken.

    Args:
        rule: the rule.
        chosen: the choice before; None in the first round.
        scores: the mean scores of all evaluated rounds, the higher the better; None is undefined.
        number: the number of the last of them.
        events: how many patients the scores depend on.
    """
    score = judged(rule, scores)
    newest = Chosen(round=number, score=score, events=events)
    unsmoothed = rule.round == "smoothed" and len(scores) <= WINDOW
    if chosen is None or rule.round == "last" or unsmoothed or events < rule.min_events:
        return newest
    best = chosen["score"]
    if best is None or (score is not None and score > best):
        return newest
    return Chosen(round=chosen["round"], score=best, events=events)


class Selector:
    """The choices of all sites and of the federation, evaluation by evaluation.

    Args:
        rule: the rule.
        metric: the metric that it is applied to, the higher the better.
    """

    def __init__(self, rule: Selection, metric: str) -> None:
        self._rule, self._metric = rule, metric
        self._scores: dict[tuple[str, str], list[float | None]] = {}
        self.choices: dict[str, dict[str, Chosen]] = {}
        """The choices so far."""

    def restore(self, scores: Mapping[str, Mapping[str, float | None]], choices: Choices) -> None:
        """Continue after an evaluation that `add` has seen before a restart.

        Args:
            scores: what it returned.
            choices: the choices then.
        """
        for kind, by_site in scores.items():
            for site, score in by_site.items():
                self._scores.setdefault((kind, site), []).append(score)
        for kind, by_chooser in choices.items():
            self.choices.setdefault(kind, {}).update(by_chooser)

    def add(
        self, number: int, rows: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
    ) -> dict[str, dict[str, float | None]]:
        """Choose again after an evaluation, and return the mean scores of sites and federation.

        Args:
            number: the round.
            rows: the scores on validation cases, by site and kind of model.
        """
        found: dict[str, dict[str, float | None]] = {}
        for kind in sorted({kind for kinds in rows.values() for kind in kinds}):
            own = {site: kinds.get(kind, []) for site, kinds in rows.items()}
            values = {site: scores_of(cases, self._metric) for site, cases in own.items()}
            events = {site: count_events(cases, self._metric) for site, cases in own.items()}
            values[FEDERATION] = [value for some in values.values() for value in some]
            events[FEDERATION] = sum(events.values())
            for chooser, scores in values.items():
                mean = found.setdefault(kind, {})[chooser] = mean_defined(scores)
                history = self._scores.setdefault((kind, chooser), [])
                history.append(mean)
                chosen = self.choices.setdefault(kind, {})
                chosen[chooser] = choose(
                    self._rule,
                    chosen.get(chooser),
                    history,
                    number=number,
                    events=events[chooser],
                )
        return found

    def federation_scores(self) -> list[float | None]:
        """Return the scores by which the federation compares the rounds evaluated so far.

        They are those of personal models where there are any, otherwise of the global one.
        """
        kind = PERSONAL if (PERSONAL, FEDERATION) in self._scores else GLOBAL
        scores = self._scores.get((kind, FEDERATION), [])
        first = WINDOW if self._rule.round == "smoothed" else 1
        return [judged(self._rule, scores[n - first : n]) for n in range(first, len(scores) + 1)]

    def of(self, kind: str, site: str) -> Chosen | None:
        """Return the choice of a kind of model that a site uses; None if there is none.

        Args:
            kind: kind of the model.
            site: the site.
        """
        return self.choices.get(kind, {}).get(site if self._rule.by == "site" else FEDERATION)


def choices_at(choices: Choices, site: str, rule: Selection) -> dict[str, Chosen]:
    """Return the choice that each of the models that a site tests comes from, by kind.

    Args:
        choices: the choices at the end.
        site: the site.
        rule: the rule.
    """
    own = {kind: found[site] for kind, found in choices.items() if site in found}
    common = {kind: found[FEDERATION] for kind, found in choices.items() if FEDERATION in found}
    first, second = (own, common) if rule.by == "site" else (common, own)
    if GLOBAL in common:  # a site that was away in every evaluation uses the federation's choice
        other = second.get(GLOBAL, common[GLOBAL])
        first = {GLOBAL: common[GLOBAL], **first, OTHER_GLOBAL[rule.by]: other}
    return first


def mean_row(rows: Sequence[Mapping[str, Any]], metric: str) -> list[dict[str, Any]]:
    """Return one row of scores that stands for all, without saying anything of a single case.

    Args:
        rows: scores by case; see `collegium.tasks.CaseScores`.
        metric: the metric by which models are selected; the row counts the cases that have it,
            and holds what `collegium.tasks.count_events` returns.

    Returns:
        The row, whose case and patient are `collegium.tasks.ALL_CASES`; nothing for no rows.
    """
    if not rows:
        return []
    every = dict.fromkeys(name for row in rows for name in row)
    scores = [name for name in every if name not in NON_SCORE_KEYS and not is_hidden(name)]
    defined = sum(row[metric] is not None for row in rows)
    means = {name: mean_defined([row.get(name) for row in rows]) for name in scores}
    counts = {CASES: defined, EVENTS: count_events(rows, metric)}
    return [{"case": ALL_CASES, "patient": ALL_CASES, **counts, **means}]


def scores_of(rows: Iterable[Mapping[str, Any]], metric: str) -> list[float | None]:
    """Return a metric of every case; a row that stands for several counts as often.

    Args:
        rows: scores by case, or one row of `mean_row`.
        metric: the metric.
    """
    return [value for row in rows for value in [row[metric]] * row.get(CASES, 1)]


def mean_defined(values: Sequence[float | None]) -> float | None:
    """Return the mean of the defined values; None if there is none."""
    defined = [value for value in values if value is not None]
    return sum(defined) / len(defined) if defined else None


class KeptModels:
    """The models of one kind that are kept, a file for each round.

    Args:
        root: folder of the files, such as ``000004.state``.
    """

    def __init__(self, root: Path) -> None:
        self._store = Store(root)

    def clean(self) -> None:
        """Remove the rest of an interrupted write. See `Store.clean`."""
        self._store.clean()

    def keep(self, model: Tensors, number: int) -> None:
        """Keep the model of a round.

        Args:
            model: the model.
            number: the round.
        """
        self._store.save(f"{number:06d}", {"model": model})

    def drop_all_but(self, numbers: Collection[int]) -> None:
        """Drop all models but those of some rounds.

        Instead of one that is missing, since the site was away, the one before it stays, or else
        the first.

        Args:
            numbers: the rounds.
        """
        names = self._store.names()
        wanted = {f"{number:06d}" for number in numbers}
        for name in {*names} - {
            max([n for n in names if n <= w], default=names[0]) for w in wanted if names
        }:
            self._store.remove(name)

    def load(self, number: int | None = None) -> Tensors | None:
        """Return the model of a round, or of the newest that is kept; None if it is not."""
        name = max(self._store.names(), default="") if number is None else f"{number:06d}"
        if not name or not self._store.path(name).exists():
            return None
        model: Tensors = self._store.load(name)["model"]
        return model
