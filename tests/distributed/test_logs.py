"""The log of a site process as a collector reads it."""

import json
import logging
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.distributed.conftest import LIMIT, wait_until
from tests.distributed.test_site import call, experiment

from collegium.core.failures import kind_and_sentence
from collegium.data.phantoms import make_federation
from collegium.distributed.description import describe, digest
from collegium.distributed.frames import Line
from collegium.distributed.logs import JsonLines


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    with tempfile.TemporaryDirectory(prefix="logs") as name:
        yield Path(name)


def record(name: str, message: str, *values: object, **more: object) -> dict[str, object]:
    made = logging.makeLogRecord(
        {"name": name, "msg": message, "args": values, "levelname": "WARNING", **more}
    )
    found: dict[str, object] = json.loads(JsonLines().format(made))
    return found


def test_a_line_holds_the_fields_and_not_what_is_put_into_the_sentence():
    line = record("collegium.data", "%s: the image %r has %d channels (%s)", "mueller", "x.png", 4,
                  "y", fields={"kind": "DataError"})  # fmt: skip
    assert line.pop("time")
    assert line == {
        "level": "warning", "logger": "collegium.data", "event": "the image has channels",
        "kind": "DataError",
    }  # fmt: skip


def test_of_a_library_only_the_logger_is_named():
    line = record("nibabel", "cannot read /data/mueller.nii")
    assert (line["logger"], line["event"]) == ("nibabel", "a message of a library")


def test_of_an_exception_only_the_kind_is_named():
    try:
        raise OSError("/data/mueller.nii")
    except OSError:
        line = record("collegium.x", "no", exc_info=sys.exc_info())
    assert line["error"] == "OSError"
    assert "mueller" not in json.dumps(line)


def test_site_start_writes_json_and_keeps_the_sentences_at_home(short):
    make_federation(short / "mueller", 2, cases=10, size=32)
    about = {"name": "alder", "root": "mueller", "data": {"manifest": "alder/manifest.csv"}}
    (short / "alder.yaml").write_text(yaml.safe_dump({**about, "accept": "all"}))
    (next((short / "mueller" / "alder").rglob("*.png"))).write_bytes(b"no image")
    code = "from collegium.cli import main; main()"
    command = [sys.executable, "-c", code, "site", "start", str(short / "alder.yaml")]
    listening, kept = short / "state" / "site.sock", short / "state" / "site.log"
    with subprocess.Popen([*command, "--log", "json"], stderr=subprocess.PIPE, text=True) as site:
        wait_until(listening.exists)
        line = Line.connect(listening, LIMIT)
        line.send(call(describe(experiment()), "open"))
        answer, _ = line.receive(1 << 30)
        line.close()
        site.send_signal(signal.SIGTERM)
        _, text = site.communicate(timeout=LIMIT)
    assert site.returncode == 0
    first, second, third = (json.loads(line) for line in text.splitlines())
    assert (first["event"], first["site"]) == ("site listens at", "alder")
    assert second["experiment"] == digest(describe(experiment()))
    assert (third["event"], third["kind"]) == ("a call was refused", "DataError")
    assert third["text"] == kind_and_sentence(answer["error"])[1]
    assert not any(word in text for word in ("mueller", ".png", str(short)))
    assert "mueller" in kept.read_text()
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
