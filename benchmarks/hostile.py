"""Harm that one hostile site does to the others, under a plain mean and under robust means.

FedAvg, with and without a robust mean, trains as often as there are attacks: one site sends, in
place of the model w that it has trained from the model s that it received,

    scaled       s + 10 (w - s)
    reversed     s - (w - s)
    reversed x10 s - 10 (w - s)
    noise        s + noise as long as w - s
    labels       w, trained on labels in reverse order: of two classes each is called the other, of
                 a mask with one structure foreground and background are exchanged
    little       s + m - 1.5 d, with m and d the mean and the standard deviation of each coordinate
                 over the other sites' updates (Baruch et al., 2019)
    extremes     s and of each coordinate the other sites' least update where m is positive, and
                 their largest where it is not (after Fang et al., 2020)

or is honest. It changes parameters only, so that the server's border finds nothing. In the last two
it knows what the others send. What is printed is the mean test score of all sites but the hostile
one, of the global model after the last round, with the standard deviation over the trainings;
nothing is selected. "each alone" is what they reach without a federation.

Without an experiment file there are five phantom hospitals; --quick measures the mean, the median
and Krum under two attacks. Krum needs five sites to stand a hostile one, and is left out where
there are fewer.

    python benchmarks/hostile.py [--quick] [--site NAME] [--seeds N] [EXPERIMENT [KEY=VALUE ...]]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common.measuring import verdict

from collegium import FedAvg, Local, Robust, Tensors
from collegium.core.algorithm import Algorithm, check_needs
from collegium.core.dataset import Batch, Dataset, Example
from collegium.core.message import pack, unpack
from collegium.core.model_parts import find_parts
from collegium.core.randomness import ambient, generator
from collegium.data.phantoms import make_federation
from collegium.errors import ConfigError
from collegium.experiment.config.experiment import ExperimentConfig, load_config, parse_config
from collegium.experiment.federation import OpenedExperiment
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.federation import Federation
from collegium.runtime.process import prepare
from collegium.runtime.requests import Request, Response
from collegium.runtime.selection import Selection

RULES: Mapping[str, Algorithm] = {
    "mean": FedAvg(),
    "median": Robust(rule="median"),
    "trimmed mean, 1/4": Robust(rule="trimmed_mean", trim=0.25),
    "norm bound, 1 x median": Robust(rule="norm_bound", factor=1.0),
    "krum": Robust(rule="krum", hostile=1),
    "multi-krum of 3": Robust(rule="krum", hostile=1, selected=3),
}
"""FedAvg by the mean that its server takes."""

HARM = 3.0
"""At least so many times as much the worst attack takes under the mean as under the median."""

DEVIATIONS = 1.5
"""The z of "little". By the paper's rule, with s = floor(n / 2 + 1) - m of n - m honest sites to
win over, z is the normal quantile of (n - m - s) / (n - m): 1.43 for 24 hostile sites of 50, and 0
for one of five, which is the honest sites' mean."""


@dataclass(frozen=True)
class Knowledge:
    """The knowledge of the hostile site when it sends.

    Attributes:
        number: the round.
        update: what it has learnt itself.
        others: what the other sites have learnt, and send.
    """

    number: int
    update: Tensors
    others: Sequence[Tensors]


Change = Callable[[Knowledge], Tensors]
"""Returns the update that the hostile site sends."""


def noise(known: Knowledge) -> Tensors:
    """Return noise that is as long as the update.

    Args:
        known: what the site knows.
    """
    rng = generator(0, "hostile", known.number)
    drawn = known.update.map(lambda t: torch.randn(t.shape, generator=rng, dtype=t.dtype))
    length: float = (known.update.dot(known.update) / drawn.dot(drawn)) ** 0.5
    return length * drawn


def little(known: Knowledge) -> Tensors:
    """Return the mean of the others' updates less some of their standard deviations.

    Args:
        known: what the site knows.
    """
    return stacked(known.others, lambda sites: sites.mean(0) - DEVIATIONS * sites.std(0))


def extremes(known: Knowledge) -> Tensors:
    """Return of each coordinate the update of the site that is furthest against their mean.

    Args:
        known: what the site knows.
    """
    return stacked(
        known.others,
        lambda sites: torch.where(sites.mean(0) > 0, sites.amin(0), sites.amax(0)),
    )


def stacked(sites: Sequence[Tensors], of: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    """Return what a function makes of each tensor, stacked over the sites.

    Args:
        sites: an update of each.
        of: the function, of a tensor whose first axis are the sites.
    """
    return sites[0].map(lambda *tensors: of(torch.stack(tensors)), *sites[1:])


ATTACKS: Mapping[str, Change | None] = {
    "honest": None,
    "scaled": lambda known: 10.0 * known.update,
    "reversed": lambda known: -1.0 * known.update,
    "reversed x10": lambda known: -10.0 * known.update,
    "noise": noise,
    "labels": None,
    "little": little,
    "extremes": extremes,
}
"""The update that the hostile site sends, by attack; None: the one that it has trained."""


@dataclass(frozen=True)
class Reversed:
    """A dataset whose labels are in reverse order.

    Attributes:
        data: the dataset.
        highest: the highest label.
    """

    data: Dataset
    highest: int

    def __len__(self) -> int:
        return len(self.data)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples with the wrong labels. See `Dataset.batch`."""
        return self._reverse(self.data.batch(indices, rngs))

    def example(self, index: int) -> Example:
        """Return one whole case with the wrong label."""
        example = self.data.example(index)
        return replace(example, batch=self._reverse(example.batch))

    def _reverse(self, batch: Batch) -> Batch:
        return {**batch, "label": self.highest - batch["label"]}


class HostileSite(InProcess):
    """An engine in which one site sends other parameters than it has trained.

    Args:
        federation: the federation.
        algorithm: what it runs.
        root: folder of the states.
        site: the hostile site.
        change: what it sends; None: what it has trained.
    """

    def __init__(
        self, federation: Federation, algorithm: Algorithm, root: Path, site: str,
        change: Change | None, *, seed: int, rounds: int,
    ) -> None:  # fmt: skip
        super().__init__(lambda: federation.clients(algorithm, seed=seed, root=root, rounds=rounds))
        self._site, self._change = site, change
        with ambient(0, "hostile"):
            self._names = find_parts(federation.builder(algorithm)()).trainable

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        """Answer, the hostile site last; see `collegium.runtime.requests.Transport`."""
        others = []
        for request in sorted(requests, key=lambda request: request.client == self._site):
            (response,) = super().exchange([request])
            if self._change is None or request.method != "train":
                yield response
                continue
            envelope = unpack(response.data)
            received = unpack(request.payload)["model"].select(self._names)
            trained: Tensors = envelope["reply"]["model"]
            update = trained.select(self._names) - received
            if request.client != self._site:
                others.append(update)
                yield response
                continue
            sent = self._change(Knowledge(request.round, update, others))
            envelope["reply"]["model"] = trained | (received + sent)
            yield replace(response, data=pack(envelope), signed=None)


def phantoms(folder: Path) -> ExperimentConfig:
    """Return an experiment over five phantom hospitals.

    Args:
        folder: where they are written.
    """
    path = make_federation(folder, 5, cases=16, size=32)
    training = {"optimizer": "adam", "lr": 5e-3, "batch_size": 4, "local_steps": 20}
    return parse_config({
        "name": "hostile", "federation": str(path), "rounds": 8, "algorithms": ["fedavg"],
        "model": {"name": "unet", "in_channels": 1, "channels": [8, 16], "num_res_units": 0},
        "training": training, "output": str(folder / "run"),
    })  # fmt: skip


def with_wrong_labels(federation: Federation, site: str) -> Federation:
    """Return the federation with the labels of one site's training cases in reverse order.

    Args:
        federation: the federation.
        site: the site.
    """
    own = federation.sites[site]
    labels = [own.train.example(index).batch["label"] for index in range(len(own.train))]
    highest = max(int(label.max()) for label in labels)
    wrong = replace(own, train=Reversed(own.train, highest))
    return replace(federation, sites={**federation.sites, site: wrong})


def score_of_others(
    federation: Federation, algorithm: Algorithm, site: str, attack: str, *, seed: int, rounds: int
) -> float:
    """Return the mean test score of all sites but one, after training with that one hostile.

    Args:
        federation: the federation.
        algorithm: what it runs.
        site: the hostile site.
        attack: a name among `ATTACKS`.
        seed: of the run.
        rounds: how many rounds.
    """
    if attack == "labels":
        federation = with_wrong_labels(federation, site)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        engine = HostileSite(
            federation, algorithm, root, site, ATTACKS[attack], seed=seed, rounds=rounds
        )
        run = federation.run(
            algorithm, engine, rounds=rounds, seed=seed, root=root, evaluate_every=rounds,
            selection=Selection(round="last"),
        )  # fmt: skip
        scores = run.execute()
    kind, metric = "global" if algorithm.has_global else "personal", federation.task.metric
    means: list[float] = []
    for name in federation.names:
        found = [case[metric] for case in scores[name][kind] if case.get(metric) is not None]
        if name != site and found:
            means.append(statistics.mean(found))
    return statistics.mean(means)


def rules_for(federation: Federation, names: Iterable[str]) -> dict[str, Algorithm]:
    """Return the rules for which the federation has enough sites; say which are left out.

    Args:
        federation: the federation.
        names: the rules, among `RULES`.
    """
    found = {}
    for name in names:
        algorithm = RULES[name]
        with ambient(0, "hostile"):
            parts = find_parts(federation.builder(algorithm)())
        try:
            check_needs(algorithm, federation.names, parts)
        except ConfigError as error:
            print(f"without {name}: {error}")
        else:
            found[name] = algorithm
    return found


def measure(
    federation: Federation, site: str, seeds: Sequence[int], rounds: int, *, quick: bool
) -> dict[str, dict[str, float]]:
    """Return by rule and attack the mean score over the seeds, and print it as it is known.

    Args:
        federation: the federation.
        site: the hostile site.
        seeds: of the runs.
        rounds: of each.
        quick: whether to measure mean, median and Krum under two attacks only.
    """
    attacks = ["honest", "reversed x10", "labels"] if quick else [*ATTACKS]
    rules = rules_for(federation, ["mean", "median", "krum"] if quick else RULES)

    def scores(algorithm: Algorithm, attack: str) -> list[float]:
        return [
            score_of_others(federation, algorithm, site, attack, seed=seed, rounds=rounds)
            for seed in seeds
        ]

    alone = in_words(scores(Local(), "honest"))
    print(f"| mean | {' | '.join(attacks)} |\n| --- |{' ---: |' * len(attacks)}")
    print(f"| each alone | {alone} |{'  |' * (len(attacks) - 1)}", flush=True)
    table = {}
    for name, algorithm in rules.items():
        found = {attack: scores(algorithm, attack) for attack in attacks}
        print(f"| {name} | {' | '.join(map(in_words, found.values()))} |", flush=True)
        table[name] = {attack: statistics.mean(each) for attack, each in found.items()}
    return table


def in_words(scores: Sequence[float]) -> str:
    """Return the mean of scores and, of two or more, their standard deviation.

    Args:
        scores: one of each training.
    """
    spread = f" ± {statistics.stdev(scores):.3f}" if len(scores) > 1 else ""
    return f"{statistics.mean(scores):.3f}{spread}"


def worst_loss(scores: Mapping[str, float]) -> float:
    """Return how much the worst attack takes.

    Args:
        scores: by attack.
    """
    return scores["honest"] - min(scores.values())


def main() -> int:
    """Measure, print the table, and return whether the median holds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("experiment", nargs="?", help="an experiment file")
    parser.add_argument("settings", nargs="*", help="settings that replace those of the file")
    parser.add_argument("--site", default="", help="the hostile site; by default the second")
    parser.add_argument("--seeds", type=int, default=3, help="how many trainings of each")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="mean, median and Krum under two attacks, one training of each",
    )
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    prepare(1)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.experiment:
            overrides = [*arguments.settings, "algorithms=[fedavg]", f"output={folder}/run"]
            config = load_config(arguments.experiment, overrides)
        else:
            config = phantoms(Path(folder))
        opened = OpenedExperiment(config)
        federation = opened.federation(opened.jobs[0])
        site = arguments.site or federation.names[1]
        if site not in federation.sites:
            parser.error(f"there is no site {site!r}; there are {', '.join(federation.names)}")
        seeds = range(1 if arguments.quick else arguments.seeds)
        count = "one training" if len(seeds) == 1 else f"{len(seeds)} trainings"
        print(f"{federation.task.metric} of the others, with {site} hostile; {count} of each")
        table = measure(federation, site, seeds, config.rounds, quick=arguments.quick)
    ratio = worst_loss(table["mean"]) / max(worst_loss(table["median"]), 1e-3)
    what = "loss by the worst attack under the mean, by that under the median"
    return 0 if verdict(what, ratio, HARM, "times", least=True) else 1


if __name__ == "__main__":
    sys.exit(main())
