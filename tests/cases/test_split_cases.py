"""The field cases about patients, small sites and read-only data."""

import csv
import hashlib
import shutil
from collections import Counter
from pathlib import Path

import pytest

from collegium.core.randomness import generator
from collegium.data.federation import find_cases, open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.sampling import SamplingConfig
from collegium.data.site import Case
from collegium.data.splits import SplitConfig, check_across_sites, draw_splits


@pytest.fixture(scope="module")
def spl01(cases) -> tuple[dict[str, list[Case]], Path]:
    folder = cases / "spl01_duplicate_patients"
    sites: dict[str, list[Case]] = {"a": [], "b": []}
    with (folder / "manifest.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            image = folder / row["image"]
            case = Case(row["site"], image.stem, row["patient_id"], (image,), image, stated=True)
            sites[row["site"]].append(case)
    return sites, folder


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("site", ["a", "b"])
def test_spl01_keeps_a_patient_in_one_split(spl01, values, site, seed):
    cases = spl01[0][site]
    splits = draw_splits(cases, SplitConfig(0.2, 0.2), seed)
    by_patient = {case.patient: splits[case.case] for case in cases}
    assert all(splits[case.case] == by_patient[case.patient] for case in cases)
    assert len(by_patient) == values[f"patients_site_{site}"]


def test_spl01_reports_the_shared_patient_and_the_identical_files(spl01, values):
    sites, folder = spl01
    findings = check_across_sites(sites)
    found = {
        "shared_patients": [f.patients[0] for f in findings if f.kind == "shared_patient"],
        "identical_files": [
            [path.relative_to(folder).as_posix() for path in f.files]
            for f in findings
            if f.kind == "identical_files"
        ],
    }
    assert found == {key: values[key] for key in found}
    assert all(f.sites == ("a", "b") for f in findings)


def test_spl02_splits_ten_five_and_one_case(folder, values):
    train, val = [], []
    for site in ("site_a", "site_b", "site_c"):
        with (folder / f"{site}.csv").open(encoding="utf-8") as file:
            ids = [row["id"] for row in csv.DictReader(file)]
        cases = [Case(site, name, name, (Path(name),), Path(name)) for name in ids]
        counts = Counter(draw_splits(cases, SplitConfig(0.2, 0), seed=0).values())
        train.append(counts["train"])
        val.append(counts["val"])
        assert counts["test"] == 0
    assert {"train": train, "val": val} == {k: values[k] for k in ("train", "val")}


def hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def read_only(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder / "data", data)
    everything = [data, *data.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield data
    for path in everything:
        path.chmod(0o755)


def test_run02_trains_on_read_only_data_and_leaves_it_as_it_is(values, read_only, tmp_path):
    config = FederationConfig(
        "read-only",
        {"only": SiteConfig(folder="data")},
        root=str(tmp_path),
        sampling=SamplingConfig((4, 4, 4)),
    )
    sites = open_federation(config, tmp_path / "cache", 0, tmp_path / "splits")
    train = sites["only"].train
    batch = train.batch([0], [generator(0, "run02")])
    assert batch["image"].shape == (1, 1, 4, 4, 4)
    assert len(find_cases(config, "only")) == 3
    after = hashes(read_only)
    assert after == values["sha256"]
    assert len(after) == values["n_files"]
