import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_two_hundred_volumes_take_no_more_memory_than_twenty():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "data.py", "--only", "memory"],
        capture_output=True, text=True, check=False, timeout=1200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("of their size (target 0.1): ok\n")
