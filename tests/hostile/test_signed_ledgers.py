"""A site's ledger that was cut, emptied or written anew no longer follows what was signed off."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from collegium.algorithms.fedavg import FedAvg
from collegium.errors import ProtocolError
from collegium.runtime.engines.inprocess import InProcess
from collegium.runtime.ledger import START, SignOff, first_break, read_ledger
from collegium.runtime.participation import EVERYBODY, SKIPPING
from collegium.runtime.records import Records, RoundRecord
from collegium.runtime.requests import Request, Response
from collegium.runtime.run import Run
from collegium.testing.toy import ToyFederation

SITE = "B"


class Tampering(InProcess):
    """Changes the ledger of a site before a request of a round, on disk and behind its back."""

    def __init__(self, federation: ToyFederation, change: Callable[[Path], None]) -> None:
        super().__init__(federation.clients)
        self._change, self._file = change, federation.root / "clients" / SITE / "ledger.jsonl"

    def exchange(self, requests: Iterable[Request]) -> Iterator[Response]:
        for request in requests:
            if (request.client, request.round, request.stage) == (SITE, 2, "train"):
                self._change(self._file)
                self._clients = None  # a site that was started again
            yield from super().exchange([request])


def cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def remove(path: Path) -> None:
    path.unlink()


def write_anew(path: Path) -> None:
    """Write as many lines as there were, with an unbroken chain that says something else."""
    from collegium.runtime.ledger import Ledger

    count = len(read_ledger(path))
    path.unlink()
    ledger = Ledger(path)
    for number in range(count):
        ledger.append({}, b"", round=number)
    assert first_break(read_ledger(path)) is None


CHANGES: dict[Callable[[Path], None], str] = {
    cut: "has 2 lines, and 2 were signed off before this message: lines were removed",
    empty: "has 1 lines, and 2 were signed off before this message: lines were removed",
    remove: "has 1 lines, and 2 were signed off before this message: lines were removed",
    write_anew: "line 2 of its ledger is not the one that was signed off",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_that_was_changed_is_told_at_the_next_message(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    def run(root: Path, *, skip: bool) -> ToyFederation:
        federation = ToyFederation(
            FedAvg(), root, lambda f: Tampering(f, change),
            participation=SKIPPING if skip else EVERYBODY,
        )  # fmt: skip
        return federation.run(2)

    with pytest.raises(ProtocolError, match=f"^client '{SITE}', round 2, train: ") as caught:
        run(tmp_path / "fail", skip=False)
    assert CHANGES[change] in str(caught.value)
    run(tmp_path / "skip", skip=True)
    left_out = Records(tmp_path / "skip/server").read(2).left_out
    assert [left["client"] for left in left_out] == [SITE]


def stop_after_two(record: RoundRecord) -> None:
    if record.round == 2:
        raise KeyboardInterrupt


def test_a_run_that_is_resumed_knows_what_was_signed_off_before(tmp_path: Path) -> None:
    first = ToyFederation(FedAvg(), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        Run(first.server, 3, "negative_loss").execute(stop_after_two)
    signed = dict(first.server.border.signed)
    lines = read_ledger(tmp_path / "clients" / SITE / "ledger.jsonl")
    assert (signed[SITE].lines, signed[SITE].last) == (len(lines), lines[-1]["hash"])
    empty(tmp_path / "clients" / SITE / "ledger.jsonl")
    again = ToyFederation(FedAvg(), tmp_path)
    with pytest.raises(ProtocolError, match="were signed off before this message"):
        Run(again.server, 3, "negative_loss").execute()


def sign_off(lines: int, last: str, previous: str) -> SignOff:
    return SignOff(lines, last * 64, previous * 64, DIGEST)


DATA = b"data"
DIGEST = "3a6eb0790f39ac87c94f3856b2dd2c5d110e6811602261a9a923d3bb23adc8b7"  # sha256sum of "data"


def test_messages_that_were_lost_on_their_way_are_no_tampering() -> None:
    before = sign_off(3, "a", "b")
    sign_off(4, "c", "a").check_follows(before, DATA)
    sign_off(9, "c", "d").check_follows(before, DATA)  # five lines that never arrived
    sign_off(1, "a", "0").check_follows(None, DATA)
    assert START == "0" * 64


@pytest.mark.parametrize("found", [sign_off(3, "a", "b"), sign_off(4, "c", "d")])
def test_what_does_not_follow_is_refused(found: SignOff) -> None:
    with pytest.raises(ProtocolError):
        found.check_follows(sign_off(3, "a", "b"), DATA)


def test_a_message_that_is_not_the_recorded_one_is_refused() -> None:
    with pytest.raises(ProtocolError, match="records another message than the one that arrived"):
        sign_off(1, "a", "0").check_follows(None, DATA + b"x")
