"""`inspect` and `run` refuse the same data, as one function decides for both."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from collegium import cli
from collegium.data.federation import open_federation
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.inspection import inspect_federation
from collegium.data.phantoms import make_federation
from collegium.data.settings import ImageConfig, TaskConfig
from collegium.data.splits import SplitConfig
from collegium.data.table_inspection import inspect_tables
from collegium.data.tables import TableConfig
from collegium.errors import CollegiumError
from collegium.experiment.config.experiment import load_federation

DATA = Path(__file__).parent
FIELD = sorted(p for kind in ("cases", "new_cases") for p in (DATA / kind).iterdir() if p.is_dir())
TASK = TaskConfig(name="segmentation", classes=("background", "x"))


def verdicts(config: FederationConfig, cache: Path) -> tuple[bool, bool]:
    """Return whether `inspect` and the opening of a run refuse a federation's data."""
    look = inspect_federation if config.table is None else inspect_tables
    inspected = not look(config).good
    try:
        open_federation(config, cache, 0, None)
    except CollegiumError:
        return inspected, True
    return inspected, False


def federations_in(case: Path, place: Path) -> "list[FederationConfig]":
    """Return the federations that can be made of a field case's files, of a site each."""
    sites = []
    pairs = zip(sorted(case.glob("image*.*")), sorted(case.glob("mask*.*")), strict=False)
    for number, (image, mask) in enumerate(pairs):
        manifest = place / f"{number}.csv"
        manifest.write_text(f"site,id,image,label\na,c{number},{image},{mask}\n")
        sites.append(SiteConfig(manifest=str(manifest)))
    sites += [SiteConfig(folder=str(path)) for path in sorted(case.iterdir()) if path.is_dir()]
    return [
        FederationConfig(
            case.name, {"a": site}, root=str(place), task=TASK, splits=SplitConfig(0, 0)
        )
        for site in sites
    ]


@pytest.mark.filterwarnings("ignore")  # readers warn of some of these files
@pytest.mark.parametrize("case", FIELD, ids=lambda path: path.name)
def test_field_cases_are_refused_by_both_or_by_neither(case: Path, tmp_path: Path):
    for number, config in enumerate(federations_in(case, tmp_path)):
        inspected, opened = verdicts(config, tmp_path / f"cache{number}")
        assert inspected == opened, config.sites["a"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_federation(tmp_path_factory.mktemp("drawn"), 2, cases=4, size=32)


def halved(path: Path) -> None:
    with Image.open(path) as image:
        image.crop((0, 0, 32, 16)).save(path)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-60])


def unknown_value(path: Path) -> None:
    with Image.open(path) as image:
        image.point(lambda value: 7 if value else 0).save(path)


def intact(path: Path) -> None:
    pass


MASK, IMAGE = "birch/masks/birch_002.png", "birch/images/birch_002.png"


@pytest.mark.parametrize(
    ("file", "damage", "settings", "refused"),
    [
        (MASK, intact, (), False),
        (MASK, intact, ("sampling.crop=[16,16]",), False),
        (MASK, intact, ("image.size=[16,16]",), False),
        (MASK, halved, (), True),
        (MASK, cut_short, (), True),
        (MASK, unknown_value, (), True),
        (MASK, Path.unlink, (), True),
        (IMAGE, cut_short, (), True),
        (MASK, intact, ("sampling.crop=[16,16,16]",), True),
        (MASK, intact, ("image.size=[16,16,16]",), True),
        (MASK, intact, ("image.spacing=[1,1]",), True),
        (MASK, intact, ("image.inputs=2", "sites.birch.channels=[2]"), True),
        (MASK, intact, ("sites.birch.channels=[0]",), True),
    ],
)  # fmt: skip
def test_damage_and_settings_are_refused_by_both_or_by_neither(
    drawn: Path, tmp_path: Path, file: str, damage: Callable[[Path], Any], settings, refused: bool
):
    shutil.copytree(drawn.parent, tmp_path / "data")
    damage(tmp_path / "data" / file)
    path = tmp_path / "data/federation.yaml"
    overrides = [f"federation.{setting}" for setting in settings]
    config = load_federation(path, overrides)
    config = replace(config, image=replace(config.image, channels="grey"))
    assert verdicts(config, tmp_path / "cache") == (refused, refused)
    result = CliRunner().invoke(cli.app, ["inspect", str(path), *overrides])
    assert result.exit_code == (3 if refused else 0), result.output


@pytest.mark.parametrize(
    ("row", "refused"),
    [("9,1,test", False), ("9,2,test", True), ("?,1,test", False), ("x,1,test", True)],
)
@pytest.mark.parametrize("scale", ["site", "federation"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_tables_are_refused_by_both_or_by_neither(tmp_path: Path, row, refused, scale, split):
    for site in "ab":
        rows = [f"{n},{n % 2},{split if site == 'b' else 'train'}" for n in range(6)]
        (tmp_path / f"{site}.csv").write_text("\n".join(["age,died,split", *rows, row]))
    config = FederationConfig(
        "f",
        {site: SiteConfig(table=f"{site}.csv") for site in "ab"},
        root=str(tmp_path),
        task=TaskConfig(name="classification", classes=("0", "1")),
        image=ImageConfig(),
        table=TableConfig(label="died", numeric=("age",), split="split", scale=scale),
    )
    untrained = scale == "site" and split == "test"
    assert verdicts(config, tmp_path) == (refused or untrained, refused or untrained)
