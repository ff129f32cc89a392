"""Sites whose masks are empty of a structure, or inverted, are told by `inspect` and by a run."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from collegium.data.federation import open_federation, open_site
from collegium.data.federation_config import FederationConfig, SiteConfig
from collegium.data.inspection import inspect_federation
from collegium.data.mask_consistency import MaskCounts, mask_notes
from collegium.data.settings import TaskConfig

ORGANS = TaskConfig(classes=("background", "liver", "spleen"))
LESION = TaskConfig(classes=("background", "lesion"))


def federation(
    root: Path, task: TaskConfig, **masks: Callable[[int], np.ndarray]
) -> FederationConfig:
    """Sites of four cases with the masks that are drawn for each."""
    for name, draw in masks.items():
        for number in range(4):
            image = np.random.default_rng([number, *name.encode()]).integers(0, 200, (10, 10))
            for kind, values in (("images", image), ("labels", draw(number))):
                (root / name / kind).mkdir(parents=True, exist_ok=True)
                Image.fromarray(values.astype(np.uint8)).save(root / name / kind / f"{number}.png")
    sites = {name: SiteConfig(folder=name, patient="(.+)") for name in masks}
    return FederationConfig("f", sites, root=str(root), task=task)


def blob(*values: int) -> Callable[[int], np.ndarray]:
    """Return what draws a mask with a row of five pixels of each value."""

    def draw(number: int) -> np.ndarray:
        mask = np.zeros((10, 10))
        for row, value in enumerate(values):
            mask[row, number : number + 5] = value
        return mask

    return draw


def notes_of(config: FederationConfig) -> dict[str, list[str]]:
    found = {site.name: site.notes for site in inspect_federation(config).sites}
    words = ("masks holds", "inverted")
    return {
        name: [note for note in notes if any(word in note for word in words)]
        for name, notes in found.items()
    }


def warned(
    config: FederationConfig, root: Path, caplog: pytest.LogCaptureFixture
) -> dict[str, list[str]]:
    """Return what a run warns of, by site."""
    with caplog.at_level(logging.WARNING):
        open_federation(config, root / "cache", 0, root / "splits")
    said = [record.getMessage().partition(": ") for record in caplog.records]
    return {
        name: [text for site, _, text in said if site == f"site {name}"] for name in config.sites
    }


def test_a_structure_that_no_mask_of_a_site_holds_is_told_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = federation(tmp_path, ORGANS, a=blob(1, 2), b=blob(1), c=blob(1, 2))
    notes = notes_of(config)
    assert (notes["a"], notes["c"]) == ([], [])
    (note,) = notes["b"]
    assert note.startswith("none of its 4 masks holds spleen (4 of 4 at a, 4 of 4 at c do): look ")
    assert warned(config, tmp_path, caplog) == notes
    caplog.clear()
    assert warned(config, tmp_path, caplog) == {"a": [], "b": [], "c": []}  # said once
    only = replace(config.sites["b"], labelled=("liver",))
    assert notes_of(replace(config, sites={**config.sites, "b": only}))["b"] == []


def test_masks_that_are_all_empty_are_told_at_a_site_of_its_own_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = federation(tmp_path, LESION, a=blob(1), b=blob())
    (note,) = notes_of(config)["b"]
    assert note.startswith("none of its 4 masks holds lesion (4 of 4 at a do): ")
    with caplog.at_level(logging.WARNING):
        open_site(config, "b", tmp_path / "cache", 0, None)
    assert "site b: none of its 4 masks holds lesion: look" in caplog.text


def test_one_empty_mask_among_others_is_nothing_to_tell(tmp_path: Path) -> None:
    def some(number: int) -> np.ndarray:
        return blob(*([1] if number else []))(number)

    assert notes_of(federation(tmp_path, LESION, a=blob(1), b=some)) == {"a": [], "b": []}


@pytest.mark.parametrize("white", [1, 255])
def test_inverted_masks_are_told_with_shares_and_the_map_that_turns_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, white: int
) -> None:
    config = federation(
        tmp_path, LESION, a=blob(white), b=lambda n: white - blob(white)(n), c=blob(white, white)
    )
    notes = notes_of(config)
    assert (notes["a"], notes["c"]) == ([], [])
    (note,) = notes["b"]
    assert note.startswith("the foreground covers 95% of its masks, and 8% elsewhere: look ")
    assert "{0: 1, 1: 0} at the site, or {0: 1, 255: 0} where they hold 255" in note
    assert warned(config, tmp_path, caplog) == notes
    turned = replace(config.sites["b"], label_map={0: 1, white: 0})
    mended = replace(config, sites={**config.sites, "b": turned})
    assert notes_of(mended)["b"] == []
    assert inspect_federation(mended).sites[1].foreground == pytest.approx(0.05)


def test_pixels_that_nobody_annotated_are_in_no_share(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def sparse(number: int) -> np.ndarray:
        mask = np.full((10, 10), 255)
        mask[0, :6] = [0, 1, 1, 1, 1, 1]
        return mask

    config = federation(tmp_path, replace(LESION, ignore=255), a=blob(1), b=sparse)
    notes = notes_of(config)
    (note,) = notes["b"]
    assert note.startswith("the foreground covers 83% of its masks, and 5% elsewhere: ")
    assert warned(config, tmp_path, caplog) == notes


def test_large_structures_everywhere_are_not_inverted() -> None:
    shares = {"a": 0.8, "b": 0.5, "c": 0.4}
    sites = {name: MaskCounts(4, {0: 4, 1: 4}, share) for name, share in shares.items()}
    assert mask_notes(sites, LESION) == {"a": [], "b": [], "c": []}
    alone = {"a": MaskCounts(4, {0: 4, 1: 4}, 0.9)}
    assert mask_notes(alone, LESION) == {"a": []}
    assert mask_notes({"a": MaskCounts(0, {}, None)}, LESION) == {"a": []}
