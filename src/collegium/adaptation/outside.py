"""A hospital outside the federation: its images adapt the models, its labels only score them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from torch import Tensor, nn

from collegium.adaptation._norms import batch_norms, use_batch_statistics
from collegium.adaptation.base import (
    GLOBAL,
    AdaptationResult,
    Adapter,
    Deliver,
    Sources,
)
from collegium.adaptation.routing import has_routers, routed_network
from collegium.core.dataset import Dataset, UnlabelledDataset
from collegium.core.payloads import Metric
from collegium.core.seals import read_sealed
from collegium.core.tensors import Tensors
from collegium.errors import DataError
from collegium.models.files import import_model
from collegium.tasks import PROBABILITY, CaseScores, Task, metrics_of

INDEX_FILE = "index.json"
"""In the folder of the models: which are the server's and which are personal ones."""

SETTINGS_FILE = "settings.json"
"""In the same folder: the settings that are needed to use the models without the run."""

_RESTORE = "copy it again, or remove the folder and resume the run"


class ModelFiles(Mapping[str, Tensors]):
    """Models in a folder, by the stem of their file; each access reads the file again.

    So code that needs them one after the other holds one at a time.

    Attributes:
        server: the names of the server's own models; the others are sites' personal models.

    Raises:
        DataError: the folder holds none.
        CheckpointError: the index, or a model that is read, is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
        if not self._files:
            raise DataError(f"{folder} holds no models (*.safetensors); finish the run first")
        index = folder / INDEX_FILE
        roles = read_sealed(index, _RESTORE) if index.exists() else {}
        self.server = tuple(roles["server"]) if roles else (GLOBAL,)

    def __getitem__(self, name: str) -> Tensors:
        return import_model(self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class ScoredAdaptation:
    """The result of adapting to one site, with scores.

    Attributes:
        result: the adapter's result.
        scores: by case, under pseudonyms; if several models predict, the mean of their scores.
        seconds: duration of the adaptation without scoring.
        by_step: the scores after every step, as ``account.json`` holds them; see `StepScorer`.
            None: the adapter recorded none.
    """

    result: AdaptationResult
    scores: Sequence[CaseScores]
    seconds: float
    by_step: Mapping[str, Any] | None = None


def adapt_and_score(
    adapter: Adapter,
    sources: Sources,
    data: Dataset,
    *,
    on_prediction: Deliver | None = None,
) -> ScoredAdaptation:
    """Adapt models to a site's images, and score the predictions by its labels.

    Scores of single steps, where an adapter records them, are for the record alone: neither the
    adapter nor anything else learns of them.

    Args:
        adapter: the adapter; it does not see the labels.
        sources: the deployed models.
        data: all cases of the site, with labels.
        on_prediction: called with every prediction; its time does not count as the adaptation's.

    Raises:
        ConfigError: the adapter does not suit the models or the task.
        DataError: the site has no cases.
    """
    if len(data) == 0:
        raise DataError("the site outside has no cases; add some or remove it from the federation")
    scorer, steps = _Scorer(sources.task, data, on_prediction), StepScorer(sources.task, data)

    def deliver(model: str, index: int, prediction: Tensor) -> None:
        scorer(model, index, prediction)
        steps.restart()

    start = time.perf_counter()
    steps.restart()
    result = adapter.adapt(replace(sources, watch=steps), UnlabelledDataset(data), deliver)
    seconds = time.perf_counter() - start - scorer.seconds - steps.seconds
    return ScoredAdaptation(result, scorer.rows(), seconds, steps.summary())


class StepScorer:
    """Scores predictions after every step of an adaptation, and takes the time of the steps.

    Only the metric that selects models is computed. The time of a step is what passes between two
    looks at a case, or from its start; the predictions that an adapter delivers take none of it.

    Args:
        task: scores.
        data: the cases, with labels.

    Attributes:
        seconds: the time that making and scoring predictions took.
    """

    def __init__(self, task: Task, data: Dataset) -> None:
        self._task, self._data = task, data
        self._scores: dict[int, dict[int, CaseScores]] = {}
        self._times: dict[int, float] = {}
        self._mark = 0.0
        self.seconds = 0.0

    def restart(self) -> None:
        """Begin to count the time of a step."""
        self._mark = time.perf_counter()

    def __call__(self, step: int, predictions: Iterable[tuple[int, Tensor]]) -> None:
        """Score predictions after so many steps. See `collegium.adaptation.base.Watch`."""
        start, metric = time.perf_counter(), (self._task.metric,)
        self._times[step] = self._times.get(step, 0.0) + start - self._mark
        for index, prediction in predictions:
            example = self._data.example(index)
            on_device = prediction.to(example.batch["image"].device)
            row = self._task.scores(on_device, example, metric)
            self._scores.setdefault(step, {})[index] = {"patient": example.patient, **row}
        self.restart()
        self.seconds += self._mark - start

    def summary(self) -> dict[str, Any] | None:
        """Return what was found, None without steps.

        ``metric`` and ``unit``; by step, in the order of ``steps``: ``mean`` and ``deviation`` of
        the metric over the ``cases`` for which it is defined (the deviation divided by their
        number; null of a metric of all cases together), null without any; and ``seconds``, those
        that it took all cases together to come so far.
        """
        metric = self._task.metric
        of_set = metrics_of(self._task).get(metric, Metric()).of_set
        found: dict[str, list[Any]] = {name: [] for name in ("mean", "deviation", "cases")}
        for step in sorted(self._scores):
            scores = self._scores[step]
            rows = self._task.add_set_scores([scores[index] for index in sorted(scores)])
            values = [row[metric] for row in rows if row[metric] is not None]
            found["mean"].append(fmean(values) if values else None)
            found["deviation"].append(pstdev(values) if values and not of_set else None)
            found["cases"].append(len(values))
        if not self._scores:
            return None
        times = [self._times[step] for step in sorted(self._scores)]
        about = {"metric": metric, "unit": self._task.units.get(metric, "")}
        return {**about, "steps": sorted(self._scores), **found, "seconds": [*accumulate(times)]}


class _Scorer:
    """Scores predictions as they are delivered, under pseudonyms."""

    def __init__(self, task: Task, data: Dataset, on_prediction: Deliver | None) -> None:
        self._task, self._data, self._on_prediction = task, data, on_prediction
        self._scores: dict[str, dict[int, CaseScores]] = {}
        self._patients: dict[int, str] = {}
        self.seconds = 0.0

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Score one prediction."""
        start = time.perf_counter()
        example = self._data.example(index)
        self._patients[index] = example.patient
        scores = self._task.scores(prediction.to(example.batch["image"].device), example)
        row = {"patient": example.patient, **scores}
        self._scores.setdefault(model, {})[index] = row
        if self._on_prediction is not None:
            self._on_prediction(model, index, prediction)
        self.seconds += time.perf_counter() - start

    def rows(self) -> list[CaseScores]:
        """Return a row for each case, in order."""
        by_model = [
            self._task.add_set_scores([scores[index] for index in sorted(scores)])
            for scores in self._scores.values()
        ]
        pseudonyms: dict[str, str] = {}
        rows = []
        for position, index in enumerate(sorted(self._patients)):
            pseudonym = f"outside-p{len(pseudonyms) + 1:03d}"
            patient = pseudonyms.setdefault(self._patients[index], pseudonym)
            about = {"case": f"outside-c{index + 1:03d}", "patient": patient}
            rows.append(about | _mean([scores[position] for scores in by_model]))
        return rows


def _mean(by_model: Sequence[CaseScores]) -> dict[str, float | None]:
    """Return the mean of every metric over the models; None if one of the scores is.

    The probabilities of several models stand one by one, under ``_p<class>_<model>``: an area under
    a curve is that of each model, and not that of their mean.
    """
    mean: dict[str, float | None] = {}
    for name in by_model[0]:
        if name != "patient":
            values = [scores[name] for scores in by_model]
            if name.startswith(PROBABILITY) and len(values) > 1:
                mean |= {f"{name}_{number}": value for number, value in enumerate(values)}
                continue
            defined = [value for value in values if value is not None]
            mean[name] = sum(defined) / len(values) if len(defined) == len(values) else None
    return mean


def adapted_network(network: nn.Module, model: Mapping[str, Tensor]) -> nn.Module:
    """Return the network that a model belongs to, an adapted or a plain one.

    A model of `Routing` needs a network that mixes weights, one of `Tent` has no running
    statistics: both predict with the statistics of the batch, so predict as many images at once as
    in the adaptation. All other models belong to the network as it is.

    Args:
        network: a new network, as from `Sources.network`; it is changed and returned.
        model: `AdaptationResult.model`, or what `collegium.models.files.import_model` read of it.

    Raises:
        ConfigError: the model has routers, and belongs to another network.
    """
    if has_routers(model):
        return routed_network(network, model)
    tracked = [name for name, layer in batch_norms(network).items() if layer.track_running_stats]
    if tracked and not any(f"{name}.running_mean" in model for name in tracked):
        use_batch_statistics(network)
    return network
