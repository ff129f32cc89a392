"""An MLflow store: a local database, a tracking server, or whatever else MLflow's URIs name.

MLflow is imported where it is used. Its own telemetry, which tells its makers of every use, is off
unless the user's environment says otherwise (``MLFLOW_DISABLE_TELEMETRY``).
"""

from __future__ import annotations

import os
import re
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from collegium.errors import CollegiumError, ConfigError, NotInstalled, StorageError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

T = TypeVar("T")

PARAMETERS_AT_ONCE, METRICS_AT_ONCE = 100, 1000
"""What one request to MLflow may hold."""

HOSTED = ("databricks", "databricks-uc", "uc")
"""MLflow's names of stores elsewhere that look like names of folders."""

LONGEST_CAUSE = 200
SQLITE = "sqlite:///"
DONE, FAILED, RUNNING = "FINISHED", "FAILED", "RUNNING"
"""MLflow's words for the state of a run."""


@dataclass
class TrackedRun:
    """A run in the store.

    Attributes:
        run_id: MLflow's name of it.
        tags: Its tags.
        status: MLflow's word for its state.
        logged: The metrics that are logged, by name and step; None where the store has not been
            asked yet.
    """

    run_id: str
    tags: dict[str, str]
    status: str
    logged: dict[tuple[str, int], float] | None


class MlflowStore:
    """One experiment in an MLflow store, reached through MLflow's client.

    Args:
        uri: MLflow's tracking URI.
        experiment: The name of the experiment, which is made where it is missing.
        own: The store lies in a run's folder, and may have moved with it.

    Raises:
        StorageError: A store of a run's own has moved; MLflow would write to its former place.
    """

    def __init__(self, uri: str, experiment: str, *, own: bool = False) -> None:
        from mlflow.tracking import MlflowClient

        if database := database_of(uri):
            database.parent.mkdir(parents=True, exist_ok=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of MLflow's database library
            self._client: MlflowClient = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        artifacts = (database.resolve().parent / "artifacts").as_uri() if database else None
        if own and database and found and found.artifact_location != artifacts:
            raise StorageError(
                f"its files lie in {found.artifact_location}, where the run was before it moved; "
                f"remove {database.parent}, and all of it is written again"
            )
        self._experiment = (
            found.experiment_id if found else self._client.create_experiment(experiment, artifacts)
        )

    def open(
        self,
        tag: tuple[str, str],
        name: str,
        parameters: Mapping[str, str],
        tags: Mapping[str, str],
    ) -> TrackedRun:
        """Find the run with a tag, or make it; log the parameters and tags that it lacks.

        Args:
            tag: Name and value of the tag that the run is found by.
            name: What MLflow shows, where the run is made.
            parameters: By name; one that is logged already stays as it is.
            tags: Other tags; one of another value is replaced.
        """
        from mlflow.entities import Param

        key, value = tag
        found = self._client.search_runs([self._experiment], f"tags.`{key}` = '{value}'")
        if found:
            run = found[0]
        else:
            run = self._client.create_run(
                self._experiment, tags={**tags, key: value}, run_name=name
            )
        lacking = [Param(k, v) for k, v in parameters.items() if k not in run.data.params]
        for some in _chunks(lacking, PARAMETERS_AT_ONCE):
            self._client.log_batch(run.info.run_id, params=some)
        logged: dict[tuple[str, int], float] | None = None if found else {}
        opened = TrackedRun(run.info.run_id, dict(run.data.tags), run.info.status, logged)
        for name_of_tag, text in tags.items():
            if opened.tags.get(name_of_tag) != text:
                self.set_tag(opened, name_of_tag, text)
        return opened

    def log(
        self,
        run: TrackedRun,
        metrics: Mapping[tuple[str, int], float],
        changing: tuple[str, ...] = (),
    ) -> None:
        """Log metrics by name and step; one that is logged already is not logged again.

        Args:
            run: The run.
            metrics: Their values.
            changing: How the names begin of those that are logged again where their value differs.
        """
        from mlflow.entities import Metric

        if run.logged is None:
            names = self._client.get_run(run.run_id).data.metrics
            found = [m for n in names for m in self._client.get_metric_history(run.run_id, n)]
            found.sort(key=lambda metric: metric.timestamp)
            run.logged = {(metric.key, metric.step): metric.value for metric in found}
        now = time.time_ns() // 1_000_000
        new = [
            Metric(name, value, now, step)
            for (name, step), value in metrics.items()
            if (name, step) not in run.logged
            or (name.startswith(changing) and run.logged[name, step] != value)
        ]
        for some in _chunks(new, METRICS_AT_ONCE):
            self._client.log_batch(run.run_id, metrics=some)
            run.logged |= {(metric.key, metric.step): metric.value for metric in some}

    def log_files(self, run: TrackedRun, files: Sequence[Path], folder: str) -> None:
        """Log files or folders as artifacts.

        Args:
            run: the run.
            files: the files or folders.
            folder: the artifacts' folder.
        """
        for file in files:
            log = self._client.log_artifacts if file.is_dir() else self._client.log_artifact
            log(run.run_id, str(file), folder)

    def log_text(self, run: TrackedRun, text: str, name: str) -> None:
        """Log a text as an artifact.

        Args:
            run: the run.
            text: the text.
            name: the artifact's name.
        """
        self._client.log_text(run.run_id, text, name)

    def set_tag(self, run: TrackedRun, name: str, value: str) -> None:
        """Set a tag.

        Args:
            run: the run.
            name: the tag's name.
            value: its value.
        """
        self._client.set_tag(run.run_id, name, value)
        run.tags[name] = value

    def set_status(self, run: TrackedRun, status: str) -> None:
        """Set the status of a run.

        Args:
            run: the run.
            status: MLflow's word for it.
        """
        if status == RUNNING:
            self._client.update_run(run.run_id, status)
        else:
            self._client.set_terminated(run.run_id, status)
        run.status = status


def local_uri(output: Path) -> str:
    """Return the URI of a run's own store: a database in a folder of its output folder."""
    return f"{SQLITE}{(output / 'mlflow' / 'mlflow.db').resolve()}"


def database_of(uri: str) -> Path | None:
    """Return the file of a local database; None for another kind of store."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def stays_here(uri: str) -> bool:
    """Return whether a store lies in this machine's files."""
    scheme = urlsplit(uri).scheme
    return scheme in ("file", "sqlite") or (not scheme and uri not in HOSTED)


def expand(uri: str) -> str:
    """Return a URI with the environment variables in it replaced by their values.

    Raises:
        ConfigError: One is not set; or the URI as written holds a password.
    """
    if (urlsplit(uri).password or "$").startswith("$"):
        missing = [name for name in re.findall(r"\$\{?(\w+)", uri) if name not in os.environ]
        if not missing:
            return os.path.expandvars(uri)
        raise ConfigError(
            f"tracking.uri is {uri}, but the environment variable {missing[0]} is not set: set it, "
            f"or write the URI itself"
        )
    raise ConfigError(
        "tracking.uri holds a password, which would be stored with the run: set the environment "
        "variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or write the name of one "
        "of your own in its place, as in https://me:$PASSWORD@host"
    )


def require(uri: str) -> None:
    """Check that what the store needs is installed.

    Raises:
        NotInstalled: MLflow is not, or what it needs for a local database.
    """
    try:
        with environment():
            import mlflow.tracking  # noqa: F401
        if database_of(uri):
            import_module("alembic")
            import_module("sqlalchemy")
    except ImportError as error:
        raise NotInstalled(
            f"tracking needs MLflow ({error}); install it with: pip install 'collegium[mlflow]'"
        ) from error


@contextmanager
def environment(seconds: int = 10, retries: int = 0) -> Iterator[None]:
    """Keep MLflow brief and quiet inside the block, where the user's environment does not say how.

    Args:
        seconds: How long a server may take to answer.
        retries: How often it is asked again.
    """
    wanted = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(seconds),
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": str(retries),
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }
    ours = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def cause_of(error: BaseException) -> str:
    """Return the first line of an error; of one of the network or the disk, of what began it."""
    if isinstance(error, CollegiumError):
        return str(error)
    told, before = error, error.__cause__ or error.__context__
    while before is not None:
        told = before if isinstance(before, OSError) else told
        before = before.__cause__ or before.__context__
    lines = str(told).splitlines() or [type(told).__name__]
    return lines[0][:LONGEST_CAUSE]


def _chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
