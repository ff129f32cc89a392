"""The log of a site process: sentences, or lines of JSON that name neither patients nor paths."""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from collegium.errors import StorageError

LOG = "site.log"
"""The file of a site's folder of state that holds the sentences where JSON is written."""

SENTENCES = "%(asctime)s %(levelname)s %(name)s: %(message)s"
LARGEST, OLDER = 10_000_000, 3
"""The bytes of a file of sentences, and how many older ones are kept."""

_ARGUMENT = re.compile(r"\s*\(?%[\d.]*[sdrf][):]?|:(?=\s*%)")


def fields(**values: Any) -> dict[str, dict[str, Any]]:
    """Return the argument `extra` of a log call whose values may stand in the JSON.

    Args:
        values: neither patients nor paths.
    """
    return {"fields": values}


class JsonLines(logging.Formatter):
    """Writes a record as a line of JSON: time, level, logger, event, and its `fields`.

    The event is the text of the call in the code, without what is put into it at run time, which
    may name a patient or a path. A library may put that into the text itself, so that of other
    packages' records only the logger is named.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line.

        Args:
            record: what is logged.
        """
        own = record.name.partition(".")[0] == "collegium"
        event = _ARGUMENT.sub("", str(record.msg)).strip() if own else "a message of a library"
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event,
        }
        if record.exc_info and record.exc_info[0]:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line | getattr(record, "fields", {}))


def start_log(form: Literal["text", "json"], state: Path) -> None:
    """Send what this process logs to standard error.

    With JSON the sentences, which may name patients and paths, go into `LOG` in the folder of
    state, which its owner alone may enter.

    Args:
        form: of the lines on standard error.
        state: the site's folder of state.

    Raises:
        StorageError: the file of sentences cannot be written.
    """
    lines: logging.Handler = logging.StreamHandler()
    handlers = [lines]
    lines.setFormatter(JsonLines() if form == "json" else logging.Formatter(SENTENCES))
    if form == "json":
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = RotatingFileHandler(
                state / LOG, maxBytes=LARGEST, backupCount=OLDER, encoding="utf-8"
            )
        except OSError as error:
            raise StorageError(f"the log of the site cannot be written: {error}") from error
        file.setFormatter(logging.Formatter(SENTENCES))
        handlers.append(file)
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    logging.getLogger("collegium").setLevel(logging.INFO)
