"""Processes that are killed in the middle, and sites that answer nonsense; all over real FLARE."""

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from collegium.core.message import pack, unpack
from collegium.core.tensors import Tensors
from collegium.runtime.records import Records

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {
    "algorithms": ["iopfl"],
    "rounds": 3,
    "training": {"optimizer": "adam", "lr": 2e-3, "batch_size": 2, "local_steps": 40},
}
SKIP = "participation.on_failure=skip"
RETRY = "participation.on_failure=retry"


@pytest.fixture(scope="module")
def real(make_federation):
    """A federation in which a test stands between relays and site processes."""
    made = make_federation(tapped=True)
    made.start()
    made.wait()
    return made


@pytest.fixture(scope="module")
def expected(real):
    """A run in one process, which nothing disturbs."""
    return real.reference(real.write("undisturbed", **SETTINGS))


@pytest.fixture(autouse=True)
def mended(request):
    """Whatever a test has broken is mended before the next one."""
    if "real" not in request.fixturenames:
        yield
        return
    real = request.getfixturevalue("real")
    yield
    for name, tap in real.taps.items():
        tap.script = lambda _, carry: carry()
        if name not in real.processes:
            real.start_site_process(name)


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it did not come true in time"
        time.sleep(0.005)


def at_round(number: int, act: Any) -> Any:
    """A tap's script that acts once, at the training of a round; everything else passes."""
    done: list[int] = []

    def script(header: dict[str, Any], carry: Any) -> Any:
        request = header.get("request", {})
        if not done and (request.get("round"), request.get("stage")) == (number, "train"):
            done.append(number)
            return act(header, carry)
        return carry()

    return script


def write(real: Any, name: str) -> str:
    file: str = real.write(name, **SETTINGS)
    return file


def carry_and_fail(carry: Any) -> None:
    with pytest.raises((OSError, EOFError)):
        carry()


def killer(real: Any, when: str, again: bool) -> Any:
    """Kill birch's site process while it trains, before its reply leaves, or after it."""

    def act(header: dict[str, Any], carry: Any) -> Any:
        answer = None
        if when == "while it trains":
            threading.Thread(target=carry_and_fail, args=(carry,), daemon=True).start()
            wait_until(lambda: real.is_at_work("birch"))
        else:
            answer = carry()
        real.kill("birch")
        if again:
            real.start_site_process("birch")
        return answer if when == "after its reply" else None

    return act


@pytest.mark.parametrize("when", ["while it trains", "before its reply", "after its reply"])
def test_a_site_process_that_is_killed_and_started_again_changes_no_bit(real, expected, when):
    name = f"again {when}"
    real.taps["birch"].script = at_round(2, killer(real, when, again=True))
    code, text = real.run(write(real, name), RETRY)
    assert code == 0, text
    real.check_equal(name, expected, disturbed=True)


def test_a_site_process_that_is_killed_ends_a_run_that_resumes_with_equal_bits(real, expected):
    real.taps["birch"].script = at_round(2, killer(real, "before its reply", again=False))
    code, text = real.run(write(real, "ended"))
    assert code == 4
    assert "birch" in text
    assert "its site process does not answer" in text
    assert "Traceback" not in text
    real.start_site_process("birch")
    code, text = real.resume("ended")
    assert code == 0, text
    real.check_equal("ended", expected, disturbed=True)


def test_a_run_that_skips_completes_without_a_site_that_is_killed(real):
    real.taps["birch"].script = at_round(2, killer(real, "before its reply", again=False))
    code, text = real.run(write(real, "skipped"), SKIP)
    assert code == 0, text
    records = Records(real.folder / "r" / "skipped" / "iopfl" / "seed-0" / "server")
    second = records.read(2)
    assert {left["client"] for left in second.left_out} == {"birch"}
    assert [name for name, loss in second.losses.items() if loss is None] == ["birch"]
    assert records.read(1).left_out == []


def kill_job_process(real: Any, place: str) -> None:
    """Kill FLARE's job process in a kit; that of the kit itself has no job's name."""
    (pid,) = real.pids(f"con/{place}", "_process")
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("place", ["sites/birch", "server"])
def test_a_job_process_that_is_killed_changes_no_bit(real, expected, place):
    name = f"job of {place.rpartition('/')[2]}"

    def act(header: dict[str, Any], carry: Any) -> Any:
        kill_job_process(real, place)
        return carry()

    real.taps["birch"].script = at_round(2, act)
    code, text = real.run(write(real, name))
    assert code == 0, text
    real.check_equal(name, expected, disturbed=True)


def test_a_server_that_is_killed_and_started_again_changes_no_bit(real, expected):
    def act(header: dict[str, Any], carry: Any) -> Any:
        real.kill("server")
        for pid in real.pids("con/server", "_process"):
            os.kill(pid, signal.SIGKILL)
        real.start_server()
        return carry()

    real.taps["birch"].script = at_round(2, act)
    code, text = real.run(write(real, "server"))
    assert code == 0, text
    real.check_equal("server", expected, disturbed=True)
    real.wait()


def test_a_whole_site_that_is_killed_is_back_in_the_next_job(real, expected):
    def act(header: dict[str, Any], carry: Any) -> Any:
        real.kill("birch")
        real.kill("birch relay")
        for pid in real.pids("con/sites/birch"):
            os.kill(pid, signal.SIGKILL)
        real.start_site_process("birch")
        real.start_relay("birch")
        return None

    real.taps["birch"].script = at_round(2, act)
    code, text = real.run(write(real, "whole"), RETRY)
    assert code == 0, text
    real.check_equal("whole", expected, disturbed=True)
    real.wait()


def test_a_run_whose_command_is_killed_resumes_with_equal_bits(real, expected):
    running: list[Any] = []

    def act(header: dict[str, Any], carry: Any) -> Any:
        os.killpg(running[0].pid, signal.SIGKILL)
        return carry()

    real.taps["birch"].script = at_round(2, act)
    running.append(real.begin(write(real, "killed")))
    running[0].communicate(timeout=300)
    assert running[0].returncode == -signal.SIGKILL
    code, text = real.resume("killed")
    assert code == 0, text
    real.check_equal("killed", expected, disturbed=True)


def change(edit: Any) -> Any:
    """A script that edits the reply to a training request, and signs it off as its own."""

    def act(header: dict[str, Any], carry: Any) -> Any:
        answer, data = carry()
        forged = pack(edit(unpack(data)))
        signed = {**answer["signed"], "sha256": hashlib.sha256(forged).hexdigest()}
        return {**answer, "signed": signed}, forged

    return at_round(2, act)


def of_model(edit: Any) -> Any:
    def in_envelope(envelope: dict[str, Any]) -> dict[str, Any]:
        model = envelope["reply"]["model"]
        name = next(iter(model))
        envelope["reply"]["model"] = type(model)(edit(dict(model), name))
        return envelope

    return change(in_envelope)


FAKES: dict[str, tuple[Any, str]] = {
    "nan": (of_model(lambda m, n: {**m, n: m[n] * float("nan")}), "finite"),
    "shape": (of_model(lambda m, n: {**m, n: m[n][:1]}), "expected (4, 1, 3, 3)"),
    "name": (of_model(lambda m, n: {("other" if k == n else k): v for k, v in m.items()}), "other"),
    "part": (
        change(lambda e: {**e, "reply": {**e["reply"], "images": Tensors({"a": torch.zeros(3)})}}),
        "images",
    ),
    "tenfold": (at_round(2, lambda _, carry: (carry()[0], carry()[1] * 10)), "birch"),
    "huge": (at_round(2, lambda _, carry: (carry()[0], bytes(30 << 20))), "birch"),
    "garbage": (at_round(2, lambda _, carry: ({"seconds": "x"}, b"garbage")), "birch"),
    "empty": (at_round(2, lambda _, carry: ({}, b"")), "birch"),
    "error": (at_round(2, lambda _, carry: ({"error": 3}, b"")), "birch"),
}


@pytest.mark.parametrize("fake", FAKES)
def test_nonsense_of_a_site_is_named_and_used_nowhere(real, expected, fake):
    script, said = FAKES[fake]
    real.taps["birch"].script = script
    code, text = real.run(write(real, f"fake {fake}"))
    assert code == 4, text
    assert "birch" in text
    assert said in text
    assert "Traceback" not in text
    real.taps["birch"].script = lambda _, carry: carry()
    code, text = real.resume(f"fake {fake}")
    assert code == 0, text
    real.check_equal(f"fake {fake}", expected, disturbed=True)


def test_a_site_that_is_not_in_the_experiment_is_never_asked(real):
    sites = {name: {"remote": True} for name in ("alder", "birch")}
    federation = {**real.image_words(), "sites": sites}
    before = len(real.taps["cedar"].calls)
    code, text = real.run(real.write("two", federation=federation, algorithms=["fedavg"]))
    assert code == 0, text
    assert len(real.taps["cedar"].calls) == before
    assert not (real.state("cedar") / "runs" / "two").exists()


def test_a_full_disk_at_a_site_is_named_without_a_path(real, expected):
    real.kill("birch")
    real.start_site_process("birch", most_bytes=4096)
    code, text = real.run(write(real, "full"))
    assert code in {4, 5}
    assert "birch" in text
    assert "the details are in the log of this site" in text
    assert str(real.folder / "s") not in text
    assert "Traceback" not in text
    real.kill("birch")
    real.start_site_process("birch")
    code, text = real.resume("full")
    assert code == 0, text
    real.check_equal("full", expected, disturbed=True)
