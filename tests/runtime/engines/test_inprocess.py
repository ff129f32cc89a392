import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from collegium.core.memory import LACK
from collegium.core.message import unpack
from collegium.runtime import process
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.requests import Request


class Echo:
    """A client that answers with its name and what it was asked, and may misbehave."""

    signed = None

    def __init__(self, name: str) -> None:
        self.name = name

    def handle(self, request: Request) -> bytes:
        if request.method == "die":
            os._exit(3)
        if request.method == "sleep":
            time.sleep(float(request.payload))
        return f"{self.name}|{request.method}|{os.getpid()}|".encode() + request.payload


def build() -> dict[str, Echo]:
    return {name: Echo(name) for name in "ABCD"}


class Visible:
    """A client that answers with the GPUs that its process sees, and how many torch finds."""

    signed = None

    def handle(self, request: Request) -> bytes:
        import torch

        if request.method == "die":
            os._exit(3)
        found = torch.cuda.device_count() if request.method == "count" else 0
        return f"{os.environ.get(process.VISIBLE)} {found}".encode()


def build_visible() -> dict[str, Visible]:
    return {name: Visible() for name in "ABCD"}


def build_without_memory() -> dict[str, Echo]:
    np.empty(1 << 60, np.uint8)
    return {}


def build_and_die() -> dict[str, Echo]:
    os._exit(5)


def request(client: str, method: str = "train", payload: bytes = b"") -> Request:
    return Request(client, 3, 1, "train", method, payload)


@pytest.fixture(scope="module")
def workers() -> Iterator[InProcess]:
    engine = InProcess(build, workers=2)
    yield engine
    engine.close()


def test_one_worker_is_this_process_and_takes_requests_one_by_one():
    engine = InProcess(build)
    taken: list[str] = []

    def requests() -> Iterator[Request]:
        for client in "ABC":
            taken.append(client)
            yield request(client)

    seen = []
    for response in engine.exchange(requests()):
        seen.append(response.client)
        assert taken == seen
        assert response.data == f"{response.client}|train|{os.getpid()}|".encode()
        assert response.seconds >= 0
    assert seen == ["A", "B", "C"]


def test_clients_are_built_once_and_again_after_a_close():
    built = []
    engine = InProcess(lambda: built.append(1) or build())  # type: ignore[func-returns-value]
    for _ in range(2):
        list(engine.exchange([request("A")]))
    assert len(built) == 1
    engine.close()
    list(engine.exchange([request("A")]))
    assert len(built) == 2


def test_two_workers_share_the_requests_and_the_payload_is_intact(workers):
    payload = bytes(range(256)) * 8192  # 2 MiB: more than a pipe holds
    answers = {
        a.client: a.data for a in workers.exchange(request(c, payload=payload) for c in "ABCD")
    }
    assert sorted(answers) == ["A", "B", "C", "D"]
    for client, data in answers.items():
        name, method, pid, rest = data.split(b"|", 3)
        assert (name, method, rest) == (client.encode(), b"train", payload)
        assert int(pid) != os.getpid()
    assert len({data.split(b"|", 3)[2] for data in answers.values()}) <= 2


def test_workers_share_the_gpus_and_a_new_one_takes_its_predecessors():
    engine = InProcess(build_visible, workers=2, gpus=["3", "5"])
    try:
        found = {r.data for r in engine.exchange(map(request, "ABCD"))}
        assert found <= {b"3 0", b"5 0"}
        (ended,) = engine.exchange([request("A", "die")])
        assert ended.missing
        both = {r.data for _ in range(2) for r in engine.exchange(map(request, "ABCD"))}
        assert both == {b"3 0", b"5 0"}
    finally:
        engine.close()


@pytest.mark.gpu
def test_torch_finds_one_gpu_in_every_worker(cuda):
    engine = InProcess(build_visible, workers=2, gpus=process.shared_gpus(cuda)[:2])
    try:
        counts = {r.data.split()[1] for r in engine.exchange(request(n, "count") for n in "ABCD")}
        assert counts == {b"1"}
    finally:
        engine.close()


def test_answers_come_as_they_are_ready(workers):
    list(workers.exchange([request("A"), request("B")]))  # both have started
    slow, quick = request("A", "sleep", b"1.0"), request("B")
    assert [response.client for response in workers.exchange([slow, quick])] == ["B", "A"]


def test_worker_that_dies_is_reported_and_replaced():
    engine = InProcess(build, workers=2)
    try:
        found = {
            r.client: r for r in engine.exchange([request("A"), request("B", "die"), request("C")])
        }
        assert found["B"].missing.startswith("its process ended with code 3 ")
        assert found["B"].missing.endswith("use fewer workers or a smaller batch_size and resume")
        assert not found["A"].missing
        assert not found["C"].missing
        again = {r.client: r.missing for r in engine.exchange(map(request, "ABCD"))}
        assert again == dict.fromkeys("ABCD", "")
    finally:
        engine.close()


def test_clients_that_cannot_be_built_in_a_worker_answer_with_the_reason():
    engine = InProcess(build_without_memory, workers=2)
    try:
        found = {r.client: unpack(r.data) for r in engine.exchange(map(request, "AB"))}
        error = {"kind": "OutOfMemory", "text": LACK}
        assert found == {"A": {"error": error}, "B": {"error": error}}
    finally:
        engine.close()


@pytest.mark.parametrize("size", [0, 4 << 20])
def test_worker_that_dies_before_it_can_be_asked_is_reported(size):
    """A large payload fails in the sending, a small one in the receiving."""
    engine = InProcess(build_and_die, workers=2)
    try:
        (found,) = engine.exchange([request("A", payload=b"x" * size)])
        assert found.client == "A"
        assert "its process ended with code 5 " in found.missing
    finally:
        engine.close()


def test_close_ends_idle_and_busy_processes(workers):
    exchange = workers.exchange([request("A", "sleep", b"60"), request("B")])
    idle = next(exchange)
    assert idle.client == "B"
    processes = [worker._process for worker in workers._workers]
    assert int(idle.data.split(b"|")[2]) in {process.pid for process in processes}
    assert all(process.is_alive() for process in processes)
    workers.close()
    assert not any(process.is_alive() for process in processes)
