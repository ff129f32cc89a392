"""A hospital outside the federation: its images adapt the models, its labels only score them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium.adaptation.base import GLOBAL, Account, Adapted, Adapter, Sources, Unlabelled
from collegium.core.dataset import Dataset
from collegium.core.tensors import Tensors
from collegium.errors import DataError
from collegium.models.files import import_model
from collegium.tasks import Task

INDEX = "index.json"
"""In the folder of the models: which are the server's and which are personal ones."""

SETTINGS = "settings.json"
"""In the same folder: how the models are used where nothing else of the run is known."""

Scores = dict[str, Any]
"""A case's pseudonym and patient, and its metrics."""

See = Callable[[str, int, Tensor], None]
"""Takes name of the model, number of the case and prediction."""


class ModelFiles(Mapping[str, Tensors]):
    """Models in a folder, by the stem of their file; each is read anew at every look.

    So whoever needs them one after the other holds one at a time.

    Attributes:
        server: which of them are the server's own; the others are sites' personal models.

    Raises:
        DataError: the folder holds none.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}
        if not self._files:
            raise DataError(f"{folder} holds no models (*.safetensors); finish the run first")
        index = folder / INDEX
        roles = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {}
        self.server = tuple(roles["server"]) if isinstance(roles, dict) and roles else (GLOBAL,)

    def __getitem__(self, name: str) -> Tensors:
        return import_model(self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Outside:
    """What came of adapting to one site.

    Attributes:
        adapted: what the adapter ended with.
        scores: by case; where several models predict, the mean of their scores.
        seconds: that it took, scoring left out.
    """

    adapted: Adapted
    scores: Sequence[Scores]
    seconds: float


def adapt_and_score(
    adapter: Adapter, sources: Sources, data: Dataset, *, see: See | None = None
) -> Outside:
    """Adapt models to a site's images, and score the predictions by its labels.

    Args:
        adapter: the adapter; it does not see the labels.
        sources: the models that were handed out.
        data: all cases of the site, with labels.
        see: is shown every prediction; its time does not count as that of the adaptation.

    Raises:
        ConfigError: the adapter does not suit the models or the task.
        DataError: the site has no cases.
    """
    if len(data) == 0:
        raise DataError("the site outside has no cases; add some or take it out of the federation")
    scorer = _Scorer(sources.task, data, see)
    start = time.perf_counter()
    adapted = adapter.adapt(sources, Unlabelled(data), scorer)
    return Outside(adapted, scorer.rows(), time.perf_counter() - start - scorer.seconds)


class _Scorer:
    """Scores predictions as they are delivered, under pseudonyms."""

    def __init__(self, task: Task, data: Dataset, see: See | None) -> None:
        self._task, self._data, self._see = task, data, see
        self._found: dict[str, dict[int, Scores]] = {}
        self._patients: dict[int, str] = {}
        self.seconds = 0.0

    def __call__(self, model: str, index: int, prediction: Tensor) -> None:
        """Score one prediction."""
        start = time.perf_counter()
        example = self._data.example(index)
        self._patients[index] = example.patient
        scores = self._task.scores(prediction.to(example.batch["image"].device), example)
        row = {"patient": example.patient, **scores}
        self._found.setdefault(model, {})[index] = row
        if self._see is not None:
            self._see(model, index, prediction)
        self.seconds += time.perf_counter() - start

    def rows(self) -> list[Scores]:
        """Return a row for each case, in order."""
        scores = [
            self._task.complete([found[index] for index in sorted(found)])
            for found in self._found.values()
        ]
        names: dict[str, str] = {}
        rows = []
        for place, index in enumerate(sorted(self._patients)):
            patient = names.setdefault(self._patients[index], f"outside-p{len(names) + 1:03d}")
            about = {"case": f"outside-c{index + 1:03d}", "patient": patient}
            rows.append(about | _mean([of_model[place] for of_model in scores]))
        return rows


def _mean(found: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the mean of every metric; undefined where one of them is."""
    mean: dict[str, float | None] = {}
    for name in found[0]:
        if name != "patient":
            values = [scores[name] for scores in found]
            defined = [value for value in values if value is not None]
            mean[name] = sum(defined) / len(values) if len(defined) == len(values) else None
    return mean


def describe(account: Account) -> dict[str, Any]:
    """Return what an adaptation did, as JSON holds it."""
    layers = account.coefficients
    sources = list(account.sources)
    coefficients: dict[str, Any] = {
        "layers": list(layers),
        "sources": sources,
        "values": [[values[source] for source in sources] for values in layers.values()],
    }
    if account.spreads:
        spreads = [account.spreads[layer] for layer in layers]
        coefficients |= {
            "deviations": [[spread.deviations[name] for name in sources] for spread in spreads],
            "variation": [spread.variation for spread in spreads],
            "variation_deviation": [spread.variation_deviation for spread in spreads],
        }
    return {
        "sources": sources,
        "steps": account.steps,
        "losses": account.losses,
        "chosen": account.chosen,
        "over": account.over,
        "coefficients": coefficients if layers else None,
        "notes": account.notes,
    }
