"""What `collegium inspect` writes for people."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from collegium.cli.inspect import show_inspection
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.image_statistics import LabelSize, MissingChannel
from collegium.data.inspection import Inspection, SiteInspection, inspect_federation
from collegium.data.sampling import SamplingConfig
from collegium.data.settings import TaskConfig


def volumes(folder: Path, count: int, spacing: tuple[float, ...]) -> None:
    """Write volumes of different depths whose axes run to the left, to the back and up."""
    affine = np.diag([-spacing[0], -spacing[1], spacing[2], 1.0])
    for index in range(count):
        shape = (256, 8, 100 + index)
        image = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 1024
        label = (image < -524).astype(np.uint8)  # 500 voxels
        for kind, values in (("images", image), ("labels", label)):
            (folder / kind).mkdir(parents=True, exist_ok=True)
            nib.save(nib.Nifti1Image(values, affine), folder / kind / f"p{index}.nii.gz")


@pytest.fixture(scope="module")
def inspection(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    root = tmp_path_factory.mktemp("data")
    volumes(root / "north", 5, (0.683594, 0.683594, 2.5))
    (root / "south" / "images").mkdir(parents=True)
    (root / "south" / "labels").mkdir()
    for index in range(20):
        (root / "south" / "images" / f"q{index:02}.png").write_bytes(b"x")
        (root / "south" / "labels" / f"q{index:02}.png").write_bytes(b"x")
    sites = {name: SiteConfig(folder=name) for name in ("north", "south")}
    return inspect_federation(
        FederationConfig(
            "f", sites, root=str(root), outside=("north",), sampling=SamplingConfig((4, 4)),
            task=TaskConfig(classes=("background", "gland")),
        )
    )  # fmt: skip


def test_tables_fit_into_100_columns_and_show_geometry_and_volumes(
    inspection: Inspection, capsys: pytest.CaptureFixture[str]
) -> None:
    show_inspection(inspection)
    tables = capsys.readouterr().out.partition("note: ")[0].partition("problem: ")[0]
    lines = [line.rstrip() for line in tables.splitlines()]
    assert max(map(len, lines)) <= 100
    header, north, *more = lines
    assert header.split()[6:] == ["shape", "spacing", "axes", "ch", "range"]
    assert north.split()[:2] == ["north", "5"]
    assert north.split()[6:] == [
        "256x8x100", "0.684x0.684x2.5", "LPS", "1", "-1024", "to", "211967",
    ]  # fmt: skip
    assert [line.split() for line in more[:3]] == [
        ["(outside)", "256x8x101"], ["256x8x102"], ["+", "2"],
    ]  # fmt: skip
    # 500 voxels of 0.683594 * 0.683594 * 2.5 mm3
    assert ["1", "gland", "north", "5", "mL", "0.584", "0.584", "0.584"] in map(str.split, lines)


def test_many_problems_of_a_site_are_cut_short(
    inspection: Inspection, capsys: pytest.CaptureFixture[str]
) -> None:
    show_inspection(inspection)
    written = [x for x in capsys.readouterr().out.splitlines() if x.startswith("problem: ")]
    assert len(inspection.sites[1].problems) == 20
    assert len(written) == 13
    assert written[-1] == "problem: site south: 8 more, which --json lists"


def test_missing_channels_and_regions_are_written(capsys: pytest.CaptureFixture[str]) -> None:
    empty: dict[str, int] = {}
    site = SiteInspection(
        "a", True, 4, 4, 4, empty, empty, empty, empty, empty, {"2": 4},
        (MissingChannel(1, "T2", 4), MissingChannel(2, None, 1)), None, empty,
        (LabelSize(1, "mL", 4, 1.0, 2.0, 3.0), LabelSize("WT", "mL", 3, 4.0, 5.0, 6.0)),
        empty, None, 0, (), (),
    )  # fmt: skip
    show_inspection(Inspection("f", ("background", "edema"), (site,), None, (), ()))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["a", "4", "4", "0", "0", "0", "2"]
    assert lines[2:4] == [["no", "1", "T2"], ["no", "2", "(1)"]]
    assert ["1", "edema", "a", "4", "mL", "1", "2", "3"] in lines
    assert ["WT", "a", "3", "mL", "4", "5", "6"] in lines
