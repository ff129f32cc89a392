"""The results of attacks in the report, and the files that they are read from."""

import base64
import html
import json
import random
from pathlib import Path
from typing import Any

import pytest

from collegium.core.seals import digest_of, seal_json
from collegium.errors import DataError
from collegium.evaluation.report import attacks
from collegium.evaluation.report.attacks import read_attacks
from collegium.evaluation.report.html import write_report
from collegium.evaluation.results import results_frame, write_results

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
SAYS = "From what fedbn sends of one image of <b>Quito in one step, an attacker rebuilds it."
DATA = {
    "results": [{"algorithm": "fedbn"}],
    "sentences": [SAYS, "A second sentence."],
    "table": [
        ["algorithm", "site", "numbers", "p"],
        ["fedbn", "<b>Quito", "16 of 20", "0.5"],
        ["fedbn", "Basel", "16 of 20", "-1"],
    ],
}


def write(output: Path, kind: str = "shared", **changes: Any) -> Path:
    folder = output / "attack"
    folder.mkdir(exist_ok=True)
    (folder / "fedbn.png").write_bytes(PNG)
    (folder / "another.png").write_bytes(PNG + b"of an earlier attack")
    picture = {"file": "fedbn.png", "sha256": digest_of(PNG), "shows": SAYS}
    path = folder / f"{kind}.json"
    path.write_bytes(seal_json(json.dumps({**DATA, "pictures": [picture], **changes})))
    return path


@pytest.fixture
def output(tmp_path):
    rows = [
        {
            "experiment": "e", "algorithm": "fedbn", "seed": 0, "round": 1, "site": "<b>Quito",
            "case": f"c{number}", "patient": f"p{number}", "split": "test", "model": "personal",
            "metric": "dice", "value": 0.5 + number / 10,
        }
        for number in range(3)
    ]  # fmt: skip
    write_results(results_frame(rows), tmp_path)
    (tmp_path / "run.json").write_bytes(seal_json(json.dumps({"config": {"name": "e"}})))
    return tmp_path


def test_the_report_shows_sentences_table_and_the_pictures_that_belong_to_it(output):
    assert "What leaks" not in write_report(output).read_text()
    write(output)
    text = write_report(output).read_text()
    assert "<h3>What leaks</h3>" in text
    assert "<h4>What is shared beside models</h4>" in text
    assert text.count(html.escape(SAYS)) == 2  # as a sentence, and below the picture
    assert "<li>A second sentence.</li>" in text
    assert '<th scope="col" class="text">Site</th><th scope="col">Numbers</th>' in text
    assert '<th scope="col">p</th>' in text
    assert (
        '<th scope="row">fedbn</th><td class="text">Basel</td><td>16 of 20</td><td>-1</td>' in text
    )
    assert text.count(base64.b64encode(PNG).decode()) == 1
    assert text.count("data:image/png") == 1
    hidden = write_report(output, pictures=False).read_text()
    assert "data:image" not in hidden
    assert "A second sentence." in hidden


def test_kinds_stand_by_name_and_other_files_are_passed_over(output):
    write(output, "membership", table=[], pictures=[])
    write(output, "inversion")
    (output / "attack" / "notes.json").write_text("{}")
    assert [(found.title, found.rows != []) for found in read_attacks(output)] == [
        ("An image from an update", True), ("Who was trained on", False)
    ]  # fmt: skip


def test_pictures_that_find_no_room_are_counted(output, monkeypatch):
    monkeypatch.setattr(attacks, "BUDGET", len(PNG))
    write(output, "inversion")
    write(output, "shared")
    assert [(len(found.pictures), found.left_out) for found in read_attacks(output)] == [
        (1, 0), (0, 1)
    ]  # fmt: skip
    assert "1 further picture is in the folder" in " ".join(
        write_report(output).read_text().split()
    )


def test_a_bit_that_changes_is_told_in_a_sentence(output):
    path = write(output)
    draw = random.Random(0)
    for file in (path, path.with_name("fedbn.png")):
        data = file.read_bytes()
        for _ in range(50):
            changed, place = bytearray(data), draw.randrange(len(data))
            changed[place] ^= 1 << draw.randrange(8)
            file.write_bytes(changed)
            with pytest.raises(DataError, match=r"shared\.json: .* attack again .* or remove"):
                read_attacks(output)
        file.write_bytes(data)
    assert len(read_attacks(output)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"pictures": [{"file": "none.png", "sha256": "", "shows": ""}]},
        {"pictures": [{"file": "fedbn.png"}]}, {"pictures": 3}, {"table": [3]},
        {"sentences": 3}, {"pictures": [{"file": "../../../x.png", "sha256": "", "shows": ""}]},
    ],
)  # fmt: skip
def test_what_is_no_result_of_an_attack_is_told_in_a_sentence(output, changes):
    write(output, **changes)
    with pytest.raises(DataError, match=r"shared\.json: .* attack again"):
        read_attacks(output)
