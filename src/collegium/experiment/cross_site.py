"""Scores of each site's personal model at every other site, of a finished run on one machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from collegium.core.payloads import PERSONAL, may_leave
from collegium.core.tensors import Tensors
from collegium.errors import ConfigError, DataError
from collegium.evaluation.cross_site import CROSS_SITE_FILE, model_of
from collegium.evaluation.results import ResultRow, results_frame, write_rows
from collegium.experiment.finished import finished_jobs
from collegium.experiment.job_results import cross_site_rows
from collegium.experiment.pooling import pool_folds
from collegium.models.files import import_model

if TYPE_CHECKING:
    from collegium.experiment.federation import OpenedExperiment
    from collegium.experiment.grid import Job
    from collegium.runtime.client import ClientRuntime

logger = logging.getLogger(__name__)


def score_across_sites(output: Path) -> Path:
    """Score the personal models of a run at every site that trains, and store the scores.

    A site's model is scored elsewhere only if the site's policy shares it. Test cases choose
    nothing here: each model is that of the round that its own site has selected.

    Args:
        output: the output folder of a run.

    Returns:
        The file of the scores.

    Raises:
        CheckpointError: there is no run.
        ConfigError: the sites' models are on other machines, or no site shares its model.
        DataError: no method has personal models, or no training is finished.
    """
    with finished_jobs(output, keeps="personal model", needs="scores across sites need") as found:
        opened, jobs = found
        rows = [row for job in jobs for row in _rows(opened, job)]
        if not rows:
            raise DataError(
                f"{output} holds no personal models of finished trainings; add a method that has "
                f"them, such as ditto, or continue with 'collegium resume'"
            )
        write_rows(output / CROSS_SITE_FILE, pool_folds(results_frame(rows), opened.config))
    return output / CROSS_SITE_FILE


def _rows(opened: OpenedExperiment, job: Job) -> Iterator[ResultRow]:
    """Yield the rows of the test cases of every site with the models of all."""
    holder = opened.holder(job)
    files = {
        path.parent.name: path
        for path in sorted(holder.folder.glob(f"clients/*/{PERSONAL}.safetensors"))
    }
    if not files:
        return
    clients = opened.clients(holder)
    models = {site: import_model(path) for site, path in files.items()}
    shared = _shared(clients, job.name)
    for site, client in sorted(clients.items()):
        for source, model in models.items():
            if source != site and source not in shared:
                continue
            if site in models and not _alike(model, models[site]):
                logger.info(
                    "%s: the model of %s is another network than that of %s, and not scored there",
                    job.name, source, site,
                )  # fmt: skip
                continue
            yield from cross_site_rows(job, site, model_of(source), client.score(model, "test"))


def _shared(clients: Mapping[str, ClientRuntime], name: str) -> set[str]:
    """Return the sites whose policies let their personal models out.

    Raises:
        ConfigError: there is none.
    """
    policies = {site: client.site.policy for site, client in clients.items()}
    shared = {
        site
        for site, policy in policies.items()
        if may_leave(
            PERSONAL, opt_in=True, allow=policy.allow, forbid=policy.forbid, share=policy.share
        )
    }
    if not shared:
        raise ConfigError(
            f"{name}: no site shares its personal model; write share: [{PERSONAL}] at the sites "
            f"whose models others may see, and run the experiment in a new output folder"
        )
    if kept := sorted(policies.keys() - shared):
        logger.info("%s: %s keep their personal models", name, ", ".join(kept))
    return shared


def _alike(one: Tensors, other: Tensors) -> bool:
    return {name: t.shape for name, t in one.items()} == {
        name: t.shape for name, t in other.items()
    }
