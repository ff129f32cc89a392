"""A single bit that changes in a stored file is never used: refused in a sentence, or repaired."""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from collegium.adaptation.outside import INDEX_FILE, ModelFiles
from collegium.algorithms.ditto import Ditto
from collegium.core.seals import START_AGAIN, read_json, read_sealed, seal_json
from collegium.data import cache, digests
from collegium.data.identity import check_contents, contents_of_cases, record_contents
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.site import NO_CASES, Case, Site
from collegium.data.splits import SplitConfig, load_or_draw_splits
from collegium.data.tables import Scaling
from collegium.errors import CheckpointError, CollegiumError
from collegium.evaluation.report.overlays import encode_png, write_index
from collegium.evaluation.report.pictures import PictureSheet, read_overlays
from collegium.evaluation.results import (
    read_description,
    read_results,
    read_rows,
    results_frame,
    write_results,
    write_rows,
)
from collegium.experiment.config.experiment import parse_config
from collegium.experiment.job_results import write_model_files
from collegium.experiment.runner import read_run_config, write_run_file
from collegium.experiment.scaling import read_scaling, write_scaling
from collegium.models.files import export_model, import_model
from collegium.runtime.records import Records
from collegium.runtime.run import Run
from collegium.runtime.selection import KeptModels, Selection
from collegium.runtime.state import Store
from collegium.testing.toy import ToyFederation, toy_model

FLIPS = 200
"""How many single bits are changed in turn in every kind of file."""

ROW = {
    "experiment": "e", "algorithm": "fedavg", "seed": 0, "round": 1, "site": "A",
    "case": "test-c001", "patient": "test-p001", "split": "test", "model": "global",
    "metric": "dice", "value": 0.8125,
}  # fmt: skip


def run_in(root: Path, rounds: int = 3) -> Run:
    """Return a run of the toy, as a restarted process builds it."""
    server = ToyFederation(Ditto(), root).server
    return Run(server, rounds, "negative_loss", selection=Selection(min_events=1))


def stop_after(number: int) -> Callable[[Any], None]:
    """Return an observer that stops a run after a round."""

    def observe(record: Any) -> None:
        if record.round == number:
            raise KeyboardInterrupt

    return observe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    run_in(root).execute()
    return root


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("half")
    with pytest.raises(KeyboardInterrupt):
        run_in(root).execute(stop_after(2))
    return root


def content(root: Path) -> dict[str, bytes]:
    """Return what decides and states the outcome of a run; records hold seconds."""
    found = [*root.rglob("*.state"), *root.rglob("test.json")]
    records = [replace(record, seconds={}) for record in Records(root / "server").read_all()]
    return {
        **{str(file.relative_to(root)): file.read_bytes() for file in found},
        "records": repr(records).encode(),
    }


def flips(path: Path) -> Iterator[int]:
    """Change one bit of a file after the other, and undo it; yield the number of the byte."""
    data = path.read_bytes()
    draw = random.Random(path.name)
    for _ in range(FLIPS):
        changed, place = bytearray(data), draw.randrange(len(data))
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        yield place
        path.write_bytes(data)


def assert_refused(path: Path, use: Callable[[], Any]) -> None:
    """Check that a file is read as it is, and with any bit changed refused in one sentence."""
    use()
    for place in flips(path):
        with pytest.raises(CollegiumError) as caught:
            use()
        text = str(caught.value)
        assert str(path) in text or str(path.parent) in text, (path, place)
        assert "\n" not in text
        assert any(w in text for w in ("restore", "remove", "copy", "delete", "again")), text
    use()


def test_states_of_sites_and_kept_models_are_refused(finished):
    for path in (
        max((finished / "clients/B/states").iterdir()),
        max((finished / "clients/B/kept").iterdir()),
        max((finished / "server/kept").iterdir()),
    ):
        assert_refused(path, partial(Store(path.parent).load, path.stem))
        if "-" in path.stem:
            assert_refused(path, partial(Store(path.parent).outline, path.stem))
        else:
            assert_refused(path, partial(KeptModels(path.parent).load, int(path.stem[:6])))


def test_a_damaged_state_of_the_server_gives_way_to_the_one_before(half, tmp_path, caplog):
    root = tmp_path / "server"
    shutil.copytree(half / "server", root)
    for place in flips(root / "000002.state"):
        found = Store(root).load_newest()
        assert found is not None, place
        assert found[0] == "000001"
        assert not (root / "000002.state").exists()
    intact = Store(root).load_newest()
    assert intact is not None
    assert intact[0] == "000002"
    assert "000002.state is damaged; continuing from the state before it" in caplog.text


def test_records_and_evaluations_are_refused(finished):
    assert_refused(finished / "server/records.jsonl", lambda: run_in(finished).execute())


def test_records_that_are_cut_short_are_refused(finished, half, tmp_path):
    path = tmp_path / "run/server/records.jsonl"
    shutil.copytree(finished, tmp_path / "run")
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        path.write_bytes(b"".join(lines[:kept]))
        with pytest.raises(CheckpointError, match="lines at its end are missing"):
            run_in(tmp_path / "run")
    shutil.copytree(half, tmp_path / "half")
    path = tmp_path / "half/server/records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    with pytest.raises(CheckpointError, match=r"round 2 is missing; restore it from a copy"):
        run_in(tmp_path / "half").execute()


def test_a_run_of_an_earlier_version_is_refused(tmp_path):
    (tmp_path / "server/records").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"server belongs to a run of an earlier version"):
        run_in(tmp_path)


def test_what_ledgers_held_before_is_refused(half, tmp_path):
    shutil.copytree(half, tmp_path / "run")
    path = tmp_path / "run/server/ledgers.json"
    for _ in flips(path):
        with pytest.raises(CheckpointError, match=r"ledgers\.json is damaged .* or remove it"):
            run_in(tmp_path / "run").execute()
    path.unlink()
    run_in(tmp_path / "run").execute()


def test_models_are_tested_again_where_the_scores_are_damaged(finished, caplog):
    run, path = run_in(finished), finished / "server/test.json"
    data, scores = path.read_bytes(), run.execute()
    for _ in flips(path):
        assert run.execute() == scores
        assert path.read_bytes() == data
    assert "test.json is damaged; the selected models are tested again" in caplog.text


@pytest.mark.parametrize("file", ["000002.state", "records.jsonl", "both"])
def test_a_run_that_fell_back_has_the_bits_of_an_undisturbed_one(finished, half, tmp_path, file):
    root = tmp_path / "run"
    shutil.copytree(half, root)
    for name in ["000002.state", "records.jsonl"] if file == "both" else [file]:
        path = root / "server" / name
        data = bytearray(path.read_bytes())
        data[-9 if name == "records.jsonl" else len(data) // 2] ^= 4  # in its last line
        path.write_bytes(data)
    run_in(root).execute()
    assert content(root) == content(finished)


def test_rows_and_tables_are_refused(tmp_path):
    rows, job = results_frame([ROW, {**ROW, "round": 2}]), tmp_path / "fedavg/seed-0/rows.jsonl"
    write_rows(job, rows)
    assert_refused(job, lambda: read_rows([job]))
    table, parquet = write_results(rows, tmp_path)
    assert_refused(parquet, lambda: read_results(tmp_path))
    line = parquet.parent / "results.sha256"
    line.write_bytes(line.read_bytes().splitlines(keepends=True)[1])  # that of the table to read
    assert_refused(line, lambda: read_results(tmp_path))
    write_results(rows, tmp_path)
    parquet.unlink()
    assert_refused(table, lambda: read_results(tmp_path))
    job.write_bytes(job.read_bytes().splitlines(keepends=True)[0])  # as it was without seals
    assert len(read_rows([job])) == 1


def test_descriptions_of_a_run_are_refused(tmp_path):
    site = {"folder": str(tmp_path)}
    data = {
        "name": "small", "algorithm": "fedavg", "rounds": 1, "output": str(tmp_path),
        "model": "unet",
        "federation": {
            "name": "f", "sites": {"A": site, "B": site},
            "task": {"name": "segmentation", "classes": ["background", "x"]},
        },
    }  # fmt: skip
    config = parse_config(data)
    write_run_file(config, tmp_path)
    assert_refused(tmp_path / "run.json", lambda: read_run_config(tmp_path))
    assert_refused(tmp_path / "run.json", lambda: read_description(tmp_path))
    assert json.loads((tmp_path / "run.json").read_text())["config"]["name"] == "small"
    changed = read_json(tmp_path / "run.json")
    changed["config"]["rounds"] = 2  # by hand, with a seal of its own
    (tmp_path / "run.json").write_bytes(seal_json(json.dumps(changed)))
    with pytest.raises(CheckpointError, match=r"run\.json is not the one that"):
        read_run_config(tmp_path)
    changed["versions"]["collegium"] = "0.0.1"
    (tmp_path / "run.json").write_bytes(seal_json(json.dumps(changed)))
    assert read_run_config(tmp_path).rounds == 2


def test_splits_and_scalings_are_refused(tmp_path):
    cases = [Case("A", f"c{n}", f"p{n}", (tmp_path / f"{n}.png",), None) for n in range(9)]
    splits = tmp_path / "A.json"
    load = lambda: load_or_draw_splits(cases, SplitConfig(), 1, splits)  # noqa: E731
    load()
    assert_refused(splits, load)
    scaling = tmp_path / "scaling.json"
    write_scaling(scaling, Scaling(np.array([0.5]), np.array([2.0])))
    assert_refused(scaling, lambda: read_scaling(scaling))
    scores = tmp_path / "scores-test.json"
    shutil.copy(scaling, scores)
    assert_refused(scores, lambda: read_sealed(scores, START_AGAIN))


def test_splits_with_the_content_of_the_data_are_refused(tmp_path):
    cases = [Case("A", f"c{n}", f"p{n}", (tmp_path / f"{n}.npy",), None) for n in range(9)]
    for case in cases:
        np.save(case.images[0], np.ones(4))
    splits, contents = tmp_path / "A.json", contents_of_cases(cases, tmp_path / "cache")
    load_or_draw_splits(cases, SplitConfig(), 1, splits)
    record_contents(Site("A", NO_CASES, NO_CASES, NO_CASES, contents=contents), splits)
    assert_refused(splits, lambda: check_contents("A", contents, splits))


def test_recorded_digests_are_taken_again_where_a_line_is_damaged(tmp_path):
    path, record = tmp_path / "image.npy", tmp_path / "cache" / digests.RECORD
    np.save(path, np.arange(9.0))
    os.utime(path, (1e9, 1e9))
    right = digests.file_digest(path, tmp_path / "cache")
    for _ in flips(record):
        digests._remembered.cache_clear()
        digests._read_record.cache_clear()
        assert digests.file_digest(path, tmp_path / "cache") == right


def test_pictures_and_their_index_are_refused(tmp_path):
    folder = tmp_path / "fedavg/seed-0/overlays"
    folder.mkdir(parents=True)
    picture = folder / "c.png"
    picture.write_bytes(encode_png(Image.new("P", (8, 8))))
    entry = dict.fromkeys(("site", "model", "rank", "case", "metric"), "x")
    write_index(folder, [{**entry, "value": 0.5, "file": "c.png"}])
    show = lambda: PictureSheet().add(read_overlays(tmp_path)[0])  # noqa: E731
    assert_refused(folder / "index.json", show)
    assert_refused(picture, show)


def test_exported_models_are_refused(tmp_path):
    path, folder = tmp_path / "global.safetensors", tmp_path / "models"
    export_model(toy_model(0), path)
    assert_refused(path, lambda: import_model(path))
    write_model_files(folder, {"global": toy_model(0), "A": toy_model(1)}, ["A"])
    assert_refused(folder / INDEX_FILE, lambda: ModelFiles(folder))
    assert_refused(folder / "A.safetensors", lambda: ModelFiles(folder)["A"])


def test_a_damaged_entry_of_the_cache_is_refused_and_prepared_again(tmp_path):
    image, label = tmp_path / "image.npy", tmp_path / "label.npy"
    np.save(image, np.arange(64, dtype=np.float32).reshape(8, 8))
    np.save(label, np.eye(8, dtype=np.uint8))
    case = Case("A", "c", "p", (image,), label)
    settings = ImageConfig(), TaskConfig(name="segmentation", classes=("background", "x"))
    made = cache.prepare(case, *settings, tmp_path / "cache")
    whole = {file.name: file.read_bytes() for file in made.folder.iterdir()}
    assert whole.keys() == {"image.npy", "label.npy", "case.json"}
    for name in ("image.npy", "label.npy", "case.json"):
        data = bytearray(whole[name])
        for place in random.Random(name).sample(range(len(data)), min(FLIPS, len(data))):
            cache._open.cache_clear()
            cache._layouts.cache_clear()
            (made.folder / name).write_bytes(
                data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            )
            with pytest.raises(CollegiumError, match="is prepared again"):
                made.arrays()
            again = cache.prepare(case, *settings, tmp_path / "cache")
            assert {file.name: file.read_bytes() for file in again.folder.iterdir()} == whole
            again.arrays()
