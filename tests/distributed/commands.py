"""Our commands as processes of their own, and all that they start, which ends with the test."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-c", "from collegium.cli import main; main()"]


class Processes:
    """Processes of our command line; they end with the test.

    Args:
        folder: where they run, and leave what they say.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[bytes]] = []

    def start(
        self, log: str, *arguments: str, inside: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start our command line.

        Args:
            log: names the file for what it says.
            *arguments: the command and its arguments.
            inside: the command that runs it elsewhere, such as in a namespace.
        """
        command = [*inside, *COMMAND, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
        with (self._folder / f"{log}.log").open("ab") as file:
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=file, stderr=file,
                start_new_session=True,
            )  # fmt: skip
        self._running.append(process)
        return process

    def end(self) -> None:
        """Kill them all, and what they started: FLARE's jobs are in groups of their own."""
        for process in self._running:
            for number in _family(process.pid):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            process.wait()


def _family(process: int) -> list[int]:
    """A process, and all that it and they started."""
    found = [process]
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        for child in path.read_text(encoding="ascii").split():
            found += _family(int(child))
    return found
