"""MLflow tracking: a run's parameters, metrics, report and models, in a store of one's own choice.

A run needs none of it: if the store does not answer, training continues, and `Tracker.finish`
sends what is missing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from collegium.core.files import write_atomically
from collegium.core.seals import read_json
from collegium.errors import StorageError
from collegium.evaluation.results import ROWS_FILE, read_rows
from collegium.experiment.config.experiment import ExperimentConfig, digest
from collegium.experiment.config.yaml_file import write_yaml
from collegium.experiment.grid import Job, JobKey, holders, jobs_of
from collegium.experiment.jobs import Event
from collegium.experiment.runner import RUN_FILE
from collegium.experiment.tracking import content, store
from collegium.experiment.tracking.store import DONE, FAILED, RUNNING, MlflowStore, TrackedRun

logger = logging.getLogger(__name__)

TOKEN_FILE = "tracking.json"
"""Holds what names an output folder to a store without saying where it lies."""

LIVE_SECONDS, FINAL_SECONDS = 10, 60
"""How long a server may take to answer during a run, and at its end."""

FINAL_RETRIES = 1
"""How often a server is asked again at the end of a run; during the run it is not."""

PAUSE_SECONDS = 300.0
"""How long a store that failed is left alone during a run."""


class Tracker:
    """An observer that logs a run into an MLflow store as it proceeds, and completes it.

    The experiment becomes an MLflow run with a nested one for each job. A run that is resumed or
    extended continues in the same ones, found by the tags ``collegium.run`` and ``collegium.job``,
    and logs no round twice.

    Args:
        config: The experiment.
        uri: MLflow's tracking URI, in which ``$NAME`` stands for an environment variable; None: a
            database in the run's own folder.
        experiment: The MLflow experiment; None: one with the name of the run.

    Raises:
        NotInstalled: MLflow is missing, or what it needs for a database.
        ConfigError: The URI holds a password, or names a variable that is not set.
    """

    def __init__(
        self, config: ExperimentConfig, *, uri: str | None = None, experiment: str | None = None
    ) -> None:
        self._config, self._experiment = config, experiment or config.name
        self._output = Path(config.output)
        self._own = uri is None
        self._where = uri or store.local_uri(self._output)
        self._uri = store.expand(uri) if uri else self._where
        store.require(self._uri)
        jobs = jobs_of(config)
        self._jobs = {job.key: job for job in jobs}
        self._holders = holders(jobs)
        self._runs: dict[JobKey, TrackedRun] = {}
        self._silent_until = -math.inf
        self._warned = False

    def __call__(self, event: Event) -> None:
        """Log what happened; a store that fails is left alone for a while, with one warning."""
        job = self._jobs.get(event.job)
        if job is None or time.monotonic() < self._silent_until:
            return
        try:
            with store.environment(LIVE_SECONDS):
                self._follow(job, event)
        except Exception as error:  # whatever becomes of tracking, the training continues
            self._silent_until = time.monotonic() + PAUSE_SECONDS
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s; the run continues, and sends it at its end", self._trouble(error)
                )

    def finish(self, output: Path) -> None:
        """Log what is missing and what is known at the end only.

        That is the scores of test cases, the configuration, the report, the tables, and the models
        of every job: the global one, and those that the sites' policies share. May be called
        where jobs failed, too; the experiment is then marked so.

        Args:
            output: The output folder of the run.

        Raises:
            StorageError: The store does not answer, or refuses; the run itself is whole.
        """
        try:
            with store.environment(FINAL_SECONDS, FINAL_RETRIES):
                self._finish(output)
        except Exception as error:  # MLflow's stores raise whatever their libraries raise
            raise StorageError(
                f"{self._trouble(error)}; the run itself is whole: mend the store, and 'collegium "
                f"resume {output}' sends it, or run the same file again with another tracking.uri"
            ) from error

    def _trouble(self, error: Exception) -> str:
        return f"MLflow at {self._where} did not take what a run told it ({store.cause_of(error)})"

    def _follow(self, job: Job, event: Event) -> None:
        mlflow, run = self._mlflow, self._run_of(job)
        if event.kind == "job" and run.status != RUNNING:
            mlflow.set_status(run, RUNNING)
        if event.kind == "round":
            mlflow.log(run, content.metrics_of(content.points_of_event(event)))
        elif event.kind == "done":
            self._complete(run, job.folder)

    def _finish(self, output: Path) -> None:
        mlflow, parent, whole = self._mlflow, self._parent, True
        for job in self._jobs.values():
            folder = output / job.folder.relative_to(job.output)
            if (folder / ROWS_FILE).exists():
                run = self._run_of(job)
                self._complete(run, folder)
                self._log_models(run, folder)
            else:
                whole = False
                if job.key in self._runs:
                    mlflow.set_status(self._runs[job.key], FAILED)
        self._log_files(parent, output)
        mlflow.set_status(parent, DONE if whole else FAILED)

    @cached_property
    def _mlflow(self) -> MlflowStore:
        return MlflowStore(self._uri, self._experiment, own=self._own)

    def _tag(self, parameters: Mapping[str, str]) -> str:
        """Return the tag of the run with these parameters in this output folder."""
        path = self._output / TOKEN_FILE
        if not path.exists():
            write_atomically(path, json.dumps({"token": uuid.uuid4().hex}).encode())
        token = json.loads(path.read_text(encoding="utf-8"))["token"]
        return f"{_digest(json.dumps(parameters, sort_keys=True).encode())}/{token}"

    def _tags(self) -> dict[str, str]:
        """The tags of every run: the digest of the settings, and versions."""
        about = read_json(self._output / RUN_FILE)
        versions = {f"version.{name}": str(version) for name, version in about["versions"].items()}
        return {"collegium.digest": digest(self._config), **versions}

    @cached_property
    def _parent(self) -> TrackedRun:
        """The store's run of the whole experiment."""
        parameters = content.parameters_of(content.fixed_settings(self._config))
        tags = {**self._tags(), **content.tags_of(self._config)}
        tag = "collegium.run", self._tag(parameters)
        run = self._mlflow.open(tag, self._config.name, parameters, tags)
        if run.status != RUNNING:
            self._mlflow.set_status(run, RUNNING)
        return run

    def _run_of(self, job: Job) -> TrackedRun:
        """Return the store's run of a job."""
        if job.key not in self._runs:
            parameters = content.parameters_of(content.fixed_settings_of_job(job))
            tags = {
                **self._tags(),
                **content.tags_of_job(job, self._holders[job.key]),
                "mlflow.parentRunId": self._parent.run_id,
            }
            place = f"{job.algorithm.label}/seed-{job.seed}"
            tag = "collegium.job", f"{self._tag(parameters)}/{place}"
            self._runs[job.key] = self._mlflow.open(tag, job.name, parameters, tags)
        return self._runs[job.key]

    def _complete(self, run: TrackedRun, folder: Path) -> None:
        """Log all rounds and scores of a finished job, unless these rows were logged before."""
        rows = _digest((folder / ROWS_FILE).read_bytes())
        if run.tags.get("collegium.rows") != rows:
            points = content.points_of_rows(read_rows([folder / ROWS_FILE]))
            self._mlflow.log(run, content.metrics_of(points), content.OUTSIDE)
            self._mlflow.set_tag(run, "collegium.rows", rows)
        if run.status != DONE:
            self._mlflow.set_status(run, DONE)

    def _log_models(self, run: TrackedRun, folder: Path) -> None:
        """Log the models of a job that may leave, unless that was done before."""
        models = content.models_of(folder)
        if models and "collegium.models" not in run.tags:
            self._mlflow.log_files(run, models, "models")
            self._mlflow.set_tag(run, "collegium.models", str(len(models)))

    def _log_files(self, run: TrackedRun, output: Path) -> None:
        """Log the files of the whole experiment; they may have changed since the last time."""
        mlflow, report, tables = self._mlflow, output / "report.html", output / "tables"
        mlflow.log_text(run, write_yaml(content.settings_of(self._config)), "config.yaml")
        if report.exists():
            if store.stays_here(self._uri):
                page = report.read_bytes().decode()
            else:
                page = content.page_for_a_server(output, self._config)
            mlflow.log_text(run, page, report.name)
        if tables.is_dir():
            mlflow.log_files(run, [tables], tables.name)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
