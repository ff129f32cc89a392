"""Adaptations of a job's models to the sites outside, and what is stored of them."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from collegium.adaptation import outside
from collegium.adaptation.base import Sources
from collegium.core.dataset import Dataset
from collegium.core.files import write_atomically
from collegium.core.seals import read_json, seal_json
from collegium.data.federation import labelled_at
from collegium.experiment.config.building import build_adapter, build_algorithm
from collegium.experiment.config.experiment import AdapterConfig
from collegium.experiment.grid import Job
from collegium.experiment.job_results import (
    ACCOUNT_FILE,
    SCORES_FILE,
    PackedPredictions,
    write_outside_overlays,
)
from collegium.runtime.federation import Federation

logger = logging.getLogger(__name__)


def is_adapted(folder: Path, adapter: AdapterConfig) -> bool:
    """Return whether an adaptation with these settings is stored, and undamaged.

    Args:
        folder: The adaptation's folder.
        adapter: The adapter.
    """
    if not (folder / SCORES_FILE).exists():
        return False
    try:
        stored = read_json(folder / ACCOUNT_FILE)
        read_json(folder / SCORES_FILE)
    except ValueError:
        logger.warning("the adaptation in %s is damaged; it is made again", folder)
        return False
    return bool(stored["adapter"] == adapter.to_dict())


def write_adaptation(
    federation: Federation,
    job: Job,
    config: AdapterConfig,
    outside_site: tuple[str, Dataset],
    models: outside.ModelFiles,
    folder: Path,
) -> None:
    """Adapt to one site outside, and store the outcome: the record first, the scores last.

    Args:
        federation: Network, task and device.
        job: The job that trained the models.
        config: The adapter.
        outside_site: The site's name and its cases.
        models: What the sites inside hand out.
        folder: Where the record, the scores and, for the first seed, pictures go.
    """
    site, data = outside_site
    sources = Sources(
        models,
        federation.builder(build_algorithm(job.algorithm)),
        federation.task_at(site, labelled_at(job.config.federation, site)),
        federation.device,
        job.seed,
        models.server,
    )
    kept = PackedPredictions() if job.seed == job.config.seeds[0] else None
    found = outside.adapt_and_score(build_adapter(config), sources, data, on_prediction=kept)
    account = {
        "adapter": config.to_dict(),
        "algorithm": job.algorithm.label,
        "seed": job.seed,
        "site": site,
        "cases": len(data),
        "seconds": found.seconds,
        **found.result.record.to_dict(),
        **({"by_step": found.by_step} if found.by_step else {}),
    }
    (folder / SCORES_FILE).unlink(missing_ok=True)  # of an adaptation with other settings
    write_atomically(folder / ACCOUNT_FILE, seal_json(json.dumps(account, indent=1)))
    if kept is not None:
        about = {"site": site, "model": config.label}
        write_outside_overlays(
            kept, data, found.scores, about, sources.task.metric, folder / "overlays"
        )
    scores = {"seconds": found.seconds, "cases": found.scores}
    write_atomically(folder / SCORES_FILE, seal_json(json.dumps(scores)))
