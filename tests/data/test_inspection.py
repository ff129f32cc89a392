"""A look at all the data of a federation that lists all that is wrong."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collegium.data.federation import FederationConfig, ImageConfig, SamplingConfig, SiteConfig
from collegium.data.inspection import inspect_federation


def case(site: Path, name: str, pixels: np.ndarray, label: np.ndarray) -> None:
    for folder, values in (("images", pixels), ("labels", label)):
        (site / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(values.astype(np.uint8)).save(site / folder / f"{name}.png")


@pytest.fixture
def federation(tmp_path) -> FederationConfig:
    """Site A is sound; at B one label does not fit and one image has no mask; C is not there."""
    square = np.arange(16).reshape(4, 4)
    half = np.repeat([0, 0, 255, 255], 4).reshape(4, 4)
    case(tmp_path / "A", "p1", square + 10, half)
    case(tmp_path / "A", "p2", square + 100, half * 0)
    case(tmp_path / "B", "p1", square, half)
    case(tmp_path / "B", "q2", square, half[:3])
    case(tmp_path / "B", "q3", square + 100, half)
    (tmp_path / "B" / "labels" / "q3.png").unlink()
    sites = {name: SiteConfig(folder=name) for name in "ABC"}
    return FederationConfig("f", sites, root=str(tmp_path), outside=("B",))


def test_a_sound_site_is_described_by_numbers(federation):
    site = inspect_federation(federation).sites[0]
    assert (site.name, site.inside, site.cases, site.readable, site.patients) == (
        "A",
        True,
        2,
        2,
        2,
    )
    assert site.shapes == {"4x4": 2}
    assert site.channels == {"1": 2}
    assert site.spacings == {"unknown": 2}
    assert site.intensity == (10.0, 115.0)
    assert site.labels == {"0": 2, "1": 1}
    assert site.foreground == 8 / 32
    assert site.splits == {"train": 1, "val": 1, "test": 0}
    assert site.patients_per_split == {"train": 1, "val": 1, "test": 0}
    assert site.problems == ()


def test_every_problem_is_listed_with_its_place(federation):
    inspection = inspect_federation(federation)
    _, damaged, absent = inspection.sites
    assert (damaged.inside, damaged.cases, damaged.readable) == (False, 2, 1)
    assert len(damaged.problems) == 2
    assert damaged.problems[0].startswith("site B, case q3: its image")
    assert "site B, case q2: mask shape (3, 4) differs from image (4, 4)" in damaged.problems[1]
    assert "site C: there is no folder" in absent.problems[0]
    assert (absent.intensity, absent.foreground) == (None, None)
    assert not inspection.good


def test_what_sites_share_is_found(federation):
    inspection = inspect_federation(federation)
    assert inspection.shared_patients == 1
    kinds = [(finding.kind, finding.patients) for finding in inspection.findings]
    assert kinds == [("shared_patient", ("p1",)), ("identical_files", ("p1", "q2"))]


def test_an_inspection_can_be_written_as_json(federation, tmp_path):
    inspection = inspect_federation(federation)
    back = json.loads(json.dumps(inspection.to_dict()))
    assert back["good"] is False
    assert back["sites"][0]["intensity"] == [10.0, 115.0]
    assert back["findings"][1]["files"] == [
        str(tmp_path / "B" / "images" / f"{name}.png") for name in ("p1", "q2")
    ]


def test_the_foreground_is_counted_inside_the_field_of_view(tmp_path):
    case(tmp_path / "A", "p1", np.arange(16).reshape(4, 4), np.eye(4) * 255)
    (tmp_path / "A" / "fov").mkdir()
    inside = np.repeat([255, 0], 8).reshape(4, 4).astype(np.uint8)
    Image.fromarray(inside).save(tmp_path / "A" / "fov" / "p1.png")
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert (site.foreground, site.with_fov) == (2 / 8, 1)


def test_shapes_that_do_not_fit_into_a_batch_are_a_problem_unless_cropped(tmp_path):
    for size in (4, 5):
        case(tmp_path / "A", f"p{size}", np.arange(size * 4).reshape(size, 4), np.zeros((size, 4)))
    sites = {"A": SiteConfig(folder="A")}
    loose = FederationConfig("f", sites, root=str(tmp_path))
    (problem,) = inspect_federation(loose).sites[0].problems
    assert "2 shapes and do not fit into one batch: set sampling.crop" in problem
    cropped = FederationConfig("f", sites, root=str(tmp_path), sampling=SamplingConfig((4, 4)))
    sized = FederationConfig("f", sites, root=str(tmp_path), image=ImageConfig(size=(4, 4)))
    assert inspect_federation(cropped).good
    assert inspect_federation(sized).good


def test_channels_that_differ_within_and_across_sites_are_problems(tmp_path):
    case(tmp_path / "A", "p1", np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    case(tmp_path / "A", "p2", np.arange(48).reshape(4, 4, 3), np.zeros((4, 4)))
    case(tmp_path / "B", "q1", np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    sites = {name: SiteConfig(folder=name) for name in "AB"}
    inspection = inspect_federation(FederationConfig("f", sites, root=str(tmp_path)))
    assert "its images have 1 and 3 channels" in inspection.sites[0].problems[0]
    assert "(A: 1/3, B: 1)" in inspection.problems[0]


def test_splits_that_cannot_be_drawn_are_a_problem_among_others(tmp_path):
    for name in ("L", "R"):
        case(tmp_path, name, np.arange(16).reshape(4, 4), np.zeros((4, 4)))
    rows = [f"{eye},p1,images/{eye}.png,labels/{eye}.png,{split}" for eye, split in
            (("L", "train"), ("R", "test"))]  # fmt: skip
    text = "\n".join(["case,patient,image,label,split", *rows])
    (tmp_path / "m.csv").write_text(text, "utf-8")
    config = FederationConfig("f", {"A": SiteConfig(manifest="m.csv")}, root=str(tmp_path))
    (site,) = inspect_federation(config).sites
    assert "its patient p1 is in the splits train and test" in site.problems[0]
    assert site.readable == 2


def test_what_was_noticed_of_many_files_is_said_once(tmp_path):
    for index, name in enumerate(["p1", "p2", "p3"]):
        case(tmp_path / "A", name, np.arange(16).reshape(4, 4) + index, np.eye(4) * 255)
    config = FederationConfig("f", {"A": SiteConfig(folder="A")}, root=str(tmp_path))
    text = "the mask's values 0 and 255 were read as classes 0 and 1"
    assert inspect_federation(config).sites[0].notes == (f"p1.png and 2 more: {text}",)
