import os
import sys
from pathlib import Path

import pytest

from collegium.errors import ConfigError, NotInstalled
from collegium.experiment.tracking import store


def test_missing_mlflow_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    with pytest.raises(NotInstalled, match=r"pip install 'collegium\[mlflow\]'"):
        store.require("http://localhost:5000")


def test_missing_database_library_matters_to_a_database_only(monkeypatch):
    import mlflow.tracking  # noqa: F401  (imported without it, MLflow would know no databases)

    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(NotInstalled, match="sqlalchemy"):
        store.require("sqlite:///mlflow.db")
    store.require("http://localhost:5000")


def test_password_in_a_uri_is_refused_and_a_variable_is_not(monkeypatch):
    with pytest.raises(ConfigError, match="holds a password") as told:
        store.expand("https://anna:secret@tracking.example")
    assert "secret" not in str(told.value)
    with pytest.raises(ConfigError, match="variable TRACKING_PASSWORD is not set"):
        store.expand("https://anna:$TRACKING_PASSWORD@tracking.example")
    monkeypatch.setenv("TRACKING_PASSWORD", "secret")
    for text in ("$TRACKING_PASSWORD", "${TRACKING_PASSWORD}"):
        expanded = store.expand(f"https://anna:{text}@tracking.example")
        assert expanded == "https://anna:secret@tracking.example"


@pytest.mark.parametrize(
    ("uri", "here"),
    [
        ("sqlite:///runs/a/mlflow.db", True),
        ("file:///data/mlruns", True),
        ("mlruns", True),
        ("http://localhost:5000", False),
        ("https://tracking.example", False),
        ("postgresql://host/name", False),
        ("databricks", False),
        ("databricks://profile", False),
    ],
)
def test_only_files_stay_on_this_machine(uri, here):
    assert store.stays_here(uri) is here


def test_users_environment_is_respected_and_left_as_it_was(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "3")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    before = dict(os.environ)
    with store.environment(10):
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "3"
        assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert dict(os.environ) == before


def test_unreachable_server_is_told_by_its_cause():
    with store.environment(2), pytest.raises(Exception, match="127") as told:
        store.MlflowStore("http://127.0.0.1:9", "tiny")
    assert store.cause_of(told.value) == "[Errno 111] Connection refused"


def test_requests_keep_to_the_limits_of_mlflow():
    from mlflow.utils import validation

    from collegium.experiment.tracking import content

    assert store.METRICS_AT_ONCE == validation.MAX_METRICS_PER_BATCH
    assert store.PARAMETERS_AT_ONCE == validation.MAX_PARAMS_TAGS_PER_BATCH
    assert content.LONGEST_NAME == validation.MAX_ENTITY_KEY_LENGTH
    assert content.LONGEST_VALUE == validation.MAX_PARAM_VAL_LENGTH


def test_metrics_and_parameters_of_any_number_are_logged_once(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(store, "METRICS_AT_ONCE", 7)
    from mlflow.tracking import MlflowClient

    uri = (tmp_path / "store").as_uri()
    parameters = {f"p{number}": str(number) for number in range(250)}
    metrics = {(f"m/{number}", step): number + step / 2 for number in range(9) for step in (1, 2)}
    for _ in range(2):
        opened = store.MlflowStore(uri, "tiny")
        run = opened.open(("collegium.job", "a/b"), "name", parameters, {"version.a": "1"})
        opened.log(run, metrics)
        opened.log(run, metrics)
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("tiny")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.data.params == parameters
    assert found.data.tags["version.a"] == "1"
    for number in range(9):
        history = client.get_metric_history(found.info.run_id, f"m/{number}")
        assert sorted((m.step, m.value) for m in history) == [(1, number + 0.5), (2, number + 1.0)]
