"""Membership inference: was a patient among those that a model was trained on?

A patient's score is the mean over their cases, and a high one speaks for membership:

- "threshold": minus the loss (Yeom et al., "Privacy risk in machine learning", CSF 2018,
  https://arxiv.org/abs/1709.01604).
- "lira": the offline likelihood ratio of Carlini et al., "Membership inference attacks from first
  principles" (IEEE S&P 2022, https://arxiv.org/abs/2112.03570). With phi = log(p / (1 - p)) and
  p = exp(-loss), it is the share of a normal distribution below phi of the model, where mean and
  deviation are those of phi under shadow models that the patient was not trained on. As the paper
  advises for few shadow models, all patients have one deviation.

Members are a site's training cases and non-members its test cases, so that this needs the site's
data, and runs where they are. It measures what a model gives away, and no attacker has as much.
Single sites may be too small for that, so that the scores of all sites' patients are also taken
together, each under the model of its own site: by one threshold for all of them, as somebody would
who knows no site. Where sites differ both in their losses and in their shares of members, that
tells something too.

Deviations: a shadow model is trained at the site alone, from the run's initial model, on a random
half of these patients, with as many local steps or epochs as the run has in all, and a constant
learning rate. For losses that are no minus log-probability, such as Dice, phi is the same function
of the loss, and only the order of scores has a meaning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from collegium.core.dataset import Batch, ConcatDataset, Dataset, Example, full_mask
from collegium.core.payloads import GLOBAL, PERSONAL
from collegium.core.randomness import permutation
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError
from collegium.evaluation.results import ROWS_FILE, read_rows
from collegium.evaluation.scores import final_scores, mean, rows_of, site_means
from collegium.experiment.config.building import task_of
from collegium.experiment.finished import finished_jobs
from collegium.models.files import import_model

if TYPE_CHECKING:
    from collegium.experiment.federation import OpenedExperiment
    from collegium.experiment.grid import Job
    from collegium.runtime.client import ClientRuntime
    from collegium.training.loop import LocalTraining

Scores = NDArray[np.float64]
Sides = tuple[Scores, Scores]
"""The scores of members, and of others."""

Method = Literal["threshold", "lira"]

LEAST = 2
"""Fewer patients on a side tell nothing."""

ALL_SITES = "all sites"
"""In place of a site: the scores of all sites together. No site can have a name with a space."""


@dataclass(frozen=True)
class Separation:
    """The separation of members from non-members by a score.

    Attributes:
        auc: area under the ROC curve; 0.5 is a guess.
        tpr: the largest share of members that is found while no more than ``fpr`` of the
            non-members are taken for members.
        fpr: that limit.
        advantage: the largest difference of both shares over all thresholds.
        p: of a one-sided Mann-Whitney test: the probability of such scores, or clearer ones, if
            they told nothing.
        members: number of members.
        others: number of non-members.
    """

    auc: float
    tpr: float
    fpr: float
    advantage: float
    p: float
    members: int
    others: int


@dataclass(frozen=True)
class MembershipResult:
    """The result of one attack on one model with the data of one site, or of `ALL_SITES`.

    Attributes:
        job: the training, in words.
        algorithm: label of the algorithm.
        seed: the seed.
        site: the site whose patients are told apart.
        model: "global" or "personal".
        attack: "threshold" or "lira".
        found: the separation.
        metric: what the run scored of test cases, and selects models by.
        score: the model's mean of that on the site's test patients, of `ALL_SITES` the mean over
            sites; None: the run has none, or it is undefined.
    """

    job: str
    algorithm: str
    seed: int
    site: str
    model: str
    attack: Method
    found: Separation
    metric: str
    score: float | None


def separate(members: Scores, others: Scores, *, fpr: float = 0.01) -> Separation:
    """Return how well a score tells members from non-members.

    Args:
        members: scores of members, higher for those who look like members.
        others: scores of non-members.
        fpr: the largest share of false positives, from 0 to 1, at which members are counted.

    Raises:
        DataError: there are fewer than two of either, or a score is NaN.
    """
    from scipy.stats import mannwhitneyu
    from sklearn.metrics import roc_auc_score, roc_curve

    if min(len(members), len(others)) < LEAST:
        raise DataError(
            f"{len(members)} members and {len(others)} non-members cannot be told apart; name a "
            f"site with at least {LEAST} training and {LEAST} test patients"
        )
    scores = np.concatenate([members, others])
    if np.isnan(scores).any():
        raise DataError("a loss is NaN, and nothing can be inferred from it; lower training.lr")
    truth = np.repeat([1, 0], [len(members), len(others)])
    scores = np.nan_to_num(scores)  # infinite ones stay the outermost
    false, true, _ = roc_curve(truth, scores, drop_intermediate=False)
    return Separation(
        auc=float(roc_auc_score(truth, scores)),
        tpr=float(true[false <= fpr].max()),
        fpr=fpr,
        advantage=float((true - false).max()),
        p=float(mannwhitneyu(members, others, alternative="greater").pvalue),
        members=len(members),
        others=len(others),
    )


def likelihood_scores(phi: Scores, shadow: Scores, outside: NDArray[np.bool_]) -> Scores:
    """Return the offline likelihood-ratio score of each patient, from 0 to 1.

    Args:
        phi: of the model, (patients,).
        shadow: of the shadow models, (models, patients).
        outside: whether a shadow model was not trained on a patient, (models, patients).

    Raises:
        DataError: every shadow model was trained on some patient, so that there are too few.
    """
    from scipy.stats import norm

    count = outside.sum(0)
    if (count == 0).any():
        raise DataError(
            "every shadow model was trained on some patient; train more of them (--shadows)"
        )
    means = np.where(outside, shadow, 0.0).sum(0) / count
    deviations = np.where(outside, shadow - means, 0.0)
    freedom = max(int(outside.sum()) - len(phi), 1)
    spread = math.sqrt(float(np.square(deviations).sum()) / freedom)
    found: Scores = norm.cdf((phi - means) / max(spread, 1e-12))
    return found


def confidence(losses: Scores) -> Scores:
    """Return phi = log(p / (1 - p)) with p = exp(-loss), of losses that are not negative."""
    return -np.log(np.expm1(np.clip(losses, 1e-12, 500.0)))


def infer_memberships(
    output: Path, *, shadows: int = 0, fpr: float = 0.01
) -> list[MembershipResult]:
    """Attack the global and personal models of a finished run with the data of every site.

    A site with fewer than two training or test patients counts among all sites only.

    Args:
        output: the output folder of the run.
        shadows: how many shadow models are trained for each job and site; 0: "threshold" alone.
        fpr: see `separate`.

    Raises:
        CheckpointError: there is no run.
        ConfigError: the sites' models are on other machines, or a number cannot work.
        DataError: no training is finished, or no site has patients enough.
    """
    if shadows < 0 or not 0 <= fpr < 1:
        raise ConfigError(
            f"shadows is {shadows} and the limit of false positives {fpr}; choose 0 or more, and "
            f"a share from 0 to below 1"
        )
    with finished_jobs(output, keeps="data", needs="memberships can be inferred in") as run:
        opened, jobs = run
        found = [result for job in jobs for result in _of_job(opened, job, shadows, fpr)]
    if not found:
        raise DataError(
            f"{output} holds no model of a finished training whose site has {LEAST} training and "
            f"{LEAST} test patients; continue with 'collegium resume'"
        )
    return found


def _of_job(
    opened: OpenedExperiment, job: Job, shadows: int, fpr: float
) -> Iterator[MembershipResult]:
    metric = task_of(job.config).metric
    tested, together = _test_scores(job, metric), dict[tuple[str, Method], list[Sides]]()

    def result(site: str, kind: str, attack: Method, sides: Sides) -> MembershipResult:
        found, score = separate(*sides, fpr=fpr), tested.get((kind, site))
        return MembershipResult(
            job.name, job.algorithm.label, job.seed, site, kind, attack, found, metric, score
        )

    for site, kind, attack, sides in _site_scores(opened, job, shadows):
        together.setdefault((kind, attack), []).append(sides)
        if _suffice(sides):
            yield result(site, kind, attack, sides)
    for (kind, attack), parts in together.items():
        members, others = (np.concatenate(side) for side in zip(*parts, strict=True))
        if len(parts) > 1 and _suffice((members, others)):
            yield result(ALL_SITES, kind, attack, (members, others))


def _suffice(sides: Sides) -> bool:
    return min(map(len, sides)) >= LEAST


def _site_scores(
    opened: OpenedExperiment, job: Job, shadows: int
) -> Iterator[tuple[str, str, Method, Sides]]:
    """Yield site, kind of model, attack, and the scores of members and of others."""
    holder = opened.holder(job)
    for site, client in sorted(opened.clients(holder).items()):
        cases = SiteCases(client)
        folder = holder.folder / "clients" / site
        files = {kind: folder / f"{kind}.safetensors" for kind in (GLOBAL, PERSONAL)}
        models = {kind: import_model(file) for kind, file in files.items() if file.is_file()}
        if len(cases.patients) < LEAST or not models:
            continue
        known = cases.shadow_models(shadows) if shadows else None
        for kind, model in models.items():
            losses = cases.losses(model)
            scores: dict[Method, Scores] = {"threshold": -losses}
            if known is not None:
                scores["lira"] = likelihood_scores(confidence(losses), *known)
            for attack, values in scores.items():
                yield site, kind, attack, (values[cases.member], values[~cases.member])


def _test_scores(job: Job, metric: str) -> dict[tuple[str, str], float]:
    """Return the mean test score by kind of model and site, of `ALL_SITES` the mean over sites.

    Args:
        job: a training; without results, as one that was stopped in its last second, it has none.
        metric: which score.
    """
    file = job.folder / ROWS_FILE
    if not file.exists():
        return {}
    found = dict[tuple[str, str], float]()
    means = site_means(final_scores(read_rows([file]), metric)).dropna(subset="value")
    for kind, own in means.groupby("model"):
        found |= {(str(kind), row.site): row.value for row in rows_of(own)}
        found[str(kind), ALL_SITES] = mean(own["value"].to_list())
    return found


class SiteCases:
    """The training and test cases of a site, by patient.

    Args:
        client: the site.

    Attributes:
        patients: the patients; those that are trained on first.
        member: whether each of them was trained on, (patients,).
    """

    def __init__(self, client: ClientRuntime) -> None:
        self._client, self._training = client, client.training
        site = client.site
        self._data = ConcatDataset([site.train, site.test])
        self._examples = [self._data.example(index) for index in range(len(self._data))]
        names = [example.patient for example in self._examples]
        self.patients = list(dict.fromkeys(names))
        self._of = np.array([self.patients.index(name) for name in names], np.int64)
        trained = set(names[: len(site.train)])
        self.member = np.array([name in trained for name in self.patients], np.bool_)

    def count(self, *, member: bool) -> int:
        """Return how many patients are members, or are not."""
        return int((self.member == member).sum())

    def losses(self, model: Tensors) -> Scores:
        """Return the mean loss of each patient's cases in evaluation mode, (patients,).

        Args:
            model: a whole model.
        """
        losses = np.array([*case_losses(self._training, model, self._examples)], np.float64)
        sums = np.bincount(self._of, losses, len(self.patients))
        return np.asarray(sums / np.bincount(self._of, minlength=len(self.patients)), np.float64)

    def shadow_models(self, count: int) -> tuple[Scores, NDArray[np.bool_]]:
        """Train shadow models, each on another half of the patients.

        Args:
            count: how many.

        Returns:
            phi of every patient under each, and whether the patient was left out, (models,
            patients) both.
        """
        client, config = self._client, self._training.config
        rounds = client.rounds
        epochs = None if config.local_steps else rounds * config.local_epochs
        steps = rounds * config.local_steps if config.local_steps else None
        phi, outside = [], []
        for number in range(count):
            # pairs of halves: the second of a pair is trained on whom the first left out
            place = ("attack", "shadow", client.id, number // 2)
            order = permutation(len(self.patients), client.seed, *place)
            half = len(order) // 2
            chosen = order[:half] if number % 2 == 0 else order[half:]
            inside = np.isin(np.arange(len(order)), chosen)
            part = SomeCases(self._data, np.flatnonzero(inside[self._of]).tolist())
            model, _ = self._training.fit(
                client.initial_model, part, seed=client.seed, lr=config.lr, epochs=epochs,
                steps=steps, path=("attack", "shadow", client.id, number),
            )  # fmt: skip
            phi.append(confidence(self.losses(model)))
            outside.append(~inside)
        return np.stack(phi), np.stack(outside)


class SomeCases:
    """Some of the cases of a dataset.

    Args:
        data: the dataset.
        chosen: the numbers of the cases.
    """

    def __init__(self, data: Dataset, chosen: Sequence[int]) -> None:
        self._data, self._chosen = data, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def batch(self, indices: Sequence[int], rngs: Sequence[torch.Generator]) -> Batch:
        """Return samples. See `Dataset.batch`."""
        return self._data.batch([self._chosen[index] for index in indices], rngs)

    def example(self, index: int) -> Example:
        """Return one whole case."""
        return self._data.example(self._chosen[index])


@torch.no_grad()
def case_losses(
    training: LocalTraining, model: Tensors, examples: Iterable[Example]
) -> Iterator[float]:
    """Yield the loss of each whole case in evaluation mode; of several windows, their mean.

    Args:
        training: network and task.
        model: a whole model.
        examples: the cases, with their labels.
    """
    training.load(model)
    module, task = training.module.eval(), training.task
    for example in examples:
        total, count = 0.0, 0
        for batch in _windows(training, example.batch):
            size = len(batch["image"])
            total += float(task.loss(module(batch["image"]), batch)) * size
            count += size
        yield total / count


def _windows(training: LocalTraining, batch: Mapping[str, Any]) -> Iterator[Batch]:
    """Yield a case in windows as the network takes them, with label and mask."""
    image, label = batch["image"], batch["label"]
    if image.ndim < 4 or label.ndim != image.ndim - 1:  # a class, of a whole case
        yield {"image": image.to(training.device), "label": label.to(training.device)}
        return
    masks = batch.get("mask", full_mask(image))
    planes = [image, label.unsqueeze(1).float(), masks.unsqueeze(1)]
    cut = (training.task.windows(training.module, plane) for plane in planes)
    for window, labels, inside in zip(*cut, strict=True):
        yield {"image": window, "label": labels.squeeze(1).long(), "mask": inside.squeeze(1)}
