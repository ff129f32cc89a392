"""Writes the results of attacks: numbers, tables, sentences and, where they may be, pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd
import torch

from collegium import __version__
from collegium.core.files import write_atomically
from collegium.core.seals import digest_of, seal_json
from collegium.data.federation_config import expand_root
from collegium.data.phantoms import is_phantom
from collegium.diagnostics.attacks.defences import NONE, UNITS
from collegium.diagnostics.attacks.inversion import DEFAULT, Inversion
from collegium.diagnostics.attacks.measurement import (
    COMPARED,
    InversionResult,
    invert_sent,
)
from collegium.diagnostics.attacks.membership import (
    ALL_SITES,
    MembershipResult,
    infer_memberships,
)
from collegium.evaluation.formats import aligned, markdown_table
from collegium.evaluation.report.attacks import FOLDER
from collegium.evaluation.report.overlays import encode_png
from collegium.evaluation.results import frame_to_csv
from collegium.evaluation.wording import DASH, name_in_sentence, title
from collegium.experiment.config.experiment import ExperimentConfig

SIDE = 192
"""Pixels of a small image's longer side in a picture, at least."""

GAIN = 1.0
"""An attack that beats a constant guess by fewer dB, after scale and offset, rebuilds nothing."""

CERTAIN = 0.05
"""The largest p of a membership attack that is said to tell something."""

HEADS = {
    "inversion": ["algorithm", "site", "defence", "numbers sent", "PSNR (dB)", "SSIM",
                  "correlation", "fitted PSNR (dB)", "fitted SSIM", "constant guess (dB)",
                  "mask Dice"],
    "membership": ["algorithm", "seed", "site", "model", "attack", "AUC", "p",
                   "members found", "at false positives", "members", "others", "test score"],
    "shared": ["algorithm", "site", "part", "of", "attack", "numbers", "PSNR (dB)", "SSIM",
               "correlation", "fitted PSNR (dB)", "own images (dB)", "constant guess (dB)"],
}  # fmt: skip
"""The heads of the tables, by kind of attack."""

WORDS = {"inversion": 3, "membership": 5, "shared": 5}
"""How many columns, from the left, hold words, by kind of attack."""


@dataclass(frozen=True)
class Written:
    """The results of attacks, written.

    Attributes:
        folder: where.
        table: for a terminal.
        sentences: what the numbers say.
    """

    folder: Path
    table: str
    sentences: Sequence[str]


def write_inversion(
    config: ExperimentConfig,
    settings: Inversion = DEFAULT,
    *,
    sites: Sequence[str] = (),
    defences: Sequence[str] = COMPARED,
    case: int = 0,
    batch: int = 1,
    local_steps: int = 1,
    pictures: bool = False,
    notice: Callable[[str], None] = lambda text: None,
) -> Written:
    """Invert what is sent, and write ``inversion.json``, ``.csv``, ``.md`` and ``.txt``.

    They go into the folder ``attack`` of the experiment's output folder. Pictures, the true image
    on the left and the rebuilt one on the right, are drawn of phantoms only, unless asked for:
    those of patients do not belong into a folder that others see. Of a batch the first is drawn.

    Args:
        config: the experiment.
        settings: see `invert_sent`, as are those below.
        sites: whose images.
        defences: which are compared.
        case: the number of the training case.
        batch: how many cases the site's batch holds.
        local_steps: how many steps a site takes.
        pictures: whether pictures are drawn of other images than phantoms too.
        notice: called with a sentence before each attack.

    Raises:
        StorageError: a file cannot be written.
        CollegiumError: what `invert_sent` raises.
    """
    folder, found, left_out = Path(config.output) / FOLDER, list[InversionResult](), list[str]()
    pictured = list[dict[str, str]]()
    drawn = may_draw(config, asked=pictures)
    for attacked in invert_sent(
        config, settings, sites=sites, defences=defences, case=case, batch=batch,
        local_steps=local_steps, notice=notice, left_out=left_out.append,
    ):  # fmt: skip
        result = attacked.result
        found.append(result)
        if drawn:
            words = [result.algorithm, result.site, result.defence]
            shows = inversion_sentence(result, local_steps, settings, batch)
            pictured.append(write_picture(folder, words, [attacked.truth, attacked.image], shows))
    about = {
        "experiment": config.name, "federation": config.federation.name, "seed": config.seeds[0],
        "case": case, "batch": batch, "local_steps": local_steps, "settings": asdict(settings),
        "left_out": left_out,
    }  # fmt: skip
    rows = [_inversion_row(result) for result in found]
    sentences = [inversion_sentence(result, local_steps, settings, batch) for result in found]
    sentences += left_out
    return write_results(folder, "inversion", about, found, rows, sentences, pictured)


def write_membership(output: Path, *, shadows: int = 0, fpr: float = 0.01) -> Written:
    """Infer memberships, and write ``membership.json``, ``.csv``, ``.md`` and ``.txt``.

    They go into the folder ``attack`` of the run. See `infer_memberships` for the arguments.

    Raises:
        StorageError: a file cannot be written.
        CollegiumError: what `infer_memberships` raises.
    """
    found = infer_memberships(output, shadows=shadows, fpr=fpr)
    rows = [_membership_row(result) for result in found]
    sentences = membership_sentences(found)
    return write_results(
        output / FOLDER, "membership", {"shadows": shadows}, found, rows, sentences
    )


def write_results(
    folder: Path,
    kind: str,
    about: Mapping[str, Any],
    found: Iterable[Any],
    rows: Sequence[Sequence[str]],
    sentences: Sequence[str],
    pictures: Sequence[Mapping[str, str]] = (),
) -> Written:
    """Write the results of one kind of attack as data, tables and sentences.

    The data are what `collegium.evaluation.report.attacks.read_attacks` reads.

    Args:
        folder: where.
        kind: of attack, the files' name.
        about: what else the data say.
        found: the results, dataclasses.
        rows: the table's, a row for each result.
        sentences: what the numbers say.
        pictures: what `write_picture` returned of each that was drawn.

    Raises:
        StorageError: a file cannot be written.
    """
    results = [asdict(result) for result in found]
    data = {
        "collegium": __version__, **about, "results": results, "sentences": sentences,
        "table": [HEADS[kind], *rows], "pictures": pictures,
    }  # fmt: skip
    lines, left = [HEADS[kind], *rows], WORDS[kind]
    table = "\n".join(aligned(lines, left=left))
    texts = {
        "json": seal_json(json.dumps(data, indent=1)),
        "csv": frame_to_csv(pd.json_normalize(results)).encode(),
        "md": "\n".join(
            [markdown_table(lines, HEADS[kind][:left]), "", *(f"- {s}" for s in sentences), ""]
        ).encode(),
        "txt": "\n".join([table, "", *sentences, ""]).encode(),
    }
    for ending, content in texts.items():
        write_atomically(folder / f"{kind}.{ending}", content)
    return Written(folder, table, sentences)


def _inversion_row(result: InversionResult) -> list[str]:
    like = result.likeness
    return [
        result.algorithm, result.site, result.defence, f"{result.sent} of {result.trained}",
        f"{like.psnr:.1f}", f"{like.ssim:.2f}", f"{like.correlation:.2f}",
        f"{like.fitted_psnr:.1f}", f"{like.fitted_ssim:.2f}", f"{like.blank_psnr:.1f}",
        "" if result.mask_dice is None else f"{result.mask_dice:.2f}",
    ]  # fmt: skip


def _membership_row(result: MembershipResult) -> list[str]:
    found = result.found
    return [
        result.algorithm, str(result.seed), result.site, result.model, result.attack,
        f"{found.auc:.3f}", f"{found.p:.3g}", f"{found.tpr:.1%}", f"{found.fpr:.1%}",
        str(found.members), str(found.others),
        DASH if result.score is None else f"{title(result.metric)} {result.score:.3f}",
    ]  # fmt: skip


def inversion_sentence(
    result: InversionResult, local_steps: int, settings: Inversion, batch: int = 1
) -> str:
    """Return in a sentence what an inversion has rebuilt.

    Args:
        result: the result.
        local_steps: how many steps the site took.
        settings: the settings of the attack.
        batch: how many images there were.
    """
    like, steps = result.likeness, "one step" if local_steps == 1 else f"{local_steps} steps"
    if settings.label == "known":
        label = "who knows the label"
    elif settings.label == "unknown":
        label = "who does not know the mask"
    else:
        label = "who infers the label" if result.label_right else "who infers a wrong label"
    images, it = ("one image", "it") if batch == 1 else (f"{batch} images", "them")
    after = "" if result.defence == NONE else f", after {_defence(result.defence)}"
    start = f"From what {result.algorithm} sends of {images} of {result.site} in {steps}{after}, "
    if like.fitted_psnr < like.blank_psnr + GAIN:
        return (
            f"{start}this attacker, {label}, rebuilds nothing (PSNR {like.psnr:.1f} dB; a constant "
            f"guess has {like.blank_psnr:.1f} dB)."
        )
    dice = result.mask_dice
    mask = "" if dice is None else f", and the mask with a Dice of {dice:.2f}"
    return (
        f"{start}an attacker {label} rebuilds {it} with PSNR {like.psnr:.1f} dB and SSIM "
        f"{like.ssim:.2f} (a constant guess has {like.blank_psnr:.1f} dB){mask}."
    )


def _defence(name: str) -> str:
    """Return a defence in words; see `defence_of`."""
    words = {
        "clip": "clipping to the norm {}",
        "noise": "noise of {} times the norm",
        "dp": "noise of the multiplier {}",
    }
    parts = [part.strip().partition(" ") for part in name.split("+")]
    return " and ".join(
        words[word].format(number) if word in UNITS else f"the codec {word}"
        for word, _, number in parts
    )


def membership_sentences(results: Sequence[MembershipResult]) -> list[str]:
    """Return what membership attacks tell: a sentence for each algorithm, model and attack.

    It is about all sites where there are several, and about all trainings.

    Args:
        results: the results of a run.
    """
    groups = dict[tuple[str, str, str], list[MembershipResult]]()
    for result in results:
        groups.setdefault((result.algorithm, result.model, result.attack), []).append(result)
    return [_membership_sentence(group) for group in groups.values()]


def _membership_sentence(group: Sequence[MembershipResult]) -> str:
    """Return the sentence on the results of one attack on one model of an algorithm."""
    whole = [result for result in group if result.site == ALL_SITES] or group
    first, aucs = whole[0], [result.found.auc for result in whole]
    telling = sum(result.found.p <= CERTAIN for result in whole)
    tells = "tells" if telling == len(whole) else "does not clearly tell"
    if 0 < telling < len(whole):
        tells = f"tells in {telling} of {len(whole)} trainings"
    by = "the loss" if first.attack == "threshold" else "the likelihood ratio"
    place = "Over all sites" if first.site == ALL_SITES else f"At {first.site}"
    auc = f"AUC {fmean(aucs):.2f}"
    if len(whole) > 1:
        auc += f" ({min(aucs):.2f} to {max(aucs):.2f} in {len(whole)} trainings)"
    text = (
        f"{place}, {by} under the {first.model} model of {first.algorithm} {tells} training "
        f"patients from others: {auc}, p {'up to ' if len(whole) > 1 else ''}"
        f"{max(result.found.p for result in whole):.2g}, "
        f"{_range([result.found.members for result in whole])} members and "
        f"{_range([result.found.others for result in whole])} others."
    )
    scores = [result.score for result in whole if result.score is not None]
    if not scores:
        return text
    name = name_in_sentence(first.metric)
    return f"{text} Its {name} on test patients is {fmean(scores):.3f}."


def _range(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low} to {high}"


def may_draw(config: ExperimentConfig, *, asked: bool) -> bool:
    """Return whether pictures of an experiment's images are drawn: of phantoms, or if asked for.

    Args:
        config: the experiment.
        asked: whether pictures are asked for, of whatever images.
    """
    return asked or is_phantom(expand_root(config.federation.root))


def write_picture(
    folder: Path, words: Sequence[str], images: Sequence[torch.Tensor], shows: str
) -> dict[str, str]:
    """Write images beside one another, and return what the results say of the picture.

    Args:
        folder: where.
        words: what names the file.
        images: see `side_by_side`.
        shows: what the picture shows, in a sentence.

    Raises:
        StorageError: it cannot be written.
    """
    name = f"{'-'.join(' '.join(words).replace('+', '').split())}.png"
    picture = side_by_side(images)
    write_atomically(folder / name, picture)
    return {"file": name, "sha256": digest_of(picture), "shows": shows}


def side_by_side(images: Sequence[torch.Tensor]) -> bytes:
    """Return images in a row as a PNG, in the range of the first one.

    Of a volume the middle slice is drawn, of several channels the first.

    Args:
        images: (1, C, *spatial) each, of one shape.
    """
    from PIL import Image

    planes = [_plane(image) for image in images]
    low, high = float(planes[0].min()), float(planes[0].max())
    scaled = (np.hstack(planes) - low) / max(high - low, 1e-12)
    picture = Image.fromarray((np.nan_to_num(scaled).clip(0, 1) * 255).round().astype(np.uint8))
    factor = max(1, -(-SIDE // max(planes[0].shape)))
    size = picture.width * factor, picture.height * factor
    return encode_png(picture.resize(size, Image.Resampling.NEAREST))


def _plane(image: torch.Tensor) -> np.ndarray[Any, Any]:
    plane = image[0, 0].detach().cpu().numpy()
    return plane if plane.ndim == 2 else plane[..., plane.shape[-1] // 2]
