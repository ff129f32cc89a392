"""The pictures that a run stored, each embedded once in the page.

Several methods draw the same case, so image and truth are shared: every different picture becomes
one rule of a style sheet, and whatever shows it names the rule.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

from collegium.errors import DataError
from collegium.evaluation.report.overlays import (
    INDEX,
    LARGEST,
    RANKS,
    encode_for_web,
    read_index,
    read_picture,
)
from collegium.evaluation.results import job_folders
from collegium.evaluation.scores import Where, method_name, position

BUDGET = 15_000_000
"""Bytes of encoded pictures and their markup that a page may hold; pictures become a third more."""

MARKUP = 1_000
"""Bytes of markup that show a picture, about."""

_FOLDERS: dict[Where, str] = {"inside": "overlays", "outside": "outside/*/*/overlays"}
"""The folder of the pictures in that of a job, by whether the site is inside."""


@dataclass(frozen=True)
class Overlay:
    """A picture of one test case.

    Attributes:
        site: Name of the site.
        algorithm: Label of the algorithm.
        seed: Seed of the run.
        model: ``"global"`` or ``"personal"``; outside, the label of the adapter.
        rank: Why the case is shown, one of `collegium.evaluation.report.overlays.RANKS`.
        case: Pseudonym of the case.
        metric: What ranks the cases.
        value: The score of the case; None if undefined.
        file: The picture, with both contours.
        layers: The same as layers by name, see `collegium.evaluation.report.overlays.draw_layers`;
            empty if the run stored none.
        place: The job's variation and fold: its folder in the output folder, without algorithm and
            seed.
        where: Whether the site is inside or outside.
        digests: The SHA-256 of each file by its name, as far as it is known.
    """

    site: str
    algorithm: str
    seed: int
    model: str
    rank: str
    case: str
    metric: str
    value: float | None
    file: Path
    layers: Mapping[str, Path] = field(default_factory=dict)
    place: tuple[str, ...] = ()
    where: Where = "inside"
    digests: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The method as a reader calls it."""
        return method_name(self.algorithm, self.model, self.where)


def read_overlays(output: Path, setting: str = "") -> list[Overlay]:
    """Find the pictures of a run: in the folder ``overlays`` of its jobs, see `job_folders`.

    Those of a site outside are in ``outside/<site>/<adapter>/overlays`` of the same folder.

    Args:
        output: The output folder of an experiment.
        setting: The variation whose pictures are wanted; empty outside a sweep.

    Returns:
        The pictures of each algorithm's first fold and lowest seed at a site, by site, inside
        before outside, algorithm, model, rank and case.

    Raises:
        DataError: An index cannot be read.
    """
    found: list[Overlay] = []
    for job, (where, folder) in product(job_folders(output, setting), _FOLDERS.items()):
        place = job.relative_to(output).parts[:-2]
        for index in job.glob(f"{folder}/{INDEX}"):
            found += _read_index(index, job, place, where)
    jobs = sorted(((o.seed, o.place), (o.site, o.where, o.algorithm)) for o in found)
    first = {key: job for job, key in reversed(jobs)}
    kept = [o for o in found if (o.seed, o.place) == first[o.site, o.where, o.algorithm]]
    return sorted(kept, key=_order)


def _read_index(index: Path, job: Path, place: tuple[str, ...], where: Where) -> list[Overlay]:
    seed = int(job.name.removeprefix("seed-"))
    try:
        entries, digests = read_index(index.parent)
        return [
            Overlay(
                entry["site"], job.parent.name, seed, entry["model"], entry["rank"], entry["case"],
                entry["metric"], entry["value"], index.parent / entry["file"],
                {key: index.parent / name for key, name in entry.get("layers", {}).items()}, place,
                where, digests,
            )
            for entry in entries
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{index}: this is not an index of overlays ({error!r}); remove the folder "
            "to make a report without its pictures."
        ) from error


def _order(o: Overlay) -> tuple[Any, ...]:
    rank = RANKS.index(o.rank) if o.rank in RANKS else len(RANKS)
    return o.site, o.where, *position((o.algorithm, o.model), ())[1:], rank, o.case


@dataclass(frozen=True)
class EmbeddedPicture:
    """A case as the page shows it.

    Attributes:
        overlay: The picture that the run stored.
        size: Width and height in pixels.
        layers: Name of the layer -> name of its rule; the flat picture is the layer "image".
    """

    overlay: Overlay
    size: tuple[int, int]
    layers: Mapping[str, str]


@dataclass(frozen=True)
class _EncodedImage:
    """A picture as bytes of a web format ("webp" or "png"), with its width and height in pixels."""

    data: bytes
    kind: str
    size: tuple[int, int]


class PictureSheet:
    """The style sheet of the pictures of a page: a rule for each different one."""

    def __init__(self, budget: int = BUDGET) -> None:
        self._left = budget
        self._found: dict[bytes, tuple[str, _EncodedImage]] = {}

    @property
    def css(self) -> str:
        """The rules."""
        return "\n".join(
            f'.{name}{{background-image:url("data:image/{found.kind};base64,'
            f'{base64.b64encode(found.data).decode()}")}}'
            for name, found in self._found.values()
        )

    def add(self, overlay: Overlay) -> EmbeddedPicture | None:
        """Embed the picture of a case.

        Args:
            overlay: The picture.

        Returns:
            The picture, or None if the budget is used up.

        Raises:
            DataError: A file is absent, damaged or not a picture.
        """
        files = overlay.layers if "image" in overlay.layers else {"image": overlay.file}
        digests: dict[str, bytes] = {}
        new: dict[bytes, _EncodedImage] = {}
        for name, path in files.items():
            try:
                content = read_picture(path, overlay.digests)
                digest = digests[name] = hashlib.sha256(content).digest()
                if digest not in self._found and digest not in new:
                    new[digest] = _encode(content)
            except OSError as error:
                raise DataError(
                    f"{path}: the overlay cannot be read ({error}); remove its folder to make a "
                    "report without its pictures."
                ) from error
        cost = MARKUP + sum(len(found.data) for found in new.values())
        if cost > self._left:
            return None
        self._left -= cost
        for digest, found in new.items():
            self._found[digest] = (f"p{len(self._found)}", found)
        names = {name: self._found[digest][0] for name, digest in digests.items()}
        return EmbeddedPicture(overlay, self._found[digests["image"]][1].size, names)


def _encode(content: bytes) -> _EncodedImage:
    """Return a picture in a format of the web; its longer side has at most 512 pixels.

    One that is in such a format already stays as it is unless it is large.
    """
    from PIL import Image

    with Image.open(BytesIO(content)) as picture:
        large, kind = max(picture.size) > LARGEST, (picture.format or "").lower()
        if not large and (kind == "webp" or (kind == "png" and picture.mode == "P")):
            return _EncodedImage(content, kind, picture.size)
        converted = picture.convert("RGBA" if picture.mode in ("P", "RGBA") else "RGB")
        converted.thumbnail((LARGEST, LARGEST))
        return _EncodedImage(*encode_for_web(converted), converted.size)
