"""Trained models applied at a hospital outside: from a folder of images to predictions."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from collegium import __version__
from collegium.adaptation import outside
from collegium.adaptation.base import GLOBAL, AdaptationResult, Sources, nobody_watches
from collegium.core.dataset import UnlabelledDataset
from collegium.core.files import new_folder, write_atomically
from collegium.deploy.cases import open_cases
from collegium.deploy.models import OpenedModels
from collegium.deploy.predicting import PredictionWriter
from collegium.errors import ConfigError
from collegium.evaluation.answers import answer_lines
from collegium.evaluation.comparisons import adapting_table
from collegium.evaluation.report.account import write_account
from collegium.evaluation.results import results_frame, verdict_settings
from collegium.evaluation.scores import NO_ADAPTER, SPLITS
from collegium.experiment.config.building import build_adapter
from collegium.experiment.config.experiment import AdapterConfig, to_dict
from collegium.experiment.job_results import ACCOUNT_FILE
from collegium.experiment.model_settings import write_settings
from collegium.experiment.preflight import check_device
from collegium.models.files import export_model
from collegium.tasks import NON_SCORE_KEYS

MOST_PICTURES = 24
"""How many cases the account shows."""


def adapt_folder(
    opened: OpenedModels,
    images: Path,
    adapter: AdapterConfig,
    output: Path,
    *,
    labels: Path | None = None,
    device: str = "cpu",
) -> Path:
    """Adapt models to new cases, and write the predictions and an account.

    Of a segmentation every case gets a mask, as by `collegium.deploy.predict_folder`; of a
    classification there is the same table of probabilities, scored where the class of every case is
    named.

    Args:
        opened: the models; whatever is random follows from their seed.
        images: see `collegium.data.unlabelled.list_images`; or a table, where the models learnt
            from tables.
        adapter: the adapter.
        output: a folder that is made; it must not hold anything.
        labels: a folder of masks, which score the predictions and are not seen by the adapter.
        device: where to compute.

    Returns:
        The account's page.

    Raises:
        ConfigError: the adapter does not suit the models or the task, or gives no prediction of its
            own; there is no such device; or labels are given where none can be.
        DataError: a case cannot be used, or the output folder is not empty.
    """
    check_device(device)
    with new_folder(output) as folder:
        cases = open_cases(opened, images, labels)
        if adapter.name == "average" and not cases.labelled:
            raise ConfigError(
                "average gives a prediction for every personal model, none of its own; choose "
                "ensemble"
            )
        masks = folder / "predictions"
        writer = PredictionWriter(opened, cases, masks, most_pictures=MOST_PICTURES)

        steps = outside.StepScorer(writer.task, cases.data)
        watch = steps if cases.labelled else nobody_watches

        def deliver(model: str, index: int, prediction: Tensor) -> None:
            writer.write(model, index, cases.data.example(index), prediction)
            steps.restart()

        start, task, seed = time.perf_counter(), writer.task, opened.seed
        steps.restart()
        sources = Sources(opened.models, opened.network, task, device, seed, opened.server, watch)
        adapted = build_adapter(adapter).adapt(sources, UnlabelledDataset(cases.data), deliver)
        seconds = time.perf_counter() - start - steps.seconds
        answer = answer_adapting(opened, adapter, writer, sources, images.name)
        _write_rest(adapted, opened, adapter, writer, seconds, answer, folder, steps.summary())
    return output / "account.html"


def answer_adapting(
    opened: OpenedModels,
    adapter: AdapterConfig,
    writer: PredictionWriter,
    sources: Sources,
    site: str,
) -> list[str]:
    """Return the answer to the hospital as lines: does adapting help it?

    The unadapted global model is scored for it on the same cases, by the same labels.

    Args:
        opened: the models.
        adapter: the adapter.
        writer: holds the scores of the adapted model.
        sources: the models as adapters get them.
        site: what the hospital is called.
    """
    if GLOBAL not in opened.models or adapter.name == NO_ADAPTER:
        return []
    if not writer.cases.labelled:
        return ["Whether adapting helps is not known: no labels score the predictions."]
    if not (adapted := writer.scores_of("")):
        return []  # several models predict each case
    none = AdapterConfig(NO_ADAPTER)
    plain = outside.adapt_and_score(build_adapter(none), sources, writer.cases.data).scores
    about = {
        "experiment": opened.config.name, "algorithm": opened.algorithm.label, "site": site,
        "seed": opened.seed, "round": opened.config.rounds, "split": SPLITS["outside"],
    }  # fmt: skip
    rows = [
        {
            **about, "model": label, "case": f"c{place:06d}", "patient": str(case["patient"]),
            "metric": metric, "value": value, "unit": writer.task.units.get(metric, ""),
        }
        for label, scores in ((adapter.label, adapted), (NO_ADAPTER, plain))
        for place, (case, own) in enumerate(zip(adapted, scores, strict=True))
        for metric, value in own.items()
        if metric not in NON_SCORE_KEYS
    ]  # fmt: skip
    settings = verdict_settings({"config": to_dict(opened.config)})
    table = adapting_table(results_frame(rows), writer.task.metric, settings=settings)
    return answer_lines(table)


def _write_rest(
    adapted: AdaptationResult,
    opened: OpenedModels,
    adapter: AdapterConfig,
    writer: PredictionWriter,
    seconds: float,
    answer: Sequence[str],
    folder: Path,
    by_step: Mapping[str, Any] | None,
) -> None:
    """Write the adapted model with its settings, the tables, and last the account."""
    if adapted.model is not None:
        export_model(adapted.model, folder / "adapted.safetensors")
        beside = folder / outside.SETTINGS_FILE
        write_settings(beside, opened.config, opened.algorithm, opened.seed)
    account = {
        "adapter": adapter.to_dict(),
        "models": opened.origin,
        "seed": opened.seed,
        "handed_out": sorted(opened.models),
        "cases": len(writer.cases.names),
        "classes": writer.write_tables(folder),
        "seconds": seconds,
        "answer": [*answer],
        "collegium": __version__,
        **adapted.record.to_dict(),
        **({"by_step": by_step} if by_step else {}),
    }
    write_account(folder / "account.html", account, writer.pictures, writer.scores)
    write_atomically(folder / ACCOUNT_FILE, json.dumps(account, indent=1).encode())
