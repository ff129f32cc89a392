"""Runs over NVIDIA FLARE, with real processes, against runs of the same files in this process."""

from typing import Any


def run_both(federation: Any, name: str, *overrides: str, **settings: Any) -> dict[str, bytes]:
    """Run an experiment in both ways; check that they have the same bits, and return those."""
    file = federation.write(name, **settings)
    reference = federation.reference(file)
    federation.wait()
    code, text = federation.run(file, *overrides)
    assert code == 0, text
    found: dict[str, bytes] = federation.check_equal(name, reference)
    return found


def test_iopfl_has_the_bits_of_a_run_in_one_process(federation):
    found = run_both(federation, "paths", algorithms=["iopfl"])
    folder = "iopfl/seed-0"
    assert {f"{folder}/server/global.safetensors", f"{folder}/server/records/test.json"} <= {*found}
    for site in federation.names:
        mine = f"{folder}/clients/{site}"
        wanted = {"personal.safetensors", "best.state", "ledger.jsonl", "states/000002-0000.state"}
        assert {f"{mine}/{name}" for name in wanted} <= {*found}


def test_coded_messages_have_the_bits_of_a_run_in_one_process(federation):
    codec = {"up": {"name": "stc", "p": 0.1}, "down": "half"}
    found = run_both(federation, "coded", algorithms=["fedavg"], codec=codec)
    for site in federation.names:
        assert b'"codec": "stc"' in found[f"fedavg/seed-0/clients/{site}/ledger.jsonl"]
