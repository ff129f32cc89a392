"""What leaves a site: every byte of it is searched for what must not."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

MARKER = "zanzibar"


def mark(manifest: Path) -> int:
    """Give the cases, the patients and the files of a manifest names with the marker in them."""
    with manifest.open() as file:
        rows = list(csv.DictReader(file))
    root = manifest.parents[1]
    for row in rows:
        for column in ("image", "label"):
            old = root / row[column]
            old.rename(old.with_name(f"{MARKER}-{old.name}"))
            row[column] = str(Path(row[column]).with_name(f"{MARKER}-{old.name}"))
        for column in ("case", "patient"):
            row[column] = f"{MARKER}-{row[column]}"
    with manifest.open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return len(rows)


@pytest.fixture(scope="module")
def marked(make_federation):
    """A federation whose folders, files, cases and patients have names with the marker."""
    real = make_federation(place=MARKER, tapped=True)
    for name in real.names:
        assert mark(real.folder / MARKER / name / "manifest.csv") == 10
        real.describe_site(name, {"manifest": f"{name}/manifest.csv"}, root=MARKER, release=[])
    real.start()
    real.wait()
    return real


def experiment(real: Any, name: str) -> str:
    """Write an experiment of which the server knows no more than the names of the sites."""
    words = real.image_words(MARKER)
    federation = {**words, "sites": {site: {"remote": True} for site in real.names}}
    file: str = real.write(name, federation=federation, algorithms=["iopfl"])
    return file


def on_the_servers_side(real: Any) -> dict[Path, bytes]:
    """Every file that the server, its kits and its runs have written, FLARE's among them."""
    places = [real.folder / "con" / "server", real.folder / "con" / "admin", real.folder / "r"]
    found = [path for place in places for path in place.rglob("*") if path.is_file()]
    found += [real.folder / "server.log", *real.folder.glob("*.said")]
    return {path: path.read_bytes() for path in found}


def check_nothing_left(real: Any) -> None:
    for tap in real.taps.values():
        assert tap.answers
        for header, data in tap.answers:
            assert MARKER not in json.dumps(header).lower()
            assert MARKER.encode() not in data.lower()
    files = on_the_servers_side(real)
    assert any("log" in path.name for path in files)
    assert any(path.name == "test.json" for path in files)
    assert [path for path, data in files.items() if MARKER.encode() in data.lower()] == []


def test_no_path_no_file_and_no_patient_is_in_what_leaves_a_site(marked):
    code, text = marked.run(experiment(marked, "whole"))
    (marked.folder / "whole.said").write_text(text)
    assert code == 0, text
    check_nothing_left(marked)
    # what is searched for is there to be found, at the sites
    own = marked.state("alder").rglob("*")
    assert [path for path in own if path.is_file() and MARKER.encode() in path.read_bytes()]


def test_a_broken_file_is_told_by_its_kind_alone(marked):
    (broken,) = (marked.folder / MARKER / "birch" / "images").glob("*_001.png")
    broken.write_bytes(b"no image")
    marked.kill("birch")
    marked.start_site_process("birch")
    code, text = marked.run(experiment(marked, "broken"))
    (marked.folder / "broken.said").write_text(text)
    assert code == 3
    assert "site birch: a file, a mask, a table or a split there is unusable; the details" in text
    assert "Traceback" not in text
    check_nothing_left(marked)
    assert broken.name in (marked.folder / "birch.log").read_text()
